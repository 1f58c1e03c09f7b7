"""Activation: a small scalar program between the two GEMMs, named by what it computes, not by how it is written.

In: an expression whose leaves are the first GEMM's outputs. Out: a name of the activation table with its
parameters, or `custom` with the program as text. The program is evaluated in float64 on a few thousand points,
also around each of its constants (clamp knees), and compared with every known activation.
"""

import ast
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from moefuse.ops import program as programs
from moefuse.ops.activations import ACTIVATIONS, CUSTOM
from moefuse.patterns.facts import Conflict, Const, Expr, Op

MAX_CONSTANTS = 8
"""More different numbers than this in one program: no table entry has them; don't try all combinations."""

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
    if expr.target is torch.ops.aten._to_copy.default:
        return to_program(expr.args[0], leaf)
    if expr.target.namespace != "aten":
        raise Conflict(f"the activation uses {expr.target}")
    args = [to_program(arg, leaf) if isinstance(arg, Expr) else _number(arg) for arg in expr.args]
    args += [f"{key}={_number(arg)}" for key, arg in expr.kwargs]
    packet, overload = expr.target._schema.name.removeprefix("aten::"), expr.target._overloadname
    return f"{packet}.{overload}({', '.join(args)})"


def _words(expr: Expr) -> str:
    node = getattr(expr, "node", None)
    return f"`{node.name}`, a tensor besides the first GEMM's output" if node is not None else "another tensor"


def _number(arg: object) -> str:
    if isinstance(arg, float) and not math.isfinite(arg):
        return "nan" if math.isnan(arg) else "inf" if arg > 0 else "-inf"
    return repr(arg)


@functools.lru_cache(maxsize=512)
def classify(program: str, gated: bool) -> Classified:
    """The table's name for a program over g (and u), trying both roles of the leaves; `custom` if none fits."""
    points = _points(program)
    g, u = points if gated else (points[0], None)
    wanted = programs.evaluate(program, g, u)
    for swapped in (False, True) if gated else (False,):
        gate, up = (u, g) if swapped else (g, u)
        for name, params in _candidates(program, gated):
            known = ACTIVATIONS[name]
            got = known.function(gate, up, *params) if gated else known.function(gate, *params)
            if torch.allclose(got, wanted, rtol=RELATIVE, atol=RELATIVE, equal_nan=True):
                return Classified(name, params, "", swapped)
    return Classified(CUSTOM, (), program)


def constants(program: str) -> tuple[float, ...]:
    """The different numbers in a program, with their absolute values and reciprocals' candidates left to callers."""
    found: dict[float, None] = {}
    for node in ast.walk(ast.parse(program, mode="eval")):
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
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
    """Pairs (g, u) in float64: a seeded normal cloud, zeros, and the neighbourhood of every constant."""
    generator = torch.Generator().manual_seed(0)
    scale = max([4.0, *(2 * c for c in constants(program) if c < 1e4)])
    cloud = torch.randn(2, 1024, generator=generator, dtype=torch.float64) * scale / 2
    small = torch.randn(2, 256, generator=generator, dtype=torch.float64)
    knees = [s * c + d for c in constants(program) if c < 1e4 for s in (-1, 1) for d in (-1e-3, 0.0, 1e-3)]
    axis = torch.tensor([*knees, 0.0, -1.0, 1.0, 12.0, -12.0], dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis).T
    g, u = torch.cat([cloud, small, grid], dim=1)
    return g.contiguous(), u.contiguous()
