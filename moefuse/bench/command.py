"""`moefuse bench`: from what the user asked for to tables and files.

In: options, checked here before anything is measured. Out: tables on the terminal, progress on stderr, JSON and a plot
where asked for. Exit code 2 for what the user got wrong.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moefuse.bench.contestants import CONTESTANTS, OURS, Contestant
from moefuse.bench.model import MODEL_CONTESTANTS, ModelRow, WantedModel, model_rows
from moefuse.bench.run import Wanted
from moefuse.bench.shapes import DTYPES, PUBLIC, ROUTINGS, SHAPES, available_bytes
from moefuse.exits import USAGE, die
from moefuse.terminal import console, one_line, words

_WIDE = 200
"""Columns of the table in a file or a pipe."""
_QUICK_SECONDS, _QUICK_TOKENS, _QUICK_SHAPES = 0.05, (1, 16), ("tiny", "tiny-oai")


def bench(
    shapes: Annotated[
        str | None, typer.Option("--shapes", metavar="A,B,...", help="layers [those of public models]")
    ] = None,
    tokens: Annotated[str, typer.Option("--tokens", metavar="N,...")] = "1,4,16,64,256,1024,4096",
    dtypes: Annotated[str, typer.Option("--dtypes", metavar="A,B,...")] = "bfloat16",
    routings: Annotated[str, typer.Option("--routings", metavar="A,B")] = "uniform",
    threads: Annotated[
        str | None, typer.Option("--threads", metavar="N,...", help="[as many as torch uses]")
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="A,B,...", help="contestants, moefuse always [all]")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, help="per row, all contestants together")
    ] = 2.0,
    memory: Annotated[
        float | None,
        typer.Option(
            "--memory",
            help="GiB for one layer's weights [what leaves room for all copies]",
        ),
    ] = None,
    model: Annotated[
        bool, typer.Option("--model", help="a Qwen3-MoE model instead: tokens per second")
    ] = False,
    layers: Annotated[int, typer.Option("--layers", min=1, help="with --model")] = 4,
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="with --model: tokens of the prompt")] = 256,
    quick: Annotated[
        bool, typer.Option("--quick", help="tiny shapes, few tokens, no time: does everything run?")
    ] = False,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="CPU time of all threads: for a busy machine")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write all figures")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="draw ms over tokens; needs matplotlib")
    ] = None,
) -> None:
    """Measure one MoE layer on the CPU: moefuse against whatever else is installed, and against the machine's limits.

    Contestants run in turn on the same weights. The limits, memory and multiplications, are probed in between.
    """
    # transformers caches version checks with lru_cache, and Dynamo says that it looks through the cache
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    try:
        _check_files(json_file, plot)
        counts = _numbers("--threads", threads) if threads else (torch.get_num_threads(),)
        kinds = words("--dtypes", dtypes, tuple(DTYPES))
        seconds = _QUICK_SECONDS if quick else seconds
        if model:
            if plot:
                raise ValueError("--plot draws layers, not a model")
            wanted_model = WantedModel(
                layers=1 if quick else layers,
                dtypes=tuple(DTYPES[kind] for kind in kinds),
                threads=counts,
                prompt=16 if quick else prompt,
                contestants=_contestants(only, MODEL_CONTESTANTS),
                seconds=seconds,
                tiny=quick,
            )
            _measure_models(wanted_model, json_file)
            return
        chosen = _contestants(only, CONTESTANTS)
        wanted = Wanted(
            shapes=words("--shapes", shapes, tuple(SHAPES)) if shapes else _QUICK_SHAPES if quick else PUBLIC,
            dtypes=kinds,
            routings=words("--routings", routings, ROUTINGS),
            threads=counts,
            tokens=_QUICK_TOKENS if quick else _numbers("--tokens", tokens),
            contestants=chosen,
            seconds=seconds,
            memory=_share(chosen) if memory is None else int(memory * 2**30),
            cpu_time=cpu_time,
        )
        _measure_layers(wanted, json_file, plot)
    except (ImportError, ValueError, OSError, MemoryError, RuntimeError) as error:
        die(one_line(error), USAGE)


def _measure_layers(wanted: Wanted, json_file: Path | None, plot: Path | None) -> None:
    from moefuse.bench import run, show

    absent = {name: why for name, one in CONTESTANTS.items() if (why := one.absent())}
    rows: list[run.Row] = []
    with _progress(wanted.count) as (starts, done):
        for row in run.rows(wanted, starts):
            rows.append(row)
            done()
            # an interrupted run keeps what it has
            _write(json_file, show.data(run.machine(), absent, rows, ()))
    out = console(_WIDE)
    out.print(_said(run.machine()), markup=False)
    out.print(show.table(rows))
    for note in show.notes(rows, absent):
        out.print(note, markup=False)
    if plot:
        show.plot(rows, plot)


def _measure_models(wanted: WantedModel, json_file: Path | None) -> None:
    from moefuse.bench import run, show

    rows: list[ModelRow] = []
    with _progress(wanted.count) as (starts, done):
        for row in model_rows(wanted, starts):
            rows.append(row)
            done()
            _write(json_file, show.data(run.machine(), {}, (), rows))
    out = console(_WIDE)
    out.print(_said(run.machine()), markup=False)
    out.print(show.model_table(rows))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{option} must be positive numbers, separated by commas, got {text!r}")
    return tuple(dict.fromkeys(map(int, parts)))


def _contestants(only: str | None, known: Mapping[str, Any]) -> tuple[str, ...]:
    """Those asked for, in the order of the registry, and moefuse; by default all that can take part here."""
    able = [name for name, one in known.items() if not (isinstance(one, Contestant) and one.absent())]
    chosen = words("--only", only, able) if only else tuple(able)
    return tuple(name for name in able if name in chosen or name == OURS)


def _share(contestants: Sequence[str]) -> int:
    """Bytes that one layer's weights may have, so that the copies that contestants make of them find room too."""
    return available_bytes() // (3 + sum(CONTESTANTS[name].copies for name in contestants))


def _check_files(json_file: Path | None, plot: Path | None) -> None:
    for file in (json_file, plot):
        if file and not file.absolute().parent.is_dir():
            raise ValueError(f"{file}: there is no such folder")
    if plot:
        from moefuse.bench import show

        show.check_plot(plot)


def _write(file: Path | None, found: Mapping[str, Any]) -> None:
    if file:
        file.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _said(machine: Mapping[str, Any]) -> str:
    pages = "2 MiB pages asked for" if machine["huge_pages"] else "pages as they are"
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']}, {pages}, torch {machine['torch']}"


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """A bar on stderr: a function to say what starts, and one to call when a row is done."""
    columns = (TextColumn("{task.description:50.50}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=total)
        yield (
            lambda what: bar.update(task, description=what),
            lambda: bar.advance(task),
        )
