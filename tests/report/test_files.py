"""A dump's folder: the report, the graphs, and an index that lists exactly what is there."""

import json
import re
import sys

import pytest

from moefuse.report.files import write_report
from moefuse.report.model import GraphReport, LayerReport, Report
from tests.report.models import report

SMALL = Report((GraphReport(3, (LayerReport("mlp", False, "n", reason="why", check="lift"),)),))


def test_the_report_is_written_as_printed_and_as_json(tmp_path):
    write_report(tmp_path / "new", SMALL)
    assert (tmp_path / "new/report.txt").read_text() == f"{SMALL}\n"
    assert json.loads((tmp_path / "new/report.json").read_text()) == SMALL.to_dict()


def test_the_index_lists_every_file_of_this_report_only(tmp_path):
    (tmp_path / "graph99999.before.txt").write_text("an earlier run's")
    made = report("sum", "mean", dump=str(tmp_path))
    index = json.loads((tmp_path / "index.json").read_text())
    (graph,) = index["graphs"]
    assert (graph["index"], graph["layers"], graph["fused"]) == (made.graphs[0].index, 2, 1)
    listed = {name for files in graph["stages"].values() for name in files}
    own = {"report.txt", "report.json", "index.json", "index.html", "graph99999.before.txt"}
    assert listed == {path.name for path in tmp_path.iterdir()} - own
    assert len(listed) >= 6
    page = (tmp_path / "index.html").read_text()
    links = set(re.findall(r'<a href="([^"]+)">', page))
    assert links == listed | {"report.txt", "report.json", "index.json"}


def test_without_the_extra_there_is_no_page(tmp_path, monkeypatch):
    pytest.importorskip("jinja2")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    names = [path.name for path in write_report(tmp_path, SMALL)]
    assert names == ["report.txt", "report.json", "index.json"]
