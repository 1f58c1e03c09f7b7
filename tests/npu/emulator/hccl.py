"""Collectives of emulated devices: over gloo on this host, when their stream's turn comes.

In: `install(...)` in each process. Out: torch_npu's real ProcessGroupHCCL works between processes; a captured graph
communicates at each replay, so all ranks have to replay as often. What isn't written here is refused by torch_npu.
"""

import ctypes
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_DTYPES = {
    0: torch.int8,
    2: torch.int32,
    3: torch.float16,
    4: torch.float32,
    5: torch.int64,
    7: torch.uint8,
    10: torch.float64,
    11: torch.bfloat16,
}
_OPS = {0: dist.ReduceOp.SUM, 1: dist.ReduceOp.PRODUCT, 2: dist.ReduceOp.MAX, 3: dist.ReduceOp.MIN}
TIMEOUT = timedelta(seconds=120)


class _Collective(ctypes.Structure):
    """As in runtime/hccl.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "comm", "send", "recv", "count", "dtype", "more")),
        ("counts", ctypes.POINTER(ctypes.c_int64) * 4),
    )


_groups: list[Any] = []


def _join(name: bytes, world: int, rank: int) -> int:
    try:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = TIMEOUT
        store = dist.FileStore(str(Path(tempfile.gettempdir()) / name.decode()), world)
        _groups.append(dist.ProcessGroupGloo(store, rank, world, options))
        return len(_groups) - 1
    except BaseException as error:
        print(f"emulated HCCL: {error}", flush=True)
        return -1


def _run(pointer: Any) -> int:
    try:
        given = pointer.contents
        _KINDS[given.kind](_groups[given.comm], given, _DTYPES[given.dtype])
        return 0
    except BaseException as error:
        print(f"emulated HCCL: {error}", flush=True)
        return 4


def _at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """Memory of the host as a tensor."""
    if not count:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def _all_reduce(group: Any, given: Any, dtype: torch.dtype) -> None:
    total = _at(given.send, given.count, dtype).clone()
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS[given.more]
    group.allreduce([total], options).wait()
    _at(given.recv, given.count, dtype).copy_(total)


def _broadcast(group: Any, given: Any, dtype: torch.dtype) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = given.more
    group.broadcast([_at(given.send, given.count, dtype)], options).wait()


def _reduce_scatter(group: Any, given: Any, dtype: torch.dtype) -> None:
    total = _at(given.send, given.count * group.size(), dtype).clone()
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS[given.more]
    group.allreduce([total], options).wait()
    _at(given.recv, given.count, dtype).copy_(total[group.rank() * given.count :][: given.count])


def _all_gather(group: Any, given: Any, dtype: torch.dtype) -> None:
    every = [torch.empty(given.count, dtype=dtype) for _ in range(group.size())]
    group.allgather([every], [_at(given.send, given.count, dtype)]).wait()
    _at(given.recv, given.count * group.size(), dtype).copy_(torch.cat(every))


def _all_to_all(group: Any, given: Any, dtype: torch.dtype) -> None:
    sent, start, received, to = (counts[: group.size()] for counts in given.counts)
    pieces = [_at(given.send + a * dtype.itemsize, n, dtype) for a, n in zip(start, sent, strict=True)]
    into = torch.empty(sum(received), dtype=dtype)
    group.alltoall_base(into, torch.cat(pieces), received, sent, dist.AllToAllOptions()).wait()
    for a, n, piece in zip(to, received, into.split(received), strict=True):
        _at(given.recv + a * dtype.itemsize, n, dtype).copy_(piece)


_KINDS: dict[int, Callable[[Any, Any, torch.dtype], None]] = dict(
    enumerate((_all_reduce, _broadcast, _reduce_scatter, _all_gather, _all_to_all))
)
_JOIN = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)(_join)
_RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Collective))(_run)


def install(runtime: Path) -> None:
    """Answer the runtime's collectives. runtime: the emulated libascendcl, loaded."""
    ctypes.CDLL(str(runtime)).emulated_set_collectives(_JOIN, _RUN)
