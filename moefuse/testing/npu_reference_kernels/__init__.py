"""Reference kernels of Ascend's MoE operators on CPU tensors: graphs of NPU code run and are captured anywhere.

In: nothing. Out: `install()`, after which `torch.ops.npu.npu_moe_init_routing_v2` and its kin work on the CPU. The
schemas are torch_npu's own where that package is imported, and defined here, equal to them, where it isn't. The
kernels follow the public operator text; they say nothing about a device's rounding or speed. Values that an operator
leaves unwritten are NaN.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch

from moefuse.testing.npu_reference_kernels import communication, experts, fused, mx, quant, routing
from moefuse.testing.npu_reference_kernels.schemas import SCHEMAS

__all__ = ["KERNELS", "install"]

KERNELS: dict[str, Callable[..., Any]] = {
    "npu_moe_gating_top_k_softmax": routing.gating_top_k_softmax,
    "npu_moe_gating_top_k": routing.gating_top_k,
    "npu_moe_init_routing": routing.init_routing,
    "npu_moe_init_routing_v2": routing.init_routing_v2,
    "npu_moe_init_routing_quant": routing.init_routing_quant,
    "npu_moe_compute_expert_tokens": routing.compute_expert_tokens,
    "npu_moe_token_permute": routing.token_permute,
    "npu_grouped_matmul": experts.grouped_matmul,
    "npu_grouped_matmul.List": experts.grouped_matmul_list,
    "npu_swiglu": experts.swiglu,
    "npu_clipped_swiglu": experts.clipped_swiglu,
    "npu_dynamic_quant": quant.dynamic_quant,
    "npu_dynamic_mx_quant": mx.dynamic_mx_quant,
    "npu_dequant_swiglu_quant": quant.dequant_swiglu_quant,
    "npu_swiglu_quant": fused.swiglu_quant,
    "npu_grouped_matmul_swiglu_quant_v2": fused.grouped_matmul_swiglu_quant_v2,
    "npu_grouped_matmul_swiglu_quant": fused.grouped_matmul_swiglu_quant,
    "npu_grouped_matmul_finalize_routing": fused.grouped_matmul_finalize_routing,
    "npu_moe_re_routing": fused.re_routing,
    "npu_moe_distribute_dispatch": communication.distribute_dispatch,
    "npu_moe_distribute_dispatch_v2": communication.distribute_dispatch_v2,
    "npu_moe_distribute_combine": communication.distribute_combine,
    "npu_moe_distribute_combine_v2": communication.distribute_combine_v2,
    "npu_moe_distribute_combine_add_rms_norm": communication.distribute_combine_add_rms_norm,
    "npu_add_rms_norm": communication.add_rms_norm,
    "npu_moe_finalize_routing": routing.finalize_routing,
    "npu_moe_token_unpermute": routing.token_unpermute,
}
"""The kernel of each operator, by its name in the `npu` library."""


@functools.cache
def install() -> torch.library.Library:
    """Register the kernels, once per process; returns the library that holds the registrations.

    Raises:
        RuntimeError: torch_npu is installed but not imported: its schemas would clash with those defined here.
    """
    library = torch.library.Library("npu", "FRAGMENT")
    if "torch_npu" not in sys.modules:
        if importlib.util.find_spec("torch_npu") is not None:
            raise RuntimeError(
                "npu_reference_kernels: import torch_npu before install(); its schemas are used"
            )
        for schema in SCHEMAS:
            name = library.define(schema)
            torch.library.register_fake(
                f"npu::{name}", communication.SHAPES.get(name, KERNELS[name]), lib=library
            )
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "CPU")
    return library
