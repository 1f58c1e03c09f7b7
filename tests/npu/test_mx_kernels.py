"""The reference kernels of the MX formats against plain loops that know no tensor operation."""

import math

import pytest
import torch
from torch import Tensor

from moefuse.testing import npu_reference_kernels
from tests.npu.mx_loops import E4M3, E5M2, FLOAT4, FLOAT4_VALUES, block, meant, stored

npu_reference_kernels.install()
npu = torch.ops.npu

FLOAT32, E8M0 = 6, 293
ENDS, OF_ROW = torch.tensor([3, 3, 5]), [0, 0, 0, 2, 2]
C, N = 128, 8


def rows_like_these(dtype: torch.dtype) -> Tensor:
    """Rows with all that matters: ties, zeros, values beyond the element type, far apart, and the smallest."""
    x = torch.randn(6, C, generator=torch.Generator().manual_seed(0))
    x[0, :32] = 0
    x[1] *= torch.logspace(-30, 30, C)
    x[2, :8] = torch.tensor([5.0, 2.5, 3.5, 0.25, 0.75, -1.25, 1.75, 7.9])  # of float4, halfway between two
    x[3, :4] = torch.tensor([1.9999, 1.0625, 1.1875, -1.3125])  # of float8, beyond 448 / 256 and halfway
    x[4] *= 2.0**-126
    x[5] *= 2.0**120
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("number", [E4M3, E5M2, FLOAT4])
def test_dynamic_mx_quant(number: int, dtype: torch.dtype) -> None:
    x = rows_like_these(dtype)
    elements, scales = npu.npu_dynamic_mx_quant(x, dst_type=number)
    assert scales.shape == (6, C // 64, 2)
    for i, row in enumerate(x.double().tolist()):
        for j in range(0, C, 32):
            exponent, wanted = block(row[j : j + 32], number)
            assert int(scales[i].flatten()[j // 32]) == exponent + 127
            assert stored(elements, number)[i][j : j + 32] == wanted


def test_a_row_that_ends_within_a_block() -> None:
    x = torch.randn(2, 40)
    elements, scales = npu.npu_dynamic_mx_quant(x, dst_type=E4M3)
    assert elements.shape == (2, 40)
    exponent, wanted = block(x[1, 32:].double().tolist(), E4M3)
    assert scales[1].tolist() == [[block(x[1, :32].tolist(), E4M3)[0] + 127, exponent + 127]]
    assert stored(elements, E4M3)[1][32:] == wanted
    assert npu.npu_dynamic_mx_quant(torch.randn(2, 70), dst_type=E4M3)[1][1].tolist()[1][1] == 0  # padding


@pytest.mark.parametrize("what", [torch.inf, torch.nan])
def test_a_block_with_what_is_no_number_has_no_scale(what: float) -> None:
    x = torch.randn(1, 64)
    x[0, 40] = what
    assert npu.npu_dynamic_mx_quant(x, dst_type=E4M3)[1].flatten().tolist()[1] == 255


@pytest.mark.parametrize(
    "options", [{"round_mode": "floor"}, {"block_size": 64}, {"scale_alg": 1}, {"axis": 0}, {"dst_type": 297}]
)
def test_other_rules_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(NotImplementedError, match=f"npu_dynamic_mx_quant: {next(iter(options))}"):
        npu.npu_dynamic_mx_quant(torch.randn(2, 64), **options)


def quantised(values: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Weights [E, K, N] as the operators take them: made as [E, N, K], and turned."""
    elements, scales = npu.npu_dynamic_mx_quant(values.transpose(1, 2).contiguous(), dst_type=number)
    return elements.transpose(1, 2), scales.transpose(1, 2)


def product(rows: list[list[float]], weight: list[list[list[float]]]) -> list[list[float]]:
    """[m, N] of rows [m, K] and weights [E, N, K]."""
    return [
        [sum(a * b for a, b in zip(rows[i], column, strict=True)) for column in weight[e]]
        for i, e in enumerate(OF_ROW)
    ]


CASES = [(E4M3, E4M3), (E5M2, E4M3), (FLOAT4, FLOAT4), (E4M3, FLOAT4)]


@pytest.mark.parametrize(("rows_as", "weights_as"), CASES)
def test_grouped_matmul(rows_as: int, weights_as: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(5, C, generator=generator), torch.randn(3, C, N, generator=generator)
    rows, row_scales = npu.npu_dynamic_mx_quant(x, dst_type=rows_as)
    weight, scales = quantised(w, weights_as)
    given = {"scale": [scales], "scale_dtype": E8M0} if rows_as != E4M3 or weights_as != FLOAT4 else {}
    given = given or {"antiquant_scale": [scales]}
    (y,) = npu.npu_grouped_matmul(
        [rows],
        [weight],
        per_token_scale=[row_scales],
        per_token_scale_dtype=E8M0,
        x_dtype=FLOAT4 if rows_as == FLOAT4 else None,
        weight_dtype=FLOAT4 if weights_as == FLOAT4 else None,
        group_list=ENDS,
        split_item=2,
        group_type=0,
        output_dtype=FLOAT32,
        **given,
    )
    lies = weight.transpose(1, 2), scales.transpose(1, 2)
    own = [meant(lies[0][e], lies[1][e], weights_as) for e in range(3)]
    wanted = torch.tensor(product(meant(rows, row_scales, rows_as), own), dtype=torch.float64)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-6, atol=1e-6)  # rounded once, to float32


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"x_dtype": E5M2}, "x_dtype: expected the number of torch.float8_e4m3fn, got 23"),
        ({"weight_dtype": E5M2}, "weight_dtype: expected the number of torch.float8_e4m3fn, got 23"),
        ({"weight_dtype": FLOAT4}, "weight_dtype: expected the number of torch.float8_e4m3fn, got 296"),
        ({"weight_dtype": 297}, "weight_dtype: "),
    ],
)
def test_a_number_of_another_dtype(numbers: dict[str, int], message: str) -> None:
    rows, row_scales = npu.npu_dynamic_mx_quant(torch.randn(5, C), dst_type=E4M3)
    weight, scales = quantised(torch.randn(3, C, N), E4M3)
    given = {"scale": [scales], "per_token_scale": [row_scales], "group_list": ENDS, **numbers}
    given |= {"scale_dtype": E8M0, "per_token_scale_dtype": E8M0, "split_item": 2, "group_type": 0}
    with pytest.raises((ValueError, NotImplementedError), match=message):
        npu.npu_grouped_matmul([rows], [weight], **given)


def test_scales_of_another_dtype() -> None:
    rows, row_scales = npu.npu_dynamic_mx_quant(torch.randn(5, C), dst_type=E4M3)
    weight, scales = quantised(torch.randn(3, C, N), E4M3)
    given = {"scale_dtype": E8M0, "per_token_scale_dtype": E8M0, "split_item": 2, "group_type": 0}
    for kind in (torch.float8_e4m3fn, torch.int8):
        with pytest.raises(NotImplementedError, match="the scale's type"):
            npu.npu_grouped_matmul(
                [rows],
                [weight],
                scale=[scales.view(kind)],
                per_token_scale=[row_scales],
                group_list=ENDS,
                **given,
            )


def test_float4_weights_that_lie_the_other_way_round() -> None:
    w = torch.randn(3, C, N)
    weight, scales = quantised(w, FLOAT4)
    whole = torch.tensor([stored(weight.transpose(1, 2)[e], FLOAT4) for e in range(3)]).transpose(1, 2)
    codes = torch.tensor(
        [[[FLOAT4_VALUES.index(abs(v)) + 8 * (v < 0) for v in r] for r in e] for e in whole.tolist()]
    )
    other = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    rows, row_scales = npu.npu_dynamic_mx_quant(torch.randn(5, C), dst_type=FLOAT4)
    given = {
        "scale": [scales],
        "per_token_scale": [row_scales],
        "scale_dtype": E8M0,
        "per_token_scale_dtype": E8M0,
        "x_dtype": FLOAT4,
        "weight_dtype": FLOAT4,
        "group_list": ENDS,
        "split_item": 2,
        "group_type": 0,
        "output_dtype": FLOAT32,
    }
    (one,), (two,) = (npu.npu_grouped_matmul([rows], [each], **given) for each in (weight, other))
    assert one.equal(two)


@pytest.mark.parametrize("number", [E4M3, E5M2, FLOAT4])
def test_the_fused_first_product(number: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x, w = torch.randn(5, C, generator=generator), torch.randn(3, C, 128, generator=generator)
    rows, row_scales = npu.npu_dynamic_mx_quant(x, dst_type=number)
    weight, scales = quantised(w, number)
    y, y_scales = npu.npu_grouped_matmul_swiglu_quant_v2(
        rows,
        [weight],
        [scales],
        row_scales,
        ENDS,
        dequant_mode=2,
        quant_mode=2,
        quant_dtype=number,
        weight_scale_dtype=E8M0,
        x_scale_dtype=E8M0,
        x_dtype=FLOAT4 if number == FLOAT4 else None,
        weight_dtype=FLOAT4 if number == FLOAT4 else None,
    )
    lies = weight.transpose(1, 2), scales.transpose(1, 2)
    own = [meant(lies[0][e], lies[1][e], number) for e in range(3)]
    got = meant(y, y_scales, number)
    step, least = {E4M3: (2.0**-3, 2.0**-17), E5M2: (2.0**-2, 2.0**-31), FLOAT4: (2.0**-1, 2.0**-3)}[number]
    for i, h in enumerate(product(meant(rows, row_scales, number), own)):
        a = [g / (1 + math.exp(-g)) * u for g, u in zip(h[:64], h[64:], strict=True)]
        for j in range(0, 64, 32):
            largest = max(abs(v) for v in a[j : j + 32])
            # rounded, or cut off at the largest element, an eighth or a quarter less
            for k in range(j, j + 32):
                assert abs(got[i][k] - a[k]) <= max(step * abs(a[k]), least * largest)


@pytest.mark.parametrize(("mode", "number"), [(2, E5M2), (3, E4M3), (9, FLOAT4)])
def test_init_routing(mode: int, number: int) -> None:
    x, ids = torch.randn(4, C), torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]], dtype=torch.int32)
    rows, row_idx, counts, scales = npu.npu_moe_init_routing_v2(
        x, ids, expert_num=3, expert_tokens_num_type=1, expert_tokens_num_flag=True, quant_mode=mode
    )
    order = sorted((int(ids[t, j]), t, j) for t in range(4) for j in range(2))
    tokens = torch.stack([x[t] for _, t, _ in order])
    wanted, bytes_ = npu.npu_dynamic_mx_quant(tokens, dst_type=number)
    assert stored(rows, number) == stored(wanted, number)
    assert scales.dtype == torch.float8_e8m0fnu
    assert scales.view(torch.uint8).flatten(1).equal(bytes_.flatten(1))
    assert scales.dim() == (3 if mode == 9 else 2)
    assert counts.tolist() == [2, 3, 3]
    assert [int(row_idx[t * 2 + j]) for _, t, j in order] == list(range(8))


def test_rows_that_nobody_wrote_have_no_scale() -> None:
    x, ids = torch.randn(4, C), torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]], dtype=torch.int32)
    *_, scales = npu.npu_moe_init_routing_v2(x, ids, expert_num=3, active_expert_range=[0, 2], quant_mode=3)
    assert scales.view(torch.uint8)[5:].unique().tolist() == [255]
    assert 255 not in scales.view(torch.uint8)[:5]


def test_distribute_dispatch_of_no_tokens() -> None:
    x, ids = torch.randn(0, C), torch.zeros(0, 2, dtype=torch.int32)
    rows, scales, *_ = npu.npu_moe_distribute_dispatch_v2(x, ids, "g", 1, 0, 3, quant_mode=4, y_dtype=E4M3)
    assert (rows.shape, scales.shape) == ((0, C), (0, C // 32))


@pytest.mark.parametrize("number", [E5M2, E4M3, FLOAT4])
def test_distribute_dispatch(number: int) -> None:
    x, ids = torch.randn(4, C), torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]], dtype=torch.int32)
    rows, scales, _, counts, *_ = npu.npu_moe_distribute_dispatch_v2(
        x, ids, "g", 1, 0, 3, quant_mode=4, y_dtype=number
    )
    order = [t for e in range(3) for t in range(4) for j in range(2) if int(ids[t, j]) == e]
    wanted, bytes_ = npu.npu_dynamic_mx_quant(x[order], dst_type=number)
    assert stored(rows, number) == stored(wanted, number)
    assert scales.equal(bytes_.flatten(1))
    assert counts.tolist() == [2, 3, 3]
