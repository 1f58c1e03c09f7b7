"""What surrounds the node at a few tokens: the router, and a shared expert as a node and as Inductor has it.

In: command line flags. Out: milliseconds (least of the rounds, CPU time of one thread) of the whole block compiled with
moefuse, with the shared expert as a node of its own and left to Inductor; of the node alone, of router and shared
expert alone compiled with Inductor, and of the shared expert as a node with one expert. Needs transformers.

    python benchmarks/around.py --shape qwen3,deepseek-v2-lite --tokens 1,4,16
"""

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moefuse.ops  # noqa: F401  (registers the operator)
from moefuse.bench import limits, shapes
from moefuse.bench.contestants import node

# Hidden features of the shared experts of the models with these shapes.
SHARED = {"qwen3": 0, "qwen3.5": 512, "deepseek-v2-lite": 2816, "tiny": 32}
Call = Callable[[], Any]


class SharedExpert(nn.Module):
    """A gated FFN."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False, dtype=dtype)
        self.down = nn.Linear(inner, hidden, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        rows: Tensor = self.down(F.silu(gate) * up)
        return rows


class Block(nn.Module):
    """Router and experts, and a shared expert where the model has one."""

    def __init__(self, layer: shapes.Layer, shared: int) -> None:
        super().__init__()
        hidden, dtype = layer.shape.hidden, layer.dtype
        self.top_k = layer.shape.top_k
        self.router = nn.Linear(hidden, layer.shape.experts, bias=False, dtype=dtype)
        self.experts = layer.module
        self.shared_expert = SharedExpert(hidden, shared, dtype) if shared else None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.router(x).softmax(-1, dtype=torch.float32).topk(self.top_k)
        return ids, (weights / weights.sum(-1, keepdim=True)).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x, *self.route(x))
        return y + self.shared_expert(x) if self.shared_expert is not None else y


def fused(block: Block, **options: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(block, backend="moefuse", dynamic=False, options={"mode": "on", **options})


def calls(layer: shapes.Layer, block: Block, tokens: int) -> dict[str, Call]:
    x = torch.randn(tokens, layer.shape.hidden).to(layer.dtype)
    ids, weights = block.route(x)
    alone, whole, route = node(layer, "cpu"), fused(block), torch.compile(block.route, dynamic=False)
    found: dict[str, Call] = {
        "whole block": lambda: whole(x),
        "node": lambda: alone(x, ids, weights),
        "router": lambda: route(x),
    }
    if (expert := block.shared_expert) is not None:
        left = fused(block, exclude=["shared_expert"])
        found["with the shared expert left to Inductor"] = lambda: left(x)
        shared = torch.compile(expert, dynamic=False)
        one = [torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1)]
        w1, w2 = [expert.gate_up.weight], [expert.down.weight]
        op = torch.ops.moefuse.mega_moe.default
        found["shared expert"] = lambda: shared(x)
        found["shared expert as a node"] = lambda: op(
            None, x, *one, w1, w2, [], [], num_experts=1, target="cpu"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3,qwen3.5,deepseek-v2-lite", help=", ".join(SHARED))
    parser.add_argument("--tokens", default="1")
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    probes = limits.Probes(torch.bfloat16, 1)
    for name in arguments.shape.split(","):
        layer = shapes.build(shapes.SHAPES[name], torch.bfloat16, shapes.available_bytes() // 3)
        config: Any = layer.module.config
        config._experts_implementation = "grouped_mm"
        block = Block(layer, SHARED[name]).requires_grad_(False)
        for tokens in map(int, arguments.tokens.split(",")):
            torch._dynamo.reset()
            with torch.no_grad():
                found = calls(layer, block, tokens)
                least = dict.fromkeys(found, float("inf"))
                for _ in range(arguments.rounds + 2):
                    for which, call in found.items():
                        probes.read()  # the weights leave the caches, as they do in a model
                        start = time.process_time()
                        call()
                        least[which] = min(least[which], (time.process_time() - start) * 1e3)
            times = ", ".join(f"{which} {ms:.3f} ms" for which, ms in least.items())
            print(f"{name}, {tokens} tokens: {times}", flush=True)


if __name__ == "__main__":
    main()
