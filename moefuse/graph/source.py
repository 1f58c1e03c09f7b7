"""What a tracer left on a graph node: its module path, its line in the user's code, its value.

In: FX nodes with the metadata of Dynamo or torch.export. Out: `model.layers.0.mlp.experts`, `file:line` and the source
text of that line, "" wherever the metadata doesn't say; a fake tensor or a symbolic size.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+)(?:, in .*)?\n(?:[ \t]+(?P<code>.*))?')
_GETATTR = re.compile(r"getattr\(([^()]*), ('(?:[^'\\]|\\.)*')\)")
_ROOT = re.compile(r"^[LG]\['[^']*'\](?:\.__closure__\[\d+\]\.cell_contents)?(?:\.__self__)?")
_PART = re.compile(r"\['(?P<key>(?:[^'\\]|\\.)*)'\]|\[(?P<index>-?\d+)\]|\.?(?P<name>[^.\[\]]+)")


def layer_of(node: Node) -> str:
    """The dotted path of the innermost module that made this node; "" for the root module or unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    last = list(stack.values())[-1]
    return module_path(last[0] if isinstance(last, tuple) else str(last))


def module_path(spelling: str) -> str:
    """Dynamo's and torch.export's spellings of a module as one dotted path.

    `L['self'].model.layers.0.mlp`, `L['step'].__self__.model.layers.0.mlp` (a method), `getattr(L['self'].model.layers,
    '0').mlp` and `G['net']._modules['model'].layers[0].mlp` all lose their root and become `model.layers.0.mlp`.
    """
    path, inner = spelling, 1
    while inner:  # innermost call first, so that nested ones unwrap
        path, inner = _GETATTR.subn(r"\1[\2]", path)
    path = _ROOT.sub("", path)
    parts = (match["key"] or match["index"] or match["name"] for match in _PART.finditer(path))
    return ".".join(part for part in parts if part != "_modules")


def common_layer(nodes: Iterable[Node]) -> str:
    """The deepest module that holds all of these nodes.

    Inputs, parameters and nodes that a pass made without any metadata belong to no module: they don't count.
    """
    paths = [
        layer_of(node).split(".")
        for node in nodes
        if node.op not in ("placeholder", "get_attr", "output")
        and (node.meta.get("nn_module_stack") or node.meta.get("stack_trace"))
    ]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in shared)


def source_of(node: Node) -> str:
    """`file:line` of the innermost frame outside torch; "" where unknown."""
    frame = _frame(node)
    return f"{frame['file']}:{frame['line']}" if frame else ""


def code_of(node: Node) -> str:
    """The source text of the line that `source_of` names; "" where unknown."""
    frame = _frame(node)
    return (frame["code"] or "").strip() if frame else ""


def example_of(node: Node) -> Any:
    """What the tracer had for this node: `val` of export and AOTAutograd, `example_value` of Dynamo, or None."""
    return node.meta.get("val", node.meta.get("example_value"))


def _frame(node: Node) -> re.Match[str] | None:
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    users = [frame for frame in frames if not frame["file"].startswith(_TORCH)]
    chosen = users or frames
    return chosen[-1] if chosen else None
