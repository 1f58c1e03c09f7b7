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
def run(kernel: Kernel, context: Tensor, operands: Operands, options: Options) -> tuple[Tensor, Tensor]:
    """See the module text. Raises the errors of `CommContext.forward`."""
    return resolve(context).forward(Call(operands, options, kernel))


register_communicator(run)
