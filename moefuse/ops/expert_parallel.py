"""`torch.ops.moefuse.mega_moe.ep`: a layer whose experts are spread over the ranks of a context.

In: the arguments of `mega_moe`; `context` is the tensor of a `CommContext`, x this rank's tokens, topk_ids name
experts of all ranks, and the weights are those of this rank's experts: rank r of W holds E/W of them, from r * E/W on.
Out: y of this rank's tokens, and the slots that its experts received from all ranks [E/W].

Functional, but every rank must run it as often and in the same order as the others: it counts as having side effects,
so that no compiler removes it. Its gradient (gradient.py) is as collective: `training` is True, alike on all ranks, in
a forward that is recorded for it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.gradient import recorded, refuse_tangents
from moefuse.ops.kernels import communicator, has_gradient, kernel
from moefuse.ops.library import LIBRARY, TAGS
from moefuse.ops.mega_moe import PLAIN_KEYS, SCHEMA, fake
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options, check_arguments


def _run(
    context: Tensor, *tensors: Any, target: str = "reference", training: bool = False, **constants: Any
) -> tuple[Tensor, Tensor]:
    options = Options(**constants)
    operands = Operands(*tensors)
    check_arguments(operands, options)
    rows = kernel(target)
    return communicator(target)(rows, context, operands, options, training)


def _fake(context: Tensor, *tensors: Any, training: bool = False, **constants: Any) -> tuple[Tensor, Tensor]:
    return fake(context, *tensors, **constants)


def _below_autograd(
    keyset: torch._C.DispatchKeySet, args: Sequence[Any], constants: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    if (keyset & torch._C._after_ADInplaceOrView_keyset).highestPriorityTypeId() in PLAIN_KEYS:
        # as in mega_moe: the second walk through the dispatcher costs as much
        return _run(*args, **constants)
    with torch._C._AutoDispatchBelowAutograd():
        y, nums = _OP.redispatch(keyset & torch._C._after_autograd_keyset, *args, **constants)
    return y, nums


def _autograd(keyset: torch._C.DispatchKeySet, *args: Any, **constants: Any) -> tuple[Tensor, Tensor]:
    refuse_tangents("mega_moe.ep", args)
    if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
        return _below_autograd(keyset, args, constants)
    target = constants.get("target", "reference")
    if not has_gradient(target):
        raise NotImplementedError(
            f"mega_moe.ep: target {target!r} exchanges rows itself and has no gradient: run it under torch.no_grad()"
        )
    constants = {**constants, "training": True}
    return recorded(lambda *inputs, **kwargs: _below_autograd(keyset, inputs, kwargs), True, args, constants)


LIBRARY.define(
    SCHEMA.replace("mega_moe(Tensor? context", "mega_moe.ep(Tensor context").replace(
        " str target=", " bool training=False, str target="
    ),
    tags=TAGS,
)
_OP = torch.ops.moefuse.mega_moe.ep
LIBRARY.impl("mega_moe.ep", _run, "CompositeExplicitAutograd")
LIBRARY.impl("mega_moe.ep", _autograd, "Autograd", with_keyset=True)
torch.library.register_fake("moefuse::mega_moe.ep", _fake, lib=LIBRARY)
torch.fx.node.has_side_effect(_OP)
