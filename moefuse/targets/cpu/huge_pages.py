"""2 MiB pages for expert weights, in place.

In: weights on the CPU. Out: nothing but speed: the kernel of the operating system is asked to back their memory by
huge pages. Values and pointers stay. Reading over 4 KiB pages is limited by address translation; collapsing costs
two to three seconds of CPU per GiB, once per tensor. MOEFUSE_HUGE_PAGES=0 switches it off. Memory mapped from a file
stays as it is.
"""

import ctypes
import logging
import os
import sys
import time
from collections.abc import Sequence

from torch import Tensor

logger = logging.getLogger("moefuse")
VARIABLE = "MOEFUSE_HUGE_PAGES"
_PAGE = 1 << 21
_HUGEPAGE, _COLLAPSE = 14, 25  # MADV_*, linux/mman.h
_MOST_SEEN = 1 << 16  # addresses of tensors that are gone: forgotten all at once
_seen: set[tuple[int, int]] = set()


def enabled() -> bool:
    """Linux, and not switched off. Raises ValueError for a value that is neither 0 nor 1."""
    value = os.environ.get(VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE}: expected 0 or 1, got {value!r}")
    return value == "1" and sys.platform == "linux"


def use_for(weights: Sequence[Tensor]) -> int:
    """Ask once for each tensor's memory; returns the bytes that were backed by huge pages by this call."""
    key = (weights[0].data_ptr(), weights[-1].data_ptr())
    if key in _seen:
        return 0
    if len(_seen) >= _MOST_SEEN:
        _seen.clear()
    _seen.add(key)
    if not enabled():
        return 0
    start = time.perf_counter()
    size = sum(_collapse(weight) for weight in weights)
    if size:
        seconds = time.perf_counter() - start
        logger.info("2 MiB pages under %.1f MiB of expert weights, in %.2f s", size / 2**20, seconds)
    return size


def _collapse(weight: Tensor) -> int:
    first = weight.data_ptr()
    last = first + weight.element_size() * (
        1 + sum((n - 1) * s for n, s in zip(weight.shape, weight.stride(), strict=True))
    )
    begin, end = -(-first // _PAGE) * _PAGE, last // _PAGE * _PAGE
    if end <= begin:
        return 0
    madvise = ctypes.CDLL(None).madvise
    where, length = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
    if madvise(where, length, _HUGEPAGE):
        return 0
    return end - begin if madvise(where, length, _COLLAPSE) == 0 else 0
