"""Reference kernels of routing, init routing and finalize routing.

In: CPU tensors, in the operators' own argument order. Out: what the public operator text says. Plain torch without
data-dependent shapes, so that the same functions tell the shapes.
"""

import torch
from torch import Tensor

from moefuse.testing.npu_reference_kernels import mx
from moefuse.testing.npu_reference_kernels.checks import UNDEFINED, absent, only
from moefuse.testing.npu_reference_kernels.quant import dynamic_int8

_BLOCKS = {2: torch.float8_e5m2, 3: torch.float8_e4m3fn, 9: torch.float4_e2m1fn_x2}
"""The modes of the init routing that quantise by MX blocks."""


def gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over experts, then top-k: weights, ids, and the k-major row ids (slot j of token t is j * T + t)."""
    weights, ids = x.float().softmax(-1).topk(k, dim=-1)
    if finished is not None:
        ids = torch.where(finished.unsqueeze(-1), x.shape[-1], ids)
    rows = x.shape[:-1].numel()
    row_idx = torch.arange(k * rows, dtype=torch.int32).view(k, *x.shape[:-1]).movedim(0, -1).contiguous()
    return weights.to(x.dtype), ids.int(), row_idx


def gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax (norm_type 0) or sigmoid (1), groups, top-k of score + bias: weights without bias, ids, scores.

    The scores are written only with out_flag.
    """
    name = "npu_moe_gating_top_k"
    absent(name, input_ids=input_ids, tid2eid=tid2eid)
    only(name, "renorm", renorm, 0)
    only(name, "norm_type", norm_type, 0, 1)
    only(name, "group_select_mode", group_select_mode, 0, 1)
    scores = x.float().softmax(-1) if norm_type == 0 else x.float().sigmoid()
    choice = scores if bias is None else scores + bias.float()
    if group_count > 1:
        groups = choice.view(x.shape[0], group_count, -1)
        best = groups.amax(-1) if group_select_mode == 0 else groups.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best).scatter(1, best.topk(k_group, dim=-1).indices, 1.0).bool()
        choice = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).view_as(scores)
    ids = choice.topk(k, dim=-1).indices
    weights = scores.gather(1, ids)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    out = scores if out_flag else torch.full_like(scores, UNDEFINED)
    return (weights * routed_scaling_factor).to(x.dtype), ids.int(), out


def init_routing(
    x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in expert order, the sorted position of each row id, the sorted ids. Rows after active_num are left out."""
    tokens, k = expert_idx.shape
    ids, order = expert_idx.flatten().sort(stable=True)
    source = row_idx.flatten()[order]
    numbers = torch.arange(ids.numel(), dtype=source.dtype)
    # -1: of row ids that aren't there
    position = torch.full_like(source, -1).scatter(0, source.long(), numbers)
    return x[source[: min(active_num, tokens) * k] % tokens], position, ids


def init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] = [],  # noqa: B006  (the schema's default)
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows in expert order, row indices, tokens per expert (cumulative or counts, if asked for), scales of the rows.

    Only ids in the active range take part: other slots get row index -1 (row_idx_type 0), and the rows after those
    that take part are unwritten. row_idx_type 1 gives the slot of each row instead of the row of each slot.
    quant_mode 1: int8 with a scale per row. 2, 3: MX blocks (see mx.py) of float8_e5m2, float8_e4m3fn, whose scales are
    float8_e8m0 [rows, blocks]. 9: of float4_e2m1, whose scales lie in pairs.
    """
    name = "npu_moe_init_routing_v2"
    absent(name, offset=offset)
    only(name, "drop_pad_mode", drop_pad_mode, 0)
    only(name, "quant_mode", quant_mode, -1, 1, *_BLOCKS)
    only(name, "expert_tokens_num_type", expert_tokens_num_type, 0, 1)
    only(name, "x_dtype", x_dtype, None)
    first, last = active_expert_range or (0, expert_num)
    slots, k = expert_idx.numel(), expert_idx.shape[1]
    ids = expert_idx.flatten()
    local = (ids >= first) & (ids < last)
    order = torch.where(local, ids, torch.iinfo(ids.dtype).max).argsort(stable=True)
    used = torch.arange(slots) < local.sum()
    rows = x[order // k]
    if quant_mode == 1:
        smooth = None if scale is None else scale[(ids[order] - first).clamp(0, scale.shape[0] - 1)]
        rows, scales = dynamic_int8(rows, smooth)
    elif quant_mode in _BLOCKS:
        absent(name, scale=scale)
        rows, scales = mx.quantise(rows, _BLOCKS[quant_mode])
        scales = scales.masked_fill(~used.view(-1, 1, 1), mx.NAN_BYTE).view(torch.float8_e8m0fnu)
        scales = scales if quant_mode == 9 else scales.flatten(-2)
    else:
        rows = rows.masked_fill(~used.unsqueeze(1), UNDEFINED if rows.is_floating_point() else 0)
        scales = x.new_zeros(slots, dtype=torch.float32) if scale is None else scale[order // k].float()
    if quant_mode not in _BLOCKS:
        scales = scales.masked_fill(~used, UNDEFINED)
    kept = slots if active_num <= 0 else min(active_num, slots)
    row_idx = order.int()
    if row_idx_type == 0:
        positions = torch.where(used, torch.arange(slots, dtype=torch.int32), -1)
        row_idx = torch.empty_like(positions).scatter(0, order, positions)
    counts = (ids.unsqueeze(1) == torch.arange(first, last)).sum(0)
    if expert_tokens_num_type == 0:
        counts = counts.cumsum(0)
    if not expert_tokens_num_flag:
        counts = counts.new_zeros(())
    return rows[:kept], row_idx, counts, scales[:kept]


def init_routing_quant(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = 1024,
    expert_capacity: int = 0,
    expert_num: int = 256,
    drop_pad_mode: int = 0,
    expert_tokens_num_mode: int = 0,
    expert_tokens_before_capacity_flag: bool = False,
    quant_mode: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """int8 rows in expert order, the row of each slot, tokens per expert, unwritten, the scale of each row.

    Tokens per expert: none (expert_tokens_num_mode 0), running (1), counts (2). active_num cuts rows off the end.
    """
    name = "npu_moe_init_routing_quant"
    only(name, "quant_mode", quant_mode, 1)
    only(name, "expert_tokens_num_mode", expert_tokens_num_mode, 0, 1, 2)
    only(name, "expert_tokens_before_capacity_flag", expert_tokens_before_capacity_flag, False)
    rows, row_idx, counts, scales = init_routing_v2(
        x,
        expert_idx,
        scale=scale,
        offset=offset,
        active_num=active_num,
        expert_num=expert_num,
        drop_pad_mode=drop_pad_mode,
        expert_tokens_num_type=0 if expert_tokens_num_mode == 1 else 1,
        expert_tokens_num_flag=expert_tokens_num_mode > 0,
        quant_mode=1,
    )
    counts = counts.int() if expert_tokens_num_mode else counts.new_zeros(0, dtype=torch.int32)
    return rows, row_idx, counts, counts.new_zeros(0), scales


def compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    """How many of the sorted ids are at most e, for each expert e."""
    experts = torch.arange(num_expert, dtype=sorted_expert_for_source_row.dtype)
    return (sorted_expert_for_source_row.unsqueeze(1) <= experts).sum(0).int()


def token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows in the order of the indices, the row of each slot. num_out_tokens cuts rows off the end."""
    only("npu_moe_token_permute", "padded_mode", padded_mode, False)
    k = indices.shape[1] if indices.dim() == 2 else 1
    order = indices.flatten().argsort(stable=True)
    return tokens[order[: num_out_tokens or order.numel()] // k], order.argsort().int()


def finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """skip1 + skip2 + sum over k of scales * (row + bias of its expert).

    The index is k-major for modes 0 and 1, token-major for 2 and 3. -1 adds a row of zeros in modes 1 and 3; the
    others don't define it.
    """
    only("npu_moe_finalize_routing", "drop_pad_mode", drop_pad_mode, 0, 1, 2, 3)
    if scales is not None:
        k = scales.shape[1]
    assert k is not None
    tokens = expanded_src_to_dst_row.numel() // k
    rows = expanded_permuted_rows.reshape(-1, expanded_permuted_rows.shape[-1]).float()
    index = expanded_src_to_dst_row
    index = index.view(k, tokens).t() if drop_pad_mode in (0, 1) else index.view(tokens, k)
    missing = 0.0 if drop_pad_mode in (1, 3) else UNDEFINED
    total = rows[index.clamp(min=0)].masked_fill((index < 0).unsqueeze(-1), missing)
    if bias is not None:
        if export_for_source_row is None:
            raise ValueError("npu_moe_finalize_routing: export_for_source_row: expected with bias, got None")
        total = total + bias.float()[export_for_source_row]
    if scales is not None:
        total = total * scales.float().unsqueeze(-1)
    total = total.sum(1)
    for skip in (skip1, skip2):
        total = total if skip is None else total + skip.float()
    return total.to(expanded_permuted_rows.dtype)


def token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """The sum over the slots of each token of probs * row; without probs one slot per token."""
    only("npu_moe_token_unpermute", "padded_mode", padded_mode, False)
    rows = permuted_tokens[sorted_indices].float()
    if probs is not None:
        rows = (rows.view(*probs.shape, -1) * probs.float().unsqueeze(-1)).sum(1)
    return rows.to(permuted_tokens.dtype)
