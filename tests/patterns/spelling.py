"""One MoE layer in steps, so that a test can respell a single one; and what the lifter says about it.

In: a function over tensors. Out: `Study`, its graph with facts, sites and losses. Placeholders are named as
the function's arguments.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional

from moefuse.passes.lift import explain
from moefuse.patterns.engine import Lifted, lift
from moefuse.patterns.facts import Fact
from moefuse.patterns.site import Site
from moefuse.testing.capture import capture_graph
from moefuse.testing.compare import Comparison, rewrite_and_compare
from tests.patterns.meaning import SIZES, show

T, K, E, H, I = (SIZES[letter] for letter in "tkehi")  # noqa: E741
S = T * K


# --- inputs ----------------------------------------------------------------------------------------------


def operands(dtype: torch.dtype = torch.bfloat16, tokens: int = T, k: int = K) -> tuple[Tensor, ...]:
    """x [T, H], ids [T, K] (no expert twice in a token), weights [T, K], w1 [E, 2 I, H], w2 [E, H, I]."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    ids = draw(tokens, E).topk(k)[1]
    w1, w2 = draw(E, 2 * I, H) / H**0.5, draw(E, H, I) / I**0.5
    return draw(tokens, H).to(dtype), ids, draw(tokens, k).softmax(-1).to(dtype), w1.to(dtype), w2.to(dtype)


# --- steps of the sorted spelling ------------------------------------------------------------------------


def offsets(flat: Tensor, experts: int = E) -> Tensor:
    """Where each expert's rows end, [E] int32."""
    counts = torch.histc(flat.float(), bins=experts, min=0, max=experts - 1)
    return torch.cumsum(counts, 0, dtype=torch.int32)


def swiglu(h1: Tensor) -> Tensor:
    """silu(gate) * up of [.., 2 I]."""
    gate, up = h1.chunk(2, dim=-1)
    return functional.silu(gate) * up


def ffn(
    rows: Tensor, offs: Tensor, w1: Tensor, w2: Tensor, act: Callable[[Tensor], Tensor] = swiglu
) -> Tensor:
    """Both grouped GEMMs over sorted rows, weights with out-features first."""
    h1 = torch._grouped_mm(rows, w1.transpose(1, 2), offs)
    return torch._grouped_mm(act(h1), w2.transpose(1, 2), offs)


def sorted_rows(x: Tensor, ids: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """(expert outputs [S, H] in expert order, the permutation)."""
    flat = ids.reshape(-1)
    perm = torch.argsort(flat)
    return ffn(x[perm // K], offsets(flat), w1, w2), perm


def slot_rows(x: Tensor, ids: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Expert outputs [T, K, H]."""
    rows, perm = sorted_rows(x, ids, w1, w2)
    return rows[torch.argsort(perm)].view(T, K, H)


def grouped(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The whole layer, sorted by expert."""
    return (slot_rows(x, ids, w1, w2) * weights.unsqueeze(-1)).sum(1)


def gathered(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, act: Callable[[Tensor], Tensor] = swiglu
) -> Tensor:
    """The whole layer with gathered weights: [T, K, .] throughout."""
    h1 = torch.einsum("th,tkoh->tko", x, w1[ids])
    h2 = torch.einsum("tki,tkoi->tko", act(h1), w2[ids])
    return (h2 * weights.unsqueeze(-1)).sum(1)


# --- what the lifter says --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """A captured and lifted function."""

    graph_module: GraphModule
    inputs: tuple[Any, ...]

    @cached_property
    def lifted(self) -> Lifted:
        return lift(self.graph_module.graph)

    @property
    def outputs(self) -> list[Node]:
        """The nodes that the function returns."""
        return list(self.graph_module.graph.output_node().all_input_nodes)

    @property
    def meaning(self) -> str:
        """What the (first) result means; `?` where the lifter knows nothing."""
        fact = self.lifted.facts.get(self.outputs[0])
        return show(fact) if isinstance(fact, Fact) else "?"

    @property
    def why(self) -> str:
        """All losses, in words."""
        return "\n".join(explain(loss) for loss in self.lifted.losses.values())

    @property
    def site(self) -> Site:
        """The one layer that was found."""
        assert len(self.lifted.sites) == 1, f"{len(self.lifted.sites)} sites\n{self.why}"
        return self.lifted.sites[0]

    def fused(self, layers: int = 1) -> Comparison:
        """Rewrite; the new graph computes the same."""
        return rewrite_and_compare(self.graph_module, self.inputs, expect_fused=layers)

    def refused(self, words: str) -> None:
        """No layer is found; a loss says `words` and every node that it names is in the graph."""
        assert not self.lifted.sites, self.site.spec.describe()
        assert words in self.why, self.why
        assert nodes_named(self.why) <= {node.name for node in self.graph_module.graph.nodes}


def nodes_named(text: str) -> set[str]:
    """The names in backticks."""
    found = set(re.findall(r"`([^`]+)`", text))
    assert found, f"no node is named: {text}"
    return found


def study(
    function: Callable[..., Any], *inputs: Tensor, dynamic: Mapping[int, Sequence[int]] | None = None
) -> Study:
    """Capture a function. dynamic: as for `capture_graph`."""
    captured = capture_graph(function, inputs, dynamic=dynamic)
    names = list(inspect.signature(function).parameters)[: len(inputs)]
    for node, name in zip(captured.graph_module.graph.find_nodes(op="placeholder"), names, strict=True):
        node._rename(name)
        node.target = node.name
    captured.graph_module.recompile()
    return Study(captured.graph_module, captured.inputs)
