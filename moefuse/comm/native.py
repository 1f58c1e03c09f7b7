"""A step between ranks of one host in C++: the cpu target's kernel pulls its rows itself.

In: a layer's call on this rank. Out: y and the slots that this rank's experts received, or None for a call that the
kernel doesn't take: `SharedMemory` then does the same in torch operators. The windows and what is written there are
the same, so each rank chooses for itself. Everything is one call of `moefuse_step` (targets/cpu/native/exchange.h);
it comes back after some milliseconds of waiting, so that signals, deaths and deadlines are seen here.
"""

import ctypes
import os
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefuse.comm.barrier import Barrier
from moefuse.comm.capacity import Capacity
from moefuse.comm.routing import Call
from moefuse.comm.timeline import Timeline
from moefuse.comm.window import Window
from moefuse.targets.cpu import CpuTarget, kernel

_BUSY_SPINS, _SHARED_SPINS = 4000, 50
_PATIENCE_NS = 5_000_000
_PHASE, _LATE, _PULLED, _RETURNED = range(4, 8)  # places in a Step
_FINISHED, _WAITING, _NOTED, _NO_MEMORY = range(4)


class Done(NamedTuple):
    """y [T, O], nums [E_l] int32; token rows pulled from other ranks, and result rows that went to them.

    y is None where a rank said that the step can't be: the notes in this rank's window say what.
    """

    y: Tensor | None
    nums: Tensor
    pulled: int
    returned: int


class NativeStep:
    """The C++ step of one context. views: the windows' addresses are those of their `x`."""

    def __init__(self, capacity: Capacity, x_views: Sequence[Tensor], barrier: Barrier) -> None:
        self._barrier = barrier
        sections = capacity.sections
        bases = array("q", [view.data_ptr() - sections["x"].offset for view in x_views])
        # taken as rows come: pages that nobody writes to cost nothing
        received = torch.empty(capacity.receive_bytes, dtype=torch.uint8, device="cpu")
        states = torch.zeros(capacity.max_recv_tokens, dtype=torch.uint8, device="cpu")
        threads = torch.get_num_threads() * capacity.ep_world_size
        spins = _BUSY_SPINS if threads <= len(os.sched_getaffinity(0)) else _SHARED_SPINS
        names = ("edges", "x", "slots", "weights", "planes")
        self._exchange = array(
            "q",
            (
                bases.buffer_info()[0], capacity.ep_world_size, barrier.rank, capacity.local_experts,
                capacity.top_k, capacity.max_tokens_per_rank, Window.EPOCH * 8,
                *(sections[name].offset for name in names),
                capacity.hidden * capacity.dtype.itemsize, capacity.out_features * capacity.result_dtype.itemsize,
                received.data_ptr(), states.data_ptr(), spins, _PATIENCE_NS,
            ),
        )  # fmt: skip
        self._keep: tuple[object, ...] = (bases, received, states)
        self.timeline: Timeline | None = None

    def run(self, call: Call) -> Done | None:
        """One step; None where the kernel doesn't take the call. Raises PeerError, MemoryError."""
        library = _library(call)
        if library is None:
            return None
        options = call.options._replace(num_experts=call.options.local_experts, ep_world_size=1)
        if kernel.supports(call.operands, options):
            return None
        layer = kernel.pack(call.operands, options)
        trace = 0 if self.timeline is None else self.timeline.address
        step = array(
            "q",
            (
                self._exchange.buffer_info()[0],
                call.fingerprint,
                call.weights_travel,
                trace,
                *(0, 0, 0, 0),
            ),
        )
        where, phase, deadline = step.buffer_info()[0], -1, 0.0
        while (status := library.moefuse_step(where, layer.description)) == _WAITING:
            if step[_PHASE] != phase:
                phase, deadline = step[_PHASE], time.monotonic() + self._barrier.timeout
            self._barrier.look(step[_LATE], deadline)
        if status == _NO_MEMORY:
            raise kernel.out_of_memory()
        return Done(layer.y if status == _FINISHED else None, layer.nums, step[_PULLED], step[_RETURNED])

    def close(self) -> None:
        """Give the received rows' memory back; nothing may run afterwards."""
        self._keep = ()


def _library(call: Call) -> ctypes.CDLL | None:
    """The library for calls of the cpu target."""
    if getattr(call.kernel, "__func__", None) is not CpuTarget.run:
        return None
    library = kernel.load(call.operands.x.dtype)
    return None if isinstance(library, str) else library
