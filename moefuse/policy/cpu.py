"""What the cpu target can run: all that the reference can, with tensors on the CPU.

In: nothing. Out: `CHECKS`.
"""

from moefuse.policy import reference
from moefuse.policy.check import Check

DEVICE = Check(
    "device",
    ("device",),
    lambda s: s.device.partition(":")[0] == "cpu",
    "the layer is on {device}; the cpu target needs its tensors on the CPU",
)

QUANT = Check(
    "quant",
    ("quant",),
    lambda s: s.quant == "none",
    'the experts are quantised as {quant}; the cpu target has no kernel for that, target="reference" has',
)

CHECKS = (DEVICE, *(QUANT if check.name == "quant" else check for check in reference.CHECKS))
