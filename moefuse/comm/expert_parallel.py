"""`mega_moe.ep` and `quant_ep`: an expert-parallel layer on whatever target computes the experts; `ep`'s gradient.

In: the operator's arguments, x being this rank's tokens and the weights its own experts'. Out: y for this rank's
tokens, and the slots that its experts received. Rows travel as the context says; each expert's rows go through the
target's kernel as a layer with one slot per token, and in the other direction through its gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.comm.context import resolve
from moefuse.comm.routing import Call
from moefuse.ops import kernels
from moefuse.ops.kernels import (
    Kernel,
    QuantKernel,
    register_communicator,
    register_quant_transport,
    register_transposed,
)
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.ops.quantised import Quantisation


@torch.no_grad()
def run(
    kernel: Kernel, context: Tensor, operands: Operands, options: Options, training: bool
) -> tuple[Tensor, Tensor]:
    """See the module text. Raises the errors of `CommContext.forward`."""
    call = Call(operands, options, kernel, "training" if training else "inference")
    return resolve(context).forward(call)


@torch.no_grad()
def run_quantised(
    kernel: QuantKernel,
    context: Tensor | None,
    operands: Operands,
    options: Options,
    quantisation: Quantisation,
) -> tuple[Tensor, Tensor]:
    """Likewise, of quantised experts: rows travel as they are in x, and are quantised where their expert is.

    They come back in the dtype to which an expert's rows are rounded.
    """

    def experts(context: Tensor | None, operands: Operands, options: Options) -> tuple[Tensor, Tensor]:
        return kernel(context, operands, options, quantisation)

    assert context is not None  # by the operator's schema
    scheme, rows_dtype = quantisation.quant, quantisation.rows_dtype
    return resolve(context).forward(Call(operands, options, experts, scheme=scheme, rows_dtype=rows_dtype))


@torch.no_grad()
def run_backward(
    context: Tensor, grad_y: Tensor, operands: Operands, options: Options, needs: Sequence[bool]
) -> list[Tensor]:
    """The gradients that `needs` asks for, of this rank's tokens and of its own experts. Raises as `run` does."""
    call = Call(operands, options, kernels.kernel("reference"), "backward")
    return resolve(context).backward(call, grad_y, needs)


register_communicator(run)
register_quant_transport(run_quantised)
register_transposed(run_backward)
