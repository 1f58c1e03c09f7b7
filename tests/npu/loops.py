"""MoE layers slot by slot in float64: what every sequence is compared with, written without any of its operators.

In: token rows, what the router gave, and experts. Out: y. Nothing is rounded but what a quantisation scheme rounds.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tests.npu.quant_sequences import Case, Weights
from tests.npu.sequences import K, route

Expert = Callable[[Tensor, int], Tensor]
"""A row in float64 and the number of an expert: its output."""


def summed(x: Tensor, routing: Tensor, ids: Tensor, expert: Expert, own: range, features: int) -> Tensor:
    """The sum over each token's slots of weight * expert(row). own: the ids that have an expert, the first is 0."""
    y = torch.zeros(x.shape[0], features, dtype=torch.float64)
    for t in range(x.shape[0]):
        for j in range(K):
            if (e := int(ids[t, j])) in own:
                y[t] += float(routing[t, j]) * expert(x[t].double(), e - own.start)
    return y


def activated(h: Tensor, activation: str, gate_up: str) -> Tensor:
    """The gated product of one row."""
    if activation == "swigluoai":
        g, u = h[::2].clamp(max=7.0), h[1::2].clamp(-7.0, 7.0)
        return g * torch.sigmoid(1.702 * g) * (u + 1)
    g, u = h.chunk(2) if gate_up == "concat" else reversed(h.chunk(2))
    if activation == "situglu":
        return 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 2 * torch.tanh(u / 2)
    if activation == "geglu":
        return functional.gelu(g) * u
    if activation == "swiglustep":
        return functional.silu(g).clamp(max=7.0) * u.clamp(-7.0, 7.0)
    return functional.silu(g) * u


def floats(
    x: Tensor, routing: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, own: range, activation: str = "swiglu"
) -> Tensor:
    """Experts [E, H, 2 I] and [E, I, H] of floats."""

    def expert(row: Tensor, e: int) -> Tensor:
        return activated(row @ w13[e].double(), activation, "concat") @ w2[e].double()

    return summed(x, routing, ids, expert, own, w2.shape[2])


def of_scheme(scheme: str, x: Tensor, logits: Tensor, *tensors: Tensor, own: range | None = None) -> Tensor:
    """The layer of `shells.py`, in bf16 or quantised. own: the ids of the experts, all of them for None."""
    if scheme == "bf16":
        return floats(x, *route(logits), tensors[0], tensors[1], own or range(tensors[0].shape[0]))
    return quantised(Case(route, scheme), x, logits, *tensors, own=own)


def quantised(case: Case, x: Tensor, logits: Tensor, *tensors: Tensor, own: range | None = None) -> Tensor:
    """Experts of integers, from unpacked weights; rows become the integers that the scheme makes of them."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    bits = {"w8a8": 8, "w4a8": 8, "w4a4": 4}.get(case.scheme, 0)

    def matrix(weight: Tensor, e: int) -> Tensor:
        if weight.dtype == torch.int8:
            return weight[e].double()
        words = weight[e].long()
        columns = [((words >> 4 * i) & 15) for i in range(8)]
        values = torch.stack([c - 16 * (c > 7) for c in columns], dim=-1)
        return values.reshape(words.shape[0], -1).double()

    def gemm(row: Tensor, weight: Tensor, scale: Tensor, other: Tensor, e: int) -> Tensor:
        m, s = matrix(weight, e), scale[e].double()
        rows = 1 if s.dim() == 1 else m.shape[0] // s.shape[0]
        every = s if s.dim() == 1 else s.repeat_interleave(rows, 0)
        if not bits:
            o = other[e].double()
            return row @ ((m + (o if o.dim() == 1 else o.repeat_interleave(rows, 0))) * every)
        step = row.abs().max() / (2 ** (bits - 1) - 1)
        return ((row / step).round() @ (m * every)) * step  # the assist of w4a8 makes up for its 8

    def expert(row: Tensor, e: int) -> Tensor:
        a = activated(gemm(row, w.w13, w.s13, w.o13, e), case.activation, case.gate_up)
        return gemm(a, w.w2, w.s2, w.o2, e)

    return summed(x, routing, ids, expert, own or range(w.w13.shape[0]), x.shape[1])
