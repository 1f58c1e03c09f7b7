"""Exchanges between ranks: rows that go to the ranks of their experts and come back, and the counts that say how many.

A rank axis is an index axis like any other, and a row's expression says the same wherever the row lies: the dispatch
substitutes the order of a sort by the order of arrival, its reverse substitutes it back. What is demanded is that each
slot goes to the rank that holds its expert, and that a rank adds nothing of its own but its experts' weights.
"""

import sympy
import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.graph.groups import Place, place_in
from moefuse.patterns.axes import Arrived, Axis, Dims, Group, Perm, Ranks, group_size
from moefuse.patterns.counts import covers, made_from
from moefuse.patterns.facts import Conflict, Const, Count, Expr, Fact, Leaf, Op, Pieces, Tally
from moefuse.patterns.merge import each_expert
from moefuse.patterns.pieces import tally_of
from moefuse.patterns.pointwise import EXACT, walk
from moefuse.patterns.products import has_own_weights, linear
from moefuse.patterns.quantised import Quantised, RowScale
from moefuse.patterns.rank_facts import Block, Census, Inflow, Local, Owned
from moefuse.patterns.ranks import (
    MOST_EXPERTS,
    arrival,
    carried,
    is_one_inflow,
    local_of,
    one_of,
    width_of,
)
from moefuse.patterns.router import chosen_from
from moefuse.patterns.rules import Lifting, Outcome, argument, op_name, rule, value
from moefuse.patterns.runs import by_expert, rows_by_expert
from moefuse.patterns.sent import OWN, demand_sent, marked
from moefuse.patterns.structure import regroup
from moefuse.patterns.unify import bind, bind_group

_OPERATOR = torch.ops._c10d_functional.all_to_all_single.default


@rule("_c10d_functional::wait_tensor")
def wait(lift: Lifting, node: Node) -> Outcome:
    """What is waited for."""
    fact = lift.fact(argument(node, 0))
    return None if isinstance(fact.expr, Leaf) and fact.expr.node is argument(node, 0) else fact


@rule("_c10d_functional::all_to_all_single")
def all_to_all(lift: Lifting, node: Node) -> Outcome:
    """Rows in expert order go to the ranks of their experts; rows that came so go back; counts are exchanged."""
    fact = lift.fact(argument(node, 0))
    place = place_in(argument(node, 3, "group_name"))
    first = fact.dims[0] if fact.dims else ()
    if place is None:
        return None
    if isinstance(fact.expr, Count | Owned):
        return _counts(lift, node, fact, place)
    if place.world == 1 and (fact.expr.hard or fact.sorted):
        raise Conflict("rows are exchanged over a group of one rank, from which they come back as they are")
    order = _only_slot(lift, node, fact) if not first else first[0] if len(first) == 1 else None
    if isinstance(order, Perm) and arrival(first) is None:
        return _dispatch(lift, node, fact, order, place)
    if len(first) == 1 and isinstance(first[0], Arrived):
        return _back(lift, node, fact, first[0], place)
    if fact.expr.hard or fact.sorted:
        raise Conflict(
            "rows are sent to other ranks neither in the order of a sort by expert nor in that of arrival"
        )
    return None


# --- counts ----------------------------------------------------------------------------------------------


def _counts(lift: Lifting, node: Node, fact: Fact, place: Place) -> Outcome:
    """counts [W * E/W] or [W, ..] of the slots for each rank: how many come from each rank instead."""
    expr, world = fact.expr, place.world
    if not isinstance(expr, Count | Owned) or not isinstance(expr.ids, Leaf):
        return None
    if tuple(digit for group in fact.dims for digit in group) != expr.at or not _even(node, world):
        return None
    ids, width = _ids_of(lift, expr.ids)
    total = group_size(expr.at)
    if isinstance(expr, Owned) or width != 1:
        if total != world or (isinstance(expr, Owned) and width != 1):
            return None
        ranks, at = (
            Ranks(place.name, world, place.rank, expr.experts if isinstance(expr, Owned) else width),
            None,
        )
    elif isinstance(total, int) and total % world == 0:
        ranks = Ranks(place.name, world, place.rank, total // world)
        at = () if ranks.experts == 1 else (Axis(ranks.experts),)
    else:
        return None
    source: Group = () if world == 1 else (Axis(world),)
    inflow = Fact(Inflow(ids, ranks, source, at), ((*source, *(at or ())),))
    dims, binding = regroup(inflow.dims, value(node).shape)
    return Fact(bind(inflow.expr, binding), tuple(bind_group(group, binding) for group in dims))


@rule("_c10d_functional::all_gather_into_tensor")
def all_gather(lift: Lifting, node: Node) -> Outcome:
    """counts [E] of the slots of each expert: [W * E], those of every rank."""
    fact, place = lift.fact(argument(node, 0)), place_in(argument(node, 2, "group_name"))
    expr = fact.expr
    if place is None or not isinstance(expr, Count) or not isinstance(expr.ids, Leaf):
        return None
    experts, world = group_size(expr.at), place.world
    whole = fact.dims == (expr.at,) and argument(node, 1) == world > 1
    if not whole or not isinstance(experts, int) or experts % world:
        return None
    ranks, source = Ranks(place.name, world, place.rank, experts // world), Axis(world)
    return Fact(Census(expr.ids, ranks, (source,), expr.at), ((source, *expr.at),))


def _even(node: Node, world: int) -> bool:
    """True where every rank gets the same number of elements from every other."""
    pieces = [*argument(node, 1), *argument(node, 2)]
    return all(isinstance(size, int) and size == pieces[0] for size in pieces) and len(pieces) == 2 * world


def _ids_of(lift: Lifting, leaf: Leaf, in_place: bool = False) -> tuple[Leaf, int]:
    """(ids, n) where an integer leaf is ids // n, element by element: the rank of each slot's expert; else (leaf, 1).

    Of a router's ids whatever arithmetic comes to that; of others, from a table of where experts are, say, a division.
    in_place: demand that element i is that of the i-th id, as for a sort; for a count any order will do.
    """
    divided = (leaf, 1)
    for ids, dims, chain in made_from(lift, leaf):
        if in_place and _listed(dims) != _listed(ids.index):
            break
        count = chosen_from(ids)
        if count is not None and count <= MOST_EXPERTS:
            width = width_of(carried(chain, torch.arange(count)))
            return (ids, width) if width is not None else divided
        if (divisor := _divisor(chain)) is not None:
            divided = (ids, divisor)
    return divided


def _divisor(chain: list[Node]) -> int | None:
    """n, where the operators are one division by n, rounded down for negative numbers too, and casts."""
    divisors = [argument(node, 1) for node in chain if op_name(node) != "aten::_to_copy"]
    exact = all(value(node).dtype in EXACT for node in chain)
    floors = all(_is_floor(node) for node in chain if op_name(node) != "aten::_to_copy")
    (width,) = divisors if len(divisors) == 1 else (None,)
    return width if exact and floors and isinstance(width, int) and width > 0 else None


def _is_floor(node: Node) -> bool:
    return op_name(node) == "aten::floor_divide" or (
        op_name(node) == "aten::div" and node.kwargs.get("rounding_mode") == "floor"
    )


def _listed(dims: Dims) -> Group:
    return tuple(digit for group in dims for digit in group)


# --- rows ------------------------------------------------------------------------------------------------


def _dispatch(lift: Lifting, node: Node, fact: Fact, order: Perm, place: Place) -> Fact:
    """Rows in the order of a sort, cut into one piece per rank: each rank gets those of its experts from all ranks."""
    if not isinstance(order.key, Leaf) or covers(Fact(order.key, (order.over,))) is None:
        raise Conflict("rows that are sent to other ranks are not in the order of a sort of all ids")
    ids, width = _ids_of(lift, order.key, in_place=True)
    said = [lift.fact(length).expr for length in argument(node, 1)]
    known = next((expr.ranks.experts for expr in said if isinstance(expr, Inflow)), 0)
    experts = _experts_of_rank(lift, argument(node, 2), order, width, place, known)
    ranks = Ranks(place.name, place.world, place.rank, experts)
    _demand_inflow(lift, argument(node, 1), ids, ranks)
    size = value(node).shape[0]
    return Fact(_sent(fact.expr), ((Arrived(order, ids.node, ranks, size),), *fact.dims[1:]))


def _only_slot(lift: Lifting, node: Node, fact: Fact) -> Perm | None:
    """The order of the one row that is sent: any, as counts of a single id say to which rank it goes."""
    counted = [expr for length in argument(node, 1) if isinstance(expr := lift.fact(length).expr, Inflow)]
    rows = isinstance(fact.expr, Leaf | Op | Quantised | RowScale)
    if not fact.dims or not counted or counted[0].ids.axes or not rows:
        return None
    return Perm(counted[0].ids.node, (), counted[0].ids)


def _experts_of_rank(
    lift: Lifting, pieces: list[Node], order: Perm, width: int, place: Place, known: int
) -> int:
    """How many experts each rank has, if piece d of the sorted rows is that of the experts of rank d, all of them.

    known: what is to be believed where no rows are sent: pieces without rows say nothing.
    """
    if sizes.same(group_size(order.over), 0):
        return known
    experts, key = 0, order.key
    assert isinstance(key, Leaf)
    for rank, length in enumerate(pieces):
        tally = tally_of(lift.fact(length).expr)
        if tally is None or not isinstance(tally.ids, Leaf):
            raise Conflict(
                f"rows are sent to other ranks in pieces of a length ({_named(length)}) that isn't proved to be the "
                "number of slots for each rank's experts"
            )
        owned, own = _ids_of(lift, tally.ids)
        if tally.ids.node is not key.node and owned.node is not _ids_of(lift, key, in_place=True)[0].node:
            raise Conflict(
                f"rows are sorted by `{key.node.name}`, their pieces count `{tally.ids.node.name}`"
            )
        mine = {e * own + i for e in tally.experts for i in range(own)}
        experts = experts or len(mine)
        if mine != set(range(rank * experts, (rank + 1) * experts)):
            raise Conflict(f"piece {rank} of the rows that are sent isn't that of the experts of rank {rank}")
        if isinstance(symbol := sizes.expr(value(length)), sympy.Symbol):
            lift.counts[symbol] = Tally(owned, frozenset(mine))
    if len(pieces) != place.world or (width not in (1, experts)):
        raise Conflict("rows are sent to other ranks in pieces of another order than that of the ranks")
    return experts


def _demand_inflow(lift: Lifting, lengths: list[Node], ids: Leaf, ranks: Ranks) -> None:
    """Demand that piece s is as long as the number of slots that rank s has for this rank's experts."""
    for rank, length in enumerate(lengths):
        expr = lift.fact(length).expr
        if not isinstance(expr, Inflow) or not is_one_inflow(expr) or one_of(expr.source) != rank:
            raise Conflict(
                f"rows come from other ranks in pieces of a length ({_named(length)}) that isn't proved to be what "
                "each rank said it sends"
            )
        if expr.ids.node is not ids.node or expr.ranks != ranks or (expr.at == () and ranks.experts != 1):
            raise Conflict(
                "rows come from other ranks in pieces that count other ids than they are sorted by"
            )


def _named(length: object) -> str:
    return f"`{length.name}`" if isinstance(length, Node) else str(length)


def _sent(expr: Expr) -> Expr:
    """The expression as read on the rank that rows come from: rows of floats or of integers, or their scales."""
    if not all(isinstance(e, Leaf | Op | Const | Quantised | RowScale) for e in walk(expr)):
        raise Conflict("what is sent to other ranks says where a slot lies on its own rank")
    return marked(expr, True)


def _back(lift: Lifting, node: Node, fact: Fact, rows: Arrived, place: Place) -> Fact:
    """Rows in the order of arrival go back to where they came from, in the order in which they left."""
    order, ranks = rows.order, rows.ranks
    if (place.name, place.world) != (ranks.group, ranks.world):
        raise Conflict(f"rows that came over group {ranks.group} go back over group {place.name}")
    assert isinstance(order.key, Leaf)
    ids, width = _ids_of(lift, order.key, in_place=True)
    if _experts_of_rank(lift, argument(node, 1), order, width, place, ranks.experts) != ranks.experts:
        raise Conflict("rows go back to other ranks than those they came from")
    _demand_inflow(lift, argument(node, 2), ids, ranks)
    expr = fact.expr
    if (key := local_of(rows)) is not None and ranks.experts == 1 and has_own_weights(expr):
        expr = Pieces(node, key, (order.over, *fact.dims[1:]), 1)
    _demand_sent(lift, expr, ranks)
    home: Group = (order,) if order.over else ()
    return Fact(marked(expr, False), (home, *fact.dims[1:]))


def _demand_sent(lift: Lifting, expr: Expr, ranks: Ranks) -> None:
    """Demand that rows hold what came with them, and tensors of this rank's experts, one by one or selected."""
    wholes = [e for e in walk(expr) if isinstance(e, Pieces)]
    if not wholes:
        demand_sent(expr, lambda by: isinstance(by, Local) and by.ranks == ranks)
        return
    if any(not isinstance(whole.ids, Local) or whole.ids.ranks != ranks for whole in wholes):
        raise Conflict(
            "rows that go back to other ranks are put together by other ids than those they came by"
        )
    for body in each_expert(lift, expr, wholes[0]):
        for part in _beside_own_weights(body):
            demand_sent(part, lambda by: False)


def _beside_own_weights(expr: Expr) -> list[Expr]:
    """What one expert's rows are made from but for the matrices of its GEMMs and their biases."""
    if isinstance(expr, (Leaf, *OWN)):
        return [expr]
    gemm = linear(expr)
    return [made for part in ([gemm.rows] if gemm else expr.parts()) for made in _beside_own_weights(part)]


# --- the experts of rows that came here ------------------------------------------------------------------


@rule("aten::repeat_interleave")
def blocks(lift: Lifting, node: Node) -> Outcome:
    """repeat_interleave(counts [W * E/W]): of each row that came here, the number of its rank and expert.

    Of counts [E/W * W] that were turned around, the numbers of rows expert by expert.
    """
    fact = lift.fact(argument(node, 0))
    expr = fact.expr
    if not isinstance(expr, Inflow) or len(node.args) != 1:
        return None
    if (turned := by_expert(expr, fact.dims)) is None:
        return None
    came = _dispatched(lift, node, expr)
    if len(came) != 1:
        raise Conflict(
            f"the rows that these counts are of came here in {len(came)} orders so far, not in one"
        )
    (rows,) = came
    key = rows.order.key
    assert isinstance(key, Leaf)
    ids = Leaf(key.node, key.index, True)
    arrived = Arrived(rows.order, rows.ids, rows.ranks, rows.size)
    lie = rows_by_expert(node, arrived) if turned else (arrived,)
    return Fact(Block(ids, rows.ranks, turned), (lie,))


def _dispatched(lift: Lifting, node: Node, counts: Inflow) -> list[Arrived]:
    """The orders, expert by expert, in which the rows that are counted came here."""
    found: dict[Node, Arrived] = {}
    for sent in node.graph.find_nodes(op="call_function", target=_OPERATOR):
        fact = lift.fact(sent) if sent < node else None
        rows = arrival(fact.dims[0]) if fact is not None and fact.dims else None
        key = rows.order.key if rows is not None else None
        if (
            rows is not None
            and isinstance(key, Leaf)
            and key.node is counts.ids.node
            and rows.ranks == counts.ranks
        ):
            found[rows.order.sort] = rows
    return list(found.values())
