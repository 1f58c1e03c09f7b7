"""Sizes that depend on the routing, and what is known of them once a layer is understood.

In: a site, with the meaning of such sizes (how many slots some experts have). Out: which of the graph's assertions
about them hold by construction. Dynamo writes one for every slice and split; kept, they would keep the sorted rows,
and a wait for the counts.
"""

import operator
from typing import Any

import sympy
import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.patterns.axes import Perm, Pick, Ranks
from moefuse.patterns.facts import Leaf, Tally
from moefuse.patterns.layer import Layer
from moefuse.patterns.rank_facts import Inflow, Local
from moefuse.patterns.ranks import arrival, one_of, run_of
from moefuse.patterns.rules import Counted, op_name, value
from moefuse.patterns.site import Site

NEVER_NEGATIVE = ("aten::sym_size", "aten::sym_storage_offset")


class Counts:
    """The numbers of slots of one layer's experts as symbols that add up to all slots."""

    def __init__(self, site: Site) -> None:
        layer, spec = site.layer, site.spec
        local = spec.num_experts // spec.ep_world_size
        self._ids = layer.ids.node if isinstance(layer.ids, Leaf) else None
        self.slots = sizes.expr(sizes.product(axis.size for axis in (*layer.tokens, *layer.slots)))
        self._each = [
            sympy.Symbol(f"count_{e}", integer=True, nonnegative=True)
            for e in range(spec.num_experts + spec.num_identity_experts)
        ]
        if spec.ids_checked:  # no slot belongs to anything but an expert
            self._each[-1] = self.slots - sympy.Add(*self._each[:-1])
        self._checked = spec.ids_checked
        self._cut = False
        self._known: dict[sympy.Symbol, sympy.Expr] = {}
        self._from = [
            [sympy.Symbol(f"came_{rank}_{e}", integer=True, nonnegative=True) for e in range(local)]
            for rank in range(spec.ep_world_size)
        ]
        for symbol, meaning in site.counts.items():
            if (arrived := self._arrived(meaning, layer)) is not None:
                self._known[symbol] = arrived
            elif isinstance(meaning, Perm | Pick | Tally) and self._of_layer(meaning):
                self._known[symbol] = self._count(meaning)
                self._cut |= isinstance(meaning, Pick) and meaning.cut

    def _arrived(self, meaning: Counted, layer: Layer) -> sympy.Expr | None:
        """The number of rows that come here, from one rank or from all, for some experts; None for another count."""
        if layer.ranks is None or _came(meaning) != (self._ids, layer.ranks):
            return None
        sources, experts = range(layer.ranks.world), set(range(layer.ranks.experts))
        if isinstance(meaning, Inflow):
            run = run_of(meaning)
            rank = run[0] if run is not None else one_of(meaning.source)
            if rank is None or (run is None and meaning.at):
                return None
            sources, experts = range(rank, rank + 1), experts if run is None else {run[1]}
        elif isinstance(meaning, Pick | Tally):
            experts = _experts(meaning)
            if isinstance(meaning, Pick) and meaning.rank is not None:
                sources = range(meaning.rank, meaning.rank + 1)
        return sympy.Add(*(self._from[rank][e] for rank in sources for e in experts))

    def _of_layer(self, meaning: Perm | Pick | Tally) -> bool:
        """True for a count of the layer's own ids.

        False for the count of an expert that there is not: of ids that belong to nothing there may be any number.
        """
        if (ids := _ids(meaning)) is None or ids.node is not self._ids:
            return False
        return self._checked or isinstance(meaning, Perm) or max(_experts(meaning)) < len(self._each)

    def _count(self, meaning: Perm | Pick | Tally) -> sympy.Expr:
        if isinstance(meaning, Perm):
            return self.slots
        return sympy.Add(*(self._each[e] for e in _experts(meaning) if e < len(self._each)))

    def settled(self, size: Any) -> sympy.Basic:
        """A size or comparison in terms of the counts."""
        return self._settled(size.node.expr if hasattr(size, "node") else sympy.sympify(size))

    def size(self, size: Any) -> sympy.Basic:
        """A size that is read beside the layer, in terms of the counts.

        Pieces of a cut that are put together again are all slots: with ids that belong to no expert the model fails at
        that point. No assertion is proved by that.
        """
        settled = self.settled(size)
        if self._checked or not self._cut:
            return settled
        return sympy.expand(settled.subs(self._each[-1], self.slots - sympy.Add(*self._each[:-1])))

    def _settled(self, expr: sympy.Basic) -> sympy.Basic:
        if isinstance(expr, sympy.Symbol):
            return self._known.get(expr, expr)
        if not expr.args:
            return expr
        settled = expr.func(*map(self._settled, expr.args))
        return sympy.expand(settled) if isinstance(settled, sympy.Add | sympy.Mul) else settled

    def concerns(self, size: Any) -> bool:
        """True for an expression over this layer's counts alone."""
        symbols = set(size.node.expr.free_symbols) if hasattr(size, "node") else set()
        return bool(symbols & self._known.keys())

    def holds(self, assertion: Node) -> bool:
        """True for an `_assert_scalar` that can't fail: it follows from what the sizes count."""
        compared = assertion.args[0]
        if not isinstance(compared, Node) or not isinstance(value(compared), torch.SymBool):
            return False
        source = compared.args[0]
        sized = isinstance(source, Node) and op_name(source) in NEVER_NEGATIVE
        if sized and compared.target is operator.ge and compared.args[1] == 0:
            return True
        if not self.concerns(value(compared)):
            return False
        settled = self.settled(value(compared))
        if isinstance(settled, sympy.LessThan | sympy.GreaterThan):
            return self._at_least_zero(sympy.expand(settled.gts - settled.lts))
        return bool(settled == sympy.true)

    def _at_least_zero(self, expr: sympy.Expr) -> bool:
        """True where an expression, linear in the counts, isn't negative even with all slots on one expert."""
        least, lowest = sympy.Integer(0), sympy.Integer(0)
        for term, factor in expr.as_coefficients_dict().items():
            if term in self._each:
                lowest = min(lowest, factor)
            elif term.free_symbols & set(self._each):
                return False
            else:
                least += factor * term
        return bool(sympy.expand(least + lowest * self.slots).is_nonnegative)


def _came(meaning: Counted) -> tuple[Node, Ranks] | None:
    """(ids, ranks) of rows that came here from all ranks, if those are counted."""
    if isinstance(meaning, Inflow):
        return meaning.ids.node, meaning.ranks
    if isinstance(meaning, Tally | Pick):
        key = meaning.ids if isinstance(meaning, Tally) else meaning.key
        return (key.ids.node, key.ranks) if isinstance(key, Local) else None
    rows = arrival((meaning,))
    return (rows.ids, rows.ranks) if rows is not None else None


def _experts(meaning: Pick | Tally) -> set[int]:
    return {meaning.expert} if isinstance(meaning, Pick) else set(meaning.experts)


def _ids(meaning: Perm | Pick | Tally) -> Leaf | None:
    ids = meaning.ids if isinstance(meaning, Tally) else meaning.key
    return ids if isinstance(ids, Leaf) else None
