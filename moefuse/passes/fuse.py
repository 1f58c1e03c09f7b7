"""The rewrite: each accepted site becomes one `moefuse::mega_moe` node, all or nothing.

In: a functional ATen graph, its sites and the verdict on each. Out: the same graph with every accepted region
replaced. A site is replaced at its earliest complete node; what follows (views, casts, residuals) stays as it is.
"""

import operator

import torch
from torch.fx import Graph, Node

from moefuse.passes.emit import Emitter
from moefuse.patterns.facts import Axis, Conflict, Dims, Expr, Leaf, group_size
from moefuse.patterns.router import walk
from moefuse.patterns.rules import op_name, value
from moefuse.patterns.site import Site

aten = torch.ops.aten


def fuse_site(graph: Graph, site: Site, target: str) -> Node:
    """Replace the site's node by a mega_moe call bound to `target`; returns the call.

    Raises Conflict, with the graph unchanged but for unused nodes, where an operand can't be expressed.
    """
    emitter = Emitter(graph, site.node, [leaf.node for leaf in operand_leaves(site)])
    call = _call(emitter, site, target)
    result = _as_output(emitter, site, emitter.call(operator.getitem, call, 0))
    if site.base is not None:
        result = emitter.call(aten.add.Tensor, site.base, result)
    if value(result).dtype != value(site.node).dtype or value(result).dim() != value(site.node).dim():
        raise Conflict(f"the fused output is {value(result).dtype} {tuple(value(result).shape)}")
    _resize(graph, site)
    site.node.replace_all_uses_with(result)
    return call


def _resize(graph: Graph, site: Site) -> None:
    """Sizes that the model reads off expert rows are read off the operands instead: the rows go."""
    operands = [leaf.node for leaf in operand_leaves(site)]
    for row in expert_rows(site):
        for user in [user for user in row.users if op_name(user) == "aten::sym_size"]:
            earlier = [node for node in operands if node < user]
            user.replace_all_uses_with(Emitter(graph, user, earlier).size_node(value(user)))


def _call(emitter: Emitter, site: Site, target: str) -> Node:
    spec = site.spec
    slots: Dims = (site.tokens, site.slots)
    inner = frozenset(site.inner)
    x = emitter.tensor(site.x, (site.tokens, site.hidden))
    ids = emitter.tensor(site.ids, slots)
    if not spec.ids_checked and any(
        at.wraps for leaf in [*site.weight1, site.weight2] for at in leaf.selectors
    ):
        # The model's own weight[ids] counts negative ids from the end; the node would skip them.
        below = emitter.call(aten.lt.Scalar, ids, 0)
        ids = emitter.call(aten.where.self, below, emitter.call(aten.add.Scalar, ids, spec.num_experts), ids)
    weights = emitter.weights(site.weights, ids, slots, spec.router_dtype)
    return emitter.call(
        torch.ops.moefuse.mega_moe.default,
        None,
        x,
        ids,
        weights,
        [emitter.weight(leaf, leaf.axes - inner - leaf.selectors[0].expr.axes) for leaf in site.weight1],
        [emitter.weight(site.weight2, inner)],
        [emitter.bias(leaf) for leaf in site.bias1],
        [emitter.bias(leaf) for leaf in site.bias2],
        num_experts=spec.num_experts,
        ep_world_size=spec.ep_world_size,
        transpose_weight1=spec.transpose_weight1,
        transpose_weight2=spec.transpose_weight2,
        gate_up=spec.gate_up,
        activation=spec.activation,
        activation_params=list(spec.activation_params),
        activation_program=spec.activation_program,
        activation_dtype=spec.activation_dtype,
        weight_position=spec.weight_position,
        product_dtype=spec.product_dtype,
        output_dtype=spec.output_dtype,
        target=target,
    )


def _as_output(emitter: Emitter, site: Site, y: Node) -> Node:
    """[T, O] in the dims of the node that is replaced."""
    natural = [*site.tokens, *(d for d in site.features if isinstance(d, Axis))]
    wanted = [d for group in site.dims for d in group if isinstance(d, Axis)]
    if wanted != natural:
        y = emitter.reshape(y, [axis.size for axis in natural])
        y = emitter.permute(y, [natural.index(axis) for axis in wanted])
    shape = [group_size(group) for group in site.dims]
    return emitter.reshape(y, shape)


def operand_leaves(site: Site) -> list[Leaf]:
    """All leaves that the node reads: the token rows, ids, routing weights, expert weights and biases."""
    exprs: list[Expr] = [
        site.x,
        site.ids,
        *site.weights,
        *site.weight1,
        site.weight2,
        *site.bias1,
        *site.bias2,
    ]
    return [leaf for expr in exprs for leaf in walk(expr) if isinstance(leaf, Leaf)]


def escaping(site: Site) -> tuple[Node, Node] | None:
    """An expert row that somebody else reads too, and that reader; None when the region is closed.

    The region holds every node between the site's first GEMM and its output. A rewrite would stay right if a row
    escaped, but its GEMMs would run twice.
    """
    rows = expert_rows(site)
    for row in sorted(rows):
        for user in row.users:
            if user not in rows and user is not site.node and op_name(user) != "aten::sym_size":
                return row, user
    return None


def expert_rows(site: Site) -> set[Node]:
    """The nodes of the region that hold expert rows: the GEMMs and what is made from them."""
    rows: set[Node] = set()
    for node in sorted(_region(site)):  # fx nodes order by their place in the graph
        if node in site.gemms or any(
            arg in rows for arg in node.all_input_nodes if op_name(node) != "aten::sym_size"
        ):
            rows.add(node)
    return rows


def _region(site: Site) -> set[Node]:
    """The ancestors of the site's node down to the operands, which are not part of it."""
    operands = {leaf.node for leaf in operand_leaves(site)}
    region: set[Node] = set()
    stack = list(site.node.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in region or node in operands or node.op == "placeholder":
            continue
        region.add(node)
        stack.extend(node.all_input_nodes)
    return region
