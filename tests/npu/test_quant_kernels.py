"""The reference kernels of int4, weights alone quantised, and scales per group of inputs, against plain loops."""

import math

import pytest
import torch
from torch import Tensor

from moefuse.testing import npu_reference_kernels
from moefuse.testing.npu_reference_kernels.quant import INT4, packed, unpacked

npu_reference_kernels.install()
npu = torch.ops.npu

ENDS, OF_ROW = torch.tensor([3, 3, 5]), [0, 0, 0, 2, 2]
C, N, G = 16, 8, 4
"""Inputs, outputs, groups of inputs with a scale of their own."""
BFLOAT16, FLOAT32 = 15, 6


def ints(low: int, *shape: int) -> Tensor:
    return torch.randint(low, -low, shape, dtype=torch.int8)


def words(values: Tensor) -> list[list[int]]:
    """Each int32 taken apart bit by bit."""
    found = []
    for row in values:
        nibbles = [(int(word) >> 4 * i) & 15 for word in row for i in range(8)]
        found.append([v - 16 if v > 7 else v for v in nibbles])
    return found


def test_packing() -> None:
    values = ints(-8, 3, 16)
    assert words(packed(values)) == values.tolist()
    assert unpacked(packed(values)).equal(values)


def gmm(rows: Tensor, weight: Tensor, **options: object) -> Tensor:
    (y,) = npu.npu_grouped_matmul([rows], [weight], group_list=ENDS, split_item=2, group_type=0, **options)
    return y


def per_group(scale: Tensor, e: int, c: int, n: int) -> float:
    return float(scale[e, n]) if scale.dim() == 2 else float(scale[e, c // (C // scale.shape[1]), n])


@pytest.mark.parametrize("grouped", [False, True])
def test_w4a8_takes_8_off_the_rows_and_adds_the_assist(grouped: bool) -> None:
    rows, weight, per_row = ints(-127, 5, C), ints(-8, 3, C, N), torch.rand(5)
    scale = torch.rand(3, G, N) / 100 if grouped else torch.rand(3, N) / 100
    bias = torch.randn(3, N)
    encoded = scale.view(torch.int32).to(torch.int64)
    y = gmm(
        rows, packed(weight), scale=[encoded], per_token_scale=[per_row], bias=[bias], output_dtype=FLOAT32
    )
    for i, e in enumerate(OF_ROW):
        for n in range(N):
            total = sum(
                (int(rows[i, c]) - 8) * int(weight[e, c, n]) * per_group(scale, e, c, n) for c in range(C)
            )
            assert float(y[i, n]) == pytest.approx(
                (total + float(bias[e, n])) * float(per_row[i]), rel=1e-4, abs=1e-5
            )


def test_the_usual_assist_makes_the_w4a8_product_whole() -> None:
    rows, weight, scale = ints(-127, 5, C), ints(-8, 3, C, N), torch.rand(3, N) / 100
    assist = 8 * weight.float().sum(1) * scale
    ones = torch.ones(5)
    y = gmm(rows, packed(weight), scale=[scale], per_token_scale=[ones], bias=[assist], output_dtype=FLOAT32)
    want = torch.stack([rows[i].double() @ weight[e].double() * scale[e] for i, e in enumerate(OF_ROW)])
    # float32, and an assist of float32 sums
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-4)


def test_w4a4() -> None:
    x = torch.randn(5, C)
    rows, per_row = npu.npu_dynamic_quant(x, dst_type=INT4)
    weight, scale = ints(-8, 3, C, N), torch.rand(3, N)
    for i in range(5):
        top = max(abs(float(v)) for v in x[i]) / 7
        assert float(per_row[i]) == pytest.approx(top, rel=1e-6)
        assert words(rows)[i] == [round(float(v) / top) for v in x[i]]
    y = gmm(rows, packed(weight), scale=[scale], per_token_scale=[per_row], output_dtype=FLOAT32)
    for i, e in enumerate(OF_ROW):
        for n in range(N):
            total = sum(words(rows)[i][c] * int(weight[e, c, n]) for c in range(C))
            assert float(y[i, n]) == pytest.approx(
                total * float(scale[e, n] * per_row[i]), rel=1e-5, abs=1e-5
            )


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_weights_alone_quantised(int4: bool, grouped: bool) -> None:
    rows, weight = torch.randn(5, C), ints(-8, 3, C, N)
    shape = (3, G, N) if grouped else (3, N)
    scale, offset, bias = torch.rand(shape), torch.randint(-3, 4, shape).float(), torch.randn(3, N)
    y = gmm(
        rows,
        packed(weight) if int4 else weight,
        antiquant_scale=[scale],
        antiquant_offset=[offset],
        bias=[bias],
    )
    for i, e in enumerate(OF_ROW):
        for n in range(N):
            total = sum(
                float(rows[i, c])
                * (int(weight[e, c, n]) + per_group(offset, e, c, n))
                * per_group(scale, e, c, n)
                for c in range(C)
            )
            assert float(y[i, n]) == pytest.approx(total + float(bias[e, n]), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("whole", [False, True])
def test_a_bias_of_int8_products_is_inside_if_int32_and_outside_if_float(whole: bool) -> None:
    rows, weight, scale, per_row = ints(-127, 5, C), ints(-127, 3, C, N), torch.rand(3, N), torch.rand(5)
    bias = torch.randint(-99, 99, (3, N), dtype=torch.int32) if whole else torch.randn(3, N)
    y = gmm(rows, weight, scale=[scale], per_token_scale=[per_row], bias=[bias], output_dtype=FLOAT32)
    for i, e in enumerate(OF_ROW):
        for n in range(N):
            total = sum(int(rows[i, c]) * int(weight[e, c, n]) for c in range(C))
            factor, b = float(scale[e, n]) * float(per_row[i]), float(bias[e, n])
            want = (total + b) * factor if whole else total * factor + b
            assert float(y[i, n]) == pytest.approx(want, rel=1e-4)


def silu(v: float) -> float:
    return v / (1 + math.exp(-v))


def test_the_fused_w4a8_product_and_its_older_w8a8_form() -> None:
    rows, weight, scale, per_row = (
        ints(-127, 5, C),
        ints(-8, 3, C, N),
        torch.rand(3, G, N) / 100,
        torch.rand(5),
    )
    assist = torch.randn(3, N)
    y, scales = npu.npu_grouped_matmul_swiglu_quant_v2(
        rows, [packed(weight)], [scale], per_row, ENDS, weight_assist_matrix=[assist]
    )
    product = gmm(
        rows, packed(weight), scale=[scale], per_token_scale=[per_row], bias=[assist], output_dtype=FLOAT32
    )
    wide = ints(-127, 3, C, N)
    old = npu.npu_grouped_matmul_swiglu_quant(rows, wide, ENDS, scale[:, 0], per_row)
    new = npu.npu_grouped_matmul_swiglu_quant_v2(rows, [wide], [scale[:, 0]], per_row, ENDS)
    assert old[0].equal(new[0])
    assert old[1].equal(new[1])
    for i in range(5):
        h = [float(v) for v in product[i]]
        a = [silu(g) * u for g, u in zip(h[: N // 2], h[N // 2 :], strict=True)]
        top = max(abs(v) for v in a) / 127
        assert float(scales[i]) == pytest.approx(top, rel=1e-4)
        assert y[i].tolist() == pytest.approx([v / top for v in a], abs=0.51)  # both sides round


def test_dequant_swiglu_quant_with_clamps_and_interleaved_halves() -> None:
    x = torch.randn(5, N) * 5
    y, scales = npu.npu_dequant_swiglu_quant(
        x, quant_mode=1, swiglu_mode=1, clamp_limit=6.0, glu_alpha=1.5, glu_bias=0.5
    )
    for i in range(5):
        h = [float(v) for v in x[i]]
        a = []
        for g, u in zip(h[::2], h[1::2], strict=True):
            gate = min(g, 6.0)
            a.append(gate / (1 + math.exp(-1.5 * gate)) * (max(-6.0, min(u, 6.0)) + 0.5))
        top = max(abs(v) for v in a) / 127
        assert float(scales[i]) == pytest.approx(top, rel=1e-4)
        assert y[i].tolist() == pytest.approx([v / top for v in a], abs=0.51)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_init_routing_quant(mode: int) -> None:
    x, ids = torch.randn(4, C), torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]], dtype=torch.int32)
    rows, row_idx, counts, _, scales = npu.npu_moe_init_routing_quant(
        x, ids, active_num=8, expert_num=3, expert_tokens_num_mode=mode
    )
    order = sorted((int(ids[t, j]), t, j) for t in range(4) for j in range(2))
    for i, (_, t, j) in enumerate(order):
        top = max(abs(float(v)) for v in x[t]) / 127
        assert int(row_idx[t * 2 + j]) == i
        assert float(scales[i]) == pytest.approx(top, rel=1e-6)
        assert rows[i].tolist() == [round(float(v) / top) for v in x[t]]
    assert counts.tolist() == {0: [], 1: [2, 5, 8], 2: [2, 3, 3]}[mode]
