"""Many cells, each in a process that may die.

In: the cells to measure. Out: the same cells, measured; a cell that crashes its process or takes too long has that as
its reason, and the sweep goes on. Finished cells are written to a JSON file as they come, so that a sweep that was
stopped can go on.
"""

from __future__ import annotations

import json
import multiprocessing
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from moefuse._version import __version__
from moefuse.zoo.cell import GENERATE, GENERATING, Cell, measure
from moefuse.zoo.rows import BARE, Row

SCHEMA = "moefuse.zoo/1"
LIMIT = 300.0
"""Seconds that a cell may take."""

_RECYCLED = 60
"""Cells after which a process is replaced: Dynamo never gives all of its memory back."""

_PATIENCE = 10.0
"""Seconds that an idle process has to end."""

Task = tuple[Row, Cell]


def plan(
    rows: Iterable[Row],
    implementations: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[str],
    inner: str = "eager",
    generate: bool = False,
) -> list[Task]:
    """The cells of these rows, row by row.

    Bare torch.compile of the model's own code is measured in one setting only: what it can't capture depends on none.
    """
    tasks = []
    for row in rows:
        settings = [
            (implementation, dtype, kind)
            for implementation in row.implementations
            if implementation in implementations
            for dtype in dtypes
            for kind in shapes
            if implementation != BARE or (dtype, kind) == (dtypes[0], shapes[0])
        ]
        if generate and row.interface:
            settings += [(name, "float32", GENERATE) for name in GENERATING if name in implementations]
        tasks += [(row, Cell(row.name, *setting, inner)) for setting in settings]
    return tasks


def run(
    tasks: Sequence[Task],
    *,
    jobs: int = 1,
    limit: float = LIMIT,
    store: Path | None = None,
    resume: bool = False,
    retry: bool = False,
    done: Callable[[Cell], None] | None = None,
) -> list[Cell]:
    """Measure the cells, `jobs` at a time; the result has the order of `tasks`.

    jobs: 0 measures nothing: the result holds the cells that `store` has.
    store: JSON file that holds the finished cells at any time. resume: take the cells that `store` has already;
    retry: only those of them that are right.
    done: called in the calling thread for each cell that is finished, from the file or new.
    Raises ValueError where `store` belongs to other versions.
    """
    finished = {cell.key: cell for cell in load(store)} if resume and store and store.exists() else {}
    kept = {key for key, cell in finished.items() if cell.ok or not retry}
    results = {cell.key: finished[cell.key] for _, cell in tasks if cell.key in kept}
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        if jobs and task[1].key not in results:
            waiting.put(task)
    ready: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    expected = waiting.qsize()
    for cell in results.values():
        if done:
            done(cell)
    feeders = [
        threading.Thread(target=_feed, args=(waiting, ready, limit), daemon=True)
        for _ in range(min(jobs, expected))
    ]
    for feeder in feeders:
        feeder.start()
    for _ in range(expected):
        cell = ready.get()
        results[cell.key] = cell
        if store:
            # Cells of the file that this sweep doesn't ask for stay in it.
            save(store, (finished | results).values())
        if done:
            done(cell)
    for feeder in feeders:
        feeder.join()
    return [results[cell.key] for _, cell in tasks if cell.key in results]


def _feed(waiting: queue.SimpleQueue[Task], ready: queue.SimpleQueue[Cell], limit: float) -> None:
    """One process after the other, until no cell waits."""
    worker = None
    while True:
        try:
            row, cell = waiting.get_nowait()
        except queue.Empty:
            break
        if worker is None or worker.spent:
            if worker:
                worker.stop()
            worker = _Worker()
        ready.put(worker.measure(row, cell, limit))
    if worker:
        worker.stop()


class _Worker:
    """A process that measures cells one by one."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads and locks
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that the death of the process ends the pipe
        self._cells = 0
        self._broken = False

    @property
    def spent(self) -> bool:
        """It broke, or it has measured enough."""
        return self._broken or self._cells >= _RECYCLED

    def measure(self, row: Row, cell: Cell, limit: float) -> Cell:
        """The cell, measured; where the process dies or takes longer than `limit` seconds that is its reason."""
        self._cells += 1
        try:
            if self._cells == 1:
                self._pipe.recv()  # it has imported what it needs; that isn't the cell's time
            self._pipe.send((row, cell))
            if self._pipe.poll(limit):
                measured: Cell = self._pipe.recv()
                return measured
            cell.reason = f"stopped after {limit:.0f} s"
        except (EOFError, OSError):
            self._process.join()
            cell.reason = f"the process died with exit code {self._process.exitcode}"
        self._broken = True
        return cell

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._pipe.close()  # it ends by itself where it waits for the next cell
        self._process.join(0 if self._broken else _PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Any) -> None:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # what isn't fused is in the table
    torch.set_num_threads(1)  # jobs are the parallelism; one thread also makes times comparable
    pipe.send("ready")
    while True:
        try:
            row, cell = pipe.recv()
        except EOFError:
            return
        pipe.send(measure(row, cell))


def versions() -> dict[str, str]:
    """What the results depend on."""
    return {"moefuse": __version__, "torch": torch.__version__, "transformers": version("transformers")}


def save(file: Path, cells: Iterable[Cell]) -> None:
    """Write cells as JSON; the file is whole at any time."""
    data = {"schema": SCHEMA, "versions": versions(), "cells": [asdict(cell) for cell in cells]}
    half = file.with_name(file.name + ".part")
    half.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    half.replace(file)


def load(file: Path) -> list[Cell]:
    """The cells of a file that `save` wrote. Raises ValueError where it is of another kind or other versions."""
    data = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"{file} isn't a file of zoo results ({SCHEMA})")
    if data["versions"] != versions():
        raise ValueError(f"{file} was measured with {data['versions']}, here is {versions()}")
    return [Cell(**cell) for cell in data["cells"]]
