"""Whole layers of three functions: the first GEMM, the second, and where a factor multiplies."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.patterns.spelling import E, Study, operands, study

X, IDS, W, W1, W2 = operands(torch.float32)
SCALE = torch.rand(E, generator=torch.Generator().manual_seed(2)) + 0.5


def first(x: Tensor, ids: Tensor, w1: Tensor) -> Tensor:
    """x [T, H] or [T, K, H] -> [T, K, N]."""
    return torch.einsum("th,tkoh->tko" if x.dim() == 2 else "tkh,tkoh->tko", x, w1[ids])


def second(a: Tensor, ids: Tensor, w2: Tensor) -> Tensor:
    return torch.einsum("tki,tkoi->tko", a, w2[ids])


Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(x, ids, routing weights, w1, w2) -> the output."""


def layer(function: Layer) -> Study:
    return study(function, X, IDS, W, W1, W2)


def wide(w: Tensor) -> Tensor:
    return w.unsqueeze(-1)
