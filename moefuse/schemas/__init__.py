"""JSON schemas of everything that moefuse writes as JSON.

In: a name such as "report". Out: the schema (draft 2020-12) of `moefuse.report/1`, as data. A field may be added within
a version; one that goes or changes its meaning is a new version.
"""

import json
from importlib.resources import files
from typing import Any

_END = ".schema.json"


def names() -> list[str]:
    """All schemas, sorted."""
    found = (entry.name for entry in files(__name__).iterdir())
    return sorted(name.removesuffix(_END) for name in found if name.endswith(_END))


def schema(name: str) -> dict[str, Any]:
    """One schema. Raises ValueError, with the known names, for an unknown one."""
    if name not in names():
        raise ValueError(f"schema: expected one of {', '.join(names())}, got {name!r}")
    found: dict[str, Any] = json.loads(files(__name__).joinpath(name + _END).read_text(encoding="utf-8"))
    return found
