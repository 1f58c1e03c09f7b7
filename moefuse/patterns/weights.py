"""How an expert weight lies in memory: which dimension is the expert, which is contracted, which rows are gate and up.

In: the leaves of the expert GEMMs. Out: layouts, read off the axes and never guessed from sizes.
"""

import itertools
from collections.abc import Callable

from moefuse.graph import sizes
from moefuse.ops.spec import GateUp
from moefuse.patterns.facts import At, Axis, Conflict, Digit, Group, Leaf, Part, group_axes, group_size
from moefuse.patterns.products import Linear


def affine(group: Group, axes: frozenset[Axis]) -> tuple[int, int] | None:
    """(start, step) of a group that counts evenly through its dimension as `axes` run; None otherwise."""
    found = _affine(group)
    if found is None:
        return None
    start, steps = found
    if {axis for axis, _ in steps} != axes:
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


def entry_of(leaf: Leaf, axes: frozenset[Axis]) -> Group:
    """The digits of a leaf's index that run over the axes (of one dimension, or a whole part of one)."""
    groups = [
        tuple(d for d in group if not isinstance(d, At) and group_axes((d,)) <= axes)
        for group in leaf.index
        if group_axes(group) & axes
    ]
    if len(groups) != 1:
        raise Conflict(f"`{leaf.node.name}` is not a weight with one dimension per role")
    return groups[0]


def demand_whole(one: Linear, over: tuple[Axis, ...], features: Group) -> None:
    """Demand that contraction and output of a GEMM run over the whole of their weight dimension."""
    out = frozenset(d for d in features if isinstance(d, Axis))
    for role, axes in (("contracted", frozenset(over)), ("output", out)):
        entry = entry_of(one.weight, axes)
        if affine(entry, axes) != (0, 1) or not sizes.same(
            group_size(entry), sizes.product(a.size for a in axes)
        ):
            raise Conflict(f"only a part of `{one.weight.node.name}` is used ({role} dimension)")
    if one.bias is not None:
        entry = entry_of(one.bias, out)
        if affine(entry, out) != (0, 1) or one.bias.axes - one.bias.selectors[0].expr.axes != out:
            raise Conflict(f"`{one.bias.node.name}` is no bias over the output features")


def span(weight: Leaf, axes: frozenset[Axis], over: tuple[Axis, ...]) -> tuple[int, int, sizes.Size]:
    """(start, step, size of the dimension) of the weight rows that a leaf of the activation reads."""
    contracted = entry_of(weight, frozenset(over))
    if affine(contracted, frozenset(over)) != (0, 1) or not sizes.same(
        group_size(contracted), sizes.product(a.size for a in over)
    ):
        raise Conflict(f"only a part of `{weight.node.name}` is used (contracted dimension)")
    entry = entry_of(weight, axes)
    found = affine(entry, axes)
    if found is None:
        raise Conflict(f"gate and up are picked from `{weight.node.name}` in a way that is no slice")
    return (*found, group_size(entry))


def layout(ordered: list[Linear], spans: list[tuple[int, int, sizes.Size]], size: sizes.Size) -> GateUp:
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
    """The leaf's dimensions as (role, size, dimension), neighbours of one role in one dimension merged."""
    result: list[tuple[str, sizes.Size, int]] = []
    for dim, group in enumerate(leaf.index):
        for digit in group:
            role = role_of(digit)
            if result and result[-1][0] == role and result[-1][2] == dim:
                result[-1] = (role, result[-1][1] * digit.size, dim)
            else:
                result.append((role, digit.size, dim))
    return result


def weight_units(leaf: Leaf, contracted: frozenset[Axis]) -> list[tuple[str, sizes.Size, int]]:
    """Units of an expert weight: "E" the expert, "C" the contracted features, "N" the output features."""

    def role(digit: Digit) -> str:
        if isinstance(digit, At):
            return "E"
        return "C" if group_axes((digit,)) <= contracted and group_axes((digit,)) else "N"

    found = units(leaf, role)
    if sorted(name for name, _, _ in found) != ["C", "E", "N"]:
        raise Conflict(f"`{leaf.node.name}` is not a weight of experts, outputs and inputs")
    return found


def is_transposed(leaf: Leaf, contracted: frozenset[Axis]) -> bool:
    """True for out-features first ([E, N, C]), False for [E, C, N]."""
    order = [name for name, _, _ in weight_units(leaf, contracted) if name != "E"]
    return order == ["N", "C"]
