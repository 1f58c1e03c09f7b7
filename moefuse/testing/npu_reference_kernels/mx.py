"""Reference kernels of the MX formats: blocks of 32 neighbours share a scale, a power of two.

In: CPU tensors. Out: elements (float8, or float4 with two in a byte, the first one in its low bits) and one byte per
block, the exponent of its scale plus 127, in pairs: [.., ceil(K / 64), 2].

How the exponent is chosen: the operators' scale_alg 0, which is the rule of the OCP specification, floor(log2(max |v|))
less the largest exponent of the element type, kept in -127..127, and -127 for a block of zeros. The largest values of a
block may so lie beyond the element type: they saturate. Elements are rounded to the nearest, ties to the even one. The
byte 255 is NaN: of a block that holds one, or an infinity, and of what an operator leaves unwritten.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from moefuse.testing.npu_reference_kernels.checks import only

BLOCK, BIAS, NAN_BYTE = 32, 127, 255
E8M0, FLOAT4 = 293, 296
"""The numbers of torch_npu.float8_e8m0fnu and float4_e2m1fn_x2 in the schemas: these have no others."""

ELEMENTS: dict[int, torch.dtype] = {
    23: torch.float8_e5m2,
    291: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    292: torch.float8_e4m3fn,
    FLOAT4: torch.float4_e2m1fn_x2,
}
"""The element types by their numbers in the schemas: torch's own, or torch_npu's."""

_LARGEST_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15, torch.float4_e2m1fn_x2: 2}
_FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantise(values: Tensor, elements: torch.dtype) -> tuple[Tensor, Tensor]:
    """(elements [.., K] or bytes of two [.., K / 2], bytes [.., ceil(K / 64), 2]) of values [.., K]."""
    inputs = values.shape[-1]
    whole = F.pad(values.double(), (0, -inputs % (2 * BLOCK))).unflatten(-1, (-1, 2, BLOCK))
    largest = whole.abs().amax(-1)
    exponent = largest.frexp().exponent.int() - 1 - _LARGEST_EXPONENT[elements]  # frexp's mantissa is below 1
    exponent = torch.where(largest == 0, -BIAS, exponent.clamp(min=-BIAS))
    lost = ~largest.isfinite() | (exponent > BIAS)
    scaled = (whole * _power(-exponent).unsqueeze(-1)).flatten(-3)[..., :inputs]
    scales = torch.where(lost, NAN_BYTE, exponent + BIAS).to(torch.uint8)
    if elements == torch.float4_e2m1fn_x2:
        return _float4(scaled), scales
    most = torch.finfo(elements).max
    return scaled.clamp(-most, most).float().to(elements), scales


def _power(exponent: Tensor) -> Tensor:
    """2 to the exponent, exactly, as float64."""
    power: Tensor = (exponent.long() + 1023 << 52).view(torch.float64)
    return power


def _float4(values: Tensor) -> Tensor:
    """[.., K] as bytes [.., K / 2]: the nearest code, of two equally near ones the even."""
    size, codes = values.abs(), torch.zeros_like(values, dtype=torch.int32)
    for code in range(7):
        middle = (_FLOAT4_VALUES[code] + _FLOAT4_VALUES[code + 1]) / 2
        codes += (size >= middle) if code % 2 else (size > middle)
    low, high = (codes + 8 * values.signbit()).unflatten(-1, (-1, 2)).unbind(-1)
    pairs: Tensor = low + 16 * high
    return pairs.to(torch.uint8)


def values_of(stored: Tensor, elements: torch.dtype) -> Tensor:
    """Elements as float64: [.., K] of [.., K], or of bytes [.., K / 2]."""
    if elements != torch.float4_e2m1fn_x2:
        return stored.double()
    codes = stored.view(torch.uint8).unsqueeze(-1).int() >> torch.tensor([0, 4]) & 15
    sizes = torch.tensor(_FLOAT4_VALUES, dtype=torch.float64)[codes & 7]
    return torch.where(codes < 8, sizes, -sizes).flatten(-2)


def factors(scales: Tensor) -> Tensor:
    """The scales as float64, one per element: [.., K] of bytes [.., K / 64, 2]."""
    codes = scales.view(torch.uint8).int()
    powers = _power(codes - BIAS).masked_fill(codes == NAN_BYTE, torch.nan)
    return powers.flatten(-2).repeat_interleave(BLOCK, dim=-1)


def rows_of(rows: Tensor, scales: Tensor, elements: torch.dtype) -> Tensor:
    """Rows as float64 [M, K]."""
    values = values_of(rows, elements)
    return values * factors(scales)[..., : values.shape[-1]]


def weights_of(weights: Tensor, scales: Tensor, elements: torch.dtype, inputs: int) -> Tensor:
    """Weights [E, K, N] with scales [E, ceil(K / 64), N, 2] as float64. float4 lies in pairs along K or along N."""
    if elements != torch.float4_e2m1fn_x2:
        values = weights.double()
    elif weights.shape[1] == inputs:
        values = values_of(weights, elements)
    else:
        values = values_of(weights.transpose(1, 2).contiguous(), elements).transpose(1, 2)
    return values * factors(scales.transpose(1, 2)).transpose(1, 2)[:, :inputs]


def elements_of(name: str, argument: str, tensor: Tensor, number: int | None) -> torch.dtype:
    """What a tensor holds, as its dtype says; of bytes an operator's argument says that they are float4."""
    only(name, argument, number, None, *ELEMENTS)
    found = tensor.dtype if number is None else ELEMENTS[number]
    as_bytes = tensor.dtype == torch.uint8 and found == torch.float4_e2m1fn_x2
    if found not in ELEMENTS.values() or (found != tensor.dtype and not as_bytes):
        raise ValueError(f"{name}: {argument}: expected the number of {tensor.dtype}, got {number}")
    return found


def dynamic_mx_quant(
    input: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = FLOAT4,
    block_size: int = BLOCK,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Elements and the bytes of their scales, along the last dimension."""
    name = "npu_dynamic_mx_quant"
    only(name, "axis", axis, -1, input.dim() - 1)
    only(name, "round_mode", round_mode, "rint")
    only(name, "dst_type", dst_type, *ELEMENTS)
    only(name, "block_size", block_size, BLOCK)
    only(name, "scale_alg", scale_alg, 0, None)
    only(name, "dst_type_max", dst_type_max, 0.0)
    only(name, "max_low_bound", max_low_bound, 0.0)
    return quantise(input, ELEMENTS[dst_type])
