"""A report as one HTML page that needs nothing else: no network, no other file, no framework.

In: a `Report`. Out: the page's text (`render`) or a file (`write`). The layers of one model are alike, so what is shown
of a layer is stored once for all that differ in node names only: a page grows with the kinds of layers, not with
their number.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moefuse._version import __version__
from moefuse.report import text
from moefuse.report.advice import advice
from moefuse.report.draw import HEIGHT, WIDTH, draw
from moefuse.report.model import GraphReport, LayerReport, Report
from moefuse.report.region import NodeView

if TYPE_CHECKING:
    from jinja2 import Environment

FOLD = 6
"""So many neighbours that say the same are folded into one row."""
LONGEST = 600
"""Characters of one text about a node; names count as a few, so that a layer's own names don't decide where it ends."""
ROLES = {
    "router": "chooses experts and weights",
    "dispatch": "brings tokens to their experts",
    "gemm": "multiplies with expert weights",
    "activation": "between the GEMMs",
    "combine": "weighs and sums over the slots",
    "fused": "the one node instead",
    "input": "comes from outside",
    "weight": "expert weights",
    "other": "stands beside it",
}
_NAME = re.compile(r"(?<=[%`])[A-Za-z_]\w*")
_PARAMETER = re.compile(r"^[lp]_+.*?_?(?:parameters|buffers)_+")


def write(report: Report, path: Path) -> Path:
    """Write the page. Raises ImportError as `render`, OSError where `path` can't be written."""
    page = render(report)
    path.write_text(page, encoding="utf-8")
    return path


def render(report: Report, files: Sequence[str] = ()) -> str:
    """The whole page. files: names beside it to link to.

    Raises:
        ImportError: jinja2 or fast-sugiyama is missing; str(report) and to_json work without.
    """
    try:
        import fast_sugiyama  # noqa: F401  (draw needs it; better told before the work than in the middle)
        import jinja2
    except ImportError as error:
        raise ImportError(
            f"the HTML report needs {error.name}: pip install 'moefuse[html]'; str(report) works without"
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("moefuse.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    # Tracebacks are shown apart, folded.
    without_errors = replace(report, graphs=tuple(replace(graph, error="") for graph in report.graphs))
    details = _Details(environment)
    groups = [group for graph in report.graphs for group in _groups(graph, details)]
    return environment.get_template("report.html.jinja").render(
        version=__version__,
        torch_version=torch.__version__,
        summary=text.summary(report),
        files=files,
        report=report,
        groups=groups,
        details=details.bodies,
        names=details.names,
        roles=ROLES,
        errors=[graph for graph in report.graphs if graph.error],
        lines=text.graph_lines(without_errors),
    )


def _groups(graph: GraphReport, details: "_Details") -> Iterator[dict[str, Any]]:
    """Rows of the table; neighbours that say the same in one group."""
    for key, sites in itertools.groupby(graph.sites, _key):
        rows = [_row(site, details) for site in sites]
        size = FOLD if len(rows) >= FOLD else 1
        for block in [rows] if size == FOLD else [[row] for row in rows]:
            yield {
                "rows": block,
                "fold": len(block) > 1,
                "graph": graph.index,
                "layers": _span(block),
                "say": key[0],
            }


def _key(site: LayerReport) -> tuple[Any, ...]:
    words = site.spec.describe() if site.spec else site.check
    return words, site.fused, site.target, site.check, site.bytes, site.launches_saved


def _span(rows: Sequence[dict[str, Any]]) -> str:
    """`model.layers.0.mlp ... model.layers.93.mlp`."""
    return rows[0]["layer"] if len(rows) == 1 else f"{rows[0]['layer']} … {rows[-1]['layer']}"


def _row(site: LayerReport, details: "_Details") -> dict[str, Any]:
    number, names = details.add(site)
    return {
        "layer": site.layer or "(root)",
        "fused": site.fused,
        "target": site.target or "-",
        "words": site.spec.describe() if site.spec else "",
        "check": site.check,
        "reason": site.reason,
        "bytes": text.human_bytes(site.bytes) if site.bytes else "-",
        "saved": "-" if site.launches_saved is None else str(site.launches_saved),
        "source": _short(site.source),
        "detail": number,
        "names": names,
    }


class _Details:
    """What opens when a layer is clicked: `bodies`, each once; nodes are `⟦3⟧`, the layer's own names fill them in."""

    def __init__(self, environment: "Environment") -> None:
        self.template = environment.get_template("layer.html.jinja")
        self.bodies: dict[str, int] = {}
        self.names: list[list[str]] = []

    def add(self, site: LayerReport) -> tuple[int, int]:
        """The numbers of the layer's body and of its names."""
        region = site.region
        nodes = [*region.before, *region.after] if region else []
        said = (
            found
            for node in nodes
            for words in (node.args, node.fact, node.loss)
            for found in _NAME.findall(words)
        )
        names = list(dict.fromkeys([*(node.name for node in nodes), site.node, *said]))
        index = {name: i for i, name in enumerate(names)}

        def marked(words: str) -> str:
            words = _NAME.sub(lambda m: f"⟦{index[m[0]]}⟧" if m[0] in index else m[0], words)
            return words if len(words) <= LONGEST else words[:LONGEST].rpartition(" ")[0] + " …"

        graphs = [("before", region.before), ("after", region.after)] if region else []
        losses = region.losses if region else ()
        root = losses[-1].node if losses else site.node
        blamed = {root} if losses else set(_NAME.findall(site.reason))
        body = self.template.render(
            site=site,
            marked=marked,
            short=_short,
            index=index,
            width=WIDTH,
            height=HEIGHT,
            graphs=[
                (stage, _boxes(stage, views, index, blamed), draw(views)) for stage, views in graphs if views
            ],
            data=[_node(node, stage, index, marked) for stage, views in graphs for node in views],
            left_out=region.left_out if region else 0,
            lines=_lines(region.before) if region else [],
            losses=losses,
            shared=[marked(text.shared_words(replace(expert, layer=""))) for expert in site.shared],
            reached=_reached(region.before, root) if losses and region else [],
            advice=advice(site.reason) if site.reason else "",
        )
        self.names.append([_label(name) for name in names])
        return self.bodies.setdefault(body, len(self.bodies)), len(self.names) - 1


def _boxes(
    stage: str, views: Sequence[NodeView], index: dict[str, int], blamed: set[str]
) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{stage}{i}",
            "role": node.role,
            "name": index[node.name],
            "op": _op(node),
            "value": node.value if len(node.value) <= 27 else node.value[:26] + "…",
            "lost": stage == "before" and node.name in blamed,
        }
        for i, node in enumerate(views)
    ]


def _node(node: NodeView, stage: str, index: dict[str, int], marked: Any) -> dict[str, Any]:
    """What the panel shows of one node."""
    shown = {
        key: item for key, item in asdict(node).items() if item and key not in ("name", "inputs", "gone")
    }
    shown |= {"name": f"⟦{index[node.name]}⟧", "source": _short(node.source)}
    for key in ("args", "fact", "loss"):
        if key in shown:
            shown[key] = marked(shown[key])
    return shown | ({"gone": node.gone} if stage == "before" else {})


def _op(node: NodeView) -> str:
    """`aten.mm`, and just what it is for a node that calls nothing."""
    name = "parameter" if node.role == "weight" else node.op
    return name.removeprefix("_operator.").removesuffix(".default")


def _label(name: str) -> str:
    """A node's name as people read it: a parameter's without the path that Dynamo spells out."""
    found = _PARAMETER.match(name)
    return name[found.end() :].rstrip("_") if found else name


def _reached(views: Sequence[NodeView], node: str) -> list[NodeView]:
    """The operands of the node at which the meaning was lost."""
    wanted = next((view.inputs for view in views if view.name == node), ())
    return [view for view in views if view.name in wanted]


def _lines(views: Sequence[NodeView]) -> list[tuple[str, list[dict[str, str]]]]:
    """The model's lines that made the layer: per file its lines, each with the role that most of its nodes have."""
    roles: dict[tuple[str, int], list[str]] = {}
    code: dict[tuple[str, int], str] = {}
    for view in views:
        file, _, line = view.source.rpartition(":")
        if view.code and line.isdigit() and view.role not in ("input", "weight"):
            roles.setdefault((file, int(line)), []).append(view.role)
            code[file, int(line)] = view.code
    found: dict[str, list[dict[str, str]]] = {}
    for place in sorted(code):
        role = max(roles[place], key=roles[place].count)
        found.setdefault(_short(place[0]), []).append(
            {"line": str(place[1]), "code": code[place], "role": role}
        )
    return list(found.items())


def _short(source: str) -> str:
    """A path inside an installed package from the package on, any other by its last two parts."""
    inside = source.partition("site-packages/")[2]
    return inside or "/".join(source.split("/")[-2:])
