"""An emulated CANN runtime: torch_npu, npugraph_ex and torchair work on a machine without an Ascend device.

In: an environment with the torch_npu wheel and gcc. Out: `install()`, after which torch_npu sees one device. Its memory
is the host's, its streams run at once; graphs are captured and replayed. Operators run in PyTorch on the CPU, those
that `kernels.py` lists; GE compiles nothing. Nothing that runs here says anything about a real device.
"""

from tests.npu.emulator.build import install

__all__ = ["install"]
