"""Is anything that a layer reads written in place while it runs?

In: a site. Out: the operator that writes; None where there is none. `graph.capture` makes functional graphs; those that
other compilers hand to a pass need not be. One node in the layer's place reads everything at the layer's end.
"""

from collections.abc import Iterator

import torch
from torch.fx import Node

from moefuse.passes.fuse import operand_leaves
from moefuse.patterns.rules import READS_NO_ELEMENT, op_name
from moefuse.patterns.site import Site


def written(site: Site) -> Node | None:
    """See the module text."""
    operands = {leaf.node for leaf in operand_leaves(site)} | (
        {site.base} if site.base is not None else set()
    )
    computed, stack = set[Node](), [*site.node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node not in computed and node not in operands and node.op == "call_function":
            computed.add(node)
            stack.extend(() if op_name(node) in READS_NO_ELEMENT else node.all_input_nodes)
    memory = {_memory(node) for node in computed | operands}
    node = min(computed, default=site.node)
    while node is not site.node:
        if any(_memory(target) in memory for target in _targets(node)):
            return node
        node = node.next
    return None


def _targets(node: Node) -> Iterator[Node]:
    """The tensors that an operator writes to."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return
    for place, argument in enumerate(node.target._schema.arguments):
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        every = given if isinstance(given, list | tuple) else [given]
        yield from (one for one in every if argument.is_write and isinstance(one, Node))


def _memory(node: Node) -> Node:
    """The node whose memory a view shows, or an operator that writes in place gives back."""
    while node.op == "call_function" and node.args and isinstance(source := node.args[0], Node):
        returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
        if op_name(node) != "getitem" and not any(one.alias_info is not None for one in returns):
            break
        node = source
    return node
