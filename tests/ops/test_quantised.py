"""`mega_moe.quant` on the reference target against loops over Python numbers, and what it refuses."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse.targets  # noqa: F401  (registers the kernels)
from moefuse.ops.quantised import SCHEMES

T, K, E, H, I, G = 5, 2, 4, 16, 8, 2  # noqa: E741


def packed(values: Tensor, dim: int) -> Tensor:
    """Eight int4 values of a dimension in one int32, the first one in the lowest bits."""
    words = values.long().movedim(dim, -1).unflatten(-1, (-1, 8)) & 15
    total = sum(words[..., i] << 4 * i for i in range(8))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).int().movedim(-1, dim).contiguous()


class Layer:
    """Random quantised experts: plain integers for the loop, operands for the operator."""

    def __init__(
        self,
        scheme: str,
        *,
        groups: int = 1,
        listed: bool = False,
        transposed: bool = False,
        offset: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.scheme, self.groups, self.offset = scheme, groups, offset
        self.bits, self.rows = SCHEMES[scheme]
        top = 2 ** (self.bits - 1)
        self.x = torch.randn(T, H, generator=generator)
        self.weights, self.ids = torch.rand(T, E, generator=generator).topk(K, dim=-1)
        self.w = [torch.randint(-top, top, (E, c, n), generator=generator) for c, n in ((H, 2 * I), (I, H))]
        shapes = [(E, n) if groups == 1 else (E, groups, n) for n in (2 * I, H)]
        self.s = [torch.rand(shape, generator=generator) / top for shape in shapes]
        self.o = [torch.randint(-3, 4, shape, generator=generator).float() for shape in shapes]
        self.b = [torch.randn(E, n, generator=generator) for n in (2 * I, H)]
        has_bias = scheme in ("w4a8", "w8a16")

        def stored(w: Tensor) -> Tensor:
            w = w.transpose(1, 2) if transposed else w
            return w.to(torch.int8).contiguous() if self.bits == 8 else packed(w, 1 if transposed else 2)

        def form(tensor: Tensor) -> list[Tensor]:
            return [t.clone() for t in tensor] if listed else [tensor]

        self.has_bias = has_bias
        self.arguments: tuple[Any, ...] = (
            *(None, self.x, self.ids, self.weights, form(stored(self.w[0])), form(stored(self.w[1]))),
            *(form(b) if has_bias else [] for b in self.b),
            *(form(s) for s in self.s),
            *(form(o) if offset else [] for o in self.o),
        )
        self.constants: dict[str, Any] = {
            "quant": scheme,
            "num_experts": E,
            "transpose_weight1": transposed,
            "transpose_weight2": transposed,
        }

    def gemm(self, row: list[float], which: int, e: int) -> list[float]:
        inputs, w = len(row), self.w[which][e]
        scale, shift = 1.0, 0
        if self.rows:
            scale = max(map(abs, row)) / (2 ** (self.rows - 1) - 1)
            row = [float(round(v / scale)) for v in row]
            shift = 8 if self.scheme == "w4a8" else 0

        def of(tensor: Tensor, c: int, n: int) -> float:
            return (
                float(tensor[e, n]) if self.groups == 1 else float(tensor[e, c // (inputs // self.groups), n])
            )

        result = []
        for n in range(w.shape[1]):
            total = sum(
                (row[c] - shift)
                * (float(w[c, n]) + (of(self.o[which], c, n) if self.offset else 0.0))
                * of(self.s[which], c, n)
                for c in range(inputs)
            )
            bias = float(self.b[which][e, n]) if self.has_bias else 0.0
            result.append((total + bias) * scale if shift else total * scale + bias)
        return result

    def expected(self) -> Tensor:
        y = torch.zeros(T, H, dtype=torch.float64)
        for t in range(T):
            for j in range(K):
                e = int(self.ids[t, j])
                h = self.gemm([float(v) for v in self.x[t]], 0, e)
                a = [g / (1 + math.exp(-g)) * u for g, u in zip(h[:I], h[I:], strict=True)]
                y[t] += float(self.weights[t, j]) * torch.tensor(self.gemm(a, 1, e), dtype=torch.float64)
        return y


CASES = {
    "w8a8": Layer("w8a8"),
    "w8a8 listed": Layer("w8a8", listed=True),
    "w8a8 transposed": Layer("w8a8", transposed=True),
    "w4a8": Layer("w4a8", groups=G),
    "w4a8 listed": Layer("w4a8", listed=True),
    "w4a4": Layer("w4a4", groups=G, listed=True, transposed=True),
    "w8a16": Layer("w8a16", offset=True),
    "w4a16": Layer("w4a16", groups=G, offset=True, transposed=True),
}


@pytest.mark.parametrize("case", CASES)
def test_against_a_loop(case: str) -> None:
    layer = CASES[case]
    y, nums = torch.ops.moefuse.mega_moe.quant(*layer.arguments, **layer.constants)
    # A float32 rounding of the activation may move an integer of it by one of 127 (or 7): far below a wrong scale.
    torch.testing.assert_close(y.double(), layer.expected(), rtol=2e-3, atol=2e-3)
    assert nums.tolist() == [int((layer.ids == e).sum()) for e in range(E)]


def test_encoded_scales() -> None:
    layer = CASES["w8a8"]
    encoded = [[s.view(torch.int32).to(torch.int64)] for s in layer.s]
    arguments = (*layer.arguments[:8], *encoded, *layer.arguments[10:])
    want = torch.ops.moefuse.mega_moe.quant(*layer.arguments, **layer.constants)[0]
    assert torch.ops.moefuse.mega_moe.quant(*arguments, **layer.constants)[0].equal(want)


def test_tokens_of_no_expert_no_tokens_and_zero_rows() -> None:
    layer = CASES["w8a8"]
    x, ids = layer.x.clone(), layer.ids.clone()
    x[0], ids[1] = 0, E
    _, _, _, weights, *rest = layer.arguments
    y, _ = torch.ops.moefuse.mega_moe.quant(None, x, ids, weights, *rest, **layer.constants)
    assert not y[:2].any()
    assert y[2:].isfinite().all()
    empty, nums = torch.ops.moefuse.mega_moe.quant(
        None, x[:0], ids[:0], weights[:0], *rest, **layer.constants
    )
    assert (empty.shape, nums.tolist()) == ((0, H), [0] * E)


def test_roundings() -> None:
    layer = CASES["w8a8"]
    constants = {"hidden_dtype": torch.bfloat16, "rows_dtype": torch.bfloat16, "output_dtype": torch.float32}
    y, _ = torch.ops.moefuse.mega_moe.quant(*layer.arguments, **layer.constants, **constants)
    plain, _ = torch.ops.moefuse.mega_moe.quant(*layer.arguments, **layer.constants)
    assert y.dtype == torch.float32
    assert not y.equal(plain)
    torch.testing.assert_close(y, plain, rtol=0.05, atol=0.05)  # eight bits of h1, and integers that it moves


@pytest.mark.parametrize("case", ["w8a8", "w4a8 listed", "w4a16"])
def test_opcheck(case: str) -> None:
    layer = CASES[case]
    torch.library.opcheck(
        torch.ops.moefuse.mega_moe.quant,
        layer.arguments,
        layer.constants,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_no_gradient() -> None:
    layer = CASES["w8a8"]
    arguments = (None, layer.x.clone().requires_grad_(), *layer.arguments[2:])
    with pytest.raises(NotImplementedError, match=r"mega_moe\.quant has no gradient"):
        torch.ops.moefuse.mega_moe.quant(*arguments, **layer.constants)


def changed(case: str, place: int, value: Any, **constants: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    layer = CASES[case]
    arguments = list(layer.arguments)
    if place:
        arguments[place] = value
    return tuple(arguments), layer.constants | constants


REFUSED: dict[str, tuple[tuple[tuple[Any, ...], dict[str, Any]], str]] = {
    "a scheme": (changed("w8a8", 0, None, quant="w2a8"), "quant: expected one of"),
    "a target": (
        changed("w8a8", 0, None, target="cpu"),
        r"target: expected one of \['reference'\], got 'cpu'",
    ),
    "floats": (changed("w8a8", 4, [torch.ones(E, H, 2 * I)]), "weight1: expected one of torch.int8"),
    "int8 as int4": (changed("w8a8", 0, None, quant="w4a4"), "weight1: expected one of torch.int32"),
    "no scales": (changed("w8a8", 8, []), "weight_scales1: expected 1 as of weights, got 0"),
    "scales of the other GEMM": (
        changed("w8a8", 8, [torch.ones(E, H + 1)]),
        r"weight_scales1: expected \[16\] or \[groups of 16 inputs, 16\] per expert",
    ),
    "uneven groups": (changed("w8a8", 9, [torch.ones(E, 3, H)]), "weight_scales2: expected"),
    "scales of other experts": (changed("w8a8", 9, [torch.ones(E + 1, H)]), "weight_scales2: expected"),
    "integer scales": (
        changed("w8a8", 9, [torch.ones(E, H, dtype=torch.int8)]),
        "weight_scales2: expected one of",
    ),
    "an offset": (changed("w8a8", 10, [torch.ones(E, 2 * I)]), "weight_offsets1: w8a8 takes none"),
    "no assist": (changed("w4a8", 7, []), "bias2: w4a8 needs the one that makes up for its 8"),
    "integer hidden rows": (
        changed("w8a8", 0, None, hidden_dtype=torch.int32),
        "hidden_dtype: expected a floating point dtype, got torch.int32",
    ),
    "integer rows": (changed("w8a8", 0, None, rows_dtype=torch.int8), "rows_dtype: expected a floating"),
    "two ranks": (changed("w8a8", 0, None, ep_world_size=2), "weight1: expected"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    (arguments, constants), reason = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=reason):
        torch.ops.moefuse.mega_moe.quant(*arguments, **constants)
