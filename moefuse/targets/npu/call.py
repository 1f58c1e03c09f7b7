"""One call of aclnnMegaMoe: handles made, both stages run, handles destroyed.

In: an identified library, the runtime library that makes handles, values by name. Out: the operator enqueued on a
stream. Tensors are described by `Buffer`; their memory stays the caller's.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char_p, c_float, c_int, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from moefuse.targets.npu.library import EXECUTE, WORKSPACE, Library
from moefuse.targets.npu.plan import Makers, Plan

FORMAT_ND = 2


class CallError(RuntimeError):
    """The vendor's library refused a call. Says which stage, the code and what it means."""


@dataclass(frozen=True)
class Buffer:
    """A tensor in device memory.

    dtype: the number of the C interface. storage: the shape of the memory where its format isn't plain (ND).
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: int
    format: int = FORMAT_ND
    storage: tuple[int, ...] = ()


class Handles:
    """The handles of one call, destroyed together. A list owns its tensors: destroying it destroys them."""

    def __init__(self, runtime: ctypes.CDLL) -> None:
        self._runtime = runtime
        self._owned: list[tuple[str, int]] = []
        runtime.aclCreateTensor.restype = c_void_p
        runtime.aclCreateTensor.argtypes = [
            *(c_void_p, c_uint64, c_int, c_void_p, c_int64, c_int, c_void_p, c_uint64, c_void_p)
        ]
        for name in ("TensorList", "FloatArray"):
            create = getattr(runtime, f"aclCreate{name}")
            create.restype, create.argtypes = c_void_p, [c_void_p, c_uint64]
        for name in ("Tensor", "TensorList", "FloatArray"):
            getattr(runtime, f"aclDestroy{name}").argtypes = [c_void_p]

    def __enter__(self) -> "Handles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._owned:
            name, handle = self._owned.pop()
            getattr(self._runtime, f"aclDestroy{name}")(handle)

    @property
    def makers(self) -> Makers:
        """For `Plan.arguments`."""
        return Makers(self.tensor, self.tensors, self.floats)

    def tensor(self, buffer: Buffer) -> int:
        """The handle of one tensor."""
        return self._keep("Tensor", self._tensor(buffer))

    def tensors(self, buffers: Sequence[Buffer]) -> int:
        """The handle of a list of tensors."""
        made: list[int] = []
        try:
            for buffer in buffers:
                made.append(self._tensor(buffer))  # noqa: PERF401  (those made so far must be known in `finally`)
            return self._keep(
                "TensorList", self._create("TensorList", (c_void_p * len(made))(*made), len(made))
            )
        except CallError:
            self._owned += [("Tensor", handle) for handle in made]
            raise

    def floats(self, numbers: Sequence[float]) -> int:
        """The handle of a list of numbers."""
        values = (c_float * len(numbers))(*numbers)
        return self._keep("FloatArray", self._create("FloatArray", values, len(numbers)))

    def _tensor(self, buffer: Buffer) -> int:
        dims = len(buffer.shape)
        storage = buffer.storage or buffer.shape
        handle = self._runtime.aclCreateTensor(
            (c_int64 * dims)(*buffer.shape),
            dims,
            buffer.dtype,
            (c_int64 * dims)(*buffer.strides),
            0,
            buffer.format,
            (c_int64 * len(storage))(*storage),
            len(storage),
            buffer.address,
        )
        return _made("Tensor", handle)

    def _create(self, name: str, values: ctypes.Array[Any], count: int) -> int:
        return _made(name, getattr(self._runtime, f"aclCreate{name}")(values, count))

    def _keep(self, name: str, handle: int) -> int:
        self._owned.append((name, handle))
        return handle


def _made(name: str, handle: int | None) -> int:
    if not handle:
        raise CallError(f"aclCreate{name} returned null")
    return handle


class MegaMoe:
    """Calls one library's aclnnMegaMoe.

    allocate: gives device memory of so many bytes that is the operator's until what is enqueued next on the stream: as
        a caching allocator gives it, and a captured graph's own pool while one is captured. Nothing is kept from call
        to call, since a pool whose graph was captured must hold no memory but its outputs'.
    """

    def __init__(
        self, library: Library, revision: str, runtime: ctypes.CDLL, allocate: Callable[[int], int]
    ) -> None:
        self.plan = Plan(revision)
        self._runtime = runtime
        self._allocate = allocate
        self._size = getattr(library.handle, WORKSPACE)
        self._size.argtypes, self._size.restype = self.plan.argtypes, c_int
        self._run = getattr(library.handle, EXECUTE)
        self._run.argtypes = [c_void_p, c_uint64, c_void_p, c_void_p]
        self._run.restype = c_int

    def __call__(self, values: Mapping[str, Any], stream: int) -> None:
        """Enqueue the operator.

        Raises:
            PlanError: values that this revision can't take; nothing was called.
            CallError: the library refused.
        """
        with Handles(self._runtime) as handles:
            arguments = self.plan.arguments(values, handles.makers)
            size, executor = c_uint64(), c_void_p()
            self._check(WORKSPACE, self._size(*arguments, ctypes.byref(size), ctypes.byref(executor)))
            address = self._allocate(size.value) if size.value else 0
            self._check(EXECUTE, self._run(address, size.value, executor, stream))

    def _check(self, stage: str, status: int) -> None:
        if status:
            detail = _recent_error(self._runtime)
            raise CallError(f"{stage} of {self.plan.revision} failed: {meaning(status)}{detail}")


def _recent_error(runtime: ctypes.CDLL) -> str:
    """The runtime's own words, if it has any."""
    if not hasattr(runtime, "aclGetRecentErrMsg"):
        return ""
    runtime.aclGetRecentErrMsg.restype = c_char_p
    text: bytes | None = runtime.aclGetRecentErrMsg()
    return f". The runtime says: {text.decode(errors='replace').strip()}" if text else ""


_MEANINGS = {
    161001: "a required argument is null; if all were given, the library is of another revision than its package says",
    161002: "an argument is out of the operator's limits",
    361001: "the device runtime failed",
    507015: "an AI core stopped with an error; check that max_recv_token_num and the buffer hold the worst case",
    507035: "a vector core stopped with an error; check that the buffer was sized for the most tokens of any rank",
    507057: "communication between ranks failed; all ranks must pass the same capacities",
}


def meaning(status: int) -> str:
    """What a status code of the C interface means, in words."""
    if status in _MEANINGS:
        return f"error {status}, {_MEANINGS[status]}"
    if 561000 <= status < 562000:
        return (
            f"error {status}, inside the operator package: its kernels may not be installed for this device"
        )
    return f"error {status}"
