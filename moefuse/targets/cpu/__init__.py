"""The cpu target.

In: a layer's tensors on the CPU. Out: y and the slots each expert received. The C++ kernel (kernel.py) takes every
call that it supports, torch operators (torch_kernel.py) take the others, and all of them where no kernel can be built.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.targets.base import Target
from moefuse.targets.cpu import isa, kernel, torch_kernel
from moefuse.targets.cpu.binding import BINDING

MOST_DENSE_TOKENS = 64
"""As policy/shared.py says. Also in native/binding.cpp."""


def _is_dense(operands: Operands, options: Options) -> bool:
    """One expert and many tokens: dense products, of which oneDNN's are the faster ones in bfloat16."""
    x = operands.x
    return options.num_experts == 1 and x.dtype == torch.bfloat16 and x.shape[0] > MOST_DENSE_TOKENS


def _load(dtype: torch.dtype) -> ctypes.CDLL | str:
    """The dtype's kernel, or why there is none. What the first call of all has to build is built side by side."""
    if BINDING.loaded or isa.chosen() is None:
        return kernel.load(dtype)
    with ThreadPoolExecutor(1) as pool:
        binding = pool.submit(BINDING.load)
        library = kernel.load(dtype)
        binding.result()
    return library


class CpuTarget(Target):
    """See the module text."""

    name = "cpu"

    def run(
        self,
        context: Tensor | None,
        operands: Operands,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        """As `Target.run`, on one rank."""
        if options.ep_world_size != 1:
            raise ValueError(
                f"mega_moe: ep_world_size: this target runs on one rank, got {options.ep_world_size}"
            )
        library = _load(operands.x.dtype)
        if not isinstance(library, str):
            BINDING.bind(operands.x.dtype, library, self.run)
        if isinstance(library, str) or _is_dense(operands, options) or kernel.supports(operands, options):
            return torch_kernel.run(operands, options)
        return kernel.run(library, operands, options)
