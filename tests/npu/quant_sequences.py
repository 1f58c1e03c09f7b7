"""Quantised MoE layers spelled with Ascend's operators, as the public inference engines spell them.

Each is a function of (x [T, H], logits [T, E], w13, w2 and what belongs to them, see `Scheme`), with its scheme.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.testing import npu_reference_kernels
from moefuse.testing.npu_reference_kernels.quant import INT4, packed
from tests.npu.sequences import E, K, finalize, k_major, npu, route

npu_reference_kernels.install()

H, I = 16, 32  # noqa: E741
BFLOAT16, FLOAT32, INT32 = 15, 6, 3
Layer = Callable[..., Tensor]


class Weights(NamedTuple):
    """w13 [E, H, 2 I], w2 [E, I, H] of integers, int4 packed along the last dimension.

    Scales per output channel [E, N] or per group of inputs [E, G, N]; offsets alike, or the assists of w4a8.
    """

    w13: Tensor
    w2: Tensor
    s13: Tensor
    s2: Tensor
    o13: Tensor
    o2: Tensor


def weights(scheme: str, groups: int = 1, seed: int = 0, hidden: int = H, inner: int = I) -> Weights:
    """Random ones for a scheme: w8a8, w4a8, w4a4, w8a16, w4a16."""
    generator = torch.Generator().manual_seed(seed)
    top = 127 if scheme.startswith("w8") else 8
    integers, scales, others = [], [], []
    for inputs, outputs in ((hidden, 2 * inner), (inner, hidden)):
        w = torch.randint(-top + 1, top, (E, inputs, outputs), generator=generator, dtype=torch.int8)
        shape = (E, outputs) if groups == 1 else (E, groups, outputs)
        scale = (torch.rand(shape, generator=generator) + 0.5) / top / inputs**0.5
        if scheme == "w4a8":
            every = scale if groups == 1 else scale.repeat_interleave(inputs // groups, 1)
            others.append(8 * (w.float() * (every.unsqueeze(1) if groups == 1 else every)).sum(1))
        else:
            others.append(torch.randint(-3, 4, shape, generator=generator).bfloat16())
        integers.append(w if scheme.startswith("w8") else packed(w))
        scales.append(scale.bfloat16() if scheme.endswith("a16") else scale)
    return Weights(*integers, *scales, *others)


def encoded(scale: Tensor) -> Tensor:
    """A float32 scale as int4 products take it: its bits in the low word of an int64."""
    return scale.view(torch.int32).to(torch.int64)


def dispatch(x: Tensor, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """init_routing_v2 of all experts, with counts; int8 rows."""
    given = {
        "expert_num": E,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "quant_mode": 1,
    } | options
    return npu.npu_moe_init_routing_v2(x, ids, **given)


def gmm(rows: Tensor, weight: Tensor, groups: Tensor, kind: int = 1, **options: Any) -> Tensor:
    """One grouped GEMM into bfloat16."""
    given = {"split_item": 2, "output_dtype": BFLOAT16} | options
    (y,) = npu.npu_grouped_matmul(
        [rows], [weight], group_list=groups, group_list_type=kind, group_type=0, **given
    )
    return y


def second(rows: Tensor, scales: Tensor, w: Weights, groups: Tensor, kind: int = 1) -> Tensor:
    """The second GEMM of int8 rows."""
    return gmm(rows, w.w2, groups, kind, scale=[w.s2], per_token_scale=[scales])


# --- W8A8 in its four spellings --------------------------------------------------------------------------


def w8a8_dequant_swiglu_quant(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """SGLang: the product leaves as bfloat16, one operator activates and quantises."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids)
    h = gmm(rows, w.w13, counts, scale=[w.s13], per_token_scale=[scales])
    a, a_scales = npu.npu_dequant_swiglu_quant(h, quant_mode=1, activate_left=True)
    return finalize(second(a, a_scales, w, counts), routing.to(x.dtype), row_idx, ids)


def w8a8_swiglu_dynamic_quant(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """SGLang, vllm-ascend: activation and quantisation by themselves; the combine by absolute rows."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids)
    h = gmm(rows, w.w13, counts, scale=[w.s13], per_token_scale=[scales])
    a, a_scales = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    return npu.npu_moe_token_unpermute(second(a, a_scales, w, counts), row_idx.abs(), routing.to(x.dtype))


def w8a8_integer_product(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """vllm-ascend: the product leaves as int32, its scales are applied with the activation."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids)
    h = gmm(rows, w.w13, counts, output_dtype=INT32, split_item=3)
    a, a_scales = npu.npu_dequant_swiglu_quant(
        h, weight_scale=w.s13, activation_scale=scales, group_index=counts, activate_left=True, quant_mode=1
    )
    return npu.npu_moe_token_unpermute(second(a, a_scales, w, counts), row_idx, routing.to(x.dtype))


def w8a8_fused_first_product(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """SGLang, xLLM: product, scales, activation and quantisation in one operator, by running counts."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids)
    a, a_scales = npu.npu_grouped_matmul_swiglu_quant_v2(
        rows, [w.w13], [w.s13], scales, counts.cumsum(0), group_list_type=0
    )
    return finalize(second(a, a_scales, w, counts), routing.to(x.dtype), row_idx, ids)


def w8a8_older_fused_first_product(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, ends, scales = dispatch(x, ids, expert_tokens_num_type=0)
    a, a_scales, _ = npu.npu_grouped_matmul_swiglu_quant(rows, w.w13, ends, w.s13, scales)
    return finalize(second(a, a_scales, w, ends, 0), routing.to(x.dtype), row_idx, ids)


# --- W8A8, other ways in and out -------------------------------------------------------------------------


def w8a8_legacy_prefill(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """SGLang: the first init routing, rows quantised after it, k-major combine."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, sorted_ids = npu.npu_moe_init_routing(x, k_major(x.shape[0]), ids, x.shape[0])
    ends = npu.npu_moe_compute_expert_tokens(sorted_ids, E).to(torch.int64)
    rows, scales = npu.npu_dynamic_quant(rows)
    h = gmm(rows, w.w13, ends, 0, scale=[w.s13], per_token_scale=[scales])
    a, a_scales = npu.npu_dequant_swiglu_quant(h, quant_mode=1, activate_left=True)
    return finalize(second(a, a_scales, w, ends, 0), routing.to(x.dtype), row_idx, ids, drop_pad_mode=0)


def w8a8_legacy_decode(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """SGLang, captured: as the integer product, with the number of slots as a literal."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids, active_num=x.shape[0] * K, active_expert_range=[0, E])
    h = gmm(rows, w.w13, counts, output_dtype=INT32)
    a, a_scales = npu.npu_dequant_swiglu_quant(
        h, weight_scale=w.s13, activation_scale=scales, group_index=counts, activate_left=True, quant_mode=1
    )
    return npu.npu_moe_token_unpermute(second(a, a_scales, w, counts), row_idx, routing.to(x.dtype))


def w8a8_tokens_quantised_first(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """Tokens are quantised before they are spread; their scales travel with them."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    integers, own = npu.npu_dynamic_quant(x)
    rows, row_idx, counts, scales = dispatch(integers, ids, scale=own, quant_mode=-1)
    h = gmm(rows, w.w13, counts, scale=[w.s13], per_token_scale=[scales])
    a, a_scales = npu.npu_swiglu_quant(
        h, activate_left=True, quant_mode=1, group_index=counts, group_list_type=1
    )
    return finalize(second(a, a_scales, w, counts), routing.to(x.dtype), row_idx, ids)


def w8a8_fused_last_product(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """The second product and the combine in one operator, in float32."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, slots, counts, scales = dispatch(x, ids, row_idx_type=1)
    h = gmm(rows, w.w13, counts, scale=[w.s13], per_token_scale=[scales])
    a, a_scales = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    return npu.npu_grouped_matmul_finalize_routing(
        a,
        w.w2,
        counts,
        scale=w.s2,
        pertoken_scale=a_scales,
        logit=routing.view(-1)[slots],
        row_index=(slots // K).to(torch.int64),
        output_bs=x.shape[0],
    )


def w8a8_listed(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """A tensor per expert. The clones stand for parameters of their own."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids)
    given = {
        "group_list": counts,
        "group_list_type": 1,
        "group_type": 0,
        "split_item": 2,
        "output_dtype": BFLOAT16,
    }
    each = [[t.clone() for t in tensor] for tensor in w[:4]]
    (h,) = npu.npu_grouped_matmul([rows], each[0], scale=each[2], per_token_scale=[scales], **given)
    a, a_scales = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    (y,) = npu.npu_grouped_matmul([a], each[1], scale=each[3], per_token_scale=[a_scales], **given)
    return finalize(y, routing.to(x.dtype), row_idx, ids)


def w8a8_transposed(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """Weights that lie with out-features first, as a checkpoint's do."""
    w = Weights(*tensors)
    turned = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (w.w13, w.w2))
    return w8a8_swiglu_dynamic_quant(x, logits, *turned, *w[2:])


# --- int4, and weights alone -----------------------------------------------------------------------------


def w4a8(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """SGLang, vllm-ascend: both products with the assist that makes up for their 8."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids)
    h = gmm(rows, w.w13, counts, scale=[encoded(w.s13)], per_token_scale=[scales], bias=[w.o13])
    a, a_scales = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    y = gmm(a, w.w2, counts, scale=[encoded(w.s2)], per_token_scale=[a_scales], bias=[w.o2])
    return npu.npu_moe_token_unpermute(y, row_idx.abs(), routing.to(x.dtype))


def w4a8_fused_first_product(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """The fused first product, with scales per group of inputs."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids)
    a, a_scales = npu.npu_grouped_matmul_swiglu_quant_v2(
        rows,
        [w.w13],
        [w.s13],
        scales,
        counts,
        weight_assist_matrix=[w.o13],
        group_list_type=1,
    )
    y = gmm(a, w.w2, counts, scale=[encoded(w.s2)], per_token_scale=[a_scales], bias=[w.o2])
    return finalize(y, routing.to(x.dtype), row_idx, ids)


def w4a4(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """SGLang: rows quantised to int4 after an init routing without quantisation."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, _ = dispatch(x, ids, quant_mode=-1)
    rows, scales = npu.npu_dynamic_quant(rows, dst_type=INT4)
    h = gmm(rows, w.w13, counts, scale=[encoded(w.s13)], per_token_scale=[scales])
    a, a_scales = npu.npu_dynamic_quant(npu.npu_swiglu(h), dst_type=INT4)
    y = gmm(a, w.w2, counts, scale=[encoded(w.s2)], per_token_scale=[a_scales])
    return finalize(y, routing.to(x.dtype), row_idx, ids)


def weights_alone(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """SGLang W4A16, WNA16: the first init routing, both products with antiquant scale and offset."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, sorted_ids = npu.npu_moe_init_routing(x, k_major(x.shape[0]), ids, x.shape[0])
    ends = npu.npu_moe_compute_expert_tokens(sorted_ids, E).to(torch.int64)
    h = gmm(rows, w.w13, ends, 0, antiquant_scale=[w.s13], antiquant_offset=[w.o13])
    y = gmm(npu.npu_swiglu(h), w.w2, ends, 0, antiquant_scale=[w.s2], antiquant_offset=[w.o2])
    return finalize(y, routing.to(x.dtype), row_idx, ids, drop_pad_mode=0)


# --- activations -----------------------------------------------------------------------------------------


def w8a8_swigluoai(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """Interleaved halves, clamped, in the operator that quantises."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids)
    h = gmm(rows, w.w13, counts, output_dtype=INT32)
    a, a_scales = npu.npu_dequant_swiglu_quant(
        h, weight_scale=w.s13, activation_scale=scales, group_index=counts, quant_mode=1, swiglu_mode=1
    )
    return finalize(second(a, a_scales, w, counts), routing.to(x.dtype), row_idx, ids)


def w8a8_right_half(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """The second half passes through silu: the operator's own default."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids)
    h = gmm(rows, w.w13, counts, scale=[w.s13], per_token_scale=[scales])
    a, a_scales = npu.npu_dequant_swiglu_quant(h, quant_mode=1)
    return finalize(second(a, a_scales, w, counts), routing.to(x.dtype), row_idx, ids)


def w8a8_swiglustep(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """Written out: chunk, silu, clamp, multiply."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids)
    gate, up = gmm(rows, w.w13, counts, scale=[w.s13], per_token_scale=[scales]).chunk(2, dim=-1)
    a, a_scales = npu.npu_dynamic_quant(torch.nn.functional.silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0))
    return finalize(second(a, a_scales, w, counts), routing.to(x.dtype), row_idx, ids)


def w8a8_gelu_and_mul(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids)
    gate, up = gmm(rows, w.w13, counts, scale=[w.s13], per_token_scale=[scales]).chunk(2, dim=-1)
    a, a_scales = npu.npu_dynamic_quant(torch.nn.functional.gelu(gate) * up)
    return finalize(second(a, a_scales, w, counts), routing.to(x.dtype), row_idx, ids)


def w8a8_situ(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids)
    gate, up = gmm(rows, w.w13, counts, scale=[w.s13], per_token_scale=[scales]).float().chunk(2, dim=-1)
    h = 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate) * (2.0 * torch.tanh(up / 2.0))
    a, a_scales = npu.npu_dynamic_quant(h.to(x.dtype))
    return finalize(second(a, a_scales, w, counts), routing.to(x.dtype), row_idx, ids)


class Case(NamedTuple):
    """A sequence with its scheme, the groups of inputs of its scales, and the activation that it has."""

    layer: Layer
    scheme: str
    groups: int = 1
    activation: str = "swiglu"
    gate_up: str = "concat"

    @property
    def tensors(self) -> Weights:
        """Experts for it."""
        return weights(self.scheme, self.groups)


ROUNDED = ("w8a8_swiglustep", "w8a8_gelu_and_mul")
"""Activations written out in bfloat16, a rounding per operator."""

CASES: dict[str, Case] = {
    **{
        layer.__name__: Case(layer, "w8a8")
        for layer in (
            w8a8_dequant_swiglu_quant,
            w8a8_swiglu_dynamic_quant,
            w8a8_integer_product,
            w8a8_fused_first_product,
            w8a8_older_fused_first_product,
            w8a8_legacy_prefill,
            w8a8_legacy_decode,
            w8a8_tokens_quantised_first,
            w8a8_fused_last_product,
            w8a8_listed,
            w8a8_transposed,
        )
    },
    "w8a8_swigluoai": Case(w8a8_swigluoai, "w8a8", 1, "swigluoai", "interleaved"),
    "w8a8_right_half": Case(w8a8_right_half, "w8a8", 1, "swiglu", "concat_swapped"),
    "w8a8_swiglustep": Case(w8a8_swiglustep, "w8a8", 1, "swiglustep"),
    "w8a8_gelu_and_mul": Case(w8a8_gelu_and_mul, "w8a8", 1, "geglu"),
    "w8a8_situ": Case(w8a8_situ, "w8a8", 1, "situglu"),
    "w4a8": Case(w4a8, "w4a8"),
    "w4a8_groups": Case(w4a8, "w4a8", 2),
    "w4a8_fused_first_product": Case(w4a8_fused_first_product, "w4a8", 2),
    "w4a4": Case(w4a4, "w4a4"),
    "w8a16": Case(weights_alone, "w8a16"),
    "w4a16": Case(weights_alone, "w4a16"),
    "w4a16_groups": Case(weights_alone, "w4a16", 2),
}
