"""Products and expert GEMMs inside an expression.

In: expressions. Out: their factors (routing weights apart from expert rows), and `Linear`, one expert GEMM with its
bias.
"""

import functools
from dataclasses import dataclass

import torch
from torch.fx import Node

from moefuse.patterns.facts import Axis, Conflict, Const, Dot, Expr, Leaf, Op
from moefuse.patterns.router import strip_casts

MUL = (torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Scalar)
DIV = (torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar)
ADD = (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar)


def factors(expr: Expr) -> list[Expr]:
    """The factors of a product, looking through casts; a division by something soft is a factor too."""
    inner = strip_casts(expr)
    if isinstance(inner, Op) and inner.target in MUL:
        return [f for arg in inner.args[:2] for f in factors(_as_expr(arg))]
    if isinstance(inner, Op) and inner.target in DIV and not inner.kwargs:
        divisor = _as_expr(inner.args[1])
        if isinstance(divisor, Const) and divisor.value != 0:
            return [*factors(_as_expr(inner.args[0])), Const(1 / divisor.value)]
        if not isinstance(divisor, Const) and not divisor.hard:
            inverse = Op(torch.ops.aten.reciprocal.default, (divisor,), (), inner.node)
            return [*factors(_as_expr(inner.args[0])), inverse]
    return [] if inner == Const(1.0) else [inner if inner.hard else expr]


def _as_expr(arg: object) -> Expr:
    if isinstance(arg, Expr):
        return arg
    if isinstance(arg, int | float):
        return Const(float(arg))
    raise Conflict(f"a factor that is no number: {arg}")


def split_factors(expr: Expr) -> tuple[Expr, list[Expr]]:
    """(the one hard factor, the soft ones)."""
    every = factors(expr)
    hard = [f for f in every if f.hard]
    if len(hard) != 1:
        raise Conflict(f"a product of {len(hard)} expert outputs where one is expected")
    return hard[0], [f for f in every if not f.hard]


@dataclass(frozen=True)
class Linear:
    """rows @ weight (+ bias): one expert GEMM."""

    rows: Expr
    weight: Leaf
    over: tuple[Axis, ...]
    bias: Leaf | None
    node: Node


def linear(expr: Expr) -> Linear | None:
    """The GEMM, with its bias, that an expression is; None for anything else."""
    inner = strip_casts(expr)
    if isinstance(inner, Dot) and inner.expert:
        weight, rows = _weight_of(inner)
        return Linear(rows, weight, inner.over, None, inner.node)
    if not isinstance(inner, Op) or inner.target not in ADD or dict(inner.kwargs).get("alpha", 1) != 1:
        return None
    for one, other in (inner.args[:2], inner.args[1::-1]):
        if not isinstance(one, Expr) or not isinstance(other, Expr) or not one.hard or other.hard:
            continue
        bias, product = strip_casts(other), linear(one)
        if product is None or product.bias is not None or not isinstance(bias, Leaf):
            continue
        if len(bias.selectors) == len(product.weight.selectors):
            return Linear(product.rows, product.weight, product.over, bias, product.node)
    return None


def _weight_of(dot: Dot) -> tuple[Leaf, Expr]:
    """Which operand of an expert product is the weight, and the other one. In a loop the weight stands second."""
    for weight, rows in ((dot.b, dot.a), (dot.a, dot.b)):
        leaf = strip_casts(weight)
        if isinstance(leaf, Leaf) and len(leaf.selectors) == 1 and leaf.axes >= set(dot.over):
            if leaf is not weight:
                raise Conflict(f"expert weights `{leaf.node.name}` are cast after they were selected")
            return leaf, rows
    if isinstance(dot.b, Leaf) and not dot.b.selectors and dot.b.axes >= set(dot.over):
        return dot.b, dot.a
    raise Conflict(f"the weights of `{dot.node.name}` are not selected by the routing")


def times(every: list[Expr]) -> Expr:
    """The product of some factors."""
    if not every:
        raise Conflict("the input of the experts is no token row")
    return functools.reduce(lambda a, b: Op(torch.ops.aten.mul.Tensor, (a, b)), every)


def first_gemms(expr: Expr) -> list[Linear]:
    """The different GEMM outputs that the activation reads, in order of appearance."""
    found = linear(expr)
    if found is not None:
        return [found]
    result: list[Linear] = []
    for part in expr.parts():
        result.extend(f for f in first_gemms(part) if f not in result)
    return result
