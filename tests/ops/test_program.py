"""Activation programs: what they compute, and what is refused."""

import pytest
import torch
from torch.nn import functional as F

from moefuse.ops.program import compile_program, evaluate, reads_up

G, U = torch.linspace(-9, 9, 40), torch.linspace(8, -10, 40)


@pytest.mark.parametrize(
    ("program", "want"),
    [
        ("mul.Tensor(silu.default(g), u)", F.silu(G) * U),
        ("add.Tensor(clamp.default(u, -7.0, 7.0), 1)", U.clamp(-7, 7) + 1),
        ("clamp.default(g, None, 7)", G.clamp(max=7)),
        ("clamp.default(g, min=-1, max=inf)", G.clamp(min=-1)),
        ("gelu.default(g, approximate='tanh')", F.gelu(G, approximate="tanh")),
        (
            "_to_copy.default(mul.Tensor(_to_copy.default(g, dtype=torch.float64), u), dtype=torch.float32)",
            G * U,
        ),
        ("where.self(gt.Scalar(g, 0), g, u)", torch.where(G > 0, G, U)),
        ("  g  ", G),
    ],
)
def test_programs(program, want) -> None:
    torch.testing.assert_close(evaluate(program, G, U), want)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("", "not an expression"),
        ("mul.Tensor(g,", "not an expression"),
        ("g; u", "not an expression"),
        ("3.0", "must read g or u"),
        ("mul.Tensor(g, x)", "'x'"),
        ("g * u", "expected g, u"),
        ("mul(g, u)", "must name an aten overload"),
        ("torch.ops.aten.mul.Tensor(g, u)", "must name an aten overload"),
        ("mul.NoSuch(g, u)", "no overload"),
        ("nosuch.default(g)", "no overload"),
        ("mm.default(g, u)", "not a pure pointwise"),
        ("sum.default(g)", "not a pure pointwise"),
        ("mul_.Tensor(g, u)", "not a pure pointwise"),
        ("bernoulli.p(g, 0.5)", "not a pure pointwise"),
        ("mul.Tensor(*[g, u])", "expected"),
        ("mul.Tensor(g, **{})", r"\*\*"),
        ("_to_copy.default(g, dtype=torch.load)", "expected"),
        ("mul.Tensor(g, [1])", "expected"),
        ("mul.Tensor(g, -None)", "expected"),
        ("__import__('os').system(g)", "must name an aten overload"),
    ],
)
def test_refusals(program, words) -> None:
    with pytest.raises(ValueError, match=words):
        compile_program(program)


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    for depth in (300, 20_000):
        with pytest.raises(ValueError, match="activation_program"):
            compile_program("neg.default(" * depth + "g" + ")" * depth)


def test_up_without_an_up_part() -> None:
    assert reads_up("mul.Tensor(g, u)")
    assert not reads_up("silu.default(g)")
    with pytest.raises(ValueError, match="no up part"):
        evaluate("mul.Tensor(g, u)", G)


def test_a_program_is_compiled_once() -> None:
    assert compile_program("neg.default(g)") is compile_program("neg.default(g)")
