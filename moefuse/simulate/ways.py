"""The layer over several ranks in the ways that are compared, for real: what the simulator is measured against.

In: a process group on the CPU and a workload. Out: `Ways`, one callable per way; all give the same y, and all compute
their experts with the cpu target.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

import moefuse.ops  # noqa: F401  (registers the operators)
from moefuse.comm import Capacity, CommContext, context_for
from moefuse.simulate.workload import Routing, Workload


class Ways:
    """This rank's part of the layer; the tokens are random, their experts as popular as the skew says."""

    def __init__(self, workload: Workload, skew: float = 0.0) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.workload, self.local = workload, workload.experts // self.world
        self.dtype: torch.dtype = getattr(torch, workload.dtype)
        hidden, inner = workload.hidden, workload.intermediate
        draw = torch.Generator().manual_seed(self.rank)
        self.weight1 = self._random(draw, self.local, 2 * inner, hidden)
        self.weight2 = self._random(draw, self.local, hidden, inner)
        self.x = self._random(draw, workload.tokens, hidden) * hidden**0.5
        clocks = torch.empty(workload.tokens, workload.experts).exponential_(generator=draw)
        rates = torch.tensor(Routing(workload, self.world, skew).rates).clamp(max=1.0)
        self.ids = (clocks / rates).argsort(1)[:, : workload.top_k].contiguous()
        self.weights = torch.rand(workload.tokens, workload.top_k, generator=draw)
        capacity = Capacity(
            self.world, workload.experts, workload.top_k, hidden, hidden, workload.tokens, self.dtype
        )
        self.shared: CommContext = context_for(None, capacity, transport="shared memory")
        self.collectives: CommContext = context_for(None, capacity, transport="collectives")
        self.all_x, self.all_ids, self.all_weights = map(self._gathered, (self.x, self.ids, self.weights))

    def _random(self, draw: torch.Generator, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=draw) * (1 / math.sqrt(shape[-1]))
        return values.to(self.dtype)

    def fused(self) -> Tensor:
        """The node over shared memory."""
        return self._node(self.shared)

    def over_collectives(self) -> Tensor:
        """The node over the group's collectives."""
        return self._node(self.collectives)

    def _node(self, context: CommContext) -> Tensor:
        y: Tensor = torch.ops.moefuse.mega_moe.ep(
            context.tensor,
            self.x,
            self.ids,
            self.weights,
            [self.weight1],
            [self.weight2],
            [],
            [],
            num_experts=self.workload.experts,
            ep_world_size=self.world,
            target="cpu",
        )[0]
        return y

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """This rank's experts alone; ids are local ones, others contribute nothing."""
        y: Tensor = torch.ops.moefuse.mega_moe(
            None,
            x,
            ids,
            weights,
            [self.weight1],
            [self.weight2],
            [],
            [],
            num_experts=self.local,
            target="cpu",
        )[0]
        return y

    def all_to_all(self) -> Tensor:
        """As models write it: every slot's row goes to its expert's rank and its result comes back."""
        order = self.ids.flatten().argsort(stable=True)
        flat = self.ids.flatten()[order]
        send = torch.bincount(flat // self.local, minlength=self.world)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send)
        s, r = send.tolist(), receive.tolist()
        got_ids = torch.empty(sum(r), dtype=flat.dtype)
        dist.all_to_all_single(got_ids, flat, r, s)
        got = self.x.new_empty(sum(r), self.workload.hidden)
        dist.all_to_all_single(got, self.x[order // self.workload.top_k], r, s)
        ids = (got_ids - self.rank * self.local).unsqueeze(1)
        y = self.experts(got, ids, torch.ones(sum(r), 1))
        back = self.x.new_empty(sum(s), self.workload.hidden)
        dist.all_to_all_single(back, y, s, r)
        rows = torch.empty_like(back)
        rows[order] = back
        rows = rows.view(*self.ids.shape, self.workload.hidden)
        return (rows.float() * self.weights.unsqueeze(-1)).sum(1).to(self.dtype)

    def all_gather(self) -> Tensor:
        """Every rank gets all tokens; the parts of the results are summed by their owners."""
        x, ids, weights = map(self._gathered, (self.x, self.ids, self.weights))
        part = self.experts(x, ids - self.rank * self.local, weights)
        y = torch.empty_like(self.x)
        dist.reduce_scatter_single(y, part)
        return y

    def all_reduce(self) -> Tensor:
        """transformers' form: every rank has all tokens already; the parts of all results are summed everywhere."""
        part = self.experts(self.all_x, self.all_ids - self.rank * self.local, self.all_weights)
        dist.all_reduce(part)
        return part[self.rank * self.workload.tokens :][: self.workload.tokens]

    def _gathered(self, own: Tensor) -> Tensor:
        everyone = own.new_empty((self.world * own.shape[0], own.shape[1]))
        dist.all_gather_single(everyone, own)
        return everyone
