"""The quantisation of a layer: what its expert GEMMs have in common, and the tensors that belong to their weights.

In: the GEMMs of one layer. Out: `LayerQuant`, None for plain floats, or `Conflict` where they can't be one scheme. What
is demanded makes a rewrite right: a scale runs over the very channels that its weight gives, in their order, and over
the leading index of its weight's inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from moefuse.graph import sizes
from moefuse.ops.quantised import BLOCKS, SCHEMES
from moefuse.patterns.axes import Axis
from moefuse.patterns.facts import Conflict, Leaf
from moefuse.patterns.products import Integers, Linear
from moefuse.patterns.weights import demand_whole, span


@dataclass(frozen=True)
class LayerQuant:
    """The scheme, and scales and offsets as the layer's weights: one per expert tensor, gates before ups.

    hidden_dtype, rows_dtype: to which the GEMMs are rounded. activated_dtype: of what the second one quantises, None
    where it takes floats. group1, group2: the axes of the inputs over which scales differ.
    """

    scheme: str
    scale1: tuple[Leaf, ...]
    scale2: tuple[Leaf, ...]
    offset1: tuple[Leaf, ...]
    offset2: tuple[Leaf, ...]
    hidden_dtype: torch.dtype
    rows_dtype: torch.dtype
    activated_dtype: torch.dtype | None
    group1: tuple[Axis, ...]
    group2: tuple[Axis, ...]

    @property
    def by_blocks(self) -> bool:
        """True for MX formats, whose weights are read as they lie in memory, through views that turn them."""
        return self.scheme in BLOCKS

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All of its tensors."""
        return (*self.scale1, *self.scale2, *self.offset1, *self.offset2)

    @property
    def groups(self) -> tuple[sizes.Size, sizes.Size]:
        """Into how many groups, each with a scale, the inputs of both weights are divided."""
        first, second = (sizes.product(axis.size for axis in group) for group in (self.group1, self.group2))
        return first, second

    def alike(self, other: "LayerQuant") -> bool:
        """True for another expert's with the same scheme and roundings."""
        same = ("scheme", "hidden_dtype", "rows_dtype", "activated_dtype", "groups")
        counts = [[len(part) for part in (q.scale1, q.scale2, q.offset1, q.offset2)] for q in (self, other)]
        return counts[0] == counts[1] and all(getattr(self, name) == getattr(other, name) for name in same)

    def renamed(self, change: Callable[[tuple[Leaf, ...]], tuple[Leaf, ...]]) -> "LayerQuant":
        """The same with its leaves in other axes."""
        return replace(
            self,
            scale1=change(self.scale1),
            scale2=change(self.scale2),
            offset1=change(self.offset1),
            offset2=change(self.offset2),
        )


def quantisation(
    firsts: Sequence[Linear],
    second: Linear,
    inner: tuple[Axis, ...],
    features: tuple[Axis, ...],
    one_tensor: bool,
) -> LayerQuant | None:
    """The layer's quantisation. firsts: gate before up; one_tensor: both are parts of one weight."""
    every = [one.integers for one in (*firsts, second)]
    known = [one for one in every if one is not None]
    if not known:
        return None
    schemes = sorted({"none" if one is None else one.scheme for one in every})
    if len(schemes) != 1 or schemes[0] not in SCHEMES:
        raise Conflict(
            f"the expert GEMMs are quantised as {', '.join(schemes)}: not all alike, or no known scheme"
        )
    if len(hidden := {one.dtype for one in firsts}) != 1:
        raise Conflict(f"gate and up GEMM are rounded differently: {', '.join(sorted(map(str, hidden)))}")
    for dtype in (*hidden, second.dtype):
        if not dtype.is_floating_point:
            raise Conflict(f"an expert GEMM is rounded to {dtype} after its scales")
    for one in firsts:
        _demand_beside(one, inner, whole=False)
    _demand_beside(second, features, whole=True)
    first, last = known[: len(firsts)], known[-1]
    _demand_shared(first, one_tensor)
    parts = first[:1] if one_tensor else first
    return LayerQuant(
        scheme=schemes[0],
        scale1=tuple(part.scale for part in parts),
        scale2=(last.scale,),
        offset1=tuple(part.offset for part in parts if part.offset is not None),
        offset2=(last.offset,) if last.offset is not None else (),
        hidden_dtype=hidden.pop(),
        rows_dtype=second.dtype,
        activated_dtype=last.row_dtype if last.rows is not None else None,
        group1=first[0].group,
        group2=last.group,
    )


def merged(experts: Sequence[LayerQuant]) -> LayerQuant | None:
    """That of all experts of a loop, which are alike: their tensors part by part, as the layer's weights."""
    if not experts:
        return None
    first = experts[0]

    def parts(name: str) -> tuple[Leaf, ...]:
        return tuple(getattr(each, name)[i] for i in range(len(getattr(first, name))) for each in experts)

    own = {name: parts(name) for name in ("scale1", "scale2", "offset1", "offset2")}
    return replace(first, **own)  # type: ignore[arg-type]


def _demand_beside(one: Linear, channels: tuple[Axis, ...], whole: bool) -> None:
    """Demand that scale and offset are read at the channels of their weight, and in the order of its inputs."""
    assert one.integers is not None
    for leaf in one.integers.leaves:
        if whole:
            demand_whole(leaf, channels)
        elif not _same(leaf, one.weight, channels):
            raise Conflict(f"`{leaf.node.name}` is not laid out as the weight it belongs to")
    _demand_groups(one, one.integers)


def _demand_groups(one: Linear, integers: Integers) -> None:
    group = integers.group
    if one.over[: len(group)] != group:
        raise Conflict(f"the groups of `{integers.scale.node.name}` are not runs of its weight's inputs")
    for leaf in (integers.scale, integers.offset):
        if leaf is None:
            continue
        if {axis for axis in one.over if axis in leaf.axes} != set(group):
            raise Conflict(f"`{leaf.node.name}` has other groups of inputs than the scale")
        for axes in [(axis,) for axis in group] if integers.scheme in BLOCKS else [group] if group else []:
            demand_whole(leaf, axes)


def _demand_shared(firsts: Sequence[Integers], one_tensor: bool) -> None:
    """Demand that gate and up are quantised alike: with the very same tensors where they share a weight."""
    if len({one.offset is None for one in firsts}) > 1:
        raise Conflict("only one of gate and up has an offset")
    owned = {(one.scale.node, one.offset.node if one.offset is not None else None) for one in firsts}
    groups = [sizes.product(axis.size for axis in one.group) for one in firsts]
    alike = len(owned) == 1 and all(sizes.same(groups[0], count) for count in groups)
    if one_tensor and not alike:
        raise Conflict("gate and up have different scales or offsets but share a weight")


def _same(leaf: Leaf, weight: Leaf, channels: tuple[Axis, ...]) -> bool:
    a, b = span(leaf, channels), span(weight, channels)
    return a[:2] == b[:2] and sizes.same(a[2], b[2])
