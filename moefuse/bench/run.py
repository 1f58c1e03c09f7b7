"""Measures layers: every contestant on the same weights and tokens, in turn.

In: what is wanted. Out: a `Row` for each shape, dtype, routing, number of threads and of tokens. A round calls each
contestant once, in an order that moves on; before each call the read probe runs, so that the weights lie in memory and
not in a cache, and so that memory is measured as often as the contestants. Figures are medians over the rounds.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefuse.bench import shapes
from moefuse.bench.contestants import CONTESTANTS, OURS, node
from moefuse.bench.limits import Probes, roof
from moefuse.bench.shapes import SHAPES, Layer, Run
from moefuse.targets.cpu import huge_pages, isa, kernel
from moefuse.terminal import one_line

_CHECKED = 16
"""Tokens whose error to float64 is measured."""
_ROUNDS = 3
_MOST_TIME = 4
"""Rounds below _ROUNDS are given up after so many times the seconds asked for."""

_NAP, _MOST_IDLE = 2e-3, 0.5
"""Seconds: the process is idle when it used less than a tenth of a nap; threads that never sleep aren't waited for."""


@dataclass(frozen=True)
class Wanted:
    """What to measure. seconds: per row, all contestants together; memory: bytes for one layer's weights."""

    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]
    routings: tuple[str, ...]
    threads: tuple[int, ...]
    tokens: tuple[int, ...]
    contestants: tuple[str, ...]
    seconds: float
    memory: int
    cpu_time: bool = False

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds of wall time, or of CPU time of all threads together."""
        return time.process_time if self.cpu_time else time.perf_counter

    @property
    def count(self) -> int:
        """How many rows there will be."""
        parts = (self.shapes, self.dtypes, self.routings, self.threads, self.tokens)
        number = 1
        for part in parts:
            number *= len(part)
        return number


@dataclass
class Entry:
    """One contestant in one row.

    ms, best_ms: median and least milliseconds. error: relative, to float64. extra_bytes: most memory beyond that before
    the call, setup_bytes: what it keeps since it was set up, such as packed weights; None where that isn't known.
    reason: why it wasn't measured, else "".
    """

    ms: float | None = None
    best_ms: float | None = None
    error: float | None = None
    extra_bytes: int | None = None
    setup_bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class Ready:
    """A contestant that has prepared itself for a layer, or the reason why it couldn't."""

    run: Run | None
    setup_bytes: int | None = None
    reason: str = ""


@dataclass
class Row:
    """One line of the table. read and peak: bytes and operations per second, roof_ms: what they allow at best."""

    shape: str
    sizes: str
    experts: int
    model_experts: int
    dtype: str
    routing: str
    threads: int
    tokens: int
    chosen_experts: int
    read: float
    peak: float
    roof_ms: float
    workspace_bytes: int
    rounds: int
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """Of the roofline that moefuse reaches."""
        ours = self.entries[OURS].ms if OURS in self.entries else None
        return None if ours is None else self.roof_ms / ours

    def ratio(self, name: str) -> float | None:
        """How many times faster than this contestant moefuse is."""
        ours, theirs = (self.entries[n].ms if n in self.entries else None for n in (OURS, name))
        return None if ours is None or theirs is None else theirs / ours


def rows(wanted: Wanted, starts: Callable[[str], None] = lambda _: None) -> Iterator[Row]:
    """Measure one row after the other; `starts` is told what comes. The number of threads is put back at the end."""
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            for name in wanted.shapes:
                for dtype in wanted.dtypes:
                    starts(f"{name} {dtype}: making weights")
                    layer = shapes.build(SHAPES[name], shapes.DTYPES[dtype], wanted.memory)
                    for threads in wanted.threads:
                        torch.set_num_threads(threads)
                        yield from _of_layer(wanted, layer, threads, starts)
                    del layer
                    gc.collect()
    finally:
        torch.set_num_threads(before)


def _of_layer(wanted: Wanted, layer: Layer, threads: int, starts: Callable[[str], None]) -> Iterator[Row]:
    torch.manual_seed(0)
    probes = Probes(layer.dtype, threads, wanted.clock)
    ready = {name: _ready(name, layer, wanted.tokens) for name in wanted.contestants}
    for routing in wanted.routings:
        for tokens in wanted.tokens:
            starts(f"{layer.shape.name} {threads} threads, {routing}, {tokens} tokens")
            yield _row(wanted, layer, ready, probes, threads, routing, tokens)


def _ready(name: str, layer: Layer, tokens: Sequence[int]) -> Ready:
    """Set a contestant up. Where somebody else's kernel fails, its message is the reason."""
    contestant = CONTESTANTS[name]
    reasons = [contestant.limit(layer, count) for count in tokens]
    if all(reasons):
        return Ready(None, reason=reasons[0])
    if not contestant.peer:
        return Ready(contestant.build(layer))
    _trim()
    before = _resident("VmRSS:")
    try:
        run = contestant.build(layer)
        run(*shapes.inputs(layer, 1, "uniform"))  # some pack their weights at the first call
    except Exception as error:
        return Ready(None, reason=f"{type(error).__name__}: {one_line(error)}")
    gc.collect()
    _trim()
    after = _resident("VmRSS:")
    return Ready(run, None if before is None or after is None else max(after - before, 0))


def _row(
    wanted: Wanted,
    layer: Layer,
    ready: Mapping[str, Ready],
    probes: Probes,
    threads: int,
    routing: str,
    tokens: int,
) -> Row:
    given = shapes.inputs(layer, tokens, routing)
    entries = {
        name: Entry(setup_bytes=one.setup_bytes, reason=one.reason or CONTESTANTS[name].limit(layer, tokens))
        for name, one in ready.items()
    }
    able = {name: one.run for name, one in ready.items() if one.run is not None and not entries[name].reason}
    _prepare(able, entries, given, node(layer, "reference"))
    times, reads, peaks = _rounds(able, given, probes, wanted.seconds, wanted.clock)
    for name, values in times.items():
        entries[name].ms, entries[name].best_ms = statistics.median(values), min(values)
    read, peak = statistics.median(reads), statistics.median(peaks)
    return Row(
        shape=layer.shape.name,
        sizes=layer.shape.sizes(),
        experts=layer.shape.experts,
        model_experts=layer.model_experts,
        dtype=str(layer.dtype).removeprefix("torch."),
        routing=routing,
        threads=threads,
        tokens=tokens,
        chosen_experts=given[1].unique().numel(),
        read=read,
        peak=peak,
        roof_ms=roof(layer, given[1], read, peak),
        workspace_bytes=kernel.workspace_bytes(),
        rounds=max(map(len, times.values()), default=0),
        entries=entries,
    )


def _prepare(runs: dict[str, Run], entries: Mapping[str, Entry], given: Sequence[Tensor], exact: Run) -> None:
    """Warm up, with each contestant's error to float64 and its memory. Compilers compile here.

    Somebody else's kernel that fails, or gives no numbers, leaves `runs`; its message is the reason.
    """
    x, ids, weights = (tensor[:_CHECKED] for tensor in given)
    want = exact(x.double(), ids, weights.double())
    for name, run in list(runs.items()):
        try:
            got = run(*given)[:_CHECKED]
            error = float((got.double() - want).norm() / want.norm())
            if not math.isfinite(error):
                raise ArithmeticError("its result isn't finite")
        except Exception as failure:
            if not CONTESTANTS[name].peer:
                raise
            entries[name].reason = f"{type(failure).__name__}: {one_line(failure)}"
            del runs[name]
            continue
        entries[name].error = error
        del got
        if name == OURS:
            kernel.release_workspace()  # so that it counts
        entries[name].extra_bytes = _most_memory(run, given)


def _most_memory(run: Run, given: Sequence[Tensor]) -> int | None:
    """Bytes that the process grew by during a call, at most. Linux only."""
    try:
        _trim()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    except OSError:
        run(*given)
        return None
    before = _resident("VmHWM:")
    run(*given)
    after = _resident("VmHWM:")
    return None if before is None or after is None else after - before


def _trim() -> None:
    """What was freed before mustn't hide what is taken: glibc hands it back."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident(which: str) -> int | None:
    """Bytes in memory, now (`VmRSS:`) or at most (`VmHWM:`); None where the system doesn't tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [line for line in lines if line.startswith(which)]
    return int(found[0].split()[1]) * 1024 if found else None


def _rounds(
    runs: Mapping[str, Run],
    given: Sequence[Tensor],
    probes: Probes,
    seconds: float,
    clock: Callable[[], float],
) -> tuple[dict[str, list[float]], list[float], list[float]]:
    """Milliseconds of each call, and what the probes said in between."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    reads: list[float] = []
    peaks: list[float] = []
    start, done = time.perf_counter(), 0
    while True:
        spent = time.perf_counter() - start
        if done and spent >= seconds * (1 if done >= _ROUNDS else _MOST_TIME):
            return times, reads, peaks
        for i in range(len(names)):
            name = names[(i + done) % len(names)]
            reads.append(probes.read())
            before = clock()
            runs[name](*given)
            times[name].append((clock() - before) * 1e3)
            _wait_until_idle()
        peaks.append(probes.peak())
        done += 1


def _wait_until_idle() -> None:
    """Some kernels' threads go on spinning after a call, for 50 ms and more: that would slow down whoever is next."""
    end = time.perf_counter() + _MOST_IDLE
    while time.perf_counter() < end:
        before = time.process_time()
        time.sleep(_NAP)
        if time.process_time() - before < _NAP / 10:
            return


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    chosen = isa.chosen()
    return {
        "cpu": names[0] if names else "unknown",
        "cores": os.cpu_count(),
        "isa": isa.OFF if chosen is None else chosen.name,
        "huge_pages": huge_pages.enabled(),
        "torch": torch.__version__,
    }
