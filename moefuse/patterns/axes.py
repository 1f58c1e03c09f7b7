"""Axes: the indices that facts are expressions over.

In: nothing. Out: plain indices, the orders and choices that sorts, masks and exchanges between ranks make of them, and
dimensions as groups of them. What an axis stands for is its identity; its size says nothing.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.fx import Node

from moefuse.graph import sizes
from moefuse.graph.sizes import Size

if TYPE_CHECKING:
    from moefuse.patterns.facts import Expr


@dataclass(frozen=True, eq=False)
class Axis:
    """A plain index 0..size-1. Two axes are the same only when they are the same object."""

    size: Size


@dataclass(frozen=True)
class Perm:
    """The order that one particular sort made: position p stands for one slot of the axes `over`.

    sort: the graph node that sorted (its identity); the top-k for the order expert by expert, token by token, in which
    a mask of its choices lists them. key: the sorted values as an expression over `over`.
    """

    sort: Node
    over: "Group"
    key: "Expr"

    @property
    def size(self) -> Size:
        """How many slots there are."""
        return group_size(self.over)


@dataclass(frozen=True)
class Pick:
    """The slots whose id is `expert`, as one particular nonzero lists them, or as they lie in one sort's order.

    source: that nonzero or sort; with `expert` the identity. over: the axes of all slots; key: the ids as an
    expression over `over`. cut: a piece of a `Perm`, or of rows that came from all ranks. rank: the one that they came
    from, where they are a piece of an expert's rows.
    """

    source: Node
    over: "Group"
    key: "Expr"
    expert: int
    size: Size = field(compare=False)
    cut: bool = False
    rank: int | None = None


@dataclass(frozen=True)
class Ranks:
    """How a process group spreads experts: rank r of `world` holds `experts` of them, from r * experts on.

    group: its name. rank: that of this process.
    """

    group: str
    world: int
    rank: int
    experts: int

    @property
    def first(self) -> int:
        """The first expert of this rank."""
        return self.rank * self.experts


@dataclass(frozen=True)
class Arrived:
    """The slots of all ranks whose expert this rank holds: source rank by source rank, each in the order of its sort.

    order: the sort, the same on every rank; its axes are those of the source rank. ids: the tensor of the experts' ids.
    """

    order: Perm
    ids: Node
    ranks: Ranks
    size: Size = field(compare=False)


@dataclass(frozen=True)
class Part:
    """The index `start + step * value(group)` into a dimension of `size` elements (a slice, or one element)."""

    group: "Group"
    start: int
    step: int
    size: Size = field(compare=False)


@dataclass(frozen=True)
class At:
    """The index that an integer expression gives (`weight[ids]`), into a dimension of `size` elements.

    wraps: indexing counts negative values from the end, as aten.index does; a grouped GEMM doesn't.
    """

    expr: "Expr"
    size: Size = field(compare=False)
    wraps: bool = field(default=False, compare=False)


Digit = Axis | Perm | Pick | Arrived | Part | At
Group = tuple[Digit, ...]
"""One tensor dimension as mixed-radix digits, outermost first. A dimension of size one has no digit."""
Dims = tuple[Group, ...]


def group_size(group: Group) -> Size:
    """How many values the group takes."""
    return sizes.product(digit.size for digit in group)
