"""Ascend's MC2 shell: one operator sends token rows to the ranks of their experts, one brings their outputs back.

Every rank does the same, so from the side of a slot the dispatch is a sort by expert and the combine its way back: what
lies between is done to a row by the rank that holds its expert. Rows in that order are known by the dispatch that sent
them (`Spread`); its combine must name it by its own outputs. Of what a rank has for itself, only its experts' tensors
may touch a row in between: another rank would use its own.
"""

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.patterns.axes import Axis, Group, Perm, Ranks
from moefuse.patterns.facts import Conflict, Count, Fact, Leaf, Offs
from moefuse.patterns.finalize_routing import weighted_sum
from moefuse.patterns.hidden_states_quant import demand_absent, quantise
from moefuse.patterns.mx import ELEMENTS, flat, in_blocks
from moefuse.patterns.npu_init_routing import dispatch_of
from moefuse.patterns.rank_facts import Spread
from moefuse.patterns.rules import Lifting, Outcome, argument, op_name, rule, value
from moefuse.patterns.sent import demand_sent, marked
from moefuse.patterns.unify import Unifier

DISPATCH, COMBINE = "npu::npu_moe_distribute_dispatch", "npu::npu_moe_distribute_combine"

_TENSORS: dict[str, str] = {
    "x_active_mask": "tokens are left out by a mask (x_active_mask)",
    "scales": "rows are multiplied by smooth scales before they are quantised",
    "expert_scales": "the dispatch takes the routing weights (expert_scales): the combine's own are understood only",
    "expand_scales": "the combine takes weights in the order of the rows (expand_scales)",
    "shared_expert_x": "the combine adds a shared expert's rows (shared_expert_x)",
    "elastic_info": "ranks come and go (elastic_info)",
    "ori_x": "the combine knows experts without weights (ori_x)",
    "activation_scale": "the combine dequantises (activation_scale)",
}
_NUMBERS: dict[str, tuple[Any, ...]] = {
    "tp_world_size": (0, 1),
    "expert_shard_type": (0,),
    "shared_expert_rank_num": (0,),
    "zero_expert_num": (0,),
    "copy_expert_num": (0,),
    "const_expert_num": (0,),
    "out_dtype": (0,),
    "comm_quant_mode": (0,),
    "x_dtype": (None,),
    "scales_dtype": (None,),
}


def _demand_plain(node: Node) -> None:
    for name, reason in _TENSORS.items():
        demand_absent(node, name, reason)
    for name, allowed in _NUMBERS.items():
        if node.kwargs.get(name, allowed[0]) not in allowed:
            raise Conflict(f"{op_name(node).removeprefix('npu::')} with {name}={node.kwargs.get(name)}")


def _place(node: Node, first: int) -> tuple[Any, ...]:
    """(group, ranks, this rank, experts), the arguments from `first` on."""
    names = ("group_ep", "ep_world_size", "ep_rank_id", "moe_expert_num")
    return tuple(argument(node, first + i, name) for i, name in enumerate(names))


@rule(DISPATCH, f"{DISPATCH}_v2")
def npu_distribute_dispatch(lift: Lifting, node: Node) -> Outcome:
    """(rows of this rank's experts from all ranks, their scales, the way back, rows per expert, ...)."""
    own = dispatch_of(lift, node, argument(node, 0), argument(node, 1))
    if own is None or not isinstance(own.leaf, Leaf):
        return None
    _demand_plain(node)
    group, world, rank, experts = _place(node, 2)
    if world < 1 or experts % world:
        raise Conflict(f"{experts} experts are not spread evenly over {world} ranks")
    key: Leaf | Spread = own.leaf
    if world > 1:
        assert isinstance(own.ids.expr, Leaf)
        ranks = Ranks(group, world, rank, experts // world)
        key = Spread(own.ids.expr, ranks, node)
        order: Group = tuple(replace(digit, key=key) for digit in own.rows.dims[0] if isinstance(digit, Perm))
        own = replace(own, rows=Fact(marked(own.rows.expr, True), (order, own.rows.dims[1])))
    local = experts // world
    at: Group = () if local == 1 else (Axis(local),)
    counts = Fact((Offs if node.kwargs.get("expert_token_nums_type", 1) == 0 else Count)(key, at), (at,))
    mode, number, dtype = (
        node.kwargs.get("quant_mode", 0),
        node.kwargs.get("y_dtype"),
        value(argument(node, 0)).dtype,
    )
    if mode == 4 and number in ELEMENTS:
        rows, scales = in_blocks(own.rows, ELEMENTS[number], dtype)
        return rows, flat(scales), None, counts, None, None, None
    if number is not None:
        raise Conflict(f"npu_moe_distribute_dispatch with quant_mode={mode} and y_dtype={number}")
    if mode == 0:
        return own.rows, None, None, counts, None, None, None
    if mode != 2:
        raise Conflict(
            f"the dispatch quantises with quant_mode={mode}: only int8 with a scale of each row (2) and MX blocks (4) "
            "are understood"
        )
    rows, scales = quantise(own.rows, torch.int8, dtype)
    return rows, scales, None, counts, None, None, None


@rule(COMBINE, f"{COMBINE}_v2")
def npu_distribute_combine(lift: Lifting, node: Node) -> Outcome:
    """The sum over K of expert_scales * row, rows brought back from the ranks of their experts."""
    rows = lift.fact(argument(node, 0))
    if not rows.expr.hard:
        return None
    _demand_plain(node)
    (order,) = rows.dims[0] if len(rows.dims) == 2 and len(rows.dims[0]) == 1 else (None,)
    if not isinstance(order, Perm):
        raise Conflict("rows are brought back that are not in the order in which a dispatch sent them")
    _demand_own(node, order.sort)
    if isinstance(order.key, Spread):
        demand_sent(rows.expr, lambda by: isinstance(by, Spread) and by.node is order.sort)
        rows = Fact(marked(rows.expr, False), rows.dims)
    ids = lift.fact(argument(node, 1))
    unifier = Unifier()
    unifier.unify(order.over, (*ids.dims[0], *ids.dims[1]))
    dims = tuple(unifier.resolve(group) for group in (*ids.dims, rows.dims[1]))
    return weighted_sum(lift, node, Fact(unifier.expr(rows.expr), dims), argument(node, 4), None)


def _demand_own(node: Node, sent: Node) -> None:
    """Demand that a combine is that of the dispatch whose rows it takes."""
    version = "_v2" if op_name(node).endswith("_v2") else ""
    if op_name(sent) != f"{DISPATCH}{version}" or _place(sent, 2) != _place(node, 5):
        raise Conflict(
            f"rows in the order of `{sent.name}` are brought back by another operator, or other ranks"
        )
    if argument(node, 1) is not argument(sent, 1):
        raise Conflict(f"rows are brought back by other ids than `{sent.name}` sent them by")
    for position, output in ((2, 2), (3, 4)):
        given = argument(node, position)
        if op_name(given) != "getitem" or given.args != (sent, output):
            raise Conflict(
                f"rows are brought back by `{given}`, which isn't what `{sent.name}` says of its way"
            )
