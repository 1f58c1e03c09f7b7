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
    """One expert's tensors: 2-D weights and 1-D biases; two of weight1 and bias1 for gate_up="separate"."""

    weight1: tuple[Tensor, ...]
    weight2: tuple[Tensor, ...]
    bias1: tuple[Tensor, ...] = ()
    bias2: tuple[Tensor, ...] = ()


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


def expert_rows(
    x: Tensor, weights: Tensor, tensors: ExpertTensors, options: Options, dtype: torch.dtype
) -> Tensor:
    """What one expert adds to its tokens.

    x [n, H], weights [n] (routing), `dtype` the dtype of the sum. Returns [n, O] in `dtype`. GEMMs and the
    activation run in the dtype of x, as the model wrote them.
    """
    if options.weight_position == "input":
        x = scale_rows(x, weights)
    hidden = [_linear(x, w, options.transpose_weight1) for w in tensors.weight1]
    if tensors.bias1:
        hidden = [h + b for h, b in zip(hidden, tensors.bias1, strict=True)]
    g, u = (hidden[0], hidden[1]) if len(hidden) == 2 else split_gate_up(hidden[0], options.gate_up)
    a = activated(g, u, options)
    if options.weight_position == "mid":
        a = scale_rows(a, weights)
    out = _linear(a, tensors.weight2[0], options.transpose_weight2)
    if tensors.bias2:
        out = out + tensors.bias2[0]
    out = out.to(dtype)
    if options.weight_position == "output":
        out = out * weights.to(dtype).unsqueeze(1)
    return out if options.product_dtype is None else out.to(options.product_dtype).to(dtype)


def _linear(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    return x @ (weight.t() if transposed else weight)
