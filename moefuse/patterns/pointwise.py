"""Constants, ranges, casts and elementwise arithmetic.

Arithmetic becomes an expression where expert rows, sorted rows or scores per (token, expert) take part; all else is
opaque. Casts that are exact for what a value means are nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.patterns.axes import Axis, Dims, Group, Part
from moefuse.patterns.facts import Conflict, Const, Count, Dense, Expr, Fact, Leaf, Offs, OneHot, Op, Pos
from moefuse.patterns.rank_facts import Begin, Block, Census, Inflow, Local, Owned
from moefuse.patterns.ranks import arrival_of, as_local
from moefuse.patterns.rules import Lifting, Outcome, argument, is_float, op_name, rule, value
from moefuse.patterns.runs import moved_place
from moefuse.patterns.unify import Unifier

EXACT = frozenset((torch.int32, torch.int64, torch.float32, torch.float64))
"""Types that hold every id and count met in practice (below 2^24): a cast to them changes nothing."""


@rule("aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::full", "aten::full_like", "aten::new_full")
@rule("aten::ones", "aten::ones_like", "aten::new_ones")
def constant(lift: Lifting, node: Node) -> Outcome:
    """A tensor of one value."""
    name = op_name(node).removeprefix("aten::")
    if "full" in name:
        number = argument(node, 2 if name == "new_full" else 1, "fill_value")
    else:
        number = 0 if "zeros" in name else 1
    if not isinstance(number, int | float):
        return None
    return Fact(Const(float(number)), tuple(() if sizes.is_one(s) else (Axis(s),) for s in value(node).shape))


@rule("aten::arange")
def arange(lift: Lifting, node: Node) -> Outcome:
    """0, 1, 2, ...: the position itself."""
    start = 0 if len(node.args) == 1 else argument(node, 0)
    step = argument(node, 2, "step", 1)
    if start != 0 or step != 1 or value(node).dtype.is_floating_point:
        return None
    size = value(node).shape[0]
    group: Group = () if sizes.is_one(size) else (Axis(size),)
    return Fact(Pos(group), (group,))


@rule("aten::_to_copy", "aten::to", "prims::convert_element_type")
def cast(lift: Lifting, node: Node) -> Outcome:
    """A cast is nothing where it is exact for what the value means; otherwise it is arithmetic."""
    fact = lift.fact(argument(node, 0))
    target = value(node).dtype
    if value(argument(node, 0)).device != value(node).device:
        return None
    if isinstance(fact.expr, Count | Offs | Pos | Owned | Inflow | Census | Local | Block | Begin):
        return fact if target in EXACT else None
    if isinstance(fact.expr, OneHot) or is_mask(fact.expr):
        return fact if target in (*EXACT, torch.bool) else pointwise(lift, node)
    if isinstance(fact.expr, Const) and fact.expr.value in (0, 1):
        return fact if target in (*ROUNDING, *EXACT, torch.bool) else None
    if (
        isinstance(fact.expr, Leaf)
        and not is_float(fact.expr.node)
        and value(fact.expr.node).dtype != torch.bool
    ):
        return fact if target in EXACT else None
    return pointwise(lift, node)


def is_mask(expr: Expr) -> bool:
    """True for scattered ones in zeros: exact in every type."""
    return isinstance(expr, Dense) and expr.value == Const(1.0) and expr.fill == 0


def _worth_keeping(fact: Fact) -> bool:
    """Facts that arithmetic must not turn into an opaque leaf."""
    if fact.expr.hard or (fact.sorted and not isinstance(fact.expr, Pos)):
        return True
    return (
        any(isinstance(expr, Dense | OneHot) for expr in walk(fact.expr))
        or expert_weight(fact.expr) is not None
    )


def _is_one_slot(arg: Any, fact: Fact) -> bool:
    """True for rows in order by expert that are one row, though their size doesn't say so."""
    return any(
        not group and not sizes.is_one(size) for group, size in zip(fact.dims, value(arg).shape, strict=True)
    )


def walk(expr: Expr) -> list[Expr]:
    """The expression and all of its sub-expressions."""
    found = [expr]
    for part in expr.parts():
        found.extend(walk(part))
    return found


def is_part(expr: Expr) -> bool:
    """True for some elements of a node: the node that takes them out is there to be used as it is."""
    return isinstance(expr, Leaf) and any(isinstance(digit, Part) for group in expr.index for digit in group)


ROUNDING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Casts between these only round; casts to integers or eight-bit floats are arithmetic of their own."""


def is_rounding(expr: Expr) -> bool:
    """True for a cast between float types."""
    if not isinstance(expr, Op) or expr.target is not torch.ops.aten._to_copy.default:
        return False
    if expr.node is None:
        return expr == widened(expr.args[0])
    return value(expr.node).dtype in ROUNDING and value(expr.node.args[0]).dtype in ROUNDING


def widened(expr: Expr) -> Expr:
    """A half precision value as the float32 in which one operator computes with it."""
    return Op(torch.ops.aten._to_copy.default, (expr,), (("dtype", torch.float32),))


def strip_casts(expr: Expr) -> Expr:
    """The expression without outer casts between float types."""
    while isinstance(expr, Op) and is_rounding(expr):
        expr = expr.args[0]
    return expr


def product_dtype(weights: Sequence[Expr], default: torch.dtype) -> torch.dtype:
    """The dtype in which these factors are multiplied; `default` where all are constants."""
    dtypes = [dtype_of(weight) for weight in weights if not isinstance(weight, Const)]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else default


def dtype_of(expr: Expr) -> torch.dtype:
    """The dtype of a row expression: of its last cast, or of its leaf."""
    if isinstance(expr, Op) and expr.target is torch.ops.aten._to_copy.default:
        dtype = dict(expr.kwargs).get("dtype")
        return dtype if isinstance(dtype, torch.dtype) else dtype_of(expr.args[0])
    if isinstance(expr, Leaf):
        dtype = value(expr.node).dtype
        assert isinstance(dtype, torch.dtype)
        return dtype
    return product_dtype(list(expr.parts()), torch.float32)


def expert_weight(expr: Expr) -> Leaf | None:
    """The leaf, if this is a matrix per slot taken from stacked expert weights: weight[ids]."""
    leaf = strip_casts(expr)
    if not isinstance(leaf, Leaf) or len(leaf.selectors) != 1:
        return None
    others = leaf.axes - leaf.selectors[0].expr.axes
    return leaf if len(others) >= 2 else None


@rule("pointwise")
def pointwise(lift: Lifting, node: Node) -> Outcome:
    """Elementwise arithmetic: kept as an expression where expert rows, sorted rows or dense scores take part."""
    tensors = {i: lift.fact(arg) for i, arg in enumerate(node.args) if isinstance(value(arg), torch.Tensor)}
    if any(isinstance(value(arg), torch.Tensor) for arg in node.kwargs.values()):
        return None
    if _changes_nothing(node):
        return tensors[0]
    if not lift.forced and not any(
        _worth_keeping(fact) or _is_one_slot(node.args[i], fact) for i, fact in tensors.items()
    ):
        return None
    if not is_float(node) and not any(fact.expr.hard for fact in tensors.values()):
        if len(tensors) == 1:
            return _of_arrivals(node, *tensors.popitem())
        if (moved := moved_place(node, list(tensors.values()))) is not None:
            return moved
        return None  # ids made from ids (a skipped expert masked out, say) are ids like any other
    if any(isinstance(value(arg), torch.SymInt | torch.SymBool) for arg in node.args):
        raise Conflict("a size that is not static takes part in the arithmetic of rows")
    if len(tensors) == 1:
        position, fact = tensors.popitem()
        return _unary(node, position, fact)
    unifier = Unifier()
    dims: Dims = ()
    for fact in tensors.values():
        dims = broadcast(unifier, dims, fact.dims)
    args = tuple(
        unifier.expr(tensors[i].expr) if i in tensors else number(arg) for i, arg in enumerate(node.args)
    )
    if op_name(node) == "aten::add" and not node.kwargs and Const(0.0) in args:
        (kept,) = [arg for arg in args if arg != Const(0.0)] or [args[0]]
        return Fact(kept, tuple(unifier.resolve(group) for group in dims))
    return Fact(_op(node, args), tuple(unifier.resolve(group) for group in dims))


def _of_arrivals(node: Node, position: int, fact: Fact) -> Fact | None:
    """Arithmetic on ids of rows that came from all ranks: this rank's number of the expert, or on the way to it."""
    rows = arrival_of(fact)
    if rows is None or value(node).dtype not in EXACT:
        return None
    args = tuple(fact.expr if i == position else number(arg) for i, arg in enumerate(node.args))
    return Fact(as_local(_op(node, args), rows), fact.dims)


NEUTRAL = {"aten::add": 0, "aten::sub": 0, "aten::mul": 1, "aten::div": 1}


def _changes_nothing(node: Node) -> bool:
    """x + 0, x - 0, x * 1, x / 1 in the dtype of x."""
    neutral = NEUTRAL.get(op_name(node))
    if neutral is None or node.kwargs or len(node.args) != 2 or not isinstance(argument(node, 0), Node):
        return False
    same = (
        value(node).dtype == value(argument(node, 0)).dtype
        and value(node).shape == value(argument(node, 0)).shape
    )
    return same and isinstance(argument(node, 1), int | float) and argument(node, 1) == neutral


def broadcast(unifier: Unifier, left: Dims, right: Dims) -> Dims:
    """The dims of an elementwise result, trailing dimensions aligned."""
    rank = max(len(left), len(right))
    left, right = (((),) * (rank - len(dims)) + dims for dims in (left, right))
    return tuple(unifier.unify(a, b) for a, b in zip(left, right, strict=True))


def number(arg: Any) -> Any:
    """A Python value of an argument.

    A symbolic float (Dynamo makes one of a module's attribute under dynamic=True) is specialised with its guard,
    as without dynamic=True: it is a constant of the layer.
    """
    arg = value(arg)
    return float(arg) if isinstance(arg, torch.SymFloat) else arg


def _op(node: Node, args: tuple[Any, ...]) -> Op:
    kwargs = tuple(sorted((k, number(v)) for k, v in node.kwargs.items()))
    assert isinstance(node.target, torch._ops.OpOverload)
    return Op(node.target, args, kwargs, node)


def _unary(node: Node, position: int, fact: Fact) -> Fact | None:
    def apply(expr: Expr) -> Op:
        return _op(node, tuple(expr if i == position else number(arg) for i, arg in enumerate(node.args)))

    if not isinstance(fact.expr, Dense):
        return Fact(apply(fact.expr), fact.dims)
    dense = fact.expr
    if not is_float(node):
        return None  # a mask of choices: routers use it, no expert row does
    fill = evaluate_scalar(apply(Const(dense.fill)), {})
    return Fact(Dense(apply(dense.value), dense.ids, dense.slots, dense.at, fill), fact.dims)


def evaluate_scalar(expr: Expr, leaves: dict[Expr, float]) -> float:
    """The number that an expression of constants (and the given leaves) comes to, in float64."""
    if expr in leaves:
        return leaves[expr]
    if isinstance(expr, Const):
        return expr.value
    if not isinstance(expr, Op):
        raise Conflict(f"a {type(expr).__name__} where a number is needed")
    args = [
        torch.tensor(evaluate_scalar(arg, leaves), dtype=torch.float64) if isinstance(arg, Expr) else arg
        for arg in expr.args
    ]
    if expr.target is torch.ops.aten._to_copy.default:
        return float(args[0])
    try:
        return float(expr.target(*args, **dict(expr.kwargs)))
    except (RuntimeError, TypeError) as error:
        raise Conflict(f"{expr.target} can't be evaluated on numbers: {error}") from None


@rule("aten::eq")
def equals(lift: Lifting, node: Node) -> Outcome:
    """ids == arange(E): one-hot; ids == e: one column of it."""
    left, number = lift.fact(argument(node, 0)), argument(node, 1)
    if isinstance(number, int) and not isinstance(number, bool):
        if not isinstance(left.expr, Leaf) or is_float(left.expr.node) or number < 0:
            return None
        return Fact(OneHot(left.expr, (Part((), number, 1, number + 1),)), left.dims)
    if not isinstance(number, Node):
        return None
    right = lift.fact(number)
    if isinstance(left.expr, Pos):
        left, right = right, left
    if not isinstance(right.expr, Pos) or not isinstance(left.expr, Leaf) or is_float(left.expr.node):
        return None
    unifier = Unifier()
    dims = broadcast(unifier, left.dims, right.dims)
    expr = OneHot(unifier.expr(left.expr), unifier.resolve(right.expr.group))
    return Fact(expr, tuple(unifier.resolve(group) for group in dims))
