"""From lifted facts to candidates: every MoE layer of a graph, and everything that looks like one.

In: a functional ATen graph. Out: `Candidate`s in graph order: a `Site` where the meaning was proved, otherwise
the first thing that stood in the way, with the node it stands at.
"""

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from moefuse.graph.source import common_layer, layer_of, source_of
from moefuse.passes.canonicalize import VIEWS
from moefuse.patterns.capacity import whole_above
from moefuse.patterns.engine import Lifted, gemms_of, lift
from moefuse.patterns.facts import Cases, Dot, Fact, Leaf, Lost, group_axes
from moefuse.patterns.rules import op_name, value
from moefuse.patterns.site import Site
from moefuse.report.model import ALREADY

GROUPED = {
    *("aten::_grouped_mm", "transformers::grouped_mm_fallback", "npu::npu_grouped_matmul"),
    *("npu::npu_grouped_matmul_swiglu_quant", "npu::npu_grouped_matmul_swiglu_quant_v2"),
    "npu::npu_grouped_matmul_finalize_routing",
}
BATCHED = {"aten::bmm", "aten::baddbmm"}

PRODUCTS = {"aten::mm", "aten::addmm"} | BATCHED
CHOICES = {"aten::topk", "aten::sort", "aten::argsort", "aten::argmax", "aten::max"}

MOVES = VIEWS | {"aten::clone", "aten::_to_copy", "aten::reshape", "aten::_unsafe_view"}
"""What changes neither the elements nor, but for rounding, their values."""


@dataclass(frozen=True)
class Candidate:
    """A MoE layer (site) or what looks like one (site None, with reason and node).

    gemms, loss: the products that look like a layer's, and how their meaning was lost; for the record of a report.
    """

    layer: str
    node: Node
    site: Site | None = None
    reason: str = ""
    gemms: tuple[Node, ...] = ()
    loss: Lost | None = None


def find(graph: Graph, parameters: frozenset[str], lifted: Lifted | None = None) -> list[Candidate]:
    """All candidates of the graph, in graph order.

    parameters: names of the inputs that are parameters. lifted: the graph's facts, where they are known already.
    """
    lifted = lifted or lift(graph)
    found = [Candidate(common_layer([*site.gemms, site.node]), site.node, site) for site in lifted.sites]
    beside = [expert for site in lifted.sites for expert in site.shared if isinstance(expert, Site)]
    taken = {gemm for site in (*lifted.sites, *beside) for gemm in site.gemms}
    groups: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node not in taken and (_expert_like(node, lifted, parameters) or _lost_choice(node, lifted)):
            groups.setdefault(layer_of(node), []).append(node)
    for gemm in sorted(_loops(lifted) - taken):
        groups.setdefault(layer_of(gemm), []).append(gemm)
    covered = {layer_of(gemm) for gemm in taken}
    blocks = {layer.rpartition(".")[0] for layer in covered if layer}
    first_loss = _first_losses(graph, lifted) if groups else {}
    lost: dict[tuple[Node, str], list[Node]] = {}
    for layer, every in groups.items():
        gemms = list(dict.fromkeys(every))
        if layer in covered and layer:
            continue  # a leftover product beside a complete layer in the same module (a shared expert, a norm)
        routed = any(gemm in first_loss for gemm in gemms)
        if layer and not routed and layer.rpartition(".")[0] in blocks and _on_every_token(gemms[0], lifted):
            continue  # a module of shared experts, beside the module of a complete layer
        lost.setdefault(_why(gemms, lifted, first_loss), []).extend(gemms)
    found += [
        Candidate(common_layer(gemms), node, None, reason, tuple(gemms), _loss_of(gemms, first_loss, lifted))
        for (node, reason), gemms in lost.items()
    ]
    return sorted(found, key=lambda candidate: candidate.node)


def nothing_found(graph: Graph) -> str:
    """Of a graph without candidates, in words: why, as far as it can be told; "" where it can't."""
    if any(op_name(node).startswith("moefuse::mega_moe") for node in graph.nodes):
        return ALREADY
    if not any(op_name(node) in PRODUCTS for node in graph.nodes):
        return ""
    chosen = (node for node in graph.nodes if op_name(node) in CHOICES and _has_indices(node))
    if (node := next(chosen, None)) is None:
        return ""
    place = f" ({source})" if (source := source_of(node)) else ""
    return (
        f"`{node.name}`{place} chooses something, and no rule connects it with the products of this graph: if it is a "
        "routing, it or the experts are in a spelling without a rule"
    )


def _has_indices(node: Node) -> bool:
    """`max` without a dimension gives the largest value alone."""
    return op_name(node) != "aten::max" or isinstance(value(node), tuple | list)


def _lost_choice(node: Node, lifted: Lifted) -> bool:
    """A list of one expert's tokens whose meaning was lost: a loop over experts that isn't understood."""
    return op_name(node) == "aten::nonzero" and node in lifted.losses


def _loops(lifted: Lifted) -> set[Node]:
    """The products of loops over experts, which don't look like a layer's; a single product under a mask is no loop."""
    gemms: dict[Node, dict[int, set[Node]]] = {}
    for fact in (*lifted.facts.values(), *lifted.ended.values()):
        if isinstance(fact, Fact) and isinstance(fact.expr, Cases) and isinstance(fact.expr.case.ids, Leaf):
            own = gemms.setdefault(fact.expr.case.ids.node, {})
            own.setdefault(fact.expr.case.expert, set()).update(gemms_of(fact.expr))
    return {
        gemm for experts in gemms.values() if len(experts) > 1 for own in experts.values() for gemm in own
    }


def _expert_like(node: Node, lifted: Lifted, parameters: frozenset[str]) -> bool:
    """A product with stacked weights: grouped, or batched over a three-dimensional parameter."""
    if op_name(node) in GROUPED:
        return True
    fact = lifted.facts.get(node)
    if isinstance(fact, Fact) and isinstance(fact.expr, Dot) and fact.expr.expert and fact.expr.node is node:
        return True
    if op_name(node) not in BATCHED:
        return False
    if _rank_one(node, lifted) is not None:
        return True
    return any(_stacked_parameter(arg, lifted, parameters) for arg in node.all_input_nodes)


def _rank_one(product: Node, lifted: Lifted) -> Node | None:
    """The table of which a batched product takes one row per slot, by ids made from a top-k."""
    for arg in product.all_input_nodes:
        fact = lifted.facts.get(arg)
        if not isinstance(fact, Fact) or not isinstance(leaf := fact.expr, Leaf) or len(leaf.selectors) != 1:
            continue
        ids = leaf.selectors[0].expr
        one_row = len(leaf.axes - ids.axes) == 1
        if (
            one_row
            and isinstance(ids, Leaf)
            and any(op_name(n) == "aten::topk" for n in whole_above({ids.node}))
        ):
            return leaf.node
    return None


def _on_every_token(product: Node, lifted: Lifted) -> bool:
    """True for a batched product whose rows are the same for every expert of the batch."""
    facts = [lifted.facts.get(arg) for arg in product.all_input_nodes]
    return any(
        isinstance(fact, Fact)
        and len(fact.dims) == 3
        and len(fact.dims[0]) > 0
        and group_axes(fact.dims[0]).isdisjoint(fact.expr.axes)
        for fact in facts
    )


def _stacked_parameter(node: Node, lifted: Lifted, parameters: frozenset[str]) -> bool:
    fact = lifted.facts.get(node)
    root = fact.expr.node if isinstance(fact, Fact) and isinstance(fact.expr, Leaf) else node
    return root.name in parameters and isinstance(value(root), torch.Tensor) and value(root).dim() == 3


def _why(gemms: list[Node], lifted: Lifted, first_loss: dict[Node, Node]) -> tuple[Node, str]:
    """The first loss that concerns a layer: at its GEMMs or behind them, by the order of the graph."""
    loss = _loss_of(gemms, first_loss, lifted)
    if loss is None:
        text = "no rule connects its weights to a routing: no sorted, gathered or scattered ids reach it"
        if (mixture := _mixture(gemms[0])) is not None:
            text = f"its rows are mixtures of tokens (`{mixture.name}`): soft routing, no choice of experts"
        if (table := _rank_one(gemms[0], lifted)) is not None:
            text = f"each slot takes one row of `{table.name}`, not a matrix: experts of rank one have no GEMM to group"
        return gemms[0], f"`{gemms[0].name}`: {text}"
    return loss.root.node, explain(loss)


def _loss_of(gemms: list[Node], first_loss: dict[Node, Node], lifted: Lifted) -> Lost | None:
    """The first loss at the GEMMs or behind them, else the nearest one before."""
    reached = [first_loss[gemm] for gemm in gemms if gemm in first_loss]
    return lifted.losses[min(reached)] if reached else _before(gemms, lifted)


def _before(gemms: list[Node], lifted: Lifted) -> Lost | None:
    """The nearest loss in what the layer's GEMMs read, up to other layers."""
    others = {site.node for site in lifted.sites}
    seen: set[Node] = set()
    level = list(gemms)
    while level:
        for node in level:
            if node in lifted.losses:
                return lifted.losses[node]
        seen.update(level)
        above = dict.fromkeys(arg for node in level for arg in node.all_input_nodes)
        level = [node for node in above if node not in seen and node not in others]
    return None


def _mixture(gemm: Node) -> Node | None:
    """The softmax by which a product mixed the rows of a GEMM, views aside."""
    product = _source(gemm.args[0])
    if product is None or op_name(product) not in (*BATCHED, "aten::mm"):
        return None
    weights = [_source(arg) for arg in product.all_input_nodes]
    return next((node for node in weights if node is not None and op_name(node) == "aten::_softmax"), None)


def _source(node: object) -> Node | None:
    """The node whose elements a chain of views and copies shows."""
    while isinstance(node, Node) and op_name(node) in MOVES:
        node = node.args[0]
    return node if isinstance(node, Node) else None


def _first_losses(graph: Graph, lifted: Lifted) -> dict[Node, Node]:
    """For each node that reaches a loss: the first one, by the order of the graph. One pass for all layers."""
    first: dict[Node, Node] = {}
    for node in reversed(graph.nodes):
        if node in lifted.losses:
            first[node] = node
        elif reached := [first[user] for user in node.users if user in first]:
            first[node] = min(reached)
    return first


def explain(loss: Lost) -> str:
    """A loss in words, with the chain of causes: `what`, because `node`: `what` ..."""
    text = f"`{loss.node.name}`: {loss.reason}"
    return text if loss.cause is None else f"{text}, because {explain(loss.cause)}"
