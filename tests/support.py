"""Small real MoE blocks that several test rooms share, and how far results are apart.

In: sizes, dtype, experts implementation. Out: the transformers module of one MoE layer with random weights,
and an input. Only one layer is built, so that a test costs milliseconds, not a model.
"""

from collections.abc import Callable
from typing import Any

import torch

from moefuse.testing.programs import Sizes

Block = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]


def qwen3_block(sizes: Sizes, dtype: torch.dtype = torch.float32, experts: str = "grouped_mm") -> Block:
    """Qwen3 MoE: softmax, top-k, renormalised; gate and up concatenated; [E, N, H] weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.inter,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
    )
    return _block(Qwen3MoeSparseMoeBlock, config, sizes, dtype, experts)


def gpt_oss_block(sizes: Sizes, dtype: torch.dtype = torch.float32, experts: str = "grouped_mm") -> Block:
    """gpt-oss: top-k then softmax, biases, interleaved halves, clamped swiglu, [E, H, N] weights."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inter,
        num_local_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
    )
    return _block(GptOssMLP, config, sizes, dtype, experts)


def llama4_block(sizes: Sizes, dtype: torch.dtype = torch.float32, experts: str = "grouped_mm") -> Block:
    """Llama 4: sigmoid scores on the input of dense experts, plus a shared expert."""
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    config = Llama4TextConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inter,
        intermediate_size_mlp=sizes.inter,
        num_local_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
    )
    return _block(Llama4TextMoe, config, sizes, dtype, experts)


def deepseek_block(sizes: Sizes, dtype: torch.dtype = torch.float32, experts: str = "grouped_mm") -> Block:
    """DeepSeek V3: group limited sigmoid router with a bias, scaled weights, a shared expert."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=sizes.hidden,
        moe_intermediate_size=sizes.inter,
        n_routed_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        n_group=2,
        topk_group=1,
    )
    return _block(DeepseekV3MoE, config, sizes, dtype, experts)


def _block(build: Callable[[Any], Any], config: Any, sizes: Sizes, dtype: torch.dtype, experts: str) -> Block:
    config._experts_implementation = experts
    generator = torch.Generator().manual_seed(0)
    module = build(config).to(dtype).eval()
    for tensor in (*module.parameters(), *module.buffers()):
        value = torch.randn(tensor.shape, generator=generator) / (
            tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 1.0
        )
        with torch.no_grad():
            tensor.copy_(value.to(tensor.dtype))
    x = torch.randn(1, sizes.tokens, sizes.hidden, generator=generator).to(dtype)
    return module.requires_grad_(False), (x,)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """The norm-wise difference."""
    return float((got.double() - want.double()).norm() / want.double().norm())
