"""What changed between two versions of a model, or of moefuse.

In: two reports (schema `moefuse.report/1`) or two graphs (`moefuse.graph/1`) as JSON data. Out: `Difference`. Node
names, lines and times aren't compared: they change with every edit and mean nothing by themselves.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moefuse.graph import dump
from moefuse.report import text

SCHEMA = "moefuse.diff/1"
_COMPARED = ("fused", "check", "reason", "target", "bytes", "launches_saved")
_NAME = re.compile(r"`\w+`")


@dataclass(frozen=True)
class Change:
    """One field of one layer, or the number of one operator's calls."""

    what: str
    field: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Difference:
    """added, removed: layers (or operators) that only one side has. of: the schema of both sides."""

    of: str
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[Change, ...] = ()

    @property
    def same(self) -> bool:
        """True when nothing changed."""
        return not (self.added or self.removed or self.changed)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data, schema `moefuse.diff/1`."""
        return {"schema": SCHEMA, "same": self.same, **json.loads(json.dumps(asdict(self)))}

    def __str__(self) -> str:
        """One line per difference, grouped by layer."""
        if self.same:
            return "no difference"
        lines = [f"- {name}" for name in self.removed] + [f"+ {name}" for name in self.added]
        last = None
        for change in self.changed:
            lines += [f"~ {change.what}"] if change.what != last else []
            lines.append(f"    {change.field}: {_shown(change.before)} -> {_shown(change.after)}")
            last = change.what
        return "\n".join(lines)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference:
    """Compare two pieces of JSON data.

    Raises:
        ValueError: one has no known schema, or they have two different ones.
    """
    kinds = [data.get("schema") if isinstance(data, Mapping) else None for data in (before, after)]
    for kind in kinds:
        if kind not in (text.SCHEMA, dump.SCHEMA):
            raise ValueError(f"schema: expected {text.SCHEMA} or {dump.SCHEMA}, got {kind!r}")
    if kinds[0] != kinds[1]:
        raise ValueError(f"both must be reports or both graphs, got {kinds[0]} and {kinds[1]}")
    if kinds[0] == dump.SCHEMA:
        return _operators(_counts(before), _counts(after))
    return _layers(dict(_sites(before)), dict(_sites(after)))


def read(path: Path) -> dict[str, Any]:
    """The JSON data of a file, or of the report in a dump's folder. Raises OSError, or ValueError for no JSON."""
    file = path / "report.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} holds no JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(data).__name__}")
    return data


def _sites(report: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every layer under a name of its own: a second graph of the model has the same layers again."""
    seen: Counter[str] = Counter()
    for graph in report["graphs"]:
        for site in graph["sites"]:
            layer = site["layer"] or "(root)"
            seen[layer] += 1
            yield (layer if seen[layer] == 1 else f"{layer} (graph {seen[layer]})"), site


def _layers(before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference:
    changed = [
        Change(name, field, old, new)
        for name in before
        if name in after
        for field, old, new in _fields(before[name], after[name])
    ]
    return Difference(
        text.SCHEMA,
        tuple(name for name in after if name not in before),
        tuple(name for name in before if name not in after),
        tuple(changed),
    )


def _fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in _COMPARED:
        old, new = before.get(name), after.get(name)
        if _nameless(old) != _nameless(new):
            yield name, old, new
    specs = before.get("spec") or {}, after.get("spec") or {}
    if bool(specs[0]) != bool(specs[1]):
        yield "spec", "known" if specs[0] else "unknown", "known" if specs[1] else "unknown"
        return
    for name in dict.fromkeys([*specs[0], *specs[1]]):
        if specs[0].get(name) != specs[1].get(name):
            yield f"spec.{name}", specs[0].get(name), specs[1].get(name)


def _nameless(item: Any) -> Any:
    return _NAME.sub("`...`", item) if isinstance(item, str) else item


def _counts(graph: Mapping[str, Any]) -> Counter[str]:
    counts = Counter(node["target"] for node in graph["nodes"] if node["op"].startswith("call"))
    for subgraph in graph["subgraphs"].values():
        counts += _counts(subgraph)
    return counts


def _operators(before: Counter[str], after: Counter[str]) -> Difference:
    return Difference(
        dump.SCHEMA,
        tuple(sorted(f"{name} x {count}" for name, count in after.items() if name not in before)),
        tuple(sorted(f"{name} x {count}" for name, count in before.items() if name not in after)),
        tuple(
            Change(name, "calls", before[name], after[name])
            for name in sorted(before)
            if name in after and before[name] != after[name]
        ),
    )


def _shown(item: Any) -> str:
    return json.dumps(item) if isinstance(item, str | bool | None) else str(item)
