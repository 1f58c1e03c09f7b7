"""The region of a layer: what lies between its first GEMM and its output, and who else has to do with it.

In: a site, in the graph that it was found in. Out: its nodes and operands, the collectives that its rows travel by, and
what keeps it from becoming one node: rows that somebody else reads, a stream that is switched inside, an operand that
is written before the end, where the node reads it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.counts import Counts
from moefuse.patterns.facts import Expr, Leaf
from moefuse.patterns.pointwise import walk
from moefuse.patterns.rules import READS_NO_ELEMENT, op_name
from moefuse.patterns.site import Site

_STREAMS = ("streams", "npugraph_ex", "air")
"""Operators by which PyTorch, npugraph_ex and torchair write streams, events and scopes into a graph."""


def obstacle(site: Site) -> tuple[str, str]:
    """(check, reason) where a region can't become one node, whatever computes it; ("", "") where it can."""
    if (escape := _escape(site)) is not None:
        row, user = escape
        return "escape", f"the expert rows `{row.name}` are also read by `{user.name}`, outside of the layer"
    if (switch := _off_stream(site)) is not None:
        where = "stands between the first GEMM and the output: the layer isn't on one stream"
        return "streams", f"`{switch.name}` {where}"
    if (write := _written(site)) is not None:
        return "in_place", f"`{write.name}` writes in place to what the layer reads, before the layer's end"
    return "", ""


def _escape(site: Site) -> tuple[Node, Node] | None:
    """An expert row that somebody else reads too, and that reader; None when the region is closed.

    The region holds every node between the site's first GEMM and its output. A rewrite would stay right if a row
    escaped, but its GEMMs would run twice.
    """
    rows = expert_rows(site)
    if site.base in rows:  # the base stays: it is added to what the node gives
        return site.base, site.node
    for row in sorted(rows):
        for user in row.users:
            if user not in rows and user is not site.node and op_name(user) not in READS_NO_ELEMENT:
                return row, user
    return None


def _off_stream(site: Site) -> Node | None:
    """The node that switches, records or waits for a stream inside the layer, or that runs on another one; or None.

    One node in its place would take the whole layer to one stream, past what the model made wait; where ranks
    communicate beside it, they can then wait for each other for good.
    """
    stream = _stream(site.node)
    node = min(site.gemms)
    while node is not site.node:
        on_another = node in site.gemms and _stream(node) != stream
        if on_another or op_name(node).partition("::")[0] in _STREAMS:
            return node
        node = node.next
    return None


def _stream(node: Node) -> Any:
    """What Dynamo noted of the user's `with torch.Stream(...)`; None outside of any."""
    return (node.meta.get("custom") or {}).get("stream")


def _written(site: Site) -> Node | None:
    """The operator that writes in place to what the layer reads, while it runs; or None.

    `graph.capture` makes functional graphs; those that other compilers hand to a pass need not be.
    """
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


def expert_rows(site: Site) -> set[Node]:
    """The nodes of the region that hold expert rows: the GEMMs and what is made from them."""
    rows: set[Node] = set()
    for node in sorted(region_of(site)):  # fx nodes order by their place in the graph
        reads = op_name(node) not in READS_NO_ELEMENT and any(arg in rows for arg in node.all_input_nodes)
        if node in site.gemms or reads:
            rows.add(node)
    return rows


def region_of(site: Site) -> set[Node]:
    """The ancestors of the site's node down to the operands and the first GEMM: nothing earlier holds a row.

    An operand may be missing on some path (the base of an index_add, a size): the walk must not go up the model.
    """
    operands = {leaf.node for leaf in operand_leaves(site)}
    first = min(site.gemms)
    region: set[Node] = set()
    stack = list(site.node.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in region or node in operands or node < first:
            continue
        region.add(node)
        stack.extend(node.all_input_nodes)
    return region


def operand_leaves(site: Site) -> list[Leaf]:
    """All leaves that the node reads: the token rows, ids, routing weights, expert weights and biases."""
    layer = site.layer
    exprs: list[Expr] = [layer.x, layer.ids, *layer.weights, *layer.weight1, *layer.weight2]
    exprs += [*layer.bias1, *layer.bias2, *layer.row_scale]
    exprs += layer.quant.leaves if layer.quant is not None else ()
    return [leaf for expr in exprs for leaf in walk(expr) if isinstance(leaf, Leaf)]


def travels(site: Site) -> set[Node]:
    """The collectives by which the site's rows and their counts travel: its node does without them."""
    operands = {leaf.node for leaf in operand_leaves(site)}
    found: set[Node] = set()
    stack = [site.node] if site.layer.ranks is not None else []
    while stack:
        node = stack.pop()
        if node not in found and node not in operands:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return {node for node in found if op_name(node).startswith("_c10d_functional::")}


def outliving(site: Site) -> set[Node]:
    """Those of `travels` that stay when the site's node is replaced: what they give is read beside the layer too."""
    gone, region, rows, counts = travels(site), region_of(site), set(expert_rows(site)), Counts(site)

    def stops(node: Node, user: Node) -> bool:
        """True for a reader that goes with the layer: `_resize` and `_drop_size_asserts` see to it."""
        name = op_name(user)
        if name == "aten::_assert_scalar":
            return counts.holds(user)
        return (
            user is site.node
            or (name == "aten::sym_size" and node in rows)
            or (name == "aten::_assert_tensor_metadata" and node in region)
        )

    return {node for node in gone if _reaches_what_stays(node, stops, gone)}


def _reaches_what_stays(start: Node, stops: Callable[[Node, Node], bool], gone: set[Node]) -> bool:
    seen, stack = set[Node](), [start]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user in seen or stops(node, user):
                continue
            if user.op == "output" or (user.is_impure() and user not in gone):
                return True
            seen.add(user)
            stack.append(user)
    return False
