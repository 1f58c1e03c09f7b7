"""Arithmetic of ids and counts that go to other ranks, and of those that came from them.

In: facts. Out: how many slots go to each rank, and which of its own experts a rank's row is for. What integer
arithmetic means is found by doing it on every id there is, not by how it is spelled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.patterns.axes import Arrived, Axis, Group, Part, Perm, group_size
from moefuse.patterns.facts import Count, Expr, Fact, Leaf, Op, Tally
from moefuse.patterns.rank_facts import Among, Block, Inflow, Local, Owned, Spread
from moefuse.patterns.rules import op_name, value

_UNTAGGED = ("aten::floor_divide", "aten::_to_copy", "aten::to")
"""Operators that work element by element and don't say so."""

MOST_EXPERTS = 1 << 16
"""Programs over ids are run on all of them; more experts than that are not looked at."""


def arrival(group: Group) -> Arrived | None:
    """How the rows of a dimension came from all ranks, if they did: as they lie, or sorted since."""
    (digit,) = group if len(group) == 1 else (None,)
    if isinstance(digit, Perm):
        return arrival(digit.over)
    return digit if isinstance(digit, Arrived) else None


def arrival_of(fact: Fact) -> Arrived | None:
    """How the rows of a fact came from all ranks, if they did."""
    return next((rows for group in fact.dims if (rows := arrival(group)) is not None), None)


def slots_of(group: Group) -> Group:
    """The slots that rows are of, where they came from all ranks; otherwise the group itself."""
    (rows,) = group if len(group) == 1 else (None,)
    return rows.order.over if isinstance(rows, Arrived) else group


def local_of(rows: Arrived) -> Local | None:
    """The number of each row's expert among those of this rank; None where ranks sent rows in no order by expert."""
    key = rows.order.key
    if not isinstance(key, Leaf) or key.node is not rows.ids:
        return None
    return Local(Leaf(key.node, key.index, sent=True), rows.ranks)


def same_ids(a: Expr, b: Expr) -> bool:
    """True when both are the same ids, or a rank's numbers of its own experts made from the same ones alike."""
    if isinstance(a, Spread | Among) and type(a) is type(b):
        return isinstance(b, Spread | Among) and a.node is b.node
    if isinstance(a, Local) and isinstance(b, Local):
        return a.ids.node is b.ids.node and a.ranks == b.ranks
    return isinstance(a, Leaf) and isinstance(b, Leaf) and a.node is b.node


# --- ids of rows that came here --------------------------------------------------------------------------


def as_local(expr: Expr, rows: Arrived) -> Expr:
    """`Local` where arithmetic gives it on every id that a row here can have; otherwise the expression as it is."""
    sources, ranks = dict.fromkeys(_integers(expr)), rows.ranks
    if len(sources) != 1 or ranks.world * ranks.experts > MOST_EXPERTS:
        return expr
    (source,) = sources
    if isinstance(source, Local):
        ids, numbers = source.ids, torch.arange(ranks.experts)
        wanted = numbers
    elif isinstance(source, Block):
        ids, numbers = source.ids, torch.arange(ranks.world * ranks.experts)
        wanted = numbers // ranks.world if source.by_expert else numbers % ranks.experts
    elif isinstance(source, Leaf) and source.sent and source.node is rows.ids:
        ids, numbers = source, torch.arange(ranks.first, ranks.first + ranks.experts)
        wanted = numbers - ranks.first
    else:
        return expr
    result = _evaluated(expr, {source: numbers})
    return Local(ids, ranks) if result is not None and torch.equal(result, wanted) else expr


def numbered(fact: Fact) -> Fact:
    """The fact of ids as numbers of this rank's experts, where they are: on rank 0 no arithmetic is needed for it."""
    rows = arrival_of(fact)
    return (
        fact
        if rows is None or not isinstance(fact.expr, Leaf)
        else Fact(as_local(fact.expr, rows), fact.dims)
    )


def _integers(expr: Expr) -> Iterator[Expr]:
    """What integer arithmetic starts from."""
    if not isinstance(expr, Op):
        yield expr
    for part in expr.parts() if isinstance(expr, Op) else ():
        yield from _integers(part)


def _evaluated(expr: Expr, known: dict[Expr, Tensor]) -> Tensor | None:
    if expr in known:
        return known[expr]
    if not isinstance(expr, Op):
        return None
    args = [_evaluated(arg, known) if isinstance(arg, Expr) else arg for arg in expr.args]
    if any(arg is None for arg in args):
        return None
    return _whole(expr.target(*args, **dict(expr.kwargs)))


def _whole(result: object) -> Tensor | None:
    """An integer tensor as int64."""
    if not isinstance(result, Tensor) or result.is_floating_point() or result.dtype == torch.bool:
        return None
    return result.long()


def by_expert(tensor: Fact, dim: int, ids: Expr) -> Fact:
    """A tensor of experts with an axis for them also where rows, by `ids`, are those of one expert alone.

    Its dimension `dim` has a size of 1 there and so no axis; it must be the first in memory.
    """
    leaf = tensor.expr
    if not _of_one_expert(ids) or not isinstance(leaf, Leaf) or leaf.selectors or not tensor.dims:
        return tensor
    if tensor.dims[dim] or not leaf.index or leaf.index[0] or value(leaf.node).shape[0] != 1:
        return tensor
    expert = Axis(1)
    dims = (*tensor.dims[:dim], (expert,), *tensor.dims[dim + 1 :])
    return Fact(replace(leaf, index=((expert,), *leaf.index[1:])), dims)


def _of_one_expert(ids: Expr) -> bool:
    """True for numbers of a rank's experts, or of a part of all, where that is one."""
    if isinstance(ids, Local | Spread):
        return ids.ranks.experts == 1
    return isinstance(ids, Among) and ids.experts == 1


# --- ids and the ranks that own their experts ------------------------------------------------------------


def owners(ids: Node, numbers: Tensor) -> tuple[Node, Tensor] | None:
    """(the tensor that `ids` is made from, one operator up; what becomes of `numbers` in it); None for other operators.

    Only of operators that work element by element on one integer tensor.
    """
    if not isinstance(ids.target, torch._ops.OpOverload):
        return None
    if torch.Tag.pointwise not in ids.target.tags and op_name(ids) not in _UNTAGGED:
        return None
    tensors = [arg for arg in ids.all_input_nodes if isinstance(value(arg), Tensor)]
    if len(tensors) != 1 or len(ids.all_input_nodes) != 1 or value(tensors[0]).is_floating_point():
        return None
    args, kwargs = torch.fx.map_arg((ids.args, ids.kwargs), lambda node: numbers)
    result = _whole(ids.target(*args, **{k: v for k, v in kwargs.items() if k not in ("device", "layout")}))
    return None if result is None or result.shape != numbers.shape else (tensors[0], result)


def carried(chain: Sequence[Node], numbers: Tensor) -> Tensor:
    """What becomes of numbers in operators one after the other, each of which `owners` knows."""
    for node in chain:
        step = owners(node, numbers)
        assert step is not None
        numbers = step[1]
    return numbers


def width_of(numbers: Tensor) -> int | None:
    """n, where the numbers of experts 0, 1, 2, ... are those divided by n; every rank has n of them."""
    width = int((numbers == 0).sum())
    even = width > 0 and len(numbers) % width == 0
    return width if even and torch.equal(numbers, torch.arange(len(numbers)) // width) else None


# --- counts ----------------------------------------------------------------------------------------------


def summed_counts(fact: Fact, over: set[Axis]) -> Fact | None:
    """Counts per expert summed up per rank, or those of all ranks per expert; None for any other sum."""
    expr = fact.expr
    rest = tuple(group for group in fact.dims if not set(group) & over)
    if isinstance(expr, Count) and isinstance(expr.ids, Leaf):
        if not over:
            return fact
        kept, gone = _cut_off(expr.at, over)
        width = group_size(gone)
        if not kept or not isinstance(width, int):
            return None
        return Fact(Owned(expr.ids, kept, width), rest)
    if not isinstance(expr, Inflow):
        return None
    if not over:
        return fact
    if expr.at is not None and over == set(expr.at):
        return Fact(Inflow(expr.ids, expr.ranks, expr.source, None), rest)
    every = over == set(expr.source) and group_size(expr.source) == expr.ranks.world
    if every and expr.at is not None and group_size(expr.at) == expr.ranks.experts:
        return Fact(Count(Local(expr.ids, expr.ranks), expr.at), rest)
    return None


def _cut_off(at: Group, over: set[Axis]) -> tuple[Group, Group]:
    """The group without its last digits, and those, if they are what the sum runs over; otherwise nothing is kept."""
    kept = tuple(digit for digit in at if digit not in over)
    gone = at[len(kept) :]
    plain = all(isinstance(digit, Axis) for digit in at)
    return (kept, gone) if plain and at[: len(kept)] == kept and set(gone) == over else ((), ())


def tally_of_rank(expr: Owned) -> Tally | None:
    """How many slots one rank's experts have, if the counts are those of one rank."""
    rank = one_of(expr.at)
    if rank is None:
        return None
    return Tally(expr.ids, frozenset(range(rank * expr.experts, (rank + 1) * expr.experts)))


def one_of(group: Group) -> int | None:
    """The number of the one element that a group of digits stands for."""
    (part,) = group if len(group) == 1 else (None,)
    return part.start if isinstance(part, Part) and not part.group else None


def is_one_inflow(expr: Expr) -> bool:
    """True for the number of rows that come from one rank."""
    return isinstance(expr, Inflow) and one_of(expr.source) is not None and not expr.at


def run_of(expr: Expr) -> tuple[int, int] | None:
    """(rank, this rank's expert), where an expression is the number of rows that come from the one for the other."""
    if not isinstance(expr, Inflow) or expr.at is None:
        return None
    rank = 0 if expr.ranks.world == 1 else one_of(expr.source)
    expert = 0 if expr.ranks.experts == 1 else one_of(expr.at)
    return (rank, expert) if rank is not None and expert is not None else None
