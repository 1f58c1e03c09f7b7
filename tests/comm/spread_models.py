"""MoE blocks whose experts are spread over the ranks of a process group, in the ways in which people write them.

In: a group's rank and size, and sizes. Out: modules that hold the experts of their rank, and `alone`, the same block in
one process. Weights come from a seed, so that all ranks and `alone` have parts of the same ones.
"""

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn import functional

H, I, E = 16, 8, 8  # noqa: E741


class Block(nn.Module):
    """Router and experts; subclasses say how rows travel. group: None for the default group.

    replicas: each expert is there twice, and a table says where; which of the two a token goes to is its own matter.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        k: int = 2,
        shared: bool = False,
        group: Any = None,
        seed: int = 0,
        replicas: bool = False,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator) * shape[-2] ** -0.5)

        self.experts = 2 * E if replicas else E
        self.rank, self.world, self.local, self.k = rank, world, self.experts // world, k
        self.group = torch.distributed.group.WORLD if group is None else group
        own = slice(rank * self.local, (rank + 1) * self.local)
        self.gate, w1, w2, side = draw(H, E), draw(E, H, 2 * I), draw(E, I, H), draw(H, H)
        copies = torch.arange(self.experts)[own] % E
        self.w1, self.w2 = nn.Parameter(w1[copies]), nn.Parameter(w2[copies])
        self.register_buffer("homes", torch.arange(2 * E).view(2, E).t().clone() if replicas else None)
        self.side = side if shared else None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = functional.softmax(x @ self.gate, -1).topk(self.k, -1)
        return weights / weights.sum(-1, keepdim=True), self.place(ids)

    def place(self, ids: Tensor) -> Tensor:
        """Where the experts are that the router chose."""
        if self.homes is None:
            return ids
        turn = torch.arange(ids.shape[0], device=ids.device) % 2
        return self.homes[ids, turn.unsqueeze(1)]

    def gathered(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Each row through the matrix of its (local) expert."""
        gate, up = torch.bmm(rows.unsqueeze(1), self.w1[ids]).squeeze(1).chunk(2, -1)
        return torch.bmm((functional.silu(gate) * up).unsqueeze(1), self.w2[ids]).squeeze(1)

    def grouped(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Rows in the order of their experts; bfloat16, as PyTorch's grouped GEMM wants them."""
        gate, up = torch._grouped_mm(rows.bfloat16(), self.w1.bfloat16(), offsets).float().chunk(2, -1)
        act = (functional.silu(gate) * up).bfloat16()
        return torch._grouped_mm(act, self.w2.bfloat16(), offsets).float()

    def exchange(self, rows: Tensor, received: Any, sent: Any) -> Tensor:
        return funcol.all_to_all_single(rows, received, sent, self.group)

    def announced(self, ids: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Of rows to come here the counts [W * E/W], by rank and expert; of rows the lengths to and from each rank."""
        counts = torch.histc(ids.float(), bins=self.experts, min=0, max=self.experts).long()
        here = self.exchange(counts, None, None)
        sent, received = (each.view(self.world, -1).sum(1).tolist() for each in (counts, here))
        return here, sent, received

    def forward(self, x: Tensor) -> Tensor:
        y = self.routed(x)
        return y if self.side is None else y + x @ self.side

    def routed(self, x: Tensor) -> Tensor:
        """All experts here."""
        weights, ids = self.route(x)
        rows = self.gathered(x.repeat_interleave(self.k, 0), ids.flatten())
        return (rows.view(-1, self.k, H) * weights.unsqueeze(-1)).sum(1)


class ByExpert(Block):
    """Slots sorted by expert; the numbers of rows counted per rank; the experts' ids travel with the rows."""

    def counts(self, owner: Tensor) -> Tensor:
        return functional.one_hot(owner, self.world).sum(0)

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        rows, experts = x[order // self.k], flat[order]
        counts = self.counts(experts // self.local)
        sent, received = counts.tolist(), self.exchange(counts, None, None).tolist()
        here = self.exchange(experts, received, sent)
        rows = self.gathered(self.exchange(rows, received, sent), here - self.rank * self.local)
        rows = self.exchange(rows, sent, received) * weights.flatten()[order, None]
        return rows[order.argsort()].view(-1, self.k, H).sum(1)


class ByBins(ByExpert):
    """Counts by bincount, which may be longer than `minlength`: `moefuse.compile` is for that."""

    fewer = 0

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        rows, experts = x[order // self.k], flat[order]
        counts = torch.bincount(experts // self.local, minlength=self.world - self.fewer)
        sent, received = counts.tolist(), self.exchange(counts, None, None).tolist()
        here = self.exchange(experts, received, sent)
        rows = self.gathered(self.exchange(rows, received, sent), here - self.rank * self.local)
        rows = self.exchange(rows, sent, received) * weights.flatten()[order, None]
        return rows[order.argsort()].view(-1, self.k, H).sum(1)


class ByRank(ByExpert):
    """Slots sorted by the rank that has their expert, sums by scatter, ids made local by a remainder."""

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.flatten()
        owner = flat // self.local
        order = owner.argsort(stable=True)
        counts = torch.histc(owner.float(), self.world, 0, self.world).long()
        sent, received = counts.tolist(), self.exchange(counts, None, None).tolist()
        here = self.exchange(flat[order], received, sent)
        rows = self.exchange(x[order // self.k], received, sent)
        rows = self.exchange(self.gathered(rows, here % self.local), sent, received)
        rows = rows * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // self.k, rows)


class InPlace(ByExpert):
    """`torch.distributed`'s own calls, which write into tensors that the caller makes."""

    def exchange(self, rows: Tensor, received: Any, sent: Any) -> Tensor:
        length = rows.shape[0] if received is None else sum(received)
        result = rows.new_empty((length, *rows.shape[1:]))
        torch.distributed.all_to_all_single(result, rows, received, sent, group=self.group)
        return result


class ByBlocks(Block):
    """Counts per expert are exchanged; rows arrive rank by rank and are sorted once more for grouped GEMMs."""

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.view(-1)
        order = torch.argsort(flat, stable=True)
        here, sent, received = self.announced(flat)
        rows = self.exchange(x[order // self.k], received, sent)
        number = torch.arange(self.experts, device=x.device) % self.local
        by = torch.argsort(torch.repeat_interleave(number, here), stable=True)
        offsets = torch.cumsum(here.view(self.world, -1).sum(0), 0, dtype=torch.int32)
        results = self.grouped(rows[by], offsets)
        rows = self.exchange(torch.empty_like(results).index_put((by,), results), sent, received)
        rows = rows * weights.view(-1)[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // self.k, rows)


class ByRuns(ByBlocks):
    """Counts by adding ones; rows get to the order of the experts by where each of their runs begins."""

    def places(self, here: Tensor) -> Tensor:
        """[R]: for each row in the order of this rank's experts, where it came. here: counts [W * E/W], by rank."""
        begins = (here.cumsum(0) - here).view(self.world, -1).t().reshape(-1)
        lengths = here.view(self.world, -1).t().reshape(-1)
        run = torch.arange(self.experts, device=here.device).repeat_interleave(lengths)
        return (
            begins[run] + torch.arange(run.shape[0], device=here.device) - (lengths.cumsum(0) - lengths)[run]
        )

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.view(-1)
        counts = torch.zeros(self.experts, dtype=torch.long).scatter_add(0, flat, torch.ones_like(flat))
        order = torch.argsort(flat, stable=True)
        here = self.exchange(counts, None, None)
        both = torch.stack([counts.view(self.world, -1).sum(1), here.view(self.world, -1).sum(1)])
        sent, received = both.tolist()
        rows = self.exchange(x[order // self.k], received, sent)
        places = self.places(here)
        offsets = torch.cumsum(here.view(self.world, -1).sum(0), 0, dtype=torch.int32)
        results = self.grouped(rows[places], offsets)
        back = results.new_empty(rows.shape)
        back[places] = results
        rows = self.exchange(back, sent, received) * weights.view(-1)[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // self.k, rows)


class ByLoop(ByBlocks):
    """Rows in the order of this rank's experts, each expert's slice through its own matrices, one after the other."""

    def expert(self, number: int, rows: Tensor) -> Tensor:
        gate, up = (rows @ self.w1[number]).chunk(2, -1)
        return (functional.silu(gate) * up) @ self.w2[number]

    def looped(self, rows: Tensor, counts: list[int]) -> Tensor:
        """counts: of rows per expert of this rank."""
        results, start = [], 0
        for number, count in enumerate(counts):
            results.append(self.expert(number, rows[start : start + count]))
            start += count
        return torch.cat(results)

    def sorted_rows(self, rows: Tensor, here: Tensor) -> tuple[Tensor, Any]:
        """(rows expert by expert, what `unsorted_rows` needs). here: counts [W * E/W], by rank."""
        by = torch.argsort((torch.arange(self.experts) % self.local).repeat_interleave(here), stable=True)
        return rows[by], by

    def unsorted_rows(self, rows: Tensor, by: Any) -> Tensor:
        return torch.empty_like(rows).index_put((by,), rows)

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.view(-1)
        order = torch.argsort(flat, stable=True)
        here, sent, received = self.announced(flat)
        rows = self.exchange(x[order // self.k], received, sent)
        rows, by = self.sorted_rows(rows, here)
        rows = self.looped(rows, here.view(self.world, -1).sum(0).tolist())
        rows = self.exchange(self.unsorted_rows(rows, by), sent, received)
        rows = rows * weights.view(-1)[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // self.k, rows)


class Skipping(ByLoop):
    """Experts without rows are skipped: `moefuse.compile` is for such loops."""

    def looped(self, rows: Tensor, counts: list[int]) -> Tensor:
        results = []
        start = 0
        for number, count in enumerate(counts):
            end = start + count
            if count == 0:
                continue
            results.append(self.expert(number, rows[start:end]))
            start = end
        return torch.cat(results) if results else rows.new_empty(0, rows.shape[1])


class ByPieces(ByLoop):
    """Rows are cut into what each rank sent for each expert, and these pieces put in the order of the experts."""

    def looped(self, rows: Tensor, counts: list[int]) -> Tensor:
        return torch.cat([self.expert(e, part) for e, part in enumerate(rows.split(counts))])

    def reordered(self, rows: Tensor, lengths: list[int], outer: int) -> Tensor:
        """Pieces [outer, inner] as [inner, outer]."""
        parts = rows.split(lengths)
        inner = len(parts) // outer
        return torch.cat([parts[o * inner + i] for i in range(inner) for o in range(outer)])

    def sorted_rows(self, rows: Tensor, here: Tensor) -> tuple[Tensor, Any]:
        lengths = here.tolist()
        return self.reordered(rows, lengths, self.world), here.view(self.world, -1).t().flatten().tolist()

    def unsorted_rows(self, rows: Tensor, by: Any) -> Tensor:
        return self.reordered(rows, by, self.local)


class ByPiecesOfEach(ByPieces):
    """Each expert's pieces are put together by themselves, and cut apart again as they came."""

    def sorted_rows(self, rows: Tensor, here: Tensor) -> tuple[Tensor, Any]:
        return rows, here.tolist()

    def looped(self, rows: Tensor, counts: list[int]) -> Tensor:
        return rows

    def unsorted_rows(self, rows: Tensor, by: Any) -> Tensor:
        parts, lengths = rows.split(by), [by[e :: self.local] for e in range(self.local)]
        each = [
            self.expert(e, torch.cat(parts[e :: self.local])).split(lengths[e]) for e in range(self.local)
        ]
        return torch.cat([each[e][r] for r in range(self.world) for e in range(self.local)])


class Gathered(Block):
    """Every rank gets all tokens, runs its own experts on them, and gives each rank its part of the sums."""

    def mask(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """(local ids, weights), slots of other ranks' experts left out."""
        first = self.rank * self.local
        mine = (ids >= first) & (ids < first + self.local)
        return torch.where(mine, ids - first, 0), torch.where(mine, weights, 0.0)

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        every = [funcol.all_gather_tensor(tensor, 0, self.group) for tensor in (x, ids, weights)]
        local, masked = self.mask(every[1], every[2])
        rows = self.gathered(every[0].repeat_interleave(self.k, 0), local.flatten()).view(-1, self.k, H)
        return funcol.reduce_scatter_tensor((rows * masked.unsqueeze(-1)).sum(1), "sum", 0, self.group)


class Summed(Block):
    """Every rank has all tokens and sums what its own experts give over the ranks."""

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        first = self.rank * self.local
        mine = (ids >= first) & (ids < first + self.local)
        local, masked = torch.where(mine, ids - first, 0), torch.where(mine, weights, 0.0)
        rows = self.gathered(x.repeat_interleave(self.k, 0), local.flatten()).view(-1, self.k, H)
        return funcol.all_reduce((rows * masked.unsqueeze(-1)).sum(1), "sum", self.group)


UNEVEN = (ByExpert, ByRank, InPlace, ByBlocks, ByRuns, ByLoop, ByPieces, ByPiecesOfEach)
"""Ranks may have different numbers of tokens."""

EVEN = (Gathered, Summed)


def alone(**changes: Any) -> Block:
    """The block in one process."""
    return Block(0, 1, **changes)


def tokens(count: int, rank: int, step: int = 0) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(100 * step + rank))
