"""Router and pointwise arithmetic: ids, counts of ids, values per slot and per (token, expert).

The router itself isn't understood and needn't be: any integer tensor that selects expert weights or gets
sorted is `topk_ids`, any float tensor over the slots that is multiplied in is a routing weight. What this file
knows is the arithmetic around them: exact casts, comparisons with an `arange`, counts and running counts,
scores scattered to (token, expert).
"""

import math
from typing import Any

import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.patterns.facts import (
    Axis,
    Conflict,
    Const,
    Count,
    Dense,
    Dims,
    Expr,
    Fact,
    Group,
    Leaf,
    Offs,
    OneHot,
    Op,
    Part,
    Perm,
    Pos,
    Sum,
    group_axes,
    group_size,
)
from moefuse.patterns.rules import Lifting, Outcome, argument, is_float, op_name, rule, value
from moefuse.patterns.unify import Unifier

EXACT = frozenset((torch.int32, torch.int64, torch.float32, torch.float64))
"""Types that hold every id and count met in practice (below 2^24): a cast to them changes nothing."""


# --- constants and ranges --------------------------------------------------------------------------------


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


# --- casts -----------------------------------------------------------------------------------------------


def covers(fact: Fact) -> Leaf | None:
    """The integer leaf of which the fact lists every element exactly once, in whatever order."""
    leaf = fact.expr
    if not isinstance(leaf, Leaf) or is_float(leaf.node):
        return None
    index = [digit for group in leaf.index for digit in group]
    if not all(isinstance(digit, Axis) for digit in index) or len(set(index)) != len(index):
        return None
    listed: set[Axis] = set()
    for group in fact.dims:
        listed |= group_axes(group)
    return leaf if listed == set(index) else None


@rule("aten::_to_copy", "aten::to", "prims::convert_element_type")
def cast(lift: Lifting, node: Node) -> Outcome:
    """A cast is nothing where it is exact for what the value means; otherwise it is arithmetic."""
    fact = lift.fact(argument(node, 0))
    target = value(node).dtype
    if value(argument(node, 0)).device != value(node).device:
        return None
    if isinstance(fact.expr, Count | Offs | Pos):
        return fact if target in EXACT else None
    if isinstance(fact.expr, OneHot) or _is_mask(fact.expr):
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


def _is_mask(expr: Expr) -> bool:
    """True for scattered ones in zeros: exact in every type."""
    return isinstance(expr, Dense) and expr.value == Const(1.0) and expr.fill == 0


# --- pointwise arithmetic --------------------------------------------------------------------------------


def _worth_keeping(fact: Fact) -> bool:
    """Facts that arithmetic must not turn into an opaque leaf."""
    if fact.expr.hard or (fact.sorted and not isinstance(fact.expr, Pos)):
        return True
    return (
        any(isinstance(expr, Dense | OneHot) for expr in walk(fact.expr))
        or expert_weight(fact.expr) is not None
    )


def walk(expr: Expr) -> list[Expr]:
    """The expression and all of its sub-expressions."""
    found = [expr]
    for part in expr.parts():
        found.extend(walk(part))
    return found


ROUNDING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Casts between these only round; casts to integers or eight-bit floats are arithmetic of their own."""


def is_rounding(expr: Expr) -> bool:
    """True for a cast between float types."""
    if not isinstance(expr, Op) or expr.target is not torch.ops.aten._to_copy.default or expr.node is None:
        return False
    return value(expr.node).dtype in ROUNDING and value(expr.node.args[0]).dtype in ROUNDING


def strip_casts(expr: Expr) -> Expr:
    """The expression without outer casts between float types."""
    while isinstance(expr, Op) and is_rounding(expr):
        expr = expr.args[0]
    return expr


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
    if not lift.forced and not any(_worth_keeping(fact) for fact in tensors.values()):
        return None
    if not is_float(node) and not any(fact.expr.hard for fact in tensors.values()):
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


# --- counts ----------------------------------------------------------------------------------------------


@rule("aten::histc")
def histc(lift: Lifting, node: Node) -> Outcome:
    """Slots per expert, if the bins are exactly the ids 0..E-1."""
    ids = covers(lift.fact(argument(node, 0)))
    if ids is None:
        return None
    bins, low, high = argument(node, 1, "bins", 100), argument(node, 2, "min", 0), argument(node, 3, "max", 0)
    # The bin of an id is monotone in the id: one element in every bin means that id i falls into bin i.
    spread = torch.histc(torch.arange(bins, dtype=torch.float32), bins, low, high)
    if not bool((spread == 1).all()):
        raise Conflict(f"histc with {bins} bins over {low}..{high} doesn't count the ids 0..{bins - 1}")
    group: Group = () if bins == 1 else (Axis(bins),)
    return Fact(Count(ids, group), (group,))


@rule("aten::bincount")
def bincount(lift: Lifting, node: Node) -> Outcome:
    """Slots per expert; the output has at least `minlength` entries, more only for ids beyond them."""
    ids = covers(lift.fact(argument(node, 0)))
    length = argument(node, 2, "minlength", 0)
    if ids is None or argument(node, 1, "weights") is not None or length < 1:
        return None
    group: Group = () if length == 1 else (Axis(length),)
    return Fact(Count(ids, group), (group,))


@rule("aten::cumsum")
def cumsum(lift: Lifting, node: Node) -> Outcome:
    """Running counts: where each expert's rows end in sorted order."""
    fact = lift.fact(argument(node, 0))
    target = value(node).dtype
    if not isinstance(fact.expr, Count) or fact.dims != (fact.expr.at,) or target not in EXACT:
        return None
    return Fact(Offs(fact.expr.ids, fact.expr.at), fact.dims)


@rule("aten::lt", "aten::le", "aten::gt", "aten::ge")
def compare(lift: Lifting, node: Node) -> Outcome:
    """A comparison; with a number, of a slot's place in its expert's queue: a capacity, which drops slots."""
    limit = argument(node, 1)
    if isinstance(limit, int | float) and (queue := _queue(lift, argument(node, 0))) is not None:
        raise Conflict(
            f"slots are counted expert by expert (`{queue.name}`) and compared with a capacity of {limit}: "
            "those beyond it are dropped"
        )
    return pointwise(lift, node)


QUEUE_DEPTH = 8
"""Operators between the running count of an expert's slots and its comparison: a shift by one, a mask, views."""


def _queue(lift: Lifting, node: Node) -> Node | None:
    """The running count over the tokens' choices of experts from which an integer tensor is made, if it is."""
    level = {node}
    for _ in range(QUEUE_DEPTH):
        for found in level:
            if op_name(found) == "aten::cumsum" and _choices(lift.fact(argument(found, 0)).expr):
                return found
        above = {before for found in level for before in found.all_input_nodes}
        level = {n for n in above if isinstance(value(n), torch.Tensor) and not is_float(n)}
    return None


def _choices(expr: Expr) -> bool:
    return isinstance(expr, OneHot) or _is_mask(expr)


@rule("aten::sub")
def subtract(lift: Lifting, node: Node) -> Outcome:
    """A difference; of neighbouring running counts it is the counts again."""
    both = [lift.fact(arg) for arg in node.args] if len(node.args) == 2 and not node.kwargs else []
    if len(both) != 2 or not all(isinstance(fact.expr, Offs) and len(fact.dims) == 1 for fact in both):
        return pointwise(lift, node)
    unifier = Unifier()
    dims = (unifier.unify(both[0].dims[0], both[1].dims[0]),)
    ends, before = (unifier.expr(fact.expr) for fact in both)
    assert isinstance(ends, Offs)
    assert isinstance(before, Offs)
    here, there = (_part(expr.at) for expr in (ends, before))
    if here is None or there is None or ends.ids.node is not before.ids.node:
        return pointwise(lift, node)
    if (here.group, here.size, here.start) != (there.group, there.size, there.start + 1):
        return pointwise(lift, node)
    return Fact(Count(ends.ids, ends.at), dims)


def _part(at: Group) -> Part | None:
    """A slice of the experts, one by one."""
    (found,) = at if len(at) == 1 else (None,)
    return found if isinstance(found, Part) and found.step == 1 else None


def joined_counts(parts: list[Fact]) -> Fact | None:
    """The counts of all experts, if the parts are those of some experts each, in order. The first end is a count."""
    begin, ids, total = 0, None, None
    for fact in parts:
        part = _part(fact.expr.at) if isinstance(fact.expr, Count | Offs) else None
        if part is None or fact.dims != (part.group,) or part.start != begin:
            return None
        assert isinstance(fact.expr, Count | Offs)
        if isinstance(fact.expr, Offs) and (begin, part.group) != (0, ()):
            return None
        if (ids is not None and fact.expr.ids.node is not ids.node) or (total or part.size) != part.size:
            return None
        ids, total, length = fact.expr.ids, part.size, group_size(part.group)
        if not isinstance(length, int):
            return None
        begin += length
    if ids is None or begin != total:
        return None
    at: Group = (Axis(begin),)
    return Fact(Count(ids, at), (at,))


# --- scores per (token, expert) --------------------------------------------------------------------------


@rule("aten::scatter")
def scatter(lift: Lifting, node: Node) -> Outcome:
    """full(v).scatter(-1, ids, w): w for the chosen experts, v elsewhere."""
    if node.kwargs.get("reduce") is not None:
        return None
    base, ids, source = (lift.fact(argument(node, i)) for i in (0, 2, 3))
    dim = int(argument(node, 1)) % max(len(base.dims), 1)
    if not isinstance(base.expr, Const) or not isinstance(ids.expr, Leaf):
        return None
    if len(ids.dims) != len(base.dims) or (source.dims and len(source.dims) != len(ids.dims)):
        return None
    unifier = Unifier()
    for i, (a, b) in enumerate(zip(base.dims, ids.dims, strict=True)):
        if i != dim and not sizes.same(group_size(a), group_size(b)):
            return None
        if i != dim:
            unifier.unify(b, a)
    for a, b in zip(ids.dims, source.dims, strict=False):
        if not sizes.same(group_size(a), group_size(b)):
            return None
        unifier.unify(a, b)
    slots = unifier.resolve(ids.dims[dim])
    if not all(isinstance(digit, Axis) for digit in slots):
        return None
    at = unifier.resolve(base.dims[dim])
    dims = tuple(at if i == dim else unifier.resolve(ids.dims[i]) for i in range(len(ids.dims)))
    axes = tuple(digit for digit in slots if isinstance(digit, Axis))
    dense = Dense(unifier.expr(source.expr), unifier.expr(ids.expr), axes, at, base.expr.value)
    return Fact(dense, dims)


def distinct(expr: Expr, slots: tuple[Axis, ...]) -> bool:
    """True when ids are proved different from each other within `slots`: they come from a top-k over them."""
    if not isinstance(expr, Leaf):
        return False
    topk, dim = topk_of(expr.node)
    return topk is not None and expr.index[dim] == slots


GATES = ("npu::npu_moe_gating_top_k_softmax", "npu::npu_moe_gating_top_k")
"""Fused gates: a top-k over the last dimension of their first operand, ids in their second output."""


def topk_of(node: Node) -> tuple[Node | None, int]:
    """The top-k whose indices `node` is, and the dimension it chose along; (None, 0) otherwise."""
    if (
        node.op != "call_function"
        or getattr(node.target, "__name__", "") != "getitem"
        or argument(node, 1) != 1
    ):
        return None, 0
    source = argument(node, 0)
    if isinstance(source, Node) and op_name(source) in GATES:
        # A finished row gets the id E, a table of ids holds any.
        other = "finished" if op_name(source) == GATES[0] else "input_ids"
        plain = argument(source, 1 if other == "finished" else 9, other) is None
        return (source, value(node).dim() - 1) if plain else (None, 0)
    if not isinstance(source, Node) or source.target is not torch.ops.aten.topk.default:
        return None, 0
    return source, int(argument(source, 2, "dim", -1)) % value(node).dim()


def chosen_from(ids: Expr) -> int | None:
    """How many experts the top-k chose from that made the ids; None where that isn't known."""
    topk, dim = topk_of(ids.node) if isinstance(ids, Leaf) else (None, 0)
    size = value(topk.args[0]).shape[dim] if topk is not None else None
    return size if isinstance(size, int) else None


def count_of(fact: Fact, over: set[Axis]) -> Fact | None:
    """Counts, if the sum of the fact over the axes counts every slot of some ids once; otherwise None."""
    expr = strip_casts(fact.expr)
    if isinstance(expr, OneHot):
        ids, counted, at = expr.ids, over, expr.at
    elif isinstance(expr, Dense) and _is_mask(expr):
        ids, counted, at = expr.ids, over | set(expr.slots), expr.at
    else:
        return None
    if not isinstance(ids, Leaf) or covers(Fact(ids, (tuple(counted),))) is None:
        return None
    if isinstance(expr, Dense) and not distinct(ids, expr.slots):
        raise Conflict("ids may repeat within a token: scattered ones count such a token once")
    return Fact(Count(ids, at), tuple(g for g in fact.dims if not group_axes(g) & over))


def vanishes(expr: Expr, dense: Dense) -> bool:
    """True when the expression is zero wherever `dense` is zero: experts that weren't chosen add nothing."""
    if isinstance(expr, Dense):
        return expr.fill == 0 and expr.ids == dense.ids
    if isinstance(expr, Sum):
        return vanishes(expr.body, dense)
    if not isinstance(expr, Op):
        return any(vanishes(part, dense) for part in expr.parts())
    tensors = [arg for arg in expr.args if isinstance(arg, Expr)]
    if expr.target in (torch.ops.aten.mul.Tensor, torch.ops.aten.mul.Scalar):
        return any(vanishes(arg, dense) for arg in tensors)
    if not all(vanishes(arg, dense) for arg in tensors):
        return False
    zero = Op(expr.target, tuple(Const(0.0) if isinstance(a, Expr) else a for a in expr.args), expr.kwargs)
    at_zero = evaluate_scalar(zero, {})
    return math.isfinite(at_zero) and at_zero == 0


def has_perm(group: Group) -> bool:
    """True when the group runs in sorted order."""
    return any(isinstance(digit, Perm) for digit in group)


@rule("npu::npu_moe_gating_top_k_softmax")
def gating_top_k_softmax(lift: Lifting, node: Node) -> Outcome:
    """Weights and ids are opaque; the third output numbers the slots k-major: slot j of token t is j * T + t."""
    sizes_of = value(argument(node, 0)).shape[:-1]
    tokens: Dims = tuple(() if sizes.is_one(size) else (Axis(size),) for size in sizes_of)
    k = argument(node, 2, "k", 1)
    slot: Group = () if k == 1 else (Axis(k),)
    row_idx = Fact(Pos((*slot, *(digit for group in tokens for digit in group))), (*tokens, slot))
    return None, None, row_idx
