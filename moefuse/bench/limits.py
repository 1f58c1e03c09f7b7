"""What this machine could do at best: probes for reading memory and for multiplying, and the roofline of a layer.

In: a dtype, a number of threads. Out: bytes and operations per second. The probes are C++ (probe.cpp), built into the
kernel's cache; the one for reading also pushes a layer's weights out of the caches, as the other layers of a model do.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from moefuse.bench.shapes import Layer
from moefuse.targets.cpu import build, huge_pages, isa

_SOURCE = Path(__file__).with_name("probe.cpp")
_LEAST = 1 << 28
_L3 = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


class Probes:
    """The probes for one dtype and number of threads, timed by `clock`. Raises RuntimeError if they can't be built."""

    def __init__(
        self, dtype: torch.dtype, threads: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        chosen = isa.available()[0]
        try:
            self._library = build.small_library(
                chosen, "probe", "the probes", _SOURCE.read_text(encoding="utf-8")
            )
        except build.BuildError as error:
            raise RuntimeError(f"moefuse bench measures the machine's limits in C++: {error}") from None
        self._library.probe_read.restype = self._library.probe_peak.restype = ctypes.c_double
        self._library.probe_read.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
        self._half, self._threads, self._clock = int(dtype == torch.bfloat16), threads, clock
        self._memory = torch.ones(max(_LEAST, 2 * _cache_bytes()) // 4)
        huge_pages.use_for([self._memory])

    def read(self) -> float:
        """Bytes per second of one pass over memory larger than the caches."""
        memory, start = self._memory, self._clock()
        self._library.probe_read(memory.data_ptr(), memory.nbytes, self._threads)
        return memory.nbytes / (self._clock() - start)

    def peak(self) -> float:
        """Multiplications and additions per second, operands in the L1 cache, in the kernel's own instructions."""
        start = self._clock()
        operations: float = self._library.probe_peak(self._half, self._threads)
        return operations / (self._clock() - start)


def _cache_bytes() -> int:
    """Of the L3 cache that one core sees; 0 where that isn't told."""
    text = _L3.read_text().strip() if _L3.exists() else "0K"
    return int(text[:-1]) << 10 if text.endswith("K") and text[:-1].isdecimal() else 0


def roof(layer: Layer, ids: Tensor, read: float, peak: float) -> float:
    """The milliseconds that memory or arithmetic need at least, at these bytes and operations per second."""
    reading = len(ids.unique()) * layer.expert_bytes / read
    multiplying = 2 * ids.numel() * layer.shape.expert_values / peak
    return float(max(reading, multiplying) * 1e3)
