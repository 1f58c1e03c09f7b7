"""`moefuse zoo`: from what the user asked for to the table.

In: options, checked here. Out: a table on the terminal while the cells come in, and pages. Errors of the user are
ValueErrors that name the option.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from moefuse.terminal import console
from moefuse.zoo import render, sweep
from moefuse.zoo.cell import SHAPES, Cell
from moefuse.zoo.render import Line
from moefuse.zoo.rows import IMPLEMENTATIONS, Row, rows

__all__ = ["IMPLEMENTATIONS", "SHAPES", "Wanted", "measured", "page", "rows_of", "write"]


_WIDE = 160
"""Columns of the table in a file or a pipe."""


@dataclass(frozen=True)
class Wanted:
    """Which cells. only: names of rows, `*` allowed, a module means all of its rows; empty for all."""

    only: tuple[str, ...]
    styles: tuple[Path, ...]
    implementations: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    inner: str
    generate: bool


def rows_of(wanted: Wanted) -> tuple[Row, ...]:
    """The rows asked for. Raises ValueError for a name that no row has."""
    every = rows(wanted.styles)
    if not wanted.only:
        return every
    unknown = [name for name in wanted.only if not any(_is(row, name) for row in every)]
    if unknown:
        raise ValueError(f"--only: no row is called {', '.join(unknown)}; `moefuse zoo --list` prints them")
    return tuple(row for row in every if any(_is(row, name) for name in wanted.only))


def _is(row: Row, name: str) -> bool:
    return fnmatch.fnmatchcase(row.name, name) or row.module == name


def measured(
    wanted: Wanted,
    chosen: Sequence[Row],
    *,
    jobs: int,
    limit: float,
    store: Path | None,
    resume: bool,
    retry: bool,
) -> tuple[list[Line], list[Cell]]:
    """Measure, with a progress bar, and print the table and its summary."""
    tasks = sweep.plan(
        chosen, wanted.implementations, wanted.dtypes, wanted.shapes, wanted.inner, wanted.generate
    )
    columns = (
        TextColumn("{task.description:40.40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("starting", total=len(tasks))

        def done(cell: Cell) -> None:
            progress.update(bar, advance=1, description=f"{cell.row} {cell.implementation}")
            if cell.wrong:
                progress.console.print(f"{cell.key}: {cell.reason}", style="red", markup=False)

        cells = sweep.run(tasks, jobs=jobs, limit=limit, store=store, resume=resume, retry=retry, done=done)
    table = render.lines(chosen, cells)
    out = console(_WIDE)
    out.print(render.rich_table(table))
    for sentence in render.summary(table):
        out.print(sentence, markup=False)
    return table, cells


def page(table: Sequence[Line]) -> str:
    """The page docs/zoo.md."""
    return _PAGE.format(versions=render.said(sweep.versions()), table=render.markdown(table))


_PAGE = """# The zoo

Every MoE architecture of the installed transformers, found by scanning its source files, and styles of plain torch:
tiny models with random weights (two MoE layers, hidden 64, 8 experts, top-2), compiled with moefuse and compared with
eager. Written by `moefuse zoo --markdown docs/zoo.md` with {versions}.

*yes*: every MoE layer that runs in eager is one fused node, and the result is right, in every setting that was
measured. *refused*: the layer drops tokens or the like, which the node doesn't do; moefuse says so and leaves it. *-*:
the model has no such implementation; empty: not measured. A model with two kinds of MoE layers has two rows. "Own code"
is the model's own Python, mostly a loop over the experts, at which bare torch.compile breaks the graph.

float32 errors are relative to eager's outputs, bfloat16's are those of single layers to float64, as multiples of
eager's own. Capture is moefuse's functional trace, passes everything after it until the fused graph, both CPU time of
one thread; graphs are those of the first call. Tokens: 20 steps of greedy generation with a KV cache give eager's.

{table}"""


def write(table: Sequence[Line], *, markdown: Path | None, html: Path | None) -> None:
    """The pages that were asked for."""
    if markdown:
        markdown.write_text(page(table), encoding="utf-8")
    if html:
        html.write_text(render.html(table, sweep.versions()), encoding="utf-8")
