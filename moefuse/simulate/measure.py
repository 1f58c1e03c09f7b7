"""Costs of this machine, and how far predictions made of them are from the truth.

In: nothing but the machine. Out: `calibrate` gives `Costs`, `validate` the layer's ways measured on 2 and 4 ranks and
predicted. Ranks are processes with one thread each. A time is the best of several rounds, in which all that is compared
takes turns: what the machine can do, not what else it did meanwhile.
"""

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from moefuse.simulate.costs import Costs
from moefuse.simulate.predict import (
    ALL_GATHER_COLLECTIVES,
    ALL_GATHER_OPS,
    ALL_TO_ALL_COLLECTIVES,
    ALL_TO_ALL_OPS,
    WAYS,
    predict,
)
from moefuse.simulate.ways import Ways
from moefuse.simulate.workload import Topology, Workload

STEPS = 8
"""Of one round, one after another, as the layers of a model come."""
TINY = Workload(tokens=1, experts=8, top_k=1, hidden=16, intermediate=16)
VALIDATED = (
    Workload(tokens=1, experts=32, top_k=4, hidden=256, intermediate=128),
    Workload(tokens=16, experts=32, top_k=4, hidden=256, intermediate=128),
    Workload(tokens=64, experts=32, top_k=4, hidden=256, intermediate=128),
    Workload(tokens=16, experts=16, top_k=4, hidden=1024, intermediate=512),
    Workload(tokens=256, experts=16, top_k=4, hidden=1024, intermediate=512),
)
_BIG_BYTES = 4 << 20
_LEAST = 1e-7  # a difference of two measurements may come out as nothing


class Time(NamedTuple):
    """Seconds per step."""

    best: float
    median: float


def timed(ways: Mapping[str, Callable[[], Any]], rounds: int, steps: int = STEPS) -> dict[str, Time]:
    """In turn, so that a busy moment hits all of them. In a process group, its ranks start each round together."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                way()
            seconds[name].append((time.perf_counter() - start) / steps)
    return {name: Time(min(values), statistics.median(values)) for name, values in seconds.items()}


def run_ranks(world: int, function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` gives on rank 0 of so many processes with a gloo group; JSON data."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.json"
        spawn(_rank, (world, Path(directory) / "store", out, function, args), nprocs=world)
        return json.loads(out.read_text())


def _rank(rank: int, world: int, store: Path, out: Path, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    with torch.no_grad():
        value = function(*args)
    if rank == 0:
        out.write_text(json.dumps(value))
    dist.barrier()
    dist.destroy_process_group()


def calibrate(rounds: int = 30) -> Costs:
    """Measure this machine, on 1, 2 and 4 ranks."""
    cores = len(os.sched_getaffinity(0))
    alone: dict[str, float] = run_ranks(1, _alone, rounds)
    pair = run_ranks(2, _together, rounds)
    four = run_ranks(4, _together, rounds)
    turns = max(1.0, 4 / cores)

    def collective(times: dict[str, float], name: str, ops: int, count: int) -> float:
        """One of the layer's collectives: what is left of its time without what the rank does alone."""
        return max(_LEAST, (times[name] - ops * alone["op"] - alone["experts"]) / count)

    def exchange(times: dict[str, float]) -> float:
        return collective(times, "all_to_all", ALL_TO_ALL_OPS, ALL_TO_ALL_COLLECTIVES)

    def gather(times: dict[str, float]) -> float:
        return collective(times, "all_gather", ALL_GATHER_OPS, ALL_GATHER_COLLECTIVES)

    four = {name: seconds / turns for name, seconds in four.items()}
    return Costs(
        machine=_machine(),
        cores=cores,
        flops=alone["flops"],
        weight_bytes=alone["weight_bytes"],
        copy_bytes=alone["copy_bytes"],
        node_seconds=pair["node"],
        meeting_seconds=max(_LEAST, (four["node"] - pair["node"]) / 2),
        op_seconds=alone["op"],
        experts_seconds=alone["experts"],
        exchange_seconds=exchange(pair),
        exchange_rank_seconds=max(_LEAST, (exchange(four) - exchange(pair)) / 2),
        gather_seconds=gather(pair),
        gather_rank_seconds=max(_LEAST, (gather(four) - gather(pair)) / 2),
        collective_bytes=_BIG_BYTES / max(_LEAST, pair["big"] - pair["small"]),
    )


def _machine() -> str:
    model = platform.processor() or platform.machine()
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        names = [line for line in cpus.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"{model}, torch {torch.__version__}"


def _alone(rounds: int) -> dict[str, float]:
    many = Ways(Workload(tokens=256, experts=4, top_k=4, hidden=1024, intermediate=512))
    few = Ways(Workload(tokens=1, experts=32, top_k=32, hidden=1024, intermediate=512))
    tiny = Ways(TINY)
    small, index = torch.randn(8, 16), torch.randperm(8)
    big = torch.ones(16 << 20, dtype=torch.uint8)
    target = torch.empty_like(big)
    ways: dict[str, Callable[[], Any]] = {
        name: partial(of.experts, of.x, of.ids, of.weights)
        for name, of in (("many", many), ("few", few), ("tiny", tiny))
    }
    ways["copy"] = lambda: target.copy_(big)
    ways["ops"] = lambda: (small[index] * 2).sum(1) // 3
    best = {name: time.best for name, time in timed(ways, rounds).items()}
    flops = 256 * 4 * many.workload.row_flops
    return {
        "flops": flops / max(_LEAST, best["many"] - best["tiny"]),
        "weight_bytes": 32 * few.workload.expert_bytes / max(_LEAST, best["few"] - best["tiny"]),
        "copy_bytes": big.nbytes / best["copy"],
        "op": best["ops"] / 4,
        "experts": best["tiny"],
    }


def _together(rounds: int) -> dict[str, float]:
    tiny, world = Ways(TINY), dist.get_world_size()
    small, got_small = torch.zeros(world), torch.zeros(world)
    big, got_big = (torch.zeros(world * _BIG_BYTES, dtype=torch.uint8) for _ in range(2))
    ways: dict[str, Callable[[], Any]] = {
        "node": tiny.fused,
        "all_to_all": tiny.all_to_all,
        "all_gather": tiny.all_gather,
        "small": lambda: dist.all_to_all_single(got_small, small),
        "big": lambda: dist.all_to_all_single(got_big, big),
    }
    return {name: time.best for name, time in timed(ways, rounds).items()}


class Compared(NamedTuple):
    """A way of a workload on so many ranks: measured and predicted seconds."""

    ranks: int
    workload: Workload
    way: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted / self.measured - 1


def validate(
    costs: Costs, workloads: Sequence[Workload] = VALIDATED, ranks: Sequence[int] = (2, 4), rounds: int = 20
) -> list[Compared]:
    """All ways of the layers, on so many ranks of this machine."""
    compared = []
    for world in ranks:
        measured = run_ranks(world, _measured, workloads, rounds)
        for workload, times in zip(workloads, measured, strict=True):
            predicted = predict(workload, Topology(world, ranks_per_host=world), costs)
            compared += [Compared(world, workload, way.way, times[way.way], way.seconds) for way in predicted]
    return compared


def _measured(workloads: Sequence[Workload], rounds: int) -> list[dict[str, float]]:
    found = []
    for workload in workloads:
        ways = Ways(workload)
        times = timed({name: getattr(ways, name) for name in WAYS}, rounds)
        found.append({name: time.best for name, time in times.items()})
    return found
