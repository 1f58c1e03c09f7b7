"""The cpu target.

In: a layer's tensors on the CPU. Out: y and the slots each expert received. The C++ kernel (kernel.py) takes every
call that it supports, torch operators (torch_kernel.py) take the others, and all of them where no kernel can be built.
"""

from collections.abc import Sequence

from torch import Tensor

from moefuse.ops.options import Options
from moefuse.targets.base import Target
from moefuse.targets.cpu import kernel, torch_kernel


class CpuTarget(Target):
    """See the module text."""

    name = "cpu"

    def run(
        self,
        context: Tensor | None,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weight1: Sequence[Tensor],
        weight2: Sequence[Tensor],
        bias1: Sequence[Tensor],
        bias2: Sequence[Tensor],
        options: Options,
        row_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `Target.run`, on one rank."""
        if options.ep_world_size != 1:
            raise ValueError(
                f"mega_moe: ep_world_size: this target runs on one rank, got {options.ep_world_size}"
            )
        library = kernel.load()
        arguments = (x, topk_ids, topk_weights, weight1, weight2, bias1, bias2, options)
        if isinstance(library, str) or row_scale is not None or kernel.supports(*arguments):
            return torch_kernel.run(*arguments, row_scale)
        return kernel.run(library, *arguments)
