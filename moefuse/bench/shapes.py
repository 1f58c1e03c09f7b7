"""The layers that are measured: sizes of public models, random weights, and routings.

In: a name, a dtype, the memory that may be used. Out: a `Layer` with the weights in a transformers module, and token
rows with their routing. Where memory is short there are fewer experts than the model has; the layer says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
"""One way to compute a layer: (x [T, H], topk_ids [T, K], topk_weights [T, K]) -> y [T, H]."""

ROUTINGS = ("uniform", "zipf")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer. oai: gpt-oss's form, [E, K, N] weights with biases, interleaved gate and up, clamped."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    oai: bool = False

    @property
    def expert_values(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.intermediate

    def sizes(self) -> str:
        """`2048/768/128/8`."""
        return f"{self.hidden}/{self.intermediate}/{self.experts}/{self.top_k}"


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3", 2048, 768, 128, 8),
        Shape("qwen3.5", 2048, 512, 256, 8),
        Shape("deepseek-v2-lite", 2048, 1408, 64, 6),
        Shape("gpt-oss", 2880, 2880, 32, 4, oai=True),
        Shape("mixtral", 4096, 14336, 8, 2),
        Shape("tiny", 64, 32, 8, 2),
        Shape("tiny-oai", 64, 64, 4, 2, oai=True),
    )
}
PUBLIC = tuple(name for name in SHAPES if not name.startswith("tiny"))
"""The shapes of real models: Qwen3-30B-A3B, Qwen3.5-35B-A3B, DeepSeek-V2-Lite, gpt-oss-20b, Mixtral-8x7B."""


@dataclass(frozen=True)
class Layer:
    """One layer with weights. shape.experts may be fewer than `model_experts`, those of the model."""

    shape: Shape
    model_experts: int
    dtype: torch.dtype
    module: nn.Module

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights."""
        return self.shape.expert_values * self.dtype.itemsize

    def weights(self, *names: str) -> list[Tensor]:
        """Parameters of the module, by name."""
        return [self.module.get_parameter(name) for name in names]

    def out_features_first(self) -> list[Tensor]:
        """Both weights as [E, 2I, H] and [E, H, I]: as they lie, or (gpt-oss) a transposed copy."""
        found = self.weights("gate_up_proj", "down_proj")
        return [weight.transpose(1, 2).contiguous() for weight in found] if self.shape.oai else found


def available_bytes() -> int:
    """Memory that is free, in bytes; what the machine has where that can't be told apart."""
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def build(shape: Shape, dtype: torch.dtype, memory: int) -> Layer:
    """The layer, its weights in at most `memory` bytes. Raises MemoryError when not even top_k experts fit."""
    fit = memory // (shape.expert_values * dtype.itemsize)
    if fit < shape.top_k:
        raise MemoryError(f"{shape.name}: {shape.top_k} experts don't fit into {memory / 2**30:.1f} GiB")
    smaller = replace(shape, experts=min(shape.experts, fit))
    module = experts_module(smaller, "eager", dtype)
    for parameter in module.parameters():
        parameter.normal_(std=0.02)
    return Layer(smaller, shape.experts, dtype, module)


def experts_module(shape: Shape, implementation: str, dtype: torch.dtype) -> nn.Module:
    """A transformers experts module without values. Raises ImportError without transformers."""
    try:
        from transformers import GptOssConfig, Qwen3MoeConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except ImportError as error:
        raise ImportError("moefuse bench needs transformers: pip install 'moefuse[transformers]'") from error
    sizes = {"hidden_size": shape.hidden, "num_experts_per_tok": shape.top_k}
    if shape.oai:
        config = GptOssConfig(**sizes, intermediate_size=shape.intermediate, num_local_experts=shape.experts)
    else:
        config = Qwen3MoeConfig(**sizes, moe_intermediate_size=shape.intermediate, num_experts=shape.experts)
    config._experts_implementation = implementation
    with torch.device("meta"):
        module: nn.Module = GptOssExperts(config) if shape.oai else Qwen3MoeExperts(config)
    return module.to(dtype).to_empty(device="cpu").requires_grad_(False).eval()


def inputs(layer: Layer, tokens: int, routing: str) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], topk_ids [T, K] int64 and topk_weights [T, K] in the layer's dtype."""
    x = torch.randn(tokens, layer.shape.hidden).to(layer.dtype)
    logits = torch.rand(tokens, layer.shape.experts)
    # Gumbel's trick: the top k are drawn without replacement, expert e with weight 1 / e
    if routing == "zipf":
        gumbel = -(-logits.clamp(1e-6, 1 - 1e-6).log()).log()
        logits = gumbel - torch.arange(1, layer.shape.experts + 1).log()
    weights, ids = logits.softmax(-1).topk(layer.shape.top_k)
    return x, ids, weights.to(layer.dtype)
