"""What one call costs at one token: a stack of tiny qwen3 MoE blocks, where all time is overhead.

In: layers, rounds. Out: medians in microseconds per call and per layer. The peers run interleaved, one call each per
round, so that a slow moment of the machine hits all of them. `op alone` calls the operator once per layer with ready
operands; `op, no work` the same with no token, which leaves dispatch and the checks of the call. Needs transformers.

    python benchmarks/overhead.py --layers 8 --rounds 400
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import moefuse.ops  # noqa: F401  (registers the operator)

HIDDEN, INTER, EXPERTS, TOP_K = 32, 16, 8, 2

Call = Callable[[], Any]


class Stack(nn.Module):
    """MoE blocks with residuals."""

    def __init__(self, layers: int) -> None:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        super().__init__()
        config = Qwen3MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=INTER, num_experts=EXPERTS, num_experts_per_tok=TOP_K
        )
        config._experts_implementation = "grouped_mm"
        self.blocks = nn.ModuleList([Qwen3MoeSparseMoeBlock(config) for _ in range(layers)])
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def operator(layers: int, tokens: int, dtype: torch.dtype) -> Call:
    """One call of the operator per layer, operands ready."""
    x = torch.randn(tokens, HIDDEN).to(dtype)
    ids = torch.arange(TOP_K).expand(tokens, TOP_K).contiguous()
    weights = torch.full((tokens, TOP_K), 0.5).to(dtype)
    stacked = (
        [torch.randn(EXPERTS, 2 * INTER, HIDDEN).to(dtype)],
        [torch.randn(EXPERTS, HIDDEN, INTER).to(dtype)],
    )
    target = torch.ops.moefuse.mega_moe.default
    options = {"gate_up": "concat", "activation": "swiglu", "target": "cpu"}

    def call() -> None:
        for _ in range(layers):
            target(None, x, ids, weights, *stacked, [], [], num_experts=EXPERTS, ep_world_size=1, **options)

    return call


def peers(layers: int, dtype: torch.dtype) -> dict[str, Call]:
    model = Stack(layers).to(dtype).eval().requires_grad_(False)
    x = torch.randn(1, 1, HIDDEN).to(dtype)
    found: dict[str, Callable[[Tensor], Any]] = {"eager": model}
    found["inductor alone"] = torch.compile(model, fullgraph=True)
    for inner in ("inductor", "eager"):
        options: dict[str, Any] = {"mode": "on", "inner": inner}
        found[f"moefuse, inner {inner}"] = torch.compile(
            model, backend="moefuse", fullgraph=True, options=options
        )
    nothing = nn.Identity()
    found["empty compiled call"] = torch.compile(lambda t: nothing(t) + 1, fullgraph=True)
    calls: dict[str, Call] = {name: (lambda run=run: run(x)) for name, run in found.items()}  # type: ignore[misc]
    return calls | {"op alone": operator(layers, 1, dtype), "op, no work": operator(layers, 0, dtype)}


def measure(calls: dict[str, Call], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median microseconds per call, after a fifth of the rounds as a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + rounds // 5):
        for name, call in calls.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
    return {name: statistics.median(values[rounds // 5 :]) * 1e6 for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--cpu-time", action="store_true", help="process CPU time: for a busy machine")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for dtype in arguments.dtypes.split(","):
        torch._dynamo.reset()
        with torch.no_grad():
            medians = measure(peers(arguments.layers, getattr(torch, dtype)), arguments.rounds, clock)
        print(f"{arguments.layers} layers, one token, {dtype}, one thread, torch {torch.__version__}")
        print(f"{'':24}{'us / call':>10}{'us / layer':>12}")
        for name, value in medians.items():
            print(f"{name:24}{value:10.1f}{value / arguments.layers:12.1f}", flush=True)


if __name__ == "__main__":
    main()
