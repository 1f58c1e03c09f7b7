"""Capacity: slots that are dropped where their expert's queue is full.

In: the node of ids, routing weights or a mask of choices. Out: why it says that slots were dropped, "" where nothing
is known of it. A layer that drops is refused by name: which slots an expert takes then depends on the whole batch.
"""

from collections.abc import Callable

import torch
from torch.fx import Node

from moefuse.patterns.rules import op_name, value

COMPARISONS = frozenset(f"aten::{name}" for name in ("lt", "le", "gt", "ge"))

WHOLE_DEPTH = 24
"""Integer and boolean operators between ids (a mask) and the comparison with the capacity: masks, views, sums."""

QUEUE_DEPTH = 8
"""Operators between the running count of an expert's slots and its comparison: a shift by one, a mask, views."""

FLOAT_DEPTH = 6
"""Operators between routing weights and the mask that is multiplied in."""


def dropped(node: Node) -> str:
    """The reason, if the node's elements depend on a running count that was compared with a number."""
    for found in whole_above(_masks(node)):
        if op_name(found) not in COMPARISONS:
            continue
        operands = {arg for arg in found.all_input_nodes if _is_whole(arg)}
        if (queue := running_count(operands, lambda _: True)) is not None:
            return (
                f"slots are counted expert by expert (`{queue.name}`) and compared with a capacity "
                f"(`{found.name}`): those beyond it are dropped"
            )
    return ""


def _masks(node: Node) -> set[Node]:
    """The node itself if it is an integer or boolean tensor, otherwise such tensors that take part in it."""
    level, masks = {node}, set[Node]()
    for _ in range(FLOAT_DEPTH):
        masks |= {n for n in level if _is_whole(n)}
        level = {arg for n in level - masks for arg in n.all_input_nodes}
    return masks


def whole_above(nodes: set[Node]) -> set[Node]:
    """The nodes and what the integer and boolean tensors among them are made from, up to float tensors."""
    found, level = set(nodes), set(nodes)
    for _ in range(WHOLE_DEPTH):
        level = {arg for n in level for arg in n.all_input_nodes if not _is_float(arg)} - found
        found |= level
    return found


def running_count(nodes: set[Node], counts: Callable[[Node], bool]) -> Node | None:
    """The nearest cumsum that `counts`, among integer tensors and what they are made from."""
    level = nodes
    for _ in range(QUEUE_DEPTH):
        for node in level:
            if op_name(node) == "aten::cumsum" and counts(node):
                return node
        level = {arg for node in level for arg in node.all_input_nodes if _is_whole(arg)}
    return None


def _is_float(node: Node) -> bool:
    val = value(node)
    return isinstance(val, torch.Tensor) and not _is_whole(node)


def _is_whole(node: Node) -> bool:
    val = value(node)
    return isinstance(val, torch.Tensor) and not val.is_floating_point() and not val.is_complex()
