"""Views and copies: how an operator that moves elements changes the dims of a fact.

In: facts. Out: the same expressions over other dims. No MoE knowledge in here.
"""

from collections import deque
from collections.abc import Sequence

from torch.fx import Node

from moefuse.graph import sizes
from moefuse.graph.sizes import Size
from moefuse.patterns.axes import Axis, Digit, Dims, Group, Part, group_size
from moefuse.patterns.facts import Conflict, Count, Fact, Leaf
from moefuse.patterns.pieces import one_piece, order_of, pieces
from moefuse.patterns.rules import Lifting, Outcome, argument, op_name, rule, value
from moefuse.patterns.unify import Binding, bind, bind_group


def regroup(dims: Dims, shape: Sequence[Size]) -> tuple[Dims, Binding]:
    """Lay the digits of `dims`, in order, out over `shape`, splitting plain axes where needed.

    Returns the new dims and how axes were split. Raises Conflict where a size doesn't divide.
    """
    digits = deque(digit for group in dims for digit in group)
    shape = _known(digits, shape)
    binding: dict[Axis, Group] = {}
    result: list[Group] = []
    for position, size in enumerate(shape):
        group: list[Digit] = []
        need = size
        if sizes.same(size, 0):
            # no division says how many digits belong here: those that the rest of the shape leaves
            behind = sizes.product(shape[position + 1 :])
            group, need = _empty_group(digits, behind), 1
            if not digits and group and isinstance(axis := group[-1], Axis) and not sizes.is_one(behind):
                binding[axis] = (Axis(axis.size), Axis(behind))
                group[-1:], digits = binding[axis][:1], deque(binding[axis][1:])
        while not sizes.is_one(need):
            if not digits:
                raise Conflict(f"a view to {list(shape)} doesn't line up with the meaning of its input")
            digit = digits.popleft()
            if (rest := sizes.quotient(need, digit.size)) is not None:
                group.append(digit)
                need = rest
                continue
            tail_size = sizes.quotient(digit.size, need)
            if tail_size is None or not isinstance(digit, Axis):
                raise Conflict(f"a view to {list(shape)} cuts through an index of {digit.size} elements")
            head, tail = Axis(need), Axis(tail_size)
            binding[digit] = (head, tail)
            group.append(head)
            digits.appendleft(tail)
            break
        result.append(tuple(group))
    if digits:
        raise Conflict(f"a view to {list(shape)} doesn't line up with the meaning of its input")
    return tuple(result), _chase(binding)


def _empty_group(digits: deque[Digit], rest: Size) -> list[Digit]:
    """The digits of a dimension without elements: up to the first of size 0, and on to where those left make `rest`."""
    group: list[Digit] = []
    while digits and not (
        any(sizes.same(digit.size, 0) for digit in group) and sizes.same(group_size(tuple(digits)), rest)
    ):
        group.append(digits.popleft())
    return group


def _known(digits: Sequence[Digit], shape: Sequence[Size]) -> Sequence[Size]:
    """The shape, a single data-dependent size in terms of the digits: a view keeps the number of elements."""
    unknown = [i for i, size in enumerate(shape) if sizes.is_unbacked(size)]
    if len(unknown) != 1:
        return shape
    others = sizes.product(size for i, size in enumerate(shape) if i not in unknown)
    size = sizes.quotient(group_size(tuple(digits)), others)
    return shape if size is None else [size if i in unknown else other for i, other in enumerate(shape)]


def _chase(binding: dict[Axis, Group]) -> Binding:
    """A split tail may have been split again: resolve to the final digits."""

    def final(group: Group) -> Group:
        known = [(digit, binding.get(digit) if isinstance(digit, Axis) else None) for digit in group]
        return tuple(d for digit, split in known for d in (final(split) if split else (digit,)))

    return {axis: final(group) for axis, group in binding.items()}


@rule(
    "aten::view", "aten::reshape", "aten::_unsafe_view", "aten::unsqueeze", "aten::squeeze", "aten::flatten"
)
def view(lift: Lifting, node: Node) -> Outcome:
    """The same elements in the same order under another shape; `view(dtype)` is another meaning of the bits."""
    fact = lift.fact(argument(node, 0))
    if value(argument(node, 0)).dtype != value(node).dtype:
        if fact.expr.hard:
            raise Conflict("the bits of expert rows are taken for another dtype")
        return None
    before, shape = value(argument(node, 0)).shape, value(node).shape
    # A dispatch over ranks gives a tensor of more rows than there are slots: whole rows alone are left as they lie.
    room = bool(fact.dims) and fact.sorted and not sizes.same(group_size(fact.dims[0]), before[0])
    kept = 1 if room and len(shape) and sizes.same(before[0], shape[0]) else 0
    dims, binding = regroup(fact.dims[kept:], shape[kept:])
    every = (*fact.dims[:kept], *dims)
    return Fact(bind(fact.expr, binding), tuple(bind_group(group, binding) for group in every))


@rule("aten::clone", "aten::alias", "aten::contiguous", "aten::lift_fresh_copy", "aten::copy")
def same(lift: Lifting, node: Node) -> Outcome:
    """A copy or an alias means what its source means (`copy(self, src)`: what src means)."""
    source = argument(node, 1 if op_name(node) == "aten::copy" else 0)
    if value(source) is None or value(source).shape != value(node).shape:
        return None
    return lift.fact(source)


@rule("aten::permute", "aten::transpose", "aten::t", "aten::numpy_T")
def permute(lift: Lifting, node: Node) -> Outcome:
    """Dimensions change places."""
    fact = lift.fact(argument(node, 0))
    rank = len(fact.dims)
    order = list(range(rank))
    name = op_name(node)
    if name == "aten::permute":
        order = [int(d) % rank for d in argument(node, 1)]
    elif name == "aten::transpose":
        a, b = int(argument(node, 1)) % rank, int(argument(node, 2)) % rank
        order[a], order[b] = b, a
    else:
        order.reverse()
    return Fact(fact.expr, tuple(fact.dims[d] for d in order))


@rule("aten::expand")
def expand(lift: Lifting, node: Node) -> Outcome:
    """New or widened dimensions: axes on which the value doesn't depend."""
    fact = lift.fact(argument(node, 0))
    shape = value(node).shape
    padded: Dims = ((),) * (len(shape) - len(fact.dims)) + fact.dims
    return Fact(
        fact.expr,
        tuple(
            (Axis(size),) if not group and not sizes.is_one(size) else group
            for group, size in zip(padded, shape, strict=True)
        ),
    )


@rule("aten::repeat")
def repeat(lift: Lifting, node: Node) -> Outcome:
    """Whole copies along a dimension: an outer axis on which the value doesn't depend."""
    fact = lift.fact(argument(node, 0))
    repeats: Sequence[Size] = [value(r) for r in argument(node, 1)]
    padded: Dims = ((),) * (len(repeats) - len(fact.dims)) + fact.dims
    outer = [() if sizes.is_one(r) else (Axis(r),) for r in repeats]
    return Fact(fact.expr, tuple(o + group for o, group in zip(outer, padded, strict=True)))


def cut(fact: Fact, dim: int, start: int, length: Size, step: int = 1, keep: bool = True) -> Fact:
    """The fact of elements start, start + step, ... of a dimension. Raises Conflict for rows in sorted order."""
    group = fact.dims[dim]
    if not group:
        dims = fact.dims if keep else fact.dims[:dim] + fact.dims[dim + 1 :]
        return Fact(fact.expr, dims)
    outer, inner = group[0], group[1:]
    block = group_size(inner)
    if inner and length == 1 and isinstance(block, int) and all(isinstance(digit, Axis) for digit in group):
        # One element is one of each digit.
        dims = (*fact.dims[:dim], group[:1], inner, *fact.dims[dim + 1 :])
        split = cut(cut(Fact(fact.expr, dims), dim, start // block, 1, keep=False), dim, start % block, 1)
        return split if keep else Fact(split.expr, (*split.dims[:dim], *split.dims[dim + 1 :]))
    if inner and step == 1 and isinstance(block, int) and isinstance(length, int):
        # A slice of whole blocks is a slice of the outermost digit.
        if start % block or length % block:
            raise Conflict(f"a slice of {length} from {start} cuts through an index of {block} elements")
        start, length = start // block, length // block
    elif inner:
        raise Conflict("a strided slice of a dimension with several indices")
    if not isinstance(outer, Axis):
        raise Conflict("rows in sorted order are sliced")
    kept: Group = () if sizes.is_one(length) else (Axis(length),)
    part = Part(kept, start, step, outer.size)
    bound = bind(fact.expr, {outer: (part,)})
    new_dim: Dims = (kept + inner,) if keep else ()
    return Fact(bound, fact.dims[:dim] + new_dim + fact.dims[dim + 1 :])


def _plain(lift: Lifting, fact: Fact) -> bool:
    """A slice of something opaque is better taken as opaque itself: the node is there to be used as it is."""
    return not lift.forced and isinstance(fact.expr, Leaf) and not fact.sorted and not fact.expr.selectors


@rule("aten::slice")
def slice_(lift: Lifting, node: Node) -> Outcome:
    """A slice; one that takes everything is the same fact."""
    fact = lift.fact(argument(node, 0))
    dim = argument(node, 1, "dim", 0) % len(fact.dims)
    before, after = value(argument(node, 0)).shape[dim], value(node).shape[dim]
    step = argument(node, 4, "step", 1)
    if step == 1 and sizes.same(before, after):
        return fact
    if isinstance(fact.expr, Count) and step == 1 and argument(node, 2, "start", 0) in (0, None):
        # bincount may return more entries than `minlength`: cutting them off leaves what the fact says.
        return fact if argument(node, 3, "end") == group_size(fact.dims[dim]) else None
    if _plain(lift, fact):
        return None
    if order_of(fact.dims[dim]) is not None and any(isinstance(bound, Node) for bound in node.args[2:4]):
        return one_piece(lift, node, fact, dim)
    start = argument(node, 2, "start", 0) or 0
    if not isinstance(start, int) or not isinstance(before, int) or not isinstance(after, int):
        raise Conflict("a slice whose bounds are not static")
    start = max(start + before, 0) if start < 0 else min(start, before)
    return cut(fact, dim, start, after, step)


@rule("aten::select")
def select(lift: Lifting, node: Node) -> Outcome:
    """One element of a dimension."""
    fact = lift.fact(argument(node, 0))
    if _plain(lift, fact):
        return None
    dim, index = int(argument(node, 1)) % len(fact.dims), argument(node, 2)
    size = value(argument(node, 0)).shape[dim]
    if not isinstance(index, int) or not isinstance(size, int):
        raise Conflict("one element is selected at an index that is not static")
    return cut(fact, dim, index % size, 1, keep=False)


@rule("aten::split", "aten::chunk", "aten::split_with_sizes", "aten::unbind", "aten::tensor_split")
def split(lift: Lifting, node: Node) -> Outcome:
    """Consecutive slices of one dimension."""
    fact = lift.fact(argument(node, 0))
    if _plain(lift, fact):
        return None
    keep = op_name(node) != "aten::unbind"
    dim = (argument(node, 2, "dim", 0) if keep else argument(node, 1, "dim", 0)) % len(fact.dims)
    lengths = argument(node, 1)
    if (
        order_of(fact.dims[dim]) is not None
        and isinstance(lengths, list | tuple)
        and Node in map(type, lengths)
    ):
        return pieces(lift, node, fact, dim)
    facts: list[Fact | None] = []
    start = 0
    for piece in value(node):
        length = piece.shape[dim] if keep else 1
        if not isinstance(length, int):
            raise Conflict("a split whose sizes are not static")
        facts.append(cut(fact, dim, start, length, keep=keep))
        start += length
    return tuple(facts)
