"""`mega_moe.ep`: an expert-parallel layer on whatever target computes the experts.

In: the operator's arguments, x being this rank's tokens and the weights its own experts'. Out: y for this rank's
tokens, and the slots that its experts received. Rows travel as the context says; each expert's rows go through the
target's kernel as a layer with one slot per token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.comm.context import resolve
from moefuse.comm.routing import Call
from moefuse.ops.kernels import Kernel, register_communicator
from moefuse.ops.options import Options


@torch.no_grad()
def run(
    kernel: Kernel,
    context: Tensor,
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
    """See the module text. Raises the errors of `CommContext.forward`."""
    # what is applied at home, to the sum over all slots, isn't applied to an expert's rows
    local = options._replace(
        num_experts=options.local_experts,
        ep_world_size=1,
        num_identity_experts=0,
        product_dtype=None,
        output_dtype=None,
    )

    def experts(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return kernel(None, rows, ids, weights, weight1, weight2, bias1, bias2, local, row_scale)[0]

    return resolve(context).forward(Call(x, topk_ids, topk_weights, options, experts))


register_communicator(run)
