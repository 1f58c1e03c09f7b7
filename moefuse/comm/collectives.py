"""Ranks that share no memory: the same layer over the group's own collectives.

In: a layer's call on this rank. Out: y and the slots that this rank's experts received. Counts go first, then token
rows (each token once per destination rank) and what their experts need to know, and the result rows come back; each of
these is one all_to_all, with uneven splits. Runs on whatever device and backend the group has.
"""

import math
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefuse.comm.barrier import poll
from moefuse.comm.capacity import NOTES, Capacity
from moefuse.comm.errors import CommError, ContextError, PeerError
from moefuse.comm.rendezvous import Store
from moefuse.comm.routing import Call, Traffic, check_notes, combine, sort_slots
from moefuse.comm.timeline import Timeline

_LOOK_SECONDS = 0.5


class Collectives:
    """The transport over torch.distributed."""

    name = "collectives"

    def __init__(self, capacity: Capacity, group: Any, store: Store, name: str, timeout: float) -> None:
        self.capacity, self.timeout = capacity, timeout
        self.rank = group.rank()
        self.traffic = Traffic()
        self._next_look = 0.0
        self._group = weakref.ref(group)  # the context ends with its group, not the other way round
        self._store, self._poison_key = store, f"moefuse/{name}/poison"

    def step(self, call: Call) -> tuple[Tensor, Tensor]:
        """y [T, O] and the slots each local expert received [E_l] int32. Raises PeerError."""
        world, experts, top_k = (
            self.capacity.ep_world_size,
            self.capacity.local_experts,
            call.topk_ids.shape[1],
        )
        order, edges = sort_slots(call)
        slots = order[edges[0] : edges[-1]]
        counts = edges.diff().view(world, experts)
        tokens = max(call.x.shape[0], 1)
        destination = torch.arange(world, device=order.device).repeat_interleave(counts.sum(1))
        key, row = (destination * tokens + slots // top_k).unique(return_inverse=True)
        rows_out = torch.bincount(key // tokens, minlength=world)
        notes = edges.new_tensor([call.x.shape[0], call.fingerprint]).expand(world, NOTES)
        heads = self._exchange(
            torch.cat((counts, rows_out.unsqueeze(1), notes), 1).contiguous(), [1] * world, [1] * world
        )
        counts_in, rows_in, notes = heads.split([experts, 1, NOTES], 1)
        check_notes(notes, call, self.capacity)

        to, back = rows_out.tolist(), rows_in.flatten().tolist()
        sends, receives = counts.sum(1).tolist(), counts_in.sum(1).tolist()
        rows = self._exchange(call.x.index_select(0, key % tokens), to, back)
        # a slot names its token by its place among the rows from its rank
        place = row - (rows_out.cumsum(0) - rows_out)[destination]
        place = self._exchange(place.int(), sends, receives)
        starts = (rows_in.flatten().cumsum(0) - rows_in.flatten()).repeat_interleave(counts_in.sum(1))
        weights = call.topk_weights.new_ones(place.shape)
        if call.weights_travel:
            weights = self._exchange(call.topk_weights.reshape(-1).take(slots), sends, receives)
        expert = (
            torch.arange(experts, device=order.device).repeat(world).repeat_interleave(counts_in.flatten())
        )
        results = call.x.new_empty((0, self.capacity.out_features))
        if place.numel():
            results = call.experts(rows[place + starts], expert.unsqueeze(1), weights.unsqueeze(1))
        planes = call.x.new_empty((call.topk_ids.numel(), self.capacity.out_features))
        planes[slots] = self._exchange(results, receives, sends)
        self._count(call, back, sends, receives)
        return combine(planes.view(*call.topk_ids.shape, self.capacity.out_features), call), counts_in.sum(
            0, dtype=torch.int32
        )

    def poison(self, error: BaseException) -> None:
        """This rank can't go on: leave word in the group's store, for those whose collectives will fail."""
        if not isinstance(error, PeerError) and not self._store.check([self._poison_key]):
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self._store.set(self._poison_key, f"{self.rank} {text}")

    def record(self, timeline: Timeline | None) -> None:
        """Raises ContextError: the group's backend does the work."""
        if timeline is not None:
            raise ContextError("recording: a context over collectives keeps no times")

    def close(self) -> None:
        """Nothing is held."""

    def _exchange(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """all_to_all of rows [n, ...] with these many rows to and from each rank."""
        group = self._group()
        if group is None:
            raise ContextError("the context's process group was destroyed")
        received = rows.new_empty((sum(receives), *rows.shape[1:]))
        deadline = time.monotonic() + self.timeout
        try:
            # as bytes: a backend needn't know the dtype
            work = dist.all_to_all_single(
                _bytes(received), _bytes(rows), list(receives), list(sends), group=group, async_op=True
            )
            poll(work.is_completed, lambda: self._look(deadline))
            work.wait(timedelta(seconds=self.timeout))
        except CommError:
            raise
        except RuntimeError as error:
            self._raise_poison()
            raise PeerError(f"a rank failed: the group's collective says {error}", -1) from error
        return received

    def _look(self, deadline: float) -> None:
        """Has a rank left word, is it too late?"""
        now = time.monotonic()
        if now > self._next_look:  # the store may be far away
            self._next_look = now + _LOOK_SECONDS
            self._raise_poison()
        if now > deadline:
            raise PeerError(f"a collective of the group didn't end within {self.timeout:g} s", -1)

    def _raise_poison(self) -> None:
        if self._store.check([self._poison_key]):
            rank, _, reason = self._store.get(self._poison_key).decode().partition(" ")
            raise PeerError(f"rank {rank} failed: {reason}", int(rank))

    def _count(self, call: Call, rows_in: list[int], sends: list[int], receives: list[int]) -> None:
        own, world = self.rank, self.capacity.ep_world_size
        results = sum(receives) - receives[own]
        travelling = 4 + (call.topk_weights.itemsize if call.weights_travel else 0)
        heads = (world - 1) * (self.capacity.local_experts + 1 + NOTES) * 8
        self.traffic = Traffic(
            self.traffic.rows + (sum(rows_in) - rows_in[own]) * call.x.shape[1] * call.x.itemsize,
            self.traffic.results + results * self.capacity.out_features * call.x.itemsize,
            self.traffic.routing + results * travelling + heads,
        )


def _bytes(rows: Tensor) -> Tensor:
    """rows [n, ...] as [n, bytes], a view where they are contiguous."""
    width = math.prod(rows.shape[1:]) * rows.itemsize
    return rows.contiguous().view(torch.uint8).view(rows.shape[0], width)
