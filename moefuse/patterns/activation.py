"""Activation: a small scalar program between the two GEMMs, named by what it computes, not by how it is written.

In: an expression whose leaves are the first GEMM's outputs. Out: a name of the activation table with its
parameters, or `custom` with the program as text. The program is evaluated in float64 on a few thousand points,
also around each of its constants (clamp knees), and compared with every known activation: its values, and the slopes
that autograd gives it, which at a knee depend on the spelling.
"""

import ast
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch

from moefuse.ops import program as programs
from moefuse.ops.activations import ACTIVATIONS, CUSTOM
from moefuse.patterns.facts import Conflict, Const, Expr, Op
from moefuse.patterns.pointwise import is_rounding
from moefuse.patterns.rules import value

MAX_CONSTANTS = 8
"""More different numbers than this in one program: no table entry has them; don't try all combinations."""

_SMOOTH = (
    "mul add sub rsub div neg pow square reciprocal exp log1p erf tanh sigmoid silu gelu softplus sqrt rsqrt"
)
_KNEED = "relu abs lerp addcmul clamp clamp_min clamp_max minimum maximum hardtanh"
SMOOTH = frozenset(_SMOOTH.split())
SAMPLED = SMOOTH | frozenset(_KNEED.split())
"""Operators of which two functions that agree on all samples are taken to be the same: smooth, or with knees at their
constants. With any other (comparisons, guards against NaN, roundings) a function may differ where no sample falls."""

RELATIVE = 1e-9
"""float64 noise of two spellings of one function is about 1e-15 of the result; different ones differ by > 1e-5."""


@dataclass(frozen=True)
class Classified:
    """An activation by name. swapped: the program's first leaf is the up part, its second the gate."""

    activation: str
    params: tuple[float, ...] = ()
    program: str = ""
    swapped: bool = False


def to_program(expr: Expr, leaf: Callable[[Expr], str | None]) -> str:
    """The text of the program (see ops/program.py); `leaf` names what counts as g or u.

    Casts are left out: the program is a real function, evaluated in float32 or wider. Raises Conflict for an
    operator that a program can't hold, or a tensor that is neither g nor u.
    """
    if (name := leaf(expr)) is not None:
        return name
    if isinstance(expr, Const):
        return _number(expr.value)
    if not isinstance(expr, Op):
        raise Conflict(f"the activation reads {_words(expr)}")
    if is_rounding(expr):
        return to_program(expr.args[0], leaf)
    if expr.target.namespace != "aten":
        raise Conflict(f"the activation uses {expr.target}")
    args = [to_program(arg, leaf) if isinstance(arg, Expr) else _number(arg) for arg in expr.args]
    args += [f"{key}={_number(arg)}" for key, arg in expr.kwargs]
    packet, overload = expr.target._schema.name.removeprefix("aten::"), expr.target._overloadname
    return f"{packet}.{overload}({', '.join(args)})"


def upcast(expr: Expr, leaf: Callable[[Expr], str | None]) -> torch.dtype | None:
    """The wider dtype in which a half precision model computes its activation, None where it does not."""
    if isinstance(expr, Op) and is_rounding(expr) and expr.node is None:
        return torch.float32
    if isinstance(expr, Op) and is_rounding(expr) and expr.node is not None:
        wide, narrow = value(expr.node).dtype, value(expr.node.args[0]).dtype
        if wide.itemsize > narrow.itemsize:
            return cast(torch.dtype, wide)
    elif leaf(expr) is not None:
        return None
    return next((found for part in expr.parts() if (found := upcast(part, leaf)) is not None), None)


def _words(expr: Expr) -> str:
    node = getattr(expr, "node", None)
    return (
        f"`{node.name}`, a tensor besides the first GEMM's output" if node is not None else "another tensor"
    )


def _number(arg: object) -> str:
    if isinstance(arg, float) and not math.isfinite(arg):
        return "nan" if math.isnan(arg) else "inf" if arg > 0 else "-inf"
    return repr(arg)


@functools.lru_cache(maxsize=512)
def classify(program: str, gated: bool) -> Classified:
    """The table's name for a program over g (and u), trying both roles of the leaves; `custom` if none fits."""
    points = _points(program)
    g, u = points if gated else (points[0], None)
    try:
        wanted = programs.evaluate(program, g, u).to(g.dtype)
    except (ValueError, RuntimeError, TypeError) as error:
        raise Conflict(f"the activation can't be run on its own: {str(error).splitlines()[0]}") from None
    if not is_sampled(program):
        return Classified(CUSTOM, (), program)
    for roles in ((0, 1), (1, 0)) if gated else ((0,),):
        for name, params in _candidates(program, gated):
            known = ACTIVATIONS[name].function
            got = known(*(points[role] for role in roles), *params)
            if not torch.allclose(got, wanted, rtol=RELATIVE, atol=RELATIVE, equal_nan=True):
                continue
            if is_sampled(program, SMOOTH) or _same_slopes(program, known, params, roles, points):
                return Classified(name, params, "", roles == (1, 0))
    return Classified(CUSTOM, (), program)


def _same_slopes(
    program: str,
    known: Callable[..., torch.Tensor],
    params: tuple[float, ...],
    roles: tuple[int, ...],
    points: tuple[torch.Tensor, torch.Tensor],
) -> bool:
    """True where autograd gives both the same slopes: at 0 relu's is 0 and that of clamp(min=0) 1.

    Rows of zeros and weights that start as zeros lie there exactly. Points where either overflows say nothing.
    roles: which leaf of the program is the gate, which the up part.
    """
    with torch.inference_mode(False), torch.enable_grad():  # a model may be compiled in either mode
        leaves = [points[role].clone().requires_grad_() for role in sorted(roles)]
        values = programs.evaluate(program, *leaves), known(*(leaves[role] for role in roles), *params)
        slopes = [torch.autograd.grad(value.sum(), leaves, materialize_grads=True) for value in values]
    for a, b in zip(*slopes, strict=True):
        both = a.isfinite() & b.isfinite()
        if not torch.allclose(a[both], b[both], rtol=RELATIVE, atol=RELATIVE):
            return False
    return True


def is_sampled(program: str, operators: frozenset[str] = SAMPLED) -> bool:
    """True when the program calls only operators that sampling tells apart."""
    tree = ast.walk(ast.parse(program, mode="eval"))
    called = {
        node.value.id for node in tree if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return called <= operators


def constants(program: str) -> tuple[float, ...]:
    """The different numbers in a program, with their absolute values and reciprocals' candidates left to callers."""
    found: dict[float, None] = {}
    for node in ast.walk(ast.parse(program, mode="eval")):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, int | float)
            and not isinstance(node.value, bool)
        ):
            found[abs(float(node.value))] = None
    return tuple(found)


def _candidates(program: str, gated: bool) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Every table entry with parameters drawn from the program's own constants."""
    numbers = constants(program)
    if len(numbers) > MAX_CONSTANTS:
        numbers = ()
    # A spelling may leave out a neutral number (`u` instead of `1 * u`, `u + 0`).
    numbers = (*numbers, *(n for n in (0.0, 1.0) if n not in numbers))
    for activation in ACTIVATIONS.values():
        if activation.gated != gated:
            continue
        most = len(activation.params)
        for count in range(most - activation.optional, most + 1):
            for params in itertools.product(numbers, repeat=count):
                if 0.0 not in params[:1] and _finite(activation.name, params):
                    yield activation.name, params


def _finite(name: str, params: tuple[float, ...]) -> bool:
    """situglu divides by its parameters."""
    return name != "situglu" or 0.0 not in params


def _points(program: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs (g, u) in float64 that tell two pointwise functions apart.

    A seeded normal cloud, all magnitudes, the neighbourhood of every constant and of what two of them can make
    (a knee at 6 may be written as `2 g < 12`), and a cloud as wide as each constant.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = [c for c in constants(program) if math.isfinite(c) and c > 0][:MAX_CONSTANTS]
    knees = {v for a in numbers for b in (1.0, *numbers) for v in (a * b, a / b, b / a, a + b, abs(a - b))}
    knees = {v for v in knees if 0 < v < 1e30}
    near = [s * v * f for v in sorted(knees) for s in (-1, 1) for f in (1 - 1e-3, 1, 1 + 1e-3)]
    axis = torch.tensor([*near, 0.0, -1.0, 1.0, 12.0, -12.0], dtype=torch.float64)
    partner = torch.randn(axis.numel(), generator=generator, dtype=torch.float64)
    scales = torch.tensor([0.5, 2.0, 8.0, *(2 * c for c in numbers)], dtype=torch.float64)
    cloud = torch.randn(2, scales.numel(), 256, generator=generator, dtype=torch.float64) * scales[:, None]
    wide = (
        torch.logspace(-8, 30, 400, dtype=torch.float64)
        * torch.tensor([1.0, -1.0], dtype=torch.float64)[:, None]
    )
    wide = wide.reshape(-1)
    ones = torch.randn(wide.numel(), generator=generator, dtype=torch.float64)
    odd = torch.tensor([math.nan, 1.0], dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis).T if axis.numel() <= 64 else torch.stack([axis, axis.flip(0)])
    pairs = [
        cloud.reshape(2, -1),
        torch.stack([axis, partner]),
        torch.stack([partner, axis]),
        torch.stack([wide, ones]),
        torch.stack([ones, wide]),
        grid,
        torch.cartesian_prod(odd, odd).T,
    ]
    g, u = torch.cat(pairs, dim=1)
    return g.contiguous(), u.contiguous()
