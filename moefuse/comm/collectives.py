"""Ranks that share no memory: the same layer over the group's own collectives.

In: a layer's call on this rank. Out: y and the slots that this rank's experts received. Counts go first, then token
rows (each token once per destination rank) and what their experts need to know, and the result rows come back; each of
these is one all_to_all, with uneven splits. Runs on whatever device and backend the group has. The gradient of a layer
goes this way whatever its forward did.
"""

import math
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moefuse.comm.barrier import poll
from moefuse.comm.capacity import NOTES, Capacity
from moefuse.comm.errors import CommError, ContextError, PeerError
from moefuse.comm.plans import Asked
from moefuse.comm.rendezvous import Store
from moefuse.comm.routing import Call, Traffic, check_notes, combine, sort_slots
from moefuse.comm.timeline import Timeline
from moefuse.ops.expert import sum_dtype
from moefuse.ops.gradient import add_identities
from moefuse.ops.options import Options

_LOOK_SECONDS = 0.5


class _Routes(NamedTuple):
    """Where the slots of one step go, and which come here.

    slots: [m], those of this rank that have an expert, by rank and expert. tokens: [r], the tokens of the rows sent,
    each once for every rank that wants it. to, back: rows for and from each rank. sends, receives: slots likewise.
    counts_in: [W, E_l], slots from each rank for each local expert. row, expert: [n], of each incoming slot.
    """

    slots: Tensor
    tokens: Tensor
    to: list[int]
    back: list[int]
    sends: list[int]
    receives: list[int]
    counts_in: Tensor
    row: Tensor
    expert: Tensor

    def of_slots(self, values: Tensor) -> Tensor:
        """[m], out of one value per slot, [T, K]."""
        return values.reshape(-1).take(self.slots)


class Collectives:
    """The transport over torch.distributed."""

    name = "collectives"

    def __init__(self, capacity: Capacity, group: Any, store: Store, name: str, timeout: float) -> None:
        self.capacity, self.timeout = capacity, timeout
        self.rank = group.rank()
        self.traffic = Traffic()
        self._next_look = 0.0
        self._asked = Asked(group)
        self._group = weakref.ref(group)  # the context ends with its group, not the other way round
        self._store, self._poison_key = store, f"moefuse/{name}/poison"

    def step(self, call: Call) -> tuple[Tensor, Tensor]:
        """y [T, O] and the slots each local expert received [E_l] int32. Raises PeerError."""
        routes = self._routes(call)
        rows = self._rows(routes, call.x)
        weights = call.topk_weights.new_ones(routes.expert.shape)
        if call.weights_travel:
            weights = self._exchange(routes.of_slots(call.topk_weights), routes.sends, routes.receives)
        results = call.x.new_empty((0, self.capacity.out_features))
        if routes.expert.numel():
            results = call.experts(rows, routes.expert.unsqueeze(1), weights.unsqueeze(1))
        planes = self._planes(routes, results, call)
        self._count(call, routes, [call.x], results, call.weights_travel)
        shape = (*call.topk_ids.shape, self.capacity.out_features)
        return combine(planes.view(shape), call), routes.counts_in.sum(0, dtype=torch.int32)

    def backward(self, call: Call, grad_y: Tensor, needs: Sequence[bool]) -> list[Tensor]:
        """The gradients that `needs` asks for, in the order of mega_moe_backward, of a layer's y: grad_y [T, O].

        Token rows and grad_y's rows travel as token rows did; what their experts make of them comes back as result
        rows did. All of it travels whatever this rank needs: others may need more. Raises PeerError.
        """
        x, ids, weights, *lists, scale = call.operands
        routes = self._routes(call)
        rows, grads = self._rows(routes, x), self._rows(routes, grad_y)
        their_weights = self._exchange(routes.of_slots(weights), routes.sends, routes.receives)
        slot_x, slot_weights, *own = torch.ops.moefuse.mega_moe_backward(
            grads, rows, routes.expert.unsqueeze(1), their_weights.unsqueeze(1), *lists, _listed(scale),
            needs=[True, True, *needs[2:]], **_differentiable(call.local_options),
        )  # fmt: skip
        planes = self._planes(routes, slot_x, call).view(*ids.shape, x.shape[1])
        grad_weights = weights.new_zeros(ids.numel())
        grad_weights[routes.slots] = self._exchange(slot_weights.flatten(), routes.receives, routes.sends)
        self._count(call, routes, [x, grad_y], slot_x, True)
        grad_weights = grad_weights.view(ids.shape)
        wide = sum_dtype(x.dtype)
        exists = (ids >= 0) & (ids < call.options.num_experts)
        grad_x = planes.to(wide).where(exists.unsqueeze(-1), 0).sum(1)
        add_identities(grad_x, grad_weights, grad_y.to(wide), x, ids, weights, call.options)
        return [*([grad_x.to(x.dtype)] if needs[0] else []), *([grad_weights] if needs[1] else []), *own]

    def _routes(self, call: Call) -> _Routes:
        """Sort the slots, and tell the other ranks what they will get. Raises as `check_notes` does."""
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
        sends, receives = counts.sum(1).tolist(), counts_in.sum(1).tolist()
        # a slot names its token by its place among the rows from its rank
        place = row - (rows_out.cumsum(0) - rows_out)[destination]
        place = self._exchange(place.int(), sends, receives)
        rows_in = rows_in.flatten()
        starts = (rows_in.cumsum(0) - rows_in).repeat_interleave(counts_in.sum(1))
        expert = torch.arange(experts, device=order.device).repeat(world)
        return _Routes(
            slots, key % tokens, rows_out.tolist(), rows_in.tolist(), sends, receives, counts_in, place + starts,
            expert.repeat_interleave(counts_in.flatten()),
        )  # fmt: skip

    def _rows(self, routes: _Routes, own: Tensor) -> Tensor:
        """Of each incoming slot the row of its token, [n, ...], out of those of this and the other ranks [T, ...]."""
        return self._exchange(own.index_select(0, routes.tokens), routes.to, routes.back)[routes.row]

    def _planes(self, routes: _Routes, results: Tensor, call: Call) -> Tensor:
        """The rows [n, F] that experts made, back at their slots: [T * K, F]; those of no expert may hold anything."""
        planes = results.new_empty((call.topk_ids.numel(), results.shape[1]))
        planes[routes.slots] = self._exchange(results, routes.receives, routes.sends)
        return planes

    def poison(self, error: BaseException) -> None:
        """This rank can't go on: leave word in the group's store, for those whose collectives will fail."""
        if not isinstance(error, PeerError) and not self._store.check([self._poison_key]):
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self._store.set(self._poison_key, f"{self.rank} {text}")

    def blame(self) -> None:
        """Nobody: what there is to say was said."""

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
            if (peer := self._asked.by()) is not None:
                self._asked.refuse()
                raise PeerError(f"rank {peer} failed: {Asked.WHY}", peer)
        if now > deadline:
            raise PeerError(f"a collective of the group didn't end within {self.timeout:g} s", -1)

    def _raise_poison(self) -> None:
        if self._store.check([self._poison_key]):
            rank, _, reason = self._store.get(self._poison_key).decode().partition(" ")
            raise PeerError(f"rank {rank} failed: {reason}", int(rank))

    def _count(
        self, call: Call, routes: _Routes, rows: Sequence[Tensor], results: Tensor, weights: bool
    ) -> None:
        """rows: what a token's row is made of. weights: with each slot its routing weight, and the gradient of it."""
        own = self.rank
        came = sum(routes.back) - routes.back[own]
        slots = sum(routes.receives) - routes.receives[own]
        travelling = 4 + (call.topk_weights.itemsize * len(rows) if weights else 0)
        heads = (self.capacity.ep_world_size - 1) * (self.capacity.local_experts + 1 + NOTES) * 8
        self.traffic = Traffic(
            self.traffic.rows + came * sum(part.shape[1] * part.itemsize for part in rows),
            self.traffic.results + slots * results.shape[1] * results.itemsize,
            self.traffic.routing + slots * travelling + heads,
        )


def _listed(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor]


def _differentiable(options: Options) -> dict[str, Any]:
    """The constants that a gradient takes: it takes roundings for the identity."""
    constants = options._asdict()
    return {name: value for name, value in constants.items() if name not in ("product_dtype", "output_dtype")}


def _bytes(rows: Tensor) -> Tensor:
    """rows [n, ...] as [n, bytes], a view where they are contiguous."""
    width = math.prod(rows.shape[1:]) * rows.itemsize
    return rows.contiguous().view(torch.uint8).view(rows.shape[0], width)
