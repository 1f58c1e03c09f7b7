"""What a loop over experts costs Dynamo: the unfused model against `moefuse.compile`, CPU seconds of the first call.

    python benchmarks/loop_capture.py [experts] [--inner inductor]

With `eager` the captured graph runs as it is: what differs is moefuse's own trace and passes. With `inductor` it is
compiled: the unfused graph has every expert in it, the fused one a node. Best of five (inductor: one, caches off), each
model new, the process warmed up.
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn import functional as F

import moefuse

HIDDEN, INNER, TOP_K, TOKENS = 64, 32, 2, 16


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return rows


class Loop(nn.Module):
    """`skip`: experts without tokens are skipped, which Dynamo alone can't capture."""

    def __init__(self, experts: int, skip: bool) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOP_K, -1)
        return (self.skipping if self.skip else self.plain)(x, weights, ids)

    def plain(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            y.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return y

    def skipping(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            y.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return y


def first_call(make: Callable[[], Callable[[Tensor], Tensor]], times: int) -> float:
    best = float("inf")
    for _ in range(times):
        torch._dynamo.reset()
        call = make()
        x = torch.randn(TOKENS, HIDDEN)
        start = time.process_time()
        with torch.no_grad():
            call(x)
        best = min(best, time.process_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experts", nargs="?", type=int, default=8)
    parser.add_argument("--inner", choices=("eager", "inductor"), default="eager")
    given = parser.parse_args()
    experts, inner = given.experts, given.inner
    ways = {
        "unfused, where-loop": lambda: torch.compile(Loop(experts, False), backend=inner, fullgraph=True),
        "moefuse, where-loop": lambda: moefuse.compile(Loop(experts, False), inner=inner),
        "moefuse, loop that skips": lambda: moefuse.compile(Loop(experts, True), inner=inner),
    }
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1  # or its workers' time wouldn't be counted
    first_call(ways["moefuse, where-loop"], 1)
    for name, make in ways.items():
        print(f"{name:26}{first_call(make, 5 if inner == 'eager' else 1):6.2f} s CPU")


if __name__ == "__main__":
    main()
