import json
import operator
import sys

import pytest
import torch
from torch import fx, nn
from torch.testing import FileCheck

import moefuse.ops  # noqa: F401  (defines torch.ops.moefuse)
from moefuse.graph import dump


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x):
        top, ids = self.linear(x).topk(2)
        return top[:, 1:].to(torch.bfloat16), ids


def graph_of(model=None):
    shapes = ({0: torch.export.Dim("rows")},)
    return torch.export.export(model or Model(), (torch.ones(6, 4),), dynamic_shapes=shapes).module()


@pytest.fixture(scope="module")
def gm():
    return graph_of()


def test_text_shows_values_calls_and_origins(gm):
    size = str(next(iter(gm.graph.find_nodes(op="placeholder"))).meta["val"].shape[0])
    FileCheck().check(f"%x : float32[{size}, 4] = placeholder").check(
        f"%linear : float32[{size}, 8] = aten.linear.default(%x, %linear_weight, %linear_bias)  # linear @ "
    ).check(f"%topk : (float32[{size}, 2], int64[{size}, 2]) = aten.topk.default(%linear, 2)").check(
        f"%getitem_1 : int64[{size}, 2] = _operator.getitem(%topk, 1)"
    ).check("torch.bfloat16").check("test_dump.py:").check("return (").run(dump.to_text(gm))


def test_text_is_the_same_for_every_capture(gm):
    torch._dynamo.reset()
    assert dump.to_text(graph_of()) == dump.to_text(gm)


def test_text_never_holds_an_address():
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(operator.neg, (x,))
    graph.output(call)
    gm = fx.GraphModule(nn.Module(), graph)
    # Set afterwards: a GraphModule writes its graph as Python code, which these arguments can't be.
    call.args = (x, object(), sorted, [slice(None, x)], {"k": torch.ones(2)})
    text = dump.to_text(gm)
    assert "0x" not in text
    FileCheck().check("(%x, <object>, builtins.sorted, [:%x], {'k': float32[2]})").run(text)


def test_text_and_json_hold_subgraphs():
    class Branches(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    gm = graph_of(model=Branches())
    FileCheck().check("cond(").check("graph true_graph_0:").check("aten.sin").check("aten.cos").run(
        dump.to_text(gm)
    )
    assert set(dump.to_dict(gm)["subgraphs"]) == {"true_graph_0", "false_graph_0"}


def test_json_has_a_schema_and_every_attribute(gm):
    data = json.loads(dump.to_json(gm))
    assert data["schema"] == "moefuse.graph/1"
    nodes = {node["name"]: node for node in data["nodes"]}
    linear = nodes["linear"]
    assert linear["op"] == "call_function"
    assert linear["target"] == "aten.linear.default"
    assert linear["inputs"] == ["x", "linear_weight", "linear_bias"]
    assert linear["args"] == "%x, %linear_weight, %linear_bias"
    assert linear["shape"][1] == 8
    assert isinstance(linear["shape"][0], str)  # symbolic
    assert linear["dtype"] == "float32"
    assert linear["layer"] == "linear"
    assert nodes["topk"]["shape"] is None  # two tensors
    assert ":" in linear["source"]
    assert "self.linear" in nodes["topk"]["code"]


def test_networkx_has_the_data_flow(gm):
    import networkx

    graph = dump.to_networkx(gm)
    assert len(graph) == len(gm.graph.nodes)
    assert networkx.is_directed_acyclic_graph(graph)
    assert networkx.has_path(graph, "x", "output")
    assert set(graph.predecessors("linear")) == {"x", "linear_weight", "linear_bias"}
    assert graph.nodes["linear"]["target"] == "aten.linear.default"


def test_dot_has_boxes_edges_frames_and_filled_fused_nodes(gm):
    text = dump.to_dot(gm)
    FileCheck().check("cluster_linear").check("label=linear").run(text)
    assert "linear -> topk" in text
    assert "orange" not in text
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.moefuse.mega_moe.default, (x,)))
    assert "orange" in dump.to_dot(fx.GraphModule(nn.Module(), graph))


def test_svg_without_dot_keeps_the_dot_file_and_says_what_to_install(gm, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="install the system package graphviz"):
        dump.to_svg(gm, tmp_path / "a.svg")
    assert "digraph" in (tmp_path / "a.dot").read_text()


def test_dot_without_the_python_package_says_what_to_install(gm, monkeypatch):
    monkeypatch.setitem(sys.modules, "graphviz", None)
    with pytest.raises(ImportError, match=r"pip install 'moefuse\[graph\]'"):
        dump.to_dot(gm)


def fake_dot(folder, script):
    program = folder / "dot"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_svg_is_drawn_by_dot(gm, tmp_path, monkeypatch):
    fake_dot(tmp_path, 'echo "$1 $2" > "$4"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    path = dump.to_svg(gm, tmp_path / "a.svg")
    assert path.read_text().strip() == f"-Tsvg {tmp_path / 'a.dot'}"


def test_a_failing_dot_is_named(gm, tmp_path, monkeypatch):
    fake_dot(tmp_path, "echo no such font >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(RuntimeError, match="no such font"):
        dump.to_svg(gm, tmp_path / "a.svg")


def test_write_dump_names_the_files_after_graph_and_stage(gm, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    written = dump.write_dump(tmp_path / "new" / "folder", 0, "before", gm)
    kinds = ("txt", "json", "graphml", "dot")
    assert [path.name for path in written] == [f"graph0.before.{kind}" for kind in kinds]
    assert written[0].read_text() == dump.to_text(gm)
    assert json.loads(written[1].read_text()) == dump.to_dict(gm)


def test_write_dump_draws_when_dot_is_there_and_survives_its_failure(gm, tmp_path, monkeypatch):
    fake_dot(tmp_path, 'echo drawn > "$4"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert dump.write_dump(tmp_path, 1, "after", gm)[-1].name == "graph1.after.svg"
    fake_dot(tmp_path, "exit 1")
    assert dump.write_dump(tmp_path, 2, "after", gm)[-1].name == "graph2.after.dot"
    fake_dot(tmp_path, "exit 0")
    monkeypatch.setattr(dump, "SVG_MAX_NODES", 1)
    assert dump.write_dump(tmp_path, 3, "after", gm)[-1].name == "graph3.after.dot"


def test_graphml_is_read_back_by_networkx(gm):
    import networkx

    graph = networkx.parse_graphml(dump.to_graphml(gm))
    assert set(graph.nodes) == {node.name for node in gm.graph.nodes}
    assert set(graph.edges) == {
        (arg.name, node.name) for node in gm.graph.nodes for arg in node.all_input_nodes
    }
    assert graph.nodes["linear"]["target"] == "aten.linear.default"
    assert graph.nodes["linear"]["dtype"] == "float32"
    assert graph.nodes["topk"]["shape"] == ""
