"""The cpu target in torch operators.

In: a layer's tensors. Out: y and the slots each expert received. Slots are sorted by expert once. Experts are
taken in blocks of a few hundred rows: their first GEMMs, one activation over the block, their second GEMMs.
One weighted gather-sum (`embedding_bag`: float32 products and sums, rounded once) makes y. Weights are read as
they lie: no stacked, packed or transposed copy; extra memory is the rows [slots, O] and one block. A weight of
another dtype than x is cast when its expert is used, one at a time.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from moefuse.ops.expert import activated, normalised, of_expert, scale_rows, split_gate_up, sum_dtype
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.targets.cpu.gemm import multiply_into

# Long enough that Python and dispatch are paid per block rather than per expert, short enough that a block's
# hidden rows stay in the cache between the GEMMs.
_BLOCK_ROWS = 512
_COMBINE_TOKENS = 64


@torch.no_grad()  # the operator has its own gradient; nothing here may record one
def run(
    operands: Operands,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """y [T, O] and expert_token_nums [E] int32; see `Target.run`."""
    x, topk_ids, topk_weights, weight1, weight2, bias1, bias2, row_scale = operands
    sorted_ids, order = topk_ids.reshape(-1).sort(stable=True)
    experts, identities = options.num_experts, options.num_identity_experts
    edges = torch.searchsorted(sorted_ids, _expert_range(experts, identities, topk_ids.dtype), out_int32=True)
    bounds: list[int] = edges.tolist()
    end = bounds.pop() if identities else bounds[-1]
    rows = x.new_empty((order.shape[0], weight2[0].shape[-2 if options.transpose_weight2 else -1]))
    for active in _blocks(bounds):
        slots = order[bounds[active[0]] : bounds[active[-1] + 1]]
        routing = None if options.weight_position == "output" else topk_weights.take(slots)
        own = x.index_select(0, slots // topk_ids.shape[1])
        if routing is not None and options.weight_position == "input":
            own = scale_rows(own, routing)
        a = _activated(
            _gemms(own, active, bounds, weight1, bias1, options.transpose_weight1, options), options
        )
        if routing is not None and options.weight_position == "mid":
            a = scale_rows(a, routing)
        _gemms(a, active, bounds, weight2, bias2, options.transpose_weight2, options, rows)
        own = rows[bounds[active[0]] : bounds[active[-1] + 1]]
        if options.row_norm != "none":
            own.copy_(normalised(own, _scale_rows_of(row_scale, active, bounds), options))
        if _rounds_products(rows, options):
            own.mul_(topk_weights.take(slots).unsqueeze(1))  # multiplied in the wider dtype, rounded once
    if end > bounds[-1]:
        slots, own = order[bounds[-1] : end], rows[bounds[-1] : end]
        torch.index_select(x, 0, slots // topk_ids.shape[1], out=own)
        if options.weight_position != "output" or _rounds_products(rows, options):
            own.copy_(scale_rows(own, topk_weights.take(slots)))
    return _combine(rows, order, (bounds[0], end), topk_weights, options), edges[: experts + 1].diff()


@lru_cache(maxsize=64)
def _expert_range(experts: int, identities: int, dtype: torch.dtype) -> Tensor:
    """Where the ids of each expert begin, of the last one end, and of the identity experts end."""
    ends = [experts + identities] if identities else []
    # whatever the user's default device
    return torch.tensor([*range(experts + 1), *ends], dtype=dtype, device="cpu")


def _scale_rows_of(row_scale: Tensor | None, active: Sequence[int], bounds: Sequence[int]) -> Tensor | None:
    """The row scale for a block's rows: the shared one, or each row's expert's."""
    if row_scale is None or row_scale.dim() == 1:
        return row_scale
    counts = torch.tensor([bounds[expert + 1] - bounds[expert] for expert in active], device="cpu")
    return row_scale[list(active)].repeat_interleave(counts, 0)


def _blocks(bounds: Sequence[int]) -> Iterator[list[int]]:
    """Runs of experts that have rows, each of about _BLOCK_ROWS rows (one expert's rows are never split)."""
    active: list[int] = []
    start = bounds[0]
    for expert in range(len(bounds) - 1):
        if bounds[expert] == bounds[expert + 1]:
            continue
        if active and bounds[expert + 1] - start > _BLOCK_ROWS:
            yield active
            active, start = [], bounds[expert]
        active.append(expert)
    if active:
        yield active


def _gemms(
    x: Tensor,
    active: Sequence[int],
    bounds: Sequence[int],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    transposed: bool,
    options: Options,
    rows: Tensor | None = None,
) -> list[Tensor]:
    """One GEMM per active expert and weight part, over a block's sorted rows x [n, K].

    Returns one [n, N] tensor per part (two for gate_up="separate"); with `rows`, the result goes there instead.
    """
    experts = options.num_experts
    begin = bounds[active[0]]
    parts = len(weights) if weights[0].dim() == 3 else len(weights) // experts
    features = weights[0].shape[-2 if transposed else -1]
    counts = [bounds[expert + 1] - bounds[expert] for expert in active]
    if rows is None:
        outs = [x.new_empty((x.shape[0], features)) for _ in range(parts)]
    else:
        outs = [rows[begin : begin + x.shape[0]]]
    for expert, own, *own_outs in zip(
        active, x.split(counts), *(out.split(counts) for out in outs), strict=True
    ):
        own_biases = of_expert(biases, expert, experts, 2) or (None,) * parts
        own_weights = of_expert(weights, expert, experts, 3)
        for out, weight, bias in zip(own_outs, own_weights, own_biases, strict=True):
            w = weight if transposed else weight.t()
            if w.dtype == own.dtype and (bias is None or bias.dtype == own.dtype):
                multiply_into(out, own, w, bias)
                continue
            multiply_into(out, own, w.to(own.dtype))
            if bias is not None:
                out.add_(bias)  # in the wider dtype of the two, rounded once
    return outs


def _activated(hidden: list[Tensor], options: Options) -> Tensor:
    """The activation over a block's hidden rows, which are ours to overwrite: [n, I]."""
    g, u = (hidden[0], hidden[1]) if len(hidden) == 2 else split_gate_up(hidden[0], options.gate_up)
    if u is not None and options.gate_up.startswith("interleaved"):
        g, u = g.contiguous(), u.contiguous()  # every pass over a strided half costs more than this one
    if options.activation_dtype not in (None, g.dtype):
        return activated(g, u, options)
    if u is not None and options.activation == "swiglu" and not options.activation_params:
        return F.silu(g).mul_(u)
    if u is not None and options.activation == "swigluoai":
        return _swigluoai_(g, u, *options.activation_params)
    return activated(g, u, options)


def _swigluoai_(g: Tensor, u: Tensor, limit: float, alpha: float, beta: float) -> Tensor:
    """As in activations.py, in place."""
    g.clamp_(max=limit)
    return (g * alpha).sigmoid_().mul_(g).mul_(u.clamp_(-limit, limit).add_(beta))


def _rounds_products(rows: Tensor, options: Options) -> bool:
    """True when weighted rows are rounded to the rows' own dtype, and so can be weighted in place."""
    return options.weight_position == "output" and options.product_dtype == rows.dtype != torch.float64


def _combine(
    rows: Tensor, order: Tensor, valid: tuple[int, int], topk_weights: Tensor, options: Options
) -> Tensor:
    """Sum each token's rows, weighted where the routing weight is on the output. rows are in sorted order.

    valid: the range of rows whose slots have an expert.
    """
    begin, end = valid
    dtype = options.output_dtype or rows.dtype
    if not order.shape[0]:
        return rows.new_zeros((topk_weights.shape[0], rows.shape[1]), dtype=dtype)
    position = torch.empty_like(order)
    position[order] = torch.arange(order.shape[0], device="cpu")
    position = position.view(topk_weights.shape)
    weighed = options.weight_position != "output" or _rounds_products(rows, options)
    weights = None if weighed else topk_weights
    if begin > 0 or end < order.shape[0]:
        # slots without an expert: their rows were never written, and their weight may be anything
        rows[:begin].zero_()
        rows[end:].zero_()
        if weights is not None:
            weights = weights.masked_fill((position < begin) | (position >= end), 0)
    sums = sum_dtype(rows.dtype)
    if weights is not None:
        weights = weights.to(sums)
    if rows.dtype == sums:
        return F.embedding_bag(position, rows, mode="sum", per_sample_weights=weights).to(dtype)
    # A bag of half precision rows rounds ties upwards, torch to even: sum in float32, a few tokens at a time, so
    # that the widened rows stay in the cache.
    y = rows.new_empty((position.shape[0], rows.shape[1]), dtype=dtype)
    bags = torch.arange(_COMBINE_TOKENS * position.shape[1]).view(_COMBINE_TOKENS, -1)
    for start in range(0, position.shape[0], _COMBINE_TOKENS):
        own = position[start : start + _COMBINE_TOKENS]
        wide = rows.index_select(0, own.reshape(-1)).to(sums)
        own_weights = None if weights is None else weights[start : start + _COMBINE_TOKENS]
        y[start : start + _COMBINE_TOKENS] = F.embedding_bag(
            bags[: own.shape[0]], wide, mode="sum", per_sample_weights=own_weights
        )
    return y
