"""Shared experts: a dense FFN on the token rows of a MoE layer, added to what the layer gives.

In: a complete layer, and a way to ask for facts. Out: for each such FFN the layer of one expert that it is, to which
every token goes, or the reason why it isn't one. Its products have no part in the routing, so no fact is made of them
on the way through the graph: what lies between the token rows and the sum is opened here, and read as an expert is.
"""

from collections.abc import Collection

import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.patterns.axes import Axis, Dims
from moefuse.patterns.facts import Conflict, Const, Leaf, group_axes
from moefuse.patterns.layer import describe
from moefuse.patterns.pointwise import walk
from moefuse.patterns.rules import READS_NO_ELEMENT, Lifting, op_name, value
from moefuse.patterns.site import Site, Strange
from moefuse.patterns.structure import regroup

CARRIES = frozenset(
    f"aten::{name}"
    for name in (
        *(
            "view",
            "reshape",
            "_unsafe_view",
            "unsqueeze",
            "squeeze",
            "permute",
            "transpose",
            "alias",
            "clone",
        ),
        *("_to_copy", "mul", "div"),
    )
)
"""What may happen to a layer's output before a shared expert's is added: the sum itself stays where it is."""
PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm"))
MOST_NODES = 64
"""Between the token rows and the sum; a gated FFN has some 20."""
MOST_LEAVES = 256
"""Of an FFN's expression with each tensor named as often as it is read; a gated FFN has some 20."""


def beside(lift: Lifting, site: Site, others: Collection[Node]) -> tuple[Site | Strange, ...]:
    """The shared experts of a layer in graph order, each as a layer of one expert, or why it can't be one.

    others: nodes that are other layers, or shared experts of such.
    """
    rows = {leaf.node for leaf in walk(site.layer.x) if isinstance(leaf, Leaf)}
    found: dict[Node, Site | Strange] = {}
    for term in _added(site):
        fact = lift.fact(term)
        root = fact.expr.node if isinstance(fact.expr, Leaf) else term
        between = _between(rows, root)
        if root in others or not between or not between.isdisjoint(others):
            continue
        gemms = frozenset(node for node in between if op_name(node) in PRODUCTS)
        if len(gemms) < 2:
            continue
        try:
            found[root] = _expert(lift, root, between)
        except Conflict as conflict:
            found[root] = Strange(root, gemms, f"`{root.name}`: {conflict.reason}")
    return tuple(found[root] for root in sorted(found))


def _added(site: Site) -> list[Node]:
    """What is added to the layer's output, one sum after the other; that which it was added to, too."""
    terms = [site.base] if site.base is not None else []
    reached = [site.node]
    for node in reached:
        for user in node.users:
            if op_name(user) == "aten::add" and len(reached) < MOST_NODES:
                terms += [arg for arg in user.all_input_nodes if arg is not node]
                reached.append(user)
            elif op_name(user) in CARRIES and len(reached) < MOST_NODES:
                reached.append(user)
    return terms


def _between(rows: Collection[Node], term: Node) -> set[Node]:
    """The nodes by which `term` is made from the token rows, itself included; none where it isn't, or by too many."""
    first = min(rows)
    found: set[Node] = set()
    stack = [term]
    while stack:
        node = stack.pop()
        if node in found or node in rows or node < first or node.op != "call_function":
            continue
        found.add(node)
        if len(found) > MOST_NODES:
            return set()
        stack.extend(node.all_input_nodes)
    made: set[Node] = set()
    for node in sorted(found):
        if op_name(node) in READS_NO_ELEMENT:
            continue
        if any(arg in made or arg in rows for arg in node.all_input_nodes):
            made.add(node)
    return made if term in made else set()


def _expert(lift: Lifting, root: Node, between: Collection[Node]) -> Site:
    """The dense FFN whose output is `root`. Raises Conflict where it is something else.

    A factor with one value per token stays closed: how it is made is no part of the FFN.
    """
    dims = _dims(root, between)
    tokens = {axis for group in dims[:-1] for axis in group_axes(group)}
    met = 0

    def inside(leaf: Leaf) -> bool:
        nonlocal met
        met += 1
        if met > MOST_LEAVES:  # h = h * f(h) doubles what is opened with each step
            raise Conflict(f"its expression has more than {MOST_LEAVES} tensors")
        return leaf.node in between and not leaf.axes <= tokens

    body = lift.expand(Leaf(root, dims), inside)
    return Site(root, dims, describe(lift, body, (), dims, Const(0.0)))


def _dims(root: Node, between: Collection[Node]) -> Dims:
    """Axes of `root`, for the tokens as many as any node on the way has: opening leaves doesn't split an axis."""
    shape = value(root).shape
    if len(shape) < 2:
        raise Conflict("what is added doesn't have one row per token")
    tokens, most = sizes.product(shape[:-1]), shape[:-1]
    for node in between:
        other = value(node).shape[:-1] if isinstance(value(node), torch.Tensor) else ()
        if len(other) > len(most) and sizes.same(sizes.product(other), tokens):
            most = other
    axes = tuple(() if sizes.is_one(size) else (Axis(size),) for size in (*most, shape[-1]))
    return regroup(axes, shape)[0]
