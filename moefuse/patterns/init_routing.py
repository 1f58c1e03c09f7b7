"""Init routing: how slots get into expert order, and how token rows follow them.

sort of the ids, its permutation and the inverse, `slot // K` = token, gathers by any of them. Ascend's operators, which
do all of it at once, are in npu_init_routing.py.
"""

import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.patterns.axes import At, Axis, Dims, Group, Perm, group_size
from moefuse.patterns.facts import Conflict, Expr, Fact, Leaf, Pos
from moefuse.patterns.pointwise import pointwise
from moefuse.patterns.rank_facts import Among, Begin, Block, Local
from moefuse.patterns.ranks import arrival, by_expert, numbered
from moefuse.patterns.router import has_perm, topk_of
from moefuse.patterns.rules import Lifting, Outcome, argument, is_float, op_name, rule, value
from moefuse.patterns.runs import at_block
from moefuse.patterns.structure import regroup
from moefuse.patterns.unify import Unifier, bind, bind_fact, bind_group


@rule("aten::sort", "aten::argsort")
def sort(lift: Lifting, node: Node) -> Outcome:
    """Sorting ids makes a slot order; sorting a permutation inverts it. Both outputs: (values, indices).

    Integers may be sorted as floats, which hold those exactly that are met in practice (see EXACT).
    """
    fact = numbered(lift.fact(argument(node, 0)))
    if len(fact.dims) != 1 or (isinstance(fact.expr, Leaf) and is_float(fact.expr.node)):
        return None
    rows = group_size(fact.dims[0])
    rounds = isinstance(fact.expr, Pos) and value(argument(node, 0)).dtype == torch.float32
    if rounds and isinstance(rows, int) and rows > FLOAT32_HOLDS:
        raise Conflict(f"{rows} indices are sorted as float32, which holds {FLOAT32_HOLDS} of them exactly")
    if argument(node, 2, "descending", False) or node.kwargs.get("descending", False):
        return None
    both = op_name(node) == "aten::sort"
    if isinstance(fact.expr, Pos):
        values, indices = _invert(fact, fact.expr)
    elif isinstance(fact.expr, Leaf | Local):
        group = fact.dims[0]
        if has_perm(group):
            return None
        order = (Perm(node, group, fact.expr),) if group else ()
        values, indices = Fact(fact.expr, (order,)), Fact(Pos(group), (order,))
    else:
        return None
    return (values, indices) if both else indices


FLOAT32_HOLDS = 1 << 24
"""Larger integers are rounded: neighbours become equal, and a sort leaves them in any order."""


def _invert(fact: Fact, pos: Pos) -> tuple[Fact, Fact]:
    """argsort of a complete permutation: position p of slot s."""
    group = fact.dims[0]
    if not group and not pos.group:
        return fact, fact  # a single slot
    if len(group) != 1 or not isinstance(group[0], Perm) or group[0].over != pos.group:
        raise Conflict("a sort of indices that are no complete permutation of the slots")
    return Fact(pos, (pos.group,)), Fact(Pos(group), (pos.group,))


@rule("aten::floor_divide", "aten::div", "aten::remainder", "aten::fmod")
def divide(lift: Lifting, node: Node) -> Outcome:
    """slot // K is the token, slot % K the place among the token's K: only where K is the trailing size."""
    fact = lift.fact(argument(node, 0))
    divisor = value(argument(node, 1))
    name = op_name(node)
    if not isinstance(fact.expr, Pos) or isinstance(divisor, torch.Tensor):
        return pointwise(lift, node)  # division of floats
    if name == "aten::div" and node.kwargs.get("rounding_mode") not in ("floor", "trunc"):
        return None
    group = fact.expr.group
    try:
        count = sizes.quotient(group_size(group), divisor)
        if count is None:
            raise Conflict("no divisor")
        (head, tail), binding = regroup((group,), [count, divisor])
    except Conflict:
        raise Conflict(
            f"slot indices are divided by {divisor}, which is not the number of slots per token"
        ) from None
    kept = tail if name in ("aten::remainder", "aten::fmod") else head
    return Fact(Pos(bind_group(kept, binding)), bind_fact(fact, binding).dims)


@rule("aten::index", "aten::index_select", "aten::embedding")
def index(lift: Lifting, node: Node) -> Outcome:
    """Rows taken by an index tensor, from any one dimension."""
    name = op_name(node)
    if name == "aten::index":
        places = [(d, i) for d, i in enumerate(argument(node, 1)) if i is not None]
    elif name == "aten::index_select":
        places = [(int(argument(node, 1)), argument(node, 2))]
    else:
        if argument(node, 2, "padding_idx", -1) != -1 or argument(node, 3, "scale_grad_by_freq", False):
            return None  # an index with a gradient of its own
        places = [(0, argument(node, 1))]
    source = lift.fact(argument(node, 0))
    if len(places) > 1 and (fact := _take_several(lift, source, places)) is not None:
        return fact
    if len(places) != 1 or value(places[0][1]).dtype == torch.bool:
        if source.expr.hard:
            raise Conflict("expert rows are taken by a mask or by several indices at once")
        return None
    dim, by = places[0]
    return take(lift, node, source, dim % len(source.dims), by)


@rule("aten::gather")
def gather(lift: Lifting, node: Node) -> Outcome:
    """gather(x, dim, index) with an index that is the same for all other dimensions is row indexing."""
    source, by = lift.fact(argument(node, 0)), lift.fact(argument(node, 2))
    dim = int(argument(node, 1)) % max(len(source.dims), 1)
    if not isinstance(by.expr, Pos) or len(by.dims) != len(source.dims):
        if source.expr.hard:
            raise Conflict("expert rows are gathered by an index that is no slot order")
        return None
    for d, (a, b) in enumerate(zip(source.dims, by.dims, strict=True)):
        if d != dim and (bind_axes(b) & by.expr.axes or not sizes.same(group_size(a), group_size(b))):
            return None
    return take_by(source, dim, Fact(by.expr, (by.dims[dim],)))


def bind_axes(group: tuple[object, ...]) -> set[Axis]:
    """The plain axes of a dims group."""
    return {digit for digit in group if isinstance(digit, Axis)}


def take(lift: Lifting, node: Node, source: Fact, dim: int, by_node: Node) -> Outcome:
    """source[..., by, ...]: substitution of the row axis by what the index means."""
    by = numbered(lift.fact(by_node))
    if isinstance(by.expr, Pos):
        return take_by(source, dim, by)
    if isinstance(by.expr, Block) and isinstance(source.expr, Pos | Begin):
        return at_block(source, by.expr, by.dims)
    if source.expr.hard or source.sorted:
        raise Conflict(f"rows in sorted order are taken by {describe_index(by_node, by.expr)}", by_node)
    if not isinstance(source.expr, Leaf) or not isinstance(by.expr, Leaf | Local) or is_float(by_node):
        return None
    if not is_float(node):
        return None  # a table of ids (hash routing): its rows are ids like any other
    source = by_expert(source, dim, by.expr)
    group = source.dims[dim]
    if len(group) != 1 or not isinstance(group[0], Axis):
        return None
    axis = group[0]
    expr = bind(source.expr, {axis: (At(by.expr, axis.size, wraps=True),)})
    return Fact(expr, source.dims[:dim] + by.dims + source.dims[dim + 1 :])


def _take_several(lift: Lifting, source: Fact, places: list[tuple[int, Node]]) -> Fact | None:
    """source[a, b] with neighbouring positions that list the same rows (one expert's tokens and slots)."""
    first, last = places[0][0], places[-1][0]
    rows = [lift.fact(by) for _, by in places]
    if last - first != len(places) - 1 or not all(
        isinstance(by.expr, Pos) and len(by.dims) == 1 for by in rows
    ):
        return None
    unifier = Unifier()
    for (dim, _), by in zip(places, rows, strict=True):
        assert isinstance(by.expr, Pos)
        if not sizes.same(group_size(source.dims[dim]), group_size(by.expr.group)):
            return None
        unifier.unify(rows[0].dims[0], by.dims[0])
        unifier.unify(source.dims[dim], by.expr.group)
    dims = (*source.dims[:first], rows[0].dims[0], *source.dims[last + 1 :])
    return Fact(unifier.expr(source.expr), tuple(unifier.resolve(group) for group in dims))


def take_by(source: Fact, dim: int, by: Fact, missing: bool = False) -> Fact:
    """Index a dimension by positions: both groups must be the same axes, sorted order only by identity.

    missing: the caller has proved that slots without a row of their own add nothing.
    """
    assert isinstance(by.expr, Pos)
    if not missing and (some := among(by.expr.group)) is not None:
        raise Conflict(
            f"only slots of the experts {some.first}..{some.first + some.experts - 1} have a row, and rows are taken "
            "for all of them"
        )
    have, want = source.dims[dim], by.expr.group
    same_rows = arrival(have) is not None and arrival(want) is not None  # proved equal below, by identity
    if not same_rows and not sizes.same(group_size(have), group_size(want)):
        raise Conflict(f"an index over {group_size(want)} slots is used on {group_size(have)} rows")
    unifier = Unifier()
    if has_perm(have) and not has_perm(want):
        raise Conflict("rows in sorted order are taken by the permutation itself, not by its inverse")
    if has_perm(want) and not has_perm(have):
        raise Conflict("rows in slot order are taken by the inverse permutation")
    unifier.unify(have, want)
    dims: Dims = source.dims[:dim] + by.dims + source.dims[dim + 1 :]
    return Fact(unifier.expr(source.expr), tuple(unifier.resolve(group) for group in dims))


def among(group: Group) -> Among | None:
    """The experts whose slots alone have a row in an order."""
    return next((d.key for d in group if isinstance(d, Perm) and isinstance(d.key, Among)), None)


def describe_index(node: Node, expr: Expr) -> str:
    """Words for an index that is no slot order: what it is instead."""
    leaf = expr.node if isinstance(expr, Leaf) else node
    topk, _ = topk_of(leaf)
    if topk is not None:  # its indices pick rows, so it chose among tokens
        return f"`{leaf.name}`, a top-k over tokens (expert-choice routing)"
    return f"`{node.name}`, which is not the inverse of the sort"
