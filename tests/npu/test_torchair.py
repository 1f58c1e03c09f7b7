"""The pass inside the real torchair, which compiles for a pretended device (emulated; see device.py).

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
from tests.npu.emulator.device import pretended
from tests.npu.sequences import SEQUENCES
from tests.npu.test_sequences import operands

config, seen = torchair.CompilerConfig(), []
config.mode = MODE
config.debug.run_eagerly = True
config.post_grad_custom_pre_pass = as_torchair_pass()
config.post_grad_custom_post_pass = lambda gm, *_: seen.append([str(node.target) for node in gm.graph.nodes])
layer, inputs = SEQUENCES["sglang_bf16"], operands(6)
with pretended(), torch.no_grad():
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


AS_INNER = """
import json
from tests.npu.emulator import install
install()
import torch, moefuse
from tests.npu.emulator.device import pretended
from tests.npu.sequences import SEQUENCES
from tests.npu.test_sequences import operands

layer, inputs = SEQUENCES["sglang_bf16"], operands(6)
config = {"mode": "reduce-overhead", "debug.run_eagerly": True}
options = {"inner": "torchair", "inner_options": config}
with pretended(), torch.no_grad():
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
