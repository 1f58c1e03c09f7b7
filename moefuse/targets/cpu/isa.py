"""The instruction sets that the kernel can be built for, and the one that this process uses.

In: the CPU's features, and the environment variable MOEFUSE_CPU_ISA. Out: an `Isa` with its compiler flags, or None
where the C++ kernel is switched off.
"""

import os
import platform
from dataclasses import dataclass
from functools import lru_cache

import torch

VARIABLE = "MOEFUSE_CPU_ISA"
OFF = "none"


@dataclass(frozen=True)
class Isa:
    """One way to build the kernel.

    needs: names in `torch.cpu.get_capabilities()`, all of them required. flags: of GCC and Clang. tiles: the system
    must let this process use AMX's tile registers, too.
    """

    name: str
    needs: tuple[str, ...]
    flags: tuple[str, ...]
    tiles: bool = False


_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-DMOEFUSE_ISA_AVX512")
_AVX2 = ("avx2", "fma3", "f16c")
_AVX512 = (*_AVX2, "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq")
_BF16_FLAGS = (*_AVX512_FLAGS, "-mavx512bf16", "-DMOEFUSE_BF16_DOT")

AMX_FLAGS = (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-DMOEFUSE_AMX")

# Best first.
ISAS = (
    Isa("amx_bf16", (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"), AMX_FLAGS, tiles=True),
    Isa("avx512_bf16", (*_AVX512, "avx512_bf16"), _BF16_FLAGS),
    Isa("avx512", _AVX512, _AVX512_FLAGS),
    Isa("avx2", _AVX2, (*_AVX2_FLAGS, "-DMOEFUSE_ISA_AVX2")),
    Isa("plain", (), ()),
)


@lru_cache(maxsize=1)
def available() -> list[Isa]:
    """What this CPU can run, best first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return [ISAS[-1]]
    has = torch.cpu.get_capabilities()
    able = [isa for isa in ISAS if all(has.get(name) for name in isa.needs)]
    return [isa for isa in able if not isa.tiles or _tiles_allowed()]


@lru_cache(maxsize=1)
def _tiles_allowed() -> bool:
    """Ask the system for the tile registers, once per process (arch_prctl on Linux)."""
    return bool(torch.cpu._init_amx())


def chosen() -> Isa | None:
    """The best one, or what MOEFUSE_CPU_ISA names; None for "none", which switches the C++ kernel off.

    Raises ValueError for a name that is unknown or that this CPU can't run.
    """
    name = os.environ.get(VARIABLE, "")
    usable = available()
    if name == OFF:
        return None
    for isa in usable:
        if name in ("", isa.name):
            return isa
    raise ValueError(
        f"{VARIABLE}: expected one of {[isa.name for isa in usable]} (on this CPU) or {OFF!r}, got {name!r}"
    )
