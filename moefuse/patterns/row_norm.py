"""The norm of an expert's row, between the second GEMM and the combine.

In: the factors of a weighted row that holds a mean over the row's own features. Out: the row before the norm, the
norm by name (`MoeSpec.row_norm`) and the routing weights. As activations, a norm is named by what it computes: the
mean's operand and the factor made from the mean are evaluated in float64, so their spelling doesn't matter.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from moefuse.ops import program as programs
from moefuse.ops.spec import RowNorm
from moefuse.patterns.activation import RELATIVE, SMOOTH, constants, is_sampled, to_program
from moefuse.patterns.axes import Axis, Group
from moefuse.patterns.facts import Conflict, Expr, Leaf, Mean
from moefuse.patterns.pointwise import strip_casts, walk
from moefuse.patterns.products import Linear, first_gemms, linear, means
from moefuse.patterns.rules import is_float
from moefuse.patterns.unify import bind


@dataclass(frozen=True)
class Norm:
    """features: the axes over which a row is normalised; scale: one value per feature, if there is one."""

    kind: RowNorm
    eps: float
    features: frozenset[Axis]
    scale: Leaf | None


def take_norm(every: list[Expr]) -> tuple[list[Expr], Norm | None]:
    """(the factors without the norm, the norm). Factors that hold no mean are returned as they came."""
    divisors = [f for f in every if means(f)]
    if not divisors:
        return every, None
    found = {mean for divisor in divisors for mean in means(divisor)}
    rows = [f for f in every if f.hard and f not in divisors]
    row = linear(rows[0]) if len(rows) == 1 else None
    if len(found) != 1 or len(divisors) != 1 or row is None:
        raise Conflict("expert rows are normalised by something else than an RMS norm of the row itself")
    (mean,) = found
    renamed = _same_features(mean, row)
    features = frozenset(digit for group in renamed.values() for digit in group if isinstance(digit, Axis))
    scales = [f for f in every if not f.hard and f.axes & features]
    scale = strip_casts(scales[0]) if len(scales) == 1 else None
    if len(scales) > 1 or (scales and not (isinstance(scale, Leaf) and _per_feature(scale, features))):
        raise Conflict("the norm of expert rows is scaled by more than one value per feature")
    kind = _kind(bind(mean.body, renamed), row, scale)
    eps = _eps(divisors[0], mean)
    kept = [f for f in every if f not in divisors and f not in scales]
    return kept, Norm(kind, eps, features, scale if isinstance(scale, Leaf) else None)


def demand_given(weights: Iterable[Expr], gemms: Collection[Node]) -> None:
    """Conflict for a routing weight that is made from the expert rows, as by a norm in dense or masked experts."""
    first = min(gemms)
    for leaf in (e for weight in weights for e in walk(weight) if isinstance(e, Leaf)):
        seen, waiting = set[Node](), [leaf.node]
        while waiting:
            node = waiting.pop()
            if node in gemms:
                raise Conflict(
                    f"expert rows are weighed by a factor made from themselves (`{leaf.node.name}`)"
                )
            if node not in seen and not node < first:
                seen.add(node)
                waiting.extend(node.all_input_nodes)


def _per_feature(leaf: Leaf, features: frozenset[Axis]) -> bool:
    """One value per feature, or one per expert and feature; an integer's cast isn't part of a leaf."""
    return (
        is_float(leaf.node)
        and leaf.axes - {axis for at in leaf.selectors for axis in at.expr.axes} == features
    )


def _same_features(mean: Mean, row: Linear) -> dict[Axis, Group]:
    """The mean's own axes by the row's features; Conflict unless the mean runs over this very row."""
    inner = first_gemms(mean.body)
    if len(inner) != 1 or len(inner[0].weight.index) != len(row.weight.index):
        raise Conflict("expert rows are normalised by the mean of something else than the row")
    renamed: dict[Axis, Group] = {}
    for own, other in zip(inner[0].weight.index, row.weight.index, strict=True):
        for a, b in zip(own, other, strict=False):
            if isinstance(a, Axis) and a in mean.over:
                renamed[a] = (b,)
    if set(renamed) != set(mean.over) or first_gemms(bind(mean.body, renamed)) != [row]:
        raise Conflict("expert rows are normalised by the mean of something else than the row")
    return renamed


def _kind(body: Expr, row: Linear, scale: Expr | None) -> RowNorm:
    """What the mean is taken of: the row's squares, or those of the scaled row."""

    def leaf(expr: Expr) -> str | None:
        if linear(expr) == row:
            return "g"
        return "u" if scale is not None and strip_casts(expr) == scale else None

    # Every size of value, and no absolute tolerance: an eps under the mean is what a row of zeros is divided by.
    sizes = torch.logspace(-30, 15, 256, dtype=torch.float64)
    g = torch.cat([torch.zeros(1, dtype=torch.float64), sizes, -sizes])
    u = torch.randn(g.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = _evaluate(body, leaf, g, u)
    if torch.allclose(got, g * g, rtol=RELATIVE, atol=0):
        return "rms"
    if torch.allclose(got, (g * u).square(), rtol=RELATIVE, atol=0):
        return "scaled_rms"
    raise Conflict("expert rows are normalised by a mean that isn't of their squares")


def _eps(divisor: Expr, mean: Mean) -> float:
    """eps of the factor rsqrt(mean + eps). Conflict for any other function of the mean."""
    leaf: Callable[[Expr], str | None] = lambda expr: "g" if expr == mean else None  # noqa: E731
    g = torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-40, 8, 512, dtype=torch.float64)])
    got = _evaluate(divisor, leaf, g, None)
    for eps in (*constants(_program(divisor, leaf)), 0.0):
        if torch.allclose(got, torch.rsqrt(g + eps), rtol=RELATIVE, atol=0):
            return eps
    raise Conflict("expert rows are normalised by something else than rsqrt(mean of squares + eps)")


def _program(expr: Expr, leaf: Callable[[Expr], str | None]) -> str:
    try:
        return to_program(expr, leaf)
    except Conflict as conflict:
        raise Conflict(f"the norm of expert rows {conflict.reason.removeprefix('the activation ')}") from None


def _evaluate(
    expr: Expr, leaf: Callable[[Expr], str | None], g: torch.Tensor, u: torch.Tensor | None
) -> torch.Tensor:
    program = _program(expr, leaf)
    if not is_sampled(program, SMOOTH):  # no norm needs a knee, and a knee may lie where no sample falls
        raise Conflict(f"the norm of expert rows isn't made of smooth operators only: {program}")
    try:
        return programs.evaluate(program, g, u)
    except (ValueError, RuntimeError, TypeError) as error:
        raise Conflict(f"the norm of expert rows can't be run on its own: {error}") from None
