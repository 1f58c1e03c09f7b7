"""Ids from a top-k, and scores scattered to (token, expert).

The router itself isn't understood and needn't be: any integer tensor that selects expert weights or gets sorted is
`topk_ids`, any float tensor over the slots that is multiplied in is a routing weight.
"""

import math

import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.patterns.axes import Axis, Dims, Group, Perm, group_size
from moefuse.patterns.facts import Const, Dense, Expr, Fact, Leaf, Op, Pos, Sum
from moefuse.patterns.pointwise import evaluate_scalar
from moefuse.patterns.rules import Lifting, Outcome, argument, op_name, rule, value
from moefuse.patterns.unify import Unifier


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
