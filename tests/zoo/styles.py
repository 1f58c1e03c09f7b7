"""Plain-torch MoE models in styles that no transformers model has.

In: dtype, number of layers. Out: a small language model, called as `model(input_ids=ids).logits`, so that
it can stand beside the transformers models. The code is our own; only the way to compute is taken from practice.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, HIDDEN, INTER, EXPERTS, TOP_K = 128, 64, 48, 8, 2


class Output(NamedTuple):
    """What a model returns, under the name that transformers uses."""

    logits: Tensor


class GatherEinsum(nn.Module):
    """The chosen experts' weights are gathered per token, and einsum multiplies: the style of gpt-fast."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, INTER, HIDDEN) / HIDDEN**0.5)
        self.w3 = nn.Parameter(torch.randn(EXPERTS, INTER, HIDDEN) / HIDDEN**0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTER) / INTER**0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, HIDDEN)
        weights, ids = self.gate(rows).softmax(-1).topk(TOP_K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        gate = F.silu(torch.einsum("th,tkih->tki", rows, self.w1[ids]))
        up = torch.einsum("th,tkih->tki", rows, self.w3[ids])
        expert = torch.einsum("tki,tkhi->tkh", gate * up, self.w2[ids])
        return torch.einsum("tkh,tk->th", expert, weights).reshape(x.shape)


class Layer(nn.Module):
    """x [B, S, H] -> x + moe(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.moe = GatherEinsum()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(self.norm(x))
        return y


class GatherEinsumModel(nn.Module):
    """Embedding, layers and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.Sequential(*(Layer() for _ in range(layers)))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Output:
        """input_ids int64 [B, S] -> `.logits` [B, S, VOCAB]."""
        return Output(logits=self.head(self.layers(self.embedding(input_ids))))


def gather_einsum(dtype: torch.dtype = torch.float32, layers: int = 2) -> nn.Module:
    """The model with random weights, in eval mode; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GatherEinsumModel(layers).to(dtype).eval()
