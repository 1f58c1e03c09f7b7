"""Layout: boxes don't overlap, data runs downwards, edges start and end at their boxes."""

import itertools
import re

import pytest

from moefuse.report.draw import HEIGHT, WIDTH, draw
from moefuse.report.region import NodeView

pytest.importorskip("fast_sugiyama")


def nodes(edges: dict[str, str]) -> list[NodeView]:
    return [NodeView(name, "op", "", "", "other", tuple(inputs)) for name, inputs in edges.items()]


GRAPHS = {
    "empty": {},
    "one": {"a": ""},
    "chain": {"a": "", "b": "a", "c": "b"},
    "long edge": {"a": "", "b": "a", "c": "b", "d": "c", "e": "da"},
    "two long edges": {"a": "", "b": "a", "c": "b", "d": "ca", "e": "dab"},
    "parts": {"a": "", "b": "a", "x": "", "y": "x", "z": "yx", "lonely": ""},
    "twice": {"a": "", "b": "aa"},
    "outside": {"a": "q", "b": "a"},
}


@pytest.mark.parametrize("name", GRAPHS)
def test_layout(name):
    graph = nodes(GRAPHS[name])
    drawing = draw(graph)
    boxes = {graph[box.index].name: box for box in drawing.boxes}
    assert len(boxes) == len(graph)
    for one, other in itertools.combinations(drawing.boxes, 2):
        assert abs(one.x - other.x) >= WIDTH - 0.5 or abs(one.y - other.y) >= HEIGHT
    for box in drawing.boxes:
        assert box.x >= 0
        assert box.y >= 0
        assert box.x + WIDTH <= drawing.width
        assert box.y + HEIGHT <= drawing.height
    wanted = {(s, n.name) for n in graph for s in n.inputs if s in boxes}
    assert {(graph[a].name, graph[b].name) for a, b, _ in drawing.edges} == wanted
    assert len(drawing.edges) == len(wanted)
    for a, b, path in drawing.edges:
        source, sink = boxes[graph[a].name], boxes[graph[b].name]
        assert source.y < sink.y
        numbers = [float(number) for number in re.findall(r"-?\d+", path)]
        start, end = numbers[:2], numbers[-2:]
        assert start == pytest.approx([source.x + WIDTH / 2, source.y + HEIGHT], abs=1)
        assert end == pytest.approx([sink.x + WIDTH / 2, sink.y], abs=1)


def test_layers_alike_get_the_same_drawing():
    one = draw(nodes(GRAPHS["long edge"]))
    assert draw(nodes({"v" + k: "" for k in "xyz"})) is not one
    renamed = {k.upper(): v.upper() for k, v in GRAPHS["long edge"].items()}
    assert draw(nodes(renamed)) is one
