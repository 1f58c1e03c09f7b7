"""`mega_moe.ep`: an expert-parallel layer on whatever target computes the experts.

In: the operator's arguments, x being this rank's tokens and the weights its own experts'. Out: y for this rank's
tokens, and the slots that its experts received. Rows travel as the context says; each expert's rows go through the
target's kernel as a layer with one slot per token.
"""

import torch
from torch import Tensor

from moefuse.comm.context import resolve
from moefuse.comm.routing import Call
from moefuse.ops.kernels import Kernel, register_communicator
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options


@torch.no_grad()
def run(
    kernel: Kernel,
    context: Tensor,
    operands: Operands,
    options: Options,
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
        own = operands._replace(x=rows, topk_ids=ids, topk_weights=weights)
        return kernel(None, own, local)[0]

    x, topk_ids, topk_weights = operands[:3]
    return resolve(context).forward(Call(x, topk_ids, topk_weights, options, experts))


register_communicator(run)
