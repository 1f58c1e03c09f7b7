"""The pass inside the real torchair, on the emulated runtime.

Each mode in a process of its own: torchair and npugraph_ex register the same overrides of torch and don't go into one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import json
from tests.npu.emulator import install
install()
import torch, torchair, moefuse
from moefuse.passes import as_torchair_pass
from tests.npu.sequences import SEQUENCES
from tests.npu.test_sequences import operands

config, seen = torchair.CompilerConfig(), []
config.mode = MODE
config.debug.run_eagerly = True
config.post_grad_custom_pre_pass = as_torchair_pass()
config.post_grad_custom_post_pass = lambda gm, *_: seen.append([str(node.target) for node in gm.graph.nodes])
layer, inputs = SEQUENCES["sglang_bf16"], operands(6)
with torch.no_grad():
    run = torch.compile(layer, backend=torchair.get_npu_backend(compiler_config=config))
    error = float((run(*inputs) - layer(*inputs)).abs().max())
print(json.dumps({"graphs": seen, "error": error, "fused": moefuse.reports()[-1].fused}))
"""


def in_its_own_process(code: str) -> Any:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("mode", ["reduce-overhead", "npugraph_ex"])
def test_one_node(mode: str) -> None:
    said = in_its_own_process(CODE.replace("MODE", repr(mode)))
    assert [graph.count("moefuse.mega_moe.default") for graph in said["graphs"]] == [1]
    assert said["fused"] == 1
    assert said["error"] < 2e-2  # bfloat16 has eight bits; both sides round their intermediate values


CAPTURED = """
import json
from tests.npu.emulator import install
install()
import torch, torchair
from moefuse.passes import as_torchair_pass
from tests.npu.expert_parallel import H, Layers, vendor

config, seen, equal = torchair.CompilerConfig(), [], []
config.mode = "reduce-overhead"
config.post_grad_custom_pre_pass = as_torchair_pass()
config.post_grad_custom_post_pass = lambda gm, *_: seen.append([str(node.target) for node in gm.graph.nodes])
with torch.no_grad(), vendor(on_streams=True):
    model = Layers(2, True, device="npu", named=True).eval()
    run = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True)
    for turn in range(3):
        x = torch.randn(6, H, generator=torch.Generator().manual_seed(turn)).bfloat16().npu()
        equal.append(run(x).cpu().equal(model(x).cpu()))
print(json.dumps({"graphs": seen, "equal": equal}))
"""


def test_reduce_overhead_captures_the_nodes_on_the_emulated_device() -> None:
    said = in_its_own_process(CAPTURED)
    assert [graph.count("moefuse.mega_moe.ep") for graph in said["graphs"]] == [2]
    assert said["equal"] == [True] * 3


AS_INNER = """
import json
from tests.npu.emulator import install
install()
import torch, moefuse
from tests.npu.sequences import SEQUENCES
from tests.npu.test_sequences import operands

layer, inputs = SEQUENCES["sglang_bf16"], operands(6)
config = {"mode": "reduce-overhead", "debug.run_eagerly": True}
options = {"inner": "torchair", "inner_options": config}
with torch.no_grad():
    run = torch.compile(layer, backend="moefuse", options=options)
    error = float((run(*inputs) - layer(*inputs)).abs().max())
    fused = moefuse.reports()[-1].fused
    try:
        torch._dynamo.reset()
        options["inner_options"] = {"debug.run_fast": True}
        torch.compile(layer, backend="moefuse", options=options)(*inputs)
        said = ""
    except Exception as raised:
        said = str(raised)
print(json.dumps({"error": error, "fused": fused, "said": said}))
"""


def test_as_the_inner_compiler_of_moefuse() -> None:
    said = in_its_own_process(AS_INNER)
    assert said["fused"] == 1
    assert said["error"] < 2e-2  # bfloat16, as above
    assert "torchair's CompilerConfig has no 'debug.run_fast'" in said["said"]


GE = """
import json, re
from pathlib import Path
from tests.npu.emulator import install
install()
import torch, torchair, moefuse
from moefuse.passes import as_torchair_pass
from moefuse.targets.npu import close_npu_contexts
from tests.npu.emulator.engine import pretended_engine
from tests.npu.expert_parallel import H, Layers, vendor

config = torchair.CompilerConfig()
config.mode = "max-autotune"
config.debug.run_eagerly = True
config.debug.graph_dump.type = "pbtxt"
config.debug.graph_dump.path = FOLDER
config.post_grad_custom_pre_pass = as_torchair_pass()
errors = []
with pretended_engine(), torch.no_grad(), vendor() as library:
    for uniform, listed in ((True, True), (False, False)):
        torch._dynamo.reset()
        model = Layers(2, uniform, listed, named=uniform).eval()
        x = torch.randn(6, H).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        run = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True)
        errors.append(float((run(x) - model(x)).abs().max()))
        close_npu_contexts()
    refused = Layers(1, True, True)
    again = Layers(1, True, True)
    torch._dynamo.reset()
    try:
        torch.compile(refused, backend=torchair.get_npu_backend(compiler_config=config))(x)
        said = ""
    except Exception as error:
        said = str(error)
nodes = []
for path in sorted(Path(FOLDER).iterdir()):
    text = [part for part in re.split("(?m)^node {", path.read_text()) if 'op: "MegaMoe"' in part]
    nodes.append([re.findall('key: "([^"]*)"', part) for part in text])
print(json.dumps({"errors": errors, "nodes": nodes, "said": said}))
"""


def test_a_ge_graph_has_one_operator_per_layer(tmp_path: Path) -> None:
    said = in_its_own_process(GE.replace("FOLDER", repr(str(tmp_path))))
    assert said["errors"] == [0.0, 0.0]  # the same library computed both sides
    uniform, filled = said["nodes"][:2]
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
    assert "2 open contexts fit this layer" in said["said"]


EXPORTED = """
import json
from pathlib import Path
from tests.npu.emulator import install
install()
import torch, torchair
from moefuse.passes import as_torchair_pass
from tests.npu.emulator.engine import pretended_engine
from tests.npu.expert_parallel import H, Layers, vendor

config = torchair.CompilerConfig()
config.post_grad_custom_pre_pass = as_torchair_pass()
with pretended_engine(), torch.no_grad(), vendor():
    x = torch.zeros(6, H, dtype=torch.bfloat16)
    torchair.dynamo_export(x, model=Layers(1, True, True), export_path=FOLDER, export_name="moe", config=config)
text, model = (Path(FOLDER) / name for name in ("dynamo.pbtxt", "moe.air"))
print(json.dumps([text.read_text().count('op: "MegaMoe"'), model.read_bytes().count(b"MegaMoe") > 0]))
"""


def test_export_writes_a_model_with_one_operator(tmp_path: Path) -> None:
    assert in_its_own_process(EXPORTED.replace("FOLDER", repr(str(tmp_path)))) == [1, True]
