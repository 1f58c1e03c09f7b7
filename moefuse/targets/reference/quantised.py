"""Quantised experts in plain torch: one loop over experts, see `moefuse.ops.quantised`.

In: a layer's tensors. Out: y and the slots each expert received.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.ops.expert import of_expert, sum_dtype, weighted
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.ops.quantised import Quantisation, QuantLinear, expert_rows


def run(
    context: Tensor | None, operands: Operands, options: Options, quantisation: Quantisation
) -> tuple[Tensor, Tensor]:
    """y [T, O] and expert_token_nums [E] int32."""
    if options.ep_world_size != 1:
        raise ValueError(
            f"mega_moe.quant: ep_world_size: this target runs on one rank, got {options.ep_world_size}"
        )
    x, topk_ids, topk_weights = operands.x, operands.topk_ids, operands.topk_weights
    experts, dtype = options.num_experts, sum_dtype(x.dtype)
    y: Tensor | None = None
    counts = []
    for expert in range(experts):
        token, slot = torch.where(topk_ids == expert)
        counts.append(token.numel())
        first = _linears(operands.weight1, operands.bias1, quantisation, 1, expert, options)
        (second,) = _linears(operands.weight2, operands.bias2, quantisation, 2, expert, options)
        rows = expert_rows(x[token], first, second, options, quantisation)
        if y is None:
            y = torch.zeros(x.shape[0], rows.shape[1], dtype=dtype, device=x.device)
        y = y.index_add(0, token, weighted(rows, topk_weights[token, slot], options, dtype))
    assert y is not None  # there is at least one expert
    nums = torch.tensor(counts, dtype=torch.int32, device=x.device)
    return y.to(options.output_dtype or x.dtype), nums


def _linears(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    quantisation: Quantisation,
    which: int,
    expert: int,
    options: Options,
) -> list[QuantLinear]:
    """One expert's GEMMs: of the first pair of lists (which 1) or the second (2)."""
    experts, stacked = options.num_experts, weights[0].dim() == 3
    transposed = options.transpose_weight1 if which == 1 else options.transpose_weight2

    def own(tensors: Sequence[Tensor], stacked: bool) -> Sequence[Tensor | None]:
        if not tensors:
            return [None] * len(parts)
        return of_expert(tensors, expert, experts, tensors[0].dim() if stacked else 0)

    parts = of_expert(weights, expert, experts, 3)
    scales, offsets = quantisation.beside(which)
    every = zip(
        parts,
        own(scales, stacked),
        own(offsets, stacked),
        own(biases, bool(biases) and biases[0].dim() == 2),
        strict=True,
    )
    return [
        QuantLinear(weight, scale, offset, bias, transposed)
        for weight, scale, offset, bias in every
        if scale is not None
    ]
