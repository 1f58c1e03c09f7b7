"""Layers that drop slots where an expert's queue is full: refused by that name, in whatever way they dispatch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.patterns.spelling import E, K, T, gathered, operands, study, swiglu

X, _, W, W1, W2 = operands(torch.float32)
LOGITS = torch.randn(T, E, generator=torch.Generator().manual_seed(1))
WORDS = "those beyond it are dropped"


def kept(logits: Tensor, capacity: int) -> Tensor:
    """One choice per token as a mask [T, E], its experts' queues cut at the capacity."""
    choice = functional.one_hot(logits.argmax(-1), E)
    return choice * (torch.cumsum(choice, 0) <= capacity)


def by_mask(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Switch: each expert's tokens are listed from the mask."""
    mask = kept(logits, 2).view(-1, 1, E).permute(2, 1, 0)
    y = torch.zeros_like(x)
    for e in range(E):
        _, token = torch.where(mask[e])
        rows = swiglu(x[token] @ w1[e].t()) @ w2[e].t()
        y = y.index_add(0, token, rows * logits.amax(-1)[token, None])
    return y


def by_ids(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The mask's own numbers taken for ids, and gates that are zero where a slot was dropped (NLLB does that)."""
    ids = kept(logits, 2)
    return gathered(x, ids, logits.softmax(-1) * ids, w1, w2)


def by_weights(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """All slots run; the weights of dropped ones are zero."""
    w, ids = logits.softmax(-1).topk(K)
    queue = (
        torch.cumsum(functional.one_hot(ids, E).view(T * K, E), 0).view(T, K, E).gather(-1, ids.unsqueeze(-1))
    )
    return gathered(x, ids, w * (queue.squeeze(-1) <= 3), w1, w2)


@pytest.mark.parametrize("forward", [by_mask, by_ids, by_weights])
def test_dropped_slots_are_refused(forward: Callable[..., Tensor]) -> None:
    study(forward, X, LOGITS, W1, W2).refused(WORDS)


def test_a_running_count_that_nobody_compares_is_none() -> None:
    def forward(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        w, ids = logits.softmax(-1).topk(K)
        places = torch.cumsum(functional.one_hot(ids, E), 0)
        return gathered(x, ids, w + places.sum(-1) * 0.01, w1, w2)

    study(forward, X, LOGITS, W1, W2).fused()


def test_a_mask_without_a_count_is_none() -> None:
    def forward(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        w, ids = logits.softmax(-1).topk(K)
        return gathered(x, ids, w * (ids <= 2), w1, w2)

    study(forward, X, LOGITS, W1, W2).fused()
