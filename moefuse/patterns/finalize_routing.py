"""Finalize routing: how expert rows get back to their tokens and are summed over the K slots.

Sums over the slot axes, accumulation by token index, the inverse permutation written by index_put, and scores
per (token, expert) summed over the experts.
"""

import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.graph.sizes import Size
from moefuse.patterns.axes import At, Axis, Group, Part, Perm, group_size
from moefuse.patterns.counts import count_of, ones_added
from moefuse.patterns.facts import (
    Conflict,
    Const,
    Dense,
    Expr,
    Fact,
    Leaf,
    Mean,
    OneHot,
    Op,
    Pos,
    Sum,
    group_axes,
)
from moefuse.patterns.init_routing import among, describe_index, take_by
from moefuse.patterns.local_experts import is_zero_elsewhere
from moefuse.patterns.loops import add_case, constant, pick_of, write_back
from moefuse.patterns.pointwise import EXACT, walk
from moefuse.patterns.products import row_features
from moefuse.patterns.ranks import arrival
from moefuse.patterns.router import distinct, topk_of, vanishes
from moefuse.patterns.rules import Lifting, Outcome, argument, op_name, rule, value
from moefuse.patterns.structure import regroup
from moefuse.patterns.unify import Unifier, bind, bind_group


@rule("aten::sum")
def sum_(lift: Lifting, node: Node) -> Outcome:
    """The sum over some dimensions: the combine, or a count of one-hot ids."""
    fact = lift.fact(argument(node, 0))
    rank = len(fact.dims)
    dims = argument(node, 1, "dim", None)
    dims = range(rank) if not dims else [dims] if isinstance(dims, int) else dims
    gone = {int(d) % rank for d in dims} if rank else set()
    over = tuple(axis for d in sorted(gone) for axis in _summable(fact, fact.dims[d]))
    keep = bool(argument(node, 2, "keepdim", False))
    rest = tuple(() if d in gone else g for d, g in enumerate(fact.dims) if keep or d not in gone)
    if value(node).dtype in EXACT and (count := count_of(fact, set(over))) is not None:
        return Fact(count.expr, rest)
    alone = not over and value(node).dtype == value(argument(node, 0)).dtype
    if alone and fact.expr.hard and any(arrival(group) is not None for group in rest):
        return Fact(fact.expr, rest)  # one row each, of slots that other ranks have yet to sum up
    if not fact.expr.hard and any(
        isinstance(e, OneHot) and constant(e.at) is not None for e in walk(fact.expr)
    ):
        return Fact(Sum(fact.expr, over, node), rest)  # a token's score for one expert
    if (size := _features_only(fact.expr, over)) is not None:
        mean = Mean(fact.expr, over, node)
        return Fact(Op(torch.ops.aten.mul.Scalar, (mean, float(size)), (), node), rest)
    expr = summed(lift, fact.expr, over, node, value(argument(node, 0)).dtype)
    return None if expr is None else Fact(expr, rest)


def _features_only(expr: Expr, over: tuple[Axis, ...]) -> int | None:
    """How many features the axes run over, if an expert row is reduced over nothing but its own features."""
    if not expr.hard or not over or not set(over) <= row_features(expr):
        return None
    size = sizes.product(axis.size for axis in over)
    return size if isinstance(size, int) else None


def summed(
    lift: Lifting, rows: Expr, over: tuple[Axis, ...], node: Node, terms: torch.dtype | None
) -> Expr | None:
    """The sum of expert rows over axes, those of all experts weighed by scores included; None for other sums.

    terms: the dtype of the rows that are summed, None for a product that sums as it multiplies.
    """
    if not rows.hard:
        rows = scored_experts(lift, rows, over)
        experts = {axis for e in walk(rows) if isinstance(e, Dense) for axis in group_axes(e.at)}
        if not rows.hard and experts and scored_experts(lift, rows, (*over, *experts)).hard:
            raise Conflict("rows of all experts are not summed over exactly the experts")
    return choose_experts(Sum(rows, over, node, terms=terms)) if rows.hard else None


def _summable(fact: Fact, group: Group) -> tuple[Axis, ...]:
    axes = tuple(digit for digit in group if isinstance(digit, Axis))
    if len(axes) != len(group) and fact.expr.hard:
        raise Conflict("expert rows are summed in sorted order")
    return axes


def scored_experts(lift: Lifting, expr: Expr, over: tuple[Axis, ...]) -> Expr:
    """Open leaves that hold a value per (token, expert, feature), if scores per (token, expert) weigh them."""
    dense = [
        e for e in walk(expr) if isinstance(e, Dense) and group_axes(e.at) and group_axes(e.at) <= set(over)
    ]
    if not dense:
        return expr
    experts = group_axes(dense[0].at)
    tokens = dense[0].ids.axes - set(dense[0].slots)
    return lift.expand(expr, lambda leaf: not leaf.axes.isdisjoint(experts) and leaf.axes >= tokens | experts)


def choose_experts(total: Sum) -> Expr:
    """sum over e of F(e, score[t, e]) = sum over k of F(ids[t, k], w[t, k]), where F(e, 0) = 0.

    The sum over all experts of rows weighed by scattered scores becomes the sum over the chosen slots. Holds
    where the ids of a token are distinct and experts that weren't chosen add nothing.
    """
    dense = [e for e in walk(total.body) if isinstance(e, Dense)]
    if not dense:
        return total
    score = dense[0]
    if any(d.ids != score.ids or d.at != score.at for d in dense):
        raise Conflict("expert rows are weighed by scores of two different routings")
    if any(isinstance(digit, Part) for digit in score.at):
        raise Conflict(
            "only a part of the scores is summed: experts are left out, or some ids have no expert"
        )
    if len(score.at) != 1 or not isinstance(score.at[0], Axis) or total.over != score.at:
        raise Conflict("rows of all experts are not summed over exactly the experts")
    if not distinct(score.ids, score.slots):
        raise Conflict("ids may repeat within a token: scattered scores keep only one of them")
    if not vanishes(total.body, score):
        raise Conflict(
            "experts that were not chosen add something: the sum over all experts isn't over the slots"
        )
    body = _replace_dense(total.body, score)
    return Sum(
        bind(body, {score.at[0]: (At(score.ids, score.at[0].size),)}),
        score.slots,
        total.node,
        terms=total.terms,
    )


def _replace_dense(expr: Expr, score: Dense) -> Expr:
    """The expression with every score per (token, expert) replaced by the slot's value."""
    if isinstance(expr, Dense):
        return expr.value
    return expr.rebuilt(lambda part: _replace_dense(part, score))


@rule("aten::index_add", "aten::scatter_add", "aten::scatter_reduce")
def accumulate(lift: Lifting, node: Node) -> Outcome:
    """base[token] += row for every slot: the sum over the slots of each token."""
    name = op_name(node)
    rows = lift.fact(argument(node, 3))
    identity = bool(rows.dims) and pick_of(rows.dims[0]) is not None  # tokens that go back as they came
    if not rows.expr.hard and not identity:
        counted = None if name == "aten::scatter_reduce" else ones_added(lift, node, argument(node, 2), rows)
        if counted is None:
            _demand_no_expert_choice(lift, argument(node, 2))
        return counted
    if name == "aten::scatter_reduce":
        raise Conflict(f"expert rows are combined by scatter_reduce({argument(node, 4, 'reduce')!r})")
    if node.kwargs.get("alpha", 1) != 1:
        raise Conflict("expert rows are added with a factor alpha")
    dim = int(argument(node, 1)) % len(rows.dims)
    index = lift.fact(argument(node, 2))
    if name == "aten::scatter_add":
        if len(index.dims) != len(rows.dims):
            raise Conflict("scatter_add of rows by an index of another rank")
        # Of rows in one and the same order the numbers are equal, even where they depend on the data.
        if not all(
            sizes.same(group_size(a), group_size(b)) for a, b in zip(index.dims, rows.dims, strict=True)
        ):
            raise Conflict("scatter_add adds only a part of the expert rows")
        if any(set(g) & index.expr.axes for d, g in enumerate(index.dims) if d != dim):
            raise Conflict("expert rows are scattered by an index that differs between features")
        index = Fact(index.expr, (index.dims[dim],))
    return _combine(lift, node, rows, index, dim)


@rule("aten::index_put")
def index_put(lift: Lifting, node: Node) -> Outcome:
    """index_put: accumulation by token, or a permutation undone by writing instead of reading."""
    indices = argument(node, 1)
    rows = lift.fact(argument(node, 2))
    if len(indices) != 1 or indices[0] is None:
        if rows.expr.hard:
            raise Conflict("expert rows are written by several indices at once")
        return None
    index = lift.fact(indices[0])
    if argument(node, 3, "accumulate", False):
        if rows.expr.hard:
            return _combine(lift, node, rows, index, 0)
        _demand_no_expert_choice(lift, indices[0])
        return None
    if len(index.dims) == 1 and pick_of(index.dims[0]) is not None and rows.expr.hard:
        return write_back(lift, node, index, rows)
    order = index.dims[0] if len(index.dims) == 1 else ()
    in_place = isinstance(index.expr, Pos) and index.expr.group == order and arrival(order) is not None
    if not isinstance(index.expr, Pos) or len(order) != 1 or not (in_place or isinstance(order[0], Perm)):
        if rows.expr.hard:
            raise Conflict("expert rows overwrite the output: of slots with the same token only one survives")
        return None
    if not in_place and isinstance(order[0], Perm) and order[0].over != index.expr.group:
        if rows.expr.hard or isinstance(rows.expr, Pos):
            raise Conflict("rows are written by an index that is no complete permutation of the slots")
        return None
    rows_written = value(argument(node, 0)).shape[0]
    if not any(
        sizes.same(rows_written, size) for size in (group_size(order), value(argument(node, 2)).shape[0])
    ):
        raise Conflict("a permutation of the slots is written into a tensor with other rows besides")
    if not isinstance(rows.expr, Pos) and not rows.expr.hard and not rows.sorted:
        return None
    unifier = Unifier()
    unifier.unify(order, rows.dims[0])
    group = unifier.resolve(index.expr.group)
    return Fact(unifier.expr(rows.expr), (group, *(unifier.resolve(g) for g in rows.dims[1:])))


def _demand_no_expert_choice(lift: Lifting, index_node: Node) -> None:
    """Rows that mean nothing here are accumulated: say so if it is a known other kind of routing."""
    index = lift.fact(index_node).expr
    if isinstance(index, Leaf) and topk_of(index.node)[0] is not None:
        raise Conflict(f"rows are accumulated by {describe_index(index_node, index)}", index_node)


def _combine(lift: Lifting, node: Node, rows: Fact, index: Fact, dim: int) -> Fact:
    if len(index.dims) != 1 or dim != 0:
        raise Conflict("expert rows are accumulated along a dimension that is not the first")
    base_node, added = argument(node, 0), argument(node, 2 if op_name(node) == "aten::index_put" else 3)
    unifier, token = _token_of_each(rows, index, _index_node(node), value(base_node).shape[0])
    _demand_same_rows(value(base_node), value(added))
    base = lift.fact(base_node)
    zero = isinstance(base.expr, Const) and base.expr.value == 0
    if (pick := pick_of(unifier.resolve(rows.dims[0]))) is not None:
        own = Fact(unifier.expr(rows.expr), tuple(unifier.resolve(group) for group in rows.dims))
        return add_case(lift, node, base_node, own, token, pick)
    return _accumulated(node, rows, unifier, token, None if zero else base_node, value(added).dtype)


def _token_of_each(rows: Fact, index: Fact, index_node: Node, size: Size) -> tuple[Unifier, Group]:
    """(rows and index brought together, the token's axes), for an index that holds the token of each row."""
    if not isinstance(index.expr, Pos):
        what = describe_index(index_node, index.expr)
        raise Conflict(f"expert rows are accumulated by {what}, not by the token of each slot", index_node)
    unifier = Unifier()
    unifier.unify(index.dims[0], rows.dims[0])
    token = unifier.resolve(index.expr.group)
    slots = group_axes(unifier.resolve(rows.dims[0]))
    if not all(isinstance(digit, Axis) for digit in token) or not set(token) <= slots:
        raise Conflict("expert rows are accumulated by an index that is not the token of each slot")
    if not sizes.same(size, group_size(token)):
        raise Conflict("expert rows are accumulated into an output with other rows than the tokens")
    return unifier, token


def _accumulated(
    node: Node, rows: Fact, unifier: Unifier, token: Group, base: Node | None, terms: torch.dtype | None
) -> Fact:
    order = rows.dims[0][0] if rows.sorted else None
    listed = order.over if isinstance(order, Perm) else rows.dims[0]
    over = tuple(a for a in unifier.resolve(listed) if isinstance(a, Axis) and a not in token)
    total = Sum(unifier.expr(rows.expr), over, node, base, terms)
    return Fact(total, (token, *(unifier.resolve(g) for g in rows.dims[1:])))


def accumulated(lift: Lifting, node: Node, rows: Fact, index_node: Node, size: Size) -> Fact:
    """Rows [.., H] in an order by expert, each added to the row of zeros [size, H] that a tensor of tokens names."""
    index = lift.fact(index_node)
    if len(index.dims) != 1:
        raise Conflict("expert rows are accumulated by an index of several dimensions", index_node)
    unifier, token = _token_of_each(rows, index, index_node, size)
    return _accumulated(node, rows, unifier, token, None, None)


def weighted_rows(lift: Lifting, node: Node, rows: Fact, weights: Node) -> Fact:
    """Rows [.., H] times one weight each, in the same order."""
    weight, unifier = lift.fact(weights), Unifier()
    for have, want in zip(rows.dims[:1], weight.dims, strict=True):
        unifier.unify(have, want)
    expr = Op(torch.ops.aten.mul.Tensor, (unifier.expr(rows.expr), unifier.expr(weight.expr)), (), node)
    return Fact(expr, tuple(unifier.resolve(group) for group in rows.dims))


def _demand_same_rows(base: torch.Tensor, rows: torch.Tensor) -> None:
    """Demand that rows are added whole: neither broadcast over the output's features nor a part of them."""
    if base.dim() != rows.dim() or not all(
        sizes.same(a, b) for a, b in zip(base.shape[1:], rows.shape[1:], strict=True)
    ):
        raise Conflict("expert rows are added to an output with other features")


def _index_node(node: Node) -> Node:
    found = argument(node, 1)[0] if isinstance(argument(node, 1), list | tuple) else argument(node, 2)
    assert isinstance(found, Node)
    return found


@rule("aten::mean")
def mean(lift: Lifting, node: Node) -> Outcome:
    """The mean over a row's own features is a part of its norm; over anything else it is no sum."""
    fact = lift.fact(argument(node, 0))
    rank = len(fact.dims)
    dims = argument(node, 1, "dim", None)
    gone = (
        {int(d) % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))} if rank else set()
    )
    over = tuple(axis for d in sorted(gone) for axis in fact.dims[d] if isinstance(axis, Axis))
    if len(over) != sum(len(fact.dims[d]) for d in gone) or _features_only(fact.expr, over) is None:
        return no_sum(lift, node)
    keep = bool(argument(node, 2, "keepdim", False))
    rest = tuple(() if d in gone else g for d, g in enumerate(fact.dims) if keep or d not in gone)
    return Fact(Mean(fact.expr, over, node), rest)


@rule("aten::amax", "aten::max", "aten::amin", "aten::prod", "aten::logsumexp")
def no_sum(lift: Lifting, node: Node) -> Outcome:
    """Reductions that are no sum: a meaning that the fused node doesn't have."""
    fact = lift.fact(argument(node, 0))
    axes = tuple(axis for group in fact.dims for axis in group if isinstance(axis, Axis))
    if scored_experts(lift, fact.expr, axes).hard:
        raise Conflict(f"expert rows are reduced by {op_name(node).removeprefix('aten::')}, not by a sum")
    return None


# --- Ascend's operators ----------------------------------------------------------------------------------


@rule("npu::npu_moe_finalize_routing")
def npu_finalize_routing(lift: Lifting, node: Node) -> Outcome:
    """skip1 + skip2 + sum over k of scales * (row + bias of its expert); rows by a k-major or token-major index.

    Modes 0 and 1 are k-major, 2 and 3 token-major. Where a slot has no row (index -1), modes 1 and 3 add nothing for
    it, as the node does; the others don't define it. Rows padded to a capacity are in no order by expert.
    """
    rows = lift.fact(argument(node, 0))
    if not rows.expr.hard:
        return None
    mode = argument(node, 7, "drop_pad_mode", 0)
    if len(rows.dims) == 3 and not rows.dims[0] and mode in (1, 3):
        rows = Fact(rows.expr, rows.dims[1:])  # one block of rows, in an order by expert all the same
    skips = [argument(node, position) for position in (1, 2) if argument(node, position) is not None]
    if len(skips) > 1:
        raise Conflict("the finalize routing adds two tensors to the layer's output")
    scales = argument(node, 4)
    k = argument(node, 8, "k", 1) if scales is None else value(scales).shape[1]
    tokens = value(node).shape[0]
    by, adds_nothing = argument(node, 5), mode in (1, 3)
    slots = _slot_rows(lift, rows, by, [k, tokens] if mode < 2 else [tokens, k], adds_nothing)
    if mode < 2:
        slots = Fact(slots.expr, (slots.dims[1], slots.dims[0], slots.dims[2]))
    if (bias := argument(node, 3)) is not None:
        if mode in (1, 3):
            raise Conflict(f"the finalize routing adds a bias for slots without a row (drop_pad_mode={mode})")
        slots = _with_bias(lift, slots, bias, argument(node, 6))
    return weighted_sum(lift, node, slots, scales, skips[0] if skips else None)


@rule("npu::npu_moe_token_unpermute")
def npu_token_unpermute(lift: Lifting, node: Node) -> Outcome:
    """The sum over k of probs * row, by a token-major index; without probs each slot's row by itself."""
    rows = lift.fact(argument(node, 0))
    if not rows.expr.hard:
        return None
    if argument(node, 3, "padded_mode", False):
        raise Conflict("the token unpermutation takes rows of padded experts")
    probs = argument(node, 2, "probs")
    if probs is None:
        slots = value(node).shape[0]
        one = _slot_rows(lift, rows, argument(node, 1), [slots, 1])
        return Fact(one.expr, (one.dims[0], one.dims[2]))
    adds_nothing = _weighs_nothing_elsewhere(lift, argument(node, 1), probs)
    slots = _slot_rows(lift, rows, argument(node, 1), list(value(probs).shape), adds_nothing)
    return weighted_sum(lift, node, slots, probs, None)


def _weighs_nothing_elsewhere(lift: Lifting, index: Node, probs: Node) -> bool:
    """True where slots that have no row of their own are proved to have the weight 0."""
    by = lift.fact(index)
    some = among(by.expr.group) if isinstance(by.expr, Pos) else None
    return some is not None and is_zero_elsewhere(probs, some)


def _slot_rows(lift: Lifting, rows: Fact, index: Node, shape: list[Size], adds_nothing: bool = False) -> Fact:
    """Expert rows taken back into slot order, their first dimension as the two of `shape`.

    adds_nothing: slots without a row of their own add nothing.
    """
    by = lift.fact(index)
    if not isinstance(by.expr, Pos) or len(by.dims) != 1 or len(rows.dims) != 2:
        raise Conflict(f"expert rows are taken by {describe_index(index, by.expr)}", index)
    taken = take_by(rows, 0, by, adds_nothing)
    dims, binding = regroup(taken.dims, [*shape, group_size(rows.dims[1])])
    return Fact(bind(taken.expr, binding), tuple(bind_group(group, binding) for group in dims))


def _with_bias(lift: Lifting, slots: Fact, bias_node: Node, ids_node: Node) -> Fact:
    """row + bias[id] for [T, K, H] rows."""
    bias, ids = lift.fact(bias_node), lift.fact(ids_node)
    (expert,) = bias.dims[0] if len(bias.dims) == 2 and len(bias.dims[0]) == 1 else (None,)
    if not isinstance(expert, Axis) or not isinstance(bias.expr, Leaf) or not isinstance(ids.expr, Leaf):
        raise Conflict(
            "the bias of the finalize routing is not [experts, features] by a tensor of ids", bias_node
        )
    unifier = Unifier()
    for have, want in zip(slots.dims, (*ids.dims, bias.dims[1]), strict=True):
        unifier.unify(have, want)
    selected = bind(bias.expr, {expert: (At(unifier.expr(ids.expr), expert.size),)})
    expr = Op(torch.ops.aten.add.Tensor, (unifier.expr(slots.expr), unifier.expr(selected)))
    return Fact(expr, tuple(unifier.resolve(group) for group in slots.dims))


def weighted_sum(lift: Lifting, node: Node, slots: Fact, scales: Node | None, base: Node | None) -> Fact:
    """The sum over K of [T, K, H] rows, each times its scale."""
    unifier = Unifier()
    expr, dims = slots.expr, slots.dims
    if scales is not None:
        weight = lift.fact(scales)
        for have, want in zip(dims[:2], weight.dims, strict=True):
            unifier.unify(have, want)
        expr = Op(torch.ops.aten.mul.Tensor, (unifier.expr(expr), unifier.expr(weight.expr)), (), node)
    token, slot, features = (unifier.resolve(group) for group in dims)
    return Fact(Sum(expr, _summable(Fact(expr, dims), slot), node, base), (token, features))
