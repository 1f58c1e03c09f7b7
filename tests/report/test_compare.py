"""What counts as a change, and what is noise."""

import dataclasses
import json

import pytest
import torch

from moefuse.graph import dump
from moefuse.report.compare import compare, read
from moefuse.report.model import GraphReport, LayerReport, Report
from moefuse.testing import capture_graph
from tests.report.models import H, model
from tests.report.test_text import FUSED, LOST, REFUSED


def data(*sites: LayerReport):
    return json.loads(Report((GraphReport(0, sites, 10, 5, {"lift": 0.1}),)).to_json())


def test_the_same_report_has_no_difference():
    found = compare(data(FUSED, LOST), data(FUSED, LOST))
    assert found.same
    assert str(found) == "no difference"


@pytest.mark.parametrize(
    "noise", [{"node": "sum_9"}, {"source": "other.py:1"}, {"reason": "`sum_7` reaches aten.scatter_reduce"}]
)
def test_names_and_lines_are_noise(noise):
    old = dataclasses.replace(LOST, reason="`sum_3` reaches aten.scatter_reduce")
    assert compare(data(old), data(dataclasses.replace(old, **noise))).same


def test_layers_come_and_go():
    found = compare(data(FUSED, LOST), data(LOST, REFUSED))
    assert (found.added, found.removed) == (("model.layers.2.mlp",), ("model.layers.0.mlp.experts",))
    assert not found.same
    assert str(found).splitlines() == ["- model.layers.0.mlp.experts", "+ model.layers.2.mlp"]


def test_a_verdict_and_a_specification_that_changed():
    spec = dataclasses.replace(FUSED.spec, num_experts=16, expert_dtype=torch.float32)
    after = dataclasses.replace(FUSED, fused=False, check="top_k", reason="too many", spec=spec, bytes=1)
    found = compare(data(FUSED), data(after))
    changes = {change.field: (change.before, change.after) for change in found.changed}
    assert changes == {
        "fused": (True, False),
        "check": ("", "top_k"),
        "reason": ("", "too many"),
        "bytes": (FUSED.bytes, 1),
        "spec.num_experts": (8, 16),
        "spec.expert_dtype": ("bfloat16", "float32"),
    }
    lines = str(found).splitlines()
    assert lines[0] == "~ model.layers.0.mlp.experts"
    assert "    fused: true -> false" in lines
    assert "    spec.num_experts: 8 -> 16" in lines
    known = compare(data(LOST), data(dataclasses.replace(LOST, spec=spec))).changed
    assert [(c.field, c.before, c.after) for c in known] == [("spec", "unknown", "known")]


def test_the_second_graph_of_a_model_has_the_same_layers_again():
    both = Report((GraphReport(0, (FUSED,)), GraphReport(1, (FUSED,))))
    found = compare(json.loads(both.to_json()), data(FUSED))
    assert found.removed == ("model.layers.0.mlp.experts (graph 2)",)


def test_graphs_are_compared_by_operators():
    graphs = [
        dump.to_dict(capture_graph(model(*kinds), (torch.randn(6, H),)).graph_module)
        for kinds in (["sum"], ["sum", "sum"], ["mean"])
    ]
    assert compare(graphs[0], graphs[0]).same
    twice = compare(graphs[0], graphs[1])
    assert not twice.added
    assert ("aten.topk.default", 1, 2) in [(c.what, c.before, c.after) for c in twice.changed]
    mean = compare(graphs[0], graphs[2])
    assert mean.added == ("aten.mean.dim x 1",)
    assert mean.removed == ("aten.sum.dim_IntList x 1",)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {}, "expected moefuse.report/1 or moefuse.graph/1, got None"),
        (data(), {"schema": "moefuse.graph/1"}, "both must be reports or both graphs"),
        ([], data(), "got None"),
    ],
)
def test_what_cant_be_compared(before, after, message):
    with pytest.raises(ValueError, match=message):
        compare(before, after)


def test_read(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(data(FUSED)))
    assert read(tmp_path) == read(tmp_path / "report.json") == data(FUSED)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no JSON"):
        read(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        read(tmp_path / "list.json")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "gone.json")
