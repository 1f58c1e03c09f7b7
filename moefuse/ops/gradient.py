"""The gradient of mega_moe, as a second operator `moefuse::mega_moe_backward`; its `ep` is that of `mega_moe.ep`.

In: the gradient of y and the inputs of the forward call. Out: the gradients that are needed, flat, in the
order x, topk_weights, weight1, weight2, bias1, bias2, row_scale. Each expert's rows are recomputed under autograd from
its plain formula (expert.py), one expert at a time, so the forward pass saves nothing but its inputs. Over several
ranks rows travel once more, both ways (comm/): every rank runs it, whatever it needs of it.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from moefuse.ops.expert import (
    ExpertTensors,
    expert_rows,
    identity_ids,
    of_expert,
    scale_of,
    sum_dtype,
)
from moefuse.ops.kernels import transposed
from moefuse.ops.library import LIBRARY, TAGS
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options

_T = TypeVar("_T")

_ARGUMENTS = (
    "Tensor grad_y, Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] weight1,"
    " Tensor[] weight2, Tensor[] bias1, Tensor[] bias2, Tensor[] row_scale, *, bool[] needs,"
    " int num_experts, int ep_world_size=1,"
    " bool transpose_weight1=True, bool transpose_weight2=True, str gate_up='concat',"
    " str activation='swiglu', float[] activation_params=[], str activation_program='',"
    " ScalarType? activation_dtype=None,"
    " str weight_position='output', str row_norm='none', float row_norm_eps=0.0, int num_identity_experts=0)"
    " -> Tensor[]"
)


_OF_FORWARD = ("target", "training", "product_dtype", "output_dtype")
"""Constants without which the gradient is computed: it takes roundings for the identity."""


class MegaMoeFunction(torch.autograd.Function):
    """mega_moe under autograd: saves the inputs, and nothing of the forward computation."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Callable[..., tuple[Tensor, Tensor]],
        spread: bool,
        constants: dict[str, Any],
        lengths: Sequence[int],
        context: Tensor | None,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *flat: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`call` is the operator below autograd; `flat` the tensor lists, `lengths` long, one after another.

        spread: the layer runs over the ranks of `context`, and so does its gradient.
        """
        ctx.save_for_backward(x, topk_ids, topk_weights, *flat, *([context] if spread else []))
        ctx.spread, ctx.lengths = spread, lengths
        ctx.constants = {k: v for k, v in constants.items() if k not in _OF_FORWARD}
        *lists, scale = _cut(flat, lengths)
        y, nums = call(context, x, topk_ids, topk_weights, *lists, *scale, **constants)
        ctx.mark_non_differentiable(nums)
        return y, nums

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, _grad_nums: Tensor | None) -> tuple[Any, ...]:
        """Gradients in the order of forward's arguments, None where none is needed."""
        x, topk_ids, topk_weights, *flat = ctx.saved_tensors
        lists = _cut(flat, ctx.lengths)
        _, _, _, _, _, need_x, _, need_weights, *need_flat = ctx.needs_input_grad
        needs = [need_x, need_weights, *(any(need) for need in _cut(need_flat, ctx.lengths))]
        inputs = (grad_y, x, topk_ids, topk_weights, *lists)
        if ctx.spread:
            found = _EP(flat[-1], *inputs, needs=needs, **ctx.constants)
        else:
            found = torch.ops.moefuse.mega_moe_backward(*inputs, needs=needs, **ctx.constants)
        grads = iter(found)
        grad_x = next(grads) if need_x else None
        grad_weights = next(grads) if need_weights else None
        of_lists = [
            next(grads) if need else None
            for tensors, need in zip(lists, needs[2:], strict=True)
            for _ in tensors
        ]
        return None, None, None, None, None, grad_x, None, grad_weights, *of_lists


_apply = cast(Callable[..., tuple[Tensor, Tensor]], MegaMoeFunction.apply)


def recorded(
    call: Callable[..., tuple[Tensor, Tensor]], spread: bool, args: Sequence[Any], constants: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """`call(*args, **constants)`, the operator below autograd, with a gradient. spread: see `MegaMoeFunction`."""
    lists = [*args[4:8], [tensor for tensor in args[8:] if tensor is not None]]
    flat = [tensor for tensors in lists for tensor in tensors]
    return _apply(call, spread, constants, [len(tensors) for tensors in lists], *args[:4], *flat)


def refuse_tangents(name: str, args: Sequence[Any]) -> None:
    """Raise NotImplementedError for operands with a tangent of forward mode, which would be lost without a word."""
    if forward_ad._current_level < 0:
        return
    for tensor in tree_leaves(args):
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{name}: forward-mode gradients (torch.func.jvp) are not supported")


def _cut(flat: Sequence[_T], lengths: Sequence[int]) -> list[list[_T]]:
    """Undo the concatenation of lists of these lengths."""
    items = iter(flat)
    return [list(islice(items, length)) for length in lengths]


def _run(grad_y: Tensor, *operands: Any, needs: Sequence[bool], **constants: Any) -> list[Tensor]:
    x, topk_ids, topk_weights, *lists, row_scale = operands
    options = Options(**constants)
    if options.ep_world_size != 1:
        raise ValueError(f"mega_moe_backward: ep_world_size: expected 1, got {options.ep_world_size}")
    dtype = sum_dtype(x.dtype)
    grad_y = grad_y.to(dtype)
    # rows of several experts meet in these two, so they are summed wide and rounded once
    grad_x = torch.zeros(x.shape, dtype=dtype, device=x.device)
    grad_weights = torch.zeros(topk_weights.shape, dtype=topk_weights.dtype, device=x.device)
    grad_lists = tuple([torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in ts] for ts in lists)
    scale = row_scale[0] if row_scale else None
    # a shared scale gathers from every expert: summed wide as well
    grad_scale = None if scale is None else torch.zeros(scale.shape, dtype=dtype, device=x.device)
    for expert in range(options.num_experts):
        token, slot = torch.where(topk_ids == expert)
        if token.numel() == 0:
            continue
        tensors = _views(lists, expert, options)._replace(row_scale=scale_of(scale, expert))
        targets = _views(grad_lists, expert, options)._replace(row_scale=scale_of(grad_scale, expert))
        grads = _expert_gradients(grad_y[token], x[token], topk_weights[token, slot], tensors, options)
        grad_x.index_add_(0, token, grads[0].to(dtype))
        grad_weights[token, slot] = grads[1]
        for target, grad in zip((t for part in targets for t in part), grads[2:], strict=True):
            target.add_(grad)
    add_identities(grad_x, grad_weights, grad_y, x, topk_ids, topk_weights, options)
    scales = [grad_scale.to(scale.dtype)] if scale is not None and grad_scale is not None else []
    groups = ([grad_x.to(x.dtype)], [grad_weights], *grad_lists, scales)
    return [grad for group, need in zip(groups, needs, strict=True) if need for grad in group]


def add_identities(
    grad_x: Tensor,
    grad_weights: Tensor,
    grad_y: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    options: Options,
) -> None:
    """Add what slots with an identity expert give to grad_x [T, H] and grad_weights [T, K], in place.

    grad_x and grad_y [T, H] are of the sum's dtype.
    """
    if not options.num_identity_experts:
        return
    token, slot = torch.where(identity_ids(topk_ids, options))
    own = topk_weights[token, slot].to(grad_y.dtype).unsqueeze(1)
    grad_x.index_add_(0, token, grad_y[token] * own)
    grad_weights[token, slot] = (grad_y[token] * x[token].to(grad_y.dtype)).sum(-1).to(grad_weights.dtype)


def _views(lists: Sequence[Sequence[Tensor]], expert: int, options: Options) -> ExpertTensors:
    dims = (3, 3, 2, 2)
    parts = [of_expert(ts, expert, options.num_experts, dim) for ts, dim in zip(lists, dims, strict=True)]
    return ExpertTensors(*parts)


def _expert_gradients(
    grad: Tensor, x: Tensor, weights: Tensor, tensors: ExpertTensors, options: Options
) -> list[Tensor]:
    """Gradients of one expert's rows [n, O]: of x [n, H], of the routing weights [n], then of its tensors."""
    # the dispatcher runs an operator's kernel below autograd: let this small graph be recorded all the same
    below = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with below, torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (x, weights, *(t for part in tensors for t in part))]
        lists = iter(inputs[2:])
        own = ExpertTensors(*(tuple(next(lists) for _ in part) for part in tensors))
        rows = expert_rows(inputs[0], inputs[1], own, options, grad.dtype)
        if not rows.requires_grad:
            return [torch.zeros_like(t) for t in inputs]
        return list(torch.autograd.grad(rows, inputs, grad, materialize_grads=True))


def _run_spread(
    context: Tensor, grad_y: Tensor, *given: Any, needs: Sequence[bool], **constants: Any
) -> list[Tensor]:
    *tensors, row_scale = given
    operands = Operands(*tensors)._replace(row_scale=row_scale[0] if row_scale else None)
    return transposed()(context, grad_y, operands, Options(**constants), needs)


def _fake_spread(context: Tensor, *tensors: Any, **constants: Any) -> list[Tensor]:
    return _fake(*tensors, **constants)


def _fake(grad_y: Tensor, *operands: Any, needs: Sequence[bool], **constants: Any) -> list[Tensor]:
    x, _, topk_weights, *lists = operands
    groups = ((x,), (topk_weights,), *lists)
    wanted = (t for group, need in zip(groups, needs, strict=True) if need for t in group)
    return [t.new_empty(t.shape) for t in wanted]


def _no_second_gradient(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError("mega_moe: gradients of gradients are not supported")


for _name, _first, _kernel, _meta in (
    ("mega_moe_backward", "", _run, _fake),
    ("mega_moe_backward.ep", "Tensor context, ", _run_spread, _fake_spread),
):
    LIBRARY.define(f"{_name}({_first}{_ARGUMENTS}", tags=TAGS)
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moefuse::{_name}", _meta, lib=LIBRARY)
    torch.library.register_autograd(f"moefuse::{_name}", _no_second_gradient, lib=LIBRARY)
_EP = torch.ops.moefuse.mega_moe_backward.ep
torch.fx.node.has_side_effect(_EP)
