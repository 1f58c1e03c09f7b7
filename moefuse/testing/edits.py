"""The ways in which one edit changes a graph, and the metadata behind it.

In: nodes of an original graph. Out: a `Change`, applied to a copy through the map from original to
copied nodes. Each change drops `meta["val"]` of the nodes that it touches; `propagate` computes it anew
from there on.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings
from torch.utils import _pytree as pytree

aten = torch.ops.aten

Change = Callable[[Mapping[Node, Node]], None]
"""Applies an edit to a copy: takes the map from the original's nodes to the copy's."""

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An operator, its arguments after the first, its keyword arguments."""


def tensor_of(node: Node) -> Any:
    """The fake tensor of a node, None for other values."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def type_of(node: Node) -> tuple[Any, ...]:
    """Dtype and sizes as text: equal for tensors that can stand for each other."""
    value = tensor_of(node)
    return (value.dtype, *map(str, value.shape))


def operands(node: Node) -> Iterator[tuple[int, Node]]:
    """Position among the flattened arguments, and tensor, of every operand."""
    leaves, _ = pytree.tree_flatten((node.args, node.kwargs))
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Node) and tensor_of(leaf) is not None:
            yield position, leaf


def _store(node: Node, position: int, value: Any) -> None:
    leaves, form = pytree.tree_flatten((node.args, node.kwargs))
    leaves[position] = value
    node.args, node.kwargs = pytree.tree_unflatten(leaves, form)
    node.meta.pop("val", None)


def set_leaf(node: Node, position: int, value: Any) -> Change:
    """Another constant at a position of the flattened arguments."""
    return lambda copy_of: _store(_in(copy_of, node), position, value)


def set_node(node: Node, position: int, other: Node) -> Change:
    """Another operand at a position of the flattened arguments."""
    return lambda copy_of: _store(_in(copy_of, node), position, copy_of[other])


def without(node: Node, name: str) -> Change:
    """A keyword argument left out."""

    def change(copy_of: Mapping[Node, Node]) -> None:
        copy = _in(copy_of, node)
        copy.kwargs = {key: value for key, value in copy.kwargs.items() if key != name}
        copy.meta.pop("val", None)

    return change


def swap_leaves(node: Node, position: int) -> Change:
    """Two neighbouring constants change places."""

    def change(copy_of: Mapping[Node, Node]) -> None:
        copy = _in(copy_of, node)
        leaves, _ = pytree.tree_flatten((copy.args, copy.kwargs))
        _store(copy, position, leaves[position - 1])
        _store(copy, position - 1, leaves[position])

    return change


def insert_before(node: Node, position: int, calls: Sequence[Call]) -> Change:
    """One operand goes through `calls` before this use."""

    def change(copy_of: Mapping[Node, Node]) -> None:
        copy = _in(copy_of, node)
        leaves, _ = pytree.tree_flatten((copy.args, copy.kwargs))
        value = leaves[position]
        with copy.graph.inserting_before(copy):
            for target, rest, keywords in calls:
                value = copy.graph.call_function(target, (value, *rest), keywords)
        _store(copy, position, value)

    return change


def replace_all(node: Node, other: Node) -> Change:
    """All users of `node` take `other`."""

    def change(copy_of: Mapping[Node, Node]) -> None:
        for user in list(copy_of[node].users):
            user.meta.pop("val", None)
        copy_of[node].replace_all_uses_with(copy_of[other])

    return change


def set_target(node: Node, target: Any) -> Change:
    """Another operator with the same arguments."""

    def change(copy_of: Mapping[Node, Node]) -> None:
        copy_of[node].target = target
        copy_of[node].meta.pop("val", None)

    return change


def partial_sum(node: Node) -> Change:
    """A sum that leaves out the first entry of its dimension."""
    dim = int(node.args[1][0])  # type: ignore[index,arg-type]
    return insert_before(node, 0, [(aten.slice.Tensor, (dim, 1, 2**63 - 1), {})])


def repeat_order(node: Node) -> Change:
    """repeat_interleave becomes repeat: the same rows in another order."""

    def change(copy_of: Mapping[Node, Node]) -> None:
        copy = copy_of[node]
        source, count = copy.args[0], copy.args[1]
        copy.target = aten.repeat.default
        copy.args = (source, [count] + [1] * (tensor_of(node).dim() - 1))
        copy.kwargs = {}
        copy.meta.pop("val", None)

    return change


def swap_uses(first: Node, second: Node) -> Change:
    """Users of either node take the other one."""

    def change(copy_of: Mapping[Node, Node]) -> None:
        a, b = copy_of[first], copy_of[second]
        # Users between the two come after the second one now, as far as that is possible at all.
        for user in [u for u in (*a.users, *b.users) if u is not a and u is not b]:
            user.replace_input_with(a, b) if a in user.all_input_nodes else user.replace_input_with(b, a)
            user.meta.pop("val", None)
        _sort(a.graph)

    return change


def return_too(node: Node) -> Change:
    """`node` is one more output."""

    def change(copy_of: Mapping[Node, Node]) -> None:
        output = copy_of[node].graph.output_node()
        output.args = ([*_outputs(output), copy_of[node]],)

    return change


def shuffle(graph: Graph, seed: int) -> Change:
    """Another topological order of the same nodes."""
    return lambda copy_of: _sort(next(iter(copy_of.values())).graph, random.Random(seed))


def _sort(graph: Graph, rng: random.Random | None = None) -> None:
    """Put the nodes into a topological order, a random one with `rng`. Leaves a cyclic graph as it is."""
    nodes = list(graph.nodes)
    waiting = {node: len(node.all_input_nodes) for node in nodes}
    ready = [n for n in nodes if not waiting[n] and n.op == "placeholder"]
    order: list[Node] = []
    ready = [*ready, *(n for n in nodes if not waiting[n] and n.op not in ("placeholder", "output"))]
    placeholders = sum(n.op == "placeholder" for n in nodes)
    while ready:
        pick = 0 if rng is None or len(order) < placeholders else rng.randrange(len(ready))
        node = ready.pop(pick)
        order.append(node)
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user] and user.op != "output":
                ready.append(user)
    if len(order) != len(nodes) - 1:
        return
    for node in order:
        graph.output_node().prepend(node)


def _in(copy_of: Mapping[Node, Node], node: Node) -> Node:
    """The copy of `node`; the output node isn't in the map."""
    return copy_of[node] if node in copy_of else next(iter(copy_of.values())).graph.output_node()


def _outputs(output: Node) -> list[Any]:
    value = output.args[0]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def output_shapes(graph: Graph) -> list[Any]:
    """What the graph returns: types of tensors, other values as they are."""
    return [
        type_of(n) if isinstance(n, Node) and tensor_of(n) is not None else n
        for n in _outputs(graph.output_node())
    ]


def propagate(graph_module: GraphModule) -> bool:
    """Recompute `meta["val"]` behind the edit. False: the graph is no valid program."""
    values = [v for n in graph_module.graph.nodes if (v := tensor_of(n)) is not None]
    mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
    if mode is None:
        raise ValueError("graph_module: expected fake tensors in node.meta['val']; capture it first")
    replacements = None if mode.shape_env is None else dict(mode.shape_env.replacements)
    changed: set[Node] = set()
    with mode, torch.no_grad():
        for node in graph_module.graph.nodes:
            if node.op != "call_function" or ("val" in node.meta and not changed & set(node.all_input_nodes)):
                continue
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            try:
                node.meta["val"] = node.target(*args, **kwargs)
                new = compute_unbacked_bindings(mode.shape_env, node.meta["val"])
            except Exception:  # any failure of a fake kernel means: no valid program
                return False
            changed.add(node)
            node.meta.pop("unbacked_bindings", None)
            if new:
                node.meta["unbacked_bindings"] = new
    if replacements is not None and mode.shape_env.replacements != replacements:
        # The edit only fits one token count; it mustn't pin the symbol for the graphs that share it.
        mode.shape_env.replacements = replacements
        return False
    graph_module.recompile()
    return True
