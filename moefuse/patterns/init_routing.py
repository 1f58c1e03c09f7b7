"""Init routing: how slots get into expert order, and how token rows follow them.

sort of the ids, its permutation and the inverse, `slot // K` = token, gathers by any of them. Ascend's operators
do all of it at once.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.graph.sizes import Size
from moefuse.patterns.counts import covers
from moefuse.patterns.facts import (
    Among,
    At,
    Axis,
    Block,
    Conflict,
    Count,
    Dims,
    Expr,
    Fact,
    Group,
    Leaf,
    Local,
    Offs,
    Perm,
    Pos,
    group_size,
)
from moefuse.patterns.hidden_states_quant import demand_absent, quantise
from moefuse.patterns.pointwise import pointwise
from moefuse.patterns.ranks import arrival, numbered, only_expert
from moefuse.patterns.router import chosen_from, has_perm, topk_of
from moefuse.patterns.rules import Lifting, Outcome, argument, is_float, op_name, rule, value
from moefuse.patterns.structure import regroup
from moefuse.patterns.unify import Unifier, bind, bind_fact, bind_group


@rule("aten::sort", "aten::argsort")
def sort(lift: Lifting, node: Node) -> Outcome:
    """Sorting ids makes a slot order; sorting a permutation inverts it. Both outputs: (values, indices)."""
    fact = numbered(lift.fact(argument(node, 0)))
    if len(fact.dims) != 1 or is_float(argument(node, 0)):
        return None
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
    if isinstance(by.expr, Block) and isinstance(source.expr, Pos):
        return _number_of_block(source, by.expr, by.dims)
    if source.expr.hard or source.sorted:
        raise Conflict(f"rows in sorted order are taken by {describe_index(by_node, by.expr)}", by_node)
    group = source.dims[dim]
    if not isinstance(source.expr, Leaf) or not isinstance(by.expr, Leaf | Local) or is_float(by_node):
        return None
    if not is_float(node):
        return None  # a table of ids (hash routing): its rows are ids like any other
    if (only := only_expert(source, dim, by.expr)) is not None:
        return Fact(only, source.dims[:dim] + by.dims + source.dims[dim + 1 :])
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


def _number_of_block(table: Fact, by: Block, dims: Dims) -> Fact | None:
    """A table over (rank, expert of a rank) that holds the latter, at the block of each row that came here."""
    if len(table.dims) != 1 or not table.dims[0] or not isinstance(table.expr, Pos):
        return None
    outer, *inner = table.dims[0]
    if not sizes.same(outer.size, by.ranks.world) or not sizes.same(
        group_size(tuple(inner)), by.ranks.experts
    ):
        return None
    return Fact(Local(by.ids, by.ranks), dims) if table.expr.group == tuple(inner) else None


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


# --- Ascend's operators ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dispatch:
    """What a sort of the ids gives: token rows and ids in expert order; `ids` in slot order [T, K].

    key: what counts of the experts' rows count.
    """

    ids: Fact
    leaf: Leaf
    slots: Group
    rows: Fact
    sorted_ids: Fact
    key: Leaf | Among


ROUTING_V2 = "npu::npu_moe_init_routing_v2"


@rule("npu::npu_moe_init_routing")
def npu_init_routing(lift: Lifting, node: Node) -> Outcome:
    """(rows in expert order, the position of each row id, the sorted ids); row ids number the slots k-major.

    Row r is that of token r % T: right for the slot only if its row id is k * T + t.
    """
    dispatch = dispatch_of(lift, node, argument(node, 0), argument(node, 2))
    if dispatch is None:
        return None
    row_idx = lift.fact(argument(node, 1))
    if not isinstance(row_idx.expr, Pos) or len(row_idx.dims) != 2:
        raise Conflict("the row ids of the init routing are not the numbers of the slots", argument(node, 1))
    unifier = Unifier()
    for have, want in zip(row_idx.dims, dispatch.ids.dims, strict=True):
        unifier.unify(want, have)
    token, slot = (unifier.resolve(group) for group in dispatch.ids.dims)
    if unifier.resolve(row_idx.expr.group) != (*slot, *token):
        raise Conflict(
            "the row ids of the init routing don't number the slots k-major (slot k of token t is k * T + t)",
            argument(node, 1),
        )
    _demand_all(argument(node, 3), value(argument(node, 0)).shape[0], "tokens")
    rows, sorted_ids = (
        Fact(unifier.expr(fact.expr), tuple(unifier.resolve(group) for group in fact.dims))
        for fact in (dispatch.rows, dispatch.sorted_ids)
    )
    return rows, Fact(Pos(sorted_ids.dims[0]), ((*slot, *token),)), sorted_ids


@rule(ROUTING_V2)
def npu_init_routing_v2(lift: Lifting, node: Node) -> Outcome:
    """(rows in expert order, row of each slot or slot of each row, tokens per expert, scales of the rows).

    The scales are those of rows that are quantised here (quant_mode 1), or of the tokens (quant_mode -1).
    """
    dispatch = dispatch_of(lift, node, argument(node, 0), argument(node, 1))
    if dispatch is None:
        return None
    options = {name: node.kwargs.get(name, default) for name, default in _ROUTING_DEFAULTS.items()}
    _demand_no_drops(options)
    if options["quant_mode"] not in (-1, 1) or options["x_dtype"] is not None:
        raise Conflict(
            f"the init routing quantises the token rows with quant_mode={options['quant_mode']}: only int8 with a "
            "scale of each row (1) is understood"
        )
    experts = options["expert_num"]
    first, last = tuple(options["active_expert_range"]) or (0, experts)
    if not 0 <= first < last <= experts:
        raise Conflict(f"the init routing takes the experts {first}..{last - 1} of {experts}")
    if (first, last) != (0, experts):
        dispatch, experts = _among(node, dispatch, first, last - first), last - first
    if options["active_num"] > 0:
        _demand_all(options["active_num"], group_size(dispatch.slots), "slots")
    order = dispatch.sorted_ids.dims[0]
    row_idx = Fact(Pos(order), (dispatch.slots,))
    if options["row_idx_type"] == 1:
        row_idx = Fact(Pos(dispatch.slots), (order,))
        if isinstance(dispatch.key, Among):
            raise Conflict(
                f"the init routing takes the experts {first}..{last - 1} only, and lists the slots of its rows: those "
                "of rows that nobody wrote are among them"
            )
    counts = None
    if options["expert_tokens_num_flag"] and options["expert_tokens_num_type"] in (0, 1):
        counts = _tokens_per_expert(dispatch, experts, running=options["expert_tokens_num_type"] == 0)
    if options["quant_mode"] == 1:
        rows, scales = _quantised(node, dispatch)
        return rows, row_idx, counts, scales
    return dispatch.rows, row_idx, counts, _rows_of(lift, dispatch, argument(node, 2, "scale"))


@rule("npu::npu_moe_init_routing_quant")
def npu_init_routing_quant(lift: Lifting, node: Node) -> Outcome:
    """(int8 rows in expert order, row of each slot, tokens per expert, unread, scales of the rows)."""
    dispatch = dispatch_of(lift, node, argument(node, 0), argument(node, 1))
    if dispatch is None:
        return None
    options = {name: node.kwargs.get(name, default) for name, default in _QUANT_DEFAULTS.items()}
    _demand_no_drops(options)
    if options["quant_mode"] != 1:
        raise Conflict(f"the init routing quantises with static scales (quant_mode={options['quant_mode']})")
    if options["active_num"] > 0:
        _demand_all(options["active_num"], group_size(dispatch.slots), "slots")
    counts = None
    if (mode := options["expert_tokens_num_mode"]) in (1, 2) and options["expert_num"] >= 1:
        counts = _tokens_per_expert(dispatch, options["expert_num"], running=mode == 1)
    rows, scales = _quantised(node, dispatch)
    return rows, Fact(Pos(dispatch.sorted_ids.dims[0]), (dispatch.slots,)), counts, None, scales


def _demand_no_drops(options: dict[str, Any]) -> None:
    if options["drop_pad_mode"] != 0:
        raise Conflict("the init routing drops slots beyond each expert's capacity")


def _tokens_per_expert(dispatch: Dispatch, experts: int, running: bool) -> Fact:
    at: Group = () if experts == 1 else (Axis(experts),)
    return Fact((Offs if running else Count)(dispatch.key, at), (at,))


def _among(node: Node, dispatch: Dispatch, first: int, experts: int) -> Dispatch:
    """The dispatch of the slots of some experts only."""
    assert isinstance(dispatch.ids.expr, Leaf)
    key = Among(dispatch.ids.expr, first, experts, node)
    order: Group = tuple(replace(d, key=key) for d in dispatch.rows.dims[0] if isinstance(d, Perm))
    rows = Fact(dispatch.rows.expr, (order, dispatch.rows.dims[1]))
    return replace(dispatch, rows=rows, sorted_ids=Fact(dispatch.ids.expr, (order,)), key=key)


def _quantised(node: Node, dispatch: Dispatch) -> tuple[Fact, Fact]:
    """The rows as int8, and their scales."""
    demand_absent(node, "scale", "rows are multiplied by smooth scales before they are quantised")
    demand_absent(node, "offset", "rows are quantised with an offset")
    if not is_float(argument(node, 0)):
        raise Conflict("rows of integers are quantised once more")
    return quantise(dispatch.rows, 8, value(argument(node, 0)).dtype)


def _rows_of(lift: Lifting, dispatch: Dispatch, scales: Node | None) -> Fact | None:
    """A value per token in expert order."""
    fact = lift.fact(scales) if scales is not None else None
    if fact is None or len(fact.dims) != 1:
        return None
    unifier = Unifier()
    unifier.unify(dispatch.ids.dims[0], fact.dims[0])
    return Fact(unifier.expr(fact.expr), (tuple(unifier.resolve(dispatch.rows.dims[0])),))


_ROUTING_DEFAULTS: dict[str, Any] = {
    "active_num": -1,
    "expert_num": -1,
    "drop_pad_mode": 0,
    "expert_tokens_num_type": 0,
    "expert_tokens_num_flag": False,
    "quant_mode": -1,
    "active_expert_range": (),
    "row_idx_type": 0,
    "x_dtype": None,
}
_QUANT_DEFAULTS: dict[str, Any] = {
    "active_num": 1024,
    "expert_num": 256,
    "drop_pad_mode": 0,
    "expert_tokens_num_mode": 0,
    "quant_mode": 1,
}


@rule("npu::npu_moe_token_permute")
def npu_token_permute(lift: Lifting, node: Node) -> Outcome:
    """(rows in expert order, the row of each slot)."""
    dispatch = dispatch_of(lift, node, argument(node, 0), argument(node, 1))
    if dispatch is None:
        return None
    if argument(node, 3, "padded_mode", False):
        raise Conflict("the token permutation pads each expert's rows")
    if (kept := argument(node, 2, "num_out_tokens") or 0) != 0:
        _demand_all(kept, group_size(dispatch.slots), "slots")
    return dispatch.rows, Fact(Pos(dispatch.sorted_ids.dims[0]), (dispatch.slots,))


@rule("npu::npu_moe_compute_expert_tokens")
def npu_compute_expert_tokens(lift: Lifting, node: Node) -> Outcome:
    """How many sorted ids are at most e: where each expert's rows end."""
    fact = lift.fact(argument(node, 0))
    leaf, experts = covers(fact), argument(node, 1)
    order = fact.dims[0] if len(fact.dims) == 1 else ()
    if not isinstance(leaf, Leaf) or any(
        not isinstance(digit, Perm) or digit.key != fact.expr for digit in order
    ):
        return None  # the operator expects them sorted
    if chosen_from(leaf) is None:
        raise Conflict(
            f"the ids `{leaf.node.name}` may be negative: a count of those that are at most e gives such slots to "
            "expert 0, the node to none"
        )
    at: Group = () if experts == 1 else (Axis(experts),)
    return Fact(Offs(leaf, at), (at,))


@rule("aten::abs")
def absolute(lift: Lifting, node: Node) -> Outcome:
    """|row index| is the row index where none is negative: of slots that no expert takes it is -1."""
    fact = lift.fact(argument(node, 0))
    if not isinstance(fact.expr, Pos):
        return pointwise(lift, node)
    for digit in fact.expr.group:
        if not isinstance(digit, Perm) or op_name(digit.sort) != ROUTING_V2 or isinstance(digit.key, Among):
            continue  # of some experts only: whoever takes rows by it is asked what slots without a row add
        chosen, experts = chosen_from(digit.key), value(digit.sort.kwargs["expert_num"])
        if chosen is None or chosen > experts:
            raise Conflict(
                "the absolute value of row indices: a slot whose expert isn't one of the layer's has row -1 and "
                "would read row 1"
            )
    return fact


def dispatch_of(lift: Lifting, node: Node, x_node: Node, ids_node: Node) -> Dispatch | None:
    """Token rows sorted by the ids, if the ids are a plain tensor that is taken whole. Ids of one slot may be 1-D."""
    x, ids = lift.fact(x_node), lift.fact(ids_node)
    leaf = covers(ids)
    if (
        not isinstance(leaf, Leaf)
        or len(x.dims) != 2
        or any(has_perm(group) for group in (*ids.dims, *x.dims))
    ):
        return None
    unifier = Unifier()
    unifier.unify(ids.dims[0], x.dims[0])
    dims: Dims = tuple(unifier.resolve(group) for group in ids.dims)
    ids = Fact(unifier.expr(ids.expr), (*dims, ()) if len(dims) == 1 else dims)
    assert isinstance(ids.expr, Leaf)
    slots = (*ids.dims[0], *ids.dims[1])
    order: Group = (Perm(node, slots, ids.expr),) if slots else ()
    rows = Fact(unifier.expr(x.expr), (order, unifier.resolve(x.dims[1])))
    return Dispatch(ids, leaf, slots, rows, Fact(ids.expr, (order,)), leaf)


def _demand_all(kept: int, size: Size, what: str) -> None:
    """Demand that a limit on rows leaves none out."""
    if not isinstance(size, int) or kept < size:
        raise Conflict(f"only the rows of the first {kept} of {size} {what} are kept")
