"""Products and expert GEMMs inside an expression.

In: expressions. Out: their factors (routing weights apart from expert rows), and `Linear`, one expert GEMM with its
bias.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from moefuse.patterns.axes import Axis
from moefuse.patterns.facts import Conflict, Const, Dense, Dot, Expr, Leaf, Mean, Op, group_axes
from moefuse.patterns.pointwise import ROUNDING, dtype_of, is_rounding, strip_casts, walk, widened
from moefuse.patterns.quantised import INT4, Dequant, QuantDot, Quantised
from moefuse.patterns.rules import op_name, value
from moefuse.patterns.unify import bind

MUL = (torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Scalar)
DIV = (torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar)
ADD = (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar)


def factors(expr: Expr) -> list[Expr]:
    """The factors of a product, looking through casts; a division by something soft is a factor too."""
    inner = strip_casts(expr)
    if isinstance(inner, Op) and inner.target in MUL:
        return [f for arg in inner.args[:2] for f in factors(_as_expr(arg))]
    if isinstance(inner, Op) and inner.target in DIV and not inner.kwargs:
        divisor = _as_expr(inner.args[1])
        if isinstance(divisor, Const) and divisor.value != 0:
            return [*factors(_as_expr(inner.args[0])), Const(1 / divisor.value)]
        if not isinstance(divisor, Const) and (not divisor.hard or means(divisor)):
            wide = dtype_of(divisor) in (torch.float32, torch.float64)  # 1 / 1e-5 is no number in float16
            whole = divisor if divisor.hard or wide else widened(divisor)
            inverse = Op(torch.ops.aten.reciprocal.default, (whole,), (), inner.node)
            return [*factors(_as_expr(inner.args[0])), inverse]
    return [] if inner == Const(1.0) else [inner if inner.hard else expr]


def demand_kept(expr: Expr, dtypes: Sequence[torch.dtype]) -> None:
    """Conflict for a cast that `factors` looks through, or that expert rows go through, and that rounds by design.

    dtypes: to which the layer rounds anyway. A cast to another one that doesn't hold all their values isn't one of the
    roundings that are kept only on the whole: it emulates a format, or makes an infinity of what is finite.
    """
    for cast in (e for e in walk(expr) if isinstance(e, Op) and is_rounding(e) and e.node is not None):
        inner = strip_casts(cast)
        if not inner.hard and not (isinstance(inner, Op) and inner.target in (*MUL, *DIV)):
            continue
        dtype = value(cast.node).dtype
        if all(torch.promote_types(dtype, own) != dtype for own in dtypes):
            raise Conflict(
                f"`{cast.node}` rounds expert rows, or their weights, to {dtype}, and the layer computes in {dtypes[0]}"
            )


def means(expr: Expr) -> set[Mean]:
    """The means over features in an expression, those inside of a GEMM's operands left out."""
    if isinstance(expr, Mean):
        return {expr}
    return set() if isinstance(expr, Dot) else {mean for part in expr.parts() for mean in means(part)}


def _as_expr(arg: object) -> Expr:
    if isinstance(arg, Expr):
        return arg
    if isinstance(arg, int | float):
        return Const(float(arg))
    raise Conflict(f"a factor that is no number: {arg}")


def split_factors(every: list[Expr]) -> tuple[Expr, list[Expr]]:
    """(the one hard factor, the soft ones)."""
    hard = [f for f in every if f.hard]
    if len(hard) != 1:
        raise Conflict(f"a product of {len(hard)} expert outputs where one is expected")
    return hard[0], [f for f in every if not f.hard]


_BITS = {torch.int8: 8, INT4: 4}
_BLOCKS = {
    ("float8_e4m3fn", "float8_e4m3fn"): "mxfp8",
    ("float8_e5m2", "float8_e5m2"): "mxfp8",
    ("float4_e2m1fn_x2", "float4_e2m1fn_x2"): "mxfp4",
    ("float8_e4m3fn", "float4_e2m1fn_x2"): "mxfp4a8",
    ("float", "float4_e2m1fn_x2"): "mxfp4a16",
}
"""Schemes of MX blocks, by (rows, weights)."""


@dataclass(frozen=True)
class Integers:
    """How the operands of an expert GEMM are quantised.

    rows, weights: their elements, rows None for floats. row_dtype: in which they lay before. scale, offset: (weight +
    offset) * scale, one value per output channel, or one per group of inputs (group: their axes). The bias of int8 rows
    and int4 weights is the assist of `QuantDot`.
    """

    rows: torch.dtype | None
    row_dtype: torch.dtype
    weights: torch.dtype
    scale: Leaf
    offset: Leaf | None
    group: tuple[Axis, ...]

    @property
    def scheme(self) -> str:
        """w8a8, w4a16, mxfp8, ..., or in words what is none."""
        if self.weights in _BITS and (self.rows is None or self.rows in _BITS):
            return f"w{_BITS[self.weights]}a{16 if self.rows is None else _BITS[self.rows]}"
        rows, weights = (str(each or "float").removeprefix("torch.") for each in (self.rows, self.weights))
        return _BLOCKS.get((rows, weights), f"{rows} rows times {weights} weights")

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The tensors that go with the weight."""
        return tuple(leaf for leaf in (self.scale, self.offset) if leaf is not None)


@dataclass(frozen=True)
class Linear:
    """rows @ weight (+ bias): one expert GEMM.

    dtype: that in which it runs; `weight` is the tensor as it is stored, before any cast to it. integers: for a product
    of integers, whose `rows` are what was quantised, and whose dtype is that to which it is rounded.
    """

    rows: Expr
    weight: Leaf
    over: tuple[Axis, ...]
    bias: Leaf | None
    node: Node
    dtype: torch.dtype
    integers: Integers | None = None

    @property
    def row_dtype(self) -> torch.dtype:
        """The dtype of `rows`."""
        return self.dtype if self.integers is None else self.integers.row_dtype

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All tensors of the experts that it reads."""
        own = (self.weight, *([self.bias] if self.bias is not None else []))
        return own + (self.integers.leaves if self.integers is not None else ())


def linear(expr: Expr) -> Linear | None:
    """The GEMM, with its bias, that an expression is; None for anything else."""
    inner = strip_casts(expr)
    if isinstance(inner, QuantDot):
        return _of_integers(inner)
    if isinstance(inner, Dot) and inner.expert:
        weight, dtype, rows = _weight_of(inner)
        return Linear(rows, weight, inner.over, None, inner.node, dtype)
    if not isinstance(inner, Op) or inner.target not in ADD or dict(inner.kwargs).get("alpha", 1) != 1:
        return None
    for one, other in (inner.args[:2], inner.args[1::-1]):
        if not isinstance(one, Expr) or not isinstance(other, Expr) or not one.hard or other.hard:
            continue
        bias, product = strip_casts(other), linear(one)
        if product is None or product.bias is not None or not isinstance(bias, Leaf):
            continue
        if len(bias.selectors) == len(product.weight.selectors):
            return replace(product, bias=bias)
    return None


def _of_integers(dot: QuantDot) -> Linear:
    """A product of integers, once all of its scales have come."""
    weight = dot.b
    if not isinstance(weight, Dequant) or weight.scale is None:
        raise Conflict(f"the integer product `{dot.node.name}` is never multiplied by its weight's scale")
    parts = (weight.stored, weight.scale, weight.offset, dot.assist)
    whole, scale, offset, assist = (part if isinstance(part, Leaf) else None for part in parts)
    if whole is None or scale is None:
        raise Conflict(f"the weights of `{dot.node.name}` are not selected by the routing")
    rows, elements = dot.a, None
    dtype = dot.dtype
    if isinstance(rows, Quantised):
        if not rows.scaled:
            raise Conflict(f"the integer product `{dot.node.name}` is never multiplied by its rows' scales")
        at = [digit for group in rows.at for digit in group]
        if set(at) != set(dot.over) or len(at) != len(dot.over):
            raise Conflict(f"`{dot.node.name}` multiplies a part of its quantised rows")
        elements, dtype = rows.elements, rows.dtype
        rows = bind(rows.row, dict(zip(rows.over, rows.at, strict=True)))
    group = tuple(axis for axis in dot.over if axis in scale.axes)
    integers = Integers(elements, dtype, weight.elements, scale, offset, group)
    return Linear(rows, whole, dot.over, assist, dot.node, dot.dtype, integers)


def _weight_of(dot: Dot) -> tuple[Leaf, torch.dtype, Expr]:
    """(the weight, the dtype of the product, the rows). In a loop the weight stands second.

    A cast of what was selected is a cast of the weight, and so is a cast before the selection: the node casts each
    expert's weight as it uses it, where a cast of all of them would be a copy of the model per call.
    """
    for weight, rows in ((dot.b, dot.a), (dot.a, dot.b)):
        leaf = strip_casts(weight)
        if isinstance(leaf, Leaf) and len(leaf.selectors) == 1 and leaf.axes >= set(dot.over):
            return *_stored(weight), rows
    if isinstance(dot.b, Leaf) and not dot.b.selectors and dot.b.axes >= set(dot.over):
        return *_stored(dot.b), dot.a
    raise Conflict(f"the weights of `{dot.node.name}` are not selected by the routing")


def has_own_weights(expr: Expr) -> bool:
    """True where expert GEMMs stand in here whose weights are tensors of one expert, which nothing selects."""
    gemms = [e for e in walk(expr) if isinstance(e, Dot) and e.expert]
    sides = [(strip_casts(dot.a), strip_casts(dot.b)) for dot in gemms]
    sides = [(a, b.stored if isinstance(b, Dequant) else b) for a, b in sides]
    return any(not any(isinstance(side, Leaf) and side.selectors for side in both) for both in sides)


def _stored(weight: Expr) -> tuple[Leaf, torch.dtype]:
    """(a weight as it is stored, the dtype that its casts between float dtypes end in)."""
    casts: list[torch.dtype] = []
    while isinstance(weight, Op) and is_rounding(weight):
        casts.append(value(weight.node).dtype)
        weight = weight.args[0]
    assert isinstance(weight, Leaf)
    node = weight.node
    while op_name(node) == "aten::_to_copy" and isinstance(source := node.args[0], Node):
        if value(source).dtype not in ROUNDING or value(source).device != value(node).device:
            break
        casts.append(value(node).dtype)
        node = source
    stored = value(node).dtype
    final = casts[0] if casts else stored
    for between in casts:  # one that loses digits on the way to a wider dtype is no detail
        if between not in (torch.promote_types(between, final), torch.promote_types(between, stored)):
            raise Conflict(f"expert weights `{node.name}` are rounded to {between} on the way to {final}")
    return Leaf(node, weight.index), final


def times(every: list[Expr]) -> Expr:
    """The product of some factors."""
    if not every:
        raise Conflict("the input of the experts is no token row")
    return functools.reduce(lambda a, b: Op(torch.ops.aten.mul.Tensor, (a, b)), every)


def first_gemms(expr: Expr) -> list[Linear]:
    """The different GEMM outputs that the activation reads, in order of appearance."""
    found = linear(expr)
    if found is not None:
        return [found]
    result: list[Linear] = []
    for part in expr.parts():
        result.extend(f for f in first_gemms(part) if f not in result)
    return result


def row_features(expr: Expr) -> set[Axis]:
    """The output features of the expert GEMMs in a row: what is neither token, slot nor expert."""
    found: set[Axis] = set()
    for one in first_gemms(expr):
        selected = {axis for at in one.weight.selectors for axis in at.expr.axes}
        found |= one.weight.axes - set(one.over) - selected
    return found - {axis for e in walk(expr) if isinstance(e, Dense) for axis in group_axes(e.at)}
