"""Expert GEMMs by Ascend's operators: plain, of integers, of integer weights, and fused with what follows.

In: rows in an order by expert, weights as one stacked tensor or one per expert, their scales and offsets, and the sizes
of the groups of rows (or their ends). Out: the product of each row with its own expert's weight. What a scale belongs
to is proved (hidden_states_quant.py); formats without a rule here are refused by name.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.graph.sizes import Size
from moefuse.patterns.axes import At, Axis, Dims, Group, group_size
from moefuse.patterns.facts import Conflict, Count, Expr, Fact, Leaf, Offs, Op, Table
from moefuse.patterns.grouped_matmul import grouped, row_order
from moefuse.patterns.hidden_states_quant import (
    PACKED,
    by_row,
    plain_axes,
    stored,
    unpacked_rows,
)
from moefuse.patterns.mx import E8M0, ELEMENTS, block_product, elements_of, is_e8m0
from moefuse.patterns.quantised import INT4, Dequant, QuantDot, Quantised
from moefuse.patterns.ranks import by_expert
from moefuse.patterns.rules import Lifting, Outcome, argument, op_name, rule, value
from moefuse.patterns.unify import Unifier, bind

_PLAIN_OPTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "group_type": (None, (0,)),
    "split_item": (0, (2, 3)),
    "act_type": (0, (0, None)),
}
"""(the default in the schema, what there is a rule for)."""
_NO_RULE = (
    *("offset", "activation_input", "activation_quant_scale", "activation_quant_offset"),
    *(
        "x_dtype",
        "weight_dtype",
        "scale_dtype",
        "per_token_scale_dtype",
        "weight_scale_dtype",
        "x_scale_dtype",
    ),
    *("w_dtype", "pertoken_scale_dtype"),
)
"""Static quantisation, and number formats that the schemas name by a dtype of their own: MX blocks have a rule, others
(HiFloat8) don't."""


@rule("npu::npu_grouped_matmul")
def npu_grouped_matmul(lift: Lifting, node: Node) -> Outcome:
    """[x[0] times each expert's weight]; group_list holds running counts (group_list_type 0) or counts (1)."""
    (x, *more), weights = argument(node, 0), argument(node, 1)
    options: dict[str, Any] = dict(node.kwargs)
    per_row = options.get("per_token_scale")
    blocks = per_row is not None and is_e8m0(per_row[0], options.get("per_token_scale_dtype"))
    blocks |= per_row is None and options.get("weight_dtype") in ELEMENTS
    if not blocks:
        demand_rules(options)
    for name, (default, allowed) in _PLAIN_OPTIONS.items():
        if (given := options.get(name, default)) not in allowed:
            raise Conflict(f"a grouped GEMM with {name}={given}")
    if more or not isinstance(options.get("group_list"), Node):
        raise Conflict("a grouped GEMM of several inputs, or without a tensor of group sizes")
    groups = groups_of(lift, options["group_list"], options.get("group_list_type", 0))
    (result,) = value(node)
    if blocks:
        return (of_blocks(lift, node, x, weights, groups, options, result.dtype),)
    if not value(weights[0]).is_floating_point():
        return (of_integers(lift, node, x, weights, groups, options, result.dtype),)
    for name in ("scale", "antiquant_scale", "antiquant_offset", "per_token_scale"):
        if options.get(name) is not None:
            raise Conflict(f"a grouped GEMM of {value(weights[0]).dtype} weights with {name}")
    if result.dtype != value(x).dtype:
        raise Conflict(f"a grouped GEMM of {value(x).dtype} rows into {result.dtype}")
    product = grouped(node, lift.fact(x), x, _of_experts(lift, weights), groups)
    biases = options.get("bias")
    if not biases:
        return (product,)
    key, experts = row_order(product, groups.ids, x)[1], group_size(groups.at)
    return (_biased(node, product, _of_experts(lift, biases), key, experts),)


def demand_rules(options: dict[str, Any], allowed: Collection[str] = ()) -> None:
    """Demand that no argument is given for which there is no rule, but for the allowed ones."""
    for name in (each for each in _NO_RULE if each not in allowed):
        if options.get(name) is not None:
            raise Conflict(
                f"a grouped GEMM with {name}: only floats, int8 and int4 with a scale, and MX blocks are understood"
            )


def groups_of(lift: Lifting, node: Node, kind: int | None) -> Offs | Count:
    """The counts (kind 1) or running counts (0) of the ids."""
    groups = lift.fact(node)
    wanted, words = (Count, "counts") if kind == 1 else (Offs, "running counts")
    if not isinstance(groups.expr, wanted) or groups.dims != (groups.expr.at,):
        raise Conflict(f"the group list of the grouped GEMM is not the {words} of the ids", node)
    return groups.expr


# --- integers --------------------------------------------------------------------------------------------


def of_integers(
    lift: Lifting,
    node: Node,
    x: Node,
    weights: Sequence[Node],
    groups: Offs | Count,
    options: dict[str, Any],
    dtype: torch.dtype,
) -> Fact:
    """A product with int8 or int4 weights, of quantised rows or of floats."""
    soft = value(x).is_floating_point()
    names = ("antiquant_scale", "antiquant_offset") if soft else ("scale", "")
    for name in {"scale", "antiquant_scale", "antiquant_offset", "per_token_scale"} - set(names):
        if options.get(name) is not None and (soft or name != "per_token_scale"):
            raise Conflict(f"a grouped GEMM of {value(x).dtype} rows and integer weights with {name}")
    scale, offset = (_of_experts(lift, options[name]) if options.get(name) else None for name in names)
    if soft and scale is None:
        raise Conflict("a grouped GEMM of floats and integer weights without antiquant_scale")
    biases = options.get("bias")
    assisted = not soft and value(x).dtype == torch.int8 and value(weights[0]).dtype == torch.int32
    if assisted and not biases:
        raise Conflict(
            "a grouped GEMM of int8 rows and int4 weights without the bias that makes up for its 8"
        )
    assist = _of_experts(lift, biases) if assisted and biases else None
    product, key = integer_product(
        lift,
        node,
        x,
        _of_experts(lift, weights),
        value(weights[0]).dtype,
        groups,
        scale,
        offset,
        assist,
        dtype,
    )
    if (per_row := options.get("per_token_scale")) is not None:
        product = by_row(product, lift.fact(per_row[0]), per_row[0])
    if not biases or assisted:
        return product
    if not value(biases[0]).is_floating_point():
        raise Conflict("a grouped GEMM with an integer bias, which is added before the scales", biases[0])
    return _biased(node, product, _of_experts(lift, biases), key, group_size(groups.at))


def integer_product(
    lift: Lifting,
    node: Node,
    x: Node,
    weight: Fact,
    weight_dtype: torch.dtype,
    groups: Offs | Count,
    scale: Fact | None,
    offset: Fact | None,
    assist: Fact | None,
    dtype: torch.dtype,
) -> tuple[Fact, Expr]:
    """(rows times each expert's integer weight as a `QuantDot`, the id of each row)."""
    rows = lift.fact(x)
    if len(rows.dims) != 2 or len(weight.dims) != 3 or not isinstance(weight.expr, Leaf | Table):
        raise Conflict("a grouped GEMM whose operands are not [rows, K] and [experts, K, N]")
    elements = INT4 if weight_dtype == torch.int32 else torch.int8
    if weight_dtype not in (torch.int8, torch.int32):
        raise Conflict(f"a grouped GEMM with weights of {weight_dtype}")
    group, key = row_order(rows, groups.ids, x)
    rows = _unpacked_rows(rows, value(x).dtype, elements)
    weight = _unpacked(weight) if elements == INT4 else weight
    weight = by_expert(weight, 0, key)
    scale, offset, assist = (
        None if part is None else by_expert(part, 0, key) for part in (scale, offset, assist)
    )
    (expert,) = weight.dims[0] if len(weight.dims[0]) == 1 else (None,)
    if not isinstance(expert, Axis) or not sizes.same(expert.size, group_size(groups.at)):
        raise Conflict(
            f"offsets for {group_size(groups.at)} experts, weights for {group_size(weight.dims[0])}"
        )
    unifier = Unifier()
    for name, part in (("scale", scale), ("offset", offset), ("bias", assist)):
        if part is not None:
            _line_up(unifier, name, weight, part)
    over = plain_axes(unifier.resolve(unifier.unify(rows.dims[1], weight.dims[1])))
    (first,) = unifier.resolve((expert,))
    assert isinstance(first, Axis)
    select = {first: (At(key, expert.size),)}

    def own(part: Fact | None) -> Expr | None:
        return None if part is None else bind(unifier.expr(part.expr), select)

    b = Dequant(bind(unifier.expr(weight.expr), select), own(scale), own(offset), elements)
    expr = QuantDot(unifier.expr(rows.expr), b, over, True, node, dtype=dtype, assist=own(assist))
    return Fact(expr, (group, unifier.resolve(weight.dims[2]))), key


BLOCK_DTYPES = ("x_dtype", "weight_dtype", "scale_dtype", "per_token_scale_dtype")


def of_blocks(
    lift: Lifting,
    node: Node,
    x: Node,
    weights: Sequence[Node],
    groups: Offs | Count,
    options: dict[str, Any],
    dtype: torch.dtype,
) -> Fact:
    """A product with weights in MX formats, of rows in one or of floats. antiquant_scale holds bytes."""
    demand_rules(options, BLOCK_DTYPES)
    for name in ("bias", "antiquant_offset"):
        if options.get(name):
            raise Conflict(f"a grouped GEMM with scales of blocks, and {name}")
    given = [options[name] for name in ("scale", "antiquant_scale") if options.get(name)]
    if len(given) != 1:
        raise Conflict("a grouped GEMM in MX formats with no scales of its weights' blocks, or with two")
    ((first, *_),) = given
    late = bool(options.get("antiquant_scale"))
    if not is_e8m0(first, E8M0 if late else options.get("scale_dtype")):
        raise Conflict("a grouped GEMM in MX formats with other scales of its weights")
    (row_scale,) = options.get("per_token_scale") or (None,)
    floats = value(x).dtype in (torch.bfloat16, torch.float16, torch.float32)
    if row_scale is None and (not floats or options.get("x_dtype") is not None):
        raise Conflict(f"a grouped GEMM of {value(x).dtype} rows without scales, and weights in MX format")
    weight = _of_experts(lift, weights), elements_of(weights[0], options.get("weight_dtype"))
    return block_product(
        node,
        (lift.fact(x), x),
        None
        if row_scale is None
        else (lift.fact(row_scale), row_scale, elements_of(x, options.get("x_dtype"))),
        weight,
        _of_experts(lift, given[0]),
        groups,
        dtype,
    )


def _line_up(unifier: Unifier, name: str, weight: Fact, part: Fact) -> None:
    """[E, N] or [E, G, N] beside a weight [E, K, N]: G rows of K / G inputs each."""
    if len(part.dims) not in (2, 3) or not isinstance(part.expr, Leaf | Table):
        raise Conflict(f"the {name} of a grouped GEMM is not [experts, N] or [experts, groups, N]")
    experts, channels = group_size(part.dims[0]), group_size(part.dims[-1])
    if not sizes.same(experts, group_size(weight.dims[0])):
        raise Conflict(
            f"a grouped GEMM with weights for {group_size(weight.dims[0])} experts, a {name} for {experts}"
        )
    if not sizes.same(channels, group_size(weight.dims[2])):
        raise Conflict(
            f"a grouped GEMM of {group_size(weight.dims[2])} channels with a {name} for {channels}"
        )
    unifier.unify(weight.dims[0], part.dims[0])
    unifier.unify(weight.dims[2], part.dims[-1])
    if len(part.dims) == 3 and part.dims[1]:
        inputs = sizes.quotient(group_size(weight.dims[1]), group_size(part.dims[1]))
        if inputs is None:
            raise Conflict(
                f"the {name} of a grouped GEMM has {group_size(part.dims[1])} groups of inputs, not evenly"
            )
        rest: Group = () if sizes.is_one(inputs) else (Axis(inputs),)
        unifier.unify(weight.dims[1], (*part.dims[1], *rest))


def _unpacked_rows(rows: Fact, dtype: torch.dtype, weights: torch.dtype) -> Fact:
    """The rows with one index per value. Integer rows must be known as quantised, to what the product takes."""
    if dtype.is_floating_point:
        return rows
    integers = rows.expr
    if not isinstance(integers, Quantised):
        raise Conflict("the rows of a grouped GEMM are integers, and no rule says of what")
    both = integers.elements, weights
    if both not in ((torch.int8, torch.int8), (torch.int8, INT4), (INT4, INT4)):
        rows_as, weights_as = (str(each).removeprefix("torch.") for each in both)
        raise Conflict(f"a grouped GEMM of {rows_as} rows and {weights_as} weights")
    return unpacked_rows(rows)


def _unpacked(weight: Fact) -> Fact:
    """A weight of int4 values, eight to an element along its last dimension, with one index per value."""
    assert isinstance(weight.expr, Leaf | Table)
    last, index = weight.dims[-1], list(weight.expr.index)
    if last not in index or not last:
        raise Conflict("packed weights are not read as they lie")
    whole = (*last, Axis(PACKED))
    index[index.index(last)] = whole
    return Fact(replace(weight.expr, index=tuple(index)), (*weight.dims[:-1], whole))


def _of_experts(lift: Lifting, tensors: Sequence[Node]) -> Fact:
    """One tensor with the experts first: the one of the list, the one it is unbound from, or the list as it is."""
    if len(tensors) == 1:
        return stored(lift, tensors[0])
    if (whole := _unbound(tensors)) is not None:
        return stored(lift, whole)
    shapes = {tuple(value(tensor).shape) for tensor in tensors}
    if len(shapes) != 1:
        raise Conflict(f"a grouped GEMM with tensors of different shapes: {sorted(shapes)}", tensors[0])
    (shape,) = shapes
    groups: Dims = tuple(() if sizes.is_one(size) else (Axis(size),) for size in (len(tensors), *shape))
    return Fact(Table(tuple(tensors), groups), groups)


def _unbound(tensors: Sequence[Node]) -> Node | None:
    """The tensor whose elements 0, 1, 2, ... the list holds, all of them; None for another list."""
    pieces = argument(tensors[0], 0) if op_name(tensors[0]) == "getitem" else None
    if (
        not isinstance(pieces, Node)
        or op_name(pieces) != "aten::unbind"
        or argument(pieces, 1, "dim", 0) != 0
    ):
        return None
    every = [op_name(t) == "getitem" and t.args == (pieces, expert) for expert, t in enumerate(tensors)]
    whole = argument(pieces, 0)
    return whole if all(every) and len(every) == len(value(pieces)) and isinstance(whole, Node) else None


def _biased(node: Node, product: Fact, bias: Fact, ids: Expr, experts: Size) -> Fact:
    """product + bias[expert]: the bias is selected by the same ids as the weight."""
    bias = by_expert(bias, 0, ids)
    (expert,) = bias.dims[0] if len(bias.dims) == 2 and len(bias.dims[0]) == 1 else (None,)
    if not isinstance(bias.expr, Leaf | Table) or not isinstance(expert, Axis):
        raise Conflict("the bias of a grouped GEMM is not [experts, N]")
    if not sizes.same(expert.size, experts):
        raise Conflict(f"a grouped GEMM with weights for {experts} experts, biases for {expert.size}")
    unifier = Unifier()
    features = unifier.unify(product.dims[1], bias.dims[1])
    selected = unifier.expr(bind(bias.expr, {expert: (At(ids, expert.size),)}))
    expr = Op(torch.ops.aten.add.Tensor, (unifier.expr(product.expr), selected), (), node)
    return Fact(expr, (product.dims[0], features))
