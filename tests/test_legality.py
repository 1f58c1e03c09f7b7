"""What real models do around their MoE layers: every one of these is fused and stays right, or refused by name.

Router logits and auxiliary losses, counters, hooks, shared and tied and offloaded experts, LoRA, inference mode,
copies and pickles of a compiled model.
"""

import contextlib
import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import moefuse
from moefuse import hf
from tests.moe_model import E, Experts, H, I, K, Model, Routed

X = torch.randn(6, H, generator=torch.Generator().manual_seed(0))
LOGITS = torch.randn(6, E, generator=torch.Generator().manual_seed(1))
# The same float32 products summed in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# Gradients are sums over tokens of products as large as 1e2.
CLOSE_GRADIENTS = {"rtol": 1e-4, "atol": 1e-4}


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="moefuse", options={"inner": "eager", **options})


def check(model: Callable[..., Any], *inputs: Any, fused: int, graphs: int = 1) -> moefuse.Report:
    """Equal to eager, `fused` layers in `graphs` graphs and none refused."""
    known = len(moefuse.reports())
    wanted = model(*inputs)
    got = compiled(model)(*inputs)
    torch.testing.assert_close(got, wanted, **CLOSE)
    new = moefuse.reports()[known:]
    report = moefuse.Report(tuple(graph for each in new for graph in each.graphs))
    assert (report.fused, len(report.sites), len(report.graphs)) == (fused, fused, graphs), str(report)
    return report


# --- what routers give away ------------------------------------------------------------------------------


class Routes(nn.Module):
    """Also returns its logits, a load balancing loss and counts what each expert got."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E)
        self.experts = Experts()
        self.register_buffer("counts", torch.zeros(E, dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.router(x)
        probabilities = logits.softmax(-1)
        weights, ids = probabilities.topk(K)
        hits = nn.functional.one_hot(ids, E).sum((0, 1))
        self.counts.add_(hits)
        loss = E * (hits / hits.sum() * probabilities.mean(0)).sum()
        return self.experts(x, ids, weights), logits, loss


def test_logits_an_auxiliary_loss_and_token_counters() -> None:
    model = Routes()
    run = compiled(model)
    x = X.clone().requires_grad_()
    wanted = model(x)
    counted = model.counts.clone()
    grads = torch.autograd.grad(wanted[0].square().sum() + wanted[2], [x, *model.parameters()])
    got = run(x)
    assert torch.equal(model.counts, 2 * counted)
    assert int(counted.sum()) == X.shape[0] * K
    torch.testing.assert_close(got, wanted, **CLOSE)
    torch.testing.assert_close(
        torch.autograd.grad(got[0].square().sum() + got[2], [x, *model.parameters()]),
        grads,
        **CLOSE_GRADIENTS,
    )
    assert moefuse.reports()[-1].fused == 1


def test_a_transformers_model_with_its_auxiliary_loss() -> None:
    model, kwargs = hf.build("qwen3_moe", experts_implementation="grouped_mm")
    model.train()
    kwargs |= {"labels": kwargs["input_ids"], "output_router_logits": True, "use_cache": False}
    wanted = model(**kwargs)
    wanted.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    got = compiled(model)(**kwargs)
    got.loss.backward()
    assert float(wanted.aux_loss) > 0
    torch.testing.assert_close(got.loss, wanted.loss, **CLOSE)
    torch.testing.assert_close(got.aux_loss, wanted.aux_loss, **CLOSE)
    torch.testing.assert_close(got.router_logits, wanted.router_logits, rtol=1e-4, atol=1e-4)
    for name, p in model.named_parameters():
        if name in grads:
            torch.testing.assert_close(p.grad, grads[name], rtol=1e-3, atol=1e-4)
    assert moefuse.reports()[-1].fused == 2


# --- hooks -----------------------------------------------------------------------------------------------


def test_hooks_around_the_layer_still_run() -> None:
    model, seen = Model(), []
    model.layers[0].experts.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    model.layers[1].experts.register_forward_hook(lambda module, args, out: seen.append(out) or out + 1)
    report = check(model, X, fused=2)
    assert report.fused == 2
    assert len(seen) == 2, "once by eager, once by the compiled model"
    torch.testing.assert_close(seen[1], seen[0], **CLOSE)


def test_a_hook_that_keeps_expert_rows_keeps_them() -> None:
    """A row that somebody outside reads would be computed twice: the layer is left, and the report says who reads."""

    class Spied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts()
            self.down = nn.Identity()

        def forward(self, x: Tensor, logits: Tensor) -> Tensor:
            weights, ids = logits.topk(K)
            gate, up = torch.einsum("th,tkoh->tko", x, self.experts.w1[ids]).chunk(2, -1)
            rows = torch.einsum("tki,tkoi->tko", nn.functional.silu(gate) * up, self.experts.w2[ids])
            return (self.down(rows) * weights.unsqueeze(-1)).sum(1)

    model, seen = Spied().requires_grad_(False), []
    model.down.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(X, LOGITS), model(X, LOGITS), **CLOSE)
    (site,) = moefuse.reports()[-1].sites
    assert (site.fused, site.check) == (False, "escape")
    torch.testing.assert_close(seen[0], seen[1], **CLOSE)


# --- whose weights they are ------------------------------------------------------------------------------


def test_experts_shared_by_layers() -> None:
    model = Model()
    model.layers[1].experts = model.layers[0].experts
    check(model, X, fused=2)


def test_parameters_tied_across_layers_and_to_other_tensors() -> None:
    model = Model()
    model.layers[1].experts.w1 = model.layers[0].experts.w1  # one parameter, two layers
    # one memory
    model.layers[1].experts.w2 = nn.Parameter(model.layers[0].experts.w2.detach(), requires_grad=False)
    check(model, X, fused=2)
    with torch.no_grad():
        model.layers[0].experts.w2.mul_(-1)
    torch.testing.assert_close(compiled(model)(X), model(X), **CLOSE)


class LowRank(nn.Module):
    """w + b @ a, as LoRA does it to a stacked weight."""

    def __init__(self, w: Tensor, rank: int = 2) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(w.shape[0], rank, w.shape[2]))
        self.b = nn.Parameter(torch.randn(w.shape[0], w.shape[1], rank))

    def forward(self, w: Tensor) -> Tensor:
        return w + self.b @ self.a


@pytest.mark.parametrize("cached", [False, True])
def test_parametrised_weights_are_computed_once_per_call(cached: bool) -> None:
    model = Routed()
    for name in ("w1", "w2"):
        weight = getattr(model.experts, name)
        parametrize.register_parametrization(model.experts, name, LowRank(weight))
    model.requires_grad_(False)
    run, wanted = compiled(model), model(X, LOGITS)
    with parametrize.cached() if cached else contextlib.nullcontext():
        torch.testing.assert_close(run(X, LOGITS), wanted, **CLOSE)
        assert moefuse.reports()[-1].fused == 1
    with parametrize.cached() if cached else contextlib.nullcontext(), torch.profiler.profile() as profile:
        run(X, LOGITS)
    names = [event.name for event in profile.events()]
    assert names.count("aten::bmm") == 2, "one low-rank product per weight"
    with torch.no_grad():
        model.experts.parametrizations.w1[0].a.mul_(3)
    torch.testing.assert_close(run(X, LOGITS), model(X, LOGITS), rtol=1e-4, atol=1e-4)


def test_parametrised_weights_train() -> None:
    model = Routed()
    for name in ("w1", "w2"):
        parametrize.register_parametrization(model.experts, name, LowRank(getattr(model.experts, name)))
    trained = [p for name, p in model.named_parameters() if name.endswith((".a", ".b"))]
    for parameter in trained:
        parameter.requires_grad_()
    wanted = torch.autograd.grad(model(X, LOGITS).square().sum(), trained)
    got = torch.autograd.grad(compiled(model)(X, LOGITS).square().sum(), trained)
    assert moefuse.reports()[-1].fused == 1
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


class Offloaded(nn.Module):
    """The weights live elsewhere: in another dtype, in a mapped file, behind a call that fetches them."""

    def __init__(self, where: str, directory: Path) -> None:
        super().__init__()
        self.where = where
        w1, w2 = torch.randn(E, 2 * I, H) / H**0.5, torch.randn(E, H, I) / I**0.5
        if where == "file":
            for name, w in (("w1", w1), ("w2", w2)):
                mapped = torch.from_file(str(directory / name), shared=True, size=w.numel())
                setattr(self, name, nn.Parameter(mapped.view(w.shape).copy_(w), requires_grad=False))
        elif where == "half":
            self.register_buffer("w1", w1.half())
            self.register_buffer("w2", w2.half())
        else:
            self.store = {"w1": w1, "w2": w2}

    def weight(self, name: str) -> Tensor:
        if self.where == "store":
            return self.store[name].to("cpu", copy=True)
        return getattr(self, name).float()

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = logits.topk(K)
        gate, up = torch.einsum("th,tkoh->tko", x, self.weight("w1")[ids]).chunk(2, -1)
        rows = torch.einsum("tki,tkoi->tko", nn.functional.silu(gate) * up, self.weight("w2")[ids])
        return (rows * weights.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("where", ["file", "half", "store"])
def test_offloaded_weights(where: str, tmp_path: Path) -> None:
    check(Offloaded(where, tmp_path), X, LOGITS, fused=1)


# --- contexts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_inference_mode(inner: str) -> None:
    model = Routed()
    run = compiled(model, inner=inner)
    with torch.inference_mode():
        got = run(X, LOGITS)
        torch.testing.assert_close(got, model(X, LOGITS), **CLOSE)
    assert got.is_inference()
    assert moefuse.reports()[-1].fused == 1
    torch.testing.assert_close(run(X, LOGITS), model(X, LOGITS), **CLOSE)  # and outside of it again


def test_one_compiled_model_in_every_gradient_mode() -> None:
    model = Model(train=True)
    run = compiled(model)
    for context in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with context():
            torch.testing.assert_close(run(X), model(X), **CLOSE)
    assert all(site.fused for report in moefuse.reports()[-3:] for site in report.sites)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """Half precision as autocast makes it: the same roundings up to the order of sums."""
    model, kwargs = hf.build("qwen3_moe", experts_implementation="grouped_mm")
    with torch.no_grad(), torch.autocast("cpu", dtype):
        wanted, got = model(**kwargs).logits, compiled(model)(**kwargs).logits
    assert moefuse.reports()[-1].fused == 2
    assert float((got - wanted).norm() / wanted.norm()) < 4 * torch.finfo(dtype).eps


# --- copies ----------------------------------------------------------------------------------------------


def test_a_deepcopy_has_weights_of_its_own() -> None:
    run = compiled(Model())
    run(X)
    other = copy.deepcopy(run)
    with torch.no_grad():
        other.layers[0].experts.w1.mul_(-3)
    torch.testing.assert_close(other(X), other._orig_mod(X), **CLOSE)
    assert not torch.allclose(other(X), run(X), rtol=0.1)


def test_the_model_can_be_pickled_before_and_after() -> None:
    model = Model()
    wanted = model(X)
    for _ in range(2):
        loaded = pickle.loads(pickle.dumps(model))
        torch.testing.assert_close(compiled(loaded)(X), wanted, **CLOSE)
        compiled(model)(X)


def test_state_and_attributes_of_a_compiled_model_are_the_model_s() -> None:
    model = Model()
    run = moefuse.compile(model, inner="eager")
    torch.testing.assert_close(run(X), model(X), **CLOSE)
    assert moefuse.reports()[-1].fused == 2
    assert isinstance(run, nn.Module)
    assert run.layers[0] is model.layers[0]
    other = copy.deepcopy(run)
    with torch.no_grad():
        other.layers[0].experts.w1.mul_(-3)
    torch.testing.assert_close(run(X), model(X), **CLOSE)
    assert not torch.allclose(other(X), run(X), rtol=0.1), "the copy runs its own weights"
