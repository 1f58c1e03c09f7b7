"""One spelling for what makes no difference: no-op views, the same view made twice, temporaries written in place.

In: a functional ATen graph. Out: the same graph with no-op views removed and equal views shared, and numbers read off
the tensors that were stacked to be read. Views alias their input either way, and a temporary has no other reader, so
nothing that the program can observe changes.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import Graph, Node

from moefuse.graph import sizes
from moefuse.graph.groups import place_in
from moefuse.patterns.rules import op_name, value

RESHAPING = {"aten::view", "aten::expand", "aten::unsqueeze", "aten::squeeze", "aten::slice"}
NUMBERS = {"aten::select", "aten::_local_scalar_dense"}
"""`tolist()`, as it is captured."""
_COLLECTIVE = "_c10d_functional::"
_IDENTITIES = {"all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"}
"""Those that give one rank what it gave."""
VIEWS = RESHAPING | {"aten::permute", "aten::transpose", "aten::t", "aten::select", "aten::alias"}


def canonicalize(graph: Graph, training: bool) -> int:
    """Remove no-op views, share equal ones, drop dead nodes; returns how many nodes went.

    A `detach` is an alias where no gradients are wanted, and stays where they are: it stops them.
    """
    before = len(graph.nodes)
    seen: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        _out_of_place(node)
        same = _same(node, seen, training)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return before - len(graph.nodes)


def _same(node: Node, seen: dict[Hashable, Node], training: bool) -> Node:
    """The node whose elements these are: an earlier one, a copy that is made here, or the node itself.

    seen: the views met so far, by what they are of.
    """
    if op_name(node) == "aten::detach" and not training:
        return node.all_input_nodes[0]
    if (source := _sent_to_nobody(node)) is not None:
        with node.graph.inserting_before(node):
            copy = node.graph.call_function(torch.ops.aten.clone.default, (source,))
        copy.meta.update(node.meta | {"val": value(source).clone()})
        return copy
    if (stacked := _stacked(node)) is not None:
        return stacked
    if op_name(node) not in VIEWS:
        return node
    # What is returned stays: `x.view(x.shape)` is another tensor object than x.
    if _changes_nothing(node) and all(user.op != "output" for user in node.users):
        return node.all_input_nodes[0]
    return seen.setdefault(_key(node), node)


def _out_of_place(node: Node) -> None:
    """`add_` on a result that nobody else reads becomes `add`: composite operators (rms_norm) write so."""
    source = node.args[0] if node.args else None
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(source, Node):
        return
    name, own = node.target._schema.name, node.target._schema.arguments
    if not name.startswith("aten::") or not name.endswith("_") or any(a.is_write for a in own[1:]):
        return
    made = source.target._schema.returns if isinstance(source.target, torch._ops.OpOverload) else ()
    if len(source.users) != 1 or len(made) != 1 or made[0].alias_info is not None:
        return
    packet = getattr(torch.ops.aten, name.removeprefix("aten::").removesuffix("_"), None)
    twin = getattr(packet, node.target._overloadname, None)
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
    if twin is not None and twin(*args, **kwargs).dtype == value(node).dtype:
        node.target = twin


def _sent_to_nobody(wait: Node) -> Node | None:
    """The tensor that goes through a collective over a group of one rank, at the wait for it: it comes back as it is.

    Not where the sizes of what comes back are known by other data: what is read off them would not fit any more.
    """
    sent = wait.args[0] if op_name(wait) == f"{_COLLECTIVE}wait_tensor" else None
    if not isinstance(sent, Node) or op_name(sent).removeprefix(_COLLECTIVE) not in _IDENTITIES:
        return None
    place, source = place_in(sent.args[-1]), sent.all_input_nodes[0]
    same = all(map(sizes.same, value(source).shape, value(wait).shape))
    return source if same and place is not None and place.world == 1 else None


def _stacked(node: Node) -> Node | None:
    """The tensor that is selected again from those that were stacked, if only its numbers are read."""
    if op_name(node) != "aten::select" or not isinstance(stack := node.args[0], Node):
        return None
    if op_name(stack) != "aten::stack" or not all(op_name(user) in NUMBERS for user in node.users):
        return None
    rank, (dim, index) = value(stack).dim(), (node.args[1], node.args[2])
    along = stack.args[1] if len(stack.args) > 1 else 0
    tensors: Any = stack.args[0]
    if not isinstance(index, int) or int(dim) % rank != int(along) % rank:  # type: ignore[arg-type]
        return None
    found = tensors[index]
    return found if isinstance(found, Node) and value(found).dtype == value(stack).dtype else None


def _changes_nothing(node: Node) -> bool:
    if op_name(node) not in RESHAPING:
        return False
    source, result = value(node.args[0]), value(node)
    if not isinstance(source, torch.Tensor) or source.dim() != result.dim() or source.dtype != result.dtype:
        return False
    if op_name(node) == "aten::slice" and len(node.args) > 4 and node.args[4] != 1:
        return False
    same_shape = all(sizes.same(a, b) for a, b in zip(source.shape, result.shape, strict=True))
    return same_shape and all(sizes.same(a, b) for a, b in zip(source.stride(), result.stride(), strict=True))


def _key(node: Node) -> Hashable:
    def freeze(arg: Any) -> Hashable:
        if isinstance(arg, list | tuple):
            return tuple(freeze(item) for item in arg)
        return arg if isinstance(arg, Node | int | float | str | bool | type(None)) else repr(arg)

    return node.target, freeze(node.args), freeze(tuple(sorted(node.kwargs.items())))
