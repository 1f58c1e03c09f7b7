"""Facts of rows that travel: what counts, positions and ids mean where a layer's experts are spread over ranks.

In: nothing. Out: more expressions of the vocabulary in `facts`. An id is read as the number of a rank and the number of
an expert among that rank's, and a count as one of the slots that a rank sends or gets.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Self

from torch.fx import Node

from moefuse.patterns.axes import Group, Part, Ranks, group_size
from moefuse.patterns.facts import Expr, Leaf


@dataclass(frozen=True)
class Owned(Expr):
    """How many elements of the integer leaf `ids` (all of them) are among the `experts` ids of rank `at`."""

    ids: Leaf
    at: Group
    experts: int

    def groups(self) -> Iterator[Group]:
        yield self.at


@dataclass(frozen=True)
class Inflow(Expr):
    """How many elements of `ids` on rank `source` are this rank's expert `at`; of any of its experts for None."""

    ids: Leaf
    ranks: Ranks
    source: Group
    at: Group | None

    def groups(self) -> Iterator[Group]:
        yield from (self.source, self.at or ())


@dataclass(frozen=True)
class Census(Expr):
    """How many elements of `ids` on rank `source` are expert `at`, of the experts of all ranks."""

    ids: Leaf
    ranks: Ranks
    source: Group
    at: Group

    def groups(self) -> Iterator[Group]:
        yield from (self.source, self.at)

    @property
    def inflow(self) -> Inflow | None:
        """What comes here, if `at` stands for this rank's experts in their order: a slice, or their row of a table."""
        ranks, (first, *rest) = self.ranks, self.at or (None,)
        if not isinstance(first, Part) or first.step != 1:
            return None
        size = ranks.world if rest else ranks.world * ranks.experts
        start, length = (ranks.rank, 1) if rest else (ranks.first, ranks.experts)
        own = (first.start, group_size(first.group), first.size) == (start, length, size)
        return Inflow(self.ids, ranks, self.source, (*first.group, *rest)) if own else None


@dataclass(frozen=True)
class Begin(Expr):
    """Where the rows that came from rank `source` for this rank's expert `at` begin, or end.

    The rows lie rank by rank, or expert by expert and within one by rank. source, at: None for those of a row itself.
    """

    ids: Leaf
    ranks: Ranks
    by_expert: bool
    source: Group | None
    at: Group | None
    ends: bool = False

    def groups(self) -> Iterator[Group]:
        yield from (self.source or (), self.at or ())


@dataclass(frozen=True)
class _OfIds(Expr):
    """What follows from the id of a slot."""

    ids: Leaf

    def parts(self) -> Iterator[Expr]:
        yield self.ids

    def rebuilt(self, change: Callable[[Expr], Expr]) -> Self:
        ids = change(self.ids)
        assert isinstance(ids, Leaf)
        return replace(self, ids=ids)


@dataclass(frozen=True)
class Local(_OfIds):
    """The number of a row's expert among those of this rank: `ids` less the first of them."""

    ranks: Ranks


@dataclass(frozen=True)
class Block(_OfIds):
    """source rank * experts of a rank + `Local`, of rows that came from all ranks.

    by_expert: `Local` * ranks + source rank instead.
    """

    ranks: Ranks
    by_expert: bool = False


@dataclass(frozen=True)
class Spread(_OfIds):
    """The number of a slot's expert among those of the rank that holds it: `ids` modulo their number.

    node: the operator that sent the slots there, with those of all ranks; it is the identity, besides the ids.
    """

    ranks: Ranks
    node: Node


@dataclass(frozen=True)
class Among(_OfIds):
    """The number of a slot's expert among `experts` of them: `ids` less `first`. Other slots have no row in the order.

    node: the operator that took them; it is the identity, besides the ids.
    """

    first: int
    experts: int
    node: Node
