"""MX formats over Python numbers: what elements and blocks are, and a layer slot by slot in float64.

In: rows, elements and bytes of scales. Out: what they mean. Written without any of the operators or kernels.
"""

import math

import torch
from torch import Tensor

from tests.npu.loops import activated, summed
from tests.npu.sequences import route

E5M2, E4M3, FLOAT4 = 23, 24, 296
"""The element types by their numbers in the schemas."""

FLOAT4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def magnitudes(number: int) -> list[float]:
    """All magnitudes of an element type in order: an even place has an even code."""
    if number == FLOAT4:
        return FLOAT4_VALUES
    exponents, fractions, bias = (16, 8, 7) if number == E4M3 else (32, 4, 15)
    codes = [(e, m) for e in range(exponents) for m in range(fractions)]
    every = [
        (m / fractions * 2.0 ** (1 - bias)) if e == 0 else (1 + m / fractions) * 2.0 ** (e - bias)
        for e, m in codes
    ]
    return every[:-1] if number == E4M3 else every[:-fractions]  # the rest are NaN and infinity


def nearest(value: float, number: int) -> float:
    """The element next to a value; of two, the one with the even code; the largest beyond it."""
    every = magnitudes(number)
    best = min(range(len(every)), key=lambda i: (abs(every[i] - abs(value)), i % 2))
    return math.copysign(every[best], value)


def block(values: list[float], number: int) -> tuple[int, list[float]]:
    """(the exponent of the scale, the elements) of one block."""
    largest = max(abs(v) for v in values)
    top = {E4M3: 8, E5M2: 15, FLOAT4: 2}[number]
    exponent = max(-127, math.floor(math.log2(largest)) - top) if largest else -127
    return exponent, [nearest(v / 2.0**exponent, number) for v in values]


def stored(elements: Tensor, number: int) -> list[list[float]]:
    """Elements as numbers, bytes of two taken apart."""
    if number != FLOAT4:
        return elements.double().tolist()  # type: ignore[no-any-return]
    rows = []
    for row in elements.tolist():
        nibbles = [code for byte in row for code in (byte & 15, byte >> 4)]
        rows.append([FLOAT4_VALUES[code & 7] * (-1 if code & 8 else 1) for code in nibbles])
    return rows


def meant(elements: Tensor, scales: Tensor, number: int) -> list[list[float]]:
    """What rows [n, K] with scales [n, K / 64, 2] are."""
    powers = [[2.0 ** (int(byte) - 127) for byte in row.flatten()] for row in scales.view(torch.uint8)]
    return [
        [v * powers[i][k // 32] for k, v in enumerate(row)] for i, row in enumerate(stored(elements, number))
    ]


def layer(
    weights_as: int,
    rows_as: int,
    x: Tensor,
    logits: Tensor,
    *tensors: Tensor,
    own: range | None = None,
    activation: str = "swiglu",
) -> Tensor:
    """Experts w13, w2, s13, s2 as `mx_sequences.weights` makes them. rows_as: 0 for rows that stay floats."""
    (w13, w2), (s13, s2) = tensors[:2], tensors[2:]

    def gemm(row: Tensor, weight: Tensor, scales: Tensor, e: int) -> Tensor:
        lies = weight.transpose(1, 2)[e].contiguous(), scales.transpose(1, 2)[e].contiguous()
        whole = row.tolist() if not rows_as else []
        for start in range(0, row.shape[0] if rows_as else 0, 32):
            exponent, elements = block(row[start : start + 32].tolist(), rows_as)
            whole += [element * 2.0**exponent for element in elements]
        matrix = torch.tensor(meant(*lies, weights_as), dtype=torch.float64)
        return matrix @ torch.tensor(whole, dtype=torch.float64)

    def expert(row: Tensor, e: int) -> Tensor:
        return gemm(activated(gemm(row, w13, s13, e), activation, "concat"), w2, s2, e)

    return summed(x, *route(logits), expert, own or range(w13.shape[0]), x.shape[1])
