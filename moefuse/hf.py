"""Tiny Hugging Face MoE models from nothing but a model type, for `moefuse explain hf:TYPE` and for tests.

In: a transformers model type such as "qwen3_moe", or the name of a module below `transformers.models`. Out: a
randomly initialised model of two small layers with 8 experts, in eval mode, and the keyword arguments to call it
with. Nothing is downloaded. Needs the `transformers` package, which is imported on the first call.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EXPERTS = 8
TOP_K = 2
VOCAB = 128

# Small value of every size that a configuration may have. Multiples of 16 keep bf16 grouped GEMMs aligned.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 64,
    "d_model": 64,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 96,
    "d_ff": 96,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "ffn_hidden_size": 96,
    "moe_intermediate_size": 48,
    "moe_ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "d_kv": 16,
    "kv_channels": 16,
    "rotary_dim": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 16,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "zero_expert_num": 2,
    "num_experts_per_tok": TOP_K,
    "top_k_experts": TOP_K,
    "moe_topk": TOP_K,
    "moe_top_k": TOP_K,
    "moe_k": TOP_K,
    "enable_moe_block": True,
    "first_k_dense_replace": 0,
    "moe_layer_start_index": 0,
    "num_dense_layers": 0,
    "encoder_sparse_step": 1,
    "decoder_sparse_step": 1,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_n_heads": 8,
    "mamba_head_dim": 16,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_dt_rank": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "num_nextn_predict_layers": 0,
}
# What single types need on top, where the common values break a rule of their own.
_TYPES: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K},
    },
    "doge": {"is_moe": True, "num_experts": 16},  # product keys: a square
    "dots1": {"n_shared_experts": 1},
    "dots3_note_vision_encoder": {
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
        "mlp_layer_types": ["sparse", "sparse"],
    },
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [48, 48],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
    },
    "glm4v_moe_text": {
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    },
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "mistral4": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 8,
    },
    "step3p5": {"sliding_window": 128},
    "vitpose_backbone": {"num_experts": EXPERTS, "part_features": 16, "image_size": [64, 64]},
    "zaya": {"num_experts_per_tok": 1},
}
# Types whose embedding has a name that their own forward doesn't use.
_EMBEDDED = ("qwen3_omni_moe_talker_text",)
_LAYER_COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
)


def build(
    model_type: str,
    *,
    layers: int = 2,
    overrides: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    experts_implementation: str | None = None,
    tokens: int = 16,
    batch: int = 1,
    seed: int = 0,
    whole: bool = False,
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A tiny model of `model_type` with random weights in eval mode, and keyword arguments for one call.

    A multimodal type gives its language model; its other parts have types of their own. For a hybrid whose MoE
    blocks are layers of their own (nemotron_h), `layers` counts pairs of one mixer and one MoE block.

    Args:
        model_type: a key of transformers' CONFIG_MAPPING, or a module that has one (its first is taken).
        overrides: fields of the (text) configuration, applied after the shrinking.
        experts_implementation: "grouped_mm", "batched_mm", "eager", ...; None is transformers' own default.
        tokens, batch: as for `inputs`.
        seed: of weights and tokens; the global random state is left as it was.
        whole: of a multimodal type take the whole model, not its language model.

    Raises:
        ImportError: transformers is not installed.
        ValueError: unknown model type, unknown configuration field, or a size below 1.
    """
    for name, value in (("layers", layers), ("tokens", tokens), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    config = tiny_config(model_type, layers=layers, overrides=overrides, whole=whole)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = instantiate(config, dtype, experts_implementation)
        _randomise(model)
    model.eval()
    return model, inputs(model, tokens=tokens, batch=batch, seed=seed)


def inputs(model: torch.nn.Module, *, tokens: int = 16, batch: int = 1, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments for one call of a model that `build` made.

    `input_ids` int64 [batch, tokens]; where a model has no token embedding `inputs_embeds` [batch, tokens, H]; for an
    image encoder `pixel_values`: images [batch, C, H, W], whose size the configuration fixes, or `batch` images in
    `tokens` patches each. `seed` decides the values; the global random state isn't used.
    """
    config: Any = model.config
    taken = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    if "pixel_values" in taken and "input_ids" not in taken:
        kwargs = _image(config, taken, tokens, batch, generator)
        return kwargs | {"pixel_values": kwargs["pixel_values"].to(dtype)}
    if config.model_type in _EMBEDDED:
        shape = (batch, tokens, config.hidden_size)
        return {"inputs_embeds": torch.randn(shape, generator=generator).to(dtype), "use_cache": False}
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(3, vocabulary, (batch, tokens), generator=generator)
    kwargs = {"input_ids": ids}
    if "decoder_input_ids" in taken:
        kwargs["decoder_input_ids"] = ids.flip(-1)
    if hasattr(config, "use_cache"):
        kwargs["use_cache"] = False
    return kwargs


def _image(
    config: Any, taken: Mapping[str, Any], tokens: int, batch: int, generator: torch.Generator
) -> dict[str, Any]:
    if "grid_thw" in taken:  # patches of all images in one row, merged in squares afterwards
        side = config.spatial_merge_size
        if tokens % side**2:
            raise ValueError(f"tokens must be a multiple of {side**2} for this image encoder, got {tokens}")
        patch = config.num_channels * config.patch_size**2
        patches = torch.randn((batch * tokens, patch), generator=generator)
        return {"pixel_values": patches, "grid_thw": torch.tensor([[1, side, tokens // side]] * batch)}
    kwargs: dict[str, Any] = {
        "pixel_values": torch.randn((batch, config.num_channels, *config.image_size), generator=generator)
    }
    if "dataset_index" in taken:  # the expert of each image
        kwargs["dataset_index"] = torch.randint(0, config.num_experts, (batch,), generator=generator)
    return kwargs


def near(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'qwen3_moe'?`, or nothing where nothing is like it."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def model_types(module: str) -> tuple[str, ...]:
    """The model types whose configuration lives in a module below `transformers.models`, the shortest name first."""
    from transformers.models.auto import configuration_auto

    names = configuration_auto.CONFIG_MAPPING_NAMES
    found = [name for name in names if configuration_auto.model_type_to_module_name(name) == module]
    return tuple(sorted(found, key=lambda name: (len(name), name)))


def tiny_config(
    model_type: str, *, layers: int = 2, overrides: Mapping[str, Any] | None = None, whole: bool = False
) -> PretrainedConfig:
    """The shrunk (text) configuration of a model type; `whole`: with all parts. Errors as `build`."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise ImportError("hf: models need the transformers package: pip install transformers") from error
    if model_type not in CONFIG_MAPPING:
        model_type = next(iter(model_types(model_type)), model_type)
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"model_type must be one that transformers knows (such as qwen3_moe), got {model_type!r}; nothing is "
            f"downloaded: for a checkpoint give its config.json{near(model_type, CONFIG_MAPPING)}"
        )
    full = CONFIG_MAPPING[model_type]()
    # An encoder-decoder is its own text model: get_text_config would give only one half of it.
    default = full if full.is_encoder_decoder else full.get_text_config()
    if whole and default is not full:
        parts = {name: getattr(full, name) for name in full.sub_configs}
        tiny = {name: _shrunk(part, layers, {}) for name, part in parts.items() if part is not None}
        tiny["text_config"] = _shrunk(default, layers, overrides or {})
        complete: PretrainedConfig = type(full)(**tiny)
        return complete
    return _shrunk(default, layers, overrides or {})


def _shrunk(default: PretrainedConfig, layers: int, overrides: Mapping[str, Any]) -> PretrainedConfig:
    known = {*default.to_dict(), *default.attribute_map, *_TYPES.get(default.model_type, ())}
    fields = {name: value for name, value in _sizes(default, layers).items() if name in known}
    for name, value in overrides.items():
        if name not in known:
            raise ValueError(f"overrides: {type(default).__name__} has no field {name!r}{near(name, known)}")
        # num_experts and num_local_experts may be one field under two names: set it once, by its real name.
        fields[default.attribute_map.get(name, name)] = value
    config: PretrainedConfig = type(default)(**fields)
    return config


def _sizes(default: PretrainedConfig, layers: int) -> dict[str, Any]:
    """Small sizes for this configuration: the common table, the layer counts and what depends on them."""
    fields = default.to_dict()
    real = default.attribute_map  # other name -> field, such as num_experts -> num_local_experts
    sizes = {real.get(name, name): value for name, value in _SIZES.items()}
    depth = fields.get("num_hidden_layers", 0)
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == depth > 1:
            sizes[name] = _per_layer(value, layers)
        if name.endswith("_token_id") and isinstance(value, int) and value >= VOCAB:
            sizes[name] = {"pad_token_id": 0, "bos_token_id": 1}.get(name, 2)
    if fields.get("num_key_value_heads") == fields.get("num_attention_heads"):
        sizes["num_key_value_heads"] = sizes.get("num_attention_heads", 4)  # no grouped-query attention
    groups = real.get("n_group", "n_group")
    if (fields.get(groups) or 1) > 1:
        sizes |= {groups: 4, "topk_group": 2}
    rope = fields.get("rope_parameters") or {}
    if "mrope_section" in rope:  # the sections of multimodal RoPE sum to half of the rotated width
        half = int(_SIZES["head_dim"] * rope.get("partial_rotary_factor", 1)) // 2
        sizes["rope_parameters"] = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    if fields.get("layer_types", ()) is None:
        sizes["layer_types"] = ["full_attention"] * layers
    if fields.get("mlp_layer_types", ()) is None:
        sizes["mlp_layer_types"] = ["sparse"] * layers
    if "mlp_only_layers" in fields:
        sizes["mlp_only_layers"] = []  # layers without experts
    if "layers_block_type" in fields:
        mixers = ("full_attention", "linear_attention")
        sizes["layers_block_type"] = [kind for i in range(layers) for kind in (mixers[i % 2], "moe")]
    else:
        sizes |= {real.get(name, name): layers for name in _LAYER_COUNTS}
    return sizes | _TYPES.get(default.model_type, {})


def _per_layer(values: list[Any], layers: int) -> list[Any]:
    """A per-layer list for fewer layers: MoE where it says dense or sparse, else each kind in turn."""
    kinds = ["sparse"] if "sparse" in values else list(dict.fromkeys(values))
    if kinds == ["linear_attention"]:
        # a hybrid whose attention is left to the user: it has no cache without any
        kinds.append("full_attention")
    return [kinds[i % len(kinds)] for i in range(layers)]


def instantiate(
    config: PretrainedConfig, dtype: torch.dtype, experts_implementation: str | None
) -> torch.nn.Module:
    """The model with a language-model head where the type has one, else the first class that fits."""
    import transformers

    extra = {} if experts_implementation is None else {"experts_implementation": experts_implementation}
    for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText", "AutoModel"):
        auto = getattr(transformers, name)
        if type(config) not in auto._model_mapping:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kernels that aren't installed: no matter for a tiny model
            model: torch.nn.Module = auto.from_config(config, dtype=dtype, **extra)
        return model
    # The parts of some multimodal types have a class but no Auto entry; the last class in a file is the outermost.
    home = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    fitting: list[Any] = [
        cls
        for cls in vars(home).values()
        if inspect.isclass(cls)
        and issubclass(cls, transformers.PreTrainedModel)
        and cls.__module__ == home.__name__
        and getattr(cls, "config_class", None) is type(config)
        and "forward" in vars(cls)
    ]
    if not fitting:
        raise ValueError(f"model_type {config.model_type!r} has no transformers model of its own to build")
    part: torch.nn.Module = fitting[-1]._from_config(config, dtype=dtype, **extra)
    return part


@torch.no_grad()
def _randomise(model: torch.nn.Module) -> None:
    """Spread the weights so that routing isn't degenerate.

    Matrices get variance 1 / fan-in: transformers' own 0.02 would leave all router logits near 0 and every
    expert's output below rounding. Embeddings get variance 1, or the mean that attention adds would drown
    the token and all tokens would choose the same experts. Vectors (norms, biases, per-expert scales,
    selection biases) keep their value plus noise: a plain normal draw would switch half of a norm off.
    """
    heads = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Linear)}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point() or tensor.ndim == 0 or "inv_freq" in name:
            continue
        if isinstance(tensor, torch.nn.Parameter) and tensor.ndim >= 2 and "correction_bias" not in name:
            # A tied embedding is the output matrix as well: between the two, or the logits would be all peaks.
            tied = 0.5 if id(tensor) in heads else 1.0
            wide = tied if id(tensor) in embeddings else 1 / math.sqrt(tensor.shape[-1])
            tensor.normal_(std=wide)
        elif isinstance(tensor, torch.nn.Parameter) or name.endswith("bias"):
            tensor.add_(torch.randn_like(tensor), alpha=0.05)
