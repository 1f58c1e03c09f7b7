"""From a complete expression to the specification of one MoE layer.

In: the fact of a node that sums expert rows over the slots of each token. Out: `Site`, or `Conflict` with the first
thing that is missing or strange (layer.py, merge.py say what is demanded).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.ops.spec import MoeSpec
from moefuse.patterns.axes import Axis, Digit, Dims
from moefuse.patterns.capacity import dropped
from moefuse.patterns.facts import Cases, Conflict, Const, Expr, Leaf, Sum
from moefuse.patterns.layer import Layer
from moefuse.patterns.loops import all_cases
from moefuse.patterns.merge import layer_of, merge
from moefuse.patterns.pointwise import dtype_of, product_dtype, walk
from moefuse.patterns.router import chosen_from
from moefuse.patterns.rules import Counted, Lifting, value
from moefuse.patterns.weights import is_transposed, turned


@dataclass(frozen=True)
class Strange:
    """What looks like a shared expert and isn't understood. node: what is added. gemms: its products."""

    node: Node
    gemms: frozenset[Node]
    reason: str


@dataclass
class Site:
    """One MoE layer found in a graph: which node it is, and what it computes.

    dims: the node's dims in the layer's axes. base: a node that the layer's output is added to. terms: the dtype to
    which weighted rows are rounded before they are summed. counts: sizes of the graph that count some expert's slots.
    shared: its shared experts as layers of their own, or why they can't be (shared.py).
    """

    node: Node
    dims: Dims
    layer: Layer
    base: Node | None = None
    terms: torch.dtype | None = None
    counts: Mapping[sympy.Symbol, Counted] = field(default_factory=dict)
    shared: tuple["Site | Strange", ...] = ()
    spec: MoeSpec = field(init=False)

    def __post_init__(self) -> None:
        _demand_no_drops(self.layer)
        self.spec = _spec(self)

    @property
    def gemms(self) -> frozenset[Node]:
        """The nodes of the layer's expert GEMMs."""
        return self.layer.gemms


def assemble(lift: Lifting, node: Node, expr: Expr, dims: Dims) -> Site:
    """The layer whose output is `node`. Raises Conflict where the expression isn't a whole MoE layer."""
    if isinstance(expr, Cases):
        cases = all_cases(lift, expr)
        layer = merge(lift, cases, dims)
        return Site(node, dims, layer, expr.base, expr.terms, lift.counts)
    if isinstance(expr, Sum):
        layer = layer_of(lift, expr.body, expr.over, dims)
        return Site(node, dims, layer, expr.base, expr.terms, lift.counts)
    # one slot per token needs no sum
    return Site(node, dims, layer_of(lift, expr, (), dims), counts=lift.counts)


def _demand_no_drops(layer: Layer) -> None:
    leaves = [e for expr in (layer.ids, *layer.weights) for e in walk(expr) if isinstance(e, Leaf)]
    for node in dict.fromkeys(leaf.node for leaf in leaves):
        if reason := dropped(node):
            raise Conflict(reason, node)


def _spec(site: Site) -> MoeSpec:
    """What the site computes, without the graph."""
    layer = site.layer
    dtypes = {value(leaf.node).dtype for leaf in (*layer.weight1, *layer.weight2)}
    if len(dtypes) != 1:
        raise Conflict(f"the layer's weights have different dtypes: {', '.join(sorted(map(str, dtypes)))}")
    world = layer.ranks.world if layer.ranks is not None else 1
    count = _experts(layer)
    transposed1 = _transposed(layer, [(leaf, layer.contracted(leaf)) for leaf in layer.weight1])
    transposed2 = _transposed(layer, [(leaf, frozenset(layer.inner)) for leaf in layer.weight2])
    val = value(site.node)
    return MoeSpec(
        num_experts=count * world,
        top_k=_static(layer.slots, "number of slots per token"),
        hidden=_static(layer.hidden, "hidden size"),
        intermediate=_static(layer.inner, "intermediate size"),
        out_features=_static(layer.features, "output size"),
        device=val.device.type,
        x_dtype=dtype_of(layer.x),
        expert_dtype=dtypes.pop(),
        router_dtype=_router_dtype(layer, val.dtype),
        output_dtype=val.dtype,
        product_dtype=None if site.terms in (torch.float32, torch.float64) else site.terms,
        gate_up=layer.gate_up,
        transpose_weight1=transposed1,
        transpose_weight2=transposed2,
        weight_form="stacked" if layer.stacked else "list",
        has_bias1=bool(layer.bias1),
        has_bias2=bool(layer.bias2),
        activation=layer.activation.activation,
        activation_params=layer.activation.params,
        activation_program=layer.activation.program,
        activation_dtype=_activation_dtype(layer),
        **_quant_fields(layer),
        weight_position=layer.weight_position,
        row_norm=layer.row_norm,
        row_norm_eps=layer.row_norm_eps,
        has_row_scale=bool(layer.row_scale),
        num_identity_experts=layer.identities,
        has_router_weight=any(not isinstance(factor, Const) for factor in layer.weights),
        ep_world_size=world,
        ids_checked=isinstance(layer.ids, Const)
        or (layer.first == 0 and chosen_from(layer.ids) == count * world + layer.identities),
    )


def _router_dtype(layer: Layer, output: torch.dtype) -> torch.dtype:
    """The dtype of the routing weights; of several factors a wide one: what each does to a row, their product may not.

    Small enough rows times 1e5 are numbers in float16, and 1e5 isn't.
    """
    own = product_dtype(layer.weights, torch.promote_types(output, torch.float32))
    return own if len(layer.weights) == 1 else torch.promote_types(own, torch.float32)


def _transposed(layer: Layer, weights: Sequence[tuple[Leaf, frozenset[Axis]]]) -> bool:
    """Do the output features come first in these weights, each with its contracted axes? MX ones as they lie."""
    blocks = layer.quant is not None and layer.quant.by_blocks
    flags = {is_transposed(leaf, contracted) is not (blocks and turned(leaf)) for leaf, contracted in weights}
    if len(flags) != 1:
        raise Conflict("the layer's weights have different orientations")
    return flags.pop()


def _activation_dtype(layer: Layer) -> torch.dtype | None:
    """The activation's; of quantised experts what their second GEMM quantises, None where that's the first one's."""
    quant = layer.quant
    if quant is None:
        return layer.activation_dtype
    return None if quant.activated_dtype in (None, quant.hidden_dtype) else quant.activated_dtype


def _quant_fields(layer: Layer) -> dict[str, Any]:
    """The fields of a spec that quantised experts have."""
    quant = layer.quant
    if quant is None:
        return {}
    groups = quant.groups
    if not all(isinstance(size, int) for size in groups):
        raise Conflict(f"the groups of inputs with a scale of their own are not static: {groups}")
    return {
        "quant": quant.scheme,
        "hidden_dtype": quant.hidden_dtype,
        "rows_dtype": quant.rows_dtype,
        "has_weight_offsets": bool(quant.offset1 or quant.offset2),
        "weight_scale_groups": groups,
    }


def _experts(layer: Layer) -> int:
    """How many experts the weights hold, on this rank."""
    if not layer.stacked:
        return _demand_own(layer, len(layer.weight2))
    parameters = [*layer.weight1, *layer.weight2, *layer.bias1, *layer.bias2]
    counts = {leaf.selectors[0].size for leaf in parameters}
    (count,) = counts if len(counts) == 1 else (None,)
    if not isinstance(count, int):
        raise Conflict(
            f"the layer's weights hold different or unknown numbers of experts: {sorted(map(str, counts))}"
        )
    return _demand_own(layer, count)


def _demand_own(layer: Layer, count: int) -> int:
    """The number of experts, which is that of those whose rows come to this rank."""
    if layer.ranks is not None and (count, layer.identities) != (layer.ranks.experts, 0):
        others = f", and {layer.identities} that return their rows" if layer.identities else ""
        raise Conflict(
            f"this rank gets the rows of {layer.ranks.experts} experts and holds the weights of {count}{others}"
        )
    return count


def _static(axes: Iterable[Digit], what: str) -> int:
    size = sizes.product(axis.size for axis in axes)
    if not isinstance(size, int):
        raise Conflict(f"the {what} is not static: {size}")
    return size
