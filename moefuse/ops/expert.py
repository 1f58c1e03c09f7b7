"""The arithmetic of one expert, in plain differentiable torch.

In: the rows that one expert receives and that expert's tensors. Out: its weighted rows in the dtype of the
sum. Shared by the reference target and by the backward pass, so that both mean the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefuse.ops import activations
from moefuse.ops.options import Options


class ExpertTensors(NamedTuple):
    """One expert's tensors: 2-D weights, 1-D biases and row scale; two of weight1 and bias1 for gate_up="separate"."""

    weight1: tuple[Tensor, ...]
    weight2: tuple[Tensor, ...]
    bias1: tuple[Tensor, ...] = ()
    bias2: tuple[Tensor, ...] = ()
    row_scale: tuple[Tensor, ...] = ()


def sum_dtype(x: torch.dtype) -> torch.dtype:
    """The dtype of routing weight products and of the sum over slots: float32, float64 for float64."""
    return torch.float64 if x == torch.float64 else torch.float32


def of_expert(tensors: Sequence[Tensor], expert: int, experts: int, stacked_dim: int) -> tuple[Tensor, ...]:
    """Views of one expert's tensors, out of stacked tensors (of `stacked_dim` dims) or a per-expert list."""
    if not tensors:
        return ()
    if tensors[0].dim() == stacked_dim:
        return tuple(tensor.select(0, expert) for tensor in tensors)
    return tuple(tensors[expert::experts])


def scale_of(row_scale: Tensor | None, expert: int) -> tuple[Tensor, ...]:
    """One expert's row scale [O], out of a shared one or of [E, O]; () where there is none."""
    if row_scale is None:
        return ()
    return (row_scale if row_scale.dim() == 1 else row_scale.select(0, expert),)


def split_gate_up(h: Tensor, gate_up: str) -> tuple[Tensor, Tensor | None]:
    """Gate and up part of h [.., N] as views; up is None for a plain expert."""
    if gate_up == "none":
        return h, None
    if gate_up.startswith("interleaved"):
        first, second = h[..., ::2], h[..., 1::2]
    else:
        half = h.shape[-1] // 2
        first, second = h[..., :half], h[..., half:]
    return (second, first) if gate_up.endswith("_swapped") else (first, second)


def activated(g: Tensor, u: Tensor | None, options: Options) -> Tensor:
    """The activation of g and u, computed in `options.activation_dtype`, in the dtype of g."""
    name, params, program = options.activation, options.activation_params, options.activation_program
    dtype = options.activation_dtype
    if dtype is None or dtype == g.dtype:
        return activations.apply(name, params, program, g, u)
    return activations.apply(name, params, program, g.to(dtype), None if u is None else u.to(dtype)).to(
        g.dtype
    )


def scale_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """Rows [n, F] times routing weights [n], multiplied in float32 (float64), rounded to the rows' dtype."""
    dtype = sum_dtype(rows.dtype)
    return (rows.to(dtype) * weights.to(dtype).unsqueeze(1)).to(rows.dtype)


def normalised(rows: Tensor, scale: Tensor | None, options: Options) -> Tensor:
    """Rows [n, O] under the row norm; scale [O] or [n, O]. See `spec.py` for the formula and the roundings."""
    if options.row_norm == "none":
        return rows
    wide = rows.to(sum_dtype(rows.dtype))
    if scale is not None and options.row_norm == "scaled_rms":
        wide = (wide * scale.to(wide.dtype)).to(rows.dtype).to(wide.dtype)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + options.row_norm_eps)
    if scale is not None and options.row_norm == "rms":
        wide = wide * scale.to(wide.dtype)
    return wide.to(rows.dtype)


def expert_rows(
    x: Tensor, weights: Tensor, tensors: ExpertTensors, options: Options, dtype: torch.dtype
) -> Tensor:
    """What one expert adds to its tokens.

    x [n, H], weights [n] (routing), `dtype` the dtype of the sum. Returns [n, O] in `dtype`. GEMMs and the
    activation run in the dtype of x, as the model wrote them; weights of another dtype are cast.
    """
    if options.weight_position == "input":
        x = scale_rows(x, weights)
    hidden = [_linear(x, w, options.transpose_weight1) for w in tensors.weight1]
    if tensors.bias1:
        hidden = [_biased(h, b) for h, b in zip(hidden, tensors.bias1, strict=True)]
    g, u = (hidden[0], hidden[1]) if len(hidden) == 2 else split_gate_up(hidden[0], options.gate_up)
    a = activated(g, u, options)
    if options.weight_position == "mid":
        a = scale_rows(a, weights)
    out = _linear(a, tensors.weight2[0], options.transpose_weight2)
    if tensors.bias2:
        out = _biased(out, tensors.bias2[0])
    out = normalised(out, tensors.row_scale[0] if tensors.row_scale else None, options)
    return weighted(out, weights, options, dtype)


def identity_rows(x: Tensor, weights: Tensor, options: Options, dtype: torch.dtype) -> Tensor:
    """What the identity experts add to their tokens: x [n, H] times weights [n], rounded as an expert's rows are."""
    rows = x if options.weight_position == "output" else scale_rows(x, weights)
    return weighted(rows, weights, options, dtype)


def identity_ids(topk_ids: Tensor, options: Options) -> Tensor:
    """True for slots that chose an identity expert."""
    first = options.num_experts
    return (topk_ids >= first) & (topk_ids < first + options.num_identity_experts)


def weighted(rows: Tensor, weights: Tensor, options: Options, dtype: torch.dtype) -> Tensor:
    """Rows [n, O] as terms of a sum in `dtype`: times their routing weights [n] where those multiply at the output."""
    rows = rows.to(dtype)
    if options.weight_position == "output":
        rows = rows * weights.to(dtype).unsqueeze(1)
    return rows if options.product_dtype is None else rows.to(options.product_dtype).to(dtype)


def _linear(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    return x @ (weight.t() if transposed else weight).to(x.dtype)


def _biased(rows: Tensor, bias: Tensor) -> Tensor:
    return (rows + bias).to(rows.dtype)
