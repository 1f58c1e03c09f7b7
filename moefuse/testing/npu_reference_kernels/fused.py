"""Reference kernels of the operators that do two steps at once, and of the reordering after an all-to-all.

In: CPU tensors. Out: what the single steps would give: int8 forms with one scale per row and per output channel,
and MX forms.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moefuse.testing.npu_reference_kernels import mx
from moefuse.testing.npu_reference_kernels.checks import UNDEFINED, absent, only
from moefuse.testing.npu_reference_kernels.experts import grouped_matmul
from moefuse.testing.npu_reference_kernels.quant import dynamic_int8, group_of_rows


def swiglu_quant(
    x: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    offsets: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    group_list_type: int = 0,
    dst_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated product, times each group's smooth scale, as int8 with a scale per row (quant_mode 1)."""
    name = "npu_swiglu_quant"
    only(name, "quant_mode", quant_mode, 1)
    only(name, "group_list_type", group_list_type, 0, 1)
    only(name, "dst_type", dst_type, None, torch.int8)
    absent(name, offsets=offsets)
    left, right = x.float().chunk(2, dim=-1)
    product = F.silu(left) * right if activate_left else left * F.silu(right)
    if smooth_scales is not None:
        smooth = smooth_scales.view(smooth_scales.shape[0], -1)
        if group_index is not None:
            ends = group_index if group_list_type == 0 else group_index.cumsum(0)
            smooth = smooth[group_of_rows(ends, x.shape[0], smooth.shape[0])]
        product = product * smooth
    return dynamic_int8(product)


def grouped_matmul_swiglu_quant_v2(
    x: Tensor,
    weight: list[Tensor],
    weight_scale: list[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    smooth_scale: Tensor | None = None,
    weight_assist_matrix: list[Tensor] | None = None,
    bias: Tensor | None = None,
    dequant_mode: int | None = 0,
    dequant_dtype: int | None = 6,
    quant_mode: int | None = 0,
    quant_dtype: int | None = 1,
    group_list_type: int | None = 0,
    tuning_config: list[int] | None = None,
    **dtypes: int | None,
) -> tuple[Tensor, Tensor]:
    """int8 rows times each group's int8 or int4 weight, scaled, silu(first half) * second half, int8 per row.

    int4 weights need the assist matrix, which makes up for the 8 that is taken off the rows (see grouped_matmul).
    dequant_mode and quant_mode 2: the same in MX formats (see mx.py), quantised from float32 to quant_dtype.
    """
    name = "npu_grouped_matmul_swiglu_quant_v2"
    absent(name, smooth_scale=smooth_scale, bias=bias)
    only(name, "dequant_mode", dequant_mode, 0, 2)
    only(name, "dequant_dtype", dequant_dtype, 6)
    only(name, "quant_mode", quant_mode, dequant_mode)
    blocks = dequant_mode == 2
    assert quant_dtype is not None
    only(name, "quant_dtype", quant_dtype, *(mx.ELEMENTS if blocks else (1,)))
    if not blocks:
        only(name, "x.dtype", x.dtype, torch.int8)
        _no_other_dtypes(name, dtypes)
    (product,) = grouped_matmul(
        [x],
        weight,
        bias=weight_assist_matrix,
        scale=weight_scale,
        per_token_scale=[x_scale],
        group_list=group_list,
        group_list_type=group_list_type,
        group_type=0,
        split_item=2,
        output_dtype=6,
        x_dtype=dtypes.get("x_dtype"),
        weight_dtype=dtypes.get("weight_dtype"),
        scale_dtype=dtypes.get("weight_scale_dtype"),
        per_token_scale_dtype=dtypes.get("x_scale_dtype"),
    )
    gate, up = product.chunk(2, dim=-1)
    activated, unwritten = F.silu(gate) * up, product.isnan().any(-1)
    if blocks:
        rows, scales = mx.quantise(torch.nan_to_num(activated), mx.ELEMENTS[quant_dtype])
        return rows, scales.masked_fill(unwritten.view(-1, 1, 1), mx.NAN_BYTE)
    rows, scales = dynamic_int8(torch.nan_to_num(activated))
    return rows, scales.masked_fill(unwritten, UNDEFINED)


def grouped_matmul_swiglu_quant(
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor,
    *,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The older form: one weight, ends of groups; the third output, the offsets, is unwritten."""
    absent("npu_grouped_matmul_swiglu_quant", bias=bias, offset=offset)
    rows, scales = grouped_matmul_swiglu_quant_v2(x, [weight], [weight_scale], x_scale, group_list)
    return rows, scales, scales.new_full((), UNDEFINED)


def grouped_matmul_finalize_routing(
    x: Tensor,
    w: Tensor,
    group_list: Tensor,
    *,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    shared_input: Tensor | None = None,
    logit: Tensor | None = None,
    row_index: Tensor | None = None,
    dtype: torch.dtype | None = None,
    shared_input_weight: float | None = 1.0,
    shared_input_offset: int | None = 0,
    output_bs: int | None = 0,
    group_list_type: int | None = 1,
    tuning_config: list[int] | None = None,
    **dtypes: int | None,
) -> Tensor:
    """The grouped product, each row times its logit, added to row row_index of the output, in float32.

    int4 weights need scales [E, G, N] and the bias that makes up for the 8 (see grouped_matmul). shared_input is added
    from row shared_input_offset on, times shared_input_weight.
    """
    name = "npu_grouped_matmul_finalize_routing"
    absent(name, offset=offset)
    only(name, "dtype", dtype, None, torch.float32)
    _no_other_dtypes(name, dtypes)
    if scale is None or row_index is None:
        raise NotImplementedError(f"{name}: scale, row_index: the reference kernel needs both, got None")
    (product,) = grouped_matmul(
        [x],
        [w],
        bias=None if bias is None else [bias],
        scale=[scale],
        per_token_scale=None if pertoken_scale is None else [pertoken_scale],
        group_list=group_list,
        group_list_type=group_list_type,
        group_type=0,
        split_item=2,
        output_dtype=6,
    )
    if logit is not None:
        product = product * logit.float().unsqueeze(1)
    y = product.new_zeros(output_bs or x.shape[0], product.shape[1])
    if shared_input is not None:
        first = shared_input_offset or 0
        y[first : first + shared_input.shape[0]] += shared_input.float() * (shared_input_weight or 0.0)
    return y.index_add(0, row_index.long(), product)


def _no_other_dtypes(name: str, dtypes: dict[str, Any]) -> None:
    for argument, dtype in dtypes.items():
        only(name, argument, dtype, None)


def re_routing(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    *,
    per_token_scales: Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    tokens_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows that lie by rank, then expert, put in order by expert, then rank.

    Returns the rows, their scales (unwritten without any), the old place of each row, and the rows per expert.
    """
    name = "npu_moe_re_routing"
    only(name, "expert_token_num_type", expert_token_num_type, 1)
    only(name, "idx_type", idx_type, 0)
    only(name, "tokens_dtype", tokens_dtype, None)
    ranks, experts = expert_token_num_per_rank.shape
    ends = expert_token_num_per_rank.flatten().cumsum(0)
    block = group_of_rows(ends, tokens.shape[0], ranks * experts)
    order = (block % experts * ranks + block // experts).argsort(stable=True)
    scales = tokens.new_full((tokens.shape[0],), UNDEFINED, dtype=torch.float32)
    if per_token_scales is not None:
        scales = per_token_scales[order]
    return (
        tokens[order],
        scales,
        order.int(),
        expert_token_num_per_rank.sum(0).to(expert_token_num_per_rank.dtype),
    )
