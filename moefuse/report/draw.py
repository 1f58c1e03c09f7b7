"""A small graph as boxes and lines, ready for SVG.

In: the nodes of a region. Out: a `Drawing` in pixels. The layout (layers, few crossings, room for long edges) is
made by fast-sugiyama.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moefuse.report.region import NodeView

WIDTH, HEIGHT = 168, 34
GAP_X, GAP_Y = 22, 24
_MARGIN = 12

_Vertex = int | tuple[int, int]


@dataclass(frozen=True)
class Box:
    """One node: its position in the list of nodes and its upper left corner."""

    index: int
    x: float
    y: float


@dataclass(frozen=True)
class Drawing:
    """Boxes of WIDTH x HEIGHT, and the `d` attribute of each edge's path with the two nodes that it joins."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int, str], ...]


def draw(nodes: Sequence[NodeView]) -> Drawing:
    """Lay the nodes out from top to bottom, in the direction of the data.

    Raises:
        ImportError: fast-sugiyama is missing.
    """
    index = {node.name: i for i, node in enumerate(nodes)}
    edges = [
        (index[source], i)
        for i, node in enumerate(nodes)
        for source in dict.fromkeys(node.inputs)
        if source in index
    ]
    return _drawing(len(nodes), tuple(edges))


@functools.lru_cache(maxsize=64)
def _drawing(count: int, edges: tuple[tuple[int, int], ...]) -> Drawing:
    """Layers of one model are alike: the same edges come out as the very same drawing, and quickly."""
    places: dict[_Vertex, tuple[float, float]] = {}
    onward: dict[tuple[_Vertex, int], _Vertex] = {}
    right = 0.0
    joined = sorted({node for edge in edges for node in edge})
    numbered = [(joined.index(a), joined.index(b)) for a, b in edges]
    for part, (positions, width, _, lines) in enumerate(_layouts(numbered)):
        # The numbers that nobody gave are the bends of long edges; every part has its own.
        own = {v: joined[v] if v < len(joined) else (part, v) for v, _ in positions}
        left, bottom = min(x for _, (x, _) in positions), max(y for _, (_, y) in positions)
        places |= {own[v]: (x - left + right, bottom - y) for v, (x, y) in positions}
        onward |= _sinks([(own[a], own[b]) for a, b in lines])
        right += width + 1
    lonely = [i for i in range(count) if i not in places]
    places |= {i: (right + n, 0.0) for n, i in enumerate(lonely)}
    centres = {vertex: _centre(*place) for vertex, place in places.items()}
    boxes = [Box(i, centres[i][0] - WIDTH / 2, centres[i][1] - HEIGHT / 2) for i in range(count)]
    lines = [(a, b, _path([centres[v] for v in _stations(a, b, onward)])) for a, b in edges]
    return Drawing(
        max((x for x, _ in centres.values()), default=0.0) + WIDTH / 2 + _MARGIN,
        max((y for _, y in centres.values()), default=0.0) + HEIGHT / 2 + _MARGIN,
        tuple(boxes),
        tuple(lines),
    )


def _layouts(edges: list[tuple[int, int]]) -> Any:
    from fast_sugiyama import from_edges

    return from_edges(edges, vertex_spacing=1, dummy_vertices=True, dummy_size=0.2) if edges else ()


def _sinks(lines: list[tuple[_Vertex, _Vertex]]) -> dict[tuple[_Vertex, int], _Vertex]:
    """For each line, and the node that it leads to over all bends: where it goes first."""
    after_bend = {a: b for a, b in lines if not isinstance(a, int)}
    found = {}
    for a, b in lines:
        end = b
        while not isinstance(end, int):
            end = after_bend[end]
        found[a, end] = b
    return found


def _stations(a: int, b: int, onward: dict[tuple[_Vertex, int], _Vertex]) -> list[_Vertex]:
    stations: list[_Vertex] = [a]
    while stations[-1] != b:
        stations.append(onward[stations[-1], b])
    return stations


def _centre(column: float, row: float) -> tuple[float, float]:
    x = _MARGIN + WIDTH / 2 + column * (WIDTH + GAP_X)
    return x, _MARGIN + HEIGHT / 2 + row * (HEIGHT + GAP_Y)


def _path(points: list[tuple[float, float]]) -> str:
    """A smooth line from the lower edge of the first box to the upper edge of the last one."""
    first, last = points[0], points[-1]
    points = [(first[0], first[1] + HEIGHT / 2), *points[1:-1], (last[0], last[1] - HEIGHT / 2)]
    path = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (y0 + y1) / 2
        path += f"C{x0:.0f} {middle:.0f} {x1:.0f} {middle:.0f} {x1:.0f} {y1:.0f}"
    return path
