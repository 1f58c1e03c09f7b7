"""Shared experts are found by what they compute, and nothing else beside a layer is taken for one."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moefuse.ops.activations import CUSTOM
from moefuse.patterns.facts import Const
from moefuse.patterns.site import Site
from moefuse.testing.capture import capture_graph
from tests.patterns.spelling import H, Study, T, gathered, grouped, operands, swiglu

X = operands()[0]
J = 40
"""Hidden features of the shared expert, other ones than those of the experts."""


class Model(nn.Module):
    """A function of the token rows and of these weights."""

    def __init__(self, function: Callable[["Model", Tensor], object]) -> None:
        super().__init__()
        self.function = function
        _, self.ids, self.w, self.w1, self.w2 = map(self._kept, operands())
        generator = torch.Generator().manual_seed(1)
        shapes = {"gate": (J, H), "up": (J, H), "down": (H, J), "both": (2 * J, H), "score": (1, H)}
        shapes |= {"square": (H, H), "bias": (J,), "other_rows": (T, H)}
        for name, shape in shapes.items():
            drawn = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            setattr(self, name, self._kept(drawn.bfloat16()))

    def _kept(self, tensor: Tensor) -> nn.Parameter:
        return nn.Parameter(tensor, requires_grad=False)

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)

    def layer(self, x: Tensor, w1: Tensor | None = None) -> Tensor:
        return grouped(x, self.ids, self.w, self.w1 if w1 is None else w1, self.w2)

    def dense(self, x: Tensor) -> Tensor:
        return (functional.silu(x @ self.gate.t()) * (x @ self.up.t())) @ self.down.t()

    def concat(self, x: Tensor) -> Tensor:
        return functional.linear(swiglu(functional.linear(x, self.both)), self.down)

    def onto(self, x: Tensor) -> Tensor:
        """Expert rows added onto the shared expert's."""
        flat, perm = self.ids.reshape(-1).sort(stable=True)
        h1 = torch.einsum("sh,soh->so", x[perm // 2], self.w1[flat])
        rows = torch.einsum("si,soi->so", swiglu(h1), self.w2[flat]) * self.w.reshape(-1)[perm].unsqueeze(1)
        return self.dense(x).index_add(0, perm // 2, rows)


Function = Callable[[Model, Tensor], object]


def looked(function: Function, x: Tensor = X) -> Study:
    captured = capture_graph(Model(function), (x,))
    return Study(captured.graph_module, captured.inputs)


WAYS: dict[str, Function] = {
    "after the layer": lambda m, x: m.layer(x) + m.dense(x),
    "before the layer": lambda m, x: m.dense(x) + m.layer(x),
    "rows added onto it": Model.onto,
    "in place": lambda m, x: m.layer(x).add_(m.dense(x)),
    "another shape": lambda m, x: m.layer(x).view(2, 3, H) + m.dense(x.view(2, 3, H)),
    "three dimensions": lambda m, x: m.layer(x)[None] + m.concat(x[None]),
    "scaled": lambda m, x: m.layer(x) * 2.5 + m.dense(x) * 0.5,
    "after a residual": lambda m, x: m.layer(x) + x + m.dense(x),
    "in float32": lambda m, x: m.layer(x).float() + m.dense(x).float(),
    "no-ops": lambda m, x: m.layer(x) + (m.dense(x.clone()[:T] * 1.0).view(1, T, H) + 0.0).squeeze(0),
    "weighted by a sigmoid": lambda m, x: m.layer(x) + torch.sigmoid(x @ m.score.t()) * m.dense(x),
    "other shapes inside": lambda m, x: m.layer(x) + m.dense(x.view(3, 2, H)).view(T, H),
    "tokens in another order": lambda m, x: m.layer(x) + m.dense(x.flip(0)),
    "weighted by a norm": lambda m, x: m.layer(x) + m.dense(x) * x.norm(dim=-1, keepdim=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_found_however_it_is_added(way: str) -> None:
    result = looked(WAYS[way])
    (expert,) = result.site.shared
    assert isinstance(expert, Site), expert.reason
    spec = expert.spec
    assert (spec.num_experts, spec.top_k, spec.hidden, spec.intermediate, spec.out_features) == (
        1,
        1,
        H,
        J,
        H,
    )
    assert (spec.activation, spec.gated, spec.ids_checked) == ("swiglu", True, True)
    assert spec.has_router_weight == ("weighted" in way)
    assert expert.layer.ids == Const(0.0)
    (verdict,) = result.fused().report.sites[0].shared
    assert verdict.fused, verdict.reason


def test_one_token_has_no_token_axis() -> None:
    def model(m: Model, x: Tensor) -> Tensor:
        y = gathered(x, m.ids[:1], m.w[:1], m.w1, m.w2)
        return y + torch.sigmoid(x @ m.score.t()) * m.dense(x)

    result = looked(model, X[:1])
    (expert,) = result.site.shared
    assert isinstance(expert, Site)
    assert expert.spec.has_router_weight
    assert result.fused().report.sites[0].shared[0].fused


FORMS: dict[str, tuple[Function, dict[str, object]]] = {
    "gate and up in one": (Model.concat, {"gate_up": "concat"}),
    "separate": (Model.dense, {"gate_up": "separate"}),
    "up first": (
        lambda m, x: ((h := x @ m.both.t())[:, :J] * functional.silu(h[:, J:])) @ m.down.t(),
        {"gate_up": "concat_swapped"},
    ),
    "plain": (lambda m, x: functional.relu(x @ m.up.t()).square() @ m.down.t(), {"activation": "relu2"}),
    "biases": (
        lambda m, x: functional.linear(functional.gelu(functional.linear(x, m.gate, m.bias)), m.down, m.bias[:H]),
        {"activation": "gelu", "has_bias1": True, "has_bias2": True},
    ),
    "inputs first": (lambda m, x: functional.silu(x @ m.down) @ m.gate, {"transpose_weight1": False}),
    "a program": (lambda m, x: torch.floor(x @ m.gate.t()) @ m.down.t(), {"activation": CUSTOM}),
    "tied weights": (lambda m, x: functional.silu(x @ m.gate.t()) @ m.gate, {"transpose_weight2": False}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_its_specification_is_read_from_the_graph(form: str) -> None:
    function, wanted = FORMS[form]
    result = looked(lambda m, x: m.layer(x) + function(m, x))
    (expert,) = result.site.shared
    assert isinstance(expert, Site), expert.reason
    assert {name: getattr(expert.spec, name) for name in wanted} == wanted
    assert result.fused().report.sites[0].shared[0].fused


def test_several_are_all_found() -> None:
    experts = looked(lambda m, x: m.layer(x) + m.dense(x) + m.concat(x)).site.shared
    assert [isinstance(expert, Site) and expert.spec.gate_up for expert in experts] == ["separate", "concat"]


NOT_BESIDE: dict[str, Function] = {
    "nothing": Model.layer,
    "a residual": lambda m, x: m.layer(x) + x,
    "one product": lambda m, x: m.layer(x) + x @ m.square,
    "rows of another tensor": lambda m, x: m.layer(x) + m.dense(m.other_rows),
    "the layer's own output": lambda m, x: (y := m.layer(x)) + m.dense(y),
    "apart": lambda m, x: (m.layer(x), m.dense(x)),
    "multiplied": lambda m, x: m.layer(x) * m.dense(x),
    "another layer": lambda m, x: m.layer(x) + m.layer(x, m.w1.flip(0)),
}


@pytest.mark.parametrize("what", NOT_BESIDE)
def test_what_is_no_shared_expert(what: str) -> None:
    sites = looked(NOT_BESIDE[what]).lifted.sites
    assert sites
    assert not any(site.shared for site in sites)


LEFT: dict[str, tuple[Function, str, str]] = {
    "three products": (lambda m, x: m.dense(x) @ m.square, "lift", "rows are the outputs of other experts"),
    "gate and up the same": (
        lambda m, x: (functional.silu(x @ m.gate.t()) * (x @ m.gate.t())) @ m.down.t(),
        "lift",
        "gate and up read the same weight",
    ),
    "other rows for the gate": (
        lambda m, x: (functional.silu(m.other_rows @ m.gate.t()) * (x @ m.up.t())) @ m.down.t(),
        "lift",
        "weighs expert outputs by more than the slot",
    ),
    "attention": (lambda m, x: torch.softmax(x @ x.t(), -1) @ x, "lift", "each expert is one product"),
    "results in another order": (lambda m, x: m.dense(x).roll(1, 0), "lift", "a product of 0 expert outputs"),
    "one number": (lambda m, x: m.dense(x).mean(), "lift", "doesn't have one row per token"),
    "weighted by feature": (
        lambda m, x: torch.sigmoid(x @ m.square) * m.dense(x),
        "lift",
        "a product of 2 expert outputs",
    ),
    "weights made from the tokens": (
        lambda m, x: functional.silu(x @ (m.gate @ x.t() @ x).t()) @ m.down.t(),
        "lift",
        "the weights of `mm_2` are not selected by the routing",
    ),
    "a norm of its rows": (
        lambda m, x: functional.rms_norm(m.dense(x), (H,)),
        "lift",
        "made from themselves",
    ),
    "a norm of hidden rows": (
        lambda m, x: functional.rms_norm(functional.silu(x @ m.gate.t()), (J,)) @ m.down.t(),
        "lift",
        "made from themselves",
    ),
    "what doubles with each step": (
        lambda m, x: functools.reduce(lambda h, _: h * torch.sigmoid(h), range(12), x @ m.gate.t()) @ m.down.t(),
        "lift",
        "more than 256 tensors",
    ),
    "a scatter": (
        lambda m, x: m.dense(x).scatter(1, torch.zeros(T, 1, dtype=torch.int64), 1.0),
        "lift",
        "a product of 0 expert outputs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT)
def test_what_is_not_understood_is_left_with_its_reason(what: str) -> None:
    function, check, words = LEFT[what]
    report = looked(lambda m, x: m.layer(x) + function(m, x)).fused().report
    (verdict,) = report.sites[0].shared
    assert (verdict.fused, verdict.check) == (False, check)
    assert words in verdict.reason
    assert "left to the inner compiler" in str(report)
