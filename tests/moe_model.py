"""A small model of MoE layers for tests of the backend: Dynamo, module paths, parameters that change.

In: spelling of the layers. Out: `Model`, which any backend compiles in one graph.
"""

import torch
from torch import Tensor
from torch.nn import functional

H, I, E, K = 16, 24, 4, 2  # noqa: E741


class Experts(torch.nn.Module):
    """Gathered weights; `combine` is the reduction over the slots ("sum" is a MoE layer, "amax" none)."""

    def __init__(self, combine: str = "sum") -> None:
        super().__init__()
        self.combine = combine
        self.w1 = torch.nn.Parameter(torch.randn(E, 2 * I, H) / H**0.5)
        self.w2 = torch.nn.Parameter(torch.randn(E, H, I) / I**0.5)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("th,tkoh->tko", x, self.w1[ids]).chunk(2, -1)
        rows = torch.einsum("tki,tkoi->tko", functional.silu(gate) * up, self.w2[ids])
        rows = rows * weights.unsqueeze(-1)
        return rows.amax(1) if self.combine == "amax" else rows.sum(1)


class Routed(torch.nn.Module):
    """Experts behind a bare top-k: once fused, Inductor has no kernel of its own to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.requires_grad_(False)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = logits.topk(K)
        return self.experts(x, ids, weights)


class Block(torch.nn.Module):
    """Router, experts, residual; counts its runs in a buffer."""

    def __init__(self, combine: str = "sum") -> None:
        super().__init__()
        self.router = torch.nn.Linear(H, E)
        self.experts = Experts(combine)
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.runs.add_(1)
        weights, ids = self.router(x).softmax(-1).topk(K)
        return x + self.experts(x, ids, weights)


class Model(torch.nn.Module):
    """Blocks in `layers`, frozen unless `train` is given."""

    def __init__(self, *combines: str, train: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(combine) for combine in combines or ("sum", "sum"))
        self.requires_grad_(train)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
