"""Rows in expert order, cut into one piece per expert and put together again; and masks that list them so.

`rows[start:end]` and `split(counts.tolist())` give the rows of expert e where the bounds are the numbers of slots of
the experts before e, and with e: those numbers, as Python integers, are tallies. `cat` of every expert's piece, in
order, is in the order of the cut again. `masked_select` by a [experts, tokens] mask of a top-k's choices lists the
slots expert by expert, as a sort does.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.graph import sizes
from moefuse.patterns.axes import Arrived, Axis, Group, Part, Perm, Pick
from moefuse.patterns.counts import covers, joined_counts
from moefuse.patterns.facts import (
    Conflict,
    Const,
    Count,
    Dense,
    Expr,
    Fact,
    Leaf,
    Offs,
    Pieces,
    Pos,
    Tally,
    group_axes,
)
from moefuse.patterns.pointwise import walk
from moefuse.patterns.rank_facts import Inflow, Local, Owned
from moefuse.patterns.ranks import (
    arrival,
    is_one_inflow,
    local_of,
    run_of,
    same_ids,
    slots_of,
    tally_of_rank,
)
from moefuse.patterns.router import chosen_from, distinct, topk_of
from moefuse.patterns.rules import Lifting, Outcome, argument, op_name, rule, value
from moefuse.patterns.runs import RUNS
from moefuse.patterns.sent import marked
from moefuse.patterns.unify import Unifier, bind

# --- numbers of slots ------------------------------------------------------------------------------------


def tally_of(expr: Expr) -> Tally | None:
    """The number of slots that some experts have, if a scalar is one: one count, or a running count."""
    if isinstance(expr, Tally):
        return expr
    if isinstance(expr, Owned):
        return tally_of_rank(expr)
    if not isinstance(expr, Count | Offs) or not isinstance(expr.ids, Leaf | Local):
        return None
    if expr.at and (len(expr.at) != 1 or not isinstance(expr.at[0], Part) or expr.at[0].group):
        return None
    expert = expr.at[0].start if expr.at and isinstance(expr.at[0], Part) else 0
    return Tally(expr.ids, frozenset(range(expert + 1) if isinstance(expr, Offs) else (expert,)))


@rule("aten::_local_scalar_dense", "aten::item")
def item(lift: Lifting, node: Node) -> Outcome:
    """A count as a Python integer."""
    expr = lift.fact(argument(node, 0)).expr
    if is_one_inflow(expr) or run_of(expr) is not None:
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
    if not all(same_ids(tally.ids, tallies[0].ids) for tally in tallies):
        return None
    return Fact(Tally(tallies[0].ids, experts), ())


@rule("sub")
def difference(lift: Lifting, node: Node) -> Outcome:
    """What is left of some experts' number of slots without that of others of them."""
    whole, part = (tally_of(lift.fact(argument(node, i)).expr) for i in (0, 1))
    if whole is None or part is None or not same_ids(whole.ids, part.ids):
        return None
    return Fact(Tally(whole.ids, whole.experts - part.experts), ()) if part.experts < whole.experts else None


# --- cuts ------------------------------------------------------------------------------------------------


def order_of(group: Group) -> Perm | Arrived | Pick | None:
    """What a row dimension that may be cut runs over: rows by expert, as they came, or of one expert from all ranks."""
    (digit,) = group if len(group) == 1 else (None,)
    if isinstance(digit, Pick):
        return digit if digit.cut and digit.rank is None and arrival(digit.over) is not None else None
    return digit if isinstance(digit, Perm | Arrived) else None


def _by_expert(order: Perm | Arrived | Pick | None) -> Perm:
    """The order as one by expert: rows that came to the only expert of a rank lie in it as they are."""
    if isinstance(order, Arrived) and order.ranks.experts == 1 and (key := local_of(order)) is not None:
        return Perm(order.ids, (order,), key)
    if not isinstance(order, Perm):
        raise Conflict(
            "rows are cut by expert as they came from the ranks: not in the order of their experts"
        )
    return order


def one_piece(lift: Lifting, node: Node, fact: Fact, dim: int) -> Fact:
    """Rows start..end in expert order: one expert's, if the bounds are the tallies before it and with it."""
    order = _by_expert(order_of(fact.dims[dim]))
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
    lengths = argument(node, 1)
    if any(run_of(lift.fact(length).expr) is not None for length in lengths):
        return _runs(lift, node, fact, dim)
    order = _by_expert(order)
    found: list[Fact] = []
    for expert, (length, piece) in enumerate(zip(lengths, value(node), strict=True)):
        tally = _tally(lift, order, length)
        if tally is None or tally.experts != {expert}:
            raise Conflict(
                f"piece {expert} of the rows in expert order isn't as long as expert {expert}'s count"
            )
        found.append(_piece(fact, dim, order, expert, piece.shape[dim]))
    return tuple(found)


def _piece(fact: Fact, dim: int, order: Perm, expert: int, size: sizes.Size, rank: int | None = None) -> Fact:
    rows = Pick(order.sort, order.over, order.key, expert, size, cut=True, rank=rank)
    return Fact(fact.expr, (*fact.dims[:dim], (rows,), *fact.dims[dim + 1 :]))


def _runs(lift: Lifting, node: Node, fact: Fact, dim: int) -> tuple[Fact, ...]:
    """Rows that came from all ranks, cut by how many each rank sent for each expert."""
    order = order_of(fact.dims[dim])
    rows = arrival(order.over if isinstance(order, Pick) else fact.dims[dim])
    key = local_of(rows) if rows is not None else None
    if rows is None or key is None or (order is not rows and not _keeps_ranks(order, rows)):
        raise Conflict(
            "rows are cut by how many each rank sent for each expert, and aren't proved to lie rank by rank or expert "
            "by expert"
        )
    found: list[Fact] = []
    for place, (length, piece) in enumerate(zip(argument(node, 1), value(node), strict=True)):
        expert, rank = divmod(place, rows.ranks.world)
        if order is rows:
            rank, expert = divmod(place, rows.ranks.experts)
        elif isinstance(order, Pick):
            rank, expert = place, order.expert
        sent = lift.fact(length).expr
        same = isinstance(sent, Inflow) and (sent.ids.node, sent.ranks) == (rows.ids, rows.ranks)
        if not same or run_of(sent) != (rank, expert):
            raise Conflict(
                f"piece {place} of the rows that came from all ranks isn't as long as the number that rank {rank} sent "
                f"for expert {expert} of this rank"
            )
        found.append(_piece(fact, dim, Perm(rows.ids, (rows,), key), expert, piece.shape[dim], rank))
    return tuple(found)


def _keeps_ranks(order: Perm | Pick | Arrived | None, rows: Arrived) -> bool:
    """True for the order expert by expert in which each expert's rows lie rank by rank: not for any sort."""
    made = order.sort if isinstance(order, Perm) else order.source if isinstance(order, Pick) else None
    return made is not None and (made is rows.ids or op_name(made) == RUNS)


def _tally(lift: Lifting, order: Perm, bound: Any) -> Tally | None:
    """What a bound counts, if it counts slots of the very ids that the order sorts, all of them."""
    if not isinstance(bound, Node) or not isinstance(order.key, Leaf | Local):
        return None
    tally = tally_of(lift.fact(bound).expr)
    if tally is None or not same_ids(tally.ids, order.key) or covers(Fact(order.key, (order.over,))) is None:
        return None
    return tally


def _experts_below(lift: Lifting, order: Perm, bound: Any) -> int | None:
    """How many experts, from the first one on, have their rows below the bound."""
    if isinstance(bound, int):
        return 0 if bound == 0 else None
    tally = _tally(lift, order, bound)
    complete = tally is not None and tally.experts == frozenset(range(len(tally.experts)))
    return len(tally.experts) if tally is not None and complete else None


# --- pieces put together ---------------------------------------------------------------------------------


@rule("aten::cat")
def cat(lift: Lifting, node: Node) -> Outcome:
    """Every expert's piece, in order: the rows in the order of the cut, each computed by its own expert.

    Of what each rank sent for each expert: all of one expert, or all rows, rank by rank or expert by expert.
    """
    parts = [lift.fact(part) for part in argument(node, 0)]
    hard = any(part.expr.hard for part in parts)
    dim = int(argument(node, 1, "dim", 0)) % max(len(parts[0].dims), 1)
    picks = [pick for part in parts if (pick := _cut_piece(part, dim)) is not None]
    if not hard and (len(picks) < len(parts) or picks[0].rank is None):
        return joined_counts(parts)
    if len(picks) < len(parts) or dim != 0 or not picks:
        raise Conflict("expert rows are put together that are not the pieces of a cut by expert")
    first = picks[0]
    joined = _joined(picks, value(node).shape[0])
    index: list[Group] = [slots_of(first.over), *parts[0].dims[1:]]
    if hard and first.rank is None:
        for expert, part in enumerate(parts):
            if not part.expr.hard:
                raise Conflict(
                    f"piece {expert} of the rows that are put together isn't that of expert {expert}"
                )
            _at(index, part)
        return Fact(Pieces(node, first.key, tuple(index), len(parts)), (joined, *index[1:]))
    each: dict[int, Expr] = {}
    for pick, part in zip(picks, parts, strict=True):
        if each.setdefault(pick.expert, expr := _at(index, part)) != expr:
            raise Conflict(f"the pieces of expert {pick.expert} that are put together mean different things")
    if len(set(each.values())) == 1:
        return Fact(each[first.expert], (joined, *index[1:]))
    if not all(expr.hard for expr in each.values()):
        raise Conflict("rows are put together that are not all computed by experts")
    return Fact(Pieces(node, first.key, tuple(index), len(each)), (joined, *index[1:]))


def _cut_piece(part: Fact, dim: int) -> Pick | None:
    """The piece of a cut that a dimension runs over, if it does."""
    (pick,) = part.dims[dim] if len(part.dims) > dim and len(part.dims[dim]) == 1 else (None,)
    return pick if isinstance(pick, Pick) and pick.cut else None


def _joined(picks: list[Pick], size: sizes.Size) -> Group:
    """The order in which pieces lie, one after the other. Conflict where one is missing, twice, or another one's."""
    first, rows = picks[0], arrival(picks[0].over)
    if any(pick.source is not first.source for pick in picks):
        raise Conflict("pieces of two different cuts by expert are put together")
    if any(not _came_together(rows, arrival(pick.over)) for pick in picks):
        raise Conflict("pieces of rows that came from the ranks in two orders are put together")
    order = Perm(first.source, first.over, first.key)
    labels = [(pick.rank, pick.expert) for pick in picks]
    if first.rank is None or rows is None:
        for expert, label in enumerate(labels):
            if label != (None, expert):
                raise Conflict(
                    f"piece {expert} of the rows that are put together isn't that of expert {expert}"
                )
        if rows is not None and len(picks) != rows.ranks.experts:
            raise Conflict(
                f"rows of {len(picks)} experts are put together, and came for {rows.ranks.experts}"
            )
        return (rows,) if rows is not None and first.source is rows.ids and len(picks) == 1 else (order,)
    ranks, experts = range(rows.ranks.world), range(rows.ranks.experts)
    if labels == [(rank, expert) for rank in ranks for expert in experts]:
        return (rows,)
    if labels == [(rank, expert) for expert in experts for rank in ranks]:
        return (order,)
    if labels == [(rank, first.expert) for rank in ranks]:
        return (replace(first, rank=None, size=size),)
    raise Conflict(
        "what ranks sent for experts is put together neither rank by rank nor expert by expert, all of it once"
    )


def _came_together(rows: Arrived | None, others: Arrived | None) -> bool:
    """True for the same exchange of the same rows, and for none: the order in which they were sent is what counts."""
    if rows is None or others is None:
        return rows is others
    return (rows.order.sort, rows.ids, rows.ranks) == (others.order.sort, others.ids, others.ranks)


def _at(index: Sequence[Group], part: Fact) -> Expr:
    """What a piece means, at the index of the whole."""
    (rows,) = part.dims[0]
    assert isinstance(rows, Pick | Arrived)
    unifier = Unifier()
    slots = slots_of(rows.over if isinstance(rows, Pick) else (rows,))
    for own, other in zip(index, (slots, *part.dims[1:]), strict=True):
        unifier.unify(own, other)
    if any(unifier.resolve(group) != group for group in index):
        raise Conflict("the pieces of the experts have different shapes")
    return unifier.expr(part.expr)


def piece_at(lift: Lifting, whole: Pieces, expert: int) -> Expr:
    """What one expert's piece means, at the index of the whole, and on the rank where the whole is read."""
    operands = argument(whole.node, 0)
    parts = map(lift.fact, operands if isinstance(operands, list | tuple) else [operands])
    part = next(part for part in parts if whole.experts == 1 or _expert_of(part) == expert)
    found = _at(whole.index, part)
    return marked(found, False) if isinstance(whole.ids, Local) and not whole.ids.ids.sent else found


def _expert_of(part: Fact) -> int | None:
    pick = _cut_piece(part, 0)
    return pick.expert if pick is not None else None


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
