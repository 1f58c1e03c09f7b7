"""From a complete expression to the specification of one MoE layer.

In: the fact of a node that sums expert rows over the slots of each token. Out: `Site`, or `Conflict` with the
first thing that is missing or strange. What is demanded here is what makes a rewrite right: the same ids select
every weight, the token row is indexed by the token and nothing else, routing weights by the slot, each weight
is read whole, and no slot is left out.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.ops.spec import GateUp, MoeSpec, WeightPosition
from moefuse.patterns.activation import Classified, classify, to_program
from moefuse.patterns.facts import (
    At,
    Axis,
    Conflict,
    Const,
    Digit,
    Dims,
    Dot,
    Expr,
    Group,
    Leaf,
    Op,
    Part,
    Sum,
    bind,
    group_axes,
    group_size,
)
from moefuse.patterns.router import strip_casts, topk_of, walk
from moefuse.patterns.rules import Lifting, value

MUL = (torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Scalar)
DIV = (torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar)
ADD = (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar)


@dataclass
class Site:
    """One MoE layer found in a graph: which node it is, what it computes, and its operands as expressions.

    tokens, slots: the axes of T (as the token row is indexed) and of K. dims: the node's dims in those axes.
    weight1: one weight (gate and up together, or a plain expert) or two (gate, up). `base`: a node that the
    layer's output is added to.
    """

    node: Node
    spec: MoeSpec
    dims: Dims
    tokens: tuple[Axis, ...]
    slots: tuple[Axis, ...]
    features: Group
    x: Expr
    hidden: tuple[Axis, ...]
    ids: Leaf
    weights: list[Expr]
    weight1: list[Leaf]
    weight2: Leaf
    bias1: list[Leaf]
    bias2: list[Leaf]
    base: Node | None
    gemms: frozenset[Node]
    roles: dict[str, frozenset[Axis]] = field(default_factory=dict)


# --- factoring -------------------------------------------------------------------------------------------


def factors(expr: Expr) -> list[Expr]:
    """The factors of a product, looking through casts; a division by something soft is a factor too."""
    inner = strip_casts(expr)
    if isinstance(inner, Op) and inner.target in MUL:
        return [f for arg in inner.args[:2] for f in factors(_as_expr(arg))]
    if isinstance(inner, Op) and inner.target in DIV and not inner.kwargs and not _as_expr(inner.args[1]).hard:
        inverse = Op(torch.ops.aten.reciprocal.default, (_as_expr(inner.args[1]),), (), inner.node)
        return [*factors(inner.args[0]), inverse]
    return [] if inner == Const(1.0) else [inner if inner.hard else expr]


def _as_expr(arg: object) -> Expr:
    if isinstance(arg, Expr):
        return arg
    if isinstance(arg, int | float):
        return Const(float(arg))
    raise Conflict(f"a factor that is no number: {arg}")


def _split_factors(expr: Expr) -> tuple[Expr, list[Expr]]:
    """(the one hard factor, the soft ones)."""
    every = factors(expr)
    hard = [f for f in every if f.hard]
    if len(hard) != 1:
        raise Conflict(f"a product of {len(hard)} expert outputs where one is expected")
    return hard[0], [f for f in every if not f.hard]


@dataclass(frozen=True)
class Linear:
    """rows @ weight (+ bias): one expert GEMM."""

    rows: Expr
    weight: Leaf
    over: tuple[Axis, ...]
    bias: Leaf | None
    node: Node


def linear(expr: Expr) -> Linear | None:
    """The GEMM, with its bias, that an expression is; None for anything else."""
    inner = strip_casts(expr)
    if isinstance(inner, Dot) and inner.expert:
        weight, rows = _weight_of(inner)
        return Linear(rows, weight, inner.over, None, inner.node)
    if not isinstance(inner, Op) or inner.target not in ADD or dict(inner.kwargs).get("alpha", 1) != 1:
        return None
    for one, other in (inner.args[:2], inner.args[1::-1]):
        if not isinstance(one, Expr) or not isinstance(other, Expr) or not one.hard or other.hard:
            continue
        bias, product = strip_casts(other), linear(one)
        if product is not None and product.bias is None and isinstance(bias, Leaf) and bias.selectors:
            return Linear(product.rows, product.weight, product.over, bias, product.node)
    return None


def _weight_of(dot: Dot) -> tuple[Leaf, Expr]:
    """Which operand of an expert product is the weight, and the other one."""
    for weight, rows in ((dot.b, dot.a), (dot.a, dot.b)):
        leaf = strip_casts(weight)
        if isinstance(leaf, Leaf) and len(leaf.selectors) == 1 and leaf.axes >= set(dot.over):
            if leaf is not weight:
                raise Conflict(f"expert weights `{leaf.node.name}` are cast after they were selected")
            return leaf, rows
    raise Conflict(f"the weights of `{dot.node.name}` are not selected by the routing")


# --- assembly --------------------------------------------------------------------------------------------


def assemble(lift: Lifting, node: Node, expr: Expr, dims: Dims) -> Site:
    """The layer whose output is `node`. Raises Conflict where the expression isn't a whole MoE layer."""
    body, slots, base, terms = _combined(expr)
    core, weights = _split_factors(body)
    second = linear(core)
    if second is None:
        raise Conflict(_unexpected(core, "between the second expert GEMM and the combine"))
    inner, mid = _split_activation(second.rows)
    firsts = _first_gemms(inner)
    if not firsts:
        raise Conflict("no first expert GEMM feeds the second one")
    token_rows, inputs = _token_rows(lift, firsts, slots)
    ids = _same_ids([second, *firsts])
    tokens = _token_axes(token_rows, firsts[0].over, ids, slots)
    used = [name for name, found in (("output", weights), ("mid", mid), ("input", inputs)) if _real(found)]
    if len(used) > 1 or (used and used != ["output"] and weights):
        raise Conflict(f"factors at several places of the layer ({', '.join(used)}, output)")
    _check_weights([*weights, *mid, *inputs], tokens, slots)
    position: WeightPosition = used[0] if used else "output"  # type: ignore[assignment]
    features = _output_features(dims, tokens)
    gate_up, ordered, act = _gate_up(inner, firsts, mid_axes=second.over)
    _whole(second, second.over, features)
    roles = {"hidden": frozenset(firsts[0].over), "inner": frozenset(second.over)}
    site = Site(
        node=node,
        spec=_spec(node, ids, token_rows, ordered, second, act, gate_up, position, [*weights, *mid, *inputs], slots, terms),
        dims=dims,
        tokens=tokens,
        slots=slots,
        features=features,
        x=token_rows,
        hidden=firsts[0].over,
        ids=ids,
        weights=[*weights, *mid, *inputs],
        weight1=_one_per_tensor([f.weight for f in ordered], gate_up),
        weight2=second.weight,
        bias1=_one_per_tensor([f.bias for f in ordered if f.bias is not None], gate_up),
        bias2=[second.bias] if second.bias is not None else [],
        base=base,
        gemms=frozenset([second.node, *(f.node for f in firsts)]),
        roles=roles,
    )
    return site


def _real(found: list[Expr]) -> bool:
    """True when the factors hold more than plain numbers."""
    return any(not isinstance(f, Const) for f in found)


def _combined(expr: Expr) -> tuple[Expr, tuple[Axis, ...], Node | None, torch.dtype | None]:
    """(row expression, slot axes summed over, base, dtype of the terms); a K = 1 layer has no sum."""
    if isinstance(expr, Sum):
        return expr.body, expr.over, expr.base, expr.terms
    return expr, (), None, None


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
    return _times(kept), soft


def _first_gemms(expr: Expr) -> list[Linear]:
    """The different GEMM outputs that the activation reads, in order of appearance."""
    found = linear(expr)
    if found is not None:
        return [found]
    result: list[Linear] = []
    for part in expr.parts():
        result.extend(f for f in _first_gemms(part) if f not in result)
    return result


def _token_rows(lift: Lifting, firsts: list[Linear], slots: tuple[Axis, ...]) -> tuple[Expr, list[Expr]]:
    """(the expression of the token row, routing weights multiplied into it); equal for every first GEMM."""
    rows: Expr | None = None
    weights: list[Expr] = []
    for first in firsts:
        if len(first.over) != len(firsts[0].over):
            raise Conflict("gate and up GEMM contract different dimensions")
        renamed: dict[Axis, Group] = {old: (new,) for old, new in zip(first.over, firsts[0].over, strict=True)}
        opened = lift.expand(first.rows, lambda leaf: _per_slot(leaf, first.over, slots))
        every = factors(bind(opened, renamed))
        routing = [f for f in every if _is_routing_weight(f, firsts[0].over, slots)]
        row = _times([f for f in every if f not in routing])
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


def _times(every: list[Expr]) -> Expr:
    """The product of some factors."""
    if not every:
        raise Conflict("the input of the experts is no token row")
    return functools.reduce(lambda a, b: Op(torch.ops.aten.mul.Tensor, (a, b)), every)


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


def _check_weights(weights: list[Expr], tokens: tuple[Axis, ...], slots: tuple[Axis, ...]) -> None:
    allowed = {*tokens, *slots}
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


# --- weights ---------------------------------------------------------------------------------------------


def affine(group: Group, axes: frozenset[Axis]) -> tuple[int, int] | None:
    """(start, step) of a group that counts evenly through its dimension as `axes` run; None otherwise."""
    found = _affine(group)
    if found is None:
        return None
    start, steps = found
    if {axis for axis, _ in steps} != axes:
        return None
    # Several axes are one count if each strides over all that is inside it.
    for (_, outer), (axis, inner) in zip(steps, steps[1:], strict=False):
        if not isinstance(axis.size, int) or outer != inner * axis.size:
            return None
    return start, steps[-1][1] if steps else 1


def _affine(group: Group) -> tuple[int, list[tuple[Axis, int]]] | None:
    start, steps = 0, list[tuple[Axis, int]]()
    radix = 1
    for digit in reversed(group):
        if isinstance(digit, Axis):
            steps.insert(0, (digit, radix))
        elif isinstance(digit, Part):
            inner = _affine(digit.group)
            if inner is None:
                return None
            start += radix * (digit.start + digit.step * inner[0])
            steps[:0] = [(axis, radix * digit.step * step) for axis, step in inner[1]]
        else:
            return None
        if not isinstance(digit.size, int):
            return None if digit is not group[0] else (start, steps)
        radix *= digit.size
    return start, steps


def entry_of(leaf: Leaf, axes: frozenset[Axis]) -> Group:
    """The digits of a leaf's index that run over the axes (of one dimension, or a whole part of one)."""
    groups = [
        tuple(d for d in group if not isinstance(d, At) and group_axes((d,)) <= axes)
        for group in leaf.index
        if group_axes(group) & axes
    ]
    if len(groups) != 1:
        raise Conflict(f"`{leaf.node.name}` is not a weight with one dimension per role")
    return groups[0]


def _whole(one: Linear, over: tuple[Axis, ...], features: Group) -> None:
    """Demand that contraction and output of a GEMM run over the whole of their weight dimension."""
    out = frozenset(d for d in features if isinstance(d, Axis))
    for role, axes in (("contracted", frozenset(over)), ("output", out)):
        entry = entry_of(one.weight, axes)
        if affine(entry, axes) != (0, 1) or not sizes.same(group_size(entry), sizes.product(a.size for a in axes)):
            raise Conflict(f"only a part of `{one.weight.node.name}` is used ({role} dimension)")
    if one.bias is not None:
        entry = entry_of(one.bias, out)
        if affine(entry, out) != (0, 1) or one.bias.axes - one.bias.selectors[0].expr.axes != out:
            raise Conflict(f"`{one.bias.node.name}` is no bias over the output features")


def _gate_up(inner: Expr, firsts: list[Linear], mid_axes: tuple[Axis, ...]) -> tuple[GateUp, list[Linear], Classified]:
    """(layout, GEMMs in order gate, up; the activation). Reads which rows of the weight are gate and up."""
    if len(firsts) > 2:
        raise Conflict(f"the activation reads {len(firsts)} different GEMM outputs")
    gated = len(firsts) == 2
    names = dict(zip(map(_key, firsts), ("g", "u"), strict=False))

    def leaf(expr: Expr) -> str | None:
        found = linear(expr)
        return names[_key(found)] if found is not None else None

    act = classify(to_program(inner, leaf), gated)
    ordered = firsts[::-1] if act.swapped else firsts
    axes = frozenset(mid_axes)
    size = sizes.product(a.size for a in mid_axes)
    spans = [_span(one.weight, axes, one.over) for one in ordered]
    for one, span in zip(ordered, spans, strict=True):
        if one.bias is not None and (one.bias.selectors[0].expr != one.weight.selectors[0].expr):
            raise Conflict(f"`{one.bias.node.name}` is selected by other ids than its weight")
        if one.bias is not None and affine(entry_of(one.bias, axes), axes) != span[:2]:
            raise Conflict(f"`{one.bias.node.name}` is not laid out as the weight it belongs to")
    layout = _layout(ordered, spans, size)
    if gated and (ordered[0].bias is None) != (ordered[1].bias is None):
        raise Conflict("only one of gate and up has a bias")
    return layout, ordered, act


def _key(one: Linear) -> tuple[Leaf, Leaf | None]:
    return one.weight, one.bias


def _span(weight: Leaf, axes: frozenset[Axis], over: tuple[Axis, ...]) -> tuple[int, int, sizes.Size]:
    """(start, step, size of the dimension) of the weight rows that a leaf of the activation reads."""
    contracted = entry_of(weight, frozenset(over))
    if affine(contracted, frozenset(over)) != (0, 1) or not sizes.same(
        group_size(contracted), sizes.product(a.size for a in over)
    ):
        raise Conflict(f"only a part of `{weight.node.name}` is used (contracted dimension)")
    entry = entry_of(weight, axes)
    found = affine(entry, axes)
    if found is None:
        raise Conflict(f"gate and up are picked from `{weight.node.name}` in a way that is no slice")
    return (*found, group_size(entry))


def _layout(ordered: list[Linear], spans: list[tuple[int, int, sizes.Size]], size: sizes.Size) -> GateUp:
    whole = [start == 0 and step == 1 and sizes.same(total, size) for start, step, total in spans]
    if len(ordered) == 1:
        if not whole[0]:
            raise Conflict(f"only a part of the first GEMM's output `{ordered[0].node.name}` is used")
        return "none"
    if all(whole):
        if ordered[0].weight.node is ordered[1].weight.node:
            raise Conflict("gate and up read the same weight")
        return "separate"
    if ordered[0].weight.node is not ordered[1].weight.node or not isinstance(size, int):
        raise Conflict("gate and up are parts of two different weights")
    starts = (spans[0][:2], spans[1][:2])
    known: dict[tuple[tuple[int, int], tuple[int, int]], GateUp] = {
        ((0, 1), (size, 1)): "concat",
        ((size, 1), (0, 1)): "concat_swapped",
        ((0, 2), (1, 2)): "interleaved",
        ((1, 2), (0, 2)): "interleaved_swapped",
    }
    if starts not in known or not sizes.same(spans[0][2], 2 * size):
        raise Conflict(f"gate and up lie at rows {starts} of {spans[0][2]}: no known layout")
    return known[starts]


def _one_per_tensor(leaves: list[Leaf], gate_up: GateUp) -> list[Leaf]:
    """Two leaves where gate and up are separate tensors, otherwise one: both halves are in it."""
    return leaves if gate_up == "separate" else leaves[:1]


def units(leaf: Leaf, role_of: Callable[[Digit], str]) -> list[tuple[str, sizes.Size, int]]:
    """The leaf's dimensions as (role, size, dimension), neighbours of one role in one dimension merged."""
    result: list[tuple[str, sizes.Size, int]] = []
    for dim, group in enumerate(leaf.index):
        for digit in group:
            role = role_of(digit)
            if result and result[-1][0] == role and result[-1][2] == dim:
                result[-1] = (role, result[-1][1] * digit.size, dim)
            else:
                result.append((role, digit.size, dim))
    return result


def weight_units(leaf: Leaf, contracted: frozenset[Axis]) -> list[tuple[str, sizes.Size, int]]:
    """Units of an expert weight: "E" the expert, "C" the contracted features, "N" the output features."""

    def role(digit: Digit) -> str:
        if isinstance(digit, At):
            return "E"
        return "C" if group_axes((digit,)) <= contracted and group_axes((digit,)) else "N"

    found = units(leaf, role)
    if sorted(name for name, _, _ in found) != ["C", "E", "N"]:
        raise Conflict(f"`{leaf.node.name}` is not a weight of experts, outputs and inputs")
    return found


def is_transposed(leaf: Leaf, contracted: frozenset[Axis]) -> bool:
    """True for out-features first ([E, N, C]), False for [E, C, N]."""
    order = [name for name, _, _ in weight_units(leaf, contracted) if name != "E"]
    return order == ["N", "C"]


def _static(size: sizes.Size, what: str) -> int:
    if not isinstance(size, int):
        raise Conflict(f"the {what} is not static: {size}")
    return size


def _spec(
    node: Node,
    ids: Leaf,
    rows: Expr,
    firsts: list[Linear],
    second: Linear,
    act: Classified,
    gate_up: GateUp,
    position: WeightPosition,
    weights: list[Expr],
    slots: tuple[Axis, ...],
    terms: torch.dtype | None,
) -> MoeSpec:
    hidden, inner = frozenset(firsts[0].over), frozenset(second.over)
    flags = {is_transposed(f.weight, frozenset(f.over)) for f in firsts}
    if len(flags) != 1:
        raise Conflict("gate and up weights have different orientations")
    experts = {_static(f.weight.selectors[0].size, "number of experts") for f in [*firsts, second]}
    if len(experts) != 1:
        raise Conflict(f"the layer's weights hold {sorted(experts)} experts")
    (count,) = experts
    if len({value(f.weight.node).dtype for f in [*firsts, second]}) != 1:
        raise Conflict("the layer's weights have different dtypes")
    out = next(size for name, size, _ in weight_units(second.weight, inner) if name == "N")
    topk, dim = topk_of(ids.node)
    chosen_from = value(topk.args[0]).shape[dim] if topk is not None else None
    val = value(node)
    return MoeSpec(
        num_experts=count,
        top_k=_static(sizes.product(a.size for a in slots), "number of slots per token"),
        hidden=_static(sizes.product(a.size for a in hidden), "hidden size"),
        intermediate=_static(sizes.product(a.size for a in inner), "intermediate size"),
        out_features=_static(out, "output size"),
        device=val.device.type,
        x_dtype=_dtype(rows),
        expert_dtype=value(second.weight.node).dtype,
        router_dtype=_product_dtype(weights, val.dtype),
        output_dtype=val.dtype,
        product_dtype=None if terms in (torch.float32, torch.float64) else terms,
        gate_up=gate_up,
        transpose_weight1=flags.pop(),
        transpose_weight2=is_transposed(second.weight, inner),
        has_bias1=firsts[0].bias is not None,
        has_bias2=second.bias is not None,
        activation=act.activation,
        activation_params=act.params,
        activation_program=act.program,
        weight_position=position,
        has_router_weight=_real(weights),
        ids_checked=chosen_from is not None and sizes.same(chosen_from, count),
    )


def _product_dtype(weights: list[Expr], default: torch.dtype) -> torch.dtype:
    dtypes = [_dtype(weight) for weight in weights if not isinstance(weight, Const)]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else default


def _dtype(expr: Expr) -> torch.dtype:
    """The dtype of a row expression: of its last cast, or of its leaf."""
    if isinstance(expr, Op) and expr.target is torch.ops.aten._to_copy.default:
        return dict(expr.kwargs).get("dtype") or _dtype(expr.args[0])
    if isinstance(expr, Leaf):
        return value(expr.node).dtype
    return _product_dtype([part for part in expr.parts()], torch.float32)
