"""Counts of ids: slots per expert, running counts, differences of them, comparisons with a capacity.

The ids that are counted must be all of them, each exactly once, in whatever order.
"""

from collections.abc import Iterator

import torch
from torch.fx import Node

from moefuse.patterns.axes import Axis, Dims, Group, Part, group_size
from moefuse.patterns.capacity import running_count
from moefuse.patterns.facts import Conflict, Const, Count, Dense, Expr, Fact, Leaf, Offs, OneHot, group_axes
from moefuse.patterns.pointwise import EXACT, is_mask, pointwise, strip_casts
from moefuse.patterns.rank_facts import Inflow, Local
from moefuse.patterns.ranks import (
    MOST_EXPERTS,
    arrival,
    arrival_of,
    carried,
    numbered,
    owners,
    same_ids,
    summed_counts,
)
from moefuse.patterns.router import chosen_from, distinct
from moefuse.patterns.rules import Lifting, Outcome, argument, is_float, op_name, rule, value
from moefuse.patterns.runs import begins_of, ends_of
from moefuse.patterns.unify import Unifier


def covers(fact: Fact) -> Leaf | Local | None:
    """The integer leaf of which the fact lists every element exactly once, in whatever order.

    `Local` where it lists every row that came to this rank's experts once.
    """
    leaf = numbered(fact).expr
    if isinstance(leaf, Local):
        return leaf if len(fact.dims) == 1 and arrival(fact.dims[0]) is not None else None
    if not isinstance(leaf, Leaf) or is_float(leaf.node) or arrival_of(fact) is not None:
        return None
    index = [digit for group in leaf.index for digit in group]
    if not all(isinstance(digit, Axis) for digit in index) or len(set(index)) != len(index):
        return None
    listed: set[Axis] = set()
    for group in fact.dims:
        listed |= group_axes(group)
    return leaf if listed == set(index) else None


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
    beyond = torch.histc(torch.tensor([float(bins)]), bins, low, high)
    if bool(beyond.any()) and isinstance(ids, Leaf) and not _all_below(lift, ids, bins):
        raise Conflict(
            f"histc over {low}..{high} counts an id {bins} as one of {bins - 1}, and no top-k over {bins} made the ids"
        )
    group: Group = () if bins == 1 else (Axis(bins),)
    return Fact(Count(ids, group), (group,))


def _all_below(lift: Lifting, leaf: Leaf, bins: int) -> bool:
    """True for ids of a top-k over no more than `bins`, or what arithmetic makes of the ids of one."""
    known = [(chosen_from(leaf), list[Node]())]
    known += [(chosen_from(ids), chain) for ids, _, chain in made_from(lift, leaf)]
    found = next(((count, chain) for count, chain in known if count is not None), None)
    if found is None or found[0] > MOST_EXPERTS:
        return False
    return bool((carried(found[1], torch.arange(found[0])) < bins).all())


def made_from(lift: Lifting, leaf: Leaf) -> Iterator[tuple[Leaf, Dims, list[Node]]]:
    """The integer tensors from which elementwise arithmetic makes another one, each with the operators from there on.

    Their dims say which element each one is made from; every element of theirs is there once.
    """
    chain: list[Node] = []
    node = leaf.node
    while (step := owners(node, torch.zeros(1, dtype=torch.int64))) is not None:
        chain, node = [node, *chain], step[0]
        fact = lift.fact(node)
        ids = covers(fact)
        if not isinstance(ids, Leaf):
            return
        yield ids, fact.dims, chain
        if ids.node is not node:
            return


@rule("aten::bincount")
def bincount(lift: Lifting, node: Node) -> Outcome:
    """Slots per expert; the output has at least `minlength` entries, more only for ids beyond them."""
    ids = covers(lift.fact(argument(node, 0)))
    length = argument(node, 2, "minlength", 0)
    if ids is None or argument(node, 1, "weights") is not None or length < 1:
        return None
    group: Group = () if length == 1 else (Axis(length),)
    return Fact(Count(ids, group), (group,))


def ones_added(lift: Lifting, node: Node, index: Node, added: Fact) -> Fact | None:
    """zeros [E] with 1 added at every id: slots per expert; None for any other sum."""
    base, alpha = lift.fact(argument(node, 0)), node.kwargs.get("alpha", 1)
    if base.expr != Const(0.0) or added.expr != Const(1.0) or alpha != 1 or value(node).dim() != 1:
        return None
    ids = covers(lift.fact(index)) if value(index).dim() == 1 and value(node).dtype in EXACT else None
    return None if ids is None else Fact(Count(ids, base.dims[0]), base.dims)


@rule("aten::cumsum")
def cumsum(lift: Lifting, node: Node) -> Outcome:
    """Running counts: where each expert's rows end in sorted order."""
    fact = lift.fact(argument(node, 0))
    target = value(node).dtype
    if target in EXACT and (ends := ends_of(fact)) is not None:
        return ends
    if not isinstance(fact.expr, Count) or fact.dims != (fact.expr.at,) or target not in EXACT:
        return None
    return Fact(Offs(fact.expr.ids, fact.expr.at), fact.dims)


def padding_of(lift: Lifting, offsets: object) -> int:
    """n, where offsets are running sums of counts that were rounded up to multiples of n; 0 for any others."""
    node, chain = offsets, list[Node]()
    while isinstance(node, Node) and op_name(node) == "aten::_to_copy":
        node = argument(node, 0)
    if not isinstance(node, Node) or op_name(node) != "aten::cumsum":
        return 0
    node = argument(node, 0)
    while not isinstance(lift.fact(node).expr, Count):
        step = owners(node, torch.zeros(1, dtype=torch.int64))
        if step is None:
            return 0
        chain, node = [node, *chain], step[0]
    counts = torch.arange(1, 1025)
    rounded = carried(chain, counts)
    unit = int(rounded[0])
    return unit if unit > 1 and torch.equal(rounded, -(-counts // unit) * unit) else 0


@rule("aten::lt", "aten::le", "aten::gt", "aten::ge")
def compare(lift: Lifting, node: Node) -> Outcome:
    """A comparison; with a number, of a slot's place in its expert's queue: a capacity, which drops slots."""
    limit = argument(node, 1)
    if not isinstance(limit, int | float):
        return pointwise(lift, node)
    queue = running_count({argument(node, 0)}, lambda sums: _choices(lift.fact(argument(sums, 0)).expr))
    if queue is not None:
        raise Conflict(
            f"slots are counted expert by expert (`{queue.name}`) and compared with a capacity of {limit}: "
            "those beyond it are dropped"
        )
    return pointwise(lift, node)


def _choices(expr: Expr) -> bool:
    return isinstance(expr, OneHot) or is_mask(expr)


@rule("aten::sub")
def subtract(lift: Lifting, node: Node) -> Outcome:
    """A difference; of neighbouring running counts it is the counts again."""
    both = [lift.fact(arg) for arg in node.args] if len(node.args) == 2 and not node.kwargs else []
    if len(both) == 2 and (begins := begins_of(*both)) is not None:
        return begins
    if len(both) != 2 or not all(isinstance(fact.expr, Offs) and len(fact.dims) == 1 for fact in both):
        return pointwise(lift, node)
    unifier = Unifier()
    dims = (unifier.unify(both[0].dims[0], both[1].dims[0]),)
    ends, before = (unifier.expr(fact.expr) for fact in both)
    assert isinstance(ends, Offs)
    assert isinstance(before, Offs)
    here, there = (_part(expr.at) for expr in (ends, before))
    if here is None or there is None or not same_ids(ends.ids, before.ids):
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
        if (ids is not None and not same_ids(fact.expr.ids, ids)) or (total or part.size) != part.size:
            return None
        ids, total, length = fact.expr.ids, part.size, group_size(part.group)
        if not isinstance(length, int):
            return None
        begin += length
    if ids is None or begin != total:
        return None
    at: Group = (Axis(begin),)
    return Fact(Count(ids, at), (at,))


def count_of(fact: Fact, over: set[Axis]) -> Fact | None:
    """Counts, if the sum of the fact over the axes counts every slot of some ids once; otherwise None."""
    expr = strip_casts(fact.expr)
    if isinstance(expr, Count | Inflow):
        return summed_counts(fact, over)
    if isinstance(expr, OneHot):
        ids, counted, at = expr.ids, over, expr.at
    elif isinstance(expr, Dense) and is_mask(expr):
        ids, counted, at = expr.ids, over | set(expr.slots), expr.at
    else:
        return None
    if not isinstance(ids, Leaf) or covers(Fact(ids, (tuple(counted),))) is None:
        return None
    if isinstance(expr, Dense) and not distinct(ids, expr.slots):
        raise Conflict("ids may repeat within a token: scattered ones count such a token once")
    return Fact(Count(ids, at), tuple(g for g in fact.dims if not group_axes(g) & over))
