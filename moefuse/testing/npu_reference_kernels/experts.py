"""Reference kernels of the grouped matmul and the gated activation.

In: CPU tensors. Out: products computed in float64 and rounded once, so that rounding is never the kernel's fault.
Int4 values come packed, eight to an int32 (see quant.py); MX formats are in mx.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moefuse.testing.npu_reference_kernels import mx
from moefuse.testing.npu_reference_kernels.checks import UNDEFINED, absent, only
from moefuse.testing.npu_reference_kernels.quant import unpacked

_ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    0: lambda y: y,
    1: F.relu,
    2: lambda y: F.gelu(y, approximate="tanh"),
    4: lambda y: y * torch.sigmoid(1.702 * y),
    5: F.silu,
}


def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) * second half, along `dim`."""
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)


def clipped_swiglu(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    """c * sigmoid(alpha * c) * (clamp(up, -limit, limit) + bias), c = min(gate, limit).

    gate and up are neighbours along `dim` (interleaved), or its halves. group_index holds the rows of each group; rows
    after them are unwritten.
    """
    values = x.float().movedim(dim, -1)
    gate, up = (values[..., ::2], values[..., 1::2]) if interleaved else values.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    y = (gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + bias)).movedim(-1, dim)
    if group_index is not None:
        used = torch.arange(x.shape[0]) < group_index.sum()
        y = y.masked_fill(~used.view(-1, *[1] * (x.dim() - 1)), UNDEFINED)
    return y.to(x.dtype)


def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: list[Tensor] | None = None,
    activation_quant_scale: list[Tensor] | None = None,
    activation_quant_offset: list[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: list[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """One product per group of rows of x[0]. Rows after the last group are unwritten.

    group_list holds the end of each group (group_list_type 0) or its size (1). weight: one [E, K, N] tensor or E
    tensors [K, N]; scales [E, N], or [E, G, N] with one row per K / G inputs, or one such tensor per group. By the
    dtypes of rows and weight, with s the scale and p the scale per row::

        float, float       x @ w + bias
        float, int8/int4   x @ ((w + antiquant_offset) * antiquant_scale) + bias
        MX, MX             (x * p) @ (w * s), or antiquant_scale as s: scales of type float8_e8m0 (see mx.py)
        float, float4      x @ (w * antiquant_scale), which is of type float8_e8m0
        int8, int8         (x @ w + bias) * s * p with an int32 bias, x @ w * s * p + bias with a float one
        int8, int4         ((x - 8) @ (w * s) + bias) * p: bias makes up for the 8
        int4, int4         x @ (w * s) * p
    """
    name = "npu_grouped_matmul"
    absent(
        name,
        offset=offset,
        activation_input=activation_input,
        activation_quant_scale=activation_quant_scale,
        activation_quant_offset=activation_quant_offset,
    )
    only(name, "group_type", group_type, 0)
    only(name, "split_item", split_item, 2, 3)
    only(name, "group_list_type", group_list_type, 0, 1)
    only(name, "act_type", act_type, *_ACTIVATIONS)
    only(name, "len(x)", len(x), 1)
    if group_list is None:
        raise ValueError(f"{name}: group_list: expected a tensor with group_type=0, got None")
    rows, weights = x[0], _stacked(weight)
    assert weights is not None
    row_blocks = per_token_scale is not None and _e8m0(per_token_scale[0], per_token_scale_dtype)
    if row_blocks or weight_dtype == mx.FLOAT4:
        absent(name, bias=bias, antiquant_offset=antiquant_offset)
        beside = _stacked(scale or antiquant_scale)
        assert beside is not None
        only(name, "the scale's type", _e8m0(beside, scale_dtype if scale else mx.E8M0), True)
        elements = mx.elements_of(name, "weight_dtype", weights, weight_dtype)
        if row_blocks and per_token_scale is not None:
            stored = mx.elements_of(name, "x_dtype", rows, x_dtype)
            rows, per_token_scale, x_dtype = mx.rows_of(rows, per_token_scale[0], stored), None, None
        weights = mx.weights_of(weights, beside, elements, rows.shape[1])
        scale = antiquant_scale = None
        weight_dtype = scale_dtype = per_token_scale_dtype = None
    for argument, dtype in (
        ("x_dtype", x_dtype),
        ("weight_dtype", weight_dtype),
        ("scale_dtype", scale_dtype),
        ("per_token_scale_dtype", per_token_scale_dtype),
    ):
        only(name, argument, dtype, None)
    ends = group_list if group_list_type == 0 else group_list.cumsum(0)
    group = torch.searchsorted(ends, torch.arange(rows.shape[0], dtype=ends.dtype), right=True)
    used, group = group < weights.shape[0], group.clamp(max=weights.shape[0] - 1)
    packed = weights.dtype == torch.int32
    shift = 8 if packed and rows.dtype == torch.int8 else 0
    left = (unpacked(rows) if rows.dtype == torch.int32 else rows).double() - shift
    right = (unpacked(weights) if packed else weights).double()
    for value, apply in ((antiquant_offset, torch.add), (antiquant_scale, torch.mul), (scale, torch.mul)):
        if (tensor := _stacked(value)) is not None:
            right = apply(right, _per_input(decoded(tensor).double(), right.shape[1]))
    y = torch.einsum("mk,mkn->mn", left, right[group])
    biases = _stacked(bias)
    per_row = torch.ones(()).double() if per_token_scale is None else per_token_scale[0].double().unsqueeze(1)
    if biases is not None and biases.dtype == torch.int32:
        factor = _stacked(scale)
        biases = biases.double() if factor is None else biases.double() * decoded(factor).double()
        y = (y + biases[group]) * per_row
    elif biases is not None:
        y = (y + biases.double()[group]) * per_row if shift else y * per_row + biases.double()[group]
    else:
        y = y * per_row
    y = _ACTIVATIONS[act_type or 0](y)
    result = x[0].dtype if output_dtype is None else _dtype(output_dtype)
    if result.is_floating_point:
        y = y.masked_fill(~used.unsqueeze(1), UNDEFINED)
    return [y.to(result)]


def grouped_matmul_list(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: list[int] | None = None,
    output_dtype: torch.dtype | None = None,
    **options: Any,
) -> list[Tensor]:
    """The older overload: the ends of the groups as Python integers."""
    ends = None if group_list is None else torch.tensor(group_list)
    code = None if output_dtype is None else _CODES[output_dtype]
    return grouped_matmul(x, weight, group_list=ends, output_dtype=code, **options)


def _e8m0(scale: Tensor, number: int | None) -> bool:
    """True for scales of MX blocks, by their dtype or by what the operator's argument says."""
    as_bytes = scale.dtype == torch.uint8 and number == mx.E8M0
    return as_bytes or (scale.dtype == torch.float8_e8m0fnu and number in (None, mx.E8M0))


def _per_input(scale: Tensor, inputs: int) -> Tensor:
    """[E, N] or [E, G, N] as what multiplies [E, K, N]: one row for all inputs, or one per group of K / G."""
    if scale.dim() == 2:
        return scale.unsqueeze(1)
    return scale.repeat_interleave(inputs // scale.shape[1], dim=1)


def _stacked(tensors: Sequence[Tensor] | None) -> Tensor | None:
    """One tensor with the groups as its first dimension, from one stacked tensor or one per group."""
    if not tensors:
        return None
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors))


def decoded(scale: Tensor) -> Tensor:
    """A scale as floats: int64 scales hold the bits of a float32 in their low word."""
    return scale.to(torch.int32).view(torch.float32) if scale.dtype == torch.int64 else scale


_CODES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15, torch.int32: 3, torch.int8: 1}


def _dtype(code: int) -> torch.dtype:
    """torch's dtype of the number by which torch_npu's schemas name it (torch's own numbering of scalar types)."""
    for dtype, known in _CODES.items():
        if known == code:
            return dtype
    raise NotImplementedError(
        f"npu_grouped_matmul: output_dtype: expected one of {sorted(_CODES.values())}, got {code}"
    )
