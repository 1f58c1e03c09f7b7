"""MX formats: rows and weights in blocks of 32 inputs, each block with a scale of its own, a power of two.

In: rows, the scales of their blocks, weights and theirs. Out: the product of rows that are whole again. A block is the
idea of a scale per group of inputs, on the side of the rows: a row's features are (pair, half, place) and its scale is
one of (pair, half). Scales of other rows, of blocks in another order or of another size fold with nothing: refused.
"""

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.ops.mx import SCALES
from moefuse.patterns.axes import At, Axis, Dims, group_size
from moefuse.patterns.facts import Conflict, Count, Fact, Leaf, Offs, Table
from moefuse.patterns.grouped_matmul import row_order
from moefuse.patterns.hidden_states_quant import belongs, plain_axes, unpacked_rows
from moefuse.patterns.quantised import Dequant, QuantDot, Quantised, RowScale
from moefuse.patterns.ranks import by_expert
from moefuse.patterns.rules import Lifting, Outcome, argument, rule, value
from moefuse.patterns.structure import regroup
from moefuse.patterns.unify import Unifier, bind

BLOCK, HALVES = 32, 2
"""Inputs that share a scale; scales that lie together."""

E8M0, FLOAT4 = 293, 296
"""The numbers of torch_npu.float8_e8m0fnu and float4_e2m1fn_x2 in the schemas: they have no others."""

ELEMENTS: dict[Any, torch.dtype] = {
    23: torch.float8_e5m2,
    291: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    292: torch.float8_e4m3fn,
    FLOAT4: torch.float4_e2m1fn_x2,
}
"""By their numbers in the schemas: torch's own, or torch_npu's."""

PACKED = {torch.float4_e2m1fn_x2: 2}
"""Elements in a byte, where they are several."""


def in_blocks(rows: Fact, elements: torch.dtype, dtype: torch.dtype) -> tuple[Fact, Fact]:
    """(the rows as elements, the scales of their blocks [.., pairs, halves])."""
    plain_axes(rows.dims[-1])
    features = group_size(rows.dims[-1])
    pairs = sizes.quotient(features, HALVES * BLOCK)
    if pairs is None:
        raise Conflict(
            f"rows of {features} features are quantised by blocks of {BLOCK} whose scales lie in pairs: no multiple of "
            f"{HALVES * BLOCK}"
        )
    count = PACKED.get(elements, 1)
    shape = (pairs, HALVES, BLOCK // count, *([count] if count > 1 else []))
    split, binding = regroup((rows.dims[-1],), shape)
    pair, half, *places = (plain_axes(group) for group in split)
    features_of_row = (*pair, *half, *(axis for place in places for axis in place))
    over = tuple(Axis(axis.size) for axis in features_of_row)
    own = {axis: (new,) for axis, new in zip(features_of_row, over, strict=True)}
    row = bind(bind(rows.expr, binding), own)
    at: Dims = tuple((axis,) for axis in features_of_row)
    word = places[1] if count > 1 else ()
    stored = Quantised(row, over, at, elements, dtype, word=word)
    scale = RowScale(row, over, elements, dtype, at[: len(pair) + len(half)])
    return Fact(stored, (*rows.dims[:-1], (*pair, *half, *places[0]))), Fact(
        scale, (*rows.dims[:-1], pair, half)
    )


def flat(scales: Fact) -> Fact:
    """Scales [.., blocks] instead of [.., pairs, halves]."""
    *outer, pairs, halves = scales.dims
    return Fact(scales.expr, (*outer, (*pairs, *halves)))


def is_e8m0(scale: Node, number: int | None) -> bool:
    """True for scales of blocks: by their dtype, or by what the operator's argument says of bytes."""
    stored: torch.dtype = value(scale).dtype
    return stored in SCALES and (number == E8M0 or (number is None and stored == torch.float8_e8m0fnu))


def elements_of(tensor: Node, number: int | None) -> torch.dtype:
    """What a tensor holds. Conflict for anything but the elements of MX blocks.

    A number says what bytes hold, and nothing else of a dtype that says it itself: the fused node reads the dtype.
    """
    stored: torch.dtype = value(tensor).dtype
    found = stored if number is None else ELEMENTS.get(number)
    as_bytes = stored == torch.uint8 and found in PACKED
    if found not in ELEMENTS.values() or (stored != found and not as_bytes):
        raise Conflict(f"a grouped GEMM with scales of blocks, and elements of {stored} as number {number}")
    assert found is not None
    return found


def block_product(
    node: Node,
    rows: tuple[Fact, Node],
    row_scale: tuple[Fact, Node, torch.dtype] | None,
    weight: tuple[Fact, torch.dtype],
    scale: Fact,
    groups: Offs | Count,
    dtype: torch.dtype,
) -> Fact:
    """The product of rows and weights in MX formats as a `QuantDot`, rounded to dtype.

    row_scale: with the elements that the rows are read as; None for rows of floats. weight: with its elements.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise Conflict(f"a grouped GEMM with scales of blocks is rounded to {dtype}")
    x, x_node = rows
    weights, elements = weight
    if len(x.dims) != 2 or len(weights.dims) != 3 or not isinstance(weights.expr, Leaf | Table):
        raise Conflict("a grouped GEMM whose operands are not [rows, K] and [experts, K, N]")
    if len(scale.dims) != 4 or not isinstance(scale.expr, Leaf | Table):
        raise Conflict("the scales of a weight's blocks are not [experts, K / 64, N, 2]")
    order, key = row_order(x, groups.ids, x_node)
    whole = x if row_scale is None else _by_block(x, *row_scale)
    weights = _unpacked(weights, elements, group_size(whole.dims[1]))
    weights, scale = (by_expert(each, 0, key) for each in (weights, scale))
    (expert,) = weights.dims[0] if len(weights.dims[0]) == 1 else (None,)
    if not isinstance(expert, Axis) or not sizes.same(expert.size, group_size(groups.at)):
        raise Conflict(
            f"offsets for {group_size(groups.at)} experts, weights for {group_size(weights.dims[0])}"
        )
    unifier = Unifier()
    for mine, others in ((0, scale.dims[0]), (2, scale.dims[2])):
        if not sizes.same(group_size(weights.dims[mine]), group_size(others)):
            raise Conflict(
                "the scales of a weight's blocks have other experts or channels than the weight itself"
            )
        unifier.unify(weights.dims[mine], others)
    unifier.unify(weights.dims[1], (*scale.dims[1], *scale.dims[3], Axis(BLOCK)))
    over = plain_axes(unifier.resolve(unifier.unify(whole.dims[1], weights.dims[1])))
    (first,) = unifier.resolve((expert,))
    assert isinstance(first, Axis)
    select = {first: (At(key, expert.size),)}
    stored, factor = (bind(unifier.expr(part.expr), select) for part in (weights, scale))
    b = Dequant(stored, factor, None, elements)
    expr = QuantDot(unifier.expr(whole.expr), b, over, True, node, dtype=dtype)
    return Fact(expr, (order, unifier.resolve(weights.dims[2])))


def _by_block(rows: Fact, scale: Fact, scale_node: Node, elements: torch.dtype) -> Fact:
    """The rows times the scales of their blocks, one index per element: right only for the scales of these rows."""
    if not isinstance(rows.expr, Quantised) or rows.expr.elements not in ELEMENTS.values():
        raise Conflict("a grouped GEMM with scales of blocks, whose rows were not quantised by blocks")
    if rows.expr.elements != elements:
        raise Conflict(f"rows quantised by blocks to {rows.expr.elements} are multiplied as {elements}")
    rows = unpacked_rows(rows)
    if not isinstance(scale.expr, RowScale) or len(scale.dims) != 3:
        raise Conflict(
            "the scales of a product's blocks are not what its rows were quantised with", scale_node
        )
    unifier = Unifier()
    unifier.unify(rows.dims[0], scale.dims[0])
    unifier.unify(rows.dims[1], (*scale.dims[1], *scale.dims[2], Axis(BLOCK)))
    own, factor = unifier.expr(rows.expr), unifier.expr(scale.expr)
    assert isinstance(own, Quantised)
    assert isinstance(factor, RowScale)
    if not factor.at or not belongs(factor, own):
        raise Conflict("a product of quantised rows is multiplied by the scales of other rows", scale_node)
    return Fact(replace(own, scaled=True), tuple(unifier.resolve(group) for group in rows.dims))


def _unpacked(weight: Fact, elements: torch.dtype, inputs: sizes.Size) -> Fact:
    """A weight with one index per element, bytes of two along its inputs."""
    count = PACKED.get(elements, 1)
    if count == 1:
        return weight
    assert isinstance(weight.expr, Leaf | Table)
    group, index = weight.dims[1], list(weight.expr.index)
    if sizes.same(group_size(group), inputs):
        raise Conflict("a byte of the weights holds two channels: only bytes of two inputs are understood")
    if group not in index or not group:
        raise Conflict("packed weights are not read as they lie")
    whole = (*group, Axis(count))
    index[index.index(group)] = whole
    return Fact(replace(weight.expr, index=tuple(index)), (weight.dims[0], whole, weight.dims[2]))


_OPTIONS: dict[str, tuple[Any, ...]] = {
    "round_mode": ("rint",),
    "block_size": (BLOCK,),
    "scale_alg": (0, None),
    "dst_type_max": (0.0,),
    "max_low_bound": (0.0,),
}
"""(the default in the schema, and what else means the same)."""


@rule("npu::npu_dynamic_mx_quant")
def npu_dynamic_mx_quant(lift: Lifting, node: Node) -> Outcome:
    """(elements, the scales of their blocks)."""
    rows = argument(node, 0)
    for name, allowed in _OPTIONS.items():
        if (given := node.kwargs.get(name, allowed[0])) not in allowed:
            raise Conflict(
                f"rows are quantised by blocks with {name}={given}: only {name}={allowed[0]} is understood"
            )
    if (axis := node.kwargs.get("axis", -1)) not in (-1, value(rows).dim() - 1):
        raise Conflict(f"rows are quantised by blocks along dimension {axis}, not along their features")
    number = node.kwargs.get("dst_type", FLOAT4)
    if not isinstance(number, int) or number not in ELEMENTS:
        raise Conflict(f"rows are quantised by blocks to dtype number {number}, which is not understood")
    return in_blocks(lift.fact(rows), ELEMENTS[number], value(rows).dtype)
