"""The pass inside the real torchair, on the emulated runtime.

All in one process of its own: torchair and npugraph_ex register the same overrides of torch and don't go into one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("torchair")
    for name in ("ge", "export", "quantised"):
        (folder / name).mkdir()
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.npu.torchair_program", str(folder)],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("mode", ["reduce-overhead", "npugraph_ex"])
def test_one_node(mode: str, said: dict[str, Any]) -> None:
    nodes, error, fused = said[mode]
    assert (nodes, fused) == ([1], 1)
    assert error < 2e-2  # bfloat16 has eight bits; both sides round their intermediate values


def test_reduce_overhead_captures_the_nodes_on_the_emulated_device(said: dict[str, Any]) -> None:
    assert said["captured"] == [[2], [True] * 3]


def test_as_the_inner_compiler_of_moefuse(said: dict[str, Any]) -> None:
    error, fused, refused = said["inner"]
    assert fused == 1
    assert error < 2e-2  # bfloat16, as above
    assert "torchair's CompilerConfig has no 'debug.run_fast'" in refused


def test_a_ge_graph_has_one_operator_per_layer(said: dict[str, Any]) -> None:
    errors, nodes, refused = said["ge"]
    assert errors == [0.0, 0.0]  # the same library computed both sides
    uniform, filled = nodes[:2]
    wanted = {
        "[i]context",
        "[i]x",
        "[i]topk_ids",
        "[i]topk_weights",
        "[i]weight10",
        "[i]weight11",
        "[i]weight20",
    }
    wanted |= {"[o]y", "[o]expert_token_nums", "moe_expert_num", "ep_world_size", "ccl_buffer_size"}
    wanted |= {"num_max_tokens_per_rank", "activation", "activation_params"}
    for keys in (*uniform, *filled):
        assert wanted <= set(keys)
        assert "dispatch_quant_out_dtype" not in keys  # GE's default is another number than the C interface's
    assert (len(uniform), len(filled)) == (2, 2)
    assert not any("[i]x_active_mask" in keys for keys in uniform)
    assert all("[i]x_active_mask" in keys for keys in filled)
    assert "2 open contexts fit this layer" in refused


def test_quantised_experts_are_one_operator_too(said: dict[str, Any]) -> None:
    error, nodes, encoded = said["quantised"]
    assert error == 0.0  # the same library computed both sides
    wanted = {f"[i]{name}{e}" for name in ("weight1", "weight_scales1", "weight_scales2") for e in (0, 1)}
    wanted |= {"dispatch_quant_mode", "dispatch_quant_out_dtype"}
    assert [wanted <= set(keys) for keys in nodes] == [True] * 2
    assert not any("[i]bias10" in keys for keys in nodes)
    assert encoded == 8  # a float32 scale of each expert, of both GEMMs of two layers


def test_export_writes_a_model_with_one_operator(said: dict[str, Any]) -> None:
    assert said["exported"] == [1, True]
