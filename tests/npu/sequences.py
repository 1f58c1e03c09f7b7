"""MoE layers spelled with Ascend's operators, as the public inference engines spell them; bf16 and unquantised.

Each is a function of (x [T, H], logits [T, E], w13 [E, H, 2 I], w2 [E, I, H]), one token axis that may be symbolic.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moefuse.testing import npu_reference_kernels

npu_reference_kernels.install()
npu = torch.ops.npu

E, K = 8, 2
Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def route(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax, top-k, renormalised: float32 weights and int32 ids."""
    weights, ids = logits.float().softmax(-1).topk(K, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)


def dispatch(x: Tensor, ids: Tensor, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    """init_routing_v2 of all experts, with counts."""
    given = {
        "expert_num": E,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, E],
        "quant_mode": -1,
    } | options
    rows, row_idx, groups, _ = npu.npu_moe_init_routing_v2(x, ids, **given)
    return rows, row_idx, groups


def gmm(rows: Tensor, weights: Sequence[Tensor], groups: Tensor, kind: int = 1, **options: object) -> Tensor:
    """One grouped GEMM."""
    (y,) = npu.npu_grouped_matmul(
        [rows],
        list(weights),
        group_list=groups,
        group_list_type=kind,
        group_type=0,
        **{"split_item": 2} | options,
    )
    return y


def mlp(rows: Tensor, groups: Tensor, w13: Tensor, w2: Tensor, kind: int = 1) -> Tensor:
    """Both GEMMs around npu_swiglu."""
    return gmm(npu.npu_swiglu(gmm(rows, [w13], groups, kind)), [w2], groups, kind)


def k_major(tokens: int) -> Tensor:
    """Row ids of the first init routing: slot j of token t is j * T + t."""
    return torch.arange(tokens * K, dtype=torch.int32).view(K, -1).permute(1, 0).contiguous()


def finalize(
    rows: Tensor, weights: Tensor, row_idx: Tensor, ids: Tensor | None = None, **options: object
) -> Tensor:
    """finalize_routing without skips and bias, token-major."""
    return npu.npu_moe_finalize_routing(
        rows, None, None, None, weights, row_idx, ids, **{"drop_pad_mode": 2} | options
    )


# --- the engines' sequences -------------------------------------------------------------------------------


def sglang_bf16(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids, active_num=x.shape[0] * K)
    return finalize(mlp(rows, counts, w13, w2), weights.to(x.dtype), row_idx, ids)


def sglang_legacy(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, sorted_ids = npu.npu_moe_init_routing(x, k_major(x.shape[0]), ids, x.shape[0])
    ends = npu.npu_moe_compute_expert_tokens(sorted_ids, E).to(torch.int64)
    return finalize(mlp(rows, ends, w13, w2, 0), weights.to(x.dtype), row_idx, ids, drop_pad_mode=0)


def gated_legacy(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids, row_idx = npu.npu_moe_gating_top_k_softmax(logits, None, K)
    weights = weights / weights.sum(-1, keepdim=True)
    rows, row_idx, sorted_ids = npu.npu_moe_init_routing(x, row_idx, ids, x.shape[0])
    ends = npu.npu_moe_compute_expert_tokens(sorted_ids, E).to(torch.int64)
    return finalize(mlp(rows, ends, w13, w2, 0), weights.to(x.dtype), row_idx, ids, drop_pad_mode=0)


def vllm_allgather(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids, _ = npu.npu_moe_gating_top_k(logits, K, renorm=0, norm_type=1, routed_scaling_factor=2.5)
    weights = weights * ((ids >= 0) & (ids < E))
    rows, row_idx, counts = dispatch(x, ids, active_num=x.shape[0] * K)
    return npu.npu_moe_token_unpermute(mlp(rows, counts, w13, w2), row_idx.abs(), weights.to(x.dtype))


def token_permute(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx = npu.npu_moe_token_permute(x, ids, num_out_tokens=x.shape[0] * K)
    counts = torch.histc(ids.float(), bins=E, min=0, max=E)
    return npu.npu_moe_token_unpermute(
        mlp(rows, counts.to(torch.int64), w13, w2), row_idx, weights.to(x.dtype)
    )


def cumulative(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, ends = dispatch(x, ids, expert_tokens_num_type=0)
    return finalize(mlp(rows, ends, w13, w2, 0), weights.to(x.dtype), row_idx)


def counts_summed_up(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    ends = counts.cumsum(0)
    return finalize(mlp(rows, ends, w13, w2, 0), weights.to(x.dtype), row_idx)


def counts_from_ends(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """The other conversion, as vllm-ascend writes it."""
    weights, ids = route(logits)
    rows, row_idx, ends = dispatch(x, ids, expert_tokens_num_type=0)
    counts = torch.cat([ends[:1], torch.diff(ends, dim=0)])
    return finalize(mlp(rows, counts, w13, w2), weights.to(x.dtype), row_idx)


def unbound_weights(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    h = npu.npu_swiglu(gmm(rows, w13.unbind(0), counts))
    return finalize(gmm(h, w2.unbind(0), counts), weights.to(x.dtype), row_idx)


def listed_weights(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """A tensor per expert, as MegaMoe itself wants them. The clones stand for parameters of their own."""
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    h = npu.npu_swiglu(gmm(rows, [w.clone() for w in w13], counts))
    return finalize(gmm(h, [w.clone() for w in w2], counts), weights.to(x.dtype), row_idx)


def transposed_weights(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Weights that lie with out-features first, as a checkpoint's do."""
    return sglang_bf16(x, logits, w13.transpose(1, 2).contiguous().transpose(1, 2), w2)


def written_out_activation(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """swiglustep: chunk, silu, clamp, multiply."""
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    gate, up = gmm(rows, [w13], counts).chunk(2, dim=-1)
    h = torch.nn.functional.silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0)
    return finalize(gmm(h, [w2], counts), weights.to(x.dtype), row_idx)


def slots_of_rows(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """row_idx_type 1: the slot of each row, combined by index_add."""
    weights, ids = route(logits)
    rows, slots, counts = dispatch(x, ids, row_idx_type=1)
    y = mlp(rows, counts, w13, w2) * weights.to(x.dtype).view(-1)[slots].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, slots // K, y)


def unpermute_then_weigh(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """token_unpermute without probs, then plain torch."""
    weights, ids = route(logits)
    rows, row_idx = npu.npu_moe_token_permute(x, ids)
    counts = torch.bincount(ids.view(-1), minlength=E)[:E]
    slots = npu.npu_moe_token_unpermute(mlp(rows, counts, w13, w2), row_idx)
    return (slots.view(-1, K, x.shape[1]) * weights.to(x.dtype).unsqueeze(-1)).sum(1)


def with_skip(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """The residual is added by the finalize routing."""
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    y = mlp(rows, counts, w13, w2)
    return npu.npu_moe_finalize_routing(
        y, x * 2, None, None, weights.to(x.dtype), row_idx, ids, drop_pad_mode=2
    )


def finalize_one_block(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """drop_pad_mode 3 on one block of rows: slots without a row add nothing."""
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    y = mlp(rows, counts, w13, w2).unsqueeze(0)
    return finalize(y, weights.to(x.dtype), row_idx, ids, drop_pad_mode=3)


def clipped_swiglu(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """gpt-oss as vllm-ascend writes it."""
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    h = npu.npu_clipped_swiglu(gmm(rows, [w13], counts), group_index=counts)
    return finalize(gmm(h, [w2], counts), weights.to(x.dtype), row_idx, ids)


def weights_between(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """vllm-ascend's topk_scales: the routing weight multiplies what the second product reads."""
    weights, ids = route(logits)
    rows, slots, counts = dispatch(x, ids, row_idx_type=1)
    h = npu.npu_swiglu(gmm(rows, [w13], counts))
    h = h * weights.to(x.dtype).view(-1)[slots].unsqueeze(-1)
    y = gmm(h, [w2], counts)
    return npu.npu_moe_token_unpermute(y, slots.argsort(), torch.ones_like(weights, dtype=x.dtype))


SEQUENCES: dict[str, Layer] = {
    layer.__name__: layer
    for layer in (
        sglang_bf16,
        sglang_legacy,
        gated_legacy,
        vllm_allgather,
        token_permute,
        cumulative,
        counts_summed_up,
        counts_from_ends,
        unbound_weights,
        listed_weights,
        transposed_weights,
        written_out_activation,
        slots_of_rows,
        unpermute_then_weigh,
        with_skip,
        finalize_one_block,
        clipped_swiglu,
        weights_between,
    )
}
