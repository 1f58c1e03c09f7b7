"""Init routing by Ascend's operators: token rows in an order by expert, where each slot went, rows per expert.

In: token rows and ids. Out: facts over one order per operator; rows may be quantised, and the slots of some experts may
be taken alone. What would drop slots is refused by name.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.graph.sizes import Size
from moefuse.patterns.axes import Axis, Dims, Group, Perm, group_size
from moefuse.patterns.counts import covers
from moefuse.patterns.facts import Conflict, Count, Fact, Leaf, Offs, Pos
from moefuse.patterns.hidden_states_quant import demand_absent, quantise
from moefuse.patterns.mx import flat, in_blocks
from moefuse.patterns.pointwise import pointwise
from moefuse.patterns.rank_facts import Among, Local
from moefuse.patterns.ranks import numbered
from moefuse.patterns.router import chosen_from, has_perm
from moefuse.patterns.rules import Lifting, Outcome, argument, is_float, op_name, rule, value
from moefuse.patterns.unify import Unifier


@dataclass(frozen=True)
class Dispatch:
    """What a sort of the ids gives: token rows and ids in expert order; `ids` in slot order [T, K].

    key: what counts of the experts' rows count. ids of rows that came from other ranks are one of each, [rows].
    """

    ids: Fact
    leaf: Leaf | Local
    slots: Group
    rows: Fact
    sorted_ids: Fact
    key: Leaf | Local | Among


ROUTING_V2 = "npu::npu_moe_init_routing_v2"
BLOCKS = {2: torch.float8_e5m2, 3: torch.float8_e4m3fn, 9: torch.float4_e2m1fn_x2}
"""What the rows become in MX blocks, by quant_mode."""


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

    The scales are those of rows that are quantised here (quant_mode 1, in MX blocks 2, 3 and 9), or of the tokens (-1).
    """
    dispatch = dispatch_of(lift, node, argument(node, 0), argument(node, 1))
    if dispatch is None:
        return None
    options = {name: node.kwargs.get(name, default) for name, default in _ROUTING_DEFAULTS.items()}
    _demand_no_drops(options)
    if (mode := options["quant_mode"]) not in (-1, 1, *BLOCKS) or options["x_dtype"] is not None:
        raise Conflict(
            f"the init routing quantises the token rows with quant_mode={mode}: only int8 with a scale of each row (1) "
            "and MX blocks (2, 3, 9) are understood"
        )
    experts = options["expert_num"]
    first, last = tuple(options["active_expert_range"]) or (0, experts)
    if not 0 <= first < last <= experts:
        raise Conflict(f"the init routing takes the experts {first}..{last - 1} of {experts}")
    if isinstance(dispatch.key, Local):
        own, experts = dispatch.key.ranks.experts, last
        if (first, last) != (0, own):
            raise Conflict(
                f"rows that came from other ranks are sorted by the experts {first}..{last - 1} of this one, which "
                f"has {own}"
            )
    elif (first, last) != (0, experts):
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
    if mode in (1, *BLOCKS):
        rows, scales = _quantised(node, dispatch, BLOCKS.get(mode))
        return rows, row_idx, counts, flat(scales) if mode in (2, 3) else scales
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


def _quantised(node: Node, dispatch: Dispatch, blocks: torch.dtype | None = None) -> tuple[Fact, Fact]:
    """The rows as int8, and their scales; or as elements of MX blocks, and those of the blocks."""
    demand_absent(node, "scale", "rows are multiplied by smooth scales before they are quantised")
    demand_absent(node, "offset", "rows are quantised with an offset")
    if not is_float(argument(node, 0)):
        raise Conflict("rows of integers are quantised once more")
    dtype = value(argument(node, 0)).dtype
    return (
        quantise(dispatch.rows, torch.int8, dtype)
        if blocks is None
        else in_blocks(dispatch.rows, blocks, dtype)
    )


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
        if not isinstance(digit, Perm) or op_name(digit.sort) != ROUTING_V2:
            continue
        if isinstance(digit.key, Among | Local):
            # Of some experts only: whoever takes rows by it is asked what slots without a row add. Rows that came here
            # are all of this rank's experts.
            continue
        chosen, experts = chosen_from(digit.key), value(digit.sort.kwargs["expert_num"])
        if chosen is None or chosen > experts:
            raise Conflict(
                "the absolute value of row indices: a slot whose expert isn't one of the layer's has row -1 and "
                "would read row 1"
            )
    return fact


def dispatch_of(lift: Lifting, node: Node, x_node: Node, ids_node: Node) -> Dispatch | None:
    """Token rows sorted by the ids, if the ids are a plain tensor that is taken whole. Ids of one slot may be 1-D.

    Rows that came from other ranks likewise, by the numbers of their experts on this one.
    """
    x, ids = lift.fact(x_node), numbered(lift.fact(ids_node))
    if isinstance(ids.expr, Local):
        return _of_arrived(node, x, ids)
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


def _of_arrived(node: Node, x: Fact, ids: Fact) -> Dispatch | None:
    """Rows in the order of arrival, sorted by the experts of this rank."""
    numbers = Fact(ids.expr, ids.dims[:1])
    local = covers(numbers)
    if not isinstance(local, Local) or any(ids.dims[1:]) or len(x.dims) != 2:
        return None
    unifier = Unifier()
    came = unifier.unify(numbers.dims[0], x.dims[0])
    if has_perm(came):
        return None
    key = unifier.expr(local)
    assert isinstance(key, Local)
    order: Group = (Perm(node, came, key),)
    rows = Fact(unifier.expr(x.expr), (order, unifier.resolve(x.dims[1])))
    return Dispatch(Fact(key, (came, ())), key, came, rows, Fact(key, (order,)), key)


def _demand_all(kept: int, size: Size, what: str) -> None:
    """Demand that a limit on rows leaves none out."""
    if not isinstance(size, int) or kept < size:
        raise Conflict(f"only the rows of the first {kept} of {size} {what} are kept")
