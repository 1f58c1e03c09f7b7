"""The arguments of one mega_moe call: the constants as one value, and the check of the tensors against them.

In: what the operator got. Out: `Options`, or an error that names the argument.
"""

from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from moefuse.ops import activations
from moefuse.ops.mx import FLOAT4
from moefuse.ops.operands import Operands
from moefuse.ops.spec import GateUp, RowNorm, WeightPosition

GATE_UPS: frozenset[str] = frozenset(get_args(GateUp))
WEIGHT_POSITIONS: frozenset[str] = frozenset(get_args(WeightPosition))
ROW_NORMS: frozenset[str] = frozenset(get_args(RowNorm))
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PACKED = 8
"""int4 values in an int32."""
_FLOAT_NAMES = ", ".join(str(dtype) for dtype in FLOATS)


class Options(NamedTuple):
    """The constant arguments of mega_moe; the fields and their meaning are those of `MoeSpec`."""

    num_experts: int
    ep_world_size: int = 1
    transpose_weight1: bool = True
    transpose_weight2: bool = True
    gate_up: str = "concat"
    activation: str = "swiglu"
    activation_params: Sequence[float] = ()
    activation_program: str = ""
    activation_dtype: torch.dtype | None = None
    weight_position: str = "output"
    product_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    row_norm: str = "none"
    row_norm_eps: float = 0.0
    num_identity_experts: int = 0

    def inner(self, operands: Operands) -> int:
        """I, the number of features between both GEMMs."""
        weight = operands.weight2[0]
        inputs = weight.shape[-1] if self.transpose_weight2 else weight.shape[-2]
        return inputs * (2 if weight.dtype in FLOAT4 else 1)

    @property
    def local_experts(self) -> int:
        """Experts whose weights this rank holds."""
        return self.num_experts // self.ep_world_size


def check_arguments(
    operands: Operands, options: Options, weight_dtypes: tuple[torch.dtype, ...] = FLOATS
) -> int:
    """Check shapes and dtypes; returns O, the number of output features.

    The token count may be symbolic: it is compared, never fixed. weight_dtypes: those of the layer's weights; an int32
    holds eight int4 values of neighbouring output features, a byte two float4 of neighbouring inputs. Raises
    ValueError or TypeError.
    """
    x, topk_ids, topk_weights, weight1, weight2, bias1, bias2, row_scale = operands
    _check_options(options)
    _check_devices(operands)
    _check_routing(x, topk_ids, topk_weights)
    experts = options.local_experts
    hidden = x.shape[1]
    parts = 2 if options.gate_up == "separate" else 1
    out1, in1 = (0, 1) if options.transpose_weight1 else (1, 0)
    rows1, columns1 = expert_shape("weight1", weight1, parts, experts, weight_dtypes, out1)
    if (rows1, columns1)[in1] != hidden:
        layout = "[.., N, H]" if options.transpose_weight1 else "[.., H, N]"
        raise ValueError(
            f"mega_moe: weight1: expected {layout} with H = {hidden} (x), got {(rows1, columns1)} per expert "
            f"(transpose_weight1={options.transpose_weight1})"
        )
    n = (rows1, columns1)[out1]
    if parts == 1 and options.gate_up != "none" and n % 2:
        raise ValueError(f"mega_moe: weight1: gate_up={options.gate_up!r} needs an even N, got {n}")
    inner = n if parts == 2 or options.gate_up == "none" else n // 2
    out2, in2 = (0, 1) if options.transpose_weight2 else (1, 0)
    shape2 = expert_shape("weight2", weight2, 1, experts, weight_dtypes, out2)
    if shape2[in2] != inner:
        layout = "[.., O, I]" if options.transpose_weight2 else "[.., I, O]"
        raise ValueError(
            f"mega_moe: weight2: expected {layout} with I = {inner} (from weight1), got {shape2} per expert "
            f"(transpose_weight2={options.transpose_weight2})"
        )
    _check_bias("bias1", bias1, parts, experts, n)
    _check_bias("bias2", bias2, 1, experts, shape2[out2])
    _check_row_scale(row_scale, experts, shape2[out2], options)
    if options.num_identity_experts and shape2[out2] != hidden:
        raise ValueError(
            f"mega_moe: num_identity_experts: needs as many output features as x has, {hidden}, got {shape2[out2]}"
        )
    return shape2[out2]


def _check_options(options: Options) -> None:
    if options.num_experts < 1:
        raise ValueError(f"mega_moe: num_experts: expected at least 1, got {options.num_experts}")
    if options.ep_world_size < 1 or options.num_experts % options.ep_world_size:
        raise ValueError(
            f"mega_moe: ep_world_size: expected a divisor of num_experts={options.num_experts}, "
            f"got {options.ep_world_size}"
        )
    if options.gate_up not in GATE_UPS:
        raise ValueError(f"mega_moe: gate_up: expected one of {sorted(GATE_UPS)}, got {options.gate_up!r}")
    if options.weight_position not in WEIGHT_POSITIONS:
        raise ValueError(
            f"mega_moe: weight_position: expected one of {sorted(WEIGHT_POSITIONS)}, got {options.weight_position!r}"
        )
    if options.row_norm not in ROW_NORMS:
        raise ValueError(f"mega_moe: row_norm: expected one of {sorted(ROW_NORMS)}, got {options.row_norm!r}")
    if not options.row_norm_eps >= 0 or (options.row_norm_eps and options.row_norm == "none"):
        raise ValueError(
            f"mega_moe: row_norm_eps: expected 0 or more with row_norm='rms' or 'scaled_rms', else 0, "
            f"got {options.row_norm_eps} with row_norm={options.row_norm!r}"
        )
    if options.num_identity_experts < 0:
        raise ValueError(
            f"mega_moe: num_identity_experts: expected 0 or more, got {options.num_identity_experts}"
        )
    for name in ("activation_dtype", "product_dtype", "output_dtype"):
        dtype = getattr(options, name)
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"mega_moe: {name}: expected a floating dtype, got {dtype}")
    why = activations.check(
        options.activation, options.activation_params, options.activation_program, options.gate_up != "none"
    )
    if why:
        raise ValueError(f"mega_moe: {why}")


def _check_devices(operands: Operands) -> None:
    device = operands.x.device
    for name, given in zip(Operands._fields, operands, strict=True):
        for tensor in (given,) if isinstance(given, Tensor) else given or ():
            if tensor.device != device:
                raise ValueError(
                    f"mega_moe: {name}: expected tensors on {device}, as x, got one on {tensor.device}"
                )


def _check_routing(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"mega_moe: x: expected [T, H], got shape {tuple(x.shape)}")
    if not x.dtype.is_floating_point:
        raise TypeError(f"mega_moe: x: expected a floating dtype, got {x.dtype}")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"mega_moe: topk_ids: expected int32 or int64, got {topk_ids.dtype}")
    if not topk_weights.dtype.is_floating_point:
        raise TypeError(f"mega_moe: topk_weights: expected a floating dtype, got {topk_weights.dtype}")
    tokens = x.shape[0]
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tensor.dim() != 2 or tensor.shape[1] != topk_ids.shape[1]:
            raise ValueError(f"mega_moe: {name}: expected [T, K], got shape {tuple(tensor.shape)}")
        # a symbolic equality becomes a fact of the graph; a plain one is decided here
        same = tensor.shape[0] == tokens
        if same is not True:
            torch._check_value(
                same,
                lambda t=tensor, n=name: f"mega_moe: {n}: expected {tokens} rows as x has, got {t.shape[0]}",
            )


def expert_shape(
    name: str,
    weights: Sequence[Tensor],
    parts: int,
    experts: int,
    dtypes: tuple[torch.dtype, ...],
    out: int,
) -> tuple[int, int]:
    """The 2-D shape of one expert's tensor in `weights`: `parts` stacked tensors or `parts * experts` 2-D ones.

    out: which of both dimensions holds the output features, eight of them in an int32; a byte holds two inputs.
    """
    if not weights:
        raise ValueError(f"mega_moe: {name}: expected at least one tensor, got an empty list")
    stacked = weights[0].dim() == 3
    count = parts if stacked else parts * experts
    if len(weights) != count:
        form = "stacked 3-D" if stacked else "per-expert 2-D"
        raise ValueError(f"mega_moe: {name}: expected {count} {form} tensors, got {len(weights)}")
    shape = weights[0].shape
    if len(shape) != (3 if stacked else 2) or (stacked and shape[0] != experts):
        raise ValueError(
            f"mega_moe: {name}: expected [{experts}, .., ..] or 2-D per expert, got {tuple(shape)}"
        )
    for weight in weights:
        if weight.shape != shape:
            raise ValueError(f"mega_moe: {name}: shapes differ: {tuple(shape)} and {tuple(weight.shape)}")
        if weight.dtype not in dtypes or weight.dtype != weights[0].dtype:
            names = ", ".join(map(str, dtypes))
            raise TypeError(f"mega_moe: {name}: expected one of {names} for all, got {weight.dtype}")
    found = [shape[-2], shape[-1]]
    found[out] *= PACKED if weights[0].dtype == torch.int32 else 1
    found[1 - out] *= 2 if weights[0].dtype in FLOAT4 else 1
    return found[0], found[1]


def _check_bias(name: str, biases: Sequence[Tensor], parts: int, experts: int, features: int) -> None:
    if not biases:
        return
    stacked = biases[0].dim() == 2
    count = parts if stacked else parts * experts
    if len(biases) != count:
        form = "stacked 2-D" if stacked else "per-expert 1-D"
        raise ValueError(f"mega_moe: {name}: expected {count} {form} tensors, got {len(biases)}")
    shape = (experts, features) if stacked else (features,)
    for bias in biases:
        if bias.shape != shape:
            raise ValueError(f"mega_moe: {name}: expected {shape}, got {tuple(bias.shape)}")
        if bias.dtype not in FLOATS:
            raise TypeError(f"mega_moe: {name}: expected one of {_FLOAT_NAMES}, got {bias.dtype}")


def _check_row_scale(scale: Tensor | None, experts: int, features: int, options: Options) -> None:
    if scale is None:
        return
    if options.row_norm == "none":
        raise ValueError("mega_moe: row_scale: needs row_norm='rms' or 'scaled_rms', got row_norm='none'")
    if tuple(scale.shape) not in ((features,), (experts, features)):
        raise ValueError(
            f"mega_moe: row_scale: expected {(features,)} or {(experts, features)}, got {tuple(scale.shape)}"
        )
    if scale.dtype not in FLOATS:
        raise TypeError(f"mega_moe: row_scale: expected one of {_FLOAT_NAMES}, got {scale.dtype}")
