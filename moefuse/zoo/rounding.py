"""How a fused model's rounding is judged fairly against eager's.

In: everything that the backend compiles while `watch` is open. Out: the graphs before and after the passes with the
real inputs of their last call, and errors of fused layers and logits.

Lower precisions are compared with float64, and there routing flips would spoil a plain comparison: a near tie of two
experts that rounds the other way changes a whole token. So routing is pinned:

* `block_errors`: each MoE layer alone. Eager's graph runs; the operands of each layer (rows, ids, routing weights,
  expert weights) are taken from that run; from them the layer is computed as eager does, as mega_moe does, and in
  float64 by eager's own nodes. Norm-wise over all inputs. No routing happens inside, so nothing can flip.
* `exact_logits`: the float64 run of eager's whole graph with the integers (the routing) of eager's own run. A compiled
  model can't be pinned: `per_token` gives errors whose median doesn't see the few tokens that flipped.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from moefuse import backend
from moefuse.passes.pipeline import FuseResult
from moefuse.testing.oracle import Float64Run, SafeRun, op_name


@dataclass
class Fused:
    """One graph that the backend compiled: before and after the passes, and the real inputs of its last call."""

    before: GraphModule
    after: GraphModule
    outputs: list[tuple[str, Node]]  # per mega_moe node: the node that was replaced, and what replaced it
    inputs: tuple[Any, ...] = ()

    @property
    def calls(self) -> list[Node]:
        """The `mega_moe` nodes after the passes."""
        return [node for node in self.after.graph.nodes if op_name(node) == "moefuse::mega_moe"]

    @property
    def runs_unfused(self) -> bool:
        """Whether `before` is made of operators that compute: marks of rewritten loops are for the passes only."""
        return not any(op_name(node).startswith("moefuse::") for node in self.before.graph.nodes)


@contextmanager
def watch() -> Iterator[list[Fused]]:
    """Collect what the backend makes of every graph that is compiled inside."""
    seen: list[Fused] = []

    def watcher(
        before: GraphModule, result: FuseResult
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        after = _runnable(result.graph_module)
        named = {node.name: node for node in after.graph.nodes}
        outputs = [(old.name, named[new.name]) for pairs in result.replaced for old, new in pairs]
        record = Fused(_runnable(before), after, outputs)
        seen.append(record)

        def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
            def call(*inputs: Any) -> Any:
                record.inputs = inputs
                return run(*inputs)

            return call

        return wrap

    backend.WATCHERS.append(watcher)
    try:
        yield seen
    finally:
        backend.WATCHERS.remove(watcher)


def _runnable(gm: GraphModule) -> GraphModule:
    """A copy, since the passes and Inductor change the graph; views of nemotron_h need a copy at one token."""
    copied = deepcopy(gm)
    for node in copied.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    return copied


class _Given:
    """Interpreter mix-in: the nodes named in `given` aren't computed, they have these values."""

    given: dict[str, Any]

    def run_node(self, n: Node) -> Any:
        computed = n.op == "placeholder" or n.name not in self.given  # placeholders are read off in order
        return super().run_node(n) if computed else self.given[n.name]  # type: ignore[misc]


class _GivenRun(_Given, Interpreter):
    def __init__(self, graph_module: GraphModule, given: dict[str, Any]) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self.given = given


class _GivenFloat64(_Given, Float64Run):
    def __init__(self, graph_module: GraphModule, pinned: dict[Node, Any], given: dict[str, Any]) -> None:
        super().__init__(graph_module, pinned)
        self.garbage_collect_values = False
        self.given = {name: _double(value) for name, value in given.items()}


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@dataclass
class Errors:
    """Sums of squares over inputs: mega_moe's and eager's difference to float64, and the size of float64."""

    mine: float = 0.0
    eager: float = 0.0
    size: float = 0.0

    def add(self, mine: Tensor, eager: Tensor, exact: Tensor) -> None:
        """Count one more result of the same layer."""
        self.mine += float((mine.double() - exact).square().sum())
        self.eager += float((eager.double() - exact).square().sum())
        self.size += float(exact.square().sum())

    @property
    def ratio(self) -> float:
        """How many times eager's error; infinite where only eager is exact."""
        return (self.mine / self.eager) ** 0.5 if self.eager else (float("inf") if self.mine else 1.0)


def block_errors(fused: Fused, inputs: list[tuple[Any, ...]]) -> list[Errors]:
    """Per `mega_moe` node, from the same operands: see `block` in the module text."""
    known = {node.name for node in fused.before.graph.nodes}
    operands = {name for call in fused.calls for name in _operands(call, known)}
    errors = [Errors() for _ in fused.outputs]
    for values in inputs:
        eager = SafeRun(fused.before)
        eager.run(*values)
        by_name = {node.name: value for node, value in eager.env.items()}
        given = {name: by_name[name] for name in operands}
        exact, mine = _GivenFloat64(fused.before, eager.env, given), _GivenRun(fused.after, given)
        exact.run(*values)
        mine.run(*values)
        exact_by_name = {node.name: value for node, value in exact.env.items()}
        for error, (old, new) in zip(errors, fused.outputs, strict=True):
            error.add(mine.env[new], by_name[old], exact_by_name[old])
    return errors


def _operands(call: Node, known: set[str]) -> set[str]:
    """The nearest ancestors of a call that the unfused graph has too."""
    found: set[str] = set()
    stack = list(call.all_input_nodes)
    while stack:
        node = stack.pop()
        if node.name in known:
            found.add(node.name)
        else:
            stack.extend(node.all_input_nodes)
    return found


def exact_logits(fused: Fused, inputs: tuple[Any, ...], eager: Tensor) -> Tensor:
    """The float64 logits with eager's routing: the output of the unfused graph that is nearest to eager's logits."""
    run = SafeRun(fused.before)
    run.run(*inputs)
    outputs = pytree.tree_leaves(Float64Run(fused.before, run.env).run(*inputs))
    fitting = [value for value in outputs if isinstance(value, Tensor) and value.shape == eager.shape]
    return min(fitting, key=lambda value: float((value - eager).norm()))


def per_token(got: Tensor, want: Tensor) -> list[float]:
    """Norm-wise relative error of each token's logits [B, S, V]."""
    got, want = got.double().flatten(0, -2), want.double().flatten(0, -2)
    errors: list[float] = ((got - want).norm(dim=-1) / want.norm(dim=-1)).tolist()
    return errors
