"""`torch.ops.moefuse.mega_moe.quant` and `quant_ep`: a layer of quantised experts as one operator.

In: the arguments of `mega_moe` without those that quantised experts don't have, weights of integers as they lie in
memory, their scales and offsets, and the scheme (see `quantised.py` for the formula). Out: y [T, O] and the slots that
each expert received. Neither has a gradient, and both say so where one is asked for.

`quant_ep` is to `quant` what `ep` is to the plain operator (expert_parallel.py): experts spread over the ranks of a
context, for the targets that exchange the rows themselves.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.gradient import refuse_tangents
from moefuse.ops.kernels import QuantKernel, quant_communicator, quant_kernel
from moefuse.ops.library import LIBRARY, TAGS
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.ops.quantised import Quantisation, check_quantised

_ARGUMENTS = (
    " Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] weight1,"
    " Tensor[] weight2, Tensor[] bias1, Tensor[] bias2, Tensor[] weight_scales1, Tensor[] weight_scales2,"
    " Tensor[] weight_offsets1, Tensor[] weight_offsets2, *, str quant, int num_experts, int ep_world_size=1,"
    " bool transpose_weight1=True, bool transpose_weight2=True, str gate_up='concat',"
    " str activation='swiglu', float[] activation_params=[], str activation_program='',"
    " ScalarType? activation_dtype=None, ScalarType? hidden_dtype=None, ScalarType? rows_dtype=None,"
    " ScalarType? product_dtype=None, ScalarType? output_dtype=None, str target='reference')"
    " -> (Tensor y, Tensor expert_token_nums)"
)


def _checked(
    tensors: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[Operands, Options, Quantisation, int]:
    """The arguments as values, and O."""
    # AOTInductor's runtime hands over None for an empty list
    lists = [tensor or () for tensor in tensors[3:]]
    scheme, hidden, rows = (constants.pop(name, None) for name in ("quant", "hidden_dtype", "rows_dtype"))
    quantisation = Quantisation(scheme, lists[4], lists[5], lists[6], lists[7], hidden, rows)
    operands, options = Operands(*tensors[:3], *lists[:4]), Options(**constants)
    return operands, options, quantisation, check_quantised(operands, options, quantisation)


def _runs(find: Callable[[str], QuantKernel]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The implementation, by the kernels that `find` knows."""

    def run(
        context: Tensor | None, *tensors: Any, target: str = "reference", **constants: Any
    ) -> tuple[Tensor, Tensor]:
        operands, options, quantisation, _ = _checked(tensors, constants)
        return find(target)(context, operands, options, quantisation)

    return run


def _fakes(find: Callable[[str], QuantKernel]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The outputs' shapes and dtypes."""

    def fake(
        context: Tensor | None, *tensors: Any, target: str = "reference", **constants: Any
    ) -> tuple[Tensor, Tensor]:
        operands, options, _, out_features = _checked(tensors, constants)
        find(target)
        x = operands.x
        y = x.new_empty((x.shape[0], out_features), dtype=options.output_dtype or x.dtype)
        return y, x.new_empty((options.local_experts,), dtype=torch.int32)

    return fake


def _register(overload: str, context: str, find: Callable[[str], QuantKernel]) -> Any:
    """Define one overload; returns it."""
    name = f"mega_moe.{overload}"

    def autograd(keyset: torch._C.DispatchKeySet, *args: Any, **constants: Any) -> tuple[Tensor, Tensor]:
        refuse_tangents(name, args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            raise NotImplementedError(f"{name} has no gradient: run it under torch.no_grad()")
        with torch._C._AutoDispatchBelowAutograd():
            y, nums = op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **constants)
        return y, nums

    LIBRARY.define(f"{name}({context} context,{_ARGUMENTS}", tags=TAGS)
    op = getattr(torch.ops.moefuse.mega_moe, overload)
    LIBRARY.impl(name, _runs(find), "CompositeExplicitAutograd")
    LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"moefuse::{name}", _fakes(find), lib=LIBRARY)
    return op


_register("quant", "Tensor?", quant_kernel)
# Every rank must run it as often as the others: no compiler may remove it.
torch.fx.node.has_side_effect(_register("quant_ep", "Tensor", quant_communicator))
