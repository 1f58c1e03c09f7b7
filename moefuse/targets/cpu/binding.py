"""Calls of the operator that skip Python: native/binding.cpp, built and switched on.

In: the kernels as loaded by kernel.py, one for each dtype. Out: from then on the operator's plain calls on the CPU go
from torch's dispatcher to the kernel; all others come to Python as before. Calls with constants or weights not met
before come here once. While something other than this target answers mega_moe(target="cpu"), as tools and tests have
it, every call comes here.
"""

import ctypes
import logging
import os
import threading
from pathlib import Path

import torch

from moefuse.ops import kernels
from moefuse.targets.cpu import build, isa
from moefuse.targets.cpu.kernel import DTYPES

logger = logging.getLogger("moefuse")
_TORCH = Path(torch.__file__).parent
_FLAGS = (
    "-std=c++20",  # torch's headers want it
    "-O1",
    "-fvisibility=hidden",
    f"-I{_TORCH / 'include'}",
    f"-L{_TORCH / 'lib'}",
    "-Wl,--no-as-needed",
    "-ltorch_cpu",
    "-lc10",
)


_lock = threading.Lock()


class Binding:
    """The binding of this process: nothing until the first `load`, then a library, or none if it can't be built."""

    def __init__(self) -> None:
        self.loaded = False
        self._library: ctypes.CDLL | None = None
        self._kernels: dict[torch.dtype, ctypes.CDLL] = {}

    def load(self) -> None:
        """Have the library, built if need be; once."""
        with _lock:
            if not self.loaded:
                self._library, self.loaded = _load(), True

    def bind(self, dtype: torch.dtype, kernel: ctypes.CDLL, answer: kernels.Kernel) -> None:
        """Take the dtype's calls for `kernel` while `answer` is what answers target="cpu" and MOEFUSE_CPU_ISA stays."""
        if self._kernels.get(dtype) is kernel:
            return
        self.load()
        with _lock:
            if not self._kernels:
                kernels.on_change(lambda table: self.enable(table.get("cpu") == answer))
            self._kernels[dtype] = kernel
            if self._library is not None:
                run, last = (
                    ctypes.cast(f, ctypes.c_void_p) for f in (kernel.moefuse_run, kernel.moefuse_last)
                )
                name = os.environ.get(isa.VARIABLE, "").encode()
                self._library.moefuse_bind(DTYPES.index(dtype), run, last, name)
                self.enable(kernels.kernel("cpu") == answer)

    def enable(self, on: bool) -> None:
        """Take calls, or leave all of them to Python."""
        if self._library is not None:
            self._library.moefuse_enable(int(on))


BINDING = Binding()


def _load() -> ctypes.CDLL | None:
    """Out of the cache or built now; None where it can't be built: calls go through Python then."""
    try:
        source = (build.SOURCES / "binding.cpp").read_text(encoding="utf-8")
        library = build.small_library(isa.Isa("any", (), _FLAGS), "binding", "the operator's binding", source)
    except build.BuildError as error:
        logger.info("each call of mega_moe on the CPU goes through Python: %s", error)
        return None
    library.moefuse_bind.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p]
    library.moefuse_arguments.restype = ctypes.c_int64
    if library.moefuse_arguments() != len(torch.ops.moefuse.mega_moe.default._schema.arguments):
        raise AssertionError("native/binding.cpp and the operator's schema disagree")
    return library
