"""Rows that came from other ranks, put in the order of this rank's experts by arithmetic on their counts.

In: counts of rows per rank and expert, as they lie rank by rank or turned around. Out: where each of these runs of rows
begins; and of `begin among the ranks + place of the row - begin among the experts` that it is the place at which the
row came: a sort by expert, without a sort.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from moefuse.patterns.axes import Arrived, Axis, Dims, Group, Perm, group_size
from moefuse.patterns.facts import Conflict, Expr, Fact, Leaf, Op, Pos
from moefuse.patterns.rank_facts import Begin, Block, Inflow, Local
from moefuse.patterns.ranks import arrival
from moefuse.patterns.rules import op_name
from moefuse.patterns.unify import Unifier

RUNS = "aten::repeat_interleave"
"""The operator that repeats a run's number for each of its rows: rows in its order lie run by run, nothing else."""

# --- counts in their two orders --------------------------------------------------------------------------


def by_expert(counts: Inflow, dims: Dims) -> bool | None:
    """How counts of all ranks and experts lie in one dimension: expert by expert, or rank by rank; None otherwise."""
    if counts.at is None or len(dims) != 1:
        return None
    if dims[0] == (*counts.source, *counts.at):
        return False
    return True if dims[0] == (*counts.at, *counts.source) else None


def ends_of(fact: Fact) -> Fact | None:
    """Running counts: where each run of rows ends."""
    counts = fact.expr
    order = by_expert(counts, fact.dims) if isinstance(counts, Inflow) else None
    if order is None or not isinstance(counts, Inflow):
        return None
    return Fact(Begin(counts.ids, counts.ranks, order, counts.source, counts.at, ends=True), fact.dims)


def begins_of(ends: Fact, counts: Fact) -> Fact | None:
    """Ends less the counts themselves: where each run of rows begins."""
    end, count = ends.expr, counts.expr
    if not isinstance(end, Begin) or not isinstance(count, Inflow) or not end.ends or end.source is None:
        return None
    same = (end.ids.node, end.ranks) == (count.ids.node, count.ranks)
    order = by_expert(count, counts.dims)
    if not same or order is not end.by_expert or ends.dims != ((*_listed(end),),):
        return None
    return Fact(Begin(end.ids, end.ranks, end.by_expert, end.source, end.at), ends.dims)


def _listed(runs: Begin) -> Group:
    """The axes of runs in their order."""
    source, at = runs.source or (), runs.at or ()
    return (*at, *source) if runs.by_expert else (*source, *at)


# --- what runs say of a row ------------------------------------------------------------------------------


def at_block(table: Fact, by: Block, dims: Dims) -> Fact | None:
    """The element of a table over ranks and experts for the run in which a row is; None where that says nothing."""
    if len(table.dims) != 1:
        return None
    ranks, group = by.ranks, table.dims[0]
    runs = table.expr
    if isinstance(runs, Begin) and runs.source is not None and runs.at is not None and not runs.ends:
        same = (runs.ids.node, runs.ranks) == (by.ids.node, ranks)
        order = (*runs.at, *runs.source) if by.by_expert else (*runs.source, *runs.at)
        if not same or group != order:
            raise Conflict("the runs of rows that are looked up are other ones than those the rows lie in")
        return Fact(Begin(runs.ids, ranks, runs.by_expert, None, None), dims)
    if not isinstance(runs, Pos) or group_size(group) != ranks.world * ranks.experts:
        return None
    if runs.group == group:
        return Fact(by, dims)
    outer, inner = group[:1], group[1:]
    experts, others = (outer, inner) if by.by_expert else (inner, outer)
    if group_size(experts) != ranks.experts or group_size(others) != ranks.world:
        return None
    return Fact(Local(by.ids, ranks), dims) if runs.group == experts else None


def rows_by_expert(node: Node, rows: Arrived) -> Group:
    """The order in which runs lie expert by expert: as a stable sort by expert would give it."""
    key = rows.order.key
    assert isinstance(key, Leaf)
    local = Local(Leaf(key.node, key.index, sent=True), rows.ranks)
    return (Perm(node, (rows,), local),)


# --- places ----------------------------------------------------------------------------------------------


_ADDITIVE = (torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor)


def moved_place(node: Node, facts: Sequence[Fact]) -> Fact | None:
    """A sum or difference in which begins of a row's runs take part: the place at which the row came, or on the way."""
    if node.target not in _ADDITIVE or node.kwargs or len(facts) != 2:
        return None
    if not any(_of_runs(fact.expr) for fact in facts) or any(len(fact.dims) != 1 for fact in facts):
        return None
    if not all(_of_runs(fact.expr) or isinstance(fact.expr, Pos) for fact in facts):
        return None
    unifier = Unifier()
    rows = next(fact.dims[0] for fact in facts if _of_runs(fact.expr))
    for fact in facts:
        if not _counts_up(fact):
            unifier.unify(rows, fact.dims[0])
    rows = unifier.resolve(rows)
    args = tuple(Pos(rows) if _counts_up(fact) else unifier.expr(fact.expr) for fact in facts)
    assert isinstance(node.target, torch._ops.OpOverload)
    expr = Op(node.target, args, (), node)
    return Fact(Pos(came) if (came := _came_at(expr, rows)) else expr, (rows,))


def _of_runs(expr: Expr) -> bool:
    """True for the begin of a row's own run, and for sums in which one takes part."""
    if isinstance(expr, Op):
        return any(_of_runs(part) for part in expr.parts())
    return isinstance(expr, Begin) and expr.source is None


def _counts_up(fact: Fact) -> bool:
    """True for 0, 1, 2, ...: of as many elements as there are rows, or it couldn't be added to them."""
    (digit,) = fact.dims[0] if len(fact.dims[0]) == 1 else (None,)
    return isinstance(digit, Axis) and fact.expr == Pos((digit,))


def _came_at(expr: Expr, rows: Group) -> Group | None:
    """The place at which each row came, if the expression is that: its place in its run, after the runs before.

    A rank's only expert has its runs where they came: there is nothing to move.
    """
    arrived = arrival(rows)
    terms: dict[Any, int] = {}
    _collect(expr, 1, terms)
    here = {term: factor for term, factor in terms.items() if factor}
    if arrived is None or not all(_is_of(term, rows, arrived) for term in here):
        return None
    if here == {Pos(rows): 1}:
        return rows
    begins = {begin.by_expert: factor for begin, factor in here.items() if isinstance(begin, Begin)}
    moves = begins == {False: 1, True: -1} and here.get(Pos(rows)) == 1 and len(here) == 3
    (order,) = rows
    made = isinstance(order, Perm) and op_name(order.sort) == RUNS
    return (arrived,) if moves and made else None


def _is_of(term: Any, rows: Group, arrived: Arrived) -> bool:
    same = isinstance(term, Begin) and (term.ids.node, term.ranks) == (arrived.ids, arrived.ranks)
    return same or term == Pos(rows)


def _collect(expr: Any, factor: int, terms: dict[Any, int]) -> None:
    """Add up how often each place and begin is counted."""
    if not isinstance(expr, Op) or expr.target not in _ADDITIVE or expr.kwargs:
        terms[expr] = terms.get(expr, 0) + factor
        return
    left, right = expr.args
    _collect(left, factor, terms)
    _collect(right, -factor if expr.target is torch.ops.aten.sub.Tensor else factor, terms)
