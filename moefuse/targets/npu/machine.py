"""What this Ascend machine offers: the device, the operator's revision, and the way it is called.

In: torch_npu, the vendor's packages and the environment. Out: `Machine`, found once per process, or `InstallError`.
"""

import ctypes
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moefuse.policy.npu_buffer import MIB
from moefuse.targets.npu.combine import loaded
from moefuse.targets.npu.context import PACKAGE
from moefuse.targets.npu.identify import Identified, identify
from moefuse.targets.npu.library import InstallError, Library, find

_RUNTIMES = ("libnnopbase.so", "libopapi.so", "libascendcl.so")
_DEFAULT_HCCL_BUFFER = 200
"""MB that HCCL takes where HCCL_BUFFSIZE isn't set."""


@dataclass(frozen=True)
class Machine:
    """What was found.

    soc: the device's own name. library, identified: of aclnnMegaMoe, None where there is only `combine`. official: the
    torch operator of cann_ops_transformer, None where the library is called directly. runtime: makes the handles for
    such a call. combine: vllm-ascend's dispatch_ffn_combine, where that is loaded and known.
    """

    soc: str
    library: Library | None
    identified: Identified | None
    official: Any = None
    runtime: ctypes.CDLL | None = None
    combine: Any = None

    @property
    def revision(self) -> str:
        """Of aclnnMegaMoe: R0, R1, ...; "" where there is none."""
        return self.identified.revision if self.identified is not None else ""


@functools.cache
def machine() -> Machine:
    """This machine. Raises InstallError naming the first thing that is missing."""
    soc, combine = _soc(), loaded()
    try:
        library = find()
        official = _official()
        schema = str(official._schema) if official is not None else None
        identified = identify(library, schema=schema)
        runtime = None if official is not None else _runtime()
    except InstallError:
        if combine is None:
            raise
        return Machine(soc, None, None, combine=combine)
    return Machine(soc, library, identified, official, runtime, combine)


def hccl_buffer_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """HCCL_BUFFSIZE, which is in MB. Raises InstallError for what is no number."""
    text = environment.get("HCCL_BUFFSIZE", str(_DEFAULT_HCCL_BUFFER))
    if not text.isdecimal():
        raise InstallError(f"HCCL_BUFFSIZE: expected a number of MB, got {text!r}")
    return int(text) * MIB


def _soc() -> str:
    """Of a torch_npu that is in use: whoever has tensors on an NPU has imported it, nobody else is made to."""
    torch_npu: Any = sys.modules.get("torch_npu")
    if torch_npu is None:
        raise InstallError("torch_npu isn't imported in this process")
    if not torch_npu.npu.device_count():
        raise InstallError("torch_npu sees no Ascend device")
    return str(torch_npu.npu.get_device_name())


def _official() -> Any:
    """The vendor's torch operator, where its package is installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    try:
        importlib.import_module(f"{PACKAGE}.ops")
        return torch.ops.cann_ops_transformer.npu_mega_moe.default
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise InstallError(f"{PACKAGE} is installed, but its npu_mega_moe doesn't load: {error}") from error


def _runtime() -> ctypes.CDLL:
    for name in _RUNTIMES:
        try:
            handle = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(handle, "aclCreateTensor"):
            return handle
    raise InstallError(f"none of {', '.join(_RUNTIMES)} has aclCreateTensor: source the toolkit's set_env.sh")
