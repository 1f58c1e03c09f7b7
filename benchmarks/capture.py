"""What capture costs and whether it is exact, on tiny random models of many families.

python benchmarks/capture.py cost      CPU seconds of the trace against the whole cold compile
python benchmarks/capture.py sweep     captured graph against eager, bit for bit, per family
python benchmarks/capture.py cache     Inductor and AOTAutograd cache hits in a second process
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from moefuse.graph.capture import Captured, capture
from moefuse.inner import compile_inner

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "mixtral": {},
    "gpt_oss": {},
    "llama4_text": {"intermediate_size_mlp": 64, "interleave_moe_layer_step": 1},
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": 2,
        "vocab_size_per_layer_input": 64,
    },
    "nemotron_h": {
        "layers_block_type": ["attention", "moe"],
        "moe_shared_expert_intermediate_size": 48,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


def build(family: str, dtype: torch.dtype, layers: int = 2) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    options = SIZES | EXPERTS | {"num_hidden_layers": layers} | FAMILIES[family]
    config = AutoConfig.for_model(family, **options)
    implementation = "eager" if family.startswith("llama4") else "grouped_mm"
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=dtype, experts_implementation=implementation
    )
    return model.eval()


def backend(log: list[Captured], seconds: list[float], inner: str) -> Callable[..., Any]:
    def compile_graph(gm: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Callable[..., Any]:
        start = time.process_time()
        captured = capture(gm, example_inputs)
        seconds.append(time.process_time() - start)
        log.append(captured)
        return compile_inner(captured.graph_module, example_inputs, inner, original=gm)

    return compile_graph


def check(family: str, dtype: torch.dtype, dynamic: bool, training: bool) -> str:
    torch._dynamo.reset()
    model = build(family, dtype)
    log: list[Captured] = []
    compiled = torch.compile(
        model, backend=backend(log, [], "eager"), fullgraph=True, dynamic=True if dynamic else None
    )
    # transformers takes another path when it isn't compiled: gradients are compared with Dynamo's graph.
    reference = torch.compile(model, backend="eager", fullgraph=True) if training else model
    notes: list[str] = []
    for length in (16, 24) if dynamic else (16,):
        ids = torch.randint(0, 64, (2, length))
        with torch.set_grad_enabled(training):
            expected, actual = (m(ids, use_cache=False).logits for m in (reference, compiled))
        if not torch.equal(expected, actual):
            notes.append(f"differs by {(expected - actual).abs().max():.1e}")
        if training:
            weights = list(model.parameters())
            grads = [
                torch.autograd.grad(
                    y.float().square().mean(), weights, allow_unused=True, materialize_grads=True
                )
                for y in (expected, actual)
            ]
            worst = max((a - b).abs().max().item() for a, b in zip(*grads, strict=True))
            if worst:
                notes.append(f"gradients differ by {worst:.1e}")
    nodes = [n for c in log for n in c.graph_module.graph.nodes if n.op == "call_function"]
    writes = [
        n
        for n in nodes
        if isinstance(n.target, torch._ops.OpOverload)
        and n.target._schema.is_mutable
        and n.target is not torch.ops.aten.copy_.default
    ]
    if writes:
        notes.append(f"not functional: {writes[0].target}")
    kept = sum("nn_module_stack" in n.meta for n in nodes) / len(nodes)
    verdict = "; ".join(notes) or "exact"
    return f"{verdict}, {len(log)} graphs, {len(nodes)} nodes, module paths on {kept:.1%}"


def sweep(families: list[str]) -> None:
    for family in families:
        for dtype in (torch.bfloat16, torch.float32):
            for dynamic, training in ((False, False), (True, False), (False, True)):
                label = f"{family:12} {str(dtype)[6:]:9} {'dynamic' if dynamic else 'static':8}"
                label += "train" if training else "infer"
                try:
                    print(label, check(family, dtype, dynamic, training), flush=True)
                except Exception as error:  # a sweep shows all of them
                    print(label, type(error).__name__, str(error)[:300].replace("\n", " | "), flush=True)


def one_compile(family: str, layers: int, captured: bool, training: bool) -> dict[str, Any]:
    """Compile once in this process: CPU seconds, and cache hits."""
    from torch._dynamo.utils import counters

    model = build(family, torch.bfloat16, layers)
    seconds: list[float] = []
    compile_graph: Any = backend([], seconds, "inductor") if captured else "inductor"
    compiled = torch.compile(model, backend=compile_graph, fullgraph=True)
    ids = torch.randint(0, 64, (2, 16))
    start = (os.times(), time.perf_counter())
    with torch.set_grad_enabled(training):
        logits = compiled(ids, use_cache=False).logits
        if training:
            logits.float().sum().backward()
    end = os.times()
    cpu = sum(end[:4]) - sum(start[0][:4])  # compiler processes included
    return {
        "capture": sum(seconds),
        "cpu": cpu,
        "wall": time.perf_counter() - start[1],
        "fx": counters["inductor"]["fxgraph_cache_hit"],
        "aot": counters["aot_autograd"]["autograd_cache_hit"],
        "bypass": counters["aot_autograd"]["autograd_cache_bypass"],
    }


def in_process(cache: str, *arguments: str) -> dict[str, Any]:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, __file__, "one", *arguments],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def cost(family: str) -> None:
    for layers in (2, 8):
        for mode in ("infer", "train"):
            with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
                plain = in_process(one, family, str(layers), "plain", mode)
                ours = in_process(two, family, str(layers), "captured", mode)
            share = ours["capture"] / ours["cpu"]
            print(
                f"{family} {layers} layers {mode}: capture {ours['capture']:.2f} s CPU = {share:.1%} of "
                f"{ours['cpu']:.1f} s cold compile ({ours['wall']:.1f} s wall); without capture "
                f"{plain['cpu']:.1f} s ({plain['wall']:.1f} s wall)",
                flush=True,
            )


def cache(family: str) -> None:
    for mode in ("infer", "train"):
        for how in ("plain", "captured"):
            with tempfile.TemporaryDirectory() as folder:
                first, second = (in_process(folder, family, "2", how, mode) for _ in range(2))
            for name, run in (("first", first), ("second", second)):
                print(
                    f"{family} {mode} {how:8} {name:6} process: fx hits {run['fx']}, aot hits {run['aot']}, "
                    f"aot bypasses {run['bypass']}, {run['wall']:.2f} s wall",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["cost", "sweep", "cache", "one"])
    parser.add_argument(
        "rest", nargs="*", help="families; for `one`: family layers plain|captured infer|train"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "one":
        family, layers, how, mode = arguments.rest
        print(json.dumps(one_compile(family, int(layers), how == "captured", mode == "train")))
    elif arguments.what == "sweep":
        sweep(arguments.rest or list(FAMILIES))
    elif arguments.what == "cost":
        cost(arguments.rest[0] if arguments.rest else "qwen3_moe")
    else:
        cache(arguments.rest[0] if arguments.rest else "qwen3_moe")


if __name__ == "__main__":
    main()
