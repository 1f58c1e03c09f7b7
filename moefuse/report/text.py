"""A report for people and for scripts.

In: a `Report`. Out: aligned plain text (`plain`), a rich table (`render`), or JSON-ready data with a `schema`
key (`to_dict`). Only `render` needs rich.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from moefuse.report.advice import advice
from moefuse.report.model import (
    ALREADY,
    NO_GRAPH,
    NOTHING_WANTED,
    GraphReport,
    LayerReport,
    Report,
    SharedReport,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "moefuse.report/1"
_HEAD = ("layer", "fused", "target", "weights", "what it computes, or why it isn't fused")
_NOTHING = (
    "No MoE layer was found.",
    "What to try:",
    "  - after torch.compile: moefuse.compile(model), which gets loops over experts into one graph",
    '  - transformers models: experts_implementation="grouped_mm"',
    "  - moefuse.explain(model, ...), `moefuse explain`: each place where the graph breaks; a part has no whole layer",
    "  - the other reports of moefuse.reports(): each part of a broken graph has its own",
    "  - the option dump, or `moefuse dump`, for the graph that was searched",
)


def plain(report: Report) -> str:
    """The whole report as aligned text, without a final newline."""
    sections = ["moefuse: " + summary(report)]
    if report.sites:
        rows = [_HEAD, *(_row(site) for site in report.sites)]
        widths = [max(len(row[i].split("\n")[0]) for row in rows) for i in range(len(_HEAD) - 1)]
        sections.append("\n".join(_aligned(row, widths) for row in rows))
    elif _searched(report):
        sections.append("\n".join(_NOTHING))
    if lines := graph_lines(report):
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def render(report: Report) -> RenderableType:
    """The same content for a rich console.

    Raises:
        ImportError: rich is missing; `str(report)` works without it.
    """
    try:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ImportError(
            "render needs rich: pip install 'moefuse[cli]'; str(report) works without"
        ) from error
    parts: list[RenderableType] = []
    if report.sites:
        table = Table(*_HEAD, title="moefuse: " + summary(report), title_justify="left", show_lines=True)
        table.columns[0].overflow = "fold"
        for site in report.sites:
            # Text, not str: a module path such as layers[0] must not be read as markup.
            table.add_row(*(Text(cell) for cell in _row(site)), style="green" if site.fused else "yellow")
        parts.append(table)
    else:
        parts.append(Text("moefuse: " + summary(report), style="bold"))
        if _searched(report):
            parts.append(Text("\n".join(_NOTHING), style="yellow"))
    failed = any(graph.error for graph in report.graphs)
    parts += [Text(line, style="red" if failed else "") for line in graph_lines(report)]
    return Group(*parts)


def to_dict(report: Report) -> dict[str, Any]:
    """JSON-ready data: every field of the report plus `schema` and `summary`; dtypes as their short names."""
    return {
        "schema": SCHEMA,
        "summary": {"layers": len(report.sites), "fused": report.fused, "graphs": len(report.graphs)},
        "graphs": [_jsonable(graph) for graph in report.graphs],
        "notes": list(report.notes),
    }


def summary(report: Report) -> str:
    """`2 of 2 MoE layers fused in 1 graph`."""
    layers = _count(len(report.sites), "MoE layer")
    fused = f"{report.fused} of {layers} fused" if report.sites else "no MoE layer"
    failed = sum(bool(graph.error) for graph in report.graphs)
    trouble = f"; moefuse failed in {_count(failed, 'graph')}, see below" if failed else ""
    graphs = sum(graph.note != NO_GRAPH for graph in report.graphs)
    return f"{fused} in {_count(graphs, 'graph')}{trouble}"


def graph_lines(report: Report) -> list[str]:
    """A line (or more) for each graph, then the notes."""
    return [*(graph_line(graph) for graph in report.graphs if graph.note != NO_GRAPH), *report.notes]


def graph_line(graph: GraphReport) -> str:
    """`graph 0: 412 -> 398 nodes, lift 12 ms, fuse 3 ms`, then the note and the error's traceback, if any."""
    if not graph.nodes_before and graph.note:  # not a graph: what was found before one was captured
        return graph.note
    times = [f"{phase} {seconds * 1e3:.3g} ms" for phase, seconds in graph.seconds.items()]
    line = f"graph {graph.index}: " + ", ".join(
        [f"{graph.nodes_before} -> {graph.nodes_after} nodes", *times]
    )
    for context in graph.contexts:
        layers, size = _count(context.layers, "layer"), human_bytes(context.bytes)
        line += (
            f"\n  context of {context.ranks} ranks of group {context.group}: {size} by {context.transport}, up to "
            f"{context.max_tokens} tokens per rank, shared by {layers}"
        )
    if graph.note:
        line += f"\n  note: {graph.note}"
    if graph.error:
        trace = "\n".join(f"    {part}" for part in graph.error.rstrip().splitlines())
        line += f"\n  moefuse failed here; the graph was compiled as it was:\n{trace}"
    return line


def human_bytes(count: int) -> str:
    """`0 B`, `96.0 KiB`, `1.5 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _searched(report: Report) -> bool:
    """Whether finding nothing means something: no graph failed, none is fused already, and none was left out."""
    return not any(graph.error or graph.note in (NOTHING_WANTED, ALREADY) for graph in report.graphs)


def _row(site: LayerReport) -> tuple[str, ...]:
    """One cell per column of `_HEAD`; the last one may have several lines."""
    words = [site.spec.describe()] if site.spec else []
    if site.verified is not None and site.fused:
        words.append(f"verified: differs by {site.verified:.2g}")
    if site.comm:
        words.append(site.comm)
    words += map(shared_words, site.shared)
    if site.copied:
        words.append(f"copies of its weights, made once: up to {human_bytes(site.copied)}")
    if not site.fused:
        check = f"{site.check}: " if site.check else ""
        place = f" ({site.source})" if site.source else ""
        at = f"at %{site.node}{place}" if site.node else f"at {site.source}"
        words += [f"{check}{site.reason}", at]
        if hint := advice(site.reason):
            words.append(f"what would work: {hint}")
    weights = human_bytes(site.bytes) if site.bytes else "-"
    return (
        site.layer or "(root)",
        "yes" if site.fused else "NO",
        site.target or "-",
        weights,
        "\n".join(words),
    )


def shared_words(expert: SharedReport) -> str:
    """The verdict on a shared expert, one line."""
    spec = expert.spec
    name = f" {expert.layer}" if expert.layer else ""
    what = (
        f", {spec.hidden} -> {spec.intermediate} ({spec.activation}) -> {spec.out_features}" if spec else ""
    )
    verdict = (
        "a node of its own"
        if expert.fused
        else f"left to the inner compiler, {expert.check}: {expert.reason}"
    )
    return f"shared expert{name}{what}: {verdict}"


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    head = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
    indent = "\n" + " " * (len(head) + 2)
    return f"{head}  {indent.join(row[-1].splitlines())}".rstrip()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _jsonable(value: Any) -> Any:
    """Dataclasses, mappings and sequences down to JSON's own types; anything else as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.metadata.get("json", True)]
        return {name: _jsonable(getattr(value, name)) for name in fields}
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # a limit of infinity; JSON has no number for it
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
