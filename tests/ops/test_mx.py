"""`mega_moe.quant` in MX formats on the reference target against loops over Python numbers, and what it refuses."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse.targets  # noqa: F401  (registers the kernels)
from moefuse.ops import mx

T, K, E, H, I = 5, 2, 4, 128, 64  # noqa: E741
FLOAT4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def every(dtype: torch.dtype) -> list[float]:
    """All magnitudes of an element type, in the order of their codes."""
    if dtype == torch.float4_e2m1fn_x2:
        return FLOAT4
    codes = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    return [float(v) for v in codes if math.isfinite(v)]


def block(values: list[float], dtype: torch.dtype) -> list[float]:
    """What a block of a row becomes: the nearest of all elements, of two the one with the even code."""
    largest = max(map(abs, values))
    top = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15, torch.float4_e2m1fn_x2: 2}[dtype]
    scale = 2.0 ** max(-127, math.floor(math.log2(largest)) - top) if largest else 2.0**-127
    known = every(dtype)

    def nearest(v: float) -> float:
        best = min(range(len(known)), key=lambda i: (abs(known[i] - abs(v / scale)), i % 2))
        return math.copysign(known[best], v) * scale

    return [nearest(v) for v in values]


@pytest.mark.parametrize("dtype", list(mx.ELEMENTS))
def test_rows(dtype: torch.dtype) -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    x[0, :32] = 0
    x[1] *= torch.logspace(-30, 30, 64)
    x[2, :8] = torch.tensor([5.0, 2.5, 3.5, 0.25, 0.75, -1.25, 1.75, 7.9])
    x[3, :3] = torch.tensor([1.9999, 1.0625, -1.3125])
    x[4] *= 2.0**-126
    x[5] *= 2.0**120
    want = [[*block(row[:32], dtype), *block(row[32:], dtype)] for row in x.double().tolist()]
    assert mx.rounded(x, dtype).tolist() == want


def test_a_block_that_is_no_number() -> None:
    x = torch.randn(2, 64)
    x[0, 1], x[1, 40] = math.nan, -math.inf
    got = mx.rounded(x, torch.float8_e4m3fn).isnan()
    assert got[0].tolist() == [True] * 32 + [False] * 32
    assert got[1].tolist() == [False] * 32 + [True] * 32


class Layer:
    """Random experts in an MX format: numbers for the loop, operands for the operator."""

    def __init__(
        self,
        scheme: str,
        weights: torch.dtype,
        rows: torch.dtype,
        *,
        transposed: bool = True,
        listed: bool = False,
        scales_as: torch.dtype = torch.uint8,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.rows = rows
        self.x = torch.randn(T, H, generator=generator)
        self.weights, self.ids = torch.rand(T, E, generator=generator).topk(K, dim=-1)
        known = every(weights)
        codes = [
            torch.randint(0, len(known), (E, n, c), generator=generator) for c, n in ((H, 2 * I), (I, H))
        ]
        signs = [torch.randint(0, 2, code.shape, generator=generator) for code in codes]
        low = 118 - int(math.log2(max(known)))
        bytes_ = [
            torch.randint(low, low + 10, (E, n, c // 32), generator=generator)
            for c, n in ((H, 2 * I), (I, H))
        ]
        self.w = [
            torch.tensor(known, dtype=torch.float64)[code]
            * (1 - 2 * sign)
            * 2.0 ** (byte - 127).repeat_interleave(32, -1)
            for code, sign, byte in zip(codes, signs, bytes_, strict=True)
        ]

        def stored(code: Tensor, sign: Tensor) -> Tensor:
            if weights == torch.float4_e2m1fn_x2:
                low, high = (code + 8 * sign).unflatten(-1, (-1, 2)).unbind(-1)
                return (low + 16 * high).to(torch.uint8)
            return (code + 128 * sign).to(torch.uint8).view(weights)

        def form(tensor: Tensor) -> list[Tensor]:
            tensor = tensor if transposed else tensor.transpose(1, 2).contiguous()
            return [t.clone() for t in tensor] if listed else [tensor]

        self.arguments: tuple[Any, ...] = (
            *(None, self.x, self.ids, self.weights),
            *(form(stored(code, sign)) for code, sign in zip(codes, signs, strict=True)),
            *([], []),
            *(form(byte.to(torch.uint8).unflatten(-1, (-1, 2)).view(scales_as)) for byte in bytes_),
            *([], []),
        )
        self.constants: dict[str, Any] = {
            "quant": scheme,
            "num_experts": E,
            "transpose_weight1": transposed,
            "transpose_weight2": transposed,
        }

    def gemm(self, row: list[float], which: int, e: int) -> list[float]:
        whole = [v for start in range(0, len(row), 32) for v in block(row[start : start + 32], self.rows)]
        return (self.w[which][e] @ torch.tensor(whole, dtype=torch.float64)).tolist()  # type: ignore[no-any-return]

    def expected(self) -> Tensor:
        y = torch.zeros(T, H, dtype=torch.float64)
        for t in range(T):
            for j in range(K):
                e = int(self.ids[t, j])
                h = self.gemm([float(v) for v in self.x[t]], 0, e)
                a = [g / (1 + math.exp(-g)) * u for g, u in zip(h[:I], h[I:], strict=True)]
                y[t] += float(self.weights[t, j]) * torch.tensor(self.gemm(a, 1, e), dtype=torch.float64)
        return y


E4M3, E5M2, E2M1 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2
CASES = {
    "mxfp8": Layer("mxfp8", E4M3, E4M3),
    "mxfp8 turned": Layer("mxfp8", E4M3, E4M3, transposed=False),
    "mxfp8 listed": Layer("mxfp8", E4M3, E4M3, listed=True, scales_as=torch.float8_e8m0fnu),
    "mxfp8 e5m2": Layer("mxfp8", E5M2, E5M2, scales_as=torch.float8_e8m0fnu),
    "mxfp4": Layer("mxfp4", E2M1, E2M1),
    "mxfp4 turned, listed": Layer("mxfp4", E2M1, E2M1, transposed=False, listed=True),
    "mxfp4a8": Layer("mxfp4a8", E2M1, E4M3),
}


@pytest.mark.parametrize("case", CASES)
def test_against_a_loop(case: str) -> None:
    layer = CASES[case]
    y, nums = torch.ops.moefuse.mega_moe.quant(*layer.arguments, **layer.constants)
    want = layer.expected()
    # h1 and the activation are rounded to float32, which may move an element of the activation by one step.
    assert float((y.double() - want).norm() / want.norm()) < 2e-3
    assert nums.tolist() == [int((layer.ids == e).sum()) for e in range(E)]


def test_float4_weights_of_their_own_dtype() -> None:
    layer = CASES["mxfp4"]
    own = [[t.view(torch.float4_e2m1fn_x2) for t in each] for each in layer.arguments[4:6]]
    given = (*layer.arguments[:4], *own, *layer.arguments[6:])
    want = torch.ops.moefuse.mega_moe.quant(*layer.arguments, **layer.constants)[0]
    assert torch.ops.moefuse.mega_moe.quant(*given, **layer.constants)[0].equal(want)


def test_a_scale_that_is_no_number_spoils_its_expert_alone() -> None:
    layer = CASES["mxfp8"]
    scales = layer.arguments[8][0].clone()
    scales[2, 0, 0, 0] = 255
    given = (*layer.arguments[:8], [scales], *layer.arguments[9:])
    y = torch.ops.moefuse.mega_moe.quant(*given, **layer.constants)[0]
    assert y.isnan().any(-1).tolist() == (layer.ids == 2).any(-1).tolist()


REFUSED: dict[str, tuple[dict[int, Any], dict[str, Any], str]] = {
    "integers": (
        {4: [torch.zeros(E, 2 * I, H, dtype=torch.int8)]},
        {},
        "weight1: expected one of torch.float8_e4m3fn",
    ),
    "scales of another shape": (
        {8: [torch.zeros(E, H // 64, 2 * I, 2, dtype=torch.uint8)]},
        {},
        "weight_scales1: expected (4, 128, 2, 2), got (4, 2, 128, 2)",
    ),
    "scales of another type": (
        {8: [torch.zeros(E, 2 * I, H // 64, 2)]},
        {},
        "weight_scales1: expected one of torch.uint8, torch.float8_e8m0fnu, got torch.float32",
    ),
    "no scales": ({9: []}, {}, "weight_scales2: expected 1 as of weights, got 0"),
    "a bias": ({6: [torch.zeros(E, 2 * I)]}, {}, "bias1: mxfp8 takes none"),
    "an offset": ({11: [torch.zeros(E, H)]}, {}, "weight_offsets2: mxfp8 takes none"),
    "another scheme": (
        {},
        {"quant": "mxfp4"},
        "weight1: expected one of torch.uint8, torch.float4_e2m1fn_x2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit(case: str) -> None:
    changed, constants, reason = REFUSED[case]
    layer = CASES["mxfp8"]
    arguments = [changed.get(i, argument) for i, argument in enumerate(layer.arguments)]
    with pytest.raises((ValueError, TypeError)) as error:
        torch.ops.moefuse.mega_moe.quant(*arguments, **layer.constants | constants)
    assert reason in str(error.value)


def test_half_a_pair_of_blocks() -> None:
    layer = CASES["mxfp8"]
    w = [torch.zeros(E, 2 * I, 96).to(E4M3)], [torch.zeros(E, 96, I).to(E4M3)]
    s = [torch.zeros(E, 2 * I, 2, 2, dtype=torch.uint8)], [torch.zeros(E, 96, 1, 2, dtype=torch.uint8)]
    with pytest.raises(ValueError, match="blocks of 32 inputs in pairs need a multiple of 64 inputs, got 96"):
        torch.ops.moefuse.mega_moe.quant(
            None, layer.x[:, :96], layer.ids, layer.weights, *w, [], [], *s, [], [], **layer.constants
        )
