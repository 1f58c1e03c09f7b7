"""What the plain-torch styles share: sizes, a `Style`, router and experts that many of them use.

In: nothing. Out: building blocks. x is [B, S, H] in all styles.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, INTER, EXPERTS, TOP_K = 64, 48, 8, 2
BATCH, LENGTH = 2, 9

Inputs = tuple[Tensor, ...]
Capture = Literal["torch.compile", "moefuse.compile", "rewriter"]


@dataclass(frozen=True)
class Style:
    """One way to write a MoE layer. build: makes the module (eval, float32) and its example inputs, x [B, S, H].

    fusable: the layer is a weighted sum over the chosen experts of each token. reason: words of the refusal of one
    that isn't. captured_by: what gets the layer into one graph: plain torch.compile, the flags that moefuse.compile
    sets, or its rewriting of loops that branch on data.
    """

    build: Callable[[], tuple[nn.Module, Inputs]]
    fusable: bool = True
    reason: str = ""
    captured_by: Capture = "torch.compile"


def style(
    module: type[nn.Module],
    *,
    fusable: bool = True,
    reason: str = "",
    captured_by: Capture = "torch.compile",
) -> Style:
    """The style of a module class that takes no arguments."""

    def build() -> tuple[nn.Module, Inputs]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return module().eval(), (torch.randn(BATCH, LENGTH, HIDDEN),)

    return Style(build, fusable, reason, captured_by)


def weight(*shape: int) -> nn.Parameter:
    """A random parameter; the last dimension but one or the last is taken for its inputs: of size about 1/8."""
    return nn.Parameter(torch.randn(shape) / 8)


class Gated(nn.Module):
    """One expert as a module of its own: w2(silu(w1 x) * w3 x)."""

    def __init__(self, hidden: int = HIDDEN, inter: int = INTER) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, inter, bias=False)
        self.w2 = nn.Linear(inter, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inter, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class Routed(nn.Module):
    """A router: `route` chooses by softmax scores, renormalised."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, H] -> weights [T, K], ids [T, K]."""
        weights, ids = self.gate(rows).softmax(-1).topk(TOP_K, dim=-1)
        return weights / weights.sum(-1, keepdim=True), ids


class RoutedModules(Routed):
    """A router, and a list of expert modules."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Gated() for _ in range(EXPERTS))


class RoutedStack(Routed):
    """A router, and stacked weights w1, w3 [E, I, H], w2 [E, H, I]."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = weight(EXPERTS, INTER, HIDDEN), weight(EXPERTS, INTER, HIDDEN)
        self.w2 = weight(EXPERTS, HIDDEN, INTER)


def grouped(rows: Tensor, stacked: Tensor, ends: Tensor) -> Tensor:
    """rows [S, C] in expert order @ stacked [E, C, N], in bfloat16: the only dtype of this operator."""
    return torch._grouped_mm(rows.bfloat16(), stacked.bfloat16(), offs=ends)
