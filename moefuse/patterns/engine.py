"""The lifting engine: one forward pass that gives every node its fact, or says why it was lost.

In: a functional ATen graph with fake values. Out: `Lifted`: the MoE layers found (sites) and, for the rest, the
losses. Linear in the number of nodes; a fact is made once, from the facts of its operands.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from moefuse.graph import sizes
from moefuse.patterns import (
    comm,
    counts,
    exchange,
    finalize_routing,
    grouped_matmul,
    hidden_states_quant,
    init_routing,
    loops,
    markers,
    mc2,
    mx,
    npu_fused_matmul,
    npu_init_routing,
    npu_matmul,
    npu_re_routing,
    pieces,
    pointwise,
    router,
    shared,
    structure,
)
from moefuse.patterns.axes import Arrived, Axis, Group, Perm, Pick
from moefuse.patterns.facts import Cases, Conflict, Const, Dot, Expr, Fact, Leaf, Lost, Sum, Tally
from moefuse.patterns.rank_facts import Inflow
from moefuse.patterns.rules import READS_NO_ELEMENT, Counted, Outcome, argument, op_name, rule_for, value
from moefuse.patterns.site import Site, assemble
from moefuse.patterns.unify import Unifier, fresh

COMPONENTS = (
    *(structure, pointwise, counts, router, init_routing, pieces, hidden_states_quant, grouped_matmul, mx),
    *(npu_init_routing, npu_matmul, npu_fused_matmul, npu_re_routing, finalize_routing, mc2),
    *(loops, markers, comm, exchange),
)
"""The files whose import fills the rule book."""


CAUSE_DEPTH = 4
"""How many operators up a loss may lie to be named as the cause of another one."""

MOST_PARTS, DEEPEST = 512, 128
"""Expressions of real layers have some 30 parts (gpt-oss), of normalised rows some 130 (a row and its mean square).
Without a bound, `h = h * sigmoid(h)` over and over would double an expression with every node; and deep ones overflow
Python's stack."""


@dataclass
class Lifted:
    """sites: complete layers, in graph order; losses: by node; facts: what is known of each node.

    ended: sums over experts, whole or not, that something reads which is no part of their loop; opaque from there on.
    """

    sites: list[Site] = field(default_factory=list)
    losses: dict[Node, Lost] = field(default_factory=dict)
    facts: dict[Node, Fact | tuple[Fact | None, ...]] = field(default_factory=dict)
    ended: dict[Node, Fact] = field(default_factory=dict)


def lift(graph: Graph) -> Lifted:
    """Analyse a graph whose nodes carry `meta["val"]`."""
    return Lifter().run(graph)


class Lifter:
    """Implements `rules.Lifting`."""

    def __init__(self) -> None:
        self.result = Lifted()
        self.forced = False
        self.counts: dict[sympy.Symbol, Counted] = {}
        self._whole: Node | None = None
        """An operand to take as an opaque tensor, whatever is known of it."""
        self._opened: dict[Leaf, Expr | None] = {}
        self._single: dict[Node, Site] = {}
        """Nodes that are complete layers of one slot per token, so far: what follows may still belong to them."""

    # --- what rules ask for ------------------------------------------------------------------------------

    def fact(self, arg: Any) -> Fact:
        """See `rules.Lifting`. Axes are fresh on every call, so that facts can be combined without capture."""
        if not isinstance(arg, Node):
            return Fact(Const(float(arg)) if isinstance(arg, int | float) else Const(0.0), ())
        known = self.result.facts.get(arg)
        if isinstance(known, Fact) and arg is not self._whole:
            return fresh(known)
        return leaf_fact(arg)

    def expand(self, expr: Expr, opaque: Callable[[Leaf], bool]) -> Expr:
        """See `rules.Lifting`. A leaf whose node no rule can open stays as it is, and so does a part of such a node."""
        if not isinstance(expr, Leaf):
            return expr.rebuilt(lambda part: self.expand(part, opaque))
        if not opaque(expr):
            return expr
        if expr not in self._opened:  # the same leaf twice must come out as the same expression
            self._opened[expr] = self._open(expr)
        opened = self._opened[expr]
        found = expr if opened is None else self.expand(opened, opaque)
        return expr if pointwise.is_part(found) else found

    def _open(self, leaf: Leaf) -> Expr | None:
        for whole in (None, *leaf.node.all_input_nodes):
            self._whole = whole
            try:
                outcome = self._forced(leaf.node)
            finally:
                self._whole = None
            if not isinstance(outcome, Fact) or (
                isinstance(outcome.expr, Leaf) and outcome.expr.node is leaf.node
            ):
                return None
            unifier = Unifier()
            for have, want in zip(outcome.dims, leaf.index, strict=True):
                if have:
                    unifier.unify(want, have)
            if leaf.axes.isdisjoint(unifier.binding):
                return unifier.expr(outcome.expr)
            # An operand is a view that joins dimensions: as a tensor of its own it has the leaf's axes.
        return None

    def _forced(self, node: Node) -> Outcome:
        if op_name(node) == "getitem":
            pieces = self._forced(argument(node, 0))
            return pieces[argument(node, 1)] if isinstance(pieces, tuple) else None
        rule = rule_for(node)
        if rule is None:
            return None
        before, self.forced = self.forced, True
        try:
            outcome = rule(self, node)
        finally:
            self.forced = before
        return fresh(outcome) if isinstance(outcome, Fact) else outcome

    # --- the pass ----------------------------------------------------------------------------------------

    def run(self, graph: Graph) -> Lifted:
        """Visit every node once, in order; close layers that end without a sum (one slot per token); look beside."""
        for node in graph.nodes:
            if node.op == "call_function":
                self._visit(node)
        self._close_loops(graph)
        self._close_single_slot()
        self.result.sites.sort(key=_position(graph))
        self._look_beside()
        return self.result

    def _look_beside(self) -> None:
        """Find the layers' shared experts: each belongs to one layer."""
        taken = {site.node for site in self.result.sites}
        for site in self.result.sites:
            site.shared = shared.beside(self, site, taken)
            taken.update(expert.node for expert in site.shared if isinstance(expert, Site))

    def _visit(self, node: Node) -> None:
        try:
            outcome = self._outcome(node)
            if isinstance(outcome, Fact):
                self._check(node, outcome)
        except Conflict as conflict:
            if self._ended_before(node):
                self._visit(node)
            else:
                self._lose(node, conflict)
            return
        if isinstance(outcome, tuple) and any(outcome):
            self.result.facts[node] = outcome
        if isinstance(outcome, Fact):
            self._note_sizes(node, outcome)
            if not isinstance(outcome.expr, Sum) or not outcome.expr.hard:
                self.result.facts[node] = outcome
        elif outcome is None:
            self._forget(node)

    def _note_sizes(self, node: Node, fact: Fact) -> None:
        """What the sizes of a tensor with rows in an order by expert count, and a count that is a Python integer."""
        val = value(node)
        if isinstance(fact.expr, Tally | Inflow) and not isinstance(val, torch.Tensor):
            self._note_size(val, fact.expr)
        elif isinstance(val, torch.Tensor):
            for size, group in zip(val.shape, fact.dims, strict=True):
                if len(group) == 1 and isinstance(group[0], Perm | Pick | Arrived):
                    self._note_size(size, group[0])

    def _note_size(self, size: Any, meaning: Counted) -> None:
        if (
            isinstance(size, torch.SymInt)
            and isinstance(symbol := sizes.expr(size), sympy.Symbol)
            and sizes.is_unbacked(size)
        ):
            self.counts.setdefault(symbol, meaning)

    def _check(self, node: Node, fact: Fact) -> None:
        """Close or note complete layers. Conflict where the fact is no part of one, or not any more."""
        expr = fact.expr
        if expr.weight > MOST_PARTS or expr.depth > DEEPEST:
            limit = f"{MOST_PARTS} operations, or {DEEPEST} in a row"
            raise Conflict(f"expert outputs in an expression of more than {limit}")
        if not expr.hard or fact.sorted or isinstance(expr, Cases):
            return
        if isinstance(expr, Sum):
            self.result.sites.append(assemble(self, node, expr, fact.dims))
            return
        try:
            self._single[node] = assemble(self, node, expr, fact.dims)
        except Conflict:
            if any(self._may_end(arg) for arg in node.all_input_nodes):
                raise

    def _may_end(self, node: Node) -> bool:
        """True for a node that is a whole layer without a sum: one slot per token, or a loop over experts."""
        known = self.result.facts.get(node)
        return (
            isinstance(known, Fact)
            and not known.sorted
            and (node in self._single or isinstance(known.expr, Cases))
        )

    def _ended_before(self, node: Node) -> bool:
        """Close the layers whose last node is an operand: to what follows they are opaque tensors.

        Without this a residual stream would carry the expressions of all layers before.
        """
        ended = sorted((arg for arg in node.all_input_nodes if self._may_end(arg)), reverse=True)
        for arg in ended:
            fact = self.result.facts.get(arg)
            if arg in self._single:
                self._end_single(self._single[self._single_end(arg)])
            elif isinstance(fact, Fact):
                self._close(arg, fact, node)
                self.result.ended[arg] = self.result.facts.pop(arg)  # type: ignore[assignment]
        return bool(ended)

    def _goes_on(self, node: Node) -> bool:
        """True for a sum over experts to which a later expert adds."""
        later = [self._cases(user) for user in node.users]
        return any(cases is not None and cases.earlier is node for cases in later)

    def _cases(self, node: Node | None) -> Cases | None:
        """What is known of a sum over experts."""
        fact = self.result.facts.get(node, self.result.ended.get(node)) if node is not None else None
        return fact.expr if isinstance(fact, Fact) and isinstance(fact.expr, Cases) else None

    def _single_end(self, node: Node) -> Node:
        """Where the one-slot layer that `node` belongs to ends: at its first node with other than one reader."""
        chain = [node]
        while before := [arg for arg in chain[0].all_input_nodes if arg in self._single]:
            chain.insert(0, before[0])
        return next((n for n in chain if len(_readers(n)) != 1), node)

    def _end_single(self, site: Site) -> None:
        """A complete layer; what was taken for further nodes of it, or for a layer of its own, is opaque now."""
        self.result.sites.append(site)
        for node in [node for node, other in self._single.items() if other.gemms & site.gemms]:
            del self._single[node]
            self.result.facts.pop(node, None)

    def _outcome(self, node: Node) -> Outcome:
        if op_name(node) == "getitem":
            known = self.result.facts.get(argument(node, 0))
            index = argument(node, 1)
            return known[index] if isinstance(known, tuple) and isinstance(index, int) else None
        rule = rule_for(node)
        if rule is None or not isinstance(value(node), torch.Tensor | tuple | list | torch.SymInt):
            return None
        return rule(self, node)

    def _close(self, node: Node, fact: Fact, reader: Node | None = None) -> None:
        """A sum over slots: either a complete layer, or a loss with the reason why it isn't.

        reader: what made it end, if it is no part of its loop.
        """
        try:
            self.result.sites.append(assemble(self, node, fact.expr, fact.dims))
        except Conflict as conflict:
            midway = reader is not None and self._goes_on(node)
            text = f"what some of the loop's experts have added is also read by `{reader}`"
            self._lose(node, Conflict(text) if midway else conflict)

    def _close_loops(self, graph: Graph) -> None:
        """A loop over experts ends at the first node that holds its last case."""
        taken = {gemm for site in self.result.sites for gemm in site.gemms}
        ends: dict[Step, tuple[Node, Fact, Cases]] = {}
        done: set[Step] = set()
        for node in graph.nodes:
            if (cases := self._cases(node)) is None:
                continue
            step = _step(cases)
            if (before := self._cases(cases.earlier)) is not None:
                done.add(_step(before))
            if node in self.result.ended:
                done.add(step)
                continue
            fact = self.result.facts[node]
            assert isinstance(fact, Fact)
            first = step not in ends or (ends[step][2].earlier is None and cases.earlier is not None)
            if first and not fact.sorted:
                ends[step] = (node, fact, cases)
        for step, (node, fact, _) in ends.items():
            if step not in done and not gemms_of(fact.expr) & taken:
                self._close(node, fact)

    def _close_single_slot(self) -> None:
        """Layers of one slot at the end of the graph, or read only by what has no meaning."""
        taken = {gemm for site in self.result.sites for gemm in site.gemms}
        for node, site in list(self._single.items()):
            readers = _readers(node)
            goes_on = len(readers) == 1 and readers[0] in self._single
            if node in self._single and not site.gemms & taken and not goes_on:
                self._end_single(site)

    # --- losses ------------------------------------------------------------------------------------------

    def _lose(self, node: Node, conflict: Conflict) -> None:
        rule = rule_for(node)
        structural = rule is not None and rule.__module__ == structure.__name__
        if structural and not any(self._meant_something(arg) for arg in node.all_input_nodes):
            return  # a view of an opaque tensor that doesn't regroup: simply another opaque tensor
        start = [conflict.at] if conflict.at is not None else node.all_input_nodes
        cause = self._nearest_loss(start)
        self.result.losses[node] = Lost(conflict.reason, node, cause)

    def _nearest_loss(self, start: list[Node]) -> Lost | None:
        """The loss that is fewest operators up from here: a plain tensor in between has none of its own."""
        level = start
        for _ in range(CAUSE_DEPTH):
            for node in level:
                if node in self.result.losses:
                    return self.result.losses[node]
            level = [arg for node in level for arg in node.all_input_nodes]
        return None

    def _meant_something(self, node: Node) -> bool:
        known = self.result.facts.get(node)
        plain = isinstance(known, Fact) and isinstance(known.expr, Leaf | Const) and not known.sorted
        return node in self.result.losses or (known is not None and not plain)

    def _forget(self, node: Node) -> None:
        """No rule speaks: a loss where the operands meant something that can't be forgotten silently."""
        if op_name(node) in READS_NO_ELEMENT:
            return
        for arg in node.all_input_nodes:
            known = self.result.facts.get(arg)
            if (
                isinstance(known, Fact)
                and known.expr.hard
                and isinstance(value(node), torch.Tensor | tuple | list)
            ):
                reason = (
                    f"no rule says what {op_name(node) or node.op} of expert outputs (`{arg.name}`) means"
                )
                self.result.losses[node] = Lost(reason, node)
                return


Step = tuple[Node, int, frozenset[Node]]
"""One iteration of a loop: what found an expert's slots, the expert, its GEMMs (a loop may add up two layers)."""


def _step(cases: Cases) -> Step:
    return cases.case.source, cases.case.expert, frozenset(gemms_of(cases.case.rows))


def leaf_fact(node: Node) -> Fact:
    """A node as an opaque tensor: one fresh axis per dimension."""
    val = value(node)
    shape = val.shape if isinstance(val, torch.Tensor) else ()
    dims: tuple[Group, ...] = tuple(() if sizes.is_one(size) else (Axis(size),) for size in shape)
    return Fact(Leaf(node, dims), dims)


def _readers(node: Node) -> list[Node]:
    """The users that read elements."""
    return [user for user in node.users if op_name(user) not in READS_NO_ELEMENT]


def gemms_of(expr: Expr) -> set[Node]:
    """The nodes of all expert GEMMs in an expression."""
    found = {expr.node} if isinstance(expr, Dot) and expr.expert else set()
    for part in expr.parts():
        found |= gemms_of(part)
    return found


def _position(graph: Graph) -> Callable[[Site], int]:
    order = {node: i for i, node in enumerate(graph.nodes)}
    return lambda site: order[site.node]
