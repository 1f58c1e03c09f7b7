"""Loops over experts, unrolled: what a comparison with an expert's number, its nonzero and its rows mean.

`nonzero(ids == e)` lists the slots of expert e; rows gathered by it, multiplied with that expert's own tensors and
added back to their tokens are one case of the layer. A loop is a layer when it has every expert exactly once.
"""

import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.patterns.axes import Axis, Dims, Group, Part, Pick
from moefuse.patterns.capacity import dropped
from moefuse.patterns.counts import covers
from moefuse.patterns.facts import (
    Case,
    Cases,
    Conflict,
    Const,
    Coords,
    Dense,
    Expr,
    Fact,
    Leaf,
    OneHot,
    Op,
    Pos,
    Sum,
    group_axes,
)
from moefuse.patterns.pointwise import is_rounding, pointwise, walk
from moefuse.patterns.products import ADD, factors, times
from moefuse.patterns.router import distinct
from moefuse.patterns.rules import Lifting, Outcome, argument, op_name, rule, value
from moefuse.patterns.unify import Unifier

MOVES = frozenset(
    f"aten::{name}"
    for name in (
        *("select", "slice", "view", "reshape", "t", "transpose", "permute"),
        *("unsqueeze", "squeeze", "clone", "_to_copy"),
    )
)


def constant(group: Group) -> int | None:
    """The number that an index without axes comes to."""
    if len(group) != 1 or not isinstance(group[0], Part) or group[0].group:
        return None
    return group[0].start


@rule("aten::nonzero")
def nonzero(lift: Lifting, node: Node) -> Outcome:
    """The slots whose id is one expert's number; each column is an index into one dimension of the ids."""
    mask = lift.fact(argument(node, 0))
    if not isinstance(mask.expr, OneHot) or (expert := constant(mask.expr.at)) is None:
        if reason := dropped(argument(node, 0)):
            raise Conflict(reason, argument(node, 0))
        return None
    if covers(Fact(mask.expr.ids, mask.dims)) is None:
        raise Conflict("an expert's slots are looked for in a part of the ids only")
    over = tuple(digit for group in mask.dims for digit in group)
    pick = Pick(node, over, mask.expr.ids, expert, value(node).shape[0])
    if len(mask.dims) == 1:
        return Fact(Pos(mask.dims[0]), ((pick,), ()))
    at = Axis(len(mask.dims))
    return Fact(Coords(mask.dims, (at,)), ((pick,), (at,)))


def pick_of(group: Group) -> Pick | None:
    """The slots of one expert, if that is what a row dimension runs over."""
    return group[0] if len(group) == 1 and isinstance(group[0], Pick) else None


def add_case(lift: Lifting, node: Node, base_node: Node, rows: Fact, token: Group, pick: Pick) -> Fact:
    """base[token] += rows, for the slots of one expert: one more case. `token`: over the axes of `pick`."""
    base = lift.fact(base_node)
    earlier: Node | None = None
    kept: Node | None = base_node
    if isinstance(base.expr, Const) and base.expr.value == 0:
        kept = None
    elif isinstance(base.expr, Cases):
        earlier, kept = base_node, base.expr.base
    slots = tuple(a for a in pick.over if isinstance(a, Axis) and a not in group_axes(token))
    place = (token, *rows.dims[1:])
    case = Case(pick.source, pick.expert, pick.key, rows.expr, slots)
    return Fact(Cases(case, place, earlier, kept, value(node).dtype), place)


def all_cases(lift: Lifting, last: Cases) -> list[Case]:
    """The cases of a loop in the axes of the last one, latest first."""
    found = [last.case]
    current = last
    while current.earlier is not None:
        fact = lift.fact(current.earlier)
        unifier = Unifier()
        for own, before in zip(current.place, fact.dims, strict=True):
            unifier.unify(own, before)
        if not unifier.binding.keys().isdisjoint(
            axis for group in current.place for axis in group_axes(group)
        ):
            raise Conflict("the experts of a loop add to outputs of different shapes")
        earlier = unifier.expr(fact.expr)
        if not isinstance(earlier, Cases):  # closed: somebody else reads it as a layer's output
            raise Conflict(f"what the experts before have added (`{current.earlier.name}`) ended a loop")
        found.append(earlier.case)
        current = earlier
    return found


Score = tuple[int, Expr, Expr, tuple[Axis, ...]]
"""(expert, ids, weight per slot, slots) of a token's score for one expert: the weight where an id is the expert's."""


def score_of(expr: Expr) -> Score | None:
    """A token's score for one expert: the sum of weights masked by `ids == e`, or one column of scattered scores.

    Of one slot per token the mask itself: its weight, if any, is another factor.
    """
    if isinstance(expr, OneHot) and (expert := constant(expr.at)) is not None:
        return expert, expr.ids, Const(1.0), ()
    if isinstance(expr, Op) and is_rounding(expr):
        if (found := score_of(expr.args[0])) is None:
            return None
        return found[0], found[1], expr.rebuilt(lambda _: found[2]), found[3]
    if isinstance(expr, Dense):
        expert = constant(expr.at)
        known = expert is not None and expr.fill == 0 and distinct(expr.ids, expr.slots)
        return (expert, expr.ids, expr.value, expr.slots) if known and expert is not None else None
    if not isinstance(expr, Sum) or expr.hard:
        return None
    every = factors(expr.body)
    masks = [f for f in every if isinstance(f, OneHot)]
    expert = constant(masks[0].at) if len(masks) == 1 else None
    if expert is None or any(isinstance(f, OneHot) for m in every if m is not masks[0] for f in walk(m)):
        return None
    weights = [f for f in every if f is not masks[0]]
    return expert, masks[0].ids, times(weights) if weights else Const(1.0), expr.over


def masked_case(lift: Lifting, node: Node, fact: Fact) -> Fact | None:
    """score * expert(x) on every token: what one expert adds, if the expert runs on all tokens and is masked."""
    every = factors(fact.expr)
    scores = [found for f in every if (found := score_of(f)) is not None]
    if len(scores) != 1:
        return None
    expert, ids, weight, slots = scores[0]
    tokens = ids.axes - set(slots)
    others = [f for f in every if score_of(f) is None]
    rows = [f for f in others if not f.axes <= tokens]
    if len(rows) != 1 or not isinstance(rows[0], Leaf):
        return None
    weight = times([weight, *(f for f in others if f is not rows[0])])
    own = only_for(node)
    opened = lift.expand(rows[0], lambda leaf: leaf.axes > tokens and not leaf.selectors and leaf.node in own)
    if not opened.hard:
        return None
    body = Op(torch.ops.aten.mul.Tensor, (opened, weight), (), node)
    case = Case(node, expert, ids, body, slots)
    return Fact(Cases(case, fact.dims, None, None, value(node).dtype), fact.dims)


def only_for(node: Node) -> set[Node]:
    """The nodes that nothing but `node` needs, itself included: what one expert computes, not the rows all share."""
    own = {node}
    waiting = list(node.all_input_nodes)
    while waiting:
        before = waiting.pop()
        if before not in own and not _given(before) and own.issuperset(before.users):
            own.add(before)
            waiting.extend(before.all_input_nodes)
    return own


def _given(node: Node) -> bool:
    """True for an input of the graph, or a part or view of one: a weight."""
    while op_name(node) in MOVES:
        node = node.all_input_nodes[0]
    return node.op != "call_function"


@rule("aten::mul")
def mul(lift: Lifting, node: Node) -> Outcome:
    """A product; where it masks what one expert computes for every token, it is that expert's case."""
    outcome = pointwise(lift, node)
    case = masked_case(lift, node, outcome) if isinstance(outcome, Fact) and not outcome.expr.hard else None
    return case if case is not None and not lift.forced else outcome


@rule("aten::add")
def add(lift: Lifting, node: Node) -> Outcome:
    """A sum; of the cases so far and one more case, it is the cases so far."""
    before, term = lift.fact(argument(node, 0)), lift.fact(argument(node, 1))
    if not isinstance(before.expr, Cases) or not isinstance(term.expr, Cases) or node.kwargs:
        return pointwise(lift, node)
    shapes = zip(value(argument(node, 0)).shape, value(argument(node, 1)).shape, strict=True)
    if (
        term.expr.earlier is not None
        or term.expr.base is not None
        or not all(sizes.same(a, b) for a, b in shapes)
    ):
        return pointwise(lift, node)
    return Fact(
        Cases(term.expr.case, term.dims, argument(node, 0), before.expr.base, before.expr.terms), term.dims
    )


def write_back(lift: Lifting, node: Node, index: Fact, rows: Fact) -> Fact:
    """y[token] = y[token] + rows for the slots of one expert: adds only if no token occurs twice among them."""
    pick = pick_of(index.dims[0])
    assert pick is not None
    assert isinstance(index.expr, Pos)
    unifier = Unifier()
    unifier.unify(index.dims[0], rows.dims[0])
    (order,) = unifier.resolve(index.dims[0])
    assert isinstance(order, Pick)
    token = unifier.resolve(index.expr.group)
    slots = tuple(a for a in order.over if isinstance(a, Axis) and a not in group_axes(token))
    if not distinct(order.key, slots):
        raise Conflict("a token may choose an expert twice: writing its row back keeps only one of them")
    dims = tuple(unifier.resolve(group) for group in rows.dims)
    base_node = argument(node, 0)
    added = _added(lift.fact(base_node), unifier.expr(rows.expr), (token, *dims[1:]))
    return add_case(lift, node, base_node, Fact(added, dims), token, order)


def _added(base: Fact, written: Expr, place: Dims) -> Expr:
    """What is added to the base by writing `written` at `place`; Conflict if it isn't the base there plus something."""
    if isinstance(base.expr, Const) and base.expr.value == 0:
        return written
    unifier = Unifier()
    for own, other in zip(place, base.dims, strict=True):
        unifier.unify(own, other)
    before, after = unifier.expr(base.expr), unifier.expr(written)
    if isinstance(after, Op) and after.target in ADD and not after.kwargs and before in after.args[:2]:
        # Under the new names only for the comparison: the caller's names stay.
        added = written.args[1 - after.args.index(before)]  # type: ignore[attr-defined]
        assert isinstance(added, Expr)
        return added
    raise Conflict("an expert's rows overwrite what earlier experts have added")
