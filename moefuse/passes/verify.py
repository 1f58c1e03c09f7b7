"""Does a fused layer compute what its region computed? Asked once, on real inputs.

In: the graph right after the rewrite, in which the old output of each layer still stands beside the new one, fed by
the same values. Out: a `Checker`, which runs both and tells how far apart they are, layer by layer: a difference in
one layer isn't carried into the next, where a router would turn it into another expert.

The old outputs are dead code in the fused graph, so a checker must be made before that is removed.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from moefuse.inner import compile_inner
from moefuse.ops.quantised import SCHEMES
from moefuse.ops.spec import MoeSpec

Pair = tuple[Node, Node]
"""An output as it was and as it is."""

_EPS = 8
"""Roundings between two results of one layer: of h1, the activation, h2, the product and the sums over the slots."""


class VerifyError(RuntimeError):
    """mode="on" and verify=True: a fused layer doesn't compute what its region computed."""


@dataclass(frozen=True)
class Checker:
    """`graph_module` returns (old, new) for each pair; it shares the parameters and changes no input.

    layers: how many pairs each fused layer has: its own, and those of the shared experts beside it.
    """

    graph_module: GraphModule
    layers: tuple[int, ...]

    def differences(self, args: Sequence[Any]) -> list[float] | None:
        """The largest difference of a token's output in each layer, relative to its size (see `difference`).

        args: what the compiled graph is called with. None where nothing can be measured: no tokens, or no data
        (the meta device).
        """
        if any(isinstance(arg, Tensor) and arg.is_meta for arg in args):
            return None
        run = compile_inner(self.graph_module, args, "eager")
        with torch.no_grad(), torch.random.fork_rng(), torch._C._DisableAutocast():
            outputs = run(*args)
        pairs = list(zip(outputs[::2], outputs[1::2], strict=True))
        if not all(old.numel() for old, _ in pairs):
            return None
        apart = iter([difference(old, new) for old, new in pairs])
        return [max(itertools.islice(apart, count)) for count in self.layers]


def checker(gm: GraphModule, layers: Sequence[Sequence[Pair]]) -> Checker:
    """A checker for each layer's (old, new) output nodes that both stand in the graph of `gm`, which isn't changed."""
    copy = Graph()
    nodes: dict[Node, Node] = {}
    copy.graph_copy(gm.graph, nodes)
    copy.output(tuple(nodes[node] for pairs in layers for pair in pairs for node in pair))
    # Also writes to inputs: they happen in the real run.
    copy.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return Checker(GraphModule(gm, copy), tuple(map(len, layers)))


def difference(old: Tensor, new: Tensor) -> float:
    """max over tokens of |new - old| / max(|old|, the median token's |old|), Euclidean norms over the features.

    The median keeps a token whose experts cancel out from looking wrong. Infinite where only one of the two has a NaN
    or an infinity.
    """
    a = old.detach().double().reshape(-1, old.shape[-1])
    b = new.detach().double().reshape(a.shape)
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return float("inf")
    a, b = a.where(finite, 0.0), b.where(finite, 0.0)
    size, apart = a.norm(dim=1), (b - a).norm(dim=1)
    scale = size.clamp(min=float(size.median()))
    return float((apart / scale.where(scale > 0, 1.0)).max())


def tolerance(spec: MoeSpec) -> float:
    """The largest difference that rounding explains.

    A few units in the last place of the coarsest dtype in the layer, and float32's own over sums of H and of I
    products, which grows with the root of their number. Rows that become integers: a step of theirs, too, since what
    is rounded otherwise moves some of a row's integers by one.
    """
    dtypes = (spec.x_dtype, spec.output_dtype, *((spec.expert_dtype,) if spec.quant == "none" else ()))
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    sums = (spec.hidden + spec.intermediate) ** 0.5 * torch.finfo(torch.float32).eps
    _, row_bits = SCHEMES.get(spec.quant, (0, 0))
    step = 1 / (2 ** (row_bits - 1) - 1) if row_bits else 0.0
    return float(_EPS * (coarsest + sums) + step)
