"""Rows that came from other ranks, put in order by expert by Ascend's operator.

In: rows in the order of arrival (exchange.py), and how many came from each rank for each of this rank's experts. Out:
the rows as a stable sort by expert would lay them, where each had come, and the rows per expert.
"""

from typing import Any

from torch.fx import Node

from moefuse.patterns.axes import Arrived, Group
from moefuse.patterns.facts import Conflict, Fact, Leaf, Pos, group_axes
from moefuse.patterns.rank_facts import Inflow
from moefuse.patterns.ranks import summed_counts
from moefuse.patterns.rules import Lifting, Outcome, argument, rule
from moefuse.patterns.runs import rows_by_expert
from moefuse.patterns.unify import Unifier

_OPTIONS: dict[str, tuple[Any, Any]] = {
    "expert_token_num_type": (1, "running counts"),
    "idx_type": (0, "the new place of each row"),
    "tokens_dtype": (None, "rows of another dtype"),
}
"""(what there is a rule for, what others ask for)."""


@rule("npu::npu_moe_re_routing")
def npu_re_routing(lift: Lifting, node: Node) -> Outcome:
    """(rows in order by expert, their scales, the place at which each came, rows per expert)."""
    rows, counts = lift.fact(argument(node, 0)), lift.fact(argument(node, 1))
    for name, (allowed, words) in _OPTIONS.items():
        if node.kwargs.get(name, allowed) != allowed:
            raise Conflict(f"rows are put in order by expert (npu_moe_re_routing) with {words}")
    arrived = _arrived(rows)
    if arrived is None or not isinstance(counts.expr, Inflow) or counts.expr.at is None:
        raise Conflict(
            "rows by rank, then expert, are put in order by expert (npu_moe_re_routing): how they came isn't proved"
        )
    came, key = counts.expr, arrived.order.key
    same = (came.ids.node, came.ranks) == (arrived.ids, arrived.ranks)
    sorted_by_them = isinstance(key, Leaf) and key.node is came.ids.node
    if not same or not sorted_by_them or counts.dims != (came.source, came.at):
        raise Conflict(
            "rows are put in order by expert (npu_moe_re_routing) by counts that aren't those of their own ranks and "
            "experts"
        )
    order = rows_by_expert(node, arrived)
    per_expert = summed_counts(counts, set(group_axes(came.source)))
    scales = node.kwargs.get("per_token_scales")
    return (
        _moved(rows, order),
        _scales(lift, scales, arrived, order) if isinstance(scales, Node) else None,
        Fact(Pos((arrived,)), (order,)),
        per_expert,
    )


def _arrived(rows: Fact) -> Arrived | None:
    """The order of arrival, where the rows lie in it."""
    (digit,) = rows.dims[0] if rows.dims and len(rows.dims[0]) == 1 else (None,)
    return digit if isinstance(digit, Arrived) else None


def _moved(rows: Fact, order: Group) -> Fact:
    return Fact(rows.expr, (order, *rows.dims[1:]))


def _scales(lift: Lifting, node: Node, arrived: Arrived, order: Group) -> Fact:
    """Scales that came with the rows, one each or one per block of each. Raises Conflict for others."""
    fact, unifier = lift.fact(node), Unifier()
    if not fact.dims:
        raise Conflict("rows are put in order by expert (npu_moe_re_routing) with one scale for all", node)
    unifier.unify((arrived,), fact.dims[0])
    return Fact(unifier.expr(fact.expr), tuple(unifier.resolve(group) for group in (order, *fact.dims[1:])))
