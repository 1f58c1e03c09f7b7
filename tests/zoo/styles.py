"""MoE layers as people write them in plain torch, in our own words; only the way to compute is taken from practice.

Out: `STYLES`, by the name of where one finds the style; and a small language model of one of them, called as
`model(input_ids=ids).logits`, so that it can stand beside the transformers models.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests.zoo.styles_common import HIDDEN, Style
from tests.zoo.styles_grouped import GROUPED, GptFast
from tests.zoo.styles_loops import LOOPS
from tests.zoo.styles_refused import REFUSED

VOCAB = 128

STYLES: dict[str, Style] = {**LOOPS, **GROUPED, **REFUSED}


class Output(NamedTuple):
    """What a model returns, under the name that transformers uses."""

    logits: Tensor


class Layer(nn.Module):
    """x [B, S, H] -> x + moe(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.moe = GptFast()

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
