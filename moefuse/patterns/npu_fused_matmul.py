"""Ascend's activation, and its expert GEMMs that are one operator with what follows: activation, quantisation, combine.

In: what npu_matmul.py takes. Out: what the single operators would give, each step by the rule of its own.
"""

from typing import Any

import torch
from torch.fx import Node

from moefuse.patterns.facts import Conflict
from moefuse.patterns.finalize_routing import accumulated, weighted_rows
from moefuse.patterns.hidden_states_quant import gated, quantise
from moefuse.patterns.mx import ELEMENTS, in_blocks, is_e8m0
from moefuse.patterns.npu_matmul import BLOCK_DTYPES, demand_rules, groups_of, of_blocks, of_integers
from moefuse.patterns.rules import Lifting, Outcome, argument, op_name, rule, value


@rule("npu::npu_swiglu")
def npu_swiglu(lift: Lifting, node: Node) -> Outcome:
    """silu(first half) * second half of a dimension."""
    rows = lift.fact(argument(node, 0))
    if not rows.expr.hard:
        return None
    dim = int(argument(node, 1, "dim", -1)) % len(rows.dims)
    if dim != len(rows.dims) - 1:
        raise Conflict("a gated activation over rows")
    return gated(rows, value(node).dtype)


@rule("npu::npu_grouped_matmul_swiglu_quant_v2", "npu::npu_grouped_matmul_swiglu_quant")
def npu_grouped_matmul_swiglu_quant(lift: Lifting, node: Node) -> Outcome:
    """The product of quantised rows and weights, the gated product, int8 with one scale per row; or in MX blocks."""
    first = op_name(node) == "npu::npu_grouped_matmul_swiglu_quant"
    options: dict[str, Any] = dict(node.kwargs)
    blocks = options.get("dequant_mode") == options.get("quant_mode") == 2
    if not blocks:
        demand_rules(options)
    for name in ("bias", "offset", "smooth_scale", *(("weight_assist_matrix",) if blocks else ())):
        if options.get(name) is not None:
            raise Conflict(f"a grouped GEMM with activation and quantisation, and {name}")
    modes = [options.get(name, default) for name, default in _FUSED_DEFAULTS.items()]
    wanted = (
        [2, 6, 2, modes[3] if modes[3] in ELEMENTS else None] if blocks else list(_FUSED_DEFAULTS.values())
    )
    if modes != wanted:
        given = ", ".join(f"{name}={mode}" for name, mode in zip(_FUSED_DEFAULTS, modes, strict=True))
        raise Conflict(
            f"a grouped GEMM with activation and quantisation to other than int8 per row or MX blocks ({given})"
        )
    x, weights = argument(node, 0), argument(node, 1)
    scales, x_scale, group_list = (argument(node, i) for i in ((3, 4, 2) if first else (2, 3, 4)))
    weights, scales = ([weights], [scales]) if first else (weights, scales)
    groups = groups_of(lift, group_list, options.get("group_list_type", 0))
    tensors = {"scale": scales, "per_token_scale": [x_scale], "bias": options.get("weight_assist_matrix")}
    if blocks:
        names = {"scale_dtype": "weight_scale_dtype", "per_token_scale_dtype": "x_scale_dtype"}
        tensors |= {name: options.get(names.get(name, name)) for name in BLOCK_DTYPES}
        if not is_e8m0(x_scale, options.get("x_scale_dtype")):
            raise Conflict(
                "a grouped GEMM with activation in MX blocks, whose row scales are not of type float8_e8m0"
            )
        product = of_blocks(lift, node, x, weights, groups, tensors, torch.float32)
        return in_blocks(gated(product, torch.float32), ELEMENTS[modes[3]], torch.float32)
    product = of_integers(lift, node, x, weights, groups, tensors, torch.float32)
    return (*quantise(gated(product, torch.float32), torch.int8, torch.float32), *((None,) if first else ()))


_FUSED_DEFAULTS = {"dequant_mode": 0, "dequant_dtype": 6, "quant_mode": 0, "quant_dtype": 1}


@rule("npu::npu_grouped_matmul_finalize_routing")
def npu_grouped_matmul_finalize_routing(lift: Lifting, node: Node) -> Outcome:
    """The product of quantised rows, each times its logit, added to its token's row of the output."""
    options: dict[str, Any] = dict(node.kwargs)
    demand_rules(options)
    x, weight, group_list = (argument(node, i) for i in range(3))
    if options.get("shared_input") is not None:
        raise Conflict("the finalize routing adds a shared expert's rows to a part of the output")
    if options.get("scale") is None or not isinstance(row_index := options.get("row_index"), Node):
        raise Conflict("a grouped GEMM with finalize routing, without scale or row_index")
    groups = groups_of(lift, group_list, options.get("group_list_type", 1))
    given = {
        "scale": [options["scale"]],
        "bias": [options["bias"]] if options.get("bias") is not None else None,
    }
    if (per_row := options.get("pertoken_scale")) is not None:
        given["per_token_scale"] = [per_row]
    rows = of_integers(lift, node, x, [weight], groups, given, torch.float32)
    if (logit := options.get("logit")) is not None:
        rows = weighted_rows(lift, node, rows, logit)
    return accumulated(lift, node, rows, row_index, options.get("output_bs") or value(x).shape[0])
