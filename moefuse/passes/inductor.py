"""moefuse as a pass of Inductor, for programs that compile with Inductor and have a hook for passes of their own.

In: the graph that Inductor hands to `pre_grad_custom_pass`: Dynamo's, before autograd. Out: the same graph object with
every MoE layer that could be fused as one mega_moe node, or untouched. Later hooks (`joint_custom_*`, `post_grad_*`,
and so vLLM's pass manager) see a graph that Inductor has decomposed, in which casts and activations lie in pieces:
there the pass leaves the graph as it is and says so.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node

from moefuse.graph.capture import CaptureError, capture
from moefuse.options import Options
from moefuse.passes import identity, pipeline
from moefuse.report.journal import JOURNAL
from moefuse.report.model import GraphReport

log = logging.getLogger("moefuse")

HOOK = "pre_grad_custom_pass"


class InductorPass(CustomGraphPass):
    """Call it with a graph. Inductor keys its caches by `uuid`, so a cached graph is one that this very pass made."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = Options.parse_for_pass(options, "Inductor")

    def uuid(self) -> str:
        """Of this version's sources and of the options."""
        return identity.uuid(self.options)

    def __call__(self, graph: Graph) -> None:
        """Rewrite the graph in place. In mode "on" an obstacle is an error, otherwise the graph stays and it is logged.

        Raises:
            RejectedError, CaptureError: in mode "on".
        """
        gm = graph.owning_module
        index, before = JOURNAL.next_index(), len(graph.nodes)
        try:
            if gm is None or (obstacle := _obstacle(graph)):
                raise CaptureError(obstacle if gm is not None else "the graph belongs to no GraphModule")
            captured = capture(
                gm, [node.meta["example_value"] for node in graph.find_nodes(op="placeholder")]
            )
            self._dump(index, "before", captured.graph_module)
            result = pipeline.run(
                captured.graph_module,
                captured.parameters,
                self.options,
                training=captured.training,
                contact="refuse",
            )
            self._dump(index, "after", captured.graph_module)
        except CaptureError as error:
            if self.options.mode == "on":
                raise
            JOURNAL.record(GraphReport(index, (), before, before, note=f"left as it is: {error}"), None)
            return
        JOURNAL.record(result.report(index), None)
        if result.calls:
            _replace(graph, gm, result.graph_module)

    def _dump(self, index: int, stage: str, gm: GraphModule) -> None:
        if self.options.dump:
            from moefuse.graph.dump import write_dump

            write_dump(self.options.dump, index, stage, gm)


def _obstacle(graph: Graph) -> str:
    """Why this graph can't be taken; "" where it can."""
    if torch._C._is_any_autocast_enabled():
        return "under autocast the pass would have casts made twice; use torch.compile(backend='moefuse')"
    if all("example_value" in node.meta for node in graph.find_nodes(op="placeholder")):
        return ""
    return f"this hook's graph is decomposed already: give the pass to Inductor as {HOOK}"


def _replace(graph: Graph, gm: GraphModule, new: GraphModule) -> None:
    """Everything but the placeholders becomes what `new` holds."""
    for node in reversed(list(graph.nodes)):
        if node.op != "placeholder":
            graph.erase_node(node)
    olds, news = graph.find_nodes(op="placeholder"), new.graph.find_nodes(op="placeholder")
    nodes: dict[Node, Node] = dict(zip(news, olds, strict=True))
    for getter in new.graph.find_nodes(op="get_attr"):
        _take_over(gm, new, str(getter.target))
    graph.output(graph.graph_copy(new.graph, nodes))
    graph.lint()
    gm.recompile()


def _take_over(module: torch.nn.Module, source: torch.nn.Module, path: str) -> None:
    """Give a module what the source has at this path, unless it has something there."""
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(module, parent):
            module.add_module(parent, torch.nn.Module())
        module, source = module.get_submodule(parent), source.get_submodule(parent)
    if not hasattr(module, name):
        setattr(module, name, getattr(source, name))
