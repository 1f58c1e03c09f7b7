"""moefuse as a pass of torchair and npugraph_ex, for engines that drive the NPU's graph compilers themselves.

In: the graph that those hand to `post_grad_custom_pre_pass`: functional ATen and NPU operators, below autograd, with
fake values. Out: the same graph module with every MoE layer that could be fused as one mega_moe node, or untouched.
It works on a copy, so a failure leaves the graph as it came.
"""

import copy
import logging
import traceback
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule

from moefuse.graph.dump import show
from moefuse.options import Options
from moefuse.passes import identity, pipeline
from moefuse.passes.pipeline import FuseResult, RejectedError
from moefuse.report.journal import JOURNAL
from moefuse.report.model import GraphReport
from moefuse.targets.npu import ge

log = logging.getLogger("moefuse")

HOOK = "post_grad_custom_pre_pass"


class TorchairPass:
    """Called with (graph module, example inputs, compiler config); the last is not read.

    cache_key: torchair keys the caches of compiled models by the disassembly of a pass; that of an object is the
        disassembly of the code it holds. This code holds `uuid()`, so a cached model is one that this very pass made.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = Options.parse_for_pass(options, "torchair")
        self.cache_key: CodeType = compile(repr(self.uuid()), "moefuse", "eval")

    def uuid(self) -> str:
        """Of this version's sources and of the options."""
        return identity.uuid(self.options)

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], config: Any = None) -> None:
        """Rewrite `gm` in place, as the hook wants it. Outside of mode "on" an obstacle leaves the graph as it is.

        Raises:
            RejectedError: in mode "on", when a found layer isn't fused.
        """
        ge.register()
        index, nodes = JOURNAL.next_index(), len(gm.graph.nodes)
        try:
            result = self._fuse(gm, example_inputs, index)
        except Exception as error:
            if isinstance(error, RejectedError) or self.options.mode == "on":
                raise
            log.warning("an internal error; the graph stays as it is", exc_info=True)
            text = "".join(traceback.format_exception(error))
            JOURNAL.record(GraphReport(index, (), nodes, nodes, error=text), None)
            return
        JOURNAL.record(result.report(index), None)
        if result.calls:
            gm.graph = result.graph_module.graph

    def _fuse(self, gm: GraphModule, example_inputs: Sequence[Any], index: int) -> FuseResult:
        missing = [node.name for node in gm.graph.nodes if node.op != "output" and "val" not in node.meta]
        if missing:
            raise ValueError(
                f"{missing[0]}: expected a node with a fake value in meta['val'], as {HOOK} gets it; got none"
            )
        copied = GraphModule(gm, copy.deepcopy(gm.graph))  # nodes are copied, fake values are shared
        show(copied, index, "before", self.options.dump)
        # Gradients, if any, are behind this graph: the backward is a graph of its own.
        # npugraph_ex calls its passes under a fake mode, and activations are tried out on numbers.
        with unset_fake_temporarily():
            result = pipeline.run(copied, _parameters(copied, example_inputs), self.options, training=False)
        show(copied, index, "after", self.options.dump)
        return result


def _parameters(gm: GraphModule, example_inputs: Sequence[Any]) -> frozenset[str]:
    """Names of the inputs that torchair knows to be parameters."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return frozenset(
        node.name
        for node, value in zip(placeholders, example_inputs, strict=True)
        if isinstance(value, torch.Tensor) and getattr(value, "_torchair_is_parameter", False)
    )
