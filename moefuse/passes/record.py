"""What a person is shown of each layer: its nodes before and after, their roles and facts, the chain of losses.

In: the candidates before anything is rewritten, then the rewritten graph. Out: a `Region` and the launches saved for
each. Costs about as much as the lift, so the pipeline makes one only when it is asked for.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from moefuse.graph.dump import show_arguments, show_value, target_name
from moefuse.graph.source import code_of, common_layer, layer_of, source_of
from moefuse.passes.lift import Candidate
from moefuse.passes.region import operand_leaves
from moefuse.patterns.engine import Lifted
from moefuse.patterns.facts import Expr, Fact, Leaf, Lost
from moefuse.patterns.pointwise import walk
from moefuse.patterns.rules import READS_NO_ELEMENT, op_name, value
from moefuse.patterns.words import words
from moefuse.report.region import Loss, NodeView, Region, Role

MOST_NODES = 120
"""Nodes of a region that are recorded: a loop over 128 experts has 2000, of which nobody looks at more."""
FARTHEST = 4000
"""Nodes that one walk visits."""
_CHOICES = ("aten::topk", "aten::argmax")
_NO_KERNEL = ("aten::empty", "aten::empty_like", "aten::new_empty")


@dataclass
class Recording:
    """One candidate before the rewrite: all its nodes in graph order, the roles, and what is recorded of them."""

    nodes: list[Node]
    roles: dict[Node, Role]
    views: dict[Node, NodeView]
    start: Node | None
    losses: tuple[Loss, ...] = ()


class Recorder:
    """`note` every candidate, rewrite, then `finish` each."""

    def __init__(self, lifted: Lifted) -> None:
        self.lifted = lifted

    def note(self, candidate: Candidate) -> Recording:
        """What is to be seen of a candidate before the graph changes."""
        if candidate.site is None:
            return self._noted_loss(candidate)
        site = candidate.site
        start = _behind_views(next(leaf.node for leaf in walk(site.layer.x) if isinstance(leaf, Leaf)))
        found, edge = _ancestors([site.node], lambda node: node < start or node is start)
        routed = [leaf.node for leaf in _leaves([site.layer.ids, *site.layer.weights])]
        weights = {leaf.node for leaf in operand_leaves(site)} & edge
        weights -= {leaf.node for leaf in _leaves([site.layer.x, site.layer.ids, *site.layer.weights])}
        roles = _roles(found, set(site.gemms), routed)
        roles |= {node: "weight" if node in weights else "input" for node in edge}
        recording = self._recording(roles, start)
        if site.node in recording.views:  # a complete layer has no fact: it is closed
            whole = replace(recording.views[site.node], fact=f"a complete layer: {site.spec.describe()}")
            recording.views[site.node] = whole
        return recording

    def _noted_loss(self, candidate: Candidate) -> Recording:
        targets = [candidate.node, *candidate.gemms]
        scope = common_layer(targets)

        def outside(node: Node) -> bool:
            layer = layer_of(node)
            return bool(scope) and layer != scope and not layer.startswith(scope + ".")

        found, edge = _ancestors(targets, outside)
        chosen = [node for node in found if op_name(node) in _CHOICES]
        routed = chosen or [node for node in found if op_name(node) == "aten::sort"]
        roles = _roles(found, set(candidate.gemms), routed)
        roles |= {node: "weight" if node.op == "get_attr" or _stacked(node) else "input" for node in edge}
        recording = self._recording(roles, None)
        recording.losses = tuple(_chain(candidate.loss, candidate))
        return recording

    def _recording(self, roles: dict[Node, Role], start: Node | None) -> Recording:
        nodes = sorted(roles)
        half = MOST_NODES // 2
        shown = nodes if len(nodes) <= MOST_NODES else nodes[:half] + nodes[-half:]
        return Recording(nodes, roles, {node: self._view(node, roles[node]) for node in shown}, start)

    def _view(self, node: Node, role: Role) -> NodeView:
        fact = self.lifted.facts.get(node)
        loss = self.lifted.losses.get(node)
        return NodeView(
            name=node.name,
            op=target_name(node.target) if node.op.startswith("call") else node.op,
            args=show_arguments(node) if node.op.startswith("call") else "",
            value=show_value(value(node)) if value(node) is not None else "",
            role=role,
            inputs=tuple(source.name for source in node.all_input_nodes),
            source=source_of(node),
            code=code_of(node),
            fact=words(fact) if isinstance(fact, Fact) else "",
            loss=loss.reason if loss is not None else "",
        )

    def finish(self, graph: Graph, recording: Recording, output: Node | None) -> tuple[Region, int | None]:
        """The region, and how many launches the rewrite saves; None for a layer that wasn't rewritten (no output)."""
        left = set(graph.nodes)
        views = [replace(view, gone=node not in left) for node, view in recording.views.items()]
        left_out = len(recording.nodes) - len(views)
        if output is None or recording.start is None:
            return Region(tuple(views), losses=recording.losses, left_out=left_out), None
        start, known = recording.start, recording.roles
        found, edge = _ancestors([output], lambda node: node < start or node is start)
        roles: dict[Node, Role] = {node: known.get(node, "other") for node in sorted(found | edge)}
        for node in roles:
            if op_name(node).startswith("moefuse::"):
                roles[node] = "fused"
        after = tuple(self._view(node, role) for node, role in list(roles.items())[-MOST_NODES:])
        saved = _launches(node for node in known if node not in left)
        saved -= _launches(node for node in roles if node not in known)
        return Region(tuple(views), after, recording.losses, left_out), saved


def _ancestors(targets: Iterable[Node], outside: Callable[[Node], bool]) -> tuple[set[Node], set[Node]]:
    """The targets and what they are made from; and apart from these, the first nodes outside."""
    inside: set[Node] = set()
    edge: set[Node] = set()
    stack = list(targets)
    while stack and len(inside) < FARTHEST:
        node = stack.pop()
        if node in inside or node in edge:
            continue
        if node.op != "call_function" or (outside(node) and node not in targets):
            edge.add(node)
            continue
        inside.add(node)
        stack.extend(node.all_input_nodes)
    return inside, edge


def _roles(nodes: set[Node], gemms: set[Node], routed: list[Node]) -> dict[Node, Role]:
    """What each node does: by what it is made from, and what is made from it."""
    behind, before, router = set(gemms), set(gemms), set(routed)
    order = sorted(nodes)
    for node in order:
        if op_name(node) not in READS_NO_ELEMENT and any(arg in behind for arg in node.all_input_nodes):
            behind.add(node)
    for node in reversed(order):
        for closed in (before, router):
            if any(user in closed and user in nodes for user in node.users):
                closed.add(node)
    return {
        node: _role(node, node in gemms, node in behind, node in before, node in router) for node in order
    }


def _role(node: Node, gemm: bool, behind: bool, before: bool, router: bool) -> Role:
    if gemm:
        return "gemm"
    if behind:
        return "activation" if before else "combine"
    if router:
        return "router"
    return "dispatch" if before else "combine"


def _behind_views(node: Node) -> Node:
    """The node whose elements this one shows in another shape."""
    while _is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _is_view(node: Node) -> bool:
    if op_name(node) in ("getitem", "aten::_unsafe_view"):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _launches(nodes: Iterable[Node]) -> int:
    """How many of the nodes compute something: views, sizes and the like launch nothing."""
    return sum(
        isinstance(node.target, torch._ops.OpOverload)
        and not _is_view(node)
        and op_name(node) not in _NO_KERNEL
        and isinstance(value(node), torch.Tensor | tuple | list)
        for node in nodes
        if node.op == "call_function"
    )


def _leaves(exprs: Iterable[Expr]) -> list[Leaf]:
    return [leaf for expr in exprs for leaf in walk(expr) if isinstance(leaf, Leaf)]


def _stacked(node: Node) -> bool:
    val = value(node)
    return (
        node.op == "placeholder"
        and isinstance(val, torch.Tensor)
        and val.dim() == 3
        and val.is_floating_point()
    )


def _chain(loss: Lost | None, candidate: Candidate) -> Iterable[Loss]:
    if loss is None:
        node = candidate.node
        yield Loss(node.name, candidate.reason, source_of(node), code_of(node))
    while loss is not None:
        yield Loss(loss.node.name, loss.reason, source_of(loss.node), code_of(loss.node))
        loss = loss.cause
