"""Ranks that share no memory: the same layer over the group's own collectives.

In: a layer's call on this rank. Out: y and the slots that this rank's experts received. Counts go first, then token
rows (each token once per destination rank) with what their experts need to know, and the result rows come back: three
all_to_all, with uneven splits. Runs on whatever device and backend the group has. The gradient of a layer goes this way
whatever its forward did.
"""

import math
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moefuse.comm.barrier import poll
from moefuse.comm.capacity import NOTES, Capacity
from moefuse.comm.errors import CommError, ContextError, PeerError
from moefuse.comm.plans import Asked
from moefuse.comm.rendezvous import Store
from moefuse.comm.routing import Call, Traffic, check_notes, combine
from moefuse.comm.timeline import Timeline
from moefuse.ops.expert import sum_dtype
from moefuse.ops.gradient import add_identities
from moefuse.ops.options import Options

_LOOK_SECONDS = 0.5
_HEAD = 2 + NOTES
"""What a rank tells another first: how many rows and slots it will send, and its notes."""


class _Part(NamedTuple):
    """Rows [n, ...] to be exchanged, so many for each rank, and so many from each rank."""

    rows: Tensor
    sends: list[int]
    receives: list[int]


class _Routes(NamedTuple):
    """Where the slots of one step go, and which come here.

    slots: [m], those of this rank that have an expert, by the rank that has it, in the order of tokens. tokens: [r], of
    the rows sent, each once for every rank that wants it. details: [m] int32, twice the expert of a slot on its rank,
    and one more where its row is the next one. to, back: rows for and from each rank. sends, receives: slots likewise.
    """

    slots: Tensor
    tokens: Tensor
    details: Tensor
    to: list[int]
    back: list[int]
    sends: list[int]
    receives: list[int]


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
        travelling = [call.topk_weights] * call.weights_travel
        expert, rows, *weights = self._dispatch(routes, [call.x], travelling)
        results = call.x.new_empty((0, self.capacity.out_features), dtype=call.result_dtype)
        if expert.numel():
            weight = weights[0] if weights else call.topk_weights.new_ones(expert.shape)
            results = call.experts(rows, expert.unsqueeze(1), weight.unsqueeze(1))
        (arrived,) = self._exchange(_Part(results, routes.receives, routes.sends))
        planes = results.new_empty((*call.topk_ids.shape, results.shape[1]))
        planes.view(-1, results.shape[1]).index_copy_(0, routes.slots, arrived)
        self._count(call, routes, [call.x], results, call.weights_travel)
        nums = torch.bincount(expert, minlength=self.capacity.local_experts)
        return combine(planes, call), nums.int()

    def backward(self, call: Call, grad_y: Tensor, needs: Sequence[bool]) -> list[Tensor]:
        """The gradients that `needs` asks for, in the order of mega_moe_backward, of a layer's y: grad_y [T, O].

        Token rows and grad_y's rows travel as token rows did; what their experts make of them comes back as result
        rows did. All of it travels whatever this rank needs: others may need more. Raises PeerError.
        """
        x, ids, weights, *lists, scale = call.operands
        routes = self._routes(call)
        expert, rows, grads, their_weights = self._dispatch(routes, [x, grad_y], [weights])
        slot_x, slot_weights, *own = torch.ops.moefuse.mega_moe_backward(
            grads, rows, expert.unsqueeze(1), their_weights.unsqueeze(1), *lists, _listed(scale),
            needs=[True, True, *needs[2:]], **_differentiable(call.local_options),
        )  # fmt: skip
        back = (routes.receives, routes.sends)
        arrived, of_weights = self._exchange(_Part(slot_x, *back), _Part(slot_weights.flatten(), *back))
        planes = slot_x.new_empty((ids.numel(), x.shape[1]))
        planes.index_copy_(0, routes.slots, arrived)
        grad_weights = weights.new_zeros(ids.numel())
        grad_weights.index_copy_(0, routes.slots, of_weights)
        self._count(call, routes, [x, grad_y], slot_x, True)
        grad_weights = grad_weights.view(ids.shape)
        wide = sum_dtype(x.dtype)
        exists = (ids >= 0) & (ids < call.options.num_experts)
        grad_x = planes.view(*ids.shape, x.shape[1]).to(wide).where(exists.unsqueeze(-1), 0).sum(1)
        add_identities(grad_x, grad_weights, grad_y.to(wide), x, ids, weights, call.options)
        return [*([grad_x.to(x.dtype)] if needs[0] else []), *([grad_weights] if needs[1] else []), *own]

    def _routes(self, call: Call) -> _Routes:
        """Sort the slots by rank, and tell each rank what it will get. Raises as `check_notes` does."""
        world, local, top_k = self.capacity.ep_world_size, self.capacity.local_experts, call.topk_ids.shape[1]
        ids, tokens = call.topk_ids.reshape(-1).long(), max(call.x.shape[0], 1)
        ranks = torch.arange(world + 1, device=ids.device)
        owner, order = (ids // local).sort(stable=True)
        edges = torch.searchsorted(owner, ranks).tolist()
        slots, owner = (values[edges[0] : edges[-1]] for values in (order, owner))
        key = owner * tokens + slots // top_k
        new = torch.ones_like(key, dtype=torch.bool)
        torch.ne(key[1:], key[:-1], out=new[1:])
        rows = key[new]
        details = (ids.take(slots) % local * 2 + new).int()
        begins = torch.searchsorted(rows, ranks * tokens).tolist()
        to, sends = ([b - a for a, b in pairwise(bounds)] for bounds in (begins, edges))
        notes = (call.x.shape[0], call.fingerprint)
        heads = ids.new_tensor([[*counts, *notes] for counts in zip(to, sends, strict=True)])
        ones = [1] * world
        (came,) = self._exchange(_Part(heads, ones, ones))
        back, receives, their_tokens, prints = map(list, zip(*came.tolist(), strict=True))
        check_notes(their_tokens, prints, call, self.capacity)
        return _Routes(slots, rows % tokens, details, to, back, sends, receives)

    def _dispatch(self, routes: _Routes, tokens: Sequence[Tensor], slots: Sequence[Tensor]) -> list[Tensor]:
        """Of each incoming slot its expert, its token's row out of each of `tokens`, its value out of each of `slots`.

        tokens: [T, ...]. slots: [T, K]. Each result: [n, ...].
        """
        by_slot, by_row = (routes.sends, routes.receives), (routes.to, routes.back)
        details, *parts = self._exchange(
            _Part(routes.details, *by_slot),
            *(_Part(own.index_select(0, routes.tokens), *by_row) for own in tokens),
            *(_Part(own.reshape(-1).take(routes.slots), *by_slot) for own in slots),
        )
        row = (details & 1).cumsum(0) - 1
        rows = [part.index_select(0, row) for part in parts[: len(tokens)]]
        return [(details >> 1).long(), *rows, *parts[len(tokens) :]]

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

    def _exchange(self, *parts: _Part) -> list[Tensor]:
        """What the ranks have for this one of each part, in rank order: one all_to_all of bytes.

        As bytes, because a backend needn't know the dtypes; for each rank what goes there of all parts, part by part.
        """
        group = self._group()
        if group is None:
            raise ContextError("the context's process group was destroyed")
        sends = [_bytes(part, part.sends) for part in parts]
        receives = [_bytes(part, part.receives) for part in parts]
        flat = [part.rows.contiguous().view(-1).view(torch.uint8) for part in parts]
        out = flat[0] if len(flat) == 1 else _by_rank([b.split(n) for b, n in zip(flat, sends, strict=True)])
        to, back = (list(map(sum, zip(*lengths, strict=True))) for lengths in (sends, receives))
        received = out.new_empty(sum(back))
        deadline = time.monotonic() + self.timeout
        try:
            work = dist.all_to_all_single(received, out, back, to, group=group, async_op=True)
            self._wait(work, deadline, sliced=out.device.type == "cpu")
        except CommError:
            raise
        except RuntimeError as error:
            self._raise_poison()
            raise PeerError(f"a rank failed: the group's collective says {error}", -1) from error
        if len(parts) == 1:
            return [_as_rows(received, parts[0])]
        pieces = received.split([n for of_rank in zip(*receives, strict=True) for n in of_rank])
        return [_as_rows(torch.cat(pieces[i :: len(parts)]), part) for i, part in enumerate(parts)]

    def _wait(self, work: Any, deadline: float, *, sliced: bool) -> None:
        """Until it is done. sliced: on the CPU a wait may end before the work does, and takes no core from it."""
        slice_seconds = min(_LOOK_SECONDS, self.timeout)
        while sliced and not work.is_completed():
            with suppress(RuntimeError):  # too early; or the work's own, which is raised below
                work.wait(timedelta(seconds=slice_seconds))
                return
            self._look(deadline)
        poll(work.is_completed, lambda: self._look(deadline))
        work.wait(timedelta(seconds=self.timeout))

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
        heads = (self.capacity.ep_world_size - 1) * _HEAD * 8
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


def _bytes(part: _Part, lengths: Sequence[int]) -> list[int]:
    """Of so many rows."""
    width = math.prod(part.rows.shape[1:]) * part.rows.itemsize
    return [width * length for length in lengths]


def _as_rows(flat: Tensor, part: _Part) -> Tensor:
    """Bytes as rows like those of the part."""
    return flat.view(part.rows.dtype).view(-1, *part.rows.shape[1:])


def _by_rank(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """Pieces of each part, one for each rank, in the order of ranks."""
    return torch.cat([piece for of_rank in zip(*parts, strict=True) for piece in of_rank])
