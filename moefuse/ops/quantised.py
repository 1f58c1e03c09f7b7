"""Quantised experts: what their tensors mean, and the arithmetic of one expert.

In: the rows that one expert receives and that expert's tensors. Out: its rows. A scheme w<weight bits>a<row bits>
(`SCHEMES`) says how both GEMMs run, with q(h), s(h) the integers and the scale of a row::

    s(h) = max |h| / (127 or 7);  q(h) = h / s(h), rounded to the nearest even integer   (zeros for a row of zeros)
    W    = (stored + offset) * scale                # per output channel, or per group of inputs
    w8a8, w4a4    h1 = (q(x) @ W1) * s(x) + b1
    w4a8          h1 = ((q(x) - 8) @ W1 + b1) * s(x)
    w8a16, w4a16  h1 = x @ W1 + b1
    mxfp8, mxfp4  h1 = mx(x) @ mx(W1): rows and weights in blocks of 32 inputs, see mx.py
    mxfp4a8       the same with float4 weights and float8_e4m3fn rows
    mxfp4a16      h1 = x @ mx(W1)
    a    = activation(g, u)
    h2   = the same of a, W2, b2

The biases of w4a8 aren't the layer's: they make up for the 8, which int4 hardware takes off its rows, and are normally
8 * the sum of W over its inputs. h1 is rounded to `hidden_dtype`, the activation (in float32) to `activation_dtype` or
else to `hidden_dtype`, h2 to `rows_dtype`; None is the dtype of x. Sums over inputs are exact.

A weight is int8, or int32 with eight int4 values, of neighbouring output features, the first one in the lowest bits. A
scale is a float, or an int64 whose low word holds the bits of a float32.

Of mxfp8 a weight is float8_e4m3fn or float8_e5m2, and rows become what it is; of mxfp4* two float4_e2m1 of
neighbouring inputs lie in a byte. Scales are float8_e8m0fnu, or uint8 with their bits, in pairs: [E, N, C / 64, 2]
beside a weight [E, N, C], [E, C / 64, N, 2] beside [E, C, N], for C inputs, a multiple of 64; no biases.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefuse.ops import activations, mx
from moefuse.ops.expert import split_gate_up
from moefuse.ops.operands import Operands
from moefuse.ops.options import FLOATS, Options, check_arguments

SCHEMES: dict[str, tuple[int, int]] = {
    "w8a8": (8, 8),
    "w4a8": (4, 8),
    "w4a4": (4, 4),
    "w8a16": (8, 0),
    "w4a16": (4, 0),
    "mxfp8": (8, 8),
    "mxfp4": (4, 4),
    "mxfp4a8": (4, 8),
    "mxfp4a16": (4, 0),
}
"""(bits of the weights, bits of the rows; 0: floats)."""

BLOCKS: dict[str, tuple[tuple[torch.dtype, ...], torch.dtype | None]] = {
    "mxfp8": ((torch.float8_e4m3fn, torch.float8_e5m2), None),
    "mxfp4": (mx.FLOAT4, torch.float4_e2m1fn_x2),
    "mxfp4a8": (mx.FLOAT4, torch.float8_e4m3fn),
    "mxfp4a16": (mx.FLOAT4, None),
}
"""Of schemes in MX blocks: (dtypes of the weights, elements of the rows; None: what the weight is, or floats)."""


class Quantisation(NamedTuple):
    """The quantised part of a call; see the module text.

    weight_scales*, weight_offsets*: as the weights they belong to, [E, N] or [E, G, N] beside a stacked weight, [N] or
    [G, N] beside one per expert; G groups of neighbouring inputs. Those of MX blocks are in the module text.
    """

    quant: str
    weight_scales1: Sequence[Tensor]
    weight_scales2: Sequence[Tensor]
    weight_offsets1: Sequence[Tensor] = ()
    weight_offsets2: Sequence[Tensor] = ()
    hidden_dtype: torch.dtype | None = None
    rows_dtype: torch.dtype | None = None

    def beside(self, which: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """(scales, offsets) of the first or the second weight."""
        if which == 1:
            return self.weight_scales1, self.weight_offsets1
        return self.weight_scales2, self.weight_offsets2


class QuantLinear(NamedTuple):
    """One expert's GEMM: a 2-D weight, its scale, offset and bias, and how it lies."""

    weight: Tensor
    scale: Tensor
    offset: Tensor | None
    bias: Tensor | None
    transposed: bool


def check_quantised(operands: Operands, options: Options, quantisation: Quantisation) -> int:
    """Check shapes and dtypes as `check_arguments` does; returns O."""
    if quantisation.quant not in SCHEMES:
        raise ValueError(
            f"mega_moe.quant: quant: expected one of {sorted(SCHEMES)}, got {quantisation.quant!r}"
        )
    for name in ("hidden_dtype", "rows_dtype"):
        dtype = getattr(quantisation, name)
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"mega_moe.quant: {name}: expected a floating point dtype, got {dtype}")
    for name, value, wanted in (
        ("weight_position", options.weight_position, "output"),
        ("row_norm", options.row_norm, "none"),
        ("num_identity_experts", options.num_identity_experts, 0),
    ):
        if value != wanted:
            raise ValueError(
                f"mega_moe.quant: {name}: expected {wanted!r} for quantised experts, got {value!r}"
            )
    out_features = check_arguments(operands, options, stored_as(quantisation.quant))
    inner = options.inner(operands)
    rows1 = inner * (1 if options.gate_up in ("none", "separate") else 2)
    for which, weights, biases, inputs, outputs in (
        (1, operands.weight1, operands.bias1, operands.x.shape[1], rows1),
        (2, operands.weight2, operands.bias2, inner, out_features),
    ):
        if quantisation.quant in BLOCKS:
            transposed = options.transpose_weight1 if which == 1 else options.transpose_weight2
            _check_blocks(which, quantisation, weights, biases, (inputs, outputs), transposed)
        else:
            _check_integers(which, quantisation, weights, biases, (inputs, outputs))
    return out_features


def stored_as(scheme: str) -> tuple[torch.dtype, ...]:
    """The dtypes that the weights of a scheme may have."""
    if scheme in BLOCKS:
        return BLOCKS[scheme][0]
    return (torch.int8 if SCHEMES[scheme][0] == 8 else torch.int32,)


def _check_integers(
    which: int,
    quantisation: Quantisation,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    sizes: tuple[int, int],
) -> None:
    """What goes with integer weights of `sizes`, (inputs, outputs) of one expert."""
    scales, offsets = quantisation.beside(which)
    _check_beside(f"weight_scales{which}", scales, weights, sizes, (*FLOATS, torch.int64))
    if offsets:
        _check_beside(f"weight_offsets{which}", offsets, weights, sizes, FLOATS)
        if SCHEMES[quantisation.quant][1]:
            raise ValueError(f"mega_moe.quant: weight_offsets{which}: {quantisation.quant} takes none")
    if quantisation.quant == "w4a8" and not biases:
        raise ValueError(f"mega_moe.quant: bias{which}: w4a8 needs the one that makes up for its 8, got none")


def _check_beside(
    name: str,
    tensors: Sequence[Tensor],
    weights: Sequence[Tensor],
    sizes: tuple[int, int],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Scales or offsets beside weights of `sizes`, (inputs, outputs) of one expert."""
    if len(tensors) != len(weights):
        raise ValueError(f"mega_moe.quant: {name}: expected {len(weights)} as of weights, got {len(tensors)}")
    (inputs, outputs), experts = sizes, weights[0].shape[:-2]
    for tensor in tensors:
        own = tensor.shape[len(experts) :]
        groups = own[0] if len(own) == 2 else 1
        fits = len(own) in (1, 2) and own[-1] == outputs and groups >= 1 and inputs % groups == 0
        if not fits or tensor.shape[: len(experts)] != experts:
            raise ValueError(
                f"mega_moe.quant: {name}: expected [{outputs}] or [groups of {inputs} inputs, {outputs}] per expert, "
                f"got {tuple(tensor.shape)}"
            )
        if tensor.dtype not in dtypes:
            names = ", ".join(map(str, dtypes))
            raise TypeError(f"mega_moe.quant: {name}: expected one of {names}, got {tensor.dtype}")


def _check_blocks(
    which: int,
    quantisation: Quantisation,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    sizes: tuple[int, int],
    transposed: bool,
) -> None:
    """What goes with weights in MX blocks, likewise."""
    name = f"mega_moe.quant: weight_scales{which}"
    (inputs, outputs), (scales, offsets) = sizes, quantisation.beside(which)
    for other, given in (("bias", biases), ("weight_offsets", offsets)):
        if given:
            raise ValueError(f"mega_moe.quant: {other}{which}: {quantisation.quant} takes none")
    if inputs % (2 * mx.BLOCK):
        raise ValueError(f"{name}: blocks of 32 inputs in pairs need a multiple of 64 inputs, got {inputs}")
    if len(scales) != len(weights):
        raise ValueError(f"{name}: expected {len(weights)} as of weights, got {len(scales)}")
    pairs = inputs // (2 * mx.BLOCK)
    wanted = (*weights[0].shape[:-2], *((outputs, pairs) if transposed else (pairs, outputs)), 2)
    for scale in scales:
        if tuple(scale.shape) != wanted:
            raise ValueError(f"{name}: expected {wanted}, got {tuple(scale.shape)}")
        if scale.dtype not in mx.SCALES:
            names = ", ".join(map(str, mx.SCALES))
            raise TypeError(f"{name}: expected one of {names}, got {scale.dtype}")


def quantise(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(integers as floats, the scale of each row [n, 1]) of rows [n, H]."""
    rows = rows.float()
    scale = rows.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (rows / torch.where(scale == 0, 1.0, scale)).round(), scale


def unpacked(words: Tensor) -> Tensor:
    """The int4 values of int32 words [.., n] as int8 [.., 8 n]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    nibbles = (words.unsqueeze(-1) >> shifts) & 15
    return ((nibbles ^ 8) - 8).to(torch.int8).flatten(-2)


def decoded(scale: Tensor) -> Tensor:
    """A scale as floats."""
    return scale.to(torch.int32).view(torch.float32) if scale.dtype == torch.int64 else scale


def _per_input(values: Tensor, inputs: int) -> Tensor:
    """[N] or [G, N] as what goes with a weight [C, N]."""
    values = decoded(values).double()
    return values if values.dim() == 1 else values.repeat_interleave(inputs // values.shape[0], dim=0)


def linear(rows: Tensor, layer: QuantLinear, scheme: str, dtype: torch.dtype) -> Tensor:
    """[n, N] in `dtype` of rows [n, C]: one GEMM of the module text, summed in float64."""
    if scheme in BLOCKS:
        left = rows.double()
        if SCHEMES[scheme][1]:
            left = mx.rounded(rows, BLOCKS[scheme][1] or layer.weight.dtype)
        return (left @ mx.matrix(layer.weight, layer.scale, layer.transposed)).to(dtype)
    _, row_bits = SCHEMES[scheme]
    weight = layer.weight.t() if layer.transposed else layer.weight
    matrix = (unpacked(weight) if weight.dtype == torch.int32 else weight).double()
    if layer.offset is not None:
        matrix = matrix + _per_input(layer.offset, matrix.shape[0])
    matrix = matrix * _per_input(layer.scale, matrix.shape[0])
    left, scale = quantise(rows, row_bits) if row_bits else (rows, None)
    if scheme == "w4a8":
        left = left - 8
    y = left.double() @ matrix
    if layer.bias is not None and scheme == "w4a8":
        y = y + layer.bias
    if scale is not None:
        y = y * scale
    if layer.bias is not None and scheme != "w4a8":
        y = y + layer.bias
    return y.to(dtype)


def expert_rows(
    x: Tensor, first: Sequence[QuantLinear], second: QuantLinear, options: Options, quantisation: Quantisation
) -> Tensor:
    """[n, O] in `rows_dtype`: what one expert makes of rows [n, H]. first: one GEMM, or gate and up."""
    scheme, hidden = quantisation.quant, quantisation.hidden_dtype or x.dtype
    parts = [linear(x, layer, scheme, hidden).float() for layer in first]
    g, u = (parts[0], parts[1]) if len(parts) == 2 else split_gate_up(parts[0], options.gate_up)
    a = activations.apply(options.activation, options.activation_params, options.activation_program, g, u)
    return linear(
        a.to(options.activation_dtype or hidden), second, scheme, quantisation.rows_dtype or x.dtype
    )
