"""The vendor's aclnnMegaMoe: which library holds it, which of its argument lists that is, and how to call it.

In: an Ascend installation. Out: `find` (library), `identify` (revision), `Plan` and `MegaMoe` (the call). Nothing in
here needs torch_npu; no target is registered yet.
"""

from moefuse.targets.npu.abi import REVISIONS, Kind, Slot
from moefuse.targets.npu.call import CallError, MegaMoe
from moefuse.targets.npu.identify import Identified, identify
from moefuse.targets.npu.library import InstallError, Library, find
from moefuse.targets.npu.plan import Plan, PlanError

__all__ = [
    "REVISIONS",
    "CallError",
    "Identified",
    "InstallError",
    "Kind",
    "Library",
    "MegaMoe",
    "Plan",
    "PlanError",
    "Slot",
    "find",
    "identify",
]
