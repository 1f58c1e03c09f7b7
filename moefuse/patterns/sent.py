"""What came with a row from another rank, and what each rank has for itself.

In: the expression of rows. Out: the same as read on the rank that the rows came from, or here again; or `Conflict`
where something of this rank's own would take part in the rows of all ranks.
"""

from collections.abc import Callable

from moefuse.patterns.axes import At, Group
from moefuse.patterns.facts import Conflict, Coords, Count, Expr, Leaf, Offs, Pos, Tally
from moefuse.patterns.pointwise import walk
from moefuse.patterns.rank_facts import Among, Begin, Block, Census, Inflow, Local, Owned, Spread

OWN = (Pos, Coords, Count, Offs, Tally, Owned, Inflow, Census, Begin, Local, Block, Spread, Among)
"""What a rank says of the rows that it has: how many, where they lie, which of its experts they are for."""


def marked(expr: Expr, sent: bool) -> Expr:
    """The expression with its leaves as read on the rank that a row came from, or on this one again."""
    if isinstance(expr, Leaf):
        return Leaf(expr.node, tuple(_marked_index(group, sent) for group in expr.index), sent)
    return expr.rebuilt(lambda part: marked(part, sent))


def _marked_index(group: Group, sent: bool) -> Group:
    return tuple(
        At(marked(digit.expr, sent), digit.size, digit.wraps) if isinstance(digit, At) else digit
        for digit in group
    )


def demand_sent(rows: Expr, ours: Callable[[Expr], bool]) -> None:
    """Demand that rows of all ranks hold what came with them, and tensors of this rank's experts alone.

    ours: True for what selects those. Another rank would use its own of anything else.
    """
    if any(isinstance(e, OWN) for e in walk(rows)):
        raise Conflict(
            "a number or a place of rows, which each rank has for itself, takes part in the rows of all ranks"
        )
    for leaf in (e for e in walk(rows) if isinstance(e, Leaf)):
        if not leaf.sent and not any(ours(at.expr) for at in leaf.selectors):
            raise Conflict(
                f"`{leaf.node.name}`, which each rank has for itself, takes part in the rows of all ranks",
                leaf.node,
            )
