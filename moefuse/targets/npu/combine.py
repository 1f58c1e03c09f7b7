"""vllm-ascend's `dispatch_ffn_combine`: the second operator that runs a layer over ranks, of quantised experts alone.

In: the torch operator that vllm-ascend registers. Out: `loaded`, the operator where it's there and its arguments are
known; `CombineCall`, which calls it. It drops rows above `max_output_size`: the worst case is passed.
"""

from typing import Any

import torch
from torch import Tensor

from moefuse.targets.npu.arguments import Arguments

NAMESPACE, NAME = "_C_ascend", "dispatch_ffn_combine"
ARGUMENTS = (
    *("x", "weight1", "weight2", "expert_idx", "scale1", "scale2", "bias1", "bias2", "probs", "group"),
    *("max_output_size", "out", "expert_token_nums", "x_active_mask", "swiglu_limit"),
)
"""Of the one version that is known. Older ones have no biases or no mask, a newer one asks for the world's size."""


def loaded() -> Any:
    """The operator, None where vllm-ascend isn't loaded or has another version of it; nothing is imported."""
    operator = getattr(getattr(getattr(torch.ops, NAMESPACE), NAME, None), "default", None)
    if operator is None or tuple(argument.name for argument in operator._schema.arguments) != ARGUMENTS:
        return None
    return operator


class CombineCall:
    """Calls the operator, which writes y and the counts into what it's given."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __call__(self, given: Arguments, group: str, max_output_size: int) -> tuple[Tensor, Tensor]:
        """group: as HCCL names it. Returns y [T, H] and expert_token_nums."""
        tensors, lists = given.tensors, given.lists
        absent = [tensors["x"].new_empty(0, dtype=torch.float32)]
        mask = tensors.get("x_active_mask")
        self._operator(
            tensors["x"],
            lists["weight1"],
            lists["weight2"],
            tensors["topk_ids"],
            lists["weight_scales1"],
            lists["weight_scales2"],
            lists.get("bias1", absent),
            lists.get("bias2", absent),
            tensors["topk_weights"],
            group,
            max_output_size,
            tensors["y"],
            tensors["expert_token_nums"],
            x_active_mask=None if mask is None else mask.to(torch.bool),
        )
        return given.result
