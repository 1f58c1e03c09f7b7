"""Rewritten loops over experts: proved, fused, and the markers gone; or the graph may not be used.

In: the loops that `patterns.markers.collect` found, the lifted graph, the verdicts. Out: a graph without markers, or
`UnprovedError`: the front end then gives the loop's original code back.
"""

import operator
from collections.abc import Sequence

from torch.fx import Graph, Node

from moefuse.ops.loop_markers import strip
from moefuse.passes.lift import Candidate, explain
from moefuse.patterns.engine import Lifted, gemms_of
from moefuse.patterns.facts import Expr
from moefuse.patterns.loop_regions import Marked
from moefuse.patterns.markers import Prover, UnprovedError
from moefuse.patterns.rules import argument, op_name, value
from moefuse.report.model import LayerReport

Proof = tuple[Marked, list[Expr]]


def prove(loops: Sequence[Marked], lifted: Lifted) -> list[Proof]:
    """Each loop with expressions of the layers it ends in. Raises UnprovedError with all loops that aren't proved."""
    prover = Prover(
        lifted.facts, {node: explain(loss) for node, loss in lifted.losses.items()} if loops else {}
    )
    proofs: list[Proof] = []
    reasons: dict[int, str] = {}
    for loop in loops:
        try:
            proofs.append((loop, prover.prove(loop)))
        except UnprovedError as unproved:
            reasons.update(unproved.reasons)
    if reasons:
        raise UnprovedError(reasons)
    return proofs


def demand_fused(
    proofs: Sequence[Proof], candidates: Sequence[Candidate], layers: Sequence[LayerReport]
) -> None:
    """Raises UnprovedError with every loop whose layer isn't fused: unrolled it is slower than as it was written."""
    fused: set[Node] = set()
    reasons: dict[Node, str] = {}
    for candidate, layer in zip(candidates, layers, strict=True):
        products = candidate.site.gemms if candidate.site is not None else candidate.gemms
        for gemm in (*products, candidate.node):
            if layer.fused:
                fused.add(gemm)
            else:
                reasons[gemm] = layer.reason
    unfused: dict[int, str] = {}
    for loop, exprs in proofs:
        for gemm in {gemm for expr in exprs for gemm in gemms_of(expr)} - fused:
            unfused[loop.number] = reasons.get(gemm, "it isn't known to be a complete layer")
    if unfused:
        raise UnprovedError(unfused)


def clear(graph: Graph, loops: Sequence[Marked]) -> None:
    """Remove the markers, and the lists of experts that nobody needs any more."""
    for loop in loops:
        if loop.every is None:
            continue
        node = argument(loop.every, 1)
        while op_name(node) != "aten::nonzero":
            node = node.all_input_nodes[0]
        _drop_size_asserts(graph, node)
    strip(graph)


def _drop_size_asserts(graph: Graph, nonzero: Node) -> None:
    """0 <= length <= elements holds by construction; a user's own assertions stay."""
    most = value(argument(nonzero, 0)).numel()
    for size in [user for user in nonzero.users if op_name(user) == "aten::sym_size"]:
        for compared in list(size.users):
            bound = value(compared.args[1]) if len(compared.args) > 1 else None
            least = compared.target is operator.ge and isinstance(bound, int) and bound <= 0
            if compared.args[0] is not size or not (
                least or (compared.target is operator.le and bound == most)
            ):
                continue
            for user in [user for user in compared.users if op_name(user) == "aten::_assert_scalar"]:
                graph.erase_node(user)
