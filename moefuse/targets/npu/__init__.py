"""Ascend: the npu target, and the vendor's aclnnMegaMoe under it.

In: an Ascend installation. Out: `NpuTarget` (in target.py); `find` (library), `identify` (revision), `Plan` and
`MegaMoe` (the call); contexts of expert-parallel groups. Nothing here imports torch_npu before a device is asked for.
"""

from moefuse.targets.npu.abi import REVISIONS, Kind, Slot
from moefuse.targets.npu.call import CallError, MegaMoe
from moefuse.targets.npu.context import (
    NpuContext,
    NpuContextError,
    Sizes,
    adopt,
    close_npu_contexts,
    npu_context_for,
)
from moefuse.targets.npu.identify import Identified, identify
from moefuse.targets.npu.library import InstallError, Library, find
from moefuse.targets.npu.plan import Plan, PlanError
from moefuse.targets.npu.weights import PreparationError, copied_bytes, prepare, refresh

__all__ = [
    "REVISIONS",
    "CallError",
    "Identified",
    "InstallError",
    "Kind",
    "Library",
    "MegaMoe",
    "NpuContext",
    "NpuContextError",
    "Plan",
    "PlanError",
    "PreparationError",
    "Sizes",
    "Slot",
    "adopt",
    "close_npu_contexts",
    "copied_bytes",
    "find",
    "identify",
    "npu_context_for",
    "prepare",
    "refresh",
]
