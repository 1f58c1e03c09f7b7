import io
import json
import sys
from dataclasses import replace

import pytest
import torch

from moefuse.ops.spec import MoeSpec
from moefuse.report import text
from moefuse.report.model import CheckResult, GraphReport, LayerReport, Report

SPEC = MoeSpec(
    num_experts=8,
    top_k=2,
    hidden=64,
    intermediate=48,
    out_features=64,
    device="cpu",
    x_dtype=torch.bfloat16,
    expert_dtype=torch.bfloat16,
    router_dtype=torch.float32,
    output_dtype=torch.bfloat16,
)
FUSED = LayerReport(
    "model.layers.0.mlp.experts", True, "mega_moe", target="cpu", spec=SPEC, bytes=SPEC.weight_bytes
)
LOST = LayerReport(
    "model.layers[1].mlp",
    False,
    "sr_2",
    source="model.py:12",
    reason="expert outputs reach aten.scatter_reduce",
    check="lift",
)
REFUSED = LayerReport(
    "model.layers.2.mlp",
    False,
    "sum_3",
    reason="64 is below 128",
    check="hidden",
    spec=SPEC,
    bytes=SPEC.weight_bytes,
    checks=(CheckResult("hidden", False, "64 is below 128", {"hidden": 64, "dtype": torch.bfloat16}),),
)
GRAPH = GraphReport(0, (FUSED, LOST, REFUSED), 412, 398, {"lift": 0.012, "fuse": 0.5})
BROKEN = GraphReport(1, (), 10, 10, note="2 layers were seen", error="Traceback:\n  line\nValueError: bad\n")


def test_text_names_layers_reasons_nodes_and_lines():
    printed = str(Report((GRAPH, BROKEN)))
    lines = printed.splitlines()
    assert lines[0] == "moefuse: 1 of 3 MoE layers fused in 2 graphs; moefuse failed in 1 graph, see below"
    fused = next(line for line in lines if line.startswith("model.layers.0"))
    assert fused.split() == [
        *("model.layers.0.mlp.experts", "yes", "cpu", "144.0", "KiB"),
        *["8", "experts,", "top-2,", "64", "->", "48", "(swiglu)", "->", "64,", "bfloat16"],
    ]
    start = next(i for i, line in enumerate(lines) if line.startswith("model.layers[1]"))
    assert "NO" in lines[start]
    assert "lift: expert outputs reach aten.scatter_reduce" in lines[start]
    assert lines[start + 1].strip() == "at %sr_2 (model.py:12)"
    assert "what would work" not in lines[start + 2]
    assert "graph 0: 412 -> 398 nodes, lift 12 ms, fuse 500 ms" in lines
    assert lines[-4:] == [
        *("  moefuse failed here; the graph was compiled as it was:", "    Traceback:"),
        *("      line", "    ValueError: bad"),
    ]
    assert "  note: 2 layers were seen" in lines


def test_a_reason_with_a_row_in_the_docs_says_what_would_work():
    lost = replace(LOST, reason="`mean`: expert rows are reduced by mean, not by a sum")
    lines = str(Report((GraphReport(0, (lost,)),))).splitlines()
    assert lines[5].strip() == "what would work: sum, with the factor in the routing weights"


def test_columns_are_aligned():
    lines = str(Report((GRAPH,))).splitlines()
    column = lines[2].index("fused")
    assert [line[column:].split()[0] for line in lines[2:9] if line[0] != " "] == ["fused", "yes", "NO", "NO"]
    described = next(line for line in lines if line.startswith("model.layers.2"))
    assert lines[lines.index(described) + 1].index("hidden:") == described.index("8 experts")


def test_summary_counts_one_as_one():
    report = Report((GraphReport(0, (FUSED,)),))
    assert text.summary(report) == "1 of 1 MoE layer fused in 1 graph"


def test_no_layer_says_what_to_try():
    printed = str(Report((GraphReport(0, (), 5, 5),)))
    assert "No MoE layer was found." in printed
    for hint in ("moefuse.compile(model)", 'experts_implementation="grouped_mm"', "moefuse explain"):
        assert hint in printed
    assert printed.startswith("moefuse: no MoE layer in 1 graph\n")


def test_no_hints_where_finding_nothing_means_nothing():
    off = GraphReport(0, (), 5, 5, note="mode='off': nothing is fused")
    for report in (Report((BROKEN,)), Report((off,))):
        assert "What to try" not in str(report)


def test_str_needs_no_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert "1 of 3" in str(Report((GRAPH,)))
    with pytest.raises(ImportError, match=r"pip install 'moefuse\[cli\]'"):
        text.render(Report((GRAPH,)))


@pytest.mark.parametrize("report", [Report((GRAPH, BROKEN)), Report()])
def test_rich_shows_the_same_words(report):
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=250).print(text.render(report))
    shown = " ".join(out.getvalue().split())
    words = " ".join(str(report).split()).replace("%", "").split()
    missing = [word for word in words if word not in shown]
    assert not missing


def test_json_holds_everything_in_plain_types():
    data = json.loads(Report((GRAPH, BROKEN)).to_json())
    assert data["schema"] == "moefuse.report/1"
    assert data["summary"] == {"layers": 3, "fused": 1, "graphs": 2}
    sites = data["graphs"][0]["sites"]
    assert [site["layer"] for site in sites] == [FUSED.layer, LOST.layer, REFUSED.layer]
    assert sites[0]["spec"]["expert_dtype"] == "bfloat16"
    assert sites[1]["spec"] is None
    assert sites[2]["checks"][0]["facts"] == {"hidden": 64, "dtype": "bfloat16"}
    assert data["graphs"][0]["seconds"] == {"lift": 0.012, "fuse": 0.5}
    assert data["graphs"][1]["error"].endswith("ValueError: bad\n")


def test_json_survives_an_infinite_limit():
    check = CheckResult("limit", False, "", {"limit": float("inf")})
    site = LayerReport("a", False, "n", checks=(check,))
    data = json.loads(Report((GraphReport(0, (site,)),)).to_json())
    assert data["graphs"][0]["sites"][0]["checks"][0]["facts"] == {"limit": "inf"}


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 19, "1.5 MiB"),
        (7 << 30, "7.0 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_human_bytes(count, words):
    assert text.human_bytes(count) == words
