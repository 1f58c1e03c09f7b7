"""Some of the experts only: routing weights that are zero for slots whose expert lies elsewhere.

In: the node of routing weights, and which experts are here. Out: whether each slot of another expert has the weight 0.
What a mask of the ids means is found by computing it for every id there is, not by how it is spelled.
"""

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.patterns.rank_facts import Among
from moefuse.patterns.router import chosen_from
from moefuse.patterns.rules import argument, op_name, value

DEPTH = 8
"""Operators between routing weights and the mask that is multiplied in."""

_KEEPS_ZEROS = ("aten::_to_copy", "aten::to", "aten::clone", "aten::alias", "aten::contiguous")


def is_zero_elsewhere(weights: Node, some: Among) -> bool:
    """True where the weights are multiplied with a mask of the very ids that is 0 for all experts but `some`."""
    experts = chosen_from(some.ids)
    if experts is None:
        return False
    numbers = torch.arange(experts)
    other = (numbers < some.first) | (numbers >= some.first + some.experts)
    return _vanishes(weights, some.ids.node, numbers, other, DEPTH)


def _vanishes(node: object, ids: Node, numbers: Tensor, other: Tensor, depth: int) -> bool:
    if not isinstance(node, Node) or depth == 0:
        return False
    if value(node).shape == value(ids).shape and (mask := _computed(node, ids, numbers)) is not None:
        return not bool(mask[other].any())
    if op_name(node) == "aten::mul":
        whole = [
            arg for arg in node.args[:2] if isinstance(arg, Node) and value(arg).shape == value(node).shape
        ]
        return any(_vanishes(arg, ids, numbers, other, depth - 1) for arg in whole)
    return op_name(node) in _KEEPS_ZEROS and _vanishes(argument(node, 0), ids, numbers, other, depth - 1)


def _computed(node: Node, ids: Node, numbers: Tensor, depth: int = DEPTH) -> Tensor | None:
    """The node's element for each id, if it is computed from the ids alone, element by element."""
    if node is ids:
        return numbers
    if depth == 0 or not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return None
    if torch.Tag.pointwise not in node.target.tags and op_name(node) not in _KEEPS_ZEROS:
        return None
    known: dict[Node, Tensor] = {}
    for arg in node.all_input_nodes:
        if not isinstance(value(arg), Tensor) or value(arg).shape != value(ids).shape:
            return None
        found = _computed(arg, ids, numbers, depth - 1)
        if found is None:
            return None
        known[arg] = found
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
    result = node.target(
        *args, **{name: arg for name, arg in kwargs.items() if name not in ("device", "layout")}
    )
    return result if isinstance(result, Tensor) and result.shape == numbers.shape else None
