"""Proof that a rewritten loop over experts means what was written.

In: the markers in a graph (`moefuse.ops.loop_markers`) and the facts of its nodes. Out: nothing, or a reason for each
loop whose claims aren't proved. The original skips an iteration where the marked test says so; the graph never does.
Both are the same where

- a skipped iteration's expert has no slots: its test is true only if the count of that expert's slots is zero, or the
  list that the loop runs over holds every expert that has slots;
- an iteration changes nothing but what the `result` markers let out, and that is a sum (or a list) of expert rows, of
  which the skipped iteration adds those of that very expert: none.
"""

from typing import NamedTuple

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from moefuse.graph import sizes
from moefuse.patterns.axes import Axis, Group, Ranks
from moefuse.patterns.capacity import dropped
from moefuse.patterns.counts import count_of
from moefuse.patterns.facts import Cases, Count, Expr, Fact, Leaf
from moefuse.patterns.loop_regions import Marked
from moefuse.patterns.loops import constant, pick_of
from moefuse.patterns.rank_facts import Local
from moefuse.patterns.ranks import MOST_EXPERTS, carried, owners
from moefuse.patterns.router import topk_of
from moefuse.patterns.rules import Lifting, Outcome, argument, op_name, rule, value


class UnprovedError(Exception):
    """Loops whose rewritten form isn't proved. reasons: by the number of the loop.

    empty: in a graph for inputs without elements, of which some spellings can't be told apart: others may be proved.
    """

    empty = False

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons


class _Unproved(Exception):
    """Why one loop isn't proved."""


class Ids(NamedTuple):
    """The ids whose slots are counted; ranks: of rows that came here from all of them, by this rank's own numbers."""

    node: Node
    ranks: Ranks | None = None

    @property
    def name(self) -> str:
        """That of the tensor."""
        return self.node.name


@rule("moefuse::result")
def result(lift: Lifting, node: Node) -> Outcome:
    """Rows that leave a loop in a list are the same rows; a sum that is complete ends here."""
    fact = lift.fact(argument(node, 1))
    if not isinstance(fact.expr, Cases):
        return fact
    dims = tuple(() if sizes.is_one(size) else (Axis(size),) for size in value(node).shape)
    return Fact(Leaf(node, dims), dims)


class Prover:
    """Proves the claims of a graph's loops from its facts."""

    def __init__(self, facts: dict[Node, Fact | tuple[Fact | None, ...]], reasons: dict[Node, str]) -> None:
        """facts: of the lifter; reasons: its losses in words, by node."""
        self.facts = facts
        self.reasons = reasons

    def prove(self, loop: Marked) -> list[Expr]:
        """Expressions of the layers that the proof stands on: their GEMMs must be fused. Raises UnprovedError."""
        if op_name(loop.token) == "moefuse::within":
            return self._within(loop)
        if loop.every is None and not loop.assumed and not loop.problem:
            return []  # nothing is claimed: the loop was unrolled as it is written
        try:
            if loop.problem:
                raise _Unproved(loop.problem)
            return self._prove(loop)
        except _Unproved as unproved:
            raise UnprovedError({loop.number: _drops(loop) or str(unproved)}) from None

    def _prove(self, loop: Marked) -> list[Expr]:
        experts: dict[int, int] = {}
        ids: set[Ids] = set()
        if loop.every is not None:
            leaf, count = self._listed(argument(loop.every, 1))
            if count != loop.iterations:
                raise _Unproved(f"it runs over {count} experts, the graph over {loop.iterations}")
            experts = {k: k for k in range(count)}
            ids.add(leaf)
        impossible: list[int] = []
        for node in loop.assumed:
            if node not in loop.place:
                raise _Unproved("it uses, or leaves something behind that is no tensor")
            k = loop.place[node]
            if op_name(node) == "moefuse::never":
                impossible.append(k)
                continue
            leaf, expert = self._tested(node)
            ids.add(leaf)
            if experts.setdefault(k, expert) != expert:
                raise _Unproved(f"iteration {k} is skipped by the tokens of another expert, {expert}")
        if len(ids) != 1:
            raise _Unproved(f"it looks at several ids: {', '.join(sorted(node.name for node in ids))}")
        (leaf,) = ids
        if not all(_is_no_rows(loop, argument(node, 1, "instead")) for node in loop.filled):
            self._demand_chosen(leaf, set(experts.values()))
        for k in impossible:
            self._demand_impossible(leaf, experts.get(k, k))
        leaving = [
            node for node in map(_source, loop.results) if node in loop.place or op_name(node) == "aten::cat"
        ]
        chain: set[Node] = set()
        layers = [expr for node in leaving for expr in self._leaves(loop, node, experts, leaf, chain)]
        for node in loop.crossing - chain:
            if node.users:  # not one of those that were removed since
                raise _Unproved(f"`{node.name}`, computed in an iteration, is used in a later one")
        return layers

    def fact(self, node: Node) -> Fact | None:
        """What is known of a node."""
        found = self.facts.get(node)
        return found if isinstance(found, Fact) else None

    # --- what is claimed

    def _listed(self, values: Node) -> tuple[Ids, int]:
        """(ids, n) for the list of those of the experts 0..n-1 that have slots."""
        node: Node | None = values
        while isinstance(node, Node) and op_name(node) != "aten::nonzero":
            node = node.all_input_nodes[0] if _same_rows(node) else None
        if node is None or value(argument(node, 0)).dim() != 1:
            raise _Unproved(f"`{values.name}` isn't known to list the experts that have tokens")
        count = self._counted(argument(node, 0))
        if count is None or count.dims != (count.expr.at,) or len(count.expr.at) != 1:  # type: ignore[attr-defined]
            raise _Unproved(f"`{values.name}` isn't known to list all experts that have tokens")
        (axis,) = count.expr.at  # type: ignore[attr-defined]
        if not isinstance(axis, Axis) or not isinstance(axis.size, int):
            raise _Unproved(f"`{values.name}` isn't known to list all experts that have tokens")
        ids = _ids(count.expr.ids)  # type: ignore[attr-defined]
        if ids is None:
            raise _Unproved(f"`{values.name}` isn't known to list all experts that have tokens")
        return ids, axis.size

    def _counted(self, mask: Node) -> Fact | None:
        """The counts of which a mask says that they aren't zero."""
        name = op_name(mask)
        source = argument(mask, 0)
        if name in ("aten::gt", "aten::ne", "aten::ge", "aten::greater", "aten::not_equal"):
            bound = argument(mask, 1)
            if bound != (1 if name == "aten::ge" else 0):
                return None
            fact = self.fact(source)
            return fact if fact is not None and isinstance(fact.expr, Count) else self._counted(source)
        if name == "aten::any":
            return self._any(mask)
        if name in _SAME_NUMBERS:
            fact = self.fact(mask)
            return fact if fact is not None and isinstance(fact.expr, Count) else self._counted(source)
        fact = self.fact(mask)
        return fact if fact is not None and isinstance(fact.expr, Count) else None

    def _any(self, node: Node) -> Fact | None:
        """any over some dimensions of one-hot ids, in one or several steps: whether their count isn't zero."""
        steps: list[Node] = []
        while op_name(node) == "aten::any":
            steps.insert(0, node)
            node = argument(node, 0)
        fact = self.fact(node)
        if fact is None:
            return None
        left: list[Group] = list(fact.dims)
        over: set[Axis] = set()
        for step in steps:
            dims = argument(step, 1, "dim", None)
            gone = {
                int(d) % len(left)
                for d in (range(len(left)) if dims is None else [dims] if isinstance(dims, int) else dims)
            }
            over |= {digit for d in gone for digit in left[d] if isinstance(digit, Axis)}
            keep = argument(step, 2, "keepdim", False)
            left = [() if d in gone else group for d, group in enumerate(left) if keep or d not in gone]
        count = count_of(fact, over)
        return None if count is None else Fact(count.expr, tuple(left))

    def _tested(self, node: Node) -> tuple[Ids, int]:
        """(ids, expert) where the claim's test is true only if that expert has no slots."""
        relation, bound = argument(node, 2), value(argument(node, 3))
        if not isinstance(bound, int) or (relation, bound) not in _MEANS_NONE:
            raise _Unproved(
                f"it skips an expert where a value is {relation} {bound}, not where it has no tokens"
            )
        found = self._slots(argument(node, 1))
        if found is None:
            name = argument(node, 1).name if isinstance(argument(node, 1), Node) else argument(node, 1)
            raise _Unproved(
                f"`{name}`, by which it skips an expert, isn't known to count the expert's tokens"
            )
        return found

    def _slots(self, node: Node) -> tuple[Ids, int] | None:
        """(ids, expert) if the value is zero only where that expert has no slots."""
        if not isinstance(node, Node):
            return None
        name = op_name(node)
        if name in ("aten::sym_size", "aten::sym_numel"):
            return self._rows(argument(node, 0), argument(node, 1) if name == "aten::sym_size" else None)
        if name in ("aten::_local_scalar_dense", "aten::_to_copy", "aten::item"):
            return self._slots(argument(node, 0))
        if name == "mul":
            factors = [arg for arg in node.args if not isinstance(arg, int)]
            rest = [arg for arg in node.args if isinstance(arg, int)]
            whole = len(factors) == 1 and all(number > 0 for number in rest)
            return self._slots(factors[0]) if whole and isinstance(factors[0], Node) else None
        fact = self._any(node) if name == "aten::any" else self.fact(node)
        if fact is None:
            return None
        if not isinstance(fact.expr, Count) or (ids := _ids(fact.expr.ids)) is None:
            return None
        only = 0 if ids.ranks is not None and ids.ranks.experts == 1 else None
        expert = constant(fact.expr.at) if fact.expr.at else only
        return (ids, expert) if expert is not None else None

    def _rows(self, node: Node, dim: int | None) -> tuple[Ids, int] | None:
        """One expert's slots, if that is what a dimension of the tensor (or its only dynamic one) runs over."""
        facts = self.facts.get(node)
        every = facts if isinstance(facts, tuple) else (facts,)
        for fact in every:
            if not isinstance(fact, Fact):
                continue
            for group in fact.dims if dim is None else fact.dims[dim : dim + 1]:
                pick = pick_of(group)
                if pick is not None and pick.rank is None and (ids := _ids(pick.key)) is not None:
                    return ids, pick.expert
        return None

    def _demand_impossible(self, ids: Ids, expert: int) -> None:
        if (most := _choices(ids)) is None or most > expert:
            raise _Unproved(
                f"there are no weights for expert {expert}, and `{ids.name}` isn't known not to choose it"
            )

    def _demand_chosen(self, ids: Ids, experts: set[int]) -> None:
        """There are ids, and each chooses one of these experts."""
        most, size = _choices(ids), value(ids.node).numel()
        some = ids.ranks is None and statically_known_true(size >= 1)
        if most is None or not some or not set(range(most)) <= experts:
            raise _Unproved(
                f"it asks whether its list is empty, and `{ids.name}` isn't known to choose any of its experts"
            )

    def _within(self, loop: Marked) -> list[Expr]:
        """The claim that ids are below a number."""
        bound = argument(loop.token, 2)
        if not isinstance(bound, int) or not self._below(argument(loop.token, 1), bound):
            raise UnprovedError({loop.number: f"bincount may give more than its minlength of {bound} counts"})
        return []

    def _below(self, ids: Node, bound: int) -> bool:
        """True for ids below the bound: of a top-k, or what integer arithmetic makes of all that there are."""
        chain: list[Node] = []
        while True:
            fact = self.fact(ids)
            if fact is not None and isinstance(fact.expr, Leaf):
                ids = fact.expr.node
            if (most := _choices(Ids(ids))) is not None:
                return most <= MOST_EXPERTS and bool((carried(chain, torch.arange(most)) < bound).all())
            if (step := owners(ids, torch.zeros(1, dtype=torch.int64))) is None:
                return False
            chain, ids = [ids, *chain], step[0]

    # --- what leaves the loop

    def _leaves(
        self, loop: Marked, node: Node, experts: dict[int, int], ids: Ids, chain: set[Node]
    ) -> list[Expr]:
        fact = self.fact(node)
        if fact is not None and isinstance(fact.expr, Cases):
            self._cases(loop, node, experts, ids, chain)
            return [fact.expr]
        if fact is not None and op_name(node) == "aten::cat" and fact.sorted:
            if loop.every is not None and _turned(argument(loop.every, 1)):
                raise _Unproved(f"`{node.name}` puts rows together in another order than that of the experts")
            return self._pieces(loop, node, experts, ids)
        why = self.reasons.get(node, "it isn't known to be a sum over experts")
        raise _Unproved(f"what it leaves in `{node.name}`: {why}")

    def _cases(self, loop: Marked, last: Node, experts: dict[int, int], ids: Ids, chain: set[Node]) -> None:
        """Each iteration adds the rows of its own expert, and nothing else."""
        node: Node | None = last
        while node is not None and (fact := self.fact(node)) is not None and isinstance(fact.expr, Cases):
            while op_name(node) in _SAME_NUMBERS:  # a view of the sum so far
                chain.add(node)
                node = argument(node, 0)
                assert isinstance(node, Node)
            chain.add(node)
            case, k = fact.expr.case, loop.place.get(node)
            if k in experts and (case.expert != experts[k] or not _reads(case.ids, ids)):
                skipped = f"skipped by the tokens of expert {experts[k]} in `{ids.name}`"
                raise _Unproved(f"iteration {k} adds the rows of expert {case.expert}, and is {skipped}")
            node = fact.expr.earlier

    def _pieces(self, loop: Marked, cat: Node, experts: dict[int, int], ids: Ids) -> list[Expr]:
        """Each iteration appends the rows of its own expert."""
        found: list[Expr] = []
        for piece in argument(cat, 0):
            k, fact = loop.place.get(piece), self.fact(piece)
            if fact is None or (k in experts and self._rows(piece, 0) != (ids, experts[k])):
                raise _Unproved(
                    f"iteration {k} appends `{piece.name}`, which isn't known to be its expert's rows"
                )
            found.append(fact.expr)
        return found


def _is_no_rows(loop: Marked, instead: Node | None) -> bool:
    """True for a tensor that is what the loop's lists of rows are, put together, where nothing is in them."""
    rows = [value(node) for node in map(_source, loop.results) if op_name(node) == "aten::cat"]
    other = value(instead)
    return (
        isinstance(other, torch.Tensor)
        and bool(rows)
        and all(
            (other.dtype, other.device, other.dim()) == (each.dtype, each.device, each.dim())
            and sizes.same(other.shape[0], 0)
            and all(map(sizes.same, other.shape[1:], each.shape[1:]))
            for each in rows
        )
    )


def _drops(loop: Marked) -> str:
    """Why the loop's layer drops slots, whatever else stands in the way of a proof; "" where nothing says so."""
    claims = [node for node in (loop.every, *loop.assumed) if node is not None and len(node.args) > 1]
    claimed = (argument(node, 1) for node in claims)
    return next((why for node in claimed if isinstance(node, Node) and (why := dropped(node))), "")


def _ids(expr: Expr) -> Ids | None:
    """The ids that an expression holds, or this rank's numbers of."""
    if isinstance(expr, Local):
        return Ids(expr.ids.node, expr.ranks)
    return Ids(expr.node) if isinstance(expr, Leaf) else None


def _choices(ids: Ids) -> int | None:
    """How many numbers a top-k chose from, if the ids are its indices; the rank's experts of rows that came here."""
    if ids.ranks is not None:
        return ids.ranks.experts
    topk, dim = topk_of(ids.node)
    size = value(argument(topk, 0)).shape[dim] if topk is not None else None
    return size if isinstance(size, int) else None


def _reads(expr: Expr, ids: Ids) -> bool:
    return _ids(expr) == ids


_MEANS_NONE = {("==", 0), ("<=", 0), ("<", 1), ("<", 0), ("<=", -1)}
"""Tests that are true of a count only where it is zero."""

_SAME_NUMBERS = {
    *("aten::view", "aten::squeeze", "aten::clone", "aten::_to_copy", "aten::reshape", "aten::alias"),
    *("aten::flatten", "aten::unsqueeze", "aten::detach"),
}
"""Operators that keep the elements and their order."""


def _turned(values: Node) -> bool:
    """True for a list of experts in another order than nonzero gives."""
    while op_name(values) != "aten::nonzero":
        if op_name(values) == "aten::flip":
            return True
        values = values.all_input_nodes[0]
    return False


def _same_rows(node: Node) -> bool:
    """True when the node has one row for each row of its operand, in the same order or the opposite one."""
    name = op_name(node)
    if name == "aten::flip":
        return True
    if name in ("aten::slice", "aten::select"):
        return int(argument(node, 1, "dim", 0)) != 0
    if name in ("aten::unbind", "aten::split"):
        return int(argument(node, 1 if name == "aten::unbind" else 2, "dim", 0)) != 0
    return name in _SAME_NUMBERS or name == "getitem"


def _source(result_marker: Node) -> Node:
    found = argument(result_marker, 1)
    assert isinstance(found, Node)
    return found
