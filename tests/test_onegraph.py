"""moefuse.compile: loops over experts end in one graph, and the model object stays as it was."""

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moefuse
from moefuse import hf
from moefuse.onegraph import compile as compile_moe

H, INNER, E, K = 32, 16, 4, 2
# Sums in another order: float32 noise is about 1e-7 of the norm.
FP32 = 1e-5


class Expert(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(H, INNER, bias),
            nn.Linear(H, INNER, bias),
            nn.Linear(INNER, H, bias),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Loop(nn.Module):
    """A loop over a list of experts; `style` says how an expert's tokens are found and written back."""

    def __init__(self, style: str, experts: int = E, bias: bool = False, skipped: int = -1) -> None:
        super().__init__()
        self.style, self.skipped = style, skipped
        self.router = nn.Linear(H, experts, bias=False)
        self.experts = nn.ModuleList(Expert(bias) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        one_hot = F.one_hot(ids, len(self.experts)).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            if e == self.skipped:
                continue
            if self.style == "index_add":
                slot, token = torch.where(one_hot[e])
                y.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            else:
                token, slot = torch.where(ids == e)
                rows = weights[token, slot, None] * expert(x[token])
                if self.style == "overwrite":
                    y[token] = rows
                else:
                    y[token] += rows
        return y


class Stacked(nn.Module):
    """A loop that takes each expert's matrices out of stacked parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.w1, self.w2 = (
            nn.Parameter(torch.randn(E, 2 * INNER, H) / 6),
            nn.Parameter(torch.randn(E, H, INNER) / 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        y = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], self.w1[e]).chunk(2, -1)
            y.index_add_(0, token, F.linear(F.silu(gate) * up, self.w2[e]) * weights[token, slot, None])
        return y


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("style", ["index_add", "add"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_where_loop_is_one_node(style: str, bias: bool) -> None:
    model = Loop(style, bias=bias).eval()
    fused = compile_moe(model, inner="eager")
    with torch.no_grad():
        for tokens in (10, 23, 1):
            x = torch.randn(tokens, H)
            assert error(fused(x), model(x)) < FP32
    report = moefuse.reports()[-1]
    assert [site.fused for site in report.graphs[0].sites] == [True]
    spec = report.sites[0].spec
    assert spec is not None
    assert (spec.num_experts, spec.weight_form, spec.has_bias1) == (E, "list", bias)


def test_stacked_parameters_are_taken_whole() -> None:
    model = Stacked().eval()
    x = torch.randn(9, H)
    with torch.no_grad():
        assert error(compile_moe(model, inner="eager")(x), model(x)) < FP32
    (site,) = moefuse.reports()[-1].sites
    assert site.fused
    assert site.spec is not None


def test_a_loop_compiled_by_inductor() -> None:
    model = Loop("index_add").eval()
    x = torch.randn(11, H)
    with torch.no_grad():
        assert error(compile_moe(model)(x), model(x)) < FP32
    assert moefuse.reports()[-1].fused == 1


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Loop("index_add", skipped=1), "adds expert 1 0 times"),
        (Loop("overwrite"), "overwrite what earlier experts have added"),
    ],
    ids=["an expert left out", "overwritten"],
)
def test_a_loop_that_is_no_layer_is_refused(model: Loop, reason: str) -> None:
    x = torch.randn(12, H)
    with torch.no_grad():
        assert error(compile_moe(model.eval(), inner="eager")(x), model(x)) < FP32
    report = moefuse.reports()[-1]
    assert report.fused == 0
    assert any(reason in site.reason for site in report.sites), report


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_the_eager_loop_of_a_transformers_model(model_type: str) -> None:
    model, kwargs = hf.build(model_type, experts_implementation="eager")
    with torch.no_grad():
        want = model(**kwargs).logits
        got = compile_moe(model, inner="eager")(**kwargs).logits
    assert error(got, want) < FP32
    report = moefuse.reports()[-1]
    assert (len(report.graphs), report.fused, len(report.sites)) == (1, 2, 2)
    assert model.config._experts_implementation == "eager", "the model's own choice is restored"


def test_a_choice_of_the_user_is_kept() -> None:
    model, kwargs = hf.build("qwen3_moe", experts_implementation="batched_mm")
    with torch.no_grad():
        compile_moe(model, inner="eager")(**kwargs)
    assert model.config._experts_implementation == "batched_mm"


def test_threads_switch_back_once_all_have_left() -> None:
    model, kwargs = hf.build("qwen3_moe", experts_implementation="eager")
    fused = compile_moe(model, inner="eager")
    with torch.no_grad():
        want = model(**kwargs).logits
    errors: list[float] = []

    def work() -> None:
        with torch.no_grad():
            errors.append(error(fused(**kwargs).logits, want))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert max(errors) < FP32
    assert model.config._experts_implementation == "eager"


def test_unknown_options_are_errors_at_once() -> None:
    with pytest.raises(moefuse.OptionError, match="did you mean 'target'"):
        compile_moe(nn.Identity(), tarket="cpu")


@torch.no_grad()
def test_without_a_model_it_is_a_decorator() -> None:
    model = Loop("add").eval()
    x = torch.randn(6, H)

    @compile_moe(inner="eager", mode="on", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    with torch.no_grad():
        torch.testing.assert_close(step(x), model(x), atol=FP32, rtol=FP32)
    assert moefuse.reports()[-1].fused == 1
    with pytest.raises(moefuse.OptionError, match="did you mean 'target'"):
        compile_moe(tarket="cpu")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dynamic": "yes"}, "dynamic: expected True, False or None, got 'yes'"),
        ({"fullgraph": 1}, "fullgraph: expected True or False, got 1"),
        (
            {"options": {"inner": "eager"}},
            "options: moefuse.compile takes each option as an argument of its own",
        ),
    ],
)
def test_wrong_arguments_are_named_at_once(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, moefuse.OptionError)) as caught:
        compile_moe(nn.Linear(2, 2), **wrong)
    assert str(caught.value) == message


def test_hooks_of_the_model_that_come_and_go_are_run() -> None:
    """Dynamo doesn't guard them, and they are in the compiled frame."""
    model, x = Stacked(), torch.randn(6, H)
    compiled = compile_moe(model, inner="eager")
    compiled(x)
    handle = model.register_forward_hook(lambda module, args, output: output + 1)
    torch.testing.assert_close(compiled(x), model(x))
    handle.remove()
    torch.testing.assert_close(compiled(x), model(x))
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    torch.testing.assert_close(compiled(x), model(x))
