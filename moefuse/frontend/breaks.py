"""Where Dynamo breaks the graph, and what a graph would be without the front end.

In: Dynamo's records. Out: notes for a report: file, line, the construct, and what to change.
"""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx import Graph

from moefuse.ops.loop_markers import marked

_ALONE = "torch.compile alone breaks the graph at"
REWRITTEN = f"through moefuse.compile only: {_ALONE} a loop over experts that branches on data"
DEPENDENT = f"through moefuse.compile or fullgraph=True only: {_ALONE} sizes that depend on data"
SWITCHED = f"through moefuse.compile only: {_ALONE} experts_implementation='eager', run as 'grouped_mm' here"
BRANCH = (
    "take the branch out (an expert without tokens adds nothing), loop over range(number of experts), "
    "or put the loop into a method of a module, where moefuse.compile looks for it"
)

_OWN = os.path.dirname(__file__) + os.sep
_DYNAMO = os.path.join(os.path.dirname(torch.__file__), "_dynamo") + os.sep


def condition_of(graph: Graph) -> str:
    """What the graph needs to be whole; "" if nothing but torch.compile. For a graph as Dynamo hands it over."""
    if marked(graph):
        return REWRITTEN
    return DEPENDENT if any(node.meta.get("unbacked_bindings") for node in graph.nodes) else ""


@contextmanager
def breaks_noted() -> Iterator[list[str]]:
    """A list that is filled, at the end, with a note for every place at which a graph broke meanwhile."""
    reasons = torch._dynamo.utils.graph_break_reasons
    before = len(reasons)
    notes: list[str] = []
    yield notes
    for reason in reasons[before:]:
        note = _note(reason.reason, reason.user_stack)
        if note and note not in notes:
            notes.append(note)


def _note(reason: str, stack: list[traceback.FrameSummary]) -> str:
    frames = [frame for frame in stack if not frame.filename.startswith((_OWN, _DYNAMO))]
    if not frames or reason == "step_unsupported":  # the frame around one that broke
        return ""
    frame, words = frames[-1], reason.strip().split("\n", 1)[0]
    change = f"; {BRANCH}" if "data-dependent" in reason.lower() else ""
    return f"the graph breaks at {frame.filename}:{frame.lineno}: `{frame.line}`: {words}{change}"
