"""Small models whose report has everything: fused layers, a loss, an escape, many layers alike."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import moefuse
from moefuse.report.model import Report

H, I, E, K = 16, 24, 4, 2  # noqa: E741


class Layer(nn.Module):
    """A router and gathered experts. kind: "sum" fuses, "mean" loses its meaning, "escape" shows its rows."""

    def __init__(self, kind: str = "sum") -> None:
        super().__init__()
        self.kind = kind
        self.router = nn.Linear(H, E, bias=False)
        self.gate_up = nn.Parameter(torch.randn(E, 2 * I, H) / H**0.5)
        self.down = nn.Parameter(torch.randn(E, H, I) / I**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        gate, up = torch.einsum("th,tkoh->tko", x, self.gate_up[ids]).chunk(2, -1)
        rows = torch.einsum("tki,tkoi->tko", functional.silu(gate) * up, self.down[ids])
        rows = rows * weights.unsqueeze(-1)
        if self.kind == "mean":
            return x + rows.mean(1)
        if self.kind == "escape":
            return x + rows.sum(1) + rows.norm()
        return x + rows.sum(1)


def model(*kinds: str) -> nn.Module:
    return nn.Sequential(*(Layer(kind) for kind in kinds)).eval()


def report(*kinds: str, **options: Any) -> Report:
    with torch.no_grad():
        return moefuse.explain(model(*kinds), torch.randn(6, H), moefuse_options=options)
