"""Custom activations in C++: every operator as torch computes it, on every instruction set; others say so."""

import pytest
import torch

from moefuse.ops import program as programs
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.targets.cpu import build, isa, kernel, program, torch_kernel

ISAS = [each.name for each in isa.available()]
# One program per operator; several hold a few that belong together. Numbers as the lifter writes them.
PROGRAMS = [
    "mul.Tensor(neg.default(g), abs.default(u))",
    "exp.default(clamp_max.default(g, 2))",
    "add.Tensor(sigmoid.default(g), tanh.default(u), alpha=0.5)",
    "mul.Tensor(silu.default(g), relu.default(u))",
    "mul.Tensor(mul.Tensor(g, 0.5), add.Scalar(erf.default(mul.Tensor(g, 0.7071067811865476)), 1.0))",
    "sub.Tensor(sqrt.default(abs.default(g)), rsqrt.default(add.Tensor(square.default(u), 1.0)))",
    "log1p.default(abs.default(g))",
    "log.default(add.Scalar(abs.default(g), 0.25))",
    "expm1.default(g)",
    "reciprocal.default(add.Tensor(square.default(g), 0.5))",
    "div.Tensor(g, add.Tensor(abs.default(u), 1))",
    "rsub.Scalar(g, 1, 2)",
    "mul.Scalar(sub.Scalar(g, 0.25), 3)",
    "pow.Tensor_Scalar(g, 3)",
    "pow.Tensor_Scalar(abs.default(g), 1.5)",
    "pow.Tensor_Scalar(g, 2.0)",
    "maximum.default(minimum.default(g, u), mul.Tensor(u, 0.25))",
    "clamp.default(g, -0.5, None)",
    "clamp.default(g, max=0.5)",
    "clamp_min.default(g, -0.25)",
    "hardtanh.default(g)",
    "leaky_relu.default(g, 0.1)",
    "softplus.default(g)",
    "softplus.default(g, 2.0, 0.5)",
    "gelu.default(g)",
    "gelu.default(g, approximate='tanh')",
    "where.self(gt.Scalar(g, 0.5), u, neg.default(g))",
    "where.self(le.Tensor(g, u), g, neg.default(u))",
    "mul.Tensor(_to_copy.default(ge.Scalar(g, 0.0), dtype=torch.float32), u)",
    "mul.Tensor(silu.default(_to_copy.default(g, dtype=torch.float32)), u)",
    "mul.Tensor(g, inf)",
]


def run(text: str, dtype: torch.dtype, inside: torch.dtype | None, name: str, g=None, u=None):
    """The kernel's result and that of torch operators; products with 1 are exact."""
    if g is None:
        g, u = torch.randn(150, 2, generator=torch.Generator().manual_seed(1)).to(dtype).unbind(1)
    x = torch.stack((g, u), 1)
    w1 = torch.eye(2).unsqueeze(0).to(dtype)
    w2 = torch.ones(1, 1, 1, dtype=dtype)
    options = Options(1, activation="custom", activation_program=text, activation_dtype=inside)
    ids, weights = torch.zeros(len(x), 1, dtype=torch.int32), torch.ones(len(x), 1)
    operands = Operands(x, ids, weights, [w1], [w2])
    assert kernel.supports(operands, options) == ""
    (chosen,) = (each for each in isa.ISAS if each.name == name)
    library = kernel._open(chosen, dtype)
    return kernel.run(library, operands, options)[0], torch_kernel.run(operands, options)[0]


@pytest.mark.parametrize(
    ("text", "dtype"),
    [(text, torch.float32) for text in PROGRAMS] + [(text, torch.bfloat16) for text in PROGRAMS[::3]],
)
def test_every_operator(monkeypatch, text, dtype) -> None:
    monkeypatch.setenv(isa.VARIABLE, ISAS[0])
    got, want = run(text, dtype, None, ISAS[0])
    # float32: a few ulp of each operator, where values cancel a little; bfloat16: the same roundings, of which the
    # last bit of exp decides one now and then
    tolerance = 2e-6 if dtype == torch.float32 else 0
    wrong = (got - want).abs() > tolerance * (1 + want.abs())
    assert wrong.float().mean() <= (0 if dtype == torch.float32 else 0.02)
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [None, torch.float32])
def test_on_every_instruction_set(monkeypatch, name, dtype, inside) -> None:
    monkeypatch.setenv(isa.VARIABLE, name)
    got, want = run("mul.Tensor(mul.Tensor(g, sigmoid.default(mul.Tensor(g, 1.5))), u)", dtype, inside, name)
    assert (got != want).float().mean() <= 0.02


def test_special_values(monkeypatch) -> None:
    monkeypatch.setenv(isa.VARIABLE, ISAS[0])
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e30, -1e30, 1e-30])
    g, u = torch.cartesian_prod(odd, torch.tensor([float("nan"), 2.0])).unbind(1)
    for text in (
        "minimum.default(g, u)",
        "maximum.default(g, u)",
        "clamp.default(g, -1.0, 1.0)",
        "erf.default(g)",
    ):
        # a row of W1 reads 0 * u as well: what isn't finite must be the leaf's own doing
        finite = torch.where(u.isnan() | g.isnan() | g.isinf(), torch.nan, 1.0)
        got, want = run(text, torch.float32, None, ISAS[0], g, u)
        torch.testing.assert_close(got[:, 0] * finite, want[:, 0] * finite, equal_nan=True)
        assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sin.default(g)", "sin.default has no C++ form"),
        ("div.Tensor_mode(g, u, rounding_mode='floor')", "div.Tensor_mode has no C++ form"),
        ("_to_copy.default(g, dtype=torch.float64)", "a cast to torch.float64 has no C++ form"),
        ("mul.Tensor(gt.Scalar(g, 0.5), u)", "mul.Tensor of torch.bool has no C++ form"),
        ("gt.Scalar(g, 0.5)", "a result of torch.bool has no C++ form"),
        ("where.self(g, g, u)", "where.self of torch.bfloat16 has no C++ form"),
    ],
)
def test_what_has_no_form_says_so(text, words) -> None:
    programs.compile_program(text)  # a program it is
    assert words in program.compiled(isa.available()[0], text, torch.bfloat16, torch.bfloat16)


def test_a_program_is_built_once(monkeypatch) -> None:
    text = "mul.Tensor(silu.default(g), u)"
    first = program.compiled(isa.available()[0], text, torch.float32, torch.float32)
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("built again"))
    program.compiled.cache_clear()
    assert isinstance(first, int)
    assert program.compiled(isa.available()[0], text, torch.float32, torch.float32)


def test_a_compiler_that_fails_is_told_once(monkeypatch) -> None:
    def fail(*_):
        raise build.BuildError("no luck")

    monkeypatch.setattr(build, "small_library", fail)
    text = "mul.Tensor(tanh.default(g), mul.Tensor(u, 17.0))"
    with pytest.warns(UserWarning, match="a custom activation runs in torch operators, slower: no luck"):
        found = program.compiled(isa.available()[0], text, torch.float32, torch.float32)
    assert found == program.compiled(isa.available()[0], text, torch.float32, torch.float32) == "no luck"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "text",
    [
        "where.self(gt.Scalar(g, 0.3), g, mul.Tensor(g, 0.5))",
        "add.Tensor(g, u, alpha=0.3)",
        "sub.Tensor(g, 0.3)",
        "rsub.Scalar(g, 0.3, 0.7)",
        "pow.Tensor_Scalar(abs.default(g), 0.3)",
        "mul.Tensor(g, 0.3)",
        "div.Tensor(g, 0.3)",
        "leaky_relu.default(g, 0.3)",
    ],
)
def test_numbers_are_rounded_where_torch_rounds_them(monkeypatch, text, dtype) -> None:
    """0.3 is no number of half precision; some operators take it as it is, some round it first.

    As for whole vectors: torch rounds the alpha of add there, and not in strided loops and tails.
    """
    monkeypatch.setenv(isa.VARIABLE, ISAS[0])
    g, u = torch.randn(2, 2048).to(dtype).unbind(0)
    g[0] = 0.3  # equal once both are rounded
    got, _ = run(text, dtype, None, ISAS[0], g, u)
    assert torch.equal(got[:, 0], programs.evaluate(text, g, u))
