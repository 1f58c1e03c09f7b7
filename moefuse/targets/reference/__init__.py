"""The reference target: plain torch, runs everywhere, differentiable, the oracle of every other target.

In: a layer's tensors. Out: y and the slots each expert received. Written for clarity: one loop over experts.
"""

import torch
from torch import Tensor

from moefuse.ops.expert import (
    ExpertTensors,
    expert_rows,
    identity_ids,
    identity_rows,
    of_expert,
    scale_of,
    sum_dtype,
)
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.ops.quantised import Quantisation
from moefuse.targets.base import Target
from moefuse.targets.reference import quantised


class ReferenceTarget(Target):
    """See the module text."""

    name = "reference"

    def run(
        self,
        context: Tensor | None,
        operands: Operands,
        options: Options,
        accumulate: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `Target.run`. `accumulate` is the dtype of the sum over slots: float32, or float64 for float64."""
        if options.ep_world_size != 1:
            raise ValueError(
                f"mega_moe: ep_world_size: this target runs on one rank, got {options.ep_world_size}"
            )
        x, topk_ids, topk_weights, weight1, weight2, bias1, bias2, row_scale = operands
        experts = options.num_experts
        dtype = accumulate or sum_dtype(x.dtype)
        out_features = weight2[0].shape[-2 if options.transpose_weight2 else -1]
        y = torch.zeros(x.shape[0], out_features, dtype=dtype, device=x.device)
        counts = []
        for expert in range(experts):
            token, slot = torch.where(topk_ids == expert)
            counts.append(token.numel())
            if token.numel() == 0:
                continue
            tensors = ExpertTensors(
                of_expert(weight1, expert, experts, 3),
                of_expert(weight2, expert, experts, 3),
                of_expert(bias1, expert, experts, 2),
                of_expert(bias2, expert, experts, 2),
                scale_of(row_scale, expert),
            )
            rows = expert_rows(x[token], topk_weights[token, slot], tensors, options, dtype)
            y = y.index_add(0, token, rows)
        if options.num_identity_experts:
            token, slot = torch.where(identity_ids(topk_ids, options))
            y = y.index_add(0, token, identity_rows(x[token], topk_weights[token, slot], options, dtype))
        nums = torch.tensor(counts, dtype=torch.int32, device=x.device)
        return y.to(options.output_dtype or x.dtype), nums

    def run_quantised(
        self, context: Tensor | None, operands: Operands, options: Options, quantisation: Quantisation
    ) -> tuple[Tensor, Tensor]:
        """A layer of quantised experts."""
        return quantised.run(context, operands, options, quantisation)
