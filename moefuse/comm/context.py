"""The communication context of an expert-parallel group: made once, before the first forward, shared by all layers.

In: a process group and a capacity. Out: `CommContext`, one per (group, device, capacity, timeout), and `context_for`,
which makes or finds it. A node holds only the context's tensor, which names it; the context belongs to its group and
ends before it does. Making one is collective: every rank must ask for the same contexts in the same order.
"""

import itertools
import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from moefuse.comm import window as windows
from moefuse.comm.capacity import Capacity
from moefuse.comm.collectives import Collectives
from moefuse.comm.errors import CapacityError, ContextError, ContextInUseError, PeerError, reason_of
from moefuse.comm.plans import Asked
from moefuse.comm.presence import announce, ended
from moefuse.comm.rendezvous import TIMEOUT, Meeting, Store, agree
from moefuse.comm.routing import Call, Traffic
from moefuse.comm.shared_memory import SharedMemory
from moefuse.comm.timeline import Timeline
from moefuse.comm.window import Window

TransportName = Literal["auto", "shared memory", "collectives"]
_MAGIC = 0x6D6F6566757365


class Transport(Protocol):
    """How the ranks of a context exchange rows."""

    name: str
    traffic: Traffic

    def step(self, call: Call) -> tuple[Tensor, Tensor]:
        """One layer."""
        ...

    def poison(self, error: BaseException) -> None:
        """Tell the others that this rank can't go on."""
        ...

    def blame(self) -> None:
        """Raise PeerError where it is known which rank is at fault."""
        ...

    def record(self, timeline: Timeline | None) -> None:
        """Keep times there from now on; None: keep none."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class CommContext:
    """See the module text. Made by `context_for`; nothing in it changes afterwards but the count of its traffic.

    rank, world_size, capacity: of this rank and its group. tensor: int64 [4] on the device, the `context` argument of
    `mega_moe.ep`; it names this context and is meaningless in any other process. collectives: the way of gradients, and
    of all else where no memory is shared.
    """

    def __init__(
        self,
        capacity: Capacity,
        rank: int,
        collectives: Collectives,
        shared: SharedMemory | None = None,
        device: str = "cpu",
    ) -> None:
        self.capacity, self.rank, self.world_size = capacity, rank, capacity.ep_world_size
        self._transport: Transport = shared or collectives
        self._collectives = collectives
        self._lock = threading.Lock()
        self._closed = ""
        self._pid = os.getpid()
        self._handle = secrets.randbits(62)
        self.tensor = torch.tensor(
            [_MAGIC, self._handle, rank, self.world_size], dtype=torch.int64, device=device
        )
        _handles[self._handle] = self

    @property
    def transport(self) -> str:
        """The name of the way rows take."""
        return self._transport.name

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has moved between ranks so far."""
        ways = {id(way): way.traffic for way in (self._transport, self._collectives)}
        return Traffic(*map(sum, zip(*ways.values(), strict=True)))

    @property
    def bytes(self) -> int:
        """Shared memory that this rank owns."""
        return self.capacity.window_bytes if self._transport.name == SharedMemory.name else 0

    @property
    def closed(self) -> str:
        """Why the context can't be used any more, "" while it can."""
        return self._closed

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """One layer: y [T, O] and the slots that each local expert received [E_l] int32.

        Raises:
            ContextError: the call isn't what the context was made for, or the context is closed.
            CapacityError: some rank has too many tokens; raised on all ranks, which may go on.
            PeerError: another rank raised, died or didn't come in time.
        """
        self._check(call)
        with self._using():
            return self._transport.step(call)

    def backward(self, call: Call, grad_y: Tensor, needs: Sequence[bool]) -> list[Tensor]:
        """The gradients that `needs` asks for, of one layer whose y has the gradient grad_y [T, O].

        Raises what `forward` raises.
        """
        self._check(call)
        with self._using():
            try:
                return self._collectives.backward(call, grad_y, needs)
            except PeerError as error:
                if error.rank < 0:
                    self._transport.blame()
                raise

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Inside, a step runs: one at a time. What goes wrong is news for the other ranks, and the context's end."""
        with self._lock:
            self._demand_open()
            try:
                yield
            except CapacityError:
                raise
            except BaseException as error:
                self.fail(error)
                raise

    def fail(self, error: BaseException) -> None:
        """This rank takes part no more: the other ranks hear of it, now or in their next step."""
        if self._closed:
            return
        self._closed = f"it failed before: {reason_of(error)}"
        for way in {self._transport, self._collectives}:
            way.poison(error)

    @contextmanager
    def recording(self, capacity: int = 1 << 16) -> Iterator[Timeline]:
        """Keep the times of this rank's steps, up to so many events, as long as the block runs.

        The C++ step keeps them; one that runs in torch operators leaves no event. Raises ContextError for a context
        whose ranks share no memory.
        """
        timeline = Timeline(capacity)
        with self._lock:
            self._transport.record(timeline)
        try:
            yield timeline
        finally:
            with self._lock:
                self._transport.record(None)

    def close(self, timeout: float = TIMEOUT) -> None:
        """Give the windows back, after the forward that runs now, if any.

        Raises ContextInUseError where that forward doesn't end within `timeout` seconds.
        """
        if not self._lock.acquire(timeout=timeout):
            raise ContextInUseError(f"a forward has been using the context for more than {timeout:g} s")
        try:
            self._closed = self._closed or "it was closed"
            _handles.pop(self._handle, None)
            self._transport.close()
        finally:
            self._lock.release()

    def _demand_open(self) -> None:
        if os.getpid() != self._pid:
            raise ContextError("the context belongs to another process: a fork can't use it")
        if self._closed:
            raise ContextError(f"the context can't be used: {self._closed}")

    def _check(self, call: Call) -> None:
        made = self.capacity
        asked = {
            "ep_world_size": call.options.ep_world_size,
            "num_experts": call.options.num_experts,
            "top_k": call.topk_ids.shape[1],
            "hidden": call.x.shape[1],
            "out_features": call.out_features,
            "dtype": call.x.dtype,
        }
        for name, value in asked.items():
            if value != getattr(made, name):
                raise ContextError(f"{name}: the context was made for {getattr(made, name)}, got {value}")
        if call.result_dtype != made.result_dtype:
            raise ContextError(
                f"rows_dtype: the context was made for {made.result_dtype}, got {call.result_dtype}"
            )


_handles: dict[int, CommContext] = {}


def resolve(tensor: Tensor) -> CommContext:
    """The context that a tensor names. Raises ContextError for anything else, and for a context that is gone."""
    if tensor.dtype != torch.int64 or tensor.shape != (4,):
        raise ContextError(f"context: expected int64 [4], got {tensor.dtype} {list(tensor.shape)}")
    magic, handle, *_ = tensor.tolist()
    context = _handles.get(handle) if magic == _MAGIC else None
    if context is None:
        raise ContextError("context: expected the tensor of an open CommContext of this process")
    return context


_Contexts = dict[tuple[Capacity, str, str, float], CommContext]
_groups: "weakref.WeakKeyDictionary[Any, _Contexts]" = weakref.WeakKeyDictionary()
# by the group's name, which a new group of the same store may have again
_attempts: dict[str, Iterator[int]] = {}
# collective: contexts are made one after another, in the order in which they are asked for
_making = threading.RLock()


def context_for(
    group: Any,
    capacity: Capacity,
    *,
    device: str = "cpu",
    transport: TransportName = "auto",
    timeout: float = TIMEOUT,
) -> CommContext:
    """The context of a group for a capacity; made at the first call, by all ranks together.

    group: a ProcessGroup, or None for the default group. transport: "auto" shares memory where all ranks are on one
    host and their tensors on the CPU, and uses the group's collectives elsewhere. timeout: seconds, for making it and
    for each wait in a forward.

    Raises:
        ContextError: the group isn't what the capacity says, or the ranks disagree.
        RendezvousError: not all ranks came, or one of them failed; the message names them. Nothing is remembered of a
            failure: the ranks may try again.
        WindowError: shared memory can't be had.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ContextError(
            "group: torch.distributed isn't initialised (torch.distributed.init_process_group)"
        )
    process_group: Any = dist.group.WORLD if group is None else group
    if not _is_member(process_group):
        raise ContextError(f"group: expected a process group that this rank is in, got {process_group!r}")
    if process_group.size() != capacity.ep_world_size:
        raise ContextError(
            f"group: expected {capacity.ep_world_size} ranks (ep_world_size), got {process_group.size()}"
        )
    if transport not in ("auto", SharedMemory.name, Collectives.name):
        raise ContextError(
            f"transport: expected auto, {SharedMemory.name} or {Collectives.name}, got {transport!r}"
        )
    key = (capacity, device, transport, timeout)
    with _making:
        _close_orphans()
        known = _groups.get(process_group)
        if known is None:
            known = _groups[process_group] = {}
            # no more than that at exit: the windows have no names
            weakref.finalize(process_group, _close_all, known).atexit = False
        found = known.get(key)
        if found is None or found.closed:
            found = known[key] = _make(process_group, capacity, device, transport, timeout)
        return found


def contexts() -> list[CommContext]:
    """All open contexts of this process."""
    _close_orphans()
    return list(_handles.values())


def close_contexts(group: Any = None) -> None:
    """Close the contexts of a group (None: of the default group). They also close when the group is destroyed."""
    process_group = dist.group.WORLD if group is None and dist.is_initialized() else group
    with _making:
        known = _groups.get(process_group) if process_group is not None else None
        if known is not None:
            _close_all(known)


def fail_contexts(group: Any, error: BaseException) -> None:
    """This rank leaves the program that the ranks of a group run together: see `CommContext.fail`."""
    with _making:
        for context in _groups.get(group, {}).values():
            context.fail(error)


def _close_orphans() -> None:
    """Close the contexts of groups that were destroyed and whose objects somebody still holds."""
    with _making:
        for group, known in list(_groups.items()):
            if not _is_member(group):
                _close_all(known)


def _close_all(known: _Contexts) -> None:
    while known:
        _, context = known.popitem()
        context.close()


def _is_member(group: Any) -> bool:
    """True while a group that this process is in exists. With `_store`, all that is read of torch's own books."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def _store(group: Any) -> Store:
    return cast(Store, dist.distributed_c10d._world.pg_map[group][1])


def _make(
    group: Any,
    capacity: Capacity,
    device: str,
    transport: TransportName,
    timeout: float,
) -> CommContext:
    rank, world, store = group.rank(), group.size(), _store(group)
    wanted = {**capacity.to_dict(), "device": torch.device(device).type, "transport": transport}
    wanted["timeout"] = timeout
    name = f"{group.group_name}/{next(_attempts.setdefault(group.group_name, itertools.count()))}"
    announce()
    meeting = Meeting(store, name, rank, world, timeout, partial(ended, group))
    collectives = Collectives(capacity, group, store, name, timeout)
    with _telling(meeting), ExitStack() as undo:
        hello = {"host": _host(), "run": secrets.randbits(62), "wanted": wanted}
        said = meeting.exchange("hello", hello)
        agree([each["wanted"] for each in said], "the ranks ask for different contexts")
        if _share_memory(transport, device, [each["host"] for each in said]):
            views = _exchange_windows(meeting, capacity, said[0]["run"], undo)
            shared = SharedMemory(capacity, views, rank, timeout, Asked(group))
        else:
            shared = None
        context = CommContext(capacity, rank, collectives, shared, device)
        undo.callback(_discard, context)
        meeting.exchange("made", True)  # all ranks have it, or none
        meeting.conclude()
        undo.pop_all()
        return context


def _discard(context: CommContext) -> None:
    """Of a context that isn't there on all ranks. Who has it all the same hears of it."""
    context.fail(ContextError("it couldn't be made"))
    context.close()


@contextmanager
def _telling(meeting: Meeting) -> Iterator[None]:
    """Whatever goes wrong here is news for the other ranks."""
    try:
        yield
    except BaseException as error:
        meeting.abandon(reason_of(error))
        raise


def _host() -> str | None:
    """Equal for two processes exactly where they see the same shared memory; None where there is none."""
    if not windows.available():
        return None
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}/{os.stat(windows.SHM).st_dev}"


def _share_memory(transport: TransportName, device: str, hosts: list[str | None]) -> bool:
    """Decided from what all ranks said, so alike on all of them."""
    possible = torch.device(device).type == "cpu" and None not in hosts and len(set(hosts)) == 1
    if transport == SharedMemory.name and not possible:
        raise ContextError("transport: shared memory needs all ranks on one host, and tensors on the CPU")
    return possible and transport != Collectives.name


def _exchange_windows(meeting: Meeting, capacity: Capacity, run: int, undo: ExitStack) -> list[Window]:
    """Everybody's window, mapped; no name is left when this returns. undo: closes them."""
    windows.remove_stale()
    rank, world, size = meeting.rank, meeting.world, capacity.window_bytes
    own = Window.create(size, run, rank, world)
    undo.callback(own.close)
    views: list[Window] = []
    for peer, name in enumerate(meeting.exchange("window", own.name)):
        view = own if peer == rank else Window.attach(name, size, run, peer, world)
        undo.callback(view.close)
        views.append(view)
    meeting.exchange("mapped", True)
    own.unlink()
    return views
