"""The cpu target.

In: a layer's tensors on the CPU. Out: y and the slots each expert received. The C++ kernel (kernel.py) takes every
call that it supports, torch operators (torch_kernel.py) take the others, and all of them where no kernel can be built.
"""

import torch
from torch import Tensor

from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.targets.base import Target
from moefuse.targets.cpu import kernel, torch_kernel
from moefuse.targets.cpu.binding import BINDING

MOST_DENSE_TOKENS = 64
"""As policy/shared.py says. Also in native/binding.cpp."""


def _is_dense(operands: Operands, options: Options) -> bool:
    """One expert and many tokens: dense products, of which oneDNN's are the faster ones in bfloat16."""
    x = operands.x
    return options.num_experts == 1 and x.dtype == torch.bfloat16 and x.shape[0] > MOST_DENSE_TOKENS


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
        library = kernel.load()
        if not isinstance(library, str) and library is not BINDING.kernel:
            BINDING.bind(library, self.run)
        if isinstance(library, str) or _is_dense(operands, options) or kernel.supports(operands, options):
            return torch_kernel.run(operands, options)
        return kernel.run(library, operands, options)
