"""Rows in expert order, cut into one piece per expert and put together again; and masks that list them so.

`rows[start:end]` and `split(counts.tolist())` give the rows of expert e where the bounds are the numbers of slots of
the experts before e, and with e: those numbers, as Python integers, are tallies. `cat` of every expert's piece, in
order, is in the order of the cut again. `masked_select` by a [experts, tokens] mask of a top-k's choices lists the
slots expert by expert, as a sort does.
"""

import sys
from typing import Any

from torch.fx import Node

from moefuse.graph import sizes
from moefuse.patterns.counts import covers, joined_counts
from moefuse.patterns.facts import (
    Axis,
    Conflict,
    Const,
    Count,
    Dense,
    Expr,
    Fact,
    Group,
    Leaf,
    Offs,
    Part,
    Perm,
    Pick,
    Pieces,
    Pos,
    Tally,
    group_axes,
)
from moefuse.patterns.pointwise import walk
from moefuse.patterns.rank_facts import Owned
from moefuse.patterns.ranks import is_one_inflow, tally_of_rank
from moefuse.patterns.router import chosen_from, distinct, topk_of
from moefuse.patterns.rules import Lifting, Outcome, argument, rule, value
from moefuse.patterns.unify import Unifier, bind

# --- numbers of slots ------------------------------------------------------------------------------------


def tally_of(expr: Expr) -> Tally | None:
    """The number of slots that some experts have, if a scalar is one: one count, or a running count."""
    if isinstance(expr, Tally):
        return expr
    if isinstance(expr, Owned):
        return tally_of_rank(expr)
    if not isinstance(expr, Count | Offs) or not isinstance(expr.ids, Leaf):
        return None
    if expr.at and (len(expr.at) != 1 or not isinstance(expr.at[0], Part) or expr.at[0].group):
        return None
    expert = expr.at[0].start if expr.at and isinstance(expr.at[0], Part) else 0
    return Tally(expr.ids, frozenset(range(expert + 1) if isinstance(expr, Offs) else (expert,)))


@rule("aten::_local_scalar_dense", "aten::item")
def item(lift: Lifting, node: Node) -> Outcome:
    """A count as a Python integer."""
    expr = lift.fact(argument(node, 0)).expr
    if is_one_inflow(expr):
        return Fact(expr, ())
    tally = tally_of(expr)
    return None if tally is None else Fact(tally, ())


@rule("add", "sym_sum")
def total(lift: Lifting, node: Node) -> Outcome:
    """The sum of several experts' numbers of slots, as Python integers."""
    terms = argument(node, 0) if isinstance(argument(node, 0), list | tuple) else node.args
    return summed_up([lift.fact(term).expr for term in terms])


def summed_up(terms: list[Expr]) -> Fact | None:
    """The tally of all experts of the terms, none of them twice; None for anything else."""
    found = [tally_of(term) for term in terms if term != Const(0.0)]
    tallies = [tally for tally in found if tally is not None]
    experts = frozenset().union(*(tally.experts for tally in tallies))
    if not tallies or len(tallies) != len(found) or len(experts) != sum(len(t.experts) for t in tallies):
        return None
    if any(tally.ids.node is not tallies[0].ids.node for tally in tallies):
        return None
    return Fact(Tally(tallies[0].ids, experts), ())


@rule("sub")
def difference(lift: Lifting, node: Node) -> Outcome:
    """What is left of some experts' number of slots without that of others of them."""
    whole, part = (tally_of(lift.fact(argument(node, i)).expr) for i in (0, 1))
    if whole is None or part is None or whole.ids.node is not part.ids.node:
        return None
    return Fact(Tally(whole.ids, whole.experts - part.experts), ()) if part.experts < whole.experts else None


# --- cuts ------------------------------------------------------------------------------------------------


def order_of(group: Group) -> Perm | None:
    """The order by expert in which a row dimension lies, if it does."""
    return group[0] if len(group) == 1 and isinstance(group[0], Perm) else None


def one_piece(lift: Lifting, node: Node, fact: Fact, dim: int) -> Fact:
    """Rows start..end in expert order: one expert's, if the bounds are the tallies before it and with it."""
    order = order_of(fact.dims[dim])
    assert order is not None
    before = _experts_below(lift, order, argument(node, 2, "start", 0) or 0)
    end = argument(node, 3, "end")
    until = _experts_below(lift, order, end)
    if until is None and (end is None or end == sys.maxsize):
        until = chosen_from(order.key)
    if before is None or until is None or until != before + 1 or argument(node, 4, "step", 1) != 1:
        raise Conflict("rows in expert order are cut at other places than between two experts")
    return _piece(fact, dim, order, before, value(node).shape[dim])


def pieces(lift: Lifting, node: Node, fact: Fact, dim: int) -> tuple[Fact, ...]:
    """All rows in expert order, cut by a list of lengths: expert after expert, if each is that expert's count."""
    order = order_of(fact.dims[dim])
    assert order is not None
    found: list[Fact] = []
    for expert, (length, piece) in enumerate(zip(argument(node, 1), value(node), strict=True)):
        tally = _tally(lift, order, length)
        if tally is None or tally.experts != {expert}:
            raise Conflict(
                f"piece {expert} of the rows in expert order isn't as long as expert {expert}'s count"
            )
        found.append(_piece(fact, dim, order, expert, piece.shape[dim]))
    return tuple(found)


def _piece(fact: Fact, dim: int, order: Perm, expert: int, size: sizes.Size) -> Fact:
    rows = Pick(order.sort, order.over, order.key, expert, size, cut=True)
    return Fact(fact.expr, (*fact.dims[:dim], (rows,), *fact.dims[dim + 1 :]))


def _tally(lift: Lifting, order: Perm, bound: Any) -> Tally | None:
    """What a bound counts, if it counts slots of the very ids that the order sorts, all of them."""
    if not isinstance(bound, Node) or not isinstance(order.key, Leaf):
        return None
    tally = tally_of(lift.fact(bound).expr)
    if (
        tally is None
        or tally.ids.node is not order.key.node
        or covers(Fact(order.key, (order.over,))) is None
    ):
        return None
    return tally


def _experts_below(lift: Lifting, order: Perm, bound: Any) -> int | None:
    """How many experts, from the first one on, have their rows below the bound."""
    if isinstance(bound, int):
        return 0 if bound == 0 else None
    tally = _tally(lift, order, bound)
    complete = tally is not None and tally.experts == frozenset(range(len(tally.experts)))
    return len(tally.experts) if tally is not None and complete else None


@rule("aten::cat")
def cat(lift: Lifting, node: Node) -> Outcome:
    """Every expert's piece, in order: the rows in the order of the cut, each computed by its own expert."""
    parts = [lift.fact(part) for part in argument(node, 0)]
    if not any(part.expr.hard for part in parts):
        return joined_counts(parts)
    dim = int(argument(node, 1, "dim", 0)) % len(parts[0].dims)
    picks = [part.dims[dim][0] if len(part.dims[dim]) == 1 else None for part in parts]
    first = picks[0]
    if dim != 0 or not isinstance(first, Pick) or not first.cut:
        raise Conflict("expert rows are put together that are not the pieces of a cut by expert")
    index: list[Group] = [first.over, *parts[0].dims[1:]]
    for expert, (pick, part) in enumerate(zip(picks, parts, strict=True)):
        if (
            not isinstance(pick, Pick)
            or pick.source is not first.source
            or pick.expert != expert
            or not part.expr.hard
        ):
            raise Conflict(f"piece {expert} of the rows that are put together isn't that of expert {expert}")
        unifier = Unifier()
        for group, other in zip(index, (pick.over, *part.dims[1:]), strict=True):
            unifier.unify(group, other)
        if any(unifier.resolve(group) != group for group in index):
            raise Conflict("the pieces of the experts have different shapes")
    order = Perm(first.source, first.over, first.key)
    return Fact(Pieces(node, first.key, tuple(index)), ((order,), *index[1:]))


def piece_at(lift: Lifting, whole: Pieces, expert: int) -> Expr:
    """What one expert's piece means, at the index of the whole."""
    part = lift.fact(argument(whole.node, 0)[expert])
    (pick,) = part.dims[0]
    assert isinstance(pick, Pick)
    unifier = Unifier()
    for own, other in zip(whole.index, (pick.over, *part.dims[1:]), strict=True):
        unifier.unify(own, other)
    if any(unifier.resolve(group) != group for group in whole.index):
        raise Conflict("the pieces of the experts have different shapes")
    return unifier.expr(part.expr)


# --- masks -----------------------------------------------------------------------------------------------


@rule("aten::masked_select")
def masked_select(lift: Lifting, node: Node) -> Outcome:
    """Values per (expert, token) taken where a mask has a top-k's choices: in expert order, each slot once."""
    source, mask = lift.fact(argument(node, 0)), lift.fact(argument(node, 1))
    chosen = mask.expr
    if not isinstance(chosen, Dense) or chosen.value != Const(1.0) or chosen.fill != 0:
        if source.expr.hard or isinstance(source.expr, Pos):
            raise Conflict("taken by a mask that isn't proved to be the choices of a top-k")
        return None
    if len(mask.dims) != len(source.dims) or len(mask.dims) != 2 or not isinstance(chosen.ids, Leaf):
        return None
    over: Group = tuple(digit for group in chosen.ids.index for digit in group)
    tokens = tuple(digit for digit in over if digit not in chosen.slots)
    if not distinct(chosen.ids, chosen.slots):
        raise Conflict("taken by a mask of choices whose ids may repeat within a token")
    if mask.dims != (chosen.at, tokens):
        raise Conflict("taken by a mask of choices, but not expert by expert")
    unifier = Unifier()
    for own, other in zip(mask.dims, source.dims, strict=True):
        unifier.unify(own, other)
    taken = _at_choice(unifier.expr(source.expr), chosen)
    moved = any(unifier.resolve(group) != group for group in mask.dims)
    if moved or taken is None or taken.hard or taken.axes & group_axes(chosen.at):
        raise Conflict("taken by a mask of choices, but neither routing weights nor tokens")
    topk, _ = topk_of(chosen.ids.node)
    assert topk is not None
    return Fact(taken, ((Perm(topk, over, chosen.ids),) if over else (),))


def _at_choice(expr: Expr, chosen: Dense) -> Expr | None:
    """The value per (expert, token) at a slot: the slot's own value, if it was scattered by the same ids."""
    if not isinstance(expr, Dense):
        return None if any(isinstance(part, Dense) for part in walk(expr)) else expr
    if len(expr.slots) != len(chosen.slots) or expr.at != chosen.at:
        return None
    renamed: dict[Axis, Group] = {a: (b,) for a, b in zip(expr.slots, chosen.slots, strict=True)}
    return bind(expr.value, renamed) if bind(expr.ids, renamed) == chosen.ids else None
