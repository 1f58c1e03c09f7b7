"""The HTML report as text: complete, self-contained, escaped, and no larger for more layers of a kind."""

import dataclasses
import re
import sys
from html.parser import HTMLParser

import pytest

from moefuse.report import html, text
from moefuse.report.model import GraphReport, LayerReport, Report
from tests.report.models import report

pytest.importorskip("jinja2")
pytest.importorskip("fast_sugiyama")


@pytest.fixture(scope="module")
def mixed() -> Report:
    return report("sum", "mean", "escape")


@pytest.fixture(scope="module")
def page(mixed) -> str:
    return html.render(mixed)


class Tags(HTMLParser):
    """Counts tags and checks that they are closed in order."""

    VOID = ("meta", "link", "input", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        found = [attrs for seen, attrs in self.seen if seen == tag]
        return [a for a in found if all(value in (a.get(key) or "").split() for key, value in wanted.items())]


def test_the_page_is_well_formed_and_needs_nothing_else(page):
    tags = Tags(page)
    assert tags.open == []
    links = [v for _, attrs in tags.seen for k, v in attrs.items() if k in ("src", "href")]
    assert links == ["data:,"]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|https?://", page)


def test_every_layer_has_its_row_with_verdict_and_reason(page, mixed):
    rows = Tags(page).all("tr", **{"class": "layer"})
    assert [row["data-verdict"] for row in rows] == ["yes", "no", "no"]
    assert "3 layers" not in page
    assert text.human_bytes(mixed.sites[0].bytes) in page
    assert "expert rows are reduced by mean, not by a sum" in page
    assert "outside of the layer" in page


def test_an_unfused_layer_says_where_what_reached_it_and_what_would_work(page):
    body = page[page.index('<template id="detail1">') : page.index('<template id="detail2">')]
    assert "models.py" in body
    assert "return x + rows.mean(1)" in body
    assert "What reached it" in body
    assert "Σ" in body
    assert "What would work:</b> sum, with the factor in the routing weights" in body
    assert len(Tags(body).all("g", **{"class": "lost"})) == 1


def test_every_node_is_drawn_with_its_role_before_and_after(page, mixed):
    first = page[page.index('<template id="detail0">') : page.index('<template id="detail1">')]
    boxes = Tags(first).all("g", **{"class": "node"})
    region = mixed.sites[0].region
    assert len(boxes) == len(region.before) + len(region.after)
    roles = {role for box in boxes for role in box["class"].split()} - {"node"}
    assert {"router", "dispatch", "gemm", "activation", "combine", "fused", "input", "weight"} <= roles
    assert roles <= set(html.ROLES)


def test_all_checks_stand_there_with_their_values(page, mixed):
    for check in mixed.sites[0].checks:
        assert f"<th>{check.name}</th>" in page
        for name, value in check.facts.items():
            assert f"{name}={str(value).replace('torch.', '')}" in page


def test_layers_alike_are_stored_once_and_folded():
    sizes = {n: len(html.render(report(*["sum"] * n))) for n in (8, 16)}
    assert sizes[16] - sizes[8] < 8 * 1500  # a row and the names of the nodes
    page = html.render(report(*["sum"] * 8))
    assert page.count("<template") == 2  # the first layer's input is an input of the graph
    assert "8 layers" in page
    rows = Tags(page).all("tr", **{"class": "layer"})
    assert len(rows) == 8
    assert all("hidden" in row for row in rows)


def test_what_comes_from_a_model_is_escaped():
    bad = LayerReport(
        "a<script>x</script>", False, "n", reason="<img src=x> & more", check="lift", source="a<b>.py:1"
    )
    page = html.render(Report((GraphReport(0, (bad,), error="<i>boom</i>", note="<u>"),)))
    assert not re.search(r"<img|<i>|<u>|x</script>", page)
    assert "&lt;img src=x&gt; &amp; more" in page
    assert "&lt;i&gt;boom" in page


def test_a_report_without_graphs_says_how_to_get_them(mixed):
    plain = Report(
        tuple(
            dataclasses.replace(g, sites=tuple(dataclasses.replace(s, region=None) for s in g.sites))
            for g in mixed.graphs
        )
    )
    page = html.render(plain)
    assert "No graphs were recorded" in page
    assert "<svg" not in page


def test_a_report_without_layers():
    assert "No MoE layer was found" in html.render(Report((GraphReport(0, (), 5, 5),)))
    assert "No MoE layer was found" in html.render(Report())


def test_to_html_returns_the_path(mixed, tmp_path):
    path = mixed.to_html(str(tmp_path / "r.html"))
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(FileNotFoundError):
        mixed.to_html(tmp_path / "gone" / "r.html")


@pytest.mark.parametrize("missing", ["jinja2", "fast_sugiyama"])
def test_without_the_extra_the_error_says_what_to_install(mixed, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"{missing}: pip install 'moefuse\[html\]'"):
        html.render(mixed)
