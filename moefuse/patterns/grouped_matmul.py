"""Expert GEMMs: products with weights that the routing selects. Ascend's operators are in npu_matmul.py.

Grouped (rows in sorted order and the ends of each expert's rows), batched with gathered weights, and batched
over the experts. Which weight dimension is contracted, and so the layout, falls out of the axes.
"""

import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.patterns.axes import Arrived, At, Axis, Dims, Group, Perm, Pick, group_size
from moefuse.patterns.counts import padding_of
from moefuse.patterns.facts import Conflict, Count, Dense, Dot, Expr, Fact, Leaf, Offs, Op, Table, group_axes
from moefuse.patterns.finalize_routing import summed
from moefuse.patterns.pointwise import broadcast, expert_weight, strip_casts, walk
from moefuse.patterns.rank_facts import Among, Local, Spread
from moefuse.patterns.ranks import arrival, by_expert, same_ids
from moefuse.patterns.rules import Lifting, Outcome, argument, rule
from moefuse.patterns.unify import Unifier, bind


@rule("aten::_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_mm(lift: Lifting, node: Node) -> Outcome:
    """rows[offs[e-1]:offs[e]] @ weight[e]: right only for rows and offsets in the order of the same ids."""
    rows, weight, offsets = (
        lift.fact(argument(node, 0)),
        lift.fact(argument(node, 1)),
        lift.fact(argument(node, 2, "offs")),
    )
    if len(node.args) > 3 or node.kwargs.get("bias") is not None:
        raise Conflict("a grouped GEMM with a bias argument")
    if not isinstance(offsets.expr, Offs) or offsets.dims != (offsets.expr.at,):
        if unit := padding_of(lift, argument(node, 2, "offs")):
            raise Conflict(
                f"each expert's rows are padded to a multiple of {unit}: not the rows alone are multiplied"
            )
        raise Conflict("the row offsets of the grouped GEMM are not the running counts of the ids")
    return grouped(node, rows, argument(node, 0), weight, offsets.expr)


def grouped(node: Node, rows: Fact, rows_node: Node, weight: Fact, groups: Offs | Count) -> Fact:
    """Each expert's rows times its weight, for rows in the order of the ids that `groups` counts."""
    if len(rows.dims) != 2 or len(weight.dims) != 3 or not isinstance(weight.expr, Leaf | Table):
        raise Conflict("a grouped GEMM whose operands are not [rows, K] and [experts, K, N]")
    group, key = row_order(rows, groups.ids, rows_node)
    weight = by_expert(weight, 0, key)
    (expert,) = weight.dims[0] if len(weight.dims[0]) == 1 else (None,)
    if not isinstance(expert, Axis) or not sizes.same(expert.size, group_size(groups.at)):
        raise Conflict(
            f"offsets for {group_size(groups.at)} experts, weights for {group_size(weight.dims[0])}"
        )
    chosen = bind(weight.expr, {expert: (At(key, expert.size),)})
    unifier = Unifier()
    over = _plain_axes(unifier.unify(rows.dims[1], weight.dims[1]))
    expr = Dot(unifier.expr(rows.expr), unifier.expr(chosen), over, True, node)
    return Fact(expr, (group, unifier.resolve(weight.dims[2])))


def row_order(rows: Fact, ids: Leaf | Local | Spread | Among, rows_node: Node) -> tuple[Group, Expr]:
    """The row group and the id of each row; Conflict unless rows lie in the order of the ids that are counted."""
    group = rows.dims[0]
    if not group and not ids.axes:
        return group, ids  # a single slot is in any order
    if (local := _only_experts(group, ids)) is not None:
        return group, local
    if len(group) != 1 or not isinstance(group[0], Perm):
        raise Conflict("the rows of the grouped GEMM are not in the order of a sort by expert", rows_node)
    order = group[0]
    if not same_ids(order.key, ids):
        raise Conflict(
            f"rows are sorted by {_source(order.key)}, offsets count {_source(ids)}: not the same ids"
        )
    if isinstance(ids, Local) and arrival(group) is None:
        raise Conflict("offsets count the rows that came from all ranks, the rows are other ones", rows_node)
    return group, order.key


def _only_experts(group: Group, ids: Expr) -> Local | None:
    """The numbers of rows that came to the one expert of this rank: as they lie they are in order by expert."""
    (rows,) = group if len(group) == 1 else (None,)
    if not isinstance(ids, Local) or not isinstance(rows, Arrived) or ids.ranks.experts != 1:
        return None
    key = rows.order.key
    if not isinstance(key, Leaf) or (rows.ids, rows.ranks) != (ids.ids.node, ids.ranks):
        return None
    return Local(Leaf(key.node, key.index, sent=True), ids.ranks)


def _source(ids: Expr) -> str:
    if isinstance(ids, Local):
        return f"this rank's part of {_source(ids.ids)}"
    return f"`{ids.node}`" if isinstance(ids, Leaf) else f"a {type(ids).__name__.lower()}"


def _plain_axes(group: Group) -> tuple[Axis, ...]:
    axes = tuple(digit for digit in group if isinstance(digit, Axis))
    if len(axes) != len(group):
        raise Conflict("a product is summed over rows in sorted order")
    return axes


@rule("aten::bmm", "aten::mm", "aten::matmul")
def matmul(lift: Lifting, node: Node) -> Outcome:
    """A batched product, contracted over the last dimension of a and the last but one of b."""
    a, b = lift.fact(argument(node, 0)), lift.fact(argument(node, 1))
    if len(a.dims) != len(b.dims) or len(a.dims) not in (2, 3):
        return None
    return contract(lift, node, a, b)


@rule("aten::addmm", "aten::baddbmm")
def addmm(lift: Lifting, node: Node) -> Outcome:
    """bias + a @ b: one expert's linear layer with a bias."""
    bias, a, b = (lift.fact(argument(node, i)) for i in range(3))
    if node.kwargs or len(a.dims) != 2:
        if a.expr.hard or b.expr.hard:
            raise Conflict("a product of expert rows is scaled as it is added")
        return None
    product = contract(lift, node, a, b)
    if not isinstance(product, Fact):
        return None
    unifier = Unifier()
    dims = broadcast(unifier, product.dims, bias.dims)
    expr = Op(torch.ops.aten.add.Tensor, (unifier.expr(product.expr), unifier.expr(bias.expr)), (), node)
    return Fact(expr, tuple(unifier.resolve(group) for group in dims))


def contract(lift: Lifting, node: Node, a: Fact, b: Fact) -> Outcome:
    """a [.., M, C] times b [.., C, N]. Nothing to say for products that the routing has no part in."""
    relevant = [_selective(fact) for fact in (a, b)]
    if not lift.forced and not any(relevant):
        return None
    unifier = Unifier()
    batch: Dims = tuple(unifier.unify(x, y) for x, y in zip(a.dims[:-2], b.dims[:-2], strict=True))
    over = unifier.unify(a.dims[-1], b.dims[-2])
    dims = tuple(unifier.resolve(group) for group in (*batch, a.dims[-2], b.dims[-1]))
    left, right = unifier.expr(a.expr), unifier.expr(b.expr)
    axes = _plain_axes(unifier.resolve(over))
    expert = lift.forced or _is_expert(left, right, axes) or _is_expert(right, left, axes)
    if expert:
        return Fact(Dot(left, right, axes, True, node), dims)
    if _of_one_expert(dims):
        return Fact(_own_weight(left, right, axes, node), dims)
    total = summed(lift, Op(torch.ops.aten.mul.Tensor, (left, right), (), node), axes, node, None)
    return None if total is None else Fact(total, dims)


def _own_weight(rows: Expr, weight: Expr, over: tuple[Axis, ...], node: Node) -> Dot:
    """One expert's rows times that expert's own matrix."""
    if (
        isinstance(weight, Leaf)
        and not weight.selectors
        and len(weight.axes - set(over)) > 0
        and not weight.hard
    ):
        return Dot(rows, weight, over, True, node)
    raise Conflict("the rows of one expert are multiplied with something that is no weight")


def _of_one_expert(dims: Dims) -> bool:
    """True for rows of one expert: cut from those of all, or all that came to a rank that has one."""
    return any(
        isinstance(digit, Pick) or (isinstance(digit, Arrived) and digit.ranks.experts == 1)
        for group in dims
        for digit in group
    )


def _selective(fact: Fact) -> bool:
    """Facts that make a product worth following: expert rows, gathered weights, dense scores, one expert's rows."""
    if fact.expr.hard or expert_weight(fact.expr) is not None:
        return True
    if _of_one_expert(fact.dims):
        return True
    return any(isinstance(expr, Dense) for expr in walk(fact.expr))


def _is_expert(weight: Expr, rows: Expr, over: tuple[Axis, ...]) -> bool:
    """True when `weight` is a matrix per expert that this product applies to `rows`."""
    leaf = strip_casts(weight)
    if not isinstance(leaf, Leaf) or not over or not leaf.axes.issuperset(over):
        return False
    if (selected := expert_weight(leaf)) is not None:
        others = selected.axes - selected.selectors[0].expr.axes
        return others.issuperset(over) and len(others) > len(over)
    # Batched over all experts: the weight shares its expert axis with scores per (token, expert).
    for score in (e for e in walk(rows) if isinstance(e, Dense)):
        experts = group_axes(score.at)
        if experts and experts <= leaf.axes - set(over) and score.ids.axes.isdisjoint(leaf.axes):
            return True
    return False
