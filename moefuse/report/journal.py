"""What moefuse did in this process: one report per compiled frame, newest last.

In: `record`, called by the backend for every graph. Out: `reports()`. Dynamo compiles a frame again for other
shapes: those graphs are collected in the report of the frame. Each part of a broken graph is a frame of its own.
"""

import itertools
import logging
import threading

from torch._guards import CompileId

from moefuse.report.model import GraphReport, Report

log = logging.getLogger("moefuse")

KEPT = 1000
"""Models and graphs per model remembered: a long-lived process that recompiles forever must not grow."""


class Journal:
    """Thread-safe memory of what was compiled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: list[list[GraphReport]] = []
        self._frames: dict[int | None, list[GraphReport]] = {}
        self._indices = itertools.count()
        self._said_empty = False

    def next_index(self) -> int:
        """A number for a graph, unique in this process."""
        return next(self._indices)

    def record(self, report: GraphReport, compile_id: CompileId | None) -> None:
        """Remember a graph of the frame that Dynamo compiles under this id, and say aloud what wasn't fused."""
        frame = compile_id.frame_id if compile_id is not None else None
        again = compile_id is not None and bool(compile_id.frame_compile_id)
        with self._lock:
            graphs = self._frames.get(frame) if again else None  # numbers start anew when Dynamo is reset
            if graphs is None:
                graphs = self._frames[frame] = []
                self._models.append(graphs)
                self._forget()
            graphs.append(report)
            del graphs[:-KEPT]
            silent = self._said_empty
            self._said_empty = silent or _is_empty(report)
        _announce(report, silent)

    def amend(self, report: GraphReport) -> None:
        """Replace what was recorded under the report's index by what is known now, and say it."""
        with self._lock:
            for graphs in self._models:
                graphs[:] = [report if graph.index == report.index else graph for graph in graphs]
        _announce(report, silent=True)

    def _forget(self) -> None:
        """Drop the oldest models, and the frames that lead to them."""
        dropped = self._models[:-KEPT]
        del self._models[:-KEPT]
        if dropped:
            gone = {id(graphs) for graphs in dropped}
            self._frames = {frame: graphs for frame, graphs in self._frames.items() if id(graphs) not in gone}

    def reports(self) -> list[Report]:
        """A report per compiled frame, oldest first."""
        with self._lock:
            return [Report(tuple(graphs)) for graphs in self._models]


def _is_empty(report: GraphReport) -> bool:
    return not report.sites and not report.error and not report.note.startswith("mode=")


def _announce(report: GraphReport, silent: bool) -> None:
    for site in report.sites:
        layer = site.layer or "(root)"
        if site.fused and site.verified is not None:
            log.info("verified %s: differs by %.2g", layer, site.verified)
        elif site.fused:
            log.info("fused %s (%s) on %s", layer, site.spec.describe() if site.spec else "", site.target)
        elif site.check != "exclude":
            log.warning("not fused: %s: %s [%s]", layer, site.reason, site.source or site.node)
    if _is_empty(report) and not silent:
        log.warning(
            "no MoE layer found in a graph of %d nodes (%s). A model whose expert loop breaks the graph hides its "
            "layers: see `moefuse explain`.",
            report.nodes_before,
            report.note or "nothing looks like one",
        )


JOURNAL = Journal()


def reports() -> list[Report]:
    """What moefuse did in this process: a report per compiled frame, oldest first.

    Recompiles of a frame, for other shapes or for another model of the same class, are graphs of the same report.
    """
    return JOURNAL.reports()
