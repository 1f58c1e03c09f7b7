"""Facts: what a tensor of the graph means, as an expression over index axes.

In: nothing. Out: the vocabulary of the rules. A `Fact(expr, dims)` says: dimension i of the tensor runs over
the axes `dims[i]` (mixed radix, outermost first), and the element at one index tuple has the value `expr`.
Axes are bound variables: only their identity and their positions in `dims` matter, never their sizes, so
equal sizes (T = K, E = H) can't be mistaken for each other.

The same row expression `w * W2 act(W1 x)` holds for grouped, batched and NPU spellings: row order lives in
`dims` alone. Dispatch is the substitution of one row axis by another.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from moefuse.patterns.axes import Arrived, At, Axis, Dims, Group, Part, Perm, Pick

if TYPE_CHECKING:
    from moefuse.patterns.rank_facts import Among, Local, Spread

# --- expressions -----------------------------------------------------------------------------------------


class Expr:
    """Base of all expressions. Values are immutable; equality is structural, axes by identity."""

    def parts(self) -> Iterator["Expr"]:
        """The direct sub-expressions."""
        yield from ()

    def groups(self) -> Iterator[Group]:
        """The index groups that this expression itself (not its parts) reads."""
        yield from ()

    @cached_property
    def hard(self) -> bool:
        """True when an expert GEMM stands in here: such a fact may not be forgotten silently."""
        return any(part.hard for part in self.parts())

    @cached_property
    def axes(self) -> frozenset[Axis]:
        """The free axes."""
        found: set[Axis] = set()
        for group in self.groups():
            found |= group_axes(group)
        for part in self.parts():
            found |= part.axes
        return frozenset(found - set(self.bound()))

    @cached_property
    def weight(self) -> int:
        """How many expressions stand in here, itself included; shared ones count each time."""
        return 1 + sum(part.weight for part in self.parts())

    @cached_property
    def depth(self) -> int:
        """How many expressions stand inside of each other, itself included."""
        return 1 + max((part.depth for part in self.parts()), default=0)

    def bound(self) -> tuple[Axis, ...]:
        """The axes that this expression sums over."""
        return ()

    def rebuilt(self, change: Callable[["Expr"], "Expr"]) -> "Expr":
        """The same expression with each direct sub-expression changed."""
        return self


def group_axes(group: Group) -> set[Axis]:
    """The free axes of a group, those of its permutations, slices and index expressions included."""
    found: set[Axis] = set()
    for digit in group:
        if isinstance(digit, Axis):
            found.add(digit)
        elif isinstance(digit, Perm | Pick):
            found |= group_axes(digit.over)
        elif isinstance(digit, Arrived):
            found |= group_axes(digit.order.over)
        elif isinstance(digit, Part):
            found |= group_axes(digit.group)
        else:
            found |= digit.expr.axes
    return found


@dataclass(frozen=True)
class Leaf(Expr):
    """The element of graph node `node` at `index` (one group per dimension of the node).

    sent: it was read on the rank that a row came from, and came with it. Of other leaves beside rows that came from
    other ranks each rank has its own.
    """

    node: Node
    index: Dims
    sent: bool = False

    def groups(self) -> Iterator[Group]:
        yield from self.index

    @property
    def selectors(self) -> tuple[At, ...]:
        """The data-dependent digits of the index."""
        return tuple(digit for group in self.index for digit in group if isinstance(digit, At))


@dataclass(frozen=True)
class Const(Expr):
    """One number."""

    value: float


@dataclass(frozen=True)
class Pos(Expr):
    """The integer value of a group of indices: an `arange`, or what an argsort returns."""

    group: Group

    def groups(self) -> Iterator[Group]:
        yield self.group


@dataclass(frozen=True)
class Op(Expr):
    """A pointwise operator. `args` holds expressions and plain Python values in schema order."""

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    node: Node | None = field(default=None, compare=False)

    def parts(self) -> Iterator[Expr]:
        yield from (arg for arg in self.args if isinstance(arg, Expr))

    def rebuilt(self, change: Callable[[Expr], Expr]) -> Expr:
        args = tuple(change(arg) if isinstance(arg, Expr) else arg for arg in self.args)
        return Op(self.target, args, self.kwargs, self.node)


@dataclass(frozen=True)
class Dot(Expr):
    """The sum over `over` of a * b: what a matrix product computes for one output element."""

    a: Expr
    b: Expr
    over: tuple[Axis, ...]
    expert: bool
    node: Node = field(compare=False)

    def parts(self) -> Iterator[Expr]:
        yield from (self.a, self.b)

    def bound(self) -> tuple[Axis, ...]:
        return self.over

    @cached_property
    def hard(self) -> bool:
        """A product with weights that the routing selects is what this analysis looks for."""
        return self.expert or self.a.hard or self.b.hard

    def rebuilt(self, change: Callable[[Expr], Expr]) -> Expr:
        return Dot(change(self.a), change(self.b), self.over, self.expert, self.node)


@dataclass(frozen=True)
class Sum(Expr):
    """The sum of `body` over `over`, added to the graph node `base` where there is one.

    terms: the dtype to which the graph rounds each term, None where a product and its sum are one operator.
    """

    body: Expr
    over: tuple[Axis, ...]
    node: Node = field(compare=False)
    base: Node | None = None
    terms: torch.dtype | None = field(default=None, compare=False)

    def parts(self) -> Iterator[Expr]:
        yield self.body

    def bound(self) -> tuple[Axis, ...]:
        return self.over

    def rebuilt(self, change: Callable[[Expr], Expr]) -> Expr:
        return Sum(change(self.body), self.over, self.node, self.base, self.terms)


@dataclass(frozen=True)
class Mean(Expr):
    """The mean of `body` over the features `over` of an expert row: what a norm of the row divides by."""

    body: Expr
    over: tuple[Axis, ...]
    node: Node = field(compare=False)

    def parts(self) -> Iterator[Expr]:
        yield self.body

    def bound(self) -> tuple[Axis, ...]:
        return self.over

    def rebuilt(self, change: Callable[[Expr], Expr]) -> Expr:
        return Mean(change(self.body), self.over, self.node)


@dataclass(frozen=True)
class Case:
    """What one expert adds: the sum over `slots` of `rows` where the id (`ids`) is `expert`, found by `source`."""

    source: Node
    expert: int
    ids: Expr
    rows: Expr
    slots: tuple[Axis, ...]


@dataclass(frozen=True)
class Cases(Expr):
    """What the experts of an unrolled loop have added so far: one expert's case, on top of what node `earlier` holds.

    place: the index at which this case is added, one group per dimension of the output, in the free axes.
    base: the node that the first case was added to, None for zeros. terms: as in `Sum`.
    The cases before are not repeated here: a loop over 128 experts would hold 128^2 of them.
    """

    case: Case
    place: Dims
    earlier: Node | None = None
    base: Node | None = None
    terms: torch.dtype | None = field(default=None, compare=False)

    @property
    def hard(self) -> bool:
        """Also where the last expert returns its tokens as they are: others came before it."""
        return True

    def parts(self) -> Iterator[Expr]:
        yield from (self.case.ids, self.case.rows)

    def groups(self) -> Iterator[Group]:
        yield from self.place

    def bound(self) -> tuple[Axis, ...]:
        return self.case.slots


@dataclass(frozen=True)
class Coords(Expr):
    """What nonzero returns, [elements, dimensions]: column i holds the index into dimension i of its operand."""

    columns: Dims
    at: Group

    def groups(self) -> Iterator[Group]:
        yield from (*self.columns, self.at)


@dataclass(frozen=True)
class OneHot(Expr):
    """1 where the integer expression `ids` equals the value of `at`, otherwise 0."""

    ids: Expr
    at: Group

    def parts(self) -> Iterator[Expr]:
        yield self.ids

    def groups(self) -> Iterator[Group]:
        yield self.at


@dataclass(frozen=True)
class Dense(Expr):
    """A value per (token, expert) made from a value per slot: `value` where ids == at, `fill` elsewhere.

    `slots` are the axes over which the slots of one token lie. Where an id repeats within them, one wins.
    """

    value: Expr
    ids: Expr
    slots: tuple[Axis, ...]
    at: Group
    fill: float

    def parts(self) -> Iterator[Expr]:
        yield from (self.value, self.ids)

    def groups(self) -> Iterator[Group]:
        yield self.at

    def bound(self) -> tuple[Axis, ...]:
        return self.slots


@dataclass(frozen=True)
class Count(Expr):
    """How many elements of `ids` (all of them) equal the value of `at`. Of `Local`: of all rows that came here."""

    ids: "Leaf | Local | Spread | Among"
    at: Group

    def groups(self) -> Iterator[Group]:
        yield self.at


@dataclass(frozen=True)
class Offs(Expr):
    """How many elements of `ids` (all of them) are at most the value of `at`: the end of an expert's rows."""

    ids: "Leaf | Local | Spread | Among"
    at: Group

    def groups(self) -> Iterator[Group]:
        yield self.at


@dataclass(frozen=True)
class Tally(Expr):
    """How many elements of `ids` (all of them) are one of `experts`: one number."""

    ids: "Leaf | Local"
    experts: frozenset[int]


@dataclass(frozen=True)
class Pieces(Expr):
    """The element at `index` of what `node` puts together: rows of `experts` experts, each in pieces of its own.

    index: the slot, as the axes of `ids` in the order of the cut, then one group per further dimension. What each
    piece means is asked of the operands of `node`: repeated here, a loop over 128 experts would hold it 128 times.
    """

    node: Node
    ids: Expr
    index: Dims
    experts: int

    def parts(self) -> Iterator[Expr]:
        yield self.ids

    def groups(self) -> Iterator[Group]:
        yield from self.index

    @cached_property
    def hard(self) -> bool:
        """Its pieces are expert rows."""
        return True

    def rebuilt(self, change: Callable[[Expr], Expr]) -> Expr:
        return Pieces(self.node, change(self.ids), self.index, self.experts)


@dataclass(frozen=True)
class Table(Expr):
    """The element at `index[1:]` of the tensor of expert `index[0]`: a list of tensors read as one stacked tensor."""

    nodes: tuple[Node, ...]
    index: Dims

    def groups(self) -> Iterator[Group]:
        yield from self.index


# --- facts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """The meaning of a tensor: `expr` at one index, `dims` how the tensor's dimensions run over the axes."""

    expr: Expr
    dims: Dims

    @property
    def sorted(self) -> bool:
        """True when a dimension runs in an order by expert: of a sort, an expert's slots, rows that came here."""
        return any(isinstance(digit, Perm | Pick | Arrived) for group in self.dims for digit in group)


@dataclass(frozen=True)
class Lost:
    """Why a node has no fact: the reason in words, the node, and the loss further up that caused it."""

    reason: str
    node: Node
    cause: "Lost | None" = None

    @property
    def root(self) -> "Lost":
        """The first thing that stood in the way."""
        return self.cause.root if self.cause is not None else self


class Conflict(Exception):
    """Two index groups can't be made the same, or a rule's demand isn't met. Carries the reason.

    at: the operand that is to blame, so that its own loss can be named as the cause.
    """

    def __init__(self, reason: str, at: Node | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.at = at
