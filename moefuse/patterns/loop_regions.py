"""Where the rewritten loops over experts lie in a graph, by their markers (`moefuse.ops.loop_markers`).

In: a graph as it was captured. Out: `Marked` for each loop: its markers, which node stands in which iteration, and what
leaves it by another way than a marker. What the markers claim is proved by `moefuse.patterns.markers`.
"""

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from moefuse.patterns.rules import argument, op_name, value

PREFIX = "moefuse::"


@dataclass
class Marked:
    """One run of a loop in the graph.

    assumed: the markers of claims. place: in which iteration each node of the loop stands. crossing: tensors of one
    iteration that a later one reads. problem: why it can't be proved at all.
    """

    number: int
    token: Node
    every: Node | None = None
    end: Node | None = None
    iterations: int = 0
    assumed: list[Node] = field(default_factory=list)
    filled: list[Node] = field(default_factory=list)
    results: list[Node] = field(default_factory=list)
    place: dict[Node, int] = field(default_factory=dict)
    crossing: set[Node] = field(default_factory=set)
    problem: str = ""


def collect(graph: Graph) -> list[Marked]:
    """The loops of a graph as it was captured. What leaves them by another way than a marker is noted as a problem."""
    found: dict[Node, Marked] = {}
    bounds: list[Node] = []
    for node in graph.nodes:
        name = op_name(node).removeprefix(PREFIX) if op_name(node).startswith(PREFIX) else ""
        if name == "loop":
            found[node] = Marked(int(argument(node, 0)), node)
        elif name == "within":
            bounds.append(node)
        elif name and argument(node, 0) not in found:
            continue  # of a loop in a graph before this one: it isn't proved there, for its token goes out
        elif name in ("every", "end"):
            setattr(found[argument(node, 0)], name, node)
        elif name == "result":
            found[argument(node, 0)].results.append(node)
        elif name in ("assume", "assume_size", "never"):
            found[argument(node, 0)].assumed.append(node)
        elif name == "filled":
            found[argument(node, 0)].filled.append(node)
    for loop in found.values():
        if loop.end is None:
            loop.problem = "the graph breaks inside of the loop"
        elif any(user.op == "output" for user in loop.token.users):
            loop.problem = "the graph breaks before all that leaves the loop is used"
        else:
            _lay_out(loop)
            loop.problem = _escape(loop)
    return [*found.values(), *(Marked(int(argument(node, 0)), node) for node in bounds)]


def _lay_out(loop: Marked) -> None:
    """Which node stands in which iteration."""
    node = loop.token
    while (node := node.next) is not loop.end:
        if op_name(node) == "moefuse::step" and argument(node, 0) is loop.token:
            loop.iterations += 1
        if loop.iterations:
            loop.place[node] = loop.iterations - 1


def _escape(loop: Marked) -> str:
    for node, k in loop.place.items():
        if _random(node):
            return f"`{node.name}` draws random numbers in the loop"
        counted = argument(node, 1) if node in loop.assumed and len(node.args) > 1 else None
        if not _holds_for_none(node) or (isinstance(counted, Node) and not _holds_for_none(counted)):
            return f"`{node.name}` claims what isn't so for an expert without tokens"
        if _is_plain_size(node):
            continue
        for user in node.users:
            if user not in loop.place:
                if not _let_out(user, loop):
                    return f"`{node.name}`, computed in an iteration, is used after the loop by `{user.name}`"
            elif loop.place[user] != k and isinstance(value(node), torch.Tensor):
                loop.crossing.add(node)
    return ""


def _let_out(user: Node, loop: Marked) -> bool:
    """True for a result marker, a list that one lets out, and assertions: behind the loop the original has them too."""
    if user in loop.results or op_name(user).startswith("aten::_assert"):
        return True
    others = [reader for reader in user.users if reader not in loop.results]
    return (
        op_name(user) == "aten::cat"
        and len(others) < len(user.users)
        and all(op_name(reader) == "aten::sym_size" for reader in others)
    )


def _holds_for_none(node: Node) -> bool:
    """False for an assertion, or a size, that needs rows: the original asserts nothing of what it skips."""
    val = value(argument(node, 0)) if op_name(node).startswith("aten::_assert") else value(node)
    if op_name(node).startswith("aten::_assert"):
        return val is True or (isinstance(val, torch.SymBool) and _without_rows(val) == sympy.true)
    if not isinstance(val, torch.SymInt) or _is_plain_size(node):
        return True
    shape_env = val.node.shape_env
    return all(
        not shape_env.is_unbacked_symint(symbol) or shape_env.bound_sympy(symbol).lower <= 0
        for symbol in val.node.expr.free_symbols
    )


def _without_rows(claim: torch.SymBool) -> Any:
    """What becomes of a claim where all sizes that depend on data are zero.

    An equation of several of them is about the whole: it holds as it does where some are zero.
    """
    shape_env, expr = claim.node.shape_env, claim.node.expr
    unbacked = [symbol for symbol in expr.free_symbols if shape_env.is_unbacked_symint(symbol)]
    if isinstance(expr, sympy.Eq) and len(unbacked) > 1:
        return sympy.true
    return expr.xreplace(dict.fromkeys(unbacked, sympy.S.Zero))


def _random(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _is_plain_size(node: Node) -> bool:
    """A size that is known before the graph runs; the tracer notes it where it is first needed."""
    val = value(node)
    return isinstance(val, int | torch.SymInt) and not (
        isinstance(val, torch.SymInt)
        and any(val.node.shape_env.is_unbacked_symint(symbol) for symbol in val.node.expr.free_symbols)
    )
