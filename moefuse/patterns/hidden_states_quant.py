"""Hidden states quantisation: rows of integers, their scales, and how a product of them becomes whole again.

Multiplying a product by the scales of the very rows that it was made of gives the product of the rows (`by_row`);
multiplying it by a scale per expert and output channel gives that of the weights (`by_channel`). The scales of other
rows, a scale twice, in another order or over another dimension fold with nothing: refused.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.patterns.axes import At, Axis, Dims, Group, Perm, group_size
from moefuse.patterns.facts import Conflict, Count, Expr, Fact, Leaf, Offs, Op, Table
from moefuse.patterns.pointwise import widened
from moefuse.patterns.quantised import INT4, Dequant, QuantDot, Quantised, RowScale
from moefuse.patterns.ranks import by_expert, same_ids
from moefuse.patterns.rules import Lifting, Outcome, argument, rule, value
from moefuse.patterns.structure import cut
from moefuse.patterns.unify import Unifier, bind

aten = torch.ops.aten

PACKED = 8
"""int4 values in an int32."""

INTEGERS: dict[int | None, torch.dtype] = {None: torch.int8, 1: torch.int8, 16: INT4}
"""By the number of the dtype in the schemas: torch.int8 (or nothing), torch.quint4x2."""


def quantise(rows: Fact, elements: torch.dtype, dtype: torch.dtype) -> tuple[Fact, Fact]:
    """(the rows as integers over their last dimension, the scale of each). int4 values lie eight to an element."""
    features = plain_axes(rows.dims[-1])
    over = tuple(Axis(axis.size) for axis in features)
    row = bind(rows.expr, {axis: (own,) for axis, own in zip(features, over, strict=True)})
    at: Dims = tuple((axis,) for axis in features)
    dims, word = rows.dims, tuple[Axis, ...]()
    if elements == INT4:
        *outer, last = features or (Axis(1),)
        words = sizes.quotient(last.size, PACKED)
        if words is None:
            raise Conflict(f"rows of {last.size} features are packed eight to a word")
        head: Group = () if sizes.is_one(words) else (Axis(words),)
        word = (Axis(PACKED),)
        at = (*at[:-1], (*head, *word))
        dims = (*rows.dims[:-1], (*outer, *head))
    integers = Quantised(row, over, at, elements, dtype, word=word)
    return Fact(integers, dims), Fact(RowScale(row, over, elements, dtype), rows.dims[:-1])


def plain_axes(group: Group) -> tuple[Axis, ...]:
    """The axes of a dimension of features."""
    axes = tuple(digit for digit in group if isinstance(digit, Axis))
    if len(axes) != len(group):
        raise Conflict("rows are quantised over a dimension in an order by expert")
    return axes


def stored(lift: Lifting, tensor: Node) -> Fact:
    """The fact of a weight, a scale, ..., opaque where integers were cast: they mean what their dtype says.

    A float32 in the bits of an int64, say, which a cast by value takes for a large number.
    """
    fact = lift.fact(tensor)
    if not isinstance(fact.expr, Leaf) or value(fact.expr.node).dtype == value(tensor).dtype:
        return fact
    dims: Dims = tuple(() if sizes.is_one(size) else (Axis(size),) for size in value(tensor).shape)
    return Fact(Leaf(tensor, dims), dims)


def demand_unrounded(product: Fact) -> None:
    """Demand that scales which come after an integer product find its sums: the fused node rounds after all scales."""
    expr = product.expr
    if not isinstance(expr, QuantDot) or expr.dtype == torch.float32:
        return
    scaled = isinstance(expr.b, Dequant) and expr.b.scale is not None
    scaled |= isinstance(expr.a, Quantised) and expr.a.scaled
    if expr.dtype != torch.int32 or scaled or expr.assist is not None:
        raise Conflict(
            f"the product `{expr.node.name}` is rounded to {expr.dtype} before all of its scales came"
        )


def by_row(product: Fact, scale: Fact, scale_node: Node) -> Fact:
    """The product times a scale per row: right only for the scales of the rows that were multiplied."""
    expr = product.expr
    if not isinstance(expr, QuantDot) or not isinstance(expr.a, Quantised):
        raise Conflict(
            "a product is multiplied by a scale per row, but its rows were not quantised", scale_node
        )
    if expr.a.scaled:
        raise Conflict("a product is multiplied by the scales of its rows twice", scale_node)
    if not isinstance(scale.expr, RowScale) or scale.expr.at or any(scale.dims[1:]):
        raise Conflict("the scale per row of a product is not what its rows were quantised with", scale_node)
    unifier = Unifier()
    unifier.unify(product.dims[0], scale.dims[0])
    own, factor = unifier.expr(expr), unifier.expr(scale.expr)
    assert isinstance(own, QuantDot)
    assert isinstance(own.a, Quantised)
    assert isinstance(factor, RowScale)
    if not belongs(factor, own.a):
        raise Conflict("a product of quantised rows is multiplied by the scales of other rows", scale_node)
    whole = replace(own, a=replace(own.a, scaled=True))
    return Fact(whole, tuple(unifier.resolve(group) for group in product.dims))


def belongs(scale: RowScale, integers: Quantised) -> bool:
    """True for the scale of the very row, and of the block of it that holds the element."""
    kinds = [(each.elements, each.dtype, len(each.over)) for each in (scale, integers)]
    if kinds[0] != kinds[1] or scale.at != integers.at[: len(scale.at)]:
        return False
    same = {old: (new,) for old, new in zip(scale.over, integers.over, strict=True)}
    return bind(scale.row, same) == integers.row


def unpacked_rows(rows: Fact) -> Fact:
    """Quantised rows with one index per value, where a tensor element holds several."""
    integers = rows.expr
    if not isinstance(integers, Quantised) or not integers.word:
        return rows
    word: dict[Axis, Group] = {axis: (Axis(axis.size),) for axis in integers.word}
    inner = tuple(digit for axis in integers.word for digit in word[axis])
    return Fact(bind(replace(integers, word=()), word), (rows.dims[0], (*rows.dims[1], *inner)))


def by_channel(lift: Lifting, product: Fact, scale_node: Node, groups_node: Node | None) -> Fact:
    """An integer product times scale[expert, channel]; groups_node: the rows per expert, which says whose row it is."""
    expr, scale = product.expr, stored(lift, scale_node)
    if not isinstance(expr, QuantDot) or not isinstance(expr.b, Dequant) or expr.b.scale is not None:
        raise Conflict(
            "a product is multiplied by a scale per channel that is no product of integers", scale_node
        )
    demand_groups(lift, product, groups_node)
    (order,) = product.dims[0] if len(product.dims[0]) == 1 else (None,)
    scale = scale if not isinstance(order, Perm) else by_expert(scale, 0, order.key)
    (expert,) = scale.dims[0] if len(scale.dims) == 2 and len(scale.dims[0]) == 1 else (None,)
    if (
        not isinstance(order, Perm)
        or not isinstance(expert, Axis)
        or not isinstance(scale.expr, Leaf | Table)
    ):
        raise Conflict("the scale of an integer product is not [experts, channels]", scale_node)
    if any(not sizes.same(expert.size, size) for size in _experts(expr.b.stored)):
        raise Conflict("the scale of an integer product has other experts than its weight", scale_node)
    unifier = Unifier()
    features = unifier.unify(product.dims[1], scale.dims[1])
    own = unifier.expr(expr)
    assert isinstance(own, QuantDot)
    assert isinstance(own.b, Dequant)
    selected = bind(unifier.expr(scale.expr), {expert: (At(order.key, expert.size),)})
    whole = replace(own, b=replace(own.b, scale=selected), dtype=torch.float32)
    return Fact(whole, (unifier.resolve(product.dims[0]), unifier.resolve(features)))


def _experts(weight: Expr) -> list[sizes.Size]:
    index = weight.index if isinstance(weight, Leaf | Table) else ()
    return [digit.size for group in index for digit in group if isinstance(digit, At)]


def demand_groups(lift: Lifting, rows: Fact, groups_node: Node | None, running: bool = False) -> None:
    """Demand that a list of group sizes (or of their ends) is that of the experts by which the rows lie."""
    if groups_node is None:
        raise Conflict("one scale serves the rows of all experts: no list of group sizes is given")
    groups, kind = lift.fact(groups_node), Offs if running else Count
    (order,) = rows.dims[0] if len(rows.dims[0]) == 1 else (None,)
    same = (
        isinstance(groups.expr, Count | Offs)
        and isinstance(groups.expr, kind)
        and groups.dims == (groups.expr.at,)
        and isinstance(order, Perm)
        and same_ids(order.key, groups.expr.ids)
    )
    if not same:
        raise Conflict("the group sizes of a quantisation are not those of the experts' rows", groups_node)


# --- Ascend's operators ----------------------------------------------------------------------------------


@rule("npu::npu_dynamic_quant")
def npu_dynamic_quant(lift: Lifting, node: Node) -> Outcome:
    """(integers, one scale per row)."""
    demand_absent(node, "smooth_scales", "rows are multiplied by smooth scales before they are quantised")
    options: dict[str, Any] = dict(node.kwargs)
    mode, dst_type = options.get("quant_mode", "pertoken"), options.get("dst_type")
    if mode != "pertoken" or dst_type not in INTEGERS or options.get("dst_type_max", 0.0) != 0.0:
        raise Conflict(f"rows are quantised {mode} to dtype number {dst_type}, not to int8 or int4 per row")
    rows = argument(node, 0)
    return quantise(lift.fact(rows), INTEGERS[dst_type], value(rows).dtype)


def demand_absent(node: Node, name: str, reason: str) -> None:
    """Demand that an optional operand is left out."""
    if node.kwargs.get(name) is not None:
        raise Conflict(reason)


def gated(rows: Fact, dtype: torch.dtype, left: bool = True) -> Fact:
    """silu(first half) * second half of the last dimension, or first half * silu(second half)."""

    def product(a: Expr, b: Expr) -> Expr:
        one, other = (a, b) if left else (b, a)
        return Op(aten.mul.Tensor, (Op(aten.silu.default, (one,)), other))

    return _of_halves(rows, product, 1, dtype)


def _of_halves(rows: Fact, product: Callable[[Expr, Expr], Expr], step: int, dtype: torch.dtype) -> Fact:
    """A product of both halves of the last dimension: neighbouring elements for step 2. It's computed in float32."""
    half = sizes.quotient(group_size(rows.dims[-1]), 2)
    if half is None:
        raise Conflict("a gated activation of an odd number of features")
    last = len(rows.dims) - 1
    starts = (0, int(half)) if step == 1 else (0, 1)
    first, second = (cut(rows, last, start, half, step) for start in starts)
    unifier = Unifier()
    dims: Dims = tuple(unifier.unify(a, b) for a, b in zip(first.dims, second.dims, strict=True))
    parts = [unifier.expr(each.expr) for each in (first, second)]
    expr = product(*(widened(part) if dtype in (torch.bfloat16, torch.float16) else part for part in parts))
    return Fact(expr, tuple(unifier.resolve(group) for group in dims))


@rule("npu::npu_clipped_swiglu")
def npu_clipped_swiglu(lift: Lifting, node: Node) -> Outcome:
    """The clamped gated product, of neighbours (interleaved) or of halves of the last dimension."""
    rows = lift.fact(argument(node, 0))
    if not rows.expr.hard:
        return None
    options: dict[str, Any] = dict(node.kwargs)
    if int(options.get("dim", -1)) not in (-1, len(rows.dims) - 1):
        raise Conflict("a gated activation over rows")
    if (groups := options.get("group_index")) is not None:
        demand_groups(lift, rows, groups)
    step = 2 if options.get("interleaved", True) else 1
    return clipped(rows, options, ("limit", "alpha", "bias"), step, value(node).dtype)


@rule("npu::npu_swiglu_quant")
def npu_swiglu_quant(lift: Lifting, node: Node) -> Outcome:
    """The gated product as int8, one scale per row."""
    rows = lift.fact(argument(node, 0))
    if not rows.expr.hard:
        return None
    options: dict[str, Any] = dict(node.kwargs)
    demand_absent(node, "smooth_scales", "rows are multiplied by smooth scales before they are quantised")
    _demand_dynamic(options.get("quant_mode", 0), options.get("dst_type") in (None, torch.int8), node)
    if isinstance(groups := options.get("group_index"), Node):
        demand_groups(lift, rows, groups, running=options.get("group_list_type", 0) == 0)
    return quantise(
        gated(rows, torch.float32, bool(options.get("activate_left", False))), torch.int8, torch.float32
    )


@rule("npu::npu_dequant_swiglu_quant")
def npu_dequant_swiglu_quant(lift: Lifting, node: Node) -> Outcome:
    """Scales on an integer product, the gated product, int8 with one scale per row."""
    rows = lift.fact(argument(node, 0))
    if not rows.expr.hard:
        return None
    options: dict[str, Any] = dict(node.kwargs)
    demand_absent(node, "bias", "a bias is added to an integer product before its scale")
    demand_absent(node, "quant_scale", "rows are multiplied by smooth scales before they are quantised")
    plain = options.get("dst_type") in (None, 1) and options.get("round_mode") in (None, 0)
    _demand_dynamic(options.get("quant_mode", 0), plain, node)
    if options.get("activate_dim") not in (None, -1):
        raise Conflict("a gated activation over rows")
    product, groups = rows, options.get("group_index")
    if (scale := options.get("weight_scale")) is not None:
        rows = by_channel(lift, rows, scale, groups)
    elif groups is not None:
        demand_groups(lift, rows, groups)
    if (per_row := options.get("activation_scale")) is not None:
        rows = by_row(rows, lift.fact(per_row), per_row)
    if rows is not product:
        demand_unrounded(product)
    return quantise(_activated(rows, options), torch.int8, torch.float32)


def _demand_dynamic(mode: int, plain: bool, node: Node) -> None:
    if mode != 1:
        raise Conflict(
            f"rows are quantised with static scales (quant_mode={mode}), not by a scale of each row"
        )
    demand_absent(node, "quant_offset", "rows are quantised with an offset")
    demand_absent(node, "offsets", "rows are quantised with an offset")
    if not plain:
        raise Conflict("rows are quantised to another type than int8, or rounded in another way")


def _activated(rows: Fact, options: dict[str, Any]) -> Fact:
    mode = options.get("swiglu_mode", 0)
    if mode == 0:
        return gated(rows, torch.float32, bool(options.get("activate_left", False)))
    if mode != 1:
        raise Conflict(f"a gated activation with swiglu_mode={mode}")
    return clipped(rows, options, ("clamp_limit", "glu_alpha", "glu_bias"), 2, torch.float32)


def clipped(
    rows: Fact, options: dict[str, Any], names: tuple[str, str, str], step: int, dtype: torch.dtype
) -> Fact:
    """c * sigmoid(alpha * c) * (clamp(up, -limit, limit) + bias), c = min(gate, limit), of neighbours or of halves.

    names: those of limit, alpha and bias among the options.
    """
    limit, alpha, beta = (
        float(options.get(name, default)) for name, default in zip(names, (7.0, 1.702, 1.0), strict=True)
    )

    def product(gate: Expr, up: Expr) -> Expr:
        gate = Op(aten.clamp.default, (gate, None, limit))
        curve = Op(aten.sigmoid.default, (Op(aten.mul.Tensor, (gate, alpha)),))
        linear = Op(aten.add.Tensor, (Op(aten.clamp.default, (up, -limit, limit)), beta))
        return Op(aten.mul.Tensor, (Op(aten.mul.Tensor, (gate, curve)), linear))

    return _of_halves(rows, product, step, dtype)
