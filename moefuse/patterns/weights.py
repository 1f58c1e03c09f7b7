"""How an expert weight lies in memory: which dimension is the expert, which is contracted, which rows are gate and up.

In: the leaves of the expert GEMMs. Out: layouts, read off the axes and never guessed from sizes.
"""

import itertools
from collections.abc import Callable, Iterable

from torch.fx import Node

from moefuse.graph import sizes
from moefuse.ops.spec import GateUp
from moefuse.patterns.axes import At, Axis, Digit, Group, Part, group_size
from moefuse.patterns.facts import Conflict, Leaf, group_axes
from moefuse.patterns.products import Linear
from moefuse.patterns.rules import value

Span = tuple[int, int, sizes.Size]
"""(start, step, size of the dimension): which rows of a weight something reads."""


def affine(group: Group, axes: tuple[Axis, ...]) -> tuple[int, int] | None:
    """(start, step) of a group that counts evenly through its dimension as `axes` run, in this order; else None."""
    found = _affine(group)
    if found is None:
        return None
    start, steps = found
    if tuple(axis for axis, _ in steps) != axes:
        return None
    # Several axes are one count if each strides over all that is inside it.
    for (_, outer), (axis, inner) in itertools.pairwise(steps):
        if not isinstance(axis.size, int) or outer != inner * axis.size:
            return None
    return start, steps[-1][1] if steps else 1


def _affine(group: Group) -> tuple[int, list[tuple[Axis, int]]] | None:
    start, steps = 0, list[tuple[Axis, int]]()
    radix = 1
    for digit in reversed(group):
        if isinstance(digit, Axis):
            steps.insert(0, (digit, radix))
        elif isinstance(digit, Part):
            inner = _affine(digit.group)
            if inner is None:
                return None
            start += radix * (digit.start + digit.step * inner[0])
            steps[:0] = [(axis, radix * digit.step * step) for axis, step in inner[1]]
        else:
            return None
        if not isinstance(digit.size, int):
            return None if digit is not group[0] else (start, steps)
        radix *= digit.size
    return start, steps


def entry_of(leaf: Leaf, axes: Iterable[Axis]) -> Group:
    """The digits of a leaf's index that run over the axes: of one dimension, or of some that lie as one in memory."""
    wanted = set(axes)
    dims = [dim for dim, group in enumerate(leaf.index) if group_axes(group) & wanted]
    groups = [
        tuple(d for d in leaf.index[dim] if not isinstance(d, At) and group_axes((d,)) <= wanted)
        for dim in dims
    ]
    whole = all(found == leaf.index[dim] for found, dim in zip(groups, dims, strict=True))
    joined = whole and all(joinable(leaf.node, a, b) for a, b in itertools.pairwise(dims))
    if not dims or (len(dims) > 1 and not joined):
        raise Conflict(f"`{leaf.node.name}` is not a tensor with one dimension per role")
    return tuple(digit for group in groups for digit in group)


def joinable(node: Node, first: int, second: int) -> bool:
    """True for neighbouring dimensions that a view can make one."""
    val = value(node)
    return second == first + 1 and sizes.same(val.stride(first), val.shape[second] * val.stride(second))


def span(leaf: Leaf, axes: tuple[Axis, ...]) -> Span:
    """Which part of its dimension a weight or bias is read at as `axes` run. Conflict for anything but a slice."""
    entry = entry_of(leaf, axes)
    found = affine(entry, axes)
    if found is None:
        raise Conflict(f"the features of `{leaf.node.name}` are taken in another order, or not as a slice")
    return (*found, group_size(entry))


def demand_whole(leaf: Leaf, axes: tuple[Axis, ...]) -> None:
    """Demand that a dimension of a weight or bias is read whole and in order."""
    start, step, size = span(leaf, axes)
    if (start, step) != (0, 1) or not sizes.same(size, sizes.product(axis.size for axis in axes)):
        raise Conflict(f"only a part of `{leaf.node.name}` is used")


def in_order(leaf: Leaf, axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """The axes in the order in which the leaf's dimension runs over them."""
    wanted = set(axes)
    return tuple(digit for digit in entry_of(leaf, wanted) if isinstance(digit, Axis) and digit in wanted)


def layout(ordered: list[Linear], spans: list[Span], size: sizes.Size) -> GateUp:
    """The arrangement of gate and up, given in that order with their spans; Conflict for an unknown one."""
    whole = [start == 0 and step == 1 and sizes.same(total, size) for start, step, total in spans]
    if len(ordered) == 1:
        if not whole[0]:
            raise Conflict(f"only a part of the first GEMM's output `{ordered[0].node.name}` is used")
        return "none"
    if all(whole):
        if ordered[0].weight.node is ordered[1].weight.node:
            raise Conflict("gate and up read the same weight")
        return "separate"
    if ordered[0].weight.node is not ordered[1].weight.node or not isinstance(size, int):
        raise Conflict("gate and up are parts of two different weights")
    starts = (spans[0][:2], spans[1][:2])
    known: dict[tuple[tuple[int, int], tuple[int, int]], GateUp] = {
        ((0, 1), (size, 1)): "concat",
        ((size, 1), (0, 1)): "concat_swapped",
        ((0, 2), (1, 2)): "interleaved",
        ((1, 2), (0, 2)): "interleaved_swapped",
    }
    if starts not in known or not sizes.same(spans[0][2], 2 * size):
        raise Conflict(f"gate and up lie at rows {starts} of {spans[0][2]}: no known layout")
    return known[starts]


def units(leaf: Leaf, role_of: Callable[[Digit], str]) -> list[tuple[str, sizes.Size, int]]:
    """The leaf's dimensions as (role, size, last dimension); neighbours of one role joined, where a view can."""
    result: list[tuple[str, sizes.Size, int]] = []
    for dim, group in enumerate(leaf.index):
        for digit in group:
            role = role_of(digit)
            before = result[-1] if result else ("", 0, 0)
            if before[0] == role and (before[2] == dim or joinable(leaf.node, before[2], dim)):
                result[-1] = (role, before[1] * digit.size, dim)
            else:
                result.append((role, digit.size, dim))
    return result


def weight_units(leaf: Leaf, contracted: frozenset[Axis]) -> list[tuple[str, sizes.Size, int]]:
    """Units of an expert weight: "E" the expert (stacked ones), "C" the input, "N" the output features."""

    def role(digit: Digit) -> str:
        if isinstance(digit, At):
            return "E"
        return "C" if group_axes((digit,)) <= contracted and group_axes((digit,)) else "N"

    found = units(leaf, role)
    if sorted(name for name, _, _ in found) not in (["C", "E", "N"], ["C", "N"]):
        raise Conflict(f"`{leaf.node.name}` is not a weight of experts, outputs and inputs")
    return found


def turned(leaf: Leaf) -> bool:
    """True for experts' matrices that are views: they lie in memory the other way round than their dimensions say."""
    val, dims = value(leaf.node), len(leaf.selectors) + 2
    if val.dim() != dims or (leaf.selectors and leaf.index[0] != leaf.selectors):
        return False
    return sizes.is_one(val.stride(-2)) and sizes.same(val.stride(-1), val.shape[-2]) and val.shape[-2] != 1


def is_transposed(leaf: Leaf, contracted: frozenset[Axis]) -> bool:
    """True for out-features first ([E, N, C]), False for [E, C, N]."""
    order = [name for name, _, _ in weight_units(leaf, contracted) if name != "E"]
    return order == ["N", "C"]
