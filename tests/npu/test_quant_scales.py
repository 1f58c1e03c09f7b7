"""Which scales and offsets belong to a weight, what they mean, and when they may come."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse
from moefuse.testing import capture_graph
from tests.npu.quant_sequences import BFLOAT16, FLOAT32, INT32, Layer, Weights, dispatch, gmm, second
from tests.npu.sequences import K, finalize, npu, route
from tests.npu.test_quant_refusals import I, first, operands, why

fuse = partial(moefuse.fuse, options={"target": "reference"})

SHARED = "gate and up have different scales or offsets but share a weight"
ROUNDED = "before all of its scales came"


def row_scales_late(dtype: int) -> Layer:
    """The product leaves with its weight's scale, rounded: its rows' scales come with the activation."""

    def layer(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
        w = Weights(*tensors)
        routing, ids, _, row_idx, counts, scales, h = first(
            x, logits, w, per_token_scale=None, output_dtype=dtype
        )
        a, a_scales = npu.npu_dequant_swiglu_quant(
            h, activation_scale=scales, quant_mode=1, activate_left=True
        )
        return finalize(second(a, a_scales, w, counts), routing, row_idx, ids)

    return layer


def integers_at_last(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """All scales in the product, which leaves as int32."""
    w = Weights(*tensors)
    routing, ids, _, row_idx, counts, _, h = first(x, logits, w, output_dtype=INT32)
    a, scales = npu.npu_dequant_swiglu_quant(h, quant_mode=1, activate_left=True)
    return finalize(second(a, scales, w, counts), routing, row_idx, ids)


def weight_scales_late(rows: bool, dtype: int) -> Layer:
    """The product leaves without its weight's scale, rounded; rows: with its rows' scales."""

    def layer(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
        w = Weights(*tensors)
        given: dict[str, Any] = {"scale": None, "output_dtype": dtype} | (
            {} if rows else {"per_token_scale": None}
        )
        routing, ids, _, row_idx, counts, scales, h = first(x, logits, w, **given)
        late = {} if rows else {"activation_scale": scales}
        a, a_scales = npu.npu_dequant_swiglu_quant(
            h, weight_scale=w.s13, group_index=counts, quant_mode=1, activate_left=True, **late
        )
        return finalize(second(a, a_scales, w, counts), routing, row_idx, ids)

    return layer


def halves(scale: Callable[[Weights], Tensor]) -> Layer:
    """Gate and up are halves of two products of one weight; up's has a scale of its own."""

    def layer(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
        w = Weights(*tensors)
        routing, ids, rows, row_idx, counts, scales, h = first(x, logits, w)
        up = gmm(rows, w.w13, counts, scale=[scale(w)], per_token_scale=[scales])[:, I:]
        a, a_scales = npu.npu_dynamic_quant(torch.nn.functional.silu(h[:, :I]) * up)
        return finalize(second(a, a_scales, w, counts), routing, row_idx, ids)

    return layer


def halves_of_floats(up: Callable[[Weights], dict[str, Any]]) -> Layer:
    """The same of floats and integer weights, which may have offsets, in groups of inputs."""

    def layer(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
        w, (routing, ids) = Weights(*tensors), route(logits)
        rows, row_idx, counts, _ = dispatch(x, ids, quant_mode=-1)
        own = {"antiquant_scale": [w.s13], "antiquant_offset": [w.o13]}
        gate = gmm(rows, w.w13, counts, **own)[:, :I]
        h = torch.nn.functional.silu(gate) * gmm(rows, w.w13, counts, **own | up(w))[:, I:]
        return finalize(gmm(h, w.w2, counts, antiquant_scale=[w.s2]), routing.to(x.dtype), row_idx, ids)

    return layer


REFUSED: dict[str, tuple[Layer, str]] = {
    "rounded to integers": (row_scales_late(INT32), ROUNDED),
    "rounded to bfloat16": (row_scales_late(BFLOAT16), ROUNDED),
    "integers times row scales": (weight_scales_late(True, INT32), ROUNDED),
    "bfloat16 before the weight's scale": (weight_scales_late(False, BFLOAT16), ROUNDED),
    "integers at last": (integers_at_last, "an expert GEMM is rounded to torch.int32 after its scales"),
    "two scales of one weight": (halves(lambda w: w.s13 * 3), SHARED),
}


@pytest.mark.parametrize("case", REFUSED)
def test_scales_that_are_lost_or_late(case: str) -> None:
    layer, reason = REFUSED[case]
    assert reason in why(capture_graph(layer, operands()).graph_module)


@pytest.mark.parametrize(
    ("up", "reason"),
    [
        (lambda w: {"antiquant_offset": [w.o13 + 50]}, SHARED),
        (lambda w: {"antiquant_scale": [w.s13 * 3]}, SHARED),
        (lambda w: {"antiquant_offset": None}, "only one of gate and up has an offset"),
    ],
)
def test_one_weight_with_two_offsets(up: Callable[[Weights], dict[str, Any]], reason: str) -> None:
    assert reason in why(capture_graph(halves_of_floats(up), operands("w8a16")).graph_module)


@pytest.mark.parametrize("groups", [1, 2])
def test_one_weight_with_one_scale_and_offset(groups: int) -> None:
    given = operands("w8a16", groups)
    captured = capture_graph(halves_of_floats(lambda w: {}), given)
    fused = fuse(captured.graph_module)
    assert fused.report.fused == 1, fused.report
    got, want = fused.graph_module(*given)[0], captured.graph_module(*given)[0]
    assert float((got - want).norm() / want.norm()) < 1e-2  # the activation is written out in bfloat16


def test_only_the_sums_may_wait_for_scales() -> None:
    """float32 isn't rounded: the scales of the rows may come with the activation."""
    captured = capture_graph(row_scales_late(FLOAT32), operands())
    assert fuse(captured.graph_module).report.fused == 1


# --- integers cast by value: no float32 in the bits of an int64 ---


def in_the_product(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids)
    h = gmm(rows, w.w13, counts, scale=[w.s13.float()], per_token_scale=[scales])
    a, a_scales = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    y = gmm(a, w.w2, counts, scale=[w.s2.double()], per_token_scale=[a_scales])
    return finalize(y, routing.to(x.dtype), row_idx, ids)


def behind_the_product(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, slots, counts, scales = dispatch(x, ids, row_idx_type=1)
    h = gmm(rows, w.w13, counts, output_dtype=INT32)
    late = {"weight_scale": w.s13.float(), "activation_scale": scales, "group_index": counts}
    a, a_scales = npu.npu_dequant_swiglu_quant(h, **late, activate_left=True, quant_mode=1)
    return npu.npu_grouped_matmul_finalize_routing(
        a,
        w.w2,
        counts,
        scale=w.s2.float(),
        pertoken_scale=a_scales,
        logit=routing.view(-1)[slots],
        row_index=(slots // K).to(torch.int64),
        output_bs=x.shape[0],
    )


def of_floats(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, _ = dispatch(x, ids, quant_mode=-1)
    scales, offsets = ([s.float() for s in pair] for pair in ((w.s13, w.s2), (w.o13, w.o2)))
    h = gmm(rows, w.w13, counts, antiquant_scale=scales[:1], antiquant_offset=offsets[:1])
    y = gmm(npu.npu_swiglu(h), w.w2, counts, antiquant_scale=scales[1:], antiquant_offset=offsets[1:])
    return finalize(y, routing.to(x.dtype), row_idx, ids)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layer", [in_the_product, behind_the_product, of_floats])
def test_integers_cast_by_value_are_no_encoded_scales(layer: Layer, dtype: torch.dtype) -> None:
    x, logits, *tensors = operands("w8a16" if layer is of_floats else "w8a8")
    w = Weights(*tensors)
    others = {
        name: torch.randint(1, 5, getattr(w, name).shape).to(dtype) for name in ("s13", "s2", "o13", "o2")
    }
    arguments = (x, logits, *w._replace(**others))
    captured = capture_graph(layer, arguments)
    fused = fuse(captured.graph_module)
    assert fused.report.fused == 1, fused.report
    assert fused.graph_module(*arguments)[0].equal(captured.graph_module(*arguments)[0])
