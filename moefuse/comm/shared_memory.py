"""One host: ranks that map each other's windows.

In: a layer's call on this rank. Out: y and the slots that this rank's experts received. Each rank publishes its rows
and sorted slots in its own window and pushes the edges of an expert rank's slots to that rank; barrier. Each rank
pulls the rows bound for its experts, block by block of experts, every token once, multiplies, and scatters the result
rows into their source ranks' planes; barrier. Each rank sums its own planes.

Two barriers are enough to use the same memory again in the next step: nobody writes what it published before the
second barrier, which comes after the last pull, and nobody scatters before the first barrier of the next step, which
comes after the sum.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefuse.comm.barrier import Barrier
from moefuse.comm.capacity import NOTES, Capacity
from moefuse.comm.errors import CommError, PeerError
from moefuse.comm.plans import Asked
from moefuse.comm.routing import Call, Traffic, check_notes, combine, sort_slots
from moefuse.comm.timeline import Timeline
from moefuse.comm.window import Window

_BLOCK_ROWS = (
    512  # so many rows are pulled ahead of their GEMMs: they and their hidden rows stay in the cache
)


class _View(NamedTuple):
    """A window's tensors; see `Capacity`."""

    edges: Tensor
    x: Tensor
    slots: Tensor
    weights: Tensor
    planes: Tensor


class _Incoming(NamedTuple):
    """The slots bound for this rank, ordered by (block, source rank, expert).

    slot, expert, weight: [n]; ones for routing weights that are applied at home. row: [n], where among the received
    rows a slot's token is. token: [m], the received rows, ordered by (block, source rank). slot_counts, row_counts:
    per block and source rank.
    """

    slot: Tensor
    expert: Tensor
    weight: Tensor
    row: Tensor
    token: Tensor
    slot_counts: list[list[int]]
    row_counts: list[list[int]]


class SharedMemory:
    """The transport between ranks of one host."""

    name = "shared memory"

    def __init__(
        self,
        capacity: Capacity,
        windows: Sequence[Window],
        rank: int,
        timeout: float,
        asked: Asked | None = None,
    ) -> None:
        self.capacity, self.rank = capacity, rank
        self.traffic = Traffic()
        self._windows = windows
        self._barrier = Barrier(windows, rank, timeout, asked)
        self._views = [
            _View(*(window.tensor(section) for section in capacity.sections.values())) for window in windows
        ]
        own = self._views[rank]
        pushed = (len(windows) - 1) * own.edges[0].nbytes
        self._bytes = (own.x[0].nbytes, own.planes[0].nbytes, own.weights.itemsize, pushed)
        # the targets need the policy, and the policy needs the capacities of this package
        from moefuse.comm.native import NativeStep

        self._native = NativeStep(capacity, [view.x for view in self._views], self._barrier)

    def step(self, call: Call) -> tuple[Tensor, Tensor]:
        """y [T, O] and the slots each local expert received [E_l] int32. Raises what `Barrier.wait` raises."""
        done = self._native.run(call)
        if done is None:
            return self._step(call)
        if done.y is None:
            self._check(call)
            raise AssertionError("the kernel refuses a step whose notes are good")
        self._count(call, done.pulled, done.returned)
        return done.y, done.nums

    def _step(self, call: Call) -> tuple[Tensor, Tensor]:
        """The same in torch operators, for any target."""
        own = self._views[self.rank]
        self._publish(call)
        self._barrier.wait()
        self._check(call)
        edges = own.edges[:, :-NOTES].clone()
        counts = edges.diff()
        incoming = self._incoming(call, edges, counts)
        self._compute(call, incoming)
        self._barrier.wait()
        planes = own.planes[: call.topk_ids.numel()].view(*call.topk_ids.shape, self.capacity.out_features)
        rows = sum(sum(of) - of[self.rank] for of in incoming.row_counts)
        slots = sum(sum(of) - of[self.rank] for of in incoming.slot_counts)
        self._count(call, rows, slots)
        return combine(planes, call), counts.sum(0, dtype=torch.int32)

    def poison(self, error: BaseException) -> None:
        """This rank can't go on: let the others know."""
        if not isinstance(error, PeerError):  # whose bearer has passed it on
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self._windows[self.rank].poison(self.rank, text)

    def blame(self) -> None:
        """Raise PeerError naming the rank at fault for what the group's collectives didn't explain."""
        self._barrier.blame()

    def record(self, timeline: Timeline | None) -> None:
        """The C++ step keeps its times there; None: it keeps none."""
        self._native.timeline = timeline

    def close(self) -> None:
        """Let go of all windows."""
        self._native.close()
        self._views.clear()
        for window in self._windows:
            window.close()

    def _publish(self, call: Call) -> None:
        own = self._views[self.rank]
        order, edges = sort_slots(call)
        tokens, experts = call.x.shape[0], self.capacity.local_experts
        if tokens <= self.capacity.max_tokens_per_rank:
            own.x[:tokens] = call.x
            own.slots[: order.numel()] = order
            if call.weights_travel:
                own.weights[: order.numel()] = call.topk_weights.reshape(-1).take(order)
        notes = edges.new_tensor([tokens, call.fingerprint])
        for peer, view in enumerate(self._views):
            bounds = edges[peer * experts : (peer + 1) * experts + 1]
            torch.cat((bounds, notes), out=view.edges[self.rank])

    def _incoming(self, call: Call, edges: Tensor, counts: Tensor) -> _Incoming:
        ranks, experts = counts.shape
        bounds = list(zip(edges[:, 0].tolist(), edges[:, -1].tolist(), strict=True))
        slot = torch.cat(
            [v.slots[begin:end] for v, (begin, end) in zip(self._views, bounds, strict=True)]
        ).long()
        weight = torch.ones(slot.shape, dtype=torch.float32, device="cpu")
        if call.weights_travel:
            weight = torch.cat([v.weights[a:b] for v, (a, b) in zip(self._views, bounds, strict=True)])
        source = torch.arange(ranks, device="cpu").repeat_interleave(counts.sum(1))
        expert = torch.arange(experts, device="cpu").repeat(ranks).repeat_interleave(counts.flatten())
        key = source * self.capacity.max_tokens_per_rank + slot // self.capacity.top_k
        key, row = key.unique(return_inverse=True)
        blocks = _blocks(counts.sum(0).tolist())
        block, first = torch.zeros_like(slot), torch.zeros_like(key)
        if len(blocks) > 1:
            block = torch.arange(len(blocks), device="cpu").repeat_interleave(
                torch.tensor(blocks, device="cpu")
            )[expert]
            order = block.sort(stable=True).indices
            source, slot, expert, weight, row, block = (
                tensor[order] for tensor in (source, slot, expert, weight, row, block)
            )
            first = first.fill_(len(blocks)).scatter_reduce_(0, row, block, "amin")
            arrival = first.sort(stable=True).indices
            key, first = key[arrival], first[arrival]
            row = arrival.argsort()[row]
        token_source = key // self.capacity.max_tokens_per_rank
        slot_counts = _counted(block * ranks + source, len(blocks), ranks)
        row_counts = _counted(first * ranks + token_source, len(blocks), ranks)
        token = key % self.capacity.max_tokens_per_rank
        return _Incoming(slot, expert, weight, row, token, slot_counts, row_counts)

    def _compute(self, call: Call, incoming: _Incoming) -> None:
        """Pull, multiply and scatter, block by block."""
        received = call.x.new_empty((incoming.token.numel(), call.x.shape[1]))
        pulled = done = 0
        for row_counts, slot_counts in zip(incoming.row_counts, incoming.slot_counts, strict=True):
            for view, count in zip(self._views, row_counts, strict=True):
                tokens = incoming.token[pulled : pulled + count]
                torch.index_select(view.x, 0, tokens, out=received[pulled : pulled + count])
                pulled += count
            block = slice(done, done + sum(slot_counts))
            if block.start == block.stop:
                continue
            results = call.experts(
                received[incoming.row[block]],
                incoming.expert[block].unsqueeze(1),
                incoming.weight[block].unsqueeze(1),
            )
            slots = incoming.slot[block].split(slot_counts)
            for view, to, rows in zip(self._views, slots, results.split(slot_counts), strict=True):
                view.planes.index_copy_(0, to, rows)
            done = block.stop

    def _check(self, call: Call) -> None:
        try:
            tokens, prints = self._views[self.rank].edges[:, -NOTES:].t().tolist()
            check_notes(tokens, prints, call, self.capacity)
        except CommError:
            self._barrier.wait()  # a rank that goes on may not push its next notes before all have read these
            raise

    def _count(self, call: Call, rows: int, slots: int) -> None:
        """rows came from other ranks, results of slots went to them."""
        row, result, weight, pushed = self._bytes
        travelling = 4 + (weight if call.weights_travel else 0)
        before = self.traffic
        self.traffic = Traffic(
            before.rows + rows * row,
            before.results + slots * result,
            before.routing + slots * travelling + pushed,
        )


def _blocks(counts: Sequence[int]) -> list[int]:
    """How many experts each block has: about _BLOCK_ROWS slots, at least one block."""
    blocks, rows = [0], 0
    for count in counts:
        if blocks[-1] and rows + count > _BLOCK_ROWS:
            blocks.append(0)
            rows = 0
        blocks[-1] += 1
        rows += count
    return blocks


def _counted(keys: Tensor, blocks: int, ranks: int) -> list[list[int]]:
    """How often each (block, rank) is in keys."""
    counts: list[list[int]] = torch.bincount(keys, minlength=blocks * ranks).view(blocks, ranks).tolist()
    return counts
