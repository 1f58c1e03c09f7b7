import contextlib

import pytest
import torch
from torch.utils import _pytree as pytree

pytest.importorskip("transformers")

from moefuse import hf

TYPES = [
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
    "nemotron_h",
    "gemma4",
    "llama4",
    "olmoe",
    "granitemoe",
    "minimax_m3_vl",
    "qwen2_moe",
    "glm4_moe",
    "ernie4_5_moe",
]


@contextlib.contextmanager
def chosen_experts():
    """Ids of every last-dim top-k over the experts that runs inside, [T, K] each."""
    seen, plain = [], torch.topk

    def topk(values, k, *args, **kwargs):
        result = plain(values, k, *args, **kwargs)
        if values.shape[-1] == hf.EXPERTS and values.ndim == 2:
            seen.append(result.indices)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", topk)
        patch.setattr(torch.Tensor, "topk", topk)
        yield seen


@pytest.mark.parametrize("model_type", TYPES)
def test_models_run_and_use_their_experts(model_type):
    model, kwargs = hf.build(model_type)
    assert not model.training
    with torch.no_grad(), chosen_experts() as chosen:
        logits = model(**kwargs).logits
    assert logits.shape == (1, 16, hf.VOCAB)
    assert logits.isfinite().all()
    assert logits.std() > 0.05
    assert len(chosen) == 2  # one router per layer
    for ids in chosen:
        assert ids.shape == (16, hf.TOP_K)
        assert len(ids.unique()) > hf.EXPERTS // 2
        assert len(ids.sort(-1).values.unique(dim=0)) > 2  # tokens differ in their experts


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_the_experts_matter_to_the_output(model_type):
    model, kwargs = hf.build(model_type, layers=1)
    with torch.no_grad():
        before = model(**kwargs).logits
        for name, parameter in model.named_parameters():
            if name.endswith("experts.down_proj"):
                parameter.zero_()
        after = model(**kwargs).logits
    # Of the logits' standard deviation of about 1: an expert part below this could hide a wrong fusion.
    assert (before - after).std() > 0.2


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("inkling", "input_ids"),  # a module none of whose model types has its name
        ("ernie4_5_vl_moe", "input_ids"),
        ("qwen3_omni_moe_talker_text", "inputs_embeds"),
        ("dots3_note_vision_encoder", "pixel_values"),
        ("vitpose_backbone", "pixel_values"),
        ("nllb_moe", "decoder_input_ids"),
    ],
)
def test_parts_and_modules_are_built_with_inputs_of_their_kind(name, given):
    model, kwargs = hf.build(name, batch=2, dtype=torch.bfloat16)
    assert given in kwargs
    with torch.no_grad():
        outputs = model(**kwargs)
    values = [value for value in pytree.tree_leaves(dict(outputs)) if isinstance(value, torch.Tensor)]
    assert values
    assert all(value.isfinite().all() for value in values)


def test_the_whole_of_a_multimodal_model():
    part, whole = (hf.build("diffusion_gemma", whole=whole)[0] for whole in (False, True))
    names = {type(module).__name__ for module in whole.modules()} - {type(m).__name__ for m in part.modules()}
    assert "DiffusionGemmaDecoderTextLayer" in names


def test_options_reach_the_model():
    model, kwargs = hf.build(
        "qwen3_moe",
        layers=3,
        overrides={"num_experts": 16, "norm_topk_prob": True},
        dtype=torch.bfloat16,
        experts_implementation="batched_mm",
        tokens=5,
        batch=2,
    )
    assert len(model.model.layers) == 3
    assert model.config.num_local_experts == 16
    assert model.config.norm_topk_prob is True
    assert model.config._experts_implementation == "batched_mm"
    assert model.model.layers[0].mlp.experts.down_proj.shape[0] == 16
    assert model.dtype == torch.bfloat16
    assert kwargs["input_ids"].shape == (2, 5)


def test_the_seed_decides_and_the_global_state_is_kept():
    before = torch.get_rng_state()
    first, second, other = (hf.build("mixtral", seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not any(torch.equal(a, c) for a, _, c in pairs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_type": "nope"}, "model_type must be one that transformers knows"),
        ({"model_type": "dots3_note_vision_encoder", "tokens": 6}, "tokens must be a multiple of 4"),
        ({"model_type": "qwen3moe"}, "did you mean 'qwen3_moe'?"),
        (
            {"model_type": "Qwen/Qwen3-30B-A3B"},
            "nothing is downloaded: for a checkpoint give its config.json",
        ),
        ({"model_type": "mixtral", "overrides": {"foo": 1}}, "MixtralConfig has no field 'foo'"),
        (
            {"model_type": "mixtral", "overrides": {"num_local_expert": 1}},
            "did you mean 'num_local_experts'?",
        ),
        ({"model_type": "mixtral", "layers": 0}, "layers must be at least 1, got 0"),
        ({"model_type": "mixtral", "tokens": 0}, "tokens must be at least 1, got 0"),
        ({"model_type": "mixtral", "batch": -1}, "batch must be at least 1, got -1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        hf.build(**arguments)


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "jamba"])
def test_hybrids_keep_a_layer_of_attention(model_type):
    kinds = hf.tiny_config(model_type).layers_block_type
    assert len(set(kinds)) == 2
    assert {"attention", "full_attention"} & set(kinds)
