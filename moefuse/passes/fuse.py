"""The rewrite: each accepted site becomes one `moefuse::mega_moe` node, all or nothing.

In: a functional ATen graph, its sites and the verdict on each. Out: the same graph with every accepted region
replaced. A site is replaced at its earliest complete node; what follows (views, casts, residuals) stays as it is.
"""

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from moefuse.graph import sizes
from moefuse.ops.spec import MoeSpec
from moefuse.passes.counts import Counts
from moefuse.passes.emit import STAND_IN, Emitter
from moefuse.passes.region import expert_rows, operand_leaves, region_of
from moefuse.patterns.axes import Axis, Dims, group_size
from moefuse.patterns.facts import Conflict, Leaf
from moefuse.patterns.layer import Layer
from moefuse.patterns.layer_quant import LayerQuant
from moefuse.patterns.rules import op_name, value
from moefuse.patterns.site import Site
from moefuse.patterns.weights import turned

aten = torch.ops.aten


def fuse_site(graph: Graph, site: Site, target: str, context: str = "") -> tuple[Node, Node]:
    """Replace the site's node by a mega_moe call bound to `target`; returns the call and the node that stands for it.

    context: the name of the communication context, for a site whose experts are spread over several ranks. Raises
    Conflict, with the graph's meaning unchanged, where an operand can't be expressed.
    """
    emitter = Emitter(graph, site.node, [leaf.node for leaf in operand_leaves(site)])
    try:
        call, result = _emit(emitter, site, target, context)
        counts = Counts(site)
        _resize(graph, site, counts)
    except Conflict:
        emitter.discard()
        raise
    _drop_size_asserts(graph, counts)
    site.node.replace_all_uses_with(result)
    site.node.meta[STAND_IN] = result
    return call, result


def why_not(graph: Graph, site: Site, target: str) -> str:
    """Why `fuse_site` would fail, "" where it wouldn't; the graph stays as it is."""
    emitter = Emitter(graph, site.node, [leaf.node for leaf in operand_leaves(site)])
    try:
        _emit(emitter, site, target, "")
    except Conflict as conflict:
        return conflict.reason
    finally:
        emitter.discard()
    return ""


def _emit(emitter: Emitter, site: Site, target: str, context: str) -> tuple[Node, Node]:
    """The call, and its output as the site's node has it."""
    try:
        call = _call(emitter, site, target, context)
        result = _as_output(emitter, site, emitter.call(operator.getitem, call, 0))
        if site.base is not None:
            result = emitter.call(aten.add.Tensor, site.base, result)
    except (ValueError, TypeError, RuntimeError) as error:  # what the operators' own checks refuse
        raise Conflict(f"the operator refuses the layer: {str(error).strip().splitlines()[0]}") from None
    if value(result).dtype != value(site.node).dtype or value(result).dim() != value(site.node).dim():
        raise Conflict(f"the fused output is {value(result).dtype} {tuple(value(result).shape)}")
    return call, _as_strided(emitter, site, result)


def _resize(graph: Graph, site: Site, counts: Counts) -> None:
    """Nothing may hold on to rows that go: sizes are read off the operands, checks of their metadata go too."""
    operands = [leaf.node for leaf in operand_leaves(site)]
    region = region_of(site)
    for node in region:
        for user in [user for user in node.users if op_name(user) == "aten::_assert_tensor_metadata"]:
            graph.erase_node(user)
    for row in expert_rows(site):
        for user in [user for user in row.users if op_name(user) == "aten::sym_size"]:
            if _goes(user, region, counts):
                continue
            emitter = Emitter(graph, user, [node for node in operands if node < user])
            size = _size(emitter, counts.size(value(user)))
            _replace(user, size)


def _replace(node: Node, size: Node | int) -> None:
    """All readers of a size read another node, or a number."""
    if isinstance(size, Node):
        node.replace_all_uses_with(size)
        return
    for reader in list(node.users):
        reader.args = torch.fx.map_arg(reader.args, lambda arg: size if arg is node else arg)
        reader.kwargs = torch.fx.map_arg(reader.kwargs, lambda arg: size if arg is node else arg)


def _size(emitter: Emitter, expr: sympy.Basic) -> Node | int:
    """A size that no count is part of any more: a number, or some multiple of an operand's dimension."""
    if expr.is_Integer:
        return int(expr)
    factor, rest = expr.as_coeff_Mul()
    for source in emitter.size_sources:
        for dim, size in enumerate(value(source).shape):
            if sizes.expr(size) == rest:
                node = emitter.call(aten.sym_size.int, source, dim)
                return node if factor == 1 else emitter.call(operator.mul, node, int(factor))
    raise Conflict(f"no operand of the layer has a dimension of {rest}")


def _goes(size: Node, region: set[Node], counts: Counts) -> bool:
    """True for a size that only the rows themselves read, or assertions that hold anyway."""

    def gone(user: Node) -> bool:
        if user in region:
            return True
        asserts = op_name(user) == "aten::_assert_scalar"
        harmless = counts.holds(user) if asserts else not isinstance(value(user), torch.Tensor)
        return harmless and _goes(user, region, counts)

    return all(map(gone, size.users))


def _drop_size_asserts(graph: Graph, counts: Counts) -> None:
    """Assertions that hold by construction (0 <= slots of an expert <= all slots) go with a loop; a user's own stay."""
    for node in graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        if counts.holds(node):
            graph.erase_node(node)


def restack(tensors: list[Node], experts: int) -> list[Node]:
    """One stacked tensor where per-expert tensors are its elements 0..E-1 in order, part by part."""
    result: list[Node] = []
    for start in range(0, len(tensors), experts):
        part = tensors[start : start + experts]
        whole = part[0].args[0] if op_name(part[0]) == "aten::select" else None
        if not isinstance(whole, Node) or len(part) != experts or value(whole).shape[0] != experts:
            return tensors
        if any(op_name(node) != "aten::select" or node.args != (whole, 0, e) for e, node in enumerate(part)):
            return tensors
        result.append(whole)
    return result


def _call(emitter: Emitter, site: Site, target: str, context: str) -> Node:
    """The node itself: the overload that the layer needs, its operands and its constants."""
    spec, layer = site.spec, site.layer
    local = spec.num_experts // spec.ep_world_size
    where = None if layer.ranks is None else emitter.call(torch.ops.moefuse.ep_context.default, context)
    slots: Dims = (layer.tokens, layer.slots)
    inner = frozenset(layer.inner)
    x = emitter.tensor(layer.x, (layer.tokens, layer.hidden))
    ids = _ids(emitter, site, x)
    operands = (
        where,
        x,
        ids,
        emitter.weights(layer.weights, ids, slots, spec.router_dtype),
        restack([_weight(emitter, layer, leaf, layer.contracted(leaf)) for leaf in layer.weight1], local),
        restack([_weight(emitter, layer, leaf, inner) for leaf in layer.weight2], local),
        restack([emitter.bias(leaf) for leaf in layer.bias1], local),
        restack([emitter.bias(leaf) for leaf in layer.bias2], local),
    )
    constants = {
        "num_experts": spec.num_experts,
        "ep_world_size": spec.ep_world_size,
        "transpose_weight1": spec.transpose_weight1,
        "transpose_weight2": spec.transpose_weight2,
        "gate_up": spec.gate_up,
        "activation": spec.activation,
        "activation_params": list(spec.activation_params),
        "activation_program": spec.activation_program,
        "activation_dtype": spec.activation_dtype,
        "product_dtype": spec.product_dtype,
        "output_dtype": spec.output_dtype,
    }
    if layer.quant is not None:
        return _quant_call(emitter, layer.quant, spec, operands, {**constants, "target": target})
    overloads = torch.ops.moefuse.mega_moe
    call = emitter.call(
        overloads.default if where is None else overloads.ep,
        *operands,
        emitter.one_tensor(restack([emitter.bias(leaf) for leaf in layer.row_scale], local)),
        **constants,
        weight_position=spec.weight_position,
        row_norm=spec.row_norm,
        row_norm_eps=spec.row_norm_eps,
        num_identity_experts=spec.num_identity_experts,
        target=target,
    )
    if where is not None:
        # as AOTAutograd does with collectives: what it runs again in the backward pass hangs on sizes of this rank
        call.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    return call


def _ids(emitter: Emitter, site: Site, x: Node) -> Node:
    """topk_ids [T, K] as the node takes them: integers, counted from the layer's own first expert."""
    spec, layer = site.spec, site.layer
    ids = emitter.tensor(layer.ids, (layer.tokens, layer.slots))
    if not isinstance(ids, Node):  # every token goes to this one expert
        tokens = value(x).shape[0]
        rows = tokens if isinstance(tokens, int) else emitter.call(aten.sym_size.int, x, 0)
        shape = [rows, group_size(layer.slots)]
        ids = emitter.call(aten.new_full.default, x, shape, int(ids), dtype=torch.int64)
    if value(ids).dtype not in (torch.int32, torch.int64):
        ids = emitter.call(aten._to_copy.default, ids, dtype=torch.int64)
    if layer.first:
        ids = emitter.call(aten.sub.Scalar, ids, layer.first)
    wraps = any(at.wraps for leaf in layer.weight2 for at in leaf.selectors)
    if wraps and layer.ranks is None and not spec.ids_checked:
        # The model's own weight[ids] counts negative ids from the end; the node would skip them.
        below = emitter.call(aten.lt.Scalar, ids, 0)
        ids = emitter.call(aten.where.self, below, emitter.call(aten.add.Scalar, ids, spec.num_experts), ids)
    return ids


def _weight(emitter: Emitter, layer: Layer, leaf: Leaf, contracted: frozenset[Axis]) -> Node:
    """An expert weight, in MX formats as it lies in memory: a view of a view."""
    node = emitter.weight(leaf, contracted)
    if layer.quant is None or not layer.quant.by_blocks or not turned(leaf):
        return node
    return emitter.call(aten.transpose.int, node, -2, -1)


def _quant_call(
    emitter: Emitter, quant: LayerQuant, spec: MoeSpec, operands: tuple[Any, ...], constants: dict[str, Any]
) -> Node:
    """The call with quantised experts: scales and offsets beside the weights."""
    local = spec.num_experts // spec.ep_world_size
    overloads = torch.ops.moefuse.mega_moe

    def beside(leaves: Sequence[Leaf], group: tuple[Axis, ...], transposed: bool) -> list[Node]:
        if quant.by_blocks:
            return restack([emitter.block_scale(leaf, group, transposed) for leaf in leaves], local)
        return restack([emitter.scale(leaf, group) for leaf in leaves], local)

    return emitter.call(
        overloads.quant if operands[0] is None else overloads.quant_ep,
        *operands,
        beside(quant.scale1, quant.group1, spec.transpose_weight1),
        beside(quant.scale2, quant.group2, spec.transpose_weight2),
        beside(quant.offset1, quant.group1, spec.transpose_weight1),
        beside(quant.offset2, quant.group2, spec.transpose_weight2),
        **constants,
        quant=quant.scheme,
        hidden_dtype=spec.hidden_dtype,
        rows_dtype=spec.rows_dtype,
    )


def _as_strided(emitter: Emitter, site: Site, result: Node) -> Node:
    """The output laid out in memory as the model's own: later views depend on it."""
    wanted, have = value(site.node), value(result)
    pairs = zip(wanted.shape, wanted.stride(), have.stride(), strict=True)
    if all(sizes.is_one(size) or sizes.same(a, b) for size, a, b in pairs):
        return result
    if not wanted.is_contiguous():
        raise Conflict("the output isn't contiguous in memory")
    return emitter.call(aten.clone.default, result, memory_format=torch.contiguous_format)


def _as_output(emitter: Emitter, site: Site, y: Node) -> Node:
    """[T, O] in the dims of the node that is replaced."""
    natural = [*site.layer.tokens, *(d for d in site.layer.features if isinstance(d, Axis))]
    wanted = [d for group in site.dims for d in group if isinstance(d, Axis)]
    if wanted != natural:
        y = emitter.reshape(y, [axis.size for axis in natural])
        y = emitter.permute(y, [natural.index(axis) for axis in wanted])
    shape = [group_size(group) for group in site.dims]
    return emitter.reshape(y, shape)
