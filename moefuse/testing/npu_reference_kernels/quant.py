"""Reference kernels of int8 and int4 quantisation, alone and around the gated activation.

In: CPU tensors. Out: integer rows and one float32 scale per row, symmetric: scale = max |row| / 127, for int4 / 7.
Eight int4 values are packed into an int32, the first one in its lowest bits.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from moefuse.testing.npu_reference_kernels.checks import absent, only

INT8, INT4 = 1, 16
"""The numbers of torch.int8 and torch.quint4x2 in the schemas."""


def dynamic_int8(rows: Tensor, smooth: Tensor | None = None, most: int = 127) -> tuple[Tensor, Tensor]:
    """(int8 rows, scale per row); a row of zeros stays zeros. smooth multiplies the row first."""
    values = rows.float() if smooth is None else rows.float() * smooth.float()
    scale = values.abs().amax(-1) / most
    return (values / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)).round().to(torch.int8), scale


def packed(values: Tensor) -> Tensor:
    """int8 values in -8..7, eight by eight in one int32 each along the last dimension."""
    nibbles = (values.long() & 15).unflatten(-1, (-1, 8))
    words: Tensor = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    return words.to(torch.int32)


def unpacked(words: Tensor) -> Tensor:
    """The int8 values of packed ones."""
    nibbles = (words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    return ((nibbles ^ 8) - 8).to(torch.int8).flatten(-2)


def dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """int8 or int4 per row. smooth_scales: one row for all; one per group of rows with group_index (their ends)."""
    name = "npu_dynamic_quant"
    only(name, "dst_type", dst_type, None, INT8, INT4)
    only(name, "quant_mode", quant_mode, "pertoken")
    only(name, "dst_type_max", dst_type_max, 0.0)
    if group_index is not None and smooth_scales is not None:
        smooth_scales = smooth_scales[group_of_rows(group_index, input.shape[0], smooth_scales.shape[0])]
    if dst_type != INT4:
        return dynamic_int8(input, smooth_scales)
    values, scale = dynamic_int8(input, smooth_scales, 7)
    return packed(values), scale


def group_of_rows(ends: Tensor, rows: int, groups: int) -> Tensor:
    """The group of each row, from where the groups end; rows after the last one count as its."""
    position = torch.arange(rows, dtype=ends.dtype)
    return torch.searchsorted(ends, position, right=True).clamp(max=groups - 1)


def dequant_swiglu_quant(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    bias: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    dst_type: int | None = None,
    round_mode: int | None = None,
    activate_dim: int | None = None,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(x + bias) * weight_scale * activation_scale, then the gated product, then int8 per row (quant_mode 1).

    swiglu_mode 0: the left half passes through silu with activate_left, the right half without. swiglu_mode 1: even
    features are the gate g, odd ones u: g * sigmoid(glu_alpha * g) * (u + glu_bias), both clamped by clamp_limit.
    group_index holds the rows of each group, for scales with one row per group.
    """
    name = "npu_dequant_swiglu_quant"
    absent(name, quant_offset=quant_offset)
    only(name, "quant_mode", quant_mode, 1)
    only(name, "dst_type", dst_type, None, 1)
    only(name, "round_mode", round_mode, None, 0)
    only(name, "activate_dim", activate_dim, None, -1)
    only(name, "swiglu_mode", swiglu_mode, 0, 1)

    def per_row(scale: Tensor) -> Tensor:
        rows = scale.float().view(-1, scale.shape[-1])
        if group_index is None:
            return rows
        return rows[group_of_rows(group_index.cumsum(0), x.shape[0], rows.shape[0])]

    values = x.float() if bias is None else x.float() + per_row(bias)
    if weight_scale is not None:
        values = values * per_row(weight_scale)
    if activation_scale is not None:
        values = values * activation_scale.float().view(-1, 1)
    if swiglu_mode == 1:
        gate = values[..., ::2].clamp(max=clamp_limit)
        up = values[..., 1::2].clamp(-clamp_limit, clamp_limit)
        product = gate * torch.sigmoid(glu_alpha * gate) * (up + glu_bias)
    else:
        left, right = values.chunk(2, dim=-1)
        product = F.silu(left) * right if activate_left else left * F.silu(right)
    return dynamic_int8(product, None if quant_scale is None else per_row(quant_scale))
