"""An operator that ends a layer and goes on: two operators while a graph is read, one again where no layer took it.

In: a graph. Out: `npu_moe_distribute_combine_add_rms_norm` as MC2's combine and `npu_add_rms_norm`, which has the same
outputs. A layer ends at the combine; what is left of the operator stays behind it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from moefuse.passes.emit import Emitter
from moefuse.patterns.rules import argument, op_name

WHOLE = "npu::npu_moe_distribute_combine_add_rms_norm"
_OPERANDS, _PLACE = 5, 7
"""How many operands the combine has, and where the group's name stands, behind the residual and gamma."""
_OWN: dict[str, Any] = {
    "activation_scale": None,
    "weight_scale": None,
    "group_list": None,
    "out_dtype": 0,
    "group_list_type": 0,
}
"""What MC2's second combine hasn't: the operator is cut where these are as by default."""
_EPS, _EPS_DEFAULT = "norm_eps", 1e-6


@dataclass(frozen=True)
class Halves:
    """What an operator was cut into. widened: the combine's output as the rest reads it. whole, meta: its own."""

    combine: Node
    widened: Node
    rest: Node
    whole: Any
    meta: dict[str, Any]


def split(graph: Graph) -> list[Halves]:
    """Cut every such operator."""
    return [_split(graph, node) for node in list(graph.nodes) if op_name(node) == WHOLE and _plain(node)]


def _plain(node: Node) -> bool:
    return all(node.kwargs.get(name, default) == default for name, default in _OWN.items())


def _split(graph: Graph, node: Node) -> Halves:
    names = ("group_ep", "ep_world_size", "ep_rank_id", "moe_expert_num")
    place = [argument(node, _PLACE + i, name) for i, name in enumerate(names)]
    options = {name: value for name, value in node.kwargs.items() if name not in (*names, *_OWN, _EPS)}
    residual, gamma = (argument(node, _OPERANDS + i) for i in range(_PLACE - _OPERANDS))
    emitter = Emitter(graph, node, [])
    npu = torch.ops.npu
    combine = emitter.call(
        npu.npu_moe_distribute_combine_v2.default, *node.args[:_OPERANDS], *place, **options
    )
    widened = emitter.call(torch.ops.aten.unsqueeze.default, combine, 1)
    eps = node.kwargs.get(_EPS, _EPS_DEFAULT)
    rest = emitter.call(npu.npu_add_rms_norm.default, widened, residual, gamma, eps)
    node.replace_all_uses_with(rest)
    graph.erase_node(node)
    combine.name = node.name  # a graph never gives a name twice, and reports say this one
    return Halves(combine, widened, rest, node.target, node.meta)


def join(graph: Graph, halves: list[Halves]) -> None:
    """Put together again what no layer took: its first half is still what the rest reads."""
    for each in halves:
        if each.widened.args[0] is not each.combine:
            continue
        rows, _, residual, gamma, eps = (each.combine.args, *each.rest.args)
        with graph.inserting_before(each.rest):
            node = graph.create_node(
                "call_function",
                each.whole,
                (*rows[:_OPERANDS], residual, gamma, *rows[_OPERANDS:]),
                {**each.combine.kwargs, **({} if eps == _EPS_DEFAULT else {_EPS: eps})},
            )
        each.rest.replace_all_uses_with(node)
        for half in (each.rest, each.widened, each.combine):
            graph.erase_node(half)
        node.name, node.meta = each.combine.name, each.meta
