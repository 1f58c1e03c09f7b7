"""Local experts: what a rank of an expert-parallel model does about slots whose expert lies elsewhere.

Such slots carry an id past the local experts (a sentinel). A model zeroes their rows around the grouped GEMMs, whose
offsets leave them out. The fused node lets them contribute nothing, so zeroing them says nothing new. The all_reduce
that sums the ranks' partial outputs isn't part of the layer and stays where it is, once.
"""

import operator
from collections.abc import Callable

from torch.fx import Node

from moefuse.patterns.axes import At, Perm
from moefuse.patterns.facts import Conflict, Const, Dot, Fact, Leaf
from moefuse.patterns.pointwise import pointwise, walk
from moefuse.patterns.rank_facts import Local
from moefuse.patterns.ranks import numbered
from moefuse.patterns.rules import Lifting, Outcome, argument, op_name, rule, value
from moefuse.patterns.unify import Unifier

GROUPED_GEMMS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
_RESHAPES = ("aten::unsqueeze", "aten::view", "aten::reshape", "aten::expand")
_NEGATIONS = ("aten::logical_not", "aten::bitwise_not")
_COMPARISONS: dict[str, tuple[Callable[[int, int], bool], bool]] = {
    "aten::ge": (operator.ge, True),
    "aten::gt": (operator.gt, True),
    "aten::lt": (operator.lt, False),
    "aten::le": (operator.le, False),
}
"""The comparison, and whether it holds for large ids."""


@rule("aten::masked_fill")
def masked_fill(lift: Lifting, node: Node) -> Outcome:
    """masked_fill(rows, sorted_ids >= E, 0): the rows, where nobody else reads the rows of slots without expert."""
    return _kept(lift, node, argument(node, 0), argument(node, 1), argument(node, 2), True)


@rule("aten::where")
def where(lift: Lifting, node: Node) -> Outcome:
    """where(sorted_ids < E, rows, 0) or where(sorted_ids >= E, 0, rows): as masked_fill."""
    if len(node.args) != 3:
        return pointwise(lift, node)
    mask, first, second = node.args
    if _is_zero(lift, second):
        return _kept(lift, node, first, mask, second, False)
    return _kept(lift, node, second, mask, first, True)


def _kept(lift: Lifting, node: Node, rows: object, mask: object, fill: object, zeroes: bool) -> Outcome:
    """The fact of `rows` where the mask names slots without expert only (zeroes: by True, else by False)."""
    if isinstance(rows, Node) and isinstance(mask, Node) and _is_zero(lift, fill):
        fact = lift.fact(rows)
        same = value(rows).shape == value(node).shape and value(rows).dtype == value(node).dtype
        if same and _leaves_all(lift, mask, zeroes):
            return fact
        if fact.sorted and same:
            first = _first_masked(lift, mask, fact, zeroes)
            if first is not None and _experts_end_before(fact, node, first):
                return fact
    return pointwise(lift, node)


def _leaves_all(lift: Lifting, mask: Node, by: bool) -> bool:
    """True where no row that came here is masked: its id is compared with what none of this rank's experts reaches.

    by: what the mask has for rows that it leaves out.
    """
    mask, by = _comparison(mask, by)
    comparison, _ = _COMPARISONS.get(op_name(mask), (None, False))
    if comparison is None or not isinstance(limit := argument(mask, 1), int):
        return False
    ids = numbered(lift.fact(argument(mask, 0))).expr
    return isinstance(ids, Local) and all(comparison(i, limit) != by for i in range(ids.ranks.experts))


def _comparison(mask: Node, by: bool) -> tuple[Node, bool]:
    """What a mask was made from by reshaping and negating it, and what that has where the mask has `by`."""
    while op_name(mask) in (*_RESHAPES, *_NEGATIONS):
        by ^= op_name(mask) in _NEGATIONS
        mask = argument(mask, 0)
    return mask, by


def _is_zero(lift: Lifting, fill: object) -> bool:
    if isinstance(fill, Node) and op_name(fill) == "aten::scalar_tensor":
        fill = argument(fill, 0)
    expr = lift.fact(fill).expr
    return isinstance(expr, Const) and expr.value == 0 and not isinstance(value(fill), bool)


def _first_masked(lift: Lifting, mask: Node, rows: Fact, zeroes: bool) -> int | None:
    """The id from which on rows are zeroed: the mask compares the very ids that the rows are sorted by with it."""
    if len(rows.dims) != 2 or len(rows.dims[0]) != 1 or value(mask).shape[-1] != 1 or value(mask).dim() != 2:
        return None
    order = rows.dims[0][0]
    mask, zeroes = _comparison(mask, zeroes)
    comparison, large = _COMPARISONS.get(op_name(mask), (None, False))
    limit = argument(mask, 1)
    if comparison is None or large != zeroes or not isinstance(limit, int) or not isinstance(order, Perm):
        return None
    ids = lift.fact(argument(mask, 0))
    if len(ids.dims) != 1 or not isinstance(ids.expr, Leaf) or not isinstance(order.key, Leaf):
        return None
    try:
        Unifier().unify(ids.dims[0], rows.dims[0])
    except Conflict:
        return None  # in the order of another sort, or in none
    if ids.expr.node is not order.key.node:
        return None
    return limit if comparison(limit, limit) == large else limit + 1


def _experts_end_before(rows: Fact, node: Node, first: int) -> bool:
    """True when all ids from `first` on are past the experts whose GEMMs these rows came from or go to."""
    dots = [expr for expr in walk(rows.expr) if isinstance(expr, Dot) and expr.expert]
    if dots:
        sizes = [at.size for dot in dots for at in _selectors(dot)]
        return len(sizes) >= len(dots) and all(isinstance(size, int) and size <= first for size in sizes)
    return all(_is_gemm_over(user, node, first) for user in node.users)


def _selectors(dot: Dot) -> tuple[At, ...]:
    return dot.b.selectors if isinstance(dot.b, Leaf) else ()


def _is_gemm_over(user: Node, rows: Node, first: int) -> bool:
    if op_name(user) not in GROUPED_GEMMS or argument(user, 0) is not rows or argument(user, 1) is rows:
        return False
    experts = value(argument(user, 1)).shape[0]
    return isinstance(experts, int) and experts <= first
