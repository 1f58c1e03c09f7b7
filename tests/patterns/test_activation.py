"""Activations are named by what they compute: every spelling of a table entry, and nothing that only looks like it."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moefuse.ops.activations import ACTIVATIONS
from moefuse.patterns.activation import classify, constants
from moefuse.patterns.facts import Conflict
from tests.patterns.spelling import I, Study, gathered, operands, study

Gated = Callable[[Tensor, Tensor], Tensor]
Plain = Callable[[Tensor], Tensor]
Named = tuple[str, tuple[float, ...]]


def gated(act: Gated) -> Study:
    def forward(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return gathered(x, ids, weights, w1, w2, act=lambda h1: act(*h1.chunk(2, -1)))

    return study(forward, *operands(torch.float32))


def plain(act: Plain) -> Study:
    def forward(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return gathered(x, ids, weights, w1, w2, act=act)

    x, ids, weights, w1, w2 = operands(torch.float32)
    return study(forward, x, ids, weights, w1[:, :I].contiguous(), w2)


def oai(g: Tensor, u: Tensor, plus: float = 1) -> Tensor:
    """gpt-oss."""
    g, u = g.clamp(max=7), u.clamp(-7, 7)
    return (u + plus) * (g * torch.sigmoid(g * 1.702))


GATED: dict[str, tuple[Gated, Named]] = {
    "silu": (lambda g, u: functional.silu(g) * u, ("swiglu", ())),
    "silu, up first": (lambda g, u: u * functional.silu(g), ("swiglu", ())),
    "x sigmoid(x)": (lambda g, u: g * torch.sigmoid(g) * u, ("swiglu", ())),
    "x / (1 + exp(-x))": (lambda g, u: g / (1 + torch.exp(-g)) * u, ("swiglu", ())),
    "silu in float64": (lambda g, u: functional.silu(g.double()).float() * u, ("swiglu", ())),
    "clamped before": (
        lambda g, u: functional.silu(g.clamp(max=7.0)) * u.clamp(-7.0, 7.0),
        ("swiglu", (7.0,)),
    ),
    "clamped before, two calls": (
        lambda g, u: functional.silu(g.clamp_max(2.5)) * u.clamp_min(-2.5).clamp_max(2.5),
        ("swiglu", (2.5,)),
    ),
    "clamped after": (
        lambda g, u: functional.silu(g).clamp(max=7.0) * u.clamp(min=-7.0, max=7.0),
        ("swiglustep", (7.0,)),
    ),
    "gpt-oss": (oai, ("swigluoai", (7.0, 1.702, 1.0))),
    "gpt-oss, 1 + up": (
        lambda g, u: (1 + u.clamp(-7, 7)) * g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7)),
        ("swigluoai", (7.0, 1.702, 1.0)),
    ),
    "gpt-oss without the one": (lambda g, u: oai(g, u, 0), ("swigluoai", (7.0, 1.702, 0.0))),
    "situ": (
        lambda g, u: 2 * torch.tanh(g / 2) * torch.sigmoid(g) * (3 * torch.tanh(u / 3)),
        ("situglu", (2.0, 3.0)),
    ),
    "gelu": (lambda g, u: functional.gelu(g) * u, ("geglu", ())),
    "gelu by erf": (lambda g, u: 0.5 * g * (1 + torch.erf(g / math.sqrt(2))) * u, ("geglu", ())),
    "gelu tanh": (lambda g, u: functional.gelu(g, approximate="tanh") * u, ("geglu_tanh", ())),
    "gelu by tanh": (
        lambda g, u: 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u,
        ("geglu_tanh", ()),
    ),
    "quick gelu": (lambda g, u: g * torch.sigmoid(1.702 * g) * u, ("quick_geglu", ())),
    "relu": (lambda g, u: functional.relu(g) * u, ("reglu", ())),
    "relu squared": (lambda g, u: functional.relu(g) ** 2 * u, ("relu2glu", ())),
    "relu(x) x": (lambda g, u: functional.relu(g) * g * u, ("relu2glu", ())),
    "sigmoid": (lambda g, u: torch.sigmoid(g) * u, ("sigmoidglu", ())),
    "up / (1 + exp(-gate))": (lambda g, u: u / (1 + torch.exp(-g)), ("sigmoidglu", ())),
    "bilinear": (lambda g, u: g * u, ("bilinear", ())),
}

PLAIN: dict[str, tuple[Plain, str]] = {
    "silu": (functional.silu, "silu"),
    "x sigmoid(x)": (lambda g: g.sigmoid() * g, "silu"),
    "gelu": (functional.gelu, "gelu"),
    "gelu tanh": (lambda g: functional.gelu(g, approximate="tanh"), "gelu_tanh"),
    "quick gelu": (lambda g: g * torch.sigmoid(1.702 * g), "quick_gelu"),
    "relu": (functional.relu, "relu"),
    "relu squared": (lambda g: functional.relu(g).square(), "relu2"),
    "relu to the power of 2": (lambda g: functional.relu(g).pow(2), "relu2"),
    "sigmoid": (torch.sigmoid, "sigmoid"),
    "tanh": (torch.tanh, "tanh"),
    "2 sigmoid(2 x) - 1": (lambda g: 2 * torch.sigmoid(2 * g) - 1, "tanh"),
    "identity": (lambda g: g, "identity"),
    "nothing": (lambda g: g * 1.0 + 0.0, "identity"),
}

CUSTOM_GATED: dict[str, Gated] = {
    "soft capped": lambda g, u: functional.silu(torch.tanh(g / 1.5) * 1.5) * u,
    "1 + up": lambda g, u: functional.silu(g) * (1 + u),
    "lopsided clamp": lambda g, u: functional.silu(g.clamp(max=7.0)) * u.clamp(-7.0, 6.0),
    "clamp on the gate only": lambda g, u: functional.silu(g.clamp(max=7.0)) * u,
    "clamp far out": lambda g, u: functional.silu(g.clamp(max=2e4)) * u,
    "gate clamped from below too": lambda g, u: functional.silu(g.clamp(-7.0, 7.0)) * u.clamp(-7.0, 7.0),
    "half": lambda g, u: functional.silu(g) * u * 0.5,
    "sum": lambda g, u: functional.silu(g) + u,
    "one more": lambda g, u: functional.silu(g) * u + 1,
    "leaky": lambda g, u: functional.leaky_relu(g) * u,
    "almost quick": lambda g, u: g * torch.sigmoid(1.7 * g) * u,
    "tanh": lambda g, u: torch.tanh(g) * u,
    "truncated": lambda g, u: functional.silu(g.int().float()) * u,
}

CUSTOM_PLAIN: dict[str, Plain] = {
    "elu": functional.elu,
    "softplus": functional.softplus,
    "clamp": lambda g: g.clamp(-1, 1),
    "half": lambda g: g * 0.5,
    "turned": lambda g: -functional.silu(-g),
    "almost square": lambda g: functional.relu(g) ** 2.001,
}


@pytest.mark.parametrize("name", GATED)
def test_gated(name: str) -> None:
    act, (expected, params) = GATED[name]
    spec = gated(act).site.spec
    assert (spec.activation, spec.activation_params, spec.gate_up) == (expected, params, "concat")
    assert spec.activation_program == ""


@pytest.mark.parametrize("name", GATED)
def test_gated_with_the_halves_swapped(name: str) -> None:
    """Up in front of gate: the same activation of the other half of the weight."""
    act, (expected, params) = GATED[name]
    spec = gated(lambda first, second: act(second, first)).site.spec
    assert (spec.activation, spec.activation_params, spec.gate_up) == (expected, params, "concat_swapped")


@pytest.mark.parametrize("name", PLAIN)
def test_plain(name: str) -> None:
    act, expected = PLAIN[name]
    spec = plain(act).site.spec
    assert (spec.activation, spec.activation_params, spec.gate_up) == (expected, (), "none")


def test_every_entry_of_the_table_has_a_spelling_here() -> None:
    named = {named for _, (named, _) in GATED.values()} | {named for _, named in PLAIN.values()}
    assert named == set(ACTIVATIONS)


@pytest.mark.parametrize("name", CUSTOM_GATED)
def test_other_gated_programs_are_kept_and_fused(name: str) -> None:
    result = gated(CUSTOM_GATED[name])
    assert result.site.spec.activation == "custom"
    assert result.site.spec.activation_program
    result.fused()


@pytest.mark.parametrize("name", CUSTOM_PLAIN)
def test_other_plain_programs_are_kept_and_fused(name: str) -> None:
    result = plain(CUSTOM_PLAIN[name])
    assert result.site.spec.activation == "custom"
    result.fused()


REFUSED: dict[str, tuple[Gated, str]] = {
    "a function over the features": (lambda g, u: g.softmax(-1) * u, "what aten::_softmax of expert outputs"),
    "a norm": (
        lambda g, u: functional.layer_norm(g, (I,)) * u,
        "what aten::native_layer_norm of expert outputs",
    ),
    "a running sum": (lambda g, u: g.cumsum(-1) * u, "what aten::cumsum of expert outputs"),
    "random numbers": (lambda g, u: functional.silu(g) * u + torch.rand_like(g), "rand_like"),
    "half of the output": (lambda g, u: functional.silu(g), "only a part of the first GEMM's output"),
    "three parts": (
        lambda g, u: functional.silu(g[..., : I // 2]).repeat(1, 1, 2) * u + g,
        "`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    act, words = REFUSED[name]
    gated(act).refused(words)


def test_another_tensor_in_the_activation_is_named() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor, scale: Tensor) -> Tensor:
        return gathered(x, ids, w, w1, w2, act=lambda h1: functional.silu(h1 + scale).chunk(2, -1)[0])

    scale = torch.rand(2 * I)
    study(forward, *operands(torch.float32), scale).refused(
        "`scale`, a tensor besides the first GEMM's output"
    )


# --- the text of a program -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        "mul.Tensor(where.self(gt.Scalar(g, 0.7), silu.default(g), silu.default(g)), u)",
        "mul.Tensor(silu.default(floor.default(g)), u)",
        "mul.Tensor(silu.default(_to_copy.default(_to_copy.default(g, dtype=torch.int32), dtype=torch.float32)), u)",
    ],
)
def test_comparisons_are_never_named(program: str) -> None:
    """No sampling finds the points at which such a program may differ from a known one."""
    assert classify(program, True).activation == "custom"


@pytest.mark.parametrize("high", [0.7001, 0.7005])
def test_a_narrow_window_is_seen(high: float) -> None:
    window = f"bitwise_and.Tensor(gt.Scalar(g, 0.7), lt.Scalar(g, {high}))"
    program = f"mul.Tensor(where.self({window}, relu.default(g), silu.default(g)), u)"
    assert classify(program, True).activation == "custom"


@pytest.mark.parametrize("knee", [1e-6, 0.3, 7.0, 448.0, 65504.0, 1e8])
def test_a_knee_of_any_size_is_seen(knee: float) -> None:
    program = f"mul.Tensor(silu.default(clamp_max.default(g, {knee})), u)"
    assert classify(program, True).activation == "custom"


def test_a_knee_that_two_constants_make_is_seen() -> None:
    """clamp(2 g, max=12) / 2 has its knee at 6."""
    program = "mul.Tensor(silu.default(div.Tensor(clamp_max.default(mul.Tensor(g, 2.0), 12.0), 2.0)), u)"
    assert classify(program, True).activation == "custom"


SAME_AT_EVERY_POINT: dict[str, Plain] = {
    "slope 1": lambda g: g.clamp(min=0),
    "slope 1/2": lambda g: (g + g.abs()) / 2,
    "slope 0": functional.relu,
}


@pytest.mark.parametrize("act", SAME_AT_EVERY_POINT.values(), ids=SAME_AT_EVERY_POINT)
def test_a_name_has_the_slopes_of_the_model_too(act: Plain) -> None:
    """All three are relu, but for what autograd makes of 0. Rows of zeros lie there exactly."""
    _, ids, weights, w1, w2 = operands(torch.float32)
    w1, x = w1[:, :I].contiguous(), torch.zeros(len(ids), w1.shape[-1], requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return gathered(x, ids, weights, w1, w2, act=act)

    fused = torch.compile(layer, backend="moefuse", options={"inner": "eager", "mode": "on"})
    (got,), (want,) = (torch.autograd.grad(run(x).sum(), x) for run in (fused, layer))
    # sums of a few products of numbers around 1
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_parameters_come_from_the_program() -> None:
    program = "mul.Tensor(silu.default(clamp_max.default(g, 3.25)), clamp.default(u, -3.25, 3.25))"
    assert classify(program, True).params == (3.25,)
    assert set(constants(program)) == {3.25}


def test_a_program_that_does_not_run_is_refused() -> None:
    with pytest.raises(Conflict, match="can't be run on its own"):
        classify("mul.Tensor(g, h)", True)
    with pytest.raises(Conflict, match="can't be run on its own"):
        classify("uniform.default(g)", False)
