"""`torch.ops.moefuse.mega_moe`: one Mixture-of-Experts layer as one operator.

In: tokens, routing, weights as they lie in memory, and constants (see `spec.py` for the formula).
Out: y [T, O] and the slots that each expert received. Functional, differentiable (through
`mega_moe_backward`, in gradient.py), with a symbolic token count; ids outside 0..E-1 contribute nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.gradient import recorded, refuse_tangents
from moefuse.ops.kernels import kernel
from moefuse.ops.library import LIBRARY, TAGS
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options, check_arguments

# Weights are lists: one stacked 3-D tensor per part ([E, N, H] when transposed, else [E, H, N]; two parts, gate
# and up, for gate_up="separate") or one 2-D tensor per expert (all gates before all ups). Biases alike. The row
# scale is one tensor, [O] or [E, O].
_ARGUMENTS = (
    "(Tensor? context, Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] weight1, Tensor[] weight2,"
    " Tensor[] bias1, Tensor[] bias2, Tensor? row_scale=None, *, int num_experts, int ep_world_size=1,"
    " bool transpose_weight1=True, bool transpose_weight2=True, str gate_up='concat',"
    " str activation='swiglu', float[] activation_params=[], str activation_program='',"
    " ScalarType? activation_dtype=None, str weight_position='output', ScalarType? product_dtype=None,"
    " ScalarType? output_dtype=None, str row_norm='none', float row_norm_eps=0.0, int num_identity_experts=0,"
    " str target='reference') -> (Tensor y, Tensor expert_token_nums)"
)
SCHEMA = f"mega_moe{_ARGUMENTS}"


def _run(
    context: Tensor | None, *tensors: Any, target: str = "reference", **constants: Any
) -> tuple[Tensor, Tensor]:
    options = Options(**constants)
    operands = Operands(*tensors)
    # what AOTInductor's runtime hands over for an empty list
    if operands.bias1 is None or operands.bias2 is None:
        operands = operands._replace(bias1=operands.bias1 or (), bias2=operands.bias2 or ())
    check_arguments(operands, options)
    return kernel(target)(context, operands, options)


def fake(
    context: Tensor | None, *tensors: Any, target: str = "reference", **constants: Any
) -> tuple[Tensor, Tensor]:
    """The outputs' shapes and dtypes; the token count may be symbolic."""
    options = Options(**constants)
    operands = Operands(*tensors)
    out_features = check_arguments(operands, options)
    kernel(target)
    x = operands.x
    y = x.new_empty((x.shape[0], out_features), dtype=options.output_dtype or x.dtype)
    return y, x.new_empty((options.local_experts,), dtype=torch.int32)


def _below_autograd(
    keyset: torch._C.DispatchKeySet, args: Sequence[Any], constants: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Run what lies under autograd: straight the implementation, or the dispatcher where a mode or a subclass waits.

    The second walk through the dispatcher costs as much as the first, which matters at one token.
    """
    below = keyset & torch._C._after_ADInplaceOrView_keyset
    if below.highestPriorityTypeId() in PLAIN_KEYS:
        return _run(*args, **constants)
    with torch._C._AutoDispatchBelowAutograd():
        y, nums = _OP.redispatch(keyset & torch._C._after_autograd_keyset, *args, **constants)
    return y, nums


def _autograd(keyset: torch._C.DispatchKeySet, *args: Any, **constants: Any) -> tuple[Tensor, Tensor]:
    refuse_tangents("mega_moe", args)
    if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
        return _below_autograd(keyset, args, constants)
    return recorded(lambda *inputs, **kwargs: _below_autograd(keyset, inputs, kwargs), False, args, constants)


PLAIN_KEYS = frozenset(
    (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA, torch._C.DispatchKey.PrivateUse1)
)

LIBRARY.define(SCHEMA, tags=TAGS)
_OP = torch.ops.moefuse.mega_moe.default
# A target may register kernels of its own for mega_moe (targets/cpu/binding.py). They hand what they don't take on to
# this name; no graph contains it, since all that lies below autograd is dispatched as mega_moe again.
LIBRARY.define(f"mega_moe_in_python{_ARGUMENTS}", tags=TAGS)
for _name in ("mega_moe", "mega_moe_in_python"):
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    LIBRARY.impl(_name, _autograd, "Autograd", with_keyset=True)
torch.library.register_fake("moefuse::mega_moe", fake, lib=LIBRARY)
