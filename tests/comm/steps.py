"""What ranks do in the tests of steps: one step checked against one process, many random ones, steps until one dies.

In: functions for `run_ranks`. `python -m tests.comm.steps` runs them at length and prints figures: 1,000 random steps
on 2, 4 and 8 processes, and 50 runs in which a rank is killed (kill -9) at a random moment.
"""

import argparse
import gc
import os
import random
import resource
import signal
import threading
import time
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from moefuse.comm import ContextError, PeerError, context_for, contexts
from tests.comm.layers import EXPERTS, Spread, spread
from tests.comm.ranks import run_ranks, values

MAX_TOKENS = 16
TIMEOUT = 3.0


def check(
    layer: Spread, rank: int, counts: tuple[int, ...], transport: str, ids=None, target="reference"
) -> None:
    """One step on all ranks against this rank's tokens in one process; slots and bytes against the other ranks'."""
    world = len(counts)
    context = context_for(
        None, layer.capacity(world, max(MAX_TOKENS, *counts)), transport=transport, timeout=30
    )
    everyone = [
        layer.tokens(r, n, None if ids is None else ids.expand(n, layer.top_k)) for r, n in enumerate(counts)
    ]
    before = context.traffic
    y, nums = layer.together(context.tensor, rank, world, everyone[rank], target)
    want = layer.alone(everyone[rank])
    assert y.dtype == want.dtype
    # The same roundings of the same rows, summed in another order and rounded once: an ulp of y, and of the sum's
    # terms, which are of size 4; a norm of the rows divides by what is rounded, too.
    eps = max(torch.finfo(torch.float32).eps if y.dtype != torch.float64 else 0, torch.finfo(y.dtype).eps)
    torch.testing.assert_close(y, want, rtol=4 * eps, atol=8 * (1 + layer.top_k) * eps)

    local = EXPERTS // world
    pairs = [
        (r, t, e) for r, tokens in enumerate(everyone) for t, es in enumerate(tokens[1].tolist()) for e in es
    ]
    mine = [(r, t, e) for r, t, e in pairs if rank * local <= e < (rank + 1) * local]
    assert nums.tolist() == [sum(e == rank * local + i for _, _, e in mine) for i in range(local)]
    foreign = [(r, t) for r, t, _ in mine if r != rank]
    item = layer.layer.x.itemsize
    assert context.traffic.rows - before.rows == len(set(foreign)) * layer.layer.x.shape[1] * item
    assert context.traffic.results - before.results == len(foreign) * layer.layer.down.shape[1] * item


class Grown(NamedTuple):
    """What came with the steps after the first fifth: open files, contexts, live tensors, KiB of memory at most."""

    files: int
    contexts: int
    tensors: int
    memory: int


def random_steps(rank: int, world: int, steps: int) -> Grown:
    """K from 1 to 8; ids at random, all on one expert, all on one rank, or on none."""
    layers = [spread(seed, top_k=1 + seed) for seed in range(8)]
    draw = torch.Generator().manual_seed(world)  # the same on all ranks
    counted = []
    for step in range(steps):
        counts = tuple((torch.randint(0, MAX_TOKENS + 1, (world,), generator=draw)).tolist())
        kind, expert, empty = (int(torch.randint(0, n, (), generator=draw)) for n in (6, EXPERTS, 4))
        if empty == 0:
            counts = tuple(n if r == expert % world else 0 for r, n in enumerate(counts))
        layer = layers[step % 8]
        local = EXPERTS // world
        ids = {
            0: torch.tensor([expert]),
            1: torch.arange(layer.top_k) % local + expert // local * local,
            2: torch.tensor([-1]),
        }.get(kind)
        check(layer, rank, counts, "shared memory", ids, target="cpu")
        if step in (max(steps // 5, len(layers)), steps - 1):
            gc.collect()
            tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            counted.append((len(os.listdir("/proc/self/fd")), len(contexts()), tensors, memory))
    return Grown(*(b - a for a, b in zip(*counted, strict=True)))


def steps_until_failure(
    rank: int, world: int, victim: int, after: float, transport: str, backward: bool = False
) -> tuple[int, float, str]:
    """The rank named by the error, how long the failing step took, and the message. backward: a step trains."""
    layer = spread(1, top_k=2)
    context = context_for(None, layer.capacity(world, 64), transport=transport, timeout=TIMEOUT)
    x, *routing = layer.tokens(rank, 40)
    tokens = (x.requires_grad_(backward), *routing)
    dist.barrier()
    if rank == victim:
        threading.Timer(after, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while True:
        start = time.monotonic()
        try:
            y, _ = layer.together(context.tensor, rank, world, tokens, "cpu")
            if backward:
                y.sum().backward()
        except PeerError as error:
            seconds = time.monotonic() - start
            with pytest.raises(ContextError, match=r"it failed before: (a )?rank"):
                layer.together(context.tensor, rank, world, tokens, "cpu")
            return error.rank, seconds, str(error)


def killed(world: int, runs: int, seed: int) -> tuple[int, float]:
    """Runs in which all survivors raised in time, named the victim and left nothing; the longest wait in seconds."""
    draw, good, longest = random.Random(seed), 0, 0.0
    for _ in range(runs):
        victim, after = draw.randrange(world), draw.uniform(0, 0.05)
        outcomes = run_ranks(world, steps_until_failure, victim, after, "shared memory")
        told = [outcome.value for rank, outcome in enumerate(outcomes) if rank != victim]
        named = all(value is not None and value[0] == victim and value[1] < TIMEOUT for value in told)
        clean = not any(outcome.windows for outcome in outcomes)
        good += named and clean and outcomes[victim].exit_code == -signal.SIGKILL
        longest = max([longest, *(value[1] for value in told if value is not None)])
    return good, longest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="random steps on each number of processes")
    parser.add_argument(
        "--kills", type=int, default=50, help="runs with a kill, half with 2 and half with 4 ranks"
    )
    parser.add_argument("--seed", type=int, default=2026)
    args = parser.parse_args()
    for world in (2, 4, 8):
        start = time.monotonic()
        grown = values(run_ranks(world, random_steps, args.steps, timeout=3600))
        print(
            f"{world} ranks: {args.steps} random steps right in {time.monotonic() - start:.0f} s, {grown}",
            flush=True,
        )
    for world, runs in ((2, args.kills - args.kills // 2), (4, args.kills // 2)):
        good, longest = killed(world, runs, args.seed)
        print(
            f"{world} ranks: {good} of {runs} kills: every survivor raised after at most {longest:.3f} s, named the "
            f"rank, nothing left in /dev/shm",
            flush=True,
        )


if __name__ == "__main__":
    main()
