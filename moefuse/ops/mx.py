"""MX formats of quantised experts: 32 neighbouring inputs share a scale, a power of two.

In: rows and weights. Out: what they are in such a format, as float64. The scale of a block of a row is 2 to the
floor(log2(max |h|)) less the largest exponent of its elements, as the OCP specification has it, kept in -127..127; the
elements are h / scale, rounded to the nearest, ties to even, what is beyond the largest becomes the largest. A block
that holds a NaN or an infinity is NaN.

A scale in memory is a byte, its exponent plus 127 (255: NaN). A float4 has its sign in the highest of four bits, and a
byte holds those of two neighbouring inputs, the first one in the low bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 32
_BIAS, _NAN = 127, 255


class Elements(NamedTuple):
    """A small float: bits of its fraction, exponents of its smallest and largest normal numbers, its largest value."""

    fraction: int
    least: int
    top: int
    most: float


ELEMENTS: dict[torch.dtype, Elements] = {
    torch.float8_e4m3fn: Elements(3, -6, 8, 448.0),
    torch.float8_e5m2: Elements(2, -14, 15, 57344.0),
    torch.float4_e2m1fn_x2: Elements(1, 0, 2, 6.0),
}
FLOAT4 = (torch.uint8, torch.float4_e2m1fn_x2)
"""Dtypes of tensors that hold two float4 in a byte."""
SCALES = (torch.uint8, torch.float8_e8m0fnu)


def rounded(rows: Tensor, elements: torch.dtype) -> Tensor:
    """Rows [n, C] as they are in MX format, float64; C a multiple of 32."""
    kind = ELEMENTS[elements]
    blocks = rows.double().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = (_exponent(largest) - kind.top).clamp(min=-_BIAS)
    scale = _power(exponent).masked_fill(~largest.isfinite() | (exponent > _BIAS), torch.nan)
    values = blocks / scale
    step = _power(_exponent(values).clamp(min=kind.least) - kind.fraction)
    nearest: Tensor = ((values / step).round() * step).clamp(-kind.most, kind.most)
    return (nearest * scale).flatten(-2)


def _exponent(values: Tensor) -> Tensor:
    """floor(log2 |v|) as int64, exactly; far below all others for 0."""
    exponent = torch.where(values == 0, -1000, values.frexp().exponent.long() - 1)
    return exponent.clamp(-1000, 1000)


def _power(exponent: Tensor) -> Tensor:
    """2 to the exponent as float64, exactly."""
    power: Tensor = (exponent.long() + 1023 << 52).view(torch.float64)
    return power


def decoded(scale: Tensor) -> Tensor:
    """Scales as float64."""
    codes = scale.view(torch.uint8).long()
    return _power(codes - _BIAS).masked_fill(codes == _NAN, torch.nan)


def matrix(weight: Tensor, scale: Tensor, transposed: bool) -> Tensor:
    """[C, N] float64 of one expert's weight.

    weight [N, C] with scale [N, C / 64, 2] where transposed, else [C, N] with [C / 64, N, 2]; float4 with half of C.
    """
    if not transposed:
        return matrix(weight.mT, scale.transpose(0, 1), True)
    values = weight.double() if weight.dtype not in FLOAT4 else _float4(weight)
    return (values * decoded(scale).flatten(1).repeat_interleave(BLOCK, dim=1)).t()


def _float4(pairs: Tensor) -> Tensor:
    """[N, C] of bytes [N, C / 2]."""
    shifts = torch.tensor([0, 4], device=pairs.device)
    codes = (pairs.contiguous().view(torch.uint8).long().unsqueeze(-1) >> shifts).flatten(-2) & 15
    exponent, fraction = (codes >> 1) & 3, codes & 1
    size = torch.where(exponent == 0, fraction * 0.5, (1 + fraction * 0.5) * _power(exponent - 1))
    return torch.where(codes < 8, size, -size)
