"""Rows as a table, as JSON-ready data, and as a plot.

In: rows. Out: rich tables, a dictionary with the schema `moefuse.bench/1`, a file of curves: milliseconds over tokens,
a panel per shape, dtype, routing and number of threads, with the roofline.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from moefuse.bench.contestants import OURS
from moefuse.bench.model import ModelRow
from moefuse.bench.run import Entry, Row

SCHEMA = "moefuse.bench/1"


def table(rows: Sequence[Row]) -> Table:
    """A line per row: each contestant's milliseconds and how many times faster moefuse is."""
    shown = Table(title="medians in ms; in brackets how many times faster moefuse is", title_justify="left")
    for head in ("shape", "tokens"):
        shown.add_column(head, justify="left" if head == "shape" else "right")
    names = list(dict.fromkeys(name for row in rows for name in row.entries))
    for name in (*names, "roof", "share", "error", "memory"):
        shown.add_column(name, justify="right")
    last = ""
    for row in rows:
        title = heading(row)
        cells = [_time(row, name) for name in names]
        ours = row.entries.get(OURS, Entry())
        share = "" if row.share is None else f"{row.share:.0%}"
        memory = "" if ours.extra_bytes is None else f"{ours.extra_bytes / 2**20:.0f} MiB"
        shown.add_row(
            "" if title == last else title,
            str(row.tokens),
            *cells,
            f"{row.roof_ms:.3g}",
            share,
            _error(row),
            memory,
        )
        last = title
    return shown


def heading(row: Row) -> str:
    """`qwen3 2048/768/128/8 bfloat16, uniform, 2 threads`, and what memory took away."""
    words = f"{row.shape} {row.sizes}\n{row.dtype}, {row.routing}, {counted(row.threads, 'thread')}"
    if row.experts < row.model_experts:
        words += f"\n{row.experts} of the model's {row.model_experts} experts: memory"
    return words


def counted(count: int, what: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{count} {what}{'s' if count > 1 else ''}"


def _time(row: Row, name: str) -> str:
    entry = row.entries.get(name, Entry())
    if entry.ms is None:
        return "-"
    ratio = row.ratio(name)
    return f"{entry.ms:.3g}" + ("" if name == OURS or ratio is None else f" ({ratio:.2f}x)")


def _error(row: Row) -> str:
    """Our error, and as a multiple of the best other one."""
    ours = row.entries.get(OURS, Entry()).error
    others = [e.error for name, e in row.entries.items() if name != OURS and e.error is not None]
    if ours is None:
        return ""
    best: float = min(others, default=0.0)
    return f"{ours:.1e}" + (f" ({ours / best:.2f}x)" if best else "")


def notes(rows: Sequence[Row], absent: Mapping[str, str]) -> list[str]:
    """What the table has no place for: limits, workspace, reasons for gaps, who is absent."""
    found = [f"{name}: {why}" for name, why in absent.items()]
    for row in rows:
        found += [
            f"{row.shape}, {row.dtype}: {name} keeps {entry.setup_bytes / 2**20:.0f} MiB for its own form of "
            f"{row.experts} experts' weights"
            for name, entry in row.entries.items()
            if entry.setup_bytes
        ]
        found += [
            f"{row.shape}, {row.tokens} tokens, {name}: {entry.reason}"
            for name, entry in row.entries.items()
            if entry.reason
        ]
    for settings, own in _by(rows, lambda row: f"{row.shape}, {row.dtype}").items():
        errors = {
            name: max(
                entry.error for row in own if (entry := row.entries.get(name)) and entry.error is not None
            )
            for name in own[0].entries
            if any(name in row.entries and row.entries[name].error is not None for row in own)
        }
        said = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        found.append(f"{settings}, largest error to float64: {said}")
    if rows:
        reads, peaks = [row.read / 1e9 for row in rows], [row.peak / 1e9 for row in rows]
        workspace = max(row.workspace_bytes for row in rows)
        found.append(
            f"roof: reads {min(reads):.1f} to {max(reads):.1f} GB/s, multiplies {min(peaks):.0f} to {max(peaks):.0f} "
            "GFLOP/s, probed between the calls; share: of it, reached by moefuse"
        )
        found.append(
            "error: moefuse's to float64, and as a multiple of the best other contestant's; memory: the most that a "
            f"call of moefuse adds; at most {workspace / 2**20:.0f} MiB of it are kept for the next call"
        )
    return list(dict.fromkeys(found))


def _by(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Rows in groups, in the order of their first ones."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def model_table(rows: Sequence[ModelRow]) -> Table:
    """Tokens per second of each contestant."""
    shown = Table(
        title="tokens per second; in brackets how many times faster moefuse is", title_justify="left"
    )
    names = list(dict.fromkeys(name for row in rows for name in row.tokens_per_second))
    for head in ("model", "phase", "tokens", *names):
        shown.add_column(head, justify="left" if head in ("model", "phase") else "right")
    for row in rows:
        cells = []
        for name in names:
            ratio = row.ratio(name)
            speed = f"{row.tokens_per_second[name]:.3g}"
            cells.append(speed if name == OURS or ratio is None else f"{speed} ({ratio:.2f}x)")
        title = f"Qwen3-MoE, {counted(row.layers, 'layer')}, {row.dtype}, {counted(row.threads, 'thread')}"
        shown.add_row(title, row.phase, str(row.tokens), *cells)
    return shown


def data(
    machine: Mapping[str, Any],
    absent: Mapping[str, str],
    rows: Sequence[Row],
    models: Sequence[ModelRow],
) -> dict[str, Any]:
    """Everything as JSON-ready data."""
    layers = []
    for row in rows:
        ratios = {name: row.ratio(name) for name in row.entries if name != OURS}
        layers.append(dataclasses.asdict(row) | {"share": row.share, "ratios": ratios})
    return {
        "schema": SCHEMA,
        "machine": dict(machine),
        "absent": dict(absent),
        "layers": layers,
        "models": [dataclasses.asdict(row) for row in models],
    }


def check_plot(path: Path) -> None:
    """Before anything is measured: can this file be drawn? Raises ImportError or ValueError."""
    figure = _figure((1, 1))
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds:
        raise ValueError(f"--plot must end in one of {', '.join(sorted(kinds))}, got {path}")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the curves. Raises ImportError without matplotlib, ValueError for an unknown kind of file."""
    panels = _by(rows, heading)
    columns = min(3, max(1, len(panels)))
    lines = math.ceil(len(panels) / columns) or 1
    figure = _figure((4.2 * columns, 3.2 * lines))
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for axis, (title, own) in zip(axes, panels.items(), strict=False):
        tokens = [row.tokens for row in own]
        for name in own[0].entries:
            values = [row.entries[name].ms if name in row.entries else None for row in own]
            axis.plot(
                tokens,
                [math.nan if value is None else value for value in values],
                label=name,
                marker="o",
                markersize=3,
                linewidth=2.5 if name == OURS else 1,
            )
        axis.plot(tokens, [row.roof_ms for row in own], label="roofline", color="black", linestyle="--")
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms")
        axis.set_title(title, fontsize=8)
        axis.set_xticks(tokens, [str(value) for value in tokens])
        axis.minorticks_off()
    for axis in list(axes):  # what is left of the iterator: places without a panel
        axis.remove()
    if panels:
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=min(8, len(names)), fontsize=8)
    figure.savefig(path)


def _figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'moefuse[plot]'") from error
    return Figure(figsize=size, layout="constrained")
