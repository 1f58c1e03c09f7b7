"""From a complete expression to the specification of one MoE layer.

In: the fact of a node that sums expert rows over the slots of each token. Out: `Site`, or `Conflict` with the
first thing that is missing or strange. What is demanded here is what makes a rewrite right: the same ids select
every weight, the token row is indexed by the token and nothing else, routing weights by the slot, each weight
is read whole, and no slot is left out.
"""

import functools
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.ops.spec import GateUp, MoeSpec, WeightPosition
from moefuse.patterns.activation import Classified, classify, to_program, upcast
from moefuse.patterns.facts import (
    Axis,
    Conflict,
    Const,
    Dims,
    Expr,
    Group,
    Leaf,
    Op,
    Part,
    Sum,
    bind,
)
from moefuse.patterns.products import Linear, factors, first_gemms, linear, split_factors, times
from moefuse.patterns.router import strip_casts, topk_of, walk
from moefuse.patterns.rules import Lifting, value
from moefuse.patterns.weights import affine, demand_whole, entry_of, is_transposed, layout, span


@dataclass
class Site:
    """One MoE layer found in a graph: which node it is, what it computes, and its operands as expressions.

    tokens, slots: the axes of T (as the token row is indexed) and of K. dims: the node's dims in those axes.
    weight1: one weight (gate and up together, or a plain expert) or two (gate, up). `base`: a node that the
    layer's output is added to.
    """

    node: Node
    dims: Dims
    tokens: tuple[Axis, ...]
    slots: tuple[Axis, ...]
    features: Group
    hidden: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    x: Expr
    ids: Leaf
    weights: list[Expr]
    weight1: list[Leaf]
    weight2: Leaf
    bias1: list[Leaf]
    bias2: list[Leaf]
    gate_up: GateUp
    activation: Classified
    activation_dtype: torch.dtype | None
    weight_position: WeightPosition
    base: Node | None
    terms: torch.dtype | None
    gemms: frozenset[Node]
    spec: MoeSpec = field(init=False)

    def __post_init__(self) -> None:
        self.spec = _spec(self)


def assemble(lift: Lifting, node: Node, expr: Expr, dims: Dims) -> Site:
    """The layer whose output is `node`. Raises Conflict where the expression isn't a whole MoE layer."""
    total = expr if isinstance(expr, Sum) else None  # a layer with one slot per token needs no sum
    slots = total.over if total is not None else ()
    core, outputs = split_factors(total.body if total is not None else expr)
    second = linear(core)
    if second is None:
        raise Conflict(_unexpected(core, "between the second expert GEMM and the combine"))
    program, mids = _split_activation(second.rows)
    firsts = first_gemms(program)
    if not firsts:
        raise Conflict("no first expert GEMM feeds the second one")
    x, inputs = _token_rows(lift, firsts, slots)
    ids = _same_ids([second, *firsts])
    hidden = firsts[0].over
    tokens = _token_axes(x, hidden, ids, slots)
    position = _position(outputs, mids, inputs)
    _check_weights([*outputs, *mids, *inputs], {*tokens, *slots})
    features = _output_features(dims, tokens)
    demand_whole(second, second.over, features)
    gate_up, ordered, activation, activation_dtype = _gate_up(program, firsts, second.over)
    return Site(
        node=node,
        dims=dims,
        tokens=tokens,
        slots=slots,
        features=features,
        hidden=hidden,
        inner=second.over,
        x=x,
        ids=ids,
        weights=[*outputs, *mids, *inputs],
        weight1=_one_per_tensor([f.weight for f in ordered], gate_up),
        weight2=second.weight,
        bias1=_one_per_tensor([f.bias for f in ordered if f.bias is not None], gate_up),
        bias2=[second.bias] if second.bias is not None else [],
        gate_up=gate_up,
        activation=activation,
        activation_dtype=activation_dtype,
        weight_position=position,
        base=total.base if total is not None else None,
        terms=total.terms if total is not None else None,
        gemms=frozenset([second.node, *(f.node for f in firsts)]),
    )


def _position(outputs: list[Expr], mids: list[Expr], inputs: list[Expr]) -> WeightPosition:
    """Where the routing weight multiplies. Factors at several places are refused: they don't commute with biases."""
    places: dict[WeightPosition, list[Expr]] = {"output": outputs, "mid": mids, "input": inputs}
    used = [place for place, found in places.items() if found]
    if len(used) > 1:
        raise Conflict(f"routing weights at several places of the layer: {', '.join(used)}")
    return used[0] if used else "output"


def _unexpected(expr: Expr, where: str) -> str:
    inner = strip_casts(expr)
    if isinstance(inner, Op):
        at = f" (`{inner.node.name}`)" if inner.node is not None else ""
        return f"{inner.target}{at} stands {where}"
    return f"a {type(inner).__name__.lower()} stands {where}"


def _split_activation(rows: Expr) -> tuple[Expr, list[Expr]]:
    """The activation's value without soft factors that hold a value per slot ("mid" routing weights)."""
    every = factors(rows)
    soft = [f for f in every if not f.hard and not isinstance(f, Const)]
    if not soft:
        return rows, []
    kept = [f for f in every if f.hard or isinstance(f, Const)]
    if not any(f.hard for f in kept):
        raise Conflict("no first expert GEMM feeds the second one")
    return times(kept), soft


def _token_rows(lift: Lifting, firsts: list[Linear], slots: tuple[Axis, ...]) -> tuple[Expr, list[Expr]]:
    """(the expression of the token row, routing weights multiplied into it); equal for every first GEMM."""
    rows: Expr | None = None
    weights: list[Expr] = []
    for first in firsts:
        if len(first.over) != len(firsts[0].over):
            raise Conflict("gate and up GEMM contract different dimensions")
        renamed: dict[Axis, Group] = {
            old: (new,) for old, new in zip(first.over, firsts[0].over, strict=True)
        }
        opened = lift.expand(first.rows, functools.partial(_per_slot, over=first.over, slots=slots))
        every = factors(bind(opened, renamed))
        routing = [f for f in every if _is_routing_weight(f, firsts[0].over, slots)]
        row = times([f for f in every if f not in routing])
        if rows is None:
            rows, weights = row, routing
        elif rows != row or weights != routing:
            raise Conflict("gate and up GEMM read different rows")
    assert rows is not None
    dtype = value(firsts[0].weight.node).dtype
    if _dtype(rows) != dtype:  # a cast of the whole product, the routing weight included
        rows = Op(torch.ops.aten._to_copy.default, (rows,), (("dtype", dtype),))
    return rows, weights


def _is_routing_weight(factor: Expr, features: tuple[Axis, ...], slots: tuple[Axis, ...]) -> bool:
    """A factor of the input row that depends on the slot; all else belongs to the token row itself."""
    if factor.axes & set(features):
        return False
    return bool(factor.axes & set(slots)) or any(isinstance(e, Leaf) and e.selectors for e in walk(factor))


def _per_slot(leaf: Leaf, over: tuple[Axis, ...], slots: tuple[Axis, ...]) -> bool:
    """A leaf over slots and features: open it, a routing weight may have been multiplied in."""
    return not leaf.axes.isdisjoint(over) and not leaf.axes.isdisjoint(slots) and not leaf.selectors


def _same_ids(linears: list[Linear]) -> Leaf:
    """The ids that select every weight and bias."""
    leaves = [leaf for one in linears for leaf in (one.weight, one.bias) if leaf is not None]
    chosen = [leaf.selectors[0].expr if len(leaf.selectors) == 1 else None for leaf in leaves]
    first = chosen[0]
    if not isinstance(first, Leaf):
        raise Conflict("expert weights are selected by something other than a tensor of ids")
    for leaf, other in zip(leaves, chosen, strict=True):
        if other != first:
            raise Conflict(f"`{leaf.node.name}` is selected by other ids than the rest of the layer")
    return first


def _token_axes(rows: Expr, hidden: tuple[Axis, ...], ids: Leaf, slots: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The token axes, in the order in which the token row is indexed."""
    leaves = [e for e in walk(rows) if isinstance(e, Leaf)]
    main = next((leaf for leaf in leaves if leaf.axes >= set(hidden) and not leaf.selectors), None)
    if main is None:
        raise Conflict("the input rows of the experts are no plain tensor indexed by token")
    tokens = tuple(d for g in main.index for d in g if isinstance(d, Axis) and d not in hidden)
    if any(not isinstance(d, Axis) for g in main.index for d in g):
        raise Conflict(f"`{main.node.name}` is not read whole as the token rows")
    index = [d for g in ids.index for d in g]
    if any(not isinstance(d, Axis) for d in index):
        raise Conflict(f"only a part of the ids `{ids.node.name}` is used")
    if not set(slots) <= set(index):
        raise Conflict("the combine sums over something other than the slots of a token")
    expected = [axis for axis in index if axis not in slots]
    if set(tokens) != set(expected) or len(tokens) != len(expected) or not rows.axes <= {*tokens, *hidden}:
        raise Conflict(f"`{main.node.name}` is not indexed by the token of each slot")
    return tokens


def _check_weights(weights: list[Expr], allowed: set[Axis]) -> None:
    """Routing weights depend on the slot alone, and are read whole."""
    for weight in weights:
        if not weight.axes <= allowed:
            raise Conflict(f"{_name(weight)} weighs expert outputs by more than the slot")
        for leaf in (e for e in walk(weight) if isinstance(e, Leaf)):
            if any(isinstance(d, Part) for g in leaf.index for d in g):
                raise Conflict(f"only a part of the routing weights `{leaf.node.name}` is used")


def _name(expr: Expr) -> str:
    node = getattr(expr, "node", None)
    return f"`{node.name}`" if node is not None else "a factor"


def _output_features(dims: Dims, tokens: tuple[Axis, ...]) -> Group:
    """The feature dimension of the output: what remains beside the token axes, in one piece."""
    rest = tuple(d for g in dims for d in g if d not in tokens)
    if any(not isinstance(d, Axis) for d in rest):
        raise Conflict("the output is in sorted order")
    if len(rest) + len(tokens) != sum(len(g) for g in dims):
        raise Conflict("the output does not have one row per token")
    if not set(tokens) <= {d for g in dims for d in g}:
        raise Conflict("the output sums over tokens")
    return rest


def _gate_up(
    program: Expr, firsts: list[Linear], inner: tuple[Axis, ...]
) -> tuple[GateUp, list[Linear], Classified, torch.dtype | None]:
    """(layout, GEMMs in order gate, up; activation, its dtype), read off the weight rows that each leaf takes."""
    if len(firsts) > 2:
        raise Conflict(f"the activation reads {len(firsts)} different GEMM outputs")
    names = dict(zip(map(_key, firsts), ("g", "u"), strict=False))

    def leaf(expr: Expr) -> str | None:
        found = linear(expr)
        return names[_key(found)] if found is not None else None

    activation = classify(to_program(program, leaf), len(firsts) == 2)
    ordered = firsts[::-1] if activation.swapped else firsts
    axes = frozenset(inner)
    spans = [span(one.weight, axes, one.over) for one in ordered]
    for one, rows in zip(ordered, spans, strict=True):
        if one.bias is not None and affine(entry_of(one.bias, axes), axes) != rows[:2]:
            raise Conflict(f"`{one.bias.node.name}` is not laid out as the weight it belongs to")
    if len({one.bias is None for one in ordered}) > 1:
        raise Conflict("only one of gate and up has a bias")
    found = layout(ordered, spans, sizes.product(axis.size for axis in inner))
    return found, ordered, activation, upcast(program, leaf)


def _key(one: Linear) -> tuple[Leaf, Leaf | None]:
    return one.weight, one.bias


def _one_per_tensor(leaves: list[Leaf], gate_up: GateUp) -> list[Leaf]:
    """Two leaves where gate and up are separate tensors, otherwise one: both halves are in it."""
    return leaves if gate_up == "separate" else leaves[:1]


def _static(size: sizes.Size, what: str) -> int:
    if not isinstance(size, int):
        raise Conflict(f"the {what} is not static: {size}")
    return size


def _spec(site: Site) -> MoeSpec:
    """What the site computes, without the graph."""
    hidden, inner = frozenset(site.hidden), frozenset(site.inner)
    parameters = [*site.weight1, site.weight2, *site.bias1, *site.bias2]
    dtypes = {value(leaf.node).dtype for leaf in parameters}
    if len(dtypes) != 1:
        raise Conflict(f"the layer's weights and biases have different dtypes: {sorted(map(str, dtypes))}")
    experts = {_static(leaf.selectors[0].size, "number of experts") for leaf in parameters}
    if len(experts) != 1:
        raise Conflict(f"the layer's weights hold {sorted(experts)} experts")
    flags = {is_transposed(leaf, leaf.axes - inner - leaf.selectors[0].expr.axes) for leaf in site.weight1}
    if len(flags) != 1:
        raise Conflict("gate and up weights have different orientations")
    (count,) = experts
    topk, dim = topk_of(site.ids.node)
    chosen_from = value(topk.args[0]).shape[dim] if topk is not None else None
    val = value(site.node)
    return MoeSpec(
        num_experts=count,
        top_k=_static(sizes.product(axis.size for axis in site.slots), "number of slots per token"),
        hidden=_static(sizes.product(axis.size for axis in hidden), "hidden size"),
        intermediate=_static(sizes.product(axis.size for axis in inner), "intermediate size"),
        out_features=_static(sizes.product(axis.size for axis in site.features), "output size"),
        device=val.device.type,
        x_dtype=_dtype(site.x),
        expert_dtype=dtypes.pop(),
        router_dtype=_product_dtype(site.weights, val.dtype),
        output_dtype=val.dtype,
        product_dtype=None if site.terms in (torch.float32, torch.float64) else site.terms,
        gate_up=site.gate_up,
        transpose_weight1=flags.pop(),
        transpose_weight2=is_transposed(site.weight2, inner),
        has_bias1=bool(site.bias1),
        has_bias2=bool(site.bias2),
        activation=site.activation.activation,
        activation_params=site.activation.params,
        activation_program=site.activation.program,
        activation_dtype=site.activation_dtype,
        weight_position=site.weight_position,
        has_router_weight=any(not isinstance(factor, Const) for factor in site.weights),
        ids_checked=chosen_from is not None and sizes.same(chosen_from, count),
    )


def _product_dtype(weights: list[Expr], default: torch.dtype) -> torch.dtype:
    dtypes = [_dtype(weight) for weight in weights if not isinstance(weight, Const)]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else default


def _dtype(expr: Expr) -> torch.dtype:
    """The dtype of a row expression: of its last cast, or of its leaf."""
    if isinstance(expr, Op) and expr.target is torch.ops.aten._to_copy.default:
        dtype = dict(expr.kwargs).get("dtype")
        return dtype if isinstance(dtype, torch.dtype) else _dtype(expr.args[0])
    if isinstance(expr, Leaf):
        dtype = value(expr.node).dtype
        assert isinstance(dtype, torch.dtype)
        return dtype
    return _product_dtype(list(expr.parts()), torch.float32)
