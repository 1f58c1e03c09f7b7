"""CPU time of moefuse's passes, per MoE layer and against the whole compile, on transformers models.

In: family, layers, experts implementation, static or symbolic sizes. Out: a table. All layers and experts are there,
the widths are tiny: the passes' work depends on the number of nodes alone. Needs transformers.

    python benchmarks/passes.py                                     2 to 94 layers, 128 experts each
    python benchmarks/passes.py --family gpt_oss --experts-implementation batched_mm --layers 2,8 --dynamic
    python benchmarks/passes.py --compile --layers 2,4              the share of a cold compile with Inductor
    python benchmarks/passes.py --profile --layers 24               where the time goes
"""

import argparse
import cProfile
import functools
import gc
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from capture import EXPERTS, FAMILIES, SIZES  # beside this script
from torch import fx
from torch._dynamo.utils import counters

import moefuse
from moefuse.graph.capture import capture
from moefuse.options import Options
from moefuse.passes import pipeline

NARROW = {"hidden_size": 32, "moe_intermediate_size": 16, "intermediate_size": 16, "num_experts_per_tok": 8}
OF_FX = ("eliminate_dead_code", "lint", "recompile")
"""Parts of the passes that are torch.fx's own."""


def build(family: str, layers: int, experts: int, implementation: str) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    counts = dict.fromkeys(EXPERTS, experts)
    config = AutoConfig.for_model(
        family, **(SIZES | FAMILIES[family] | NARROW | counts | {"num_hidden_layers": layers})
    )
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation=implementation
    )
    return model.eval()


@contextmanager
def clocked(seconds: dict[str, float]) -> Iterator[None]:
    """Add up the CPU time of torch.fx's parts and of garbage collections."""
    start = [0.0]

    def collected(phase: str, _: Any) -> None:
        if phase == "start":
            start[0] = time.process_time()
        else:
            seconds["gc"] += time.process_time() - start[0]

    def timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] += time.process_time() - begin

        return call

    seconds.update(dict.fromkeys((*OF_FX, "gc"), 0.0))
    gc.callbacks.append(collected)
    try:
        with (
            mock.patch.object(fx.Graph, OF_FX[0], timed(fx.Graph.eliminate_dead_code, OF_FX[0])),
            mock.patch.object(fx.Graph, OF_FX[1], timed(fx.Graph.lint, OF_FX[1])),
            mock.patch.object(fx.GraphModule, OF_FX[2], timed(fx.GraphModule.recompile, OF_FX[2])),
        ):
            yield
    finally:
        gc.callbacks.remove(collected)


def passes(arguments: argparse.Namespace, layers: int) -> dict[str, float]:
    """Capture the model once and run the passes over the graph."""
    found: dict[str, float] = {}

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        start = time.process_time()
        captured = capture(gm, example_inputs)
        found["capture"] = time.process_time() - start
        found["nodes"] = len(captured.graph_module.graph.nodes)
        profile = cProfile.Profile()
        with clocked(found):
            start = time.process_time()
            run = profile.runcall if arguments.profile else lambda f, *args: f(*args)
            run_passes = functools.partial(pipeline.run, training=False)
            result = run(run_passes, captured.graph_module, captured.parameters, Options())
            found["passes"] = time.process_time() - start
        found.update(result.seconds)
        found["fused"] = sum(layer.fused for layer in result.layers)
        if arguments.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25).sort_stats("cumtime").print_stats(40)
        return gm.forward

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build(arguments.family, layers, arguments.experts, arguments.experts_implementation)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=arguments.dynamic or None)
    with torch.no_grad():
        compiled(torch.zeros(1, 16, dtype=torch.long), use_cache=False)
    return found


def table(arguments: argparse.Namespace) -> None:
    columns = ("nodes", "fused", "canonicalize", "lift", "fuse", *OF_FX, "gc", "passes")
    print(f"{arguments.family}, {arguments.experts_implementation}, {arguments.experts} experts, "
          f"{'symbolic' if arguments.dynamic else 'static'} sizes; CPU milliseconds")  # fmt: skip
    print(
        "layers" + "".join(f"{name:>{len(name) + 2}}" for name in columns) + "  per layer  us/node  capture"
    )
    for layers in arguments.layers:
        row = passes(arguments, layers)
        cells = [
            f"{row[name] if name in ('nodes', 'fused') else row[name] * 1e3:{len(name) + 2}.0f}"
            for name in columns
        ]
        print(
            f"{layers:6}{''.join(cells)}{row['passes'] * 1e3 / max(row['fused'], 1):11.1f}"
            f"{row['passes'] * 1e6 / row['nodes']:9.1f}{row['capture'] * 1e3:9.0f}",
            flush=True,
        )


def one_compile(arguments: argparse.Namespace, layers: int) -> dict[str, float]:
    """Compile in this process with cold caches. CPU seconds, compiler processes included."""
    model = build(arguments.family, layers, arguments.experts, arguments.experts_implementation)
    compiled = torch.compile(
        model, backend=arguments.backend, fullgraph=True, dynamic=arguments.dynamic or None
    )
    start = os.times()
    with torch.no_grad():
        compiled(torch.zeros(1, 16, dtype=torch.long), use_cache=False)
    cpu = sum(os.times()[:4]) - sum(start[:4])
    seconds = Counter[str]()
    for graph in (graph for report in moefuse.reports() for graph in report.graphs):
        seconds.update(graph.seconds)
    hits = counters["inductor"]["fxgraph_cache_hit"]
    capture = seconds.pop("capture", 0.0)
    return {"cpu": cpu, "hits": hits, "capture": capture, "passes": sum(seconds.values())}


def shares(arguments: argparse.Namespace) -> None:
    print(f"{arguments.family}, {arguments.experts_implementation}, cold compile with Inductor; CPU seconds")
    print("layers  inductor  moefuse  passes          functional trace  (shares of the compile with moefuse)")
    for layers in arguments.layers:
        runs = {backend: in_process(arguments, layers, backend) for backend in ("inductor", "moefuse")}
        ours, cpu = runs["moefuse"], runs["moefuse"]["cpu"]
        print(
            f"{layers:6}{runs['inductor']['cpu']:10.1f}{cpu:9.1f}{ours['passes']:8.3f} ={ours['passes'] / cpu:5.1%}"
            f"{ours['capture']:11.2f} ={ours['capture'] / cpu:6.1%}",
            flush=True,
        )


def in_process(arguments: argparse.Namespace, layers: int, backend: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, __file__, "--one", "--backend", backend, "--layers", str(layers)]
        command += ["--family", arguments.family, "--experts", str(arguments.experts)]
        command += ["--experts-implementation", arguments.experts_implementation]
        command += ["--dynamic"] if arguments.dynamic else []
        out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, float] = json.loads(out.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--family", default="qwen3_moe", choices=list(FAMILIES))
    parser.add_argument("--experts-implementation", default="grouped_mm")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument(
        "--layers", type=lambda text: [int(n) for n in text.split(",")], default=[2, 8, 24, 48, 94]
    )
    parser.add_argument("--dynamic", action="store_true", help="symbolic sizes")
    parser.add_argument("--compile", action="store_true", help="shares of a cold compile")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="moefuse", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    torch.set_num_threads(1)
    if arguments.one:
        print(json.dumps(one_compile(arguments, arguments.layers[0])))
    elif arguments.compile:
        shares(arguments)
    else:
        table(arguments)


if __name__ == "__main__":
    main()
