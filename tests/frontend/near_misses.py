"""Loops that only look like loops over experts: each differs by one detail, and must stay as it is."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.frontend.models import Base, E, Empty, Expert, H, K, Sorted


class FewSkipped(Base):
    """Experts with a single token are skipped too."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() < 2:
                continue
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class OtherSkipped(Base):
    """Skipped by the tokens of the expert before."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        counts = F.one_hot(ids, E).sum(dim=(0, 1))
        for e in range(self.num_experts):
            if counts[e - 1] == 0:
                continue
            token, slot = torch.where(ids == e)
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class OtherIds(Base):
    """Skipped by the counts of other ids."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        _, others = self.route(x.flip(-1))
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if (others == e).any():
                y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class FirstHits(Base):
    """The first experts of the list only."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        hits = F.one_hot(ids, E).sum(dim=(0, 1)).nonzero()[:2]
        for hit in hits:
            e = int(hit[0])
            token, slot = torch.where(ids == e)
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class ManyHits(Base):
    """Experts with more than one token only."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for hit in (F.one_hot(ids, E).sum(dim=(0, 1)) > 1).nonzero():
            e = hit.item()
            token, slot = torch.where(ids == e)
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class Capacity(Base):
    """Switch: one choice per token, and each expert's queue is cut."""

    def forward(self, x: Tensor) -> Tensor:
        best, ids = self.router(x).softmax(-1).max(-1)
        mask = F.one_hot(ids, E)
        mask = (mask * (mask.cumsum(0) <= 2)).view(-1, 1, E).permute(2, 1, 0)
        y = torch.zeros_like(x)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            _, token = torch.where(mask[hit].squeeze(0))
            y.index_add_(0, token, self.experts[hit[0]](x[token]) * best[token, None])
        return y


class CapacityAfter(Base):
    """The slots beyond the capacity have no weight."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        places = F.one_hot(ids.flatten(), E).cumsum(0).view(*ids.shape, E).gather(-1, ids.unsqueeze(-1))
        weights = weights * (places.squeeze(-1) <= 2)
        y = torch.zeros_like(x)
        for hit in F.one_hot(ids, E).sum(dim=(0, 1)).nonzero():
            token, slot = torch.where(ids == hit)
            y.index_add_(0, token, self.experts[hit[0]](x[token]) * weights[token, slot, None])
        return y


class TurnedPieces(Base):
    """The same with the last expert's rows first, as if they were sorted the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        order = ids.flatten().argsort()
        counts = F.one_hot(ids, E).sum(dim=(0, 1))
        pieces = x[order // K].split(counts.tolist())
        hits = counts.nonzero().flatten()
        outputs = []
        for e in hits.flip(0):
            outputs.append(self.experts[e](pieces[e]))  # noqa: PERF401
        rows = torch.cat(outputs)[order.argsort()].view(len(x), K, -1)
        return (rows * weights[..., None]).sum(1)


class RangeLen(Base):
    """The list is read by position."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        hits = F.one_hot(ids, E).sum(dim=(0, 1)).nonzero()
        for i in range(len(hits)):
            token, slot = torch.where(ids == hits[i, 0])
            y.index_add_(0, token, self.experts[hits[i, 0]](x[token]) * weights[token, slot, None])
        return y


class Ranked(Base):
    """What an expert adds depends on its position in the list."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for i, e in enumerate(F.one_hot(ids, E).sum(dim=(0, 1)).nonzero().flatten()):
            token, slot = torch.where(ids == e)
            y.index_add_(0, token, self.experts[e](x[token]) * (weights[token, slot, None] + i))
        return y


class FirstExpert(Base):
    """Expert 0 is left out."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if e == 0 or token.numel() == 0:
                continue
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class Break(Base):
    """The loop ends at the first expert without tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                break
            if token.numel() == 0:
                continue
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class Counter(Base):
    """It counts, on the module, how many experts worked."""

    worked = 0

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            self.worked += 1
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class LocalCounter(Base):
    """It divides by how many experts worked."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        worked = 0
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            worked += 1
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y / worked


class NextWeights(Base):
    """The n-th expert that works uses the n-th weights: not its own, if one before had no tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        place = 0
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            y.index_add_(0, token, self.experts[place](x[token]) * weights[token, slot, None])
            place = place + 1
        return y


class Decay(Base):
    """Each expert that works changes what the ones after it read."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        x = x.clone()
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
            x.mul_(0.5)
        return y


class TensorCounter(Base):
    """A second sum that an expert without tokens would add to."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        bonus = x.new_zeros(())
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            bonus = bonus + 1.0
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y + bonus


class BufferCounter(Base):
    """A buffer, through a view of it, that an expert without tokens would add to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("worked_on", torch.zeros(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        seen = self.worked_on.view(-1)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            place = seen[e]
            place.add_(1)
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class Remembering(Expert):
    """An expert that counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Callee(Empty):
    """The loop is harmless, its experts aren't."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Remembering() for _ in range(E))


class Printing(Base):
    """It prints."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            print(end="")
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class Stale(Base):
    """An expert without tokens uses what the expert before it has left."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        rows = x[:1]
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() > 0:
                rows = self.experts[e](x[token]) * weights[token, slot, None]
            y = y + rows.sum(0)
        return y


class AfterTheLoop(Base):
    """What the last expert that worked has computed is used after the loop."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        scale = weights.sum()
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            scale = weights[token, slot].sum()
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y * scale


class LengthUsed(Sorted):
    """The number of pieces is used."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        counts = F.one_hot(ids, E).sum(dim=(0, 1)).tolist()
        order = ids.view(-1).argsort()
        rows = x[order // K]
        outputs = []
        start = 0
        for e, n in enumerate(counts):
            end = start + n
            if n == 0:
                continue
            outputs.append(self.experts[e](rows[start:end]))
            start = end
        out = torch.cat(outputs) / len(outputs)
        return (out[order.argsort()].view(-1, K, H) * weights.unsqueeze(-1)).sum(1)


class Dropped(Base):
    """Random numbers in the loop."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            noise = torch.rand(1)
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None] + 0 * noise)
        return y


class FirstChoice(Base):
    """Skipped where no token has the expert as its first choice."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if not (ids[:, 0] == e).any():
                continue
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class DemandingRows(Expert):
    """An expert that mustn't be called without tokens."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[0] > 0
        return self.down(self.act(self.gate(x)) * self.up(x))


class Asserting(Empty):
    """Its experts would fail without tokens, and aren't called then."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(DemandingRows() for _ in range(E))
