"""MoE layers in MX formats spelled with Ascend's operators, as the public inference engines spell them.

Each is a function of (x [T, H], logits [T, E], w13, w2, s13, s2), see `weights`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.testing import npu_reference_kernels
from tests.npu.mx_loops import E4M3, E5M2, FLOAT4
from tests.npu.quant_sequences import BFLOAT16, dispatch
from tests.npu.sequences import E, finalize, npu, route

npu_reference_kernels.install()

H, I = 128, 64  # noqa: E741
E8M0 = 293
Layer = Callable[..., Tensor]


def weights(number: int, seed: int = 0, hidden: int = H, inner: int = I) -> tuple[Tensor, ...]:
    """w13 [E, H, 2 I], w2 [E, I, H], and scales [E, K / 64, N, 2], all turned: made with the inputs last."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for inputs, outputs in ((hidden, 2 * inner), (inner, hidden)):
        w = torch.randn(E, outputs, inputs, generator=generator).bfloat16() / inputs**0.5
        elements, scales = npu.npu_dynamic_mx_quant(w, dst_type=number)
        made.append((elements.transpose(1, 2), scales.transpose(1, 2)))
    return made[0][0], made[1][0], made[0][1], made[1][1]


def gmm(
    rows: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, groups: Tensor, **options: Any
) -> Tensor:
    """One grouped GEMM in MX formats; rows or weights that are bytes hold float4."""
    given: dict[str, Any] = {
        "scale": [weight_scales],
        "per_token_scale": [scales],
        "scale_dtype": E8M0,
        "per_token_scale_dtype": E8M0,
        "x_dtype": FLOAT4 if rows.dtype == torch.uint8 else None,
        "weight_dtype": FLOAT4 if weight.dtype == torch.uint8 else None,
        "group_list_type": 1,
        "output_dtype": BFLOAT16,
    } | options
    (y,) = npu.npu_grouped_matmul([rows], [weight], group_list=groups, group_type=0, split_item=2, **given)
    return y


def paired(scales: Tensor) -> Tensor:
    """[M, K / 32] as [M, K / 64, 2]: what engines do to the scales of the init routing and the dispatch."""
    return scales.reshape(scales.shape[0], scales.shape[1] // 2, 2) if scales.dim() == 2 else scales


def by_steps(number: int, mode: int = -1) -> Layer:
    """SGLang: product, activation, quantisation, product; rows quantised behind the init routing, or by it (mode)."""

    def layer(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, s13: Tensor, s2: Tensor) -> Tensor:
        routing, ids = route(logits)
        rows, row_idx, counts, scales = dispatch(x, ids, quant_mode=mode)
        if mode == -1:
            rows, scales = npu.npu_dynamic_mx_quant(rows, dst_type=number)
        h = npu.npu_swiglu(gmm(rows, paired(scales), w13, s13, counts))
        a, a_scales = npu.npu_dynamic_mx_quant(h, dst_type=number)
        return finalize(gmm(a, a_scales, w2, s2, counts), routing.to(x.dtype), row_idx, ids)

    return layer


def fused_first_product(mode: int, number: int) -> Layer:
    """vllm-ascend: the first product, activation and quantisation in one operator, by running counts."""

    def layer(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, s13: Tensor, s2: Tensor) -> Tensor:
        routing, ids = route(logits)
        rows, row_idx, counts, scales = dispatch(x, ids, quant_mode=mode)
        a, a_scales = npu.npu_grouped_matmul_swiglu_quant_v2(
            rows,
            [w13],
            [s13],
            paired(scales),
            counts.cumsum(0),
            dequant_mode=2,
            quant_mode=2,
            dequant_dtype=6,
            quant_dtype=number,
            weight_scale_dtype=E8M0,
            x_scale_dtype=E8M0,
            x_dtype=FLOAT4 if rows.dtype == torch.uint8 else None,
            weight_dtype=FLOAT4 if w13.dtype == torch.uint8 else None,
        )
        late = {"scale": None, "scale_dtype": None, "antiquant_scale": [s2]}
        mixed = a.dtype != torch.uint8 and w2.dtype == torch.uint8
        y = gmm(a, a_scales, w2, s2, counts, **(late if mixed else {}))
        return npu.npu_moe_token_unpermute(y, row_idx.abs(), routing.to(x.dtype))

    return layer


def mxfp4a16(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, s13: Tensor, s2: Tensor) -> Tensor:
    """vllm-ascend W4A16 MXFP: rows stay bfloat16."""
    routing, ids = route(logits)
    rows, row_idx, counts, _ = dispatch(x, ids, quant_mode=-1)
    given = {"group_list": counts, "group_list_type": 1, "group_type": 0, "split_item": 2}
    (h,) = npu.npu_grouped_matmul([rows], [w13], antiquant_scale=[s13], weight_dtype=FLOAT4, **given)
    (y,) = npu.npu_grouped_matmul(
        [npu.npu_swiglu(h)], [w2], antiquant_scale=[s2], weight_dtype=FLOAT4, **given
    )
    return npu.npu_moe_token_unpermute(y, row_idx.abs(), routing.to(x.dtype))


def mxfp8_swiglustep(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, s13: Tensor, s2: Tensor) -> Tensor:
    """vllm-ascend: the activation written out."""
    routing, ids = route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids, quant_mode=3)
    gate, up = gmm(rows, paired(scales), w13, s13, counts).chunk(2, dim=-1)
    h = torch.nn.functional.silu(gate).clamp(max=7.0) * up.clamp(-7.0, 7.0)
    a, a_scales = npu.npu_dynamic_mx_quant(h, dst_type=E4M3)
    return finalize(gmm(a, a_scales, w2, s2, counts), routing.to(x.dtype), row_idx, ids)


def mxfp8_listed(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, s13: Tensor, s2: Tensor) -> Tensor:
    """A tensor per expert. The clones stand for parameters of their own."""
    routing, ids = route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids, quant_mode=3)
    each = [[t.clone() for t in tensor] for tensor in (w13, w2, s13, s2)]
    given: dict[str, Any] = {
        "scale_dtype": E8M0,
        "per_token_scale_dtype": E8M0,
        "group_list": counts,
        "group_list_type": 1,
        "group_type": 0,
        "split_item": 2,
        "output_dtype": BFLOAT16,
    }
    (h,) = npu.npu_grouped_matmul([rows], each[0], scale=each[2], per_token_scale=[paired(scales)], **given)
    a, a_scales = npu.npu_dynamic_mx_quant(npu.npu_swiglu(h), dst_type=E4M3)
    (y,) = npu.npu_grouped_matmul([a], each[1], scale=each[3], per_token_scale=[a_scales], **given)
    return finalize(y, routing.to(x.dtype), row_idx, ids)


def mxfp8_as_stored(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, s13: Tensor, s2: Tensor) -> Tensor:
    """Weights and scales lie with their inputs last, and are turned in the graph; scales of type float8_e8m0."""
    turned = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (w13, w2))
    scales = (t.view(torch.float8_e8m0fnu) for t in (s13, s2))
    return by_steps(E4M3)(x, logits, *turned, *scales)


def mxfp4a8(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, s13: Tensor, s2: Tensor) -> Tensor:
    """vllm-ascend W4A8 MXFP: float8 rows, float4 weights, whose scales come as antiquant_scale."""
    routing, ids = route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids, quant_mode=3)

    def product(rows: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
        late = {"scale": None, "scale_dtype": None, "antiquant_scale": [weight_scales]}
        return gmm(rows, scales, weight, weight_scales, counts, **late)

    h = npu.npu_swiglu(product(rows, paired(scales), w13, s13))
    a, a_scales = npu.npu_dynamic_mx_quant(h, dst_type=E4M3)
    return npu.npu_moe_token_unpermute(product(a, a_scales, w2, s2), row_idx.abs(), routing.to(x.dtype))


class Case(NamedTuple):
    """A sequence, its scheme, the numbers of the weights' elements and the rows' (0: floats), and its activation."""

    layer: Layer
    scheme: str
    weights_as: int
    rows_as: int
    activation: str = "swiglu"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Experts for it."""
        return weights(self.weights_as)


CASES: dict[str, Case] = {
    "mxfp8_by_steps": Case(by_steps(E4M3), "mxfp8", E4M3, E4M3),
    "mxfp8_init_routing": Case(by_steps(E4M3, 3), "mxfp8", E4M3, E4M3),
    "mxfp8_e5m2": Case(by_steps(E5M2, 2), "mxfp8", E5M2, E5M2),
    "mxfp8_fused_first_product": Case(fused_first_product(3, E4M3), "mxfp8", E4M3, E4M3),
    "mxfp8_swiglustep": Case(mxfp8_swiglustep, "mxfp8", E4M3, E4M3, "swiglustep"),
    "mxfp8_listed": Case(mxfp8_listed, "mxfp8", E4M3, E4M3),
    "mxfp8_as_stored": Case(mxfp8_as_stored, "mxfp8", E4M3, E4M3),
    "mxfp4_by_steps": Case(by_steps(FLOAT4), "mxfp4", FLOAT4, FLOAT4),
    "mxfp4_init_routing": Case(by_steps(FLOAT4, 9), "mxfp4", FLOAT4, FLOAT4),
    "mxfp4_fused_first_product": Case(fused_first_product(9, FLOAT4), "mxfp4", FLOAT4, FLOAT4),
    "mxfp4a8": Case(mxfp4a8, "mxfp4a8", FLOAT4, E4M3),
    "mxfp4a16": Case(mxfp4a16, "mxfp4a16", FLOAT4, 0),
}

REFUSED: dict[str, tuple[Case, str]] = {
    "mxfp4_then_float8": (
        Case(fused_first_product(9, E4M3), "", FLOAT4, FLOAT4),
        "the expert GEMMs are quantised as mxfp4, mxfp4a8: not all alike",
    ),
}
"""Sequences that mega_moe.quant has no scheme for, and the reason."""
