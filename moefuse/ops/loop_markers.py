"""Operators that stand in a captured graph where a loop over experts was made a straight line.

In: nothing. Out: `moefuse::loop` and its companions, and `strip`. They carry no computation: the front end puts them
into the loops it rewrites, the lifter proves what they claim, and they are removed before a graph runs. None has a
kernel, so a graph in which one is left can't run by mistake.

    loop(number) -> token        a loop begins; number: which loop of the source it is
    every(token, values) -> all  values, a list as long as the data wants, has some of the numbers 0..len(all)-1
    step(token)                  the next iteration begins
    never(token)                 this iteration can't happen
    assume(token, value, relation, bound), assume_size(...)
                                 the rest of this iteration does nothing where `value relation bound`
    end(token)                   the loop ends
    result(token, value) -> value  the only values that leave the loop
    filled(token, instead)       some iteration of the loop that ended isn't skipped; or, if that is given, what is
                                 appended in the others is as `instead`: no rows
    within(number, ids, bound)   all ids are below the bound, outside of any loop too
"""

import torch
from torch.fx import Graph
from torch.fx.node import has_side_effect

from moefuse.ops.library import LIBRARY

SCHEMAS = (
    "loop(int number) -> Tensor",
    "every(Tensor token, Tensor values) -> Tensor",
    "step(Tensor token) -> ()",
    "never(Tensor token) -> ()",
    "assume(Tensor token, Tensor value, str relation, SymInt bound) -> ()",
    "assume_size(Tensor token, SymInt value, str relation, SymInt bound) -> ()",
    "end(Tensor token) -> ()",
    "result(Tensor token, Tensor value) -> Tensor",
    "filled(Tensor token, Tensor? instead=None) -> ()",
    "within(int number, Tensor ids, int bound) -> ()",
)


NO_BOUND = "of which no largest number is known"
"""Part of the error for a loop over a list that is bounded by nothing."""


def _every(token: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As long as `values` can get: nonzero bounds its output by the size of its input."""
    length = values.shape[0]
    if isinstance(length, torch.SymInt):
        upper = length.node.shape_env.bound_sympy(length.node.expr).upper
        if not upper.is_Integer:
            raise ValueError(f"a loop over {length} elements, {NO_BOUND}")
        length = int(upper)
    return token.new_empty(length)


_FAKES = {
    "loop": lambda number: torch.empty(0),
    "every": _every,
    "result": lambda token, value: torch.empty_like(value),
}

for _schema in SCHEMAS:
    LIBRARY.define(_schema)
    _name = _schema.partition("(")[0]
    torch.library.register_fake(
        f"moefuse::{_name}", _FAKES.get(_name, lambda *operands: None), lib=LIBRARY, allow_override=True
    )
    if _name != "result":
        has_side_effect(getattr(torch.ops.moefuse, _name).default)

torch.library.register_autograd("moefuse::result", lambda context, gradient: (None, gradient), lib=LIBRARY)

NAMES = frozenset(schema.partition("(")[0] for schema in SCHEMAS)
MARKERS = frozenset(getattr(torch.ops.moefuse, name).default for name in NAMES)


def marked(graph: Graph) -> set[int]:
    """The numbers of the loops that a graph holds; Dynamo's graphs and ATen graphs alike."""
    return {
        int(node.args[0])
        for node in graph.nodes
        if node.op == "call_function" and _marker(node.target) in ("loop", "within")
    }


def _marker(target: object) -> str:
    if target in MARKERS:
        return str(target.name()).removeprefix("moefuse::")  # type: ignore[attr-defined]
    if isinstance(target, torch._ops.OpOverloadPacket) and target._qualified_op_name.startswith("moefuse::"):
        name = target._qualified_op_name.removeprefix("moefuse::")
        return name if name in NAMES else ""
    return ""


def strip(graph: Graph) -> None:
    """Remove all markers; what a result marker stands for takes its place."""
    for node in reversed(graph.nodes):
        if node.op != "call_function" or not (name := _marker(node.target)):
            continue
        if name == "result":
            node.replace_all_uses_with(node.args[1])
        if not node.users:
            graph.erase_node(node)
