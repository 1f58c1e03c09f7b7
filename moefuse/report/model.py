"""What happened to a model, as data.

In: filled by the backend while it compiles. Out: `Report`, read by people (`text.py`), scripts (`to_dict`)
and tests.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moefuse.ops.spec import MoeSpec
from moefuse.policy.check import CheckResult
from moefuse.report.region import Region

__all__ = [
    "ALREADY",
    "NOTHING_WANTED",
    "NO_GRAPH",
    "CheckResult",
    "ContextReport",
    "GraphReport",
    "LayerReport",
    "Report",
    "SharedReport",
]

NOTHING_WANTED = "mode='off': nothing is fused"
ALREADY = "moefuse's own nodes are in this graph already"
NO_GRAPH = "loops over experts that stay as they are"


@dataclass(frozen=True)
class SharedReport:
    """The verdict on one shared expert: a node of its own, or left to the inner compiler.

    layer, fused, node, reason, check, spec, bytes: as in `LayerReport`; the spec is None where it isn't understood.
    """

    layer: str
    fused: bool
    node: str
    reason: str = ""
    check: str = ""
    spec: MoeSpec | None = None
    bytes: int = 0


@dataclass(frozen=True)
class LayerReport:
    """The verdict on one MoE layer (or on something that looks like one).

    layer: module path such as `model.layers.3.mlp.experts`, "" where the graph has no module names.
    reason, check: "" when fused; otherwise the first thing that stood in the way and the check that says so
        ("lift" where the meaning of the graph was lost, "exclude" for the user's opt-out).
    node: the graph node that was replaced, or the node at which the meaning was lost.
    source: "file:line" of that node in the user's model, "" where unknown.
    bytes: bytes of the expert weights (0 where the spec is unknown).
    copied: of a fused layer, bytes that its target copies of the weights at most, once, at the first run.
    launches_saved: operators that compute something and are gone, less those that came; None where nobody asked
        (`explain` and `dump` do) or nothing was fused.
    region: the nodes before and after for `to_html`; None where nobody asked. Not in JSON.
    comm: of a layer whose experts are spread over ranks, which collectives became part of the node, or stay; else "".
    shared: the verdict on each shared expert beside a fused layer.
    verified: with verify=True, after the first run: the largest relative difference of a token's output between the
        node and its region; None before.
    """

    layer: str
    fused: bool
    node: str
    source: str = ""
    reason: str = ""
    check: str = ""
    target: str = ""
    spec: MoeSpec | None = None
    bytes: int = 0
    checks: tuple[CheckResult, ...] = ()
    verified: float | None = None
    comm: str = ""
    shared: tuple[SharedReport, ...] = ()
    copied: int = 0
    launches_saved: int | None = None
    region: Region | None = field(default=None, repr=False, metadata={"json": False})


@dataclass(frozen=True)
class ContextReport:
    """The communication context that some layers of a graph share.

    group, ranks: the process group's name and size. transport: the way rows take. bytes: shared memory that this rank
    owns. max_tokens: the most that a rank may bring. layers: how many of the graph use it.
    """

    group: str
    ranks: int
    transport: str
    bytes: int
    max_tokens: int
    layers: int


@dataclass(frozen=True)
class GraphReport:
    """One captured graph: its layers in graph order, node counts, CPU seconds per phase, internal error.

    contexts: those of its layers whose experts are spread over ranks.
    """

    index: int
    sites: tuple[LayerReport, ...]
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    note: str = ""
    contexts: tuple[ContextReport, ...] = ()

    @property
    def fused(self) -> int:
        """How many layers were fused."""
        return sum(site.fused for site in self.sites)


@dataclass(frozen=True)
class Report:
    """All captured graphs of one model, in capture order. notes: where the graph breaks, as far as it was watched.

    A graph whose note is `NO_GRAPH` was never one: its sites are loops over experts that didn't get into any.
    """

    graphs: tuple[GraphReport, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def sites(self) -> tuple[LayerReport, ...]:
        """Every MoE layer of every graph, in graph order."""
        return tuple(site for graph in self.graphs for site in graph.sites)

    @property
    def fused(self) -> int:
        """How many layers were fused."""
        return sum(site.fused for site in self.sites)

    def __str__(self) -> str:
        """The report as aligned text."""
        from moefuse.report import text  # text.py reads this module

        return text.plain(self)

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one page that needs nothing else, and return its path.

        Layers show their graphs where the report comes from `moefuse.explain` or a compile with the option dump.
        Raises ImportError without `pip install 'moefuse[html]'`, OSError where `path` can't be written.
        """
        from moefuse.report import html

        return html.write(self, Path(path))

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data, schema `moefuse.report/1`."""
        from moefuse.report import text

        return text.to_dict(self)

    def to_json(self) -> str:
        """`to_dict` as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)
