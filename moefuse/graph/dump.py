"""FX graphs as files: text for people and FileCheck, JSON, networkx and GraphML, Graphviz DOT and SVG.

In: a `torch.fx.GraphModule`. Out: deterministic text (no addresses, no timings), dictionaries with a
`schema` key, or files. networkx and graphviz are imported by the functions that need them.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from moefuse.graph.source import code_of, example_of, layer_of, source_of

if TYPE_CHECKING:
    import networkx

SCHEMA = "moefuse.graph/1"
SVG_MAX_NODES = 1000
"""`write_dump` draws no larger graph: dot takes minutes for them and nobody can read the picture."""
SVG_SECONDS = 120
_FUSED = "moefuse."  # operators of this namespace stand out in pictures


def to_text(gm: fx.GraphModule) -> str:
    """One line per node: `%name : dtype[sizes] = target(arguments)  # layer @ file:line`.

    Subgraphs (branches of cond, checkpointed regions) follow under their own heading.
    """
    lines = []
    for node in gm.graph.nodes:
        if node.op == "output":
            lines.append(f"return {_show(node.args[0])}")
            continue
        example = example_of(node)
        value = "" if example is None else f" : {show_value(example)}"
        origin = " @ ".join(part for part in (layer_of(node), source_of(node)) if part)
        lines.append(f"%{node.name}{value} = {_call_text(node)}" + (f"  # {origin}" if origin else ""))
    text = "\n".join(lines) + "\n"
    for name, subgraph in _subgraphs(gm).items():
        text += f"\ngraph {name}:\n{to_text(subgraph)}"
    return text


def to_dict(gm: fx.GraphModule) -> dict[str, Any]:
    """The graph as JSON-ready data; `shape` and `dtype` are None for nodes that aren't one tensor.

    Sizes are integers, or strings where symbolic. `inputs` are the names of the nodes that this one reads.
    """
    nodes = [
        {
            "name": node.name,
            "op": node.op,
            "target": target_name(node.target),
            "args": show_arguments(node) if node.op.startswith("call") else "",
            "inputs": [source.name for source in node.all_input_nodes],
            "shape": _shape(node),
            "dtype": _dtype(node),
            "layer": layer_of(node),
            "source": source_of(node),
            "code": code_of(node),
        }
        for node in gm.graph.nodes
    ]
    subgraphs = {name: to_dict(subgraph) for name, subgraph in _subgraphs(gm).items()}
    return {"schema": SCHEMA, "nodes": nodes, "subgraphs": subgraphs}


def to_json(gm: fx.GraphModule) -> str:
    """`to_dict` as indented JSON text."""
    return json.dumps(to_dict(gm), indent=1) + "\n"


def to_networkx(gm: fx.GraphModule) -> networkx.DiGraph:
    """The data flow: a vertex per node with `to_dict`'s attributes, edges from producer to consumer."""
    import networkx

    graph = networkx.DiGraph()
    for entry in to_dict(gm)["nodes"]:
        graph.add_node(entry["name"], **{key: entry[key] for key in entry if key not in ("name", "inputs")})
        graph.add_edges_from((source, entry["name"]) for source in entry["inputs"])
    return graph


def to_graphml(gm: fx.GraphModule) -> str:
    """`to_networkx` as GraphML text, which yEd, Gephi and others read; sizes are text, what isn't known is empty."""
    import networkx

    graph = to_networkx(gm)
    for attributes in graph.nodes.values():
        for key, item in attributes.items():
            attributes[key] = "" if item is None else str(item)  # GraphML has no lists and no null
    return "\n".join(networkx.generate_graphml(graph)) + "\n"


def to_dot(gm: fx.GraphModule) -> str:
    """Graphviz DOT text: a box per node, a frame per module, fused nodes filled.

    Raises:
        ImportError: the `graphviz` Python package is missing.
    """
    try:
        import graphviz
    except ImportError as error:
        raise ImportError("DOT output needs the graphviz package: pip install 'moefuse[graph]'") from error
    dot = graphviz.Digraph(node_attr={"shape": "box", "fontname": "monospace", "fontsize": "10"})
    layers: dict[str, Any] = {}
    for node in gm.graph.nodes:
        target = target_name(node.target)
        example = example_of(node)
        label = node.name if example is None else f"{node.name}\n{target}\n{show_value(example)}"
        look = {"style": "filled", "fillcolor": "orange"} if target.startswith(_FUSED) else {}
        layer = "" if node.op in ("placeholder", "get_attr") else layer_of(node)
        if layer and layer not in layers:
            # Graphviz draws a frame only around a subgraph whose name starts with "cluster".
            layers[layer] = graphviz.Digraph(f"cluster_{layer}", graph_attr={"label": layer, "color": "gray"})
        layers.get(layer, dot).node(node.name, graphviz.escape(label), **look)
        for source in node.all_input_nodes:
            dot.edge(source.name, node.name)
    for cluster in layers.values():
        dot.subgraph(cluster)
    return str(dot.source)


def to_svg(gm: fx.GraphModule, path: str | Path) -> Path:
    """Draw the graph as SVG at `path`; the DOT text is written beside it first and stays whatever happens.

    Raises:
        ImportError: the `graphviz` Python package is missing.
        RuntimeError: Graphviz's `dot` program isn't installed, fails, or needs over two minutes.
    """
    path = Path(path)
    source = path.with_suffix(".dot")
    source.write_text(to_dot(gm), encoding="utf-8")
    program = shutil.which("dot")
    if program is None:
        raise RuntimeError(
            f"SVG output needs Graphviz's dot program on PATH (install the system package graphviz); "
            f"the graph was written as {source}"
        )
    try:
        command = [program, "-Tsvg", str(source), "-o", str(path)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SVG_SECONDS)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"dot couldn't draw {source}: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"dot needed more than {SVG_SECONDS} s to draw {source}") from error
    return path


def show(gm: fx.GraphModule, index: int, stage: str, directory: str = "") -> None:
    """One stage of graph number `index` for who asked: in a directory ("": none), or in the log.

    TORCH_LOGS=+moefuse asks for the latter; torch turns it into the logger's level.
    """
    logger = logging.getLogger("moefuse")
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("graph %d %s:\n%s", index, stage, to_text(gm))
    if directory:
        write_dump(directory, index, stage, gm)


def write_dump(directory: str | Path, index: int, stage: str, gm: fx.GraphModule) -> list[Path]:
    """Write one stage of graph number `index` as `graph0.before.txt`, `.json`, `.graphml`, `.dot` and `.svg`.

    DOT needs the graphviz package; SVG also the dot program and at most `SVG_MAX_NODES` nodes. A compile
    must not fail for a missing picture, so these two are left out where they can't be made.

    Returns:
        The files that were written.
    """
    base = Path(directory) / f"graph{index}.{stage}"
    base.parent.mkdir(parents=True, exist_ok=True)
    # with_suffix would cut ".before" off.
    written = []
    for kind, text in (("txt", to_text), ("json", to_json), ("graphml", to_graphml)):
        written.append(Path(f"{base}.{kind}"))
        written[-1].write_text(text(gm), encoding="utf-8")
    try:
        dot, svg = Path(f"{base}.dot"), Path(f"{base}.svg")
        dot.write_text(to_dot(gm), encoding="utf-8")
        written.append(dot)
        if shutil.which("dot") and len(gm.graph.nodes) <= SVG_MAX_NODES:
            written.append(to_svg(gm, svg))
    except (ImportError, RuntimeError) as error:
        logging.getLogger(__name__).info("graph%d.%s: no picture: %s", index, stage, error)
    return written


def _subgraphs(gm: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """Graph modules that the graph's `get_attr` nodes name, in graph order."""
    modules = dict(gm.named_modules(remove_duplicate=False))
    names = (str(node.target) for node in gm.graph.find_nodes(op="get_attr"))
    return {name: found for name in names if isinstance(found := modules.get(name), fx.GraphModule)}


def _shape(node: fx.Node) -> list[int | str] | None:
    value = example_of(node)
    if not isinstance(value, torch.Tensor):
        return None
    return [size if isinstance(size, int) else str(size) for size in value.shape]


def _dtype(node: fx.Node) -> str | None:
    value = example_of(node)
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else None


def show_value(value: Any) -> str:
    """A traced value in short: `float32[s0, 64]`, `(int64[8], float32[8])`, `SymInt(s0)`."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(show_value(item) for item in value)})"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return f"{type(value).__name__}({value})"
    return type(value).__name__


def _call_text(node: fx.Node) -> str:
    target = target_name(node.target)
    if node.op == "placeholder":
        return node.op  # its target is its name in capitals
    if node.op == "get_attr":
        return f"get_attr[{target}]"
    prefix = "." if node.op == "call_method" else ""
    return f"{prefix}{target}({show_arguments(node)})"


def show_arguments(node: fx.Node) -> str:
    """The arguments of a call as text, nodes as `%name`."""
    arguments = [_show(item) for item in node.args]
    return ", ".join(arguments + [f"{name}={_show(item)}" for name, item in node.kwargs.items()])


def target_name(target: Any) -> str:
    """A stable name of a node's target; never a repr, which may hold an address."""
    if isinstance(target, str):
        return target
    if isinstance(
        target, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator
    ):
        return str(target)
    name = getattr(target, "__name__", None) or type(target).__name__
    module = getattr(target, "__module__", None)
    return f"{module}.{name}" if module else str(name)


def _show(item: Any) -> str:
    """An argument as text, nodes as `%name`."""
    if isinstance(item, fx.Node):
        return f"%{item.name}"
    if isinstance(item, list | tuple):
        inner = ", ".join(_show(part) for part in item)
        return f"[{inner}]" if isinstance(item, list) else f"({inner}{',' if len(item) == 1 else ''})"
    if isinstance(item, dict):
        return "{" + ", ".join(f"{key!r}: {_show(part)}" for key, part in item.items()) + "}"
    if isinstance(item, slice):
        ends = [item.start, item.stop] + ([] if item.step is None else [item.step])
        return ":".join("" if end is None else _show(end) for end in ends)
    if isinstance(item, torch.Tensor):
        return show_value(item)
    if callable(item) and not isinstance(item, torch.dtype):
        return target_name(item)
    text = repr(item)
    return f"<{type(item).__name__}>" if " at 0x" in text else text
