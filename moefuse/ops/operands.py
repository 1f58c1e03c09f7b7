"""The tensors of one mega_moe call as one value.

In: what the operator got. Out: `Operands`, which kernels, targets and communicators take beside `Options`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Operands(NamedTuple):
    """The tensor arguments of mega_moe, in the order of its schema.

    x: [T, H], floating. topk_ids: [T, K], int32 or int64. topk_weights: [T, K], floating.
    weight1, weight2: one stacked 3-D tensor per part, [E, N, K] when transposed (two parts, gate and up, for
    gate_up="separate"), or one 2-D tensor per expert, all gates before all ups. bias1, bias2: alike, or empty.
    row_scale: [O], or [E, O], or None.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    weight1: Sequence[Tensor]
    weight2: Sequence[Tensor]
    bias1: Sequence[Tensor] = ()
    bias2: Sequence[Tensor] = ()
    row_scale: Tensor | None = None
