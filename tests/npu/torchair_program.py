"""What `test_torchair.py` looks at: torchair's modes, one after the other, in a process of their own.

In: a folder to write to. Out: a line of JSON, the results by name.
"""

# ruff: noqa: E402  (the emulated libraries are loaded before torch_npu)

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.npu.emulator import install

install()

import torch
import torchair

import moefuse
from moefuse import targets
from moefuse.passes import as_torchair_pass
from moefuse.targets.npu import close_npu_contexts
from tests.npu.emulator.engine import pretended_engine
from tests.npu.expert_parallel import H, Layers, QuantisedLayers, vendor
from tests.npu.sequences import SEQUENCES
from tests.npu.test_sequences import operands

Graphs = list[list[str]]


def configured(mode: str, **debug: Any) -> tuple[Any, Graphs]:
    """A configuration with the pass, and the operators of the graphs that it will have compiled."""
    torch._dynamo.reset()
    config, seen = torchair.CompilerConfig(), []
    config.mode = mode
    for name, value in debug.items():
        setattr(config.debug, name, value)
    config.post_grad_custom_pre_pass = as_torchair_pass()
    config.post_grad_custom_post_pass = lambda gm, *_: seen.append([str(n.target) for n in gm.graph.nodes])
    return config, seen


def compiled(module: Any, config: Any) -> Callable[..., Any]:
    return torch.compile(module, backend=torchair.get_npu_backend(compiler_config=config), fullgraph=True)


def one_node(mode: str) -> Any:
    layer, inputs = SEQUENCES["sglang_bf16"], operands(6)
    config, seen = configured(mode, run_eagerly=True)
    error = float((compiled(layer, config)(*inputs) - layer(*inputs)).abs().max())
    return [[graph.count("moefuse.mega_moe.default") for graph in seen], error, moefuse.reports()[-1].fused]


def captured() -> Any:
    config, seen = configured("reduce-overhead")
    equal = []
    with vendor(on_streams=True):
        model = Layers(2, True, device="npu", named=True).eval()
        run = compiled(model, config)
        for turn in range(3):
            x = torch.randn(6, H, generator=torch.Generator().manual_seed(turn)).bfloat16().npu()
            equal.append(run(x).cpu().equal(model(x).cpu()))
    return [[graph.count("moefuse.mega_moe.ep") for graph in seen], equal]


def as_inner() -> Any:
    torch._dynamo.reset()
    layer, inputs = SEQUENCES["sglang_bf16"], operands(6)
    config = {"mode": "reduce-overhead", "debug.run_eagerly": True}
    options: dict[str, Any] = {"inner": "torchair", "inner_options": config}
    run = torch.compile(layer, backend="moefuse", options=options)
    error = float((run(*inputs) - layer(*inputs)).abs().max())
    fused = moefuse.reports()[-1].fused
    torch._dynamo.reset()
    options["inner_options"] = {"debug.run_fast": True}
    return [error, fused, raised(lambda: torch.compile(layer, backend="moefuse", options=options)(*inputs))]


def in_ge(folder: Path) -> Any:
    """Errors, the names of what each MegaMoe of two graphs has, and why a third one isn't made."""
    errors, nodes = [], []
    with pretended_engine(), vendor():
        x = torch.randn(6, H).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        for uniform, listed in ((True, True), (False, False)):
            config, _ = configured("max-autotune", run_eagerly=True)
            config.debug.graph_dump.type, config.debug.graph_dump.path = "pbtxt", str(folder)
            model = Layers(2, uniform, listed, named=uniform).eval()
            errors.append(float((compiled(model, config)(x) - model(x)).abs().max()))
            close_npu_contexts()
        config, _ = configured("max-autotune", run_eagerly=True)
        models = [Layers(1, True, True) for _ in range(2)]
        said = raised(lambda: compiled(models[0], config)(x))
    for path in sorted(folder.iterdir()):
        parts = [part for part in re.split("(?m)^node {", path.read_text()) if 'op: "MegaMoe"' in part]
        nodes.append([re.findall('key: "([^"]*)"', part) for part in parts])
    return [errors, nodes, said]


def quantised_in_ge(folder: Path) -> Any:
    """The error, and the names of what each MegaMoe has, beside the operators that encode its scales."""
    torch.npu.config.allow_internal_format = True
    with pretended_engine(), vendor(on_streams=True):
        targets.get("npu").tell(weights_cast=True)  # type: ignore[attr-defined]
        x = torch.randn(6, H).bfloat16().npu()
        config, _ = configured("max-autotune", run_eagerly=True)
        config.debug.graph_dump.type, config.debug.graph_dump.path = "pbtxt", str(folder)
        model = QuantisedLayers(2, "npu").eval()
        error = float((compiled(model, config)(x).cpu() - model(x).cpu()).abs().max())
    (text,) = (path.read_text() for path in folder.iterdir())
    parts = re.split("(?m)^node {", text)
    nodes = [re.findall('key: "([^"]*)"', part) for part in parts if 'op: "MegaMoe"' in part]
    return [error, nodes, text.count('op: "Bitcast"')]


def exported(folder: Path) -> Any:
    config, _ = configured("max-autotune")
    with pretended_engine(), vendor():
        x = torch.zeros(6, H, dtype=torch.bfloat16)
        torchair.dynamo_export(
            x, model=Layers(1, True, True), export_path=str(folder), export_name="moe", config=config
        )
    text, model = (folder / name for name in ("dynamo.pbtxt", "moe.air"))
    return [text.read_text().count('op: "MegaMoe"'), model.read_bytes().count(b"MegaMoe") > 0]


def raised(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    with torch.no_grad():
        result = {mode: one_node(mode) for mode in ("reduce-overhead", "npugraph_ex")}
        result |= {"captured": captured(), "inner": as_inner()}
        result |= {"ge": in_ge(folder / "ge"), "exported": exported(folder / "export")}
        result["quantised"] = quantised_in_ge(folder / "quantised")
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
