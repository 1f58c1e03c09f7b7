"""What moefuse did in this process: a report per compiled model, newest last.

In: `record`, called by the backend for every graph. Out: `reports()`. Graphs of one model (Dynamo hands over
several after graph breaks and recompilations) are collected in one report, by the code object they come from.
"""

import itertools
import logging
import threading

from torch.fx import GraphModule

from moefuse.report.model import GraphReport, Report

log = logging.getLogger("moefuse")

KEPT = 1000
"""Graphs remembered: a long-lived process that recompiles forever must not grow."""

_lock = threading.Lock()
_graphs: list[GraphReport] = []
_indices = itertools.count()
_warned_empty = False


def next_index() -> int:
    """A number for a graph, unique in this process."""
    return next(_indices)


def record(gm: GraphModule, report: GraphReport) -> None:
    """Remember a graph's report, and say aloud what wasn't fused."""
    with _lock:
        _graphs.append(report)
        del _graphs[:-KEPT]
    _announce(report)


def reports() -> list[Report]:
    """A report for each graph compiled in this process, oldest first (the newest 1000)."""
    with _lock:
        return [Report((graph,)) for graph in _graphs]


def _announce(report: GraphReport) -> None:
    global _warned_empty
    for site in report.sites:
        if site.fused:
            log.info("fused %s (%s) on %s", site.layer or "(root)", site.spec.describe() if site.spec else "", site.target)
        elif site.check != "exclude":
            log.warning("not fused: %s: %s [%s]", site.layer or "(root)", site.reason, site.source or site.node)
    if not report.sites and not report.error and not _warned_empty:
        _warned_empty = True
        log.warning(
            "no MoE layer found in a graph of %d nodes (%s). A model whose expert loop breaks the graph hides its "
            "layers: see `moefuse explain`.",
            report.nodes_before,
            report.note or "nothing looks like one",
        )
