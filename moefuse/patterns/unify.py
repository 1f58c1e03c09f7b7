"""Substitution and unification: how facts over different axes are brought together.

In: facts and index groups. Out: the same over common axes, or `Conflict`. Axes are bound variables, so binding one to
a group of the same size is always right; what is refused is a leaf indexed by a position in an order by expert.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moefuse.graph import sizes
from moefuse.patterns.axes import Arrived, At, Axis, Digit, Group, Part, Perm, Pick, group_size
from moefuse.patterns.facts import (
    Case,
    Cases,
    Conflict,
    Const,
    Coords,
    Count,
    Dense,
    Dot,
    Expr,
    Fact,
    Leaf,
    Mean,
    Offs,
    OneHot,
    Op,
    Pieces,
    Pos,
    Sum,
    Table,
    Tally,
    group_axes,
)
from moefuse.patterns.quantised import Dequant, QuantDot, Quantised, RowScale
from moefuse.patterns.rank_facts import Among, Begin, Block, Census, Inflow, Local, Owned, Spread

Binding = Mapping[Axis, Group]


def bind_group(group: Group, binding: Binding) -> Group:
    """The group with axes replaced by groups of the same size."""
    result: list[Digit] = []
    for digit in group:
        if isinstance(digit, Axis):
            result.extend(binding.get(digit, (digit,)))
        elif isinstance(digit, Perm):
            result.append(_bind_perm(digit, binding))
        elif isinstance(digit, Arrived):
            result.append(Arrived(_bind_perm(digit.order, binding), digit.ids, digit.ranks, digit.size))
        elif isinstance(digit, Pick):
            over, key = bind_group(digit.over, binding), bind(digit.key, binding)
            result.append(replace(digit, over=over, key=key))
        elif isinstance(digit, Part):
            result.append(Part(bind_group(digit.group, binding), digit.start, digit.step, digit.size))
        else:
            result.append(At(bind(digit.expr, binding), digit.size, digit.wraps))
    return tuple(result)


def _bind_perm(perm: Perm, binding: Binding) -> Perm:
    return Perm(perm.sort, bind_group(perm.over, binding), bind(perm.key, binding))


def bind(expr: Expr, binding: Binding) -> Expr:
    """The expression with free axes replaced by groups of the same size.

    Raises Conflict where a leaf would be indexed by a position in sorted order: that is no index into the
    slots, and two sorts must never be mixed up.
    """
    if not binding or expr.axes.isdisjoint(binding):
        return expr
    return _BINDERS[type(expr)](expr, binding)


def _bind_leaf(expr: Leaf, binding: Binding) -> Expr:
    index = tuple(bind_group(group, binding) for group in expr.index)
    for group in index:
        if any(isinstance(digit, Arrived) for digit in group):
            raise Conflict(f"`{expr.node.name}` is this rank's own, the other operand came from all ranks")
        if any(isinstance(digit, Perm | Pick) for digit in group):
            raise Conflict(f"`{expr.node.name}` is in slot order, the other operand in an order by expert")
    return Leaf(expr.node, index, expr.sent)


def _bind_pieces(expr: Pieces, binding: Binding) -> Expr:
    index = tuple(bind_group(group, binding) for group in expr.index)
    if any(isinstance(digit, Perm | Pick | Arrived) for group in index for digit in group):
        raise Conflict(f"the rows of `{expr.node.name}` meet rows in another order by expert")
    return Pieces(expr.node, bind(expr.ids, binding), index, expr.experts)


def _bind_table(expr: Table, binding: Binding) -> Expr:
    index = tuple(bind_group(group, binding) for group in expr.index)
    if any(isinstance(digit, Perm | Pick | Arrived) for group in index for digit in group):
        raise Conflict(
            f"`{expr.nodes[0].name}` and the other experts' tensors are taken in an order by expert"
        )
    return Table(expr.nodes, index)


def _bind_cases(expr: Cases, binding: Binding) -> Expr:
    case = expr.case
    bound = Case(case.source, case.expert, bind(case.ids, binding), bind(case.rows, binding), case.slots)
    place = tuple(bind_group(group, binding) for group in expr.place)
    return Cases(bound, place, expr.earlier, expr.base, expr.terms)


def _bind_coords(expr: Coords, binding: Binding) -> Expr:
    """One column of coordinates is an index of its own."""
    columns = tuple(bind_group(group, binding) for group in expr.columns)
    at = bind_group(expr.at, binding)
    if len(at) == 1 and isinstance(at[0], Part) and not at[0].group:
        return Pos(columns[at[0].start])
    return Coords(columns, at)


def _bind_census(expr: Census, binding: Binding) -> Expr:
    bound = replace(expr, source=bind_group(expr.source, binding), at=bind_group(expr.at, binding))
    return bound if bound.inflow is None else bound.inflow


def _at(group: Group | None, binding: Binding) -> Group | None:
    return None if group is None else bind_group(group, binding)


def _bind_quantised(expr: Quantised | RowScale, binding: Binding) -> Expr:
    at = tuple(bind_group(group, binding) for group in expr.at)
    return replace(expr, row=bind(expr.row, binding), at=at)


_BINDERS: dict[type, Callable[[Any, Binding], Expr]] = {
    Leaf: _bind_leaf,
    Const: lambda e, b: e,
    Table: _bind_table,
    Pos: lambda e, b: Pos(bind_group(e.group, b)),
    Op: lambda e, b: e.rebuilt(lambda part: bind(part, b)),
    Dot: lambda e, b: e.rebuilt(lambda part: bind(part, b)),
    QuantDot: lambda e, b: e.rebuilt(lambda part: bind(part, b)),
    Quantised: _bind_quantised,
    RowScale: _bind_quantised,
    Dequant: lambda e, b: e.rebuilt(lambda part: bind(part, b)),
    Sum: lambda e, b: e.rebuilt(lambda part: bind(part, b)),
    Mean: lambda e, b: e.rebuilt(lambda part: bind(part, b)),
    Cases: _bind_cases,
    Coords: _bind_coords,
    OneHot: lambda e, b: OneHot(bind(e.ids, b), bind_group(e.at, b)),
    Dense: lambda e, b: Dense(bind(e.value, b), bind(e.ids, b), e.slots, bind_group(e.at, b), e.fill),
    Count: lambda e, b: Count(e.ids, bind_group(e.at, b)),
    Offs: lambda e, b: Offs(e.ids, bind_group(e.at, b)),
    Tally: lambda e, b: e,
    Owned: lambda e, b: Owned(e.ids, bind_group(e.at, b), e.experts),
    Inflow: lambda e, b: Inflow(e.ids, e.ranks, bind_group(e.source, b), _at(e.at, b)),
    Local: lambda e, b: e.rebuilt(lambda part: bind(part, b)),
    Census: _bind_census,
    Begin: lambda e, b: replace(e, source=_at(e.source, b), at=_at(e.at, b)),
    Block: lambda e, b: e.rebuilt(lambda part: bind(part, b)),
    Among: lambda e, b: e.rebuilt(lambda part: bind(part, b)),
    Spread: lambda e, b: e.rebuilt(lambda part: bind(part, b)),
    Pieces: _bind_pieces,
}


def bind_fact(fact: Fact, binding: Binding) -> Fact:
    """The fact with axes replaced in its dims and its expression alike."""
    return Fact(bind(fact.expr, binding), tuple(bind_group(group, binding) for group in fact.dims))


def fresh(fact: Fact) -> Fact:
    """The same fact over new axes. Rules that combine or contract facts use it, so that no axis is captured."""
    old = set().union(*(group_axes(group) for group in fact.dims)) if fact.dims else set()
    return bind_fact(fact, {axis: (Axis(axis.size),) for axis in old})


class Unifier:
    """Makes index groups of two (fresh) facts the same by binding axes. All or nothing: Conflict otherwise."""

    def __init__(self) -> None:
        self.binding: dict[Axis, Group] = {}

    def resolve(self, group: Group) -> Group:
        """The group under everything bound so far."""
        previous: Group | None = None
        while group != previous:
            previous, group = group, bind_group(group, self.binding)
        return group

    def unify(self, left: Group, right: Group) -> Group:
        """Make both groups the same and return them; a group of size one broadcasts."""
        a, b = list(self.resolve(left)), list(self.resolve(right))
        if not a or not b:
            return tuple(a or b)
        for one, other in ((a, b), (b, a)):  # digit by digit, a size of 0 would leave some over
            axis = one[0] if len(one) == 1 and len(other) > 1 and one[0] not in other else None
            if isinstance(axis, Axis) and sizes.same(axis.size, group_size(tuple(other))):
                self.binding[axis] = tuple(other)
                return tuple(other)
        result: list[Digit] = []
        while a and b:
            result.append(self._digit(a, b))
        if a or b:
            raise Conflict(f"{group_size(left)} and {group_size(right)} elements do not line up")
        return self.resolve(tuple(result))

    def _digit(self, a: list[Digit], b: list[Digit]) -> Digit:
        """Unify the first digits, splitting the longer one; both lists lose what was unified."""
        left, right = a.pop(0), b.pop(0)
        if left == right:
            return left
        if isinstance(left, Pick) and isinstance(right, Pick):
            if left.source is not right.source or (left.expert, left.rank) != (right.expert, right.rank):
                raise Conflict(f"the rows of {_words(left)} meet the rows of {_words(right)}")
            self.unify(left.over, right.over)
            return left
        if isinstance(left, Perm) and isinstance(right, Perm):
            if left.sort is not right.sort:
                raise Conflict(
                    f"rows in the order of `{left.sort.name}` meet rows in the order of `{right.sort.name}`"
                )
            self.unify(left.over, right.over)
            return left
        if isinstance(left, Arrived) and isinstance(right, Arrived):
            if left.order.sort is not right.order.sort or left.ranks != right.ranks:
                raise Conflict(
                    f"rows that came in the order of `{left.order.sort.name}` meet rows in that of "
                    f"`{right.order.sort.name}`"
                )
            self.unify(left.order.over, right.order.over)
            return left
        if isinstance(right, Axis) and sizes.same(left.size, right.size):
            self.binding[right] = (left,)
            return left
        if isinstance(left, Axis) and sizes.same(left.size, right.size):
            self.binding[left] = (right,)
            return right
        return self._split(left, right, a, b)

    def _split(self, left: Digit, right: Digit, a: list[Digit], b: list[Digit]) -> Digit:
        """Bind the longer one, an axis, to the shorter one and a tail that is unified with what follows."""
        if isinstance(right, Axis) and (rest := sizes.quotient(right.size, left.size)) is not None:
            tail = Axis(rest)
            self.binding[right] = (left, tail)
            b.insert(0, tail)
            return left
        if isinstance(left, Axis) and (rest := sizes.quotient(left.size, right.size)) is not None:
            tail = Axis(rest)
            self.binding[left] = (right, tail)
            a.insert(0, tail)
            return right
        raise Conflict(f"{left.size} and {right.size} elements do not line up")

    def expr(self, expr: Expr) -> Expr:
        """The expression under everything bound."""
        return bind(expr, {axis: self.resolve((axis,)) for axis in self.binding})


def _words(pick: Pick) -> str:
    whose = "" if pick.rank is None else f" of rank {pick.rank}"
    return f"expert {pick.expert}{whose} by `{pick.source.name}`"
