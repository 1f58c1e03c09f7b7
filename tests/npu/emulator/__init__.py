"""An emulated CANN runtime: torch_npu loads and captures graphs on a machine without an Ascend device.

In: an environment with the torch_npu wheel and gcc. Out: `install()`, after which `import torch_npu` works. It
provides names, not kernels: nothing that runs through it says anything about a real device.
"""

from tests.npu.emulator.build import install

__all__ = ["install"]
