"""Models from a word: a checkpoint's configuration in its real sizes without weights, exported programs."""

import json

import pytest
import torch

import moefuse
from moefuse import hf
from moefuse.models import TargetError, checkpoint_config, load
from tests.report.models import H, model

pytest.importorskip("transformers")


@pytest.fixture
def checkpoint(tmp_path):
    """The folder of a checkpoint without weights: three layers, as large as a real model's."""
    config = hf.tiny_config("qwen3_moe", layers=3).to_dict()
    config.pop("num_local_experts")  # as the model's own file has it: under its other name
    config |= {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_experts": 128, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_configuration_becomes_a_model_without_weights(checkpoint, name):
    module, args, kwargs = load(f"hf:{checkpoint / name}", {"tokens": 5})
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert not module.training
    assert args == ()
    assert kwargs["input_ids"].shape == (1, 5)
    assert kwargs["input_ids"].is_meta


def test_its_real_sizes_are_explained(checkpoint):
    module, _, kwargs = load(f"hf:{checkpoint}", {"layers": 1})
    with torch.no_grad():
        (site,) = moefuse.explain(module, **kwargs).sites
    assert (site.fused, site.target) == (True, "cpu")
    assert site.spec.describe() == "128 experts, top-2, 4096 -> 1536 (swiglu) -> 4096, bfloat16"
    assert site.bytes == 128 * 3 * 4096 * 1536 * 2


def test_layers_and_fields_change_what_is_built(checkpoint):
    data = json.loads((checkpoint / "config.json").read_text())
    data["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    (checkpoint / "config.json").write_text(json.dumps(data))
    config = checkpoint_config(checkpoint, layers=2, overrides={"num_experts": 16})
    assert (config.num_hidden_layers, config.num_experts) == (2, 16)
    assert config.layer_types == ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 4}, "the configuration has 3 layers, got 4"),
        ({"overrides": {"foo": 1}}, "Qwen3MoeConfig has no field 'foo'"),
    ],
)
def test_what_a_configuration_cant_be(checkpoint, options, message):
    with pytest.raises(TargetError, match=message):
        load(f"hf:{checkpoint}", options)


def test_a_configuration_that_transformers_doesnt_know(checkpoint):
    (checkpoint / "config.json").write_text('{"model_type": "nope"}')
    with pytest.raises(TargetError, match="nope"):
        load(f"hf:{checkpoint}", {})
    with pytest.raises(TargetError, match="no such file"):
        load(f"hf:{checkpoint}/other.json", {})


def test_meta_gives_a_model_type_any_size_for_nothing():
    options = {"meta": True, "layers": 1, "overrides": {"hidden_size": 8192, "num_experts": 256}}
    module, _, kwargs = load("hf:qwen3_moe", options)
    assert sum(p.numel() for p in module.parameters()) > 3e8
    assert all(p.is_meta for p in module.parameters())
    assert kwargs["input_ids"].is_meta


def test_an_exported_program(tmp_path):
    program = torch.export.export(model("sum").requires_grad_(False), (torch.randn(6, H),))
    torch.export.save(program, tmp_path / "p.pt2")
    loaded = load(f"export:{tmp_path / 'p.pt2'}", {})
    assert moefuse.explain(loaded.model).fused == 1
    with pytest.raises(TargetError, match="--meta need an hf: target"):
        load(f"export:{tmp_path / 'p.pt2'}", {"meta": True})
