"""Expert-parallel layers for the tests: the same layer on one rank and spread over ranks.

In: a seed and sizes. Out: `Spread`: what each rank feeds `mega_moe.ep`, and what one process gives for its tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import moefuse.ops  # noqa: F401  (registers the operator)
from moefuse.comm import Capacity
from tests.ops.moe_loop import Layer, make_layer

EXPERTS = 8


@dataclass
class Spread:
    """A layer with all experts; the tokens of rank r are made from the seed and r."""

    layer: Layer
    top_k: int
    seed: int

    def capacity(self, world: int, max_tokens: int) -> Capacity:
        hidden, out = self.layer.x.shape[1], self.layer.down.shape[1]
        return Capacity(world, EXPERTS, self.top_k, hidden, out, max_tokens, self.layer.x.dtype)

    def tokens(self, rank: int, count: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x, topk_ids, topk_weights of one rank; ids are distinct per token where none are given."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        x = torch.randn(count, self.layer.x.shape[1], generator=generator, dtype=torch.float64)
        if ids is None:
            experts = EXPERTS + self.layer.identities
            ids = torch.rand(count, experts, generator=generator).argsort(1)[:, : self.top_k]
        weights = torch.rand(count, self.top_k, generator=generator) + 0.1
        return x.to(self.layer.x.dtype), ids.to(self.layer.ids.dtype), weights.to(self.layer.weights.dtype)

    def alone(self, tokens: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """y in one process with all experts."""
        _, _, _, _, *weights = self.layer.args
        return torch.ops.moefuse.mega_moe(None, *tokens, *weights, **self.layer.kwargs, target="reference")[0]

    def together(
        self, context: Tensor, rank: int, world: int, tokens: tuple[Tensor, Tensor, Tensor], target: str
    ) -> tuple[Tensor, Tensor]:
        """y and the slots this rank's experts received, on all ranks together."""
        _, _, _, _, *weights = self.layer.args
        lists = [self.local(part, rank, world) for part in weights[:4]]
        scale = weights[4] if len(weights) > 4 else None
        if scale is not None and scale.dim() == 2:
            scale = self.local([scale], rank, world)[0]
        kwargs = self.layer.kwargs | {"ep_world_size": world, "target": target}
        return torch.ops.moefuse.mega_moe.ep(context, *tokens, *lists, scale, **kwargs)

    def local(self, tensors: list[Tensor], rank: int, world: int) -> list[Tensor]:
        """This rank's experts, out of stacked tensors or a list of per-expert ones."""
        own = slice(rank * EXPERTS // world, (rank + 1) * EXPERTS // world)
        if len(tensors) < EXPERTS:
            return [tensor[own] for tensor in tensors]
        return [t for start in range(0, len(tensors), EXPERTS) for t in tensors[start : start + EXPERTS][own]]


def spread(seed: int, *, top_k: int = 2, **changes: Any) -> Spread:
    """A random layer in any layout that `make_layer` knows."""
    return Spread(make_layer(seed, top_k=top_k, experts=EXPERTS, **changes), top_k, seed)
