"""Quantised rows and weights as expressions.

In: nothing. Out: a row of integers, or of the small floats of MX blocks, is `Quantised(row)`, its scale
`RowScale(row)`, such a weight `Dequant(weight)`, a product of them `QuantDot`. Dequantisation is arithmetic, in
whatever operator and order a graph does it: what folds, and what doesn't, is in hidden_states_quant.py and mx.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from moefuse.patterns.axes import Axis, Dims, Group
from moefuse.patterns.facts import Dot, Expr

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
"""Not in torch's stubs."""


@dataclass(frozen=True)
class Quantised(Expr):
    """The element at `at` of a row of integers: `row` over its features `over`, by a scale of its own, rounded.

    at: one group per axis of `over`. elements: int8, int4, or those of MX blocks, which have a scale each (mx.py).
    dtype: in which the row lay before. scaled: times the scale again, which makes it the row, rounded. word: the axes
    that run inside of one tensor element, where values are packed.
    """

    row: Expr
    over: tuple[Axis, ...]
    at: Dims
    elements: torch.dtype
    dtype: torch.dtype
    scaled: bool = False
    word: tuple[Axis, ...] = ()

    def parts(self) -> Iterator[Expr]:
        yield self.row

    def groups(self) -> Iterator[Group]:
        yield from self.at

    def bound(self) -> tuple[Axis, ...]:
        return self.over

    def rebuilt(self, change: Callable[[Expr], Expr]) -> Expr:
        return replace(self, row=change(self.row))


@dataclass(frozen=True)
class RowScale(Expr):
    """The scale by which `row` was quantised (see `Quantised`), or that of its block `at`, leading axes of `over`.

    Of a row it's the largest absolute value over the largest integer.
    """

    row: Expr
    over: tuple[Axis, ...]
    elements: torch.dtype
    dtype: torch.dtype
    at: Dims = ()

    def parts(self) -> Iterator[Expr]:
        yield self.row

    def groups(self) -> Iterator[Group]:
        yield from self.at

    def bound(self) -> tuple[Axis, ...]:
        return self.over

    def rebuilt(self, change: Callable[[Expr], Expr]) -> Expr:
        return replace(self, row=change(self.row))


@dataclass(frozen=True)
class Dequant(Expr):
    """(stored + offset) * scale: a quantised weight as it is meant. scale: None until the graph multiplies by it."""

    stored: Expr
    scale: Expr | None
    offset: Expr | None
    elements: torch.dtype

    def parts(self) -> Iterator[Expr]:
        yield from (part for part in (self.stored, self.scale, self.offset) if part is not None)

    def rebuilt(self, change: Callable[[Expr], Expr]) -> Expr:
        scale, offset = (None if part is None else change(part) for part in (self.scale, self.offset))
        return Dequant(change(self.stored), scale, offset, self.elements)


@dataclass(frozen=True)
class QuantDot(Dot):
    """A product with quantised weights: b is a `Dequant`, a is `Quantised` or a row of floats.

    dtype: to which the graph rounds it. assist: makes int8 rows times int4 weights: the sum is over (a - 8) * b, the
    assist is added, and then it's multiplied by the row's scale.
    """

    dtype: torch.dtype = field(default=torch.float32, kw_only=True)
    assist: Expr | None = field(default=None, kw_only=True)

    def parts(self) -> Iterator[Expr]:
        yield from (part for part in (self.a, self.b, self.assist) if part is not None)

    def rebuilt(self, change: Callable[[Expr], Expr]) -> Expr:
        assist = None if self.assist is None else change(self.assist)
        return replace(self, a=change(self.a), b=change(self.b), assist=assist)
