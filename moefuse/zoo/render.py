"""The zoo's results as pages.

In: rows and measured cells. Out: `Line`s, one per row with one entry per implementation; the same as Markdown, as HTML,
and as a rich table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moefuse.zoo.cell import GENERATE, NO_GENERATION, Cell
from moefuse.zoo.rows import BARE, EAGER, IMPLEMENTATIONS, Row

if TYPE_CHECKING:
    from rich.table import Table

HEADS = {
    "grouped_mm": "grouped_mm",
    "batched_mm": "batched_mm",
    EAGER: "own code, moefuse.compile",
    BARE: "own code, torch.compile",
}
_REST = ("graphs", "float32 error", "bfloat16 error", "capture ms", "passes ms", "tokens", "reason")


@dataclass
class Line:
    """One row of the table. verdicts: per implementation "yes", "no", "refused", "WRONG", "-" (has none), "" (not run).

    refused is right: the layer drops tokens or mixes all of them, which one node doesn't do.
    """

    row: Row
    verdicts: dict[str, str] = field(default_factory=dict)
    layers: int = 0
    graphs: str = ""
    float32: float | None = None
    ratio: float | None = None
    capture: float | None = None
    passes: float | None = None
    tokens: str = ""
    reason: str = ""
    settings: dict[str, list[str]] = field(default_factory=dict)


def lines(rows: Sequence[Row], cells: Sequence[Cell]) -> list[Line]:
    """A line for each row, from all of its cells."""
    by_row: dict[str, list[Cell]] = {}
    for cell in cells:
        by_row.setdefault(cell.row, []).append(cell)
    return [_line(row, by_row.get(row.name, [])) for row in rows]


def _line(row: Row, cells: Sequence[Cell]) -> Line:
    line = Line(row)
    calls = [cell for cell in cells if cell.shapes != GENERATE]
    for name in IMPLEMENTATIONS:
        mine = [cell for cell in calls if cell.implementation == name]
        line.verdicts[name] = _verdict(mine) if name in row.implementations else "-"
        line.settings[name] = [f"{cell.dtype} {cell.shapes}" for cell in mine]
    line.layers = max((cell.layers for cell in calls), default=0)
    line.graphs = ", ".join(dict.fromkeys(graphs(cell) for cell in calls if cell.fused and cell.graphs))
    line.float32 = _largest([cell.error for cell in calls if cell.ratio is None and cell.fused])
    line.ratio = _largest([cell.ratio for cell in calls if cell.fused])
    first = next((cell for cell in calls if cell.fused), None)
    if first:
        line.capture, line.passes = first.capture, first.passes
    generating = [cell for cell in cells if cell.shapes == GENERATE]
    generated = [cell for cell in generating if cell.reason != NO_GENERATION]
    line.tokens = "-" if generating and not generated else _verdict(generated)
    line.reason = _reason(calls, generated)
    return line


def _verdict(cells: Sequence[Cell]) -> str:
    if not cells:
        return ""
    if any(cell.wrong for cell in cells):
        return "WRONG"
    if all(cell.refused for cell in cells):
        return "refused"
    return "yes" if all(cell.ok for cell in cells) else "no"


def _reason(calls: Sequence[Cell], generated: Sequence[Cell]) -> str:
    """Why not, from the first cell that has a reason; that bare torch.compile breaks at a loop is told in the text."""
    told = [cell for cell in calls if cell.implementation != BARE] or calls
    return next((cell.reason for cell in (*told, *generated) if cell.reason), "")


def graphs(cell: Cell) -> str:
    """`1`, or `10 (10 unfused)`."""
    return str(cell.graphs) if cell.plain_graphs is None else f"{cell.graphs} ({cell.plain_graphs} unfused)"


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def summary(table: Sequence[Line]) -> list[str]:
    """What holds for all transformers rows and for all styles, a sentence per implementation."""
    kinds = {
        "transformers": [line for line in table if line.row.module],
        "plain styles": [line for line in table if line.row.file],
    }
    told = [
        f"{kind}, {HEADS[name]}: {_counted(name, some)}"
        for kind, some in kinds.items()
        for name in IMPLEMENTATIONS
        if any(line.verdicts[name] not in ("-", "") for line in some)
    ]
    generated = [line.tokens for line in table if line.tokens not in ("-", "")]
    if generated:
        told.append(
            f"greedy generation: {generated.count('yes')} of {len(generated)} rows give eager's tokens"
        )
    return told


def _counted(name: str, table: Sequence[Line]) -> str:
    run = [line for line in table if line.verdicts[name] not in ("-", "")]
    fusable = [line for line in run if line.row.fusable]
    fused = [line for line in fusable if line.verdicts[name] == "yes"]
    modules = {line.row.module for line in fusable}
    whole = modules - {line.row.module for line in fusable if line not in fused}
    said = f"every layer is fused in {len(fused)} of {len(fusable)} rows that a node can do"
    if modules != {""}:
        said += f" ({len(whole)} of {len(modules)} modules)"
    refused = [line for line in run if not line.row.fusable]
    if refused:
        right = sum(line.verdicts[name] == "refused" for line in refused)
        said += f"; {right} of {len(refused)} others are refused with their reason"
    wrong = sum(line.verdicts[name] == "WRONG" for line in run)
    settings = Counter(setting for line in run for setting in line.settings[name])
    measured = [s if n == len(run) else f"{s} ({n} of these rows)" for s, n in settings.items()]
    return f"{said}; {wrong} wrong results. Measured: {', '.join(measured)}"


def _cells(line: Line) -> list[str]:
    """The texts of a row, from the name to the reason."""
    return [
        line.row.name,
        str(line.layers),
        *(line.verdicts[name] for name in IMPLEMENTATIONS),
        line.graphs,
        "" if line.float32 is None else f"{line.float32:.1e}",
        "" if line.ratio is None else f"{line.ratio:.2f} x eager's",
        "" if line.capture is None else f"{line.capture * 1e3:.0f}",
        "" if line.passes is None else f"{line.passes * 1e3:.0f}",
        line.tokens,
        line.reason,
    ]


def _head() -> list[str]:
    return ["model", "MoE layers", *HEADS.values(), *_REST]


def markdown(table: Sequence[Line]) -> str:
    """The summary and the table, without a title."""
    out = [f"- {sentence}" for sentence in summary(table)]
    out += ["", "| " + " | ".join(_head()) + " |", "|" + "---|" * len(_head())]
    for line in table:
        name, *rest = (text.replace("|", "\\|") for text in _cells(line))
        out.append(f"| `{name}` | " + " | ".join(rest) + " |")
    return "\n".join(out) + "\n"


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>The moefuse zoo</title>
<style>
body{font:14px sans-serif;margin:2em} table{border-collapse:collapse} td,th{padding:.3em .6em;border:1px solid #ccc}
th{position:sticky;top:0;background:#fff;text-align:left} .yes{background:#dfd} .no{background:#fed}
.refused{background:#eef} .WRONG{background:#f99} td.reason{max-width:50em}
</style>
<h1>The moefuse zoo</h1><p>{{ versions }}</p>
<ul>{% for sentence in summary %}<li>{{ sentence }}</li>{% endfor %}</ul>
<table><tr>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for text in row %}<td class="{{ text if text in verdicts else '' }}">{{ text }}</td>
{% endfor %}</tr>
{% endfor %}</table></html>
"""


def html(table: Sequence[Line], versions: Mapping[str, str]) -> str:
    """One page that needs nothing else."""
    from jinja2 import Environment  # torch needs it, so it is there

    page = Environment(autoescape=True).from_string(_PAGE)
    return page.render(
        versions=said(versions),
        summary=summary(table),
        heads=_head(),
        rows=[_cells(line) for line in table],
        verdicts=("yes", "no", "refused", "WRONG"),
    )


def said(versions: Mapping[str, str]) -> str:
    """`moefuse 0.1.0, torch 2.13.0+cpu, transformers 5.24.0`."""
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def rich_table(table: Sequence[Line]) -> Table:
    """For a terminal; without the columns that a narrow one has no room for."""
    from rich.table import Table as RichTable
    from rich.text import Text

    heads = (name.removesuffix("_mm").removeprefix("eager-") for name in IMPLEMENTATIONS)
    grid = RichTable("model", "layers", *heads, "graphs", "reason")
    for column in grid.columns[1:-1]:
        column.no_wrap = True
    grid.columns[0].overflow = "fold"
    styles = {"yes": "green", "no": "yellow", "WRONG": "bold red", "refused": "cyan"}
    for line in table:
        texts = _cells(line)
        shown = [*texts[: 2 + len(IMPLEMENTATIONS) + 1], texts[-1]]
        grid.add_row(*(Text(text, style=styles.get(text, "")) for text in shown))
    return grid
