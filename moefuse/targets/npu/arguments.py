"""From one mega_moe.ep or quant_ep call to the vendor's arguments: all tensors in the dtypes and number it takes.

In: operands, options, the context of the call and the device family. Out: `Arguments`. No value of a tensor is read,
and shapes decide nothing but how many rows are added: the same operators run whatever the tokens are.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.ops.quantised import BLOCKS, Quantisation
from moefuse.policy.npu_limits import schemes
from moefuse.targets.npu.context import NpuContext
from moefuse.targets.npu.weights import biases, block_scales, encoded_scales, prepare, prepare_blocks

UNIFORM_FAMILIES = ("A2", "A3")
"""Devices on which every rank must bring as many tokens as the others."""


@dataclass(frozen=True)
class Arguments:
    """tensors, lists and numbers: by the names of `abi.py`. tokens: rows of `y` that are the call's own."""

    tensors: dict[str, Tensor]
    lists: dict[str, list[Tensor]]
    numbers: dict[str, Any]
    tokens: int

    @property
    def result(self) -> tuple[Tensor, Tensor]:
        """y [T, H] without added rows, and expert_token_nums."""
        return self.tensors["y"][: self.tokens], self.tensors["expert_token_nums"]


def arguments(
    context: NpuContext,
    operands: Operands,
    options: Options,
    family: str,
    quantisation: Quantisation | None = None,
    keep: bool = False,
) -> Arguments:
    """See the module text. keep: encoded scales and widened biases are kept from call to call.

    Raises NpuContextError where the call isn't what the context was made for.
    """
    name = "none" if quantisation is None else quantisation.quant
    context.check(operands, options, name)
    x, tokens = operands.x.contiguous(), operands.x.shape[0]
    tensors = {
        "context": context.tensor,
        "x": x,
        "topk_ids": operands.topk_ids.to(torch.int32).contiguous(),
        "topk_weights": operands.topk_weights.to(torch.float32).contiguous(),
    }
    if (rows := rows_of(context, tokens, family)) != tokens:
        tensors |= _filled_up(tensors, tokens, rows, operands.topk_ids.shape[1])
        # the others take no mask: the one row of an empty shard is computed, and counted
        if family not in UNIFORM_FAMILIES:
            del tensors["x_active_mask"]
    tensors["y"] = x.new_empty((rows, x.shape[1]))
    tensors["expert_token_nums"] = x.new_empty((options.local_experts,), dtype=torch.int32)
    lies = schemes()[name].weight_format
    as_taken = prepare_blocks if name in BLOCKS else prepare
    lists = {
        "weight1": as_taken(operands.weight1, options.transpose_weight1, lies),
        "weight2": as_taken(operands.weight2, options.transpose_weight2, lies),
    }
    if quantisation is not None and name in BLOCKS:
        lists |= {
            "weight_scales1": block_scales(quantisation.weight_scales1, options.transpose_weight1, keep),
            "weight_scales2": block_scales(quantisation.weight_scales2, options.transpose_weight2, keep),
        }
    elif quantisation is not None:
        lists |= {
            "weight_scales1": encoded_scales(quantisation.weight_scales1, keep),
            "weight_scales2": encoded_scales(quantisation.weight_scales2, keep),
            "bias1": biases(operands.bias1, keep),
            "bias2": biases(operands.bias2, keep),
        }
    lists = {name: tensors for name, tensors in lists.items() if tensors}
    return Arguments(tensors, lists, numbers(context, options), tokens)


def numbers(context: NpuContext, options: Options) -> dict[str, Any]:
    """The arguments that are no tensors; those that the context says nothing of are left to their defaults."""
    sizes, scheme = context.sizes, schemes()[context.sizes.scheme]
    quantised = scheme.dispatch_quant_mode or None
    values = {
        "moe_expert_num": sizes.num_experts,
        "ep_world_size": sizes.ep_world_size,
        "ccl_buffer_size": context.ccl_buffer_size,
        "max_recv_token_num": sizes.max_recv_token_num,
        "num_max_tokens_per_rank": sizes.num_max_tokens_per_rank,
        "dispatch_quant_mode": quantised,
        "dispatch_quant_out_dtype": quantised and scheme.dispatch_quant_out_dtype,
        "activation": options.activation,
        "activation_params": list(options.activation_params),
        "topo_type": context.topo_type,
        "rank_num_per_server": context.rank_num_per_server,
    }
    return {name: value for name, value in values.items() if value is not None}


def rows_of(context: NpuContext, tokens: int, family: str) -> int:
    """Rows that are handed over: one at least, and the most that any rank has where all must have as many."""
    if family in UNIFORM_FAMILIES and not context.uniform_tokens:
        return context.sizes.num_max_tokens_per_rank
    # a symbol is of a graph for 2 tokens or more
    return 1 if isinstance(tokens, int) and tokens == 0 else tokens


def _filled_up(given: dict[str, Tensor], tokens: int, rows: int, top_k: int) -> dict[str, Tensor]:
    """Added rows choose experts 0..K-1 with weight 0 and are masked: they cost nothing and reach no one."""
    x, ids, weights = given["x"], given["topk_ids"], given["topk_weights"]
    more_x = x.new_zeros((rows, x.shape[1]))
    more_ids = torch.arange(top_k, dtype=torch.int32, device=x.device).repeat(rows, 1)
    more_weights = weights.new_zeros((rows, top_k))
    mask = torch.zeros(rows, dtype=torch.int8, device=x.device)
    more_x[:tokens], more_ids[:tokens], more_weights[:tokens] = x, ids, weights
    mask[:tokens] = 1
    return {"x": more_x, "topk_ids": more_ids, "topk_weights": more_weights, "x_active_mask": mask}
