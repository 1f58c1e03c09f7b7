"""A fact in words, for people: `[i·j, k] = Σl x[i, l] * w[ids[i, j], k, l]`.

In: a `Fact`. Out: one line. Axes get letters in the order in which they appear; `p` stands for a sorted order, whose
sort is named at the end. For reading only: nothing is decided from it.
"""

from collections.abc import Iterable
from typing import Any

import torch

from moefuse.patterns.axes import Arrived, At, Axis, Digit, Dims, Group, Part, Perm, Pick
from moefuse.patterns.facts import (
    Cases,
    Const,
    Coords,
    Count,
    Dense,
    Dot,
    Expr,
    Fact,
    Leaf,
    Mean,
    Offs,
    OneHot,
    Op,
    Pieces,
    Pos,
    Sum,
    Table,
    Tally,
)
from moefuse.patterns.quantised import Dequant, Quantised, RowScale
from moefuse.patterns.rank_facts import Among, Begin, Block, Census, Inflow, Local, Owned, Spread
from moefuse.patterns.unify import bind

_LETTERS = "ijklmnabcdefgh"
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "floor_divide": "//"}


def words(fact: Fact) -> str:
    """The fact as one line."""
    speaker = _Speaker()
    text = f"[{speaker.dims(fact.dims)}] = {speaker.expr(fact.expr)}"
    return "; ".join([text, *speaker.notes.values()])


class _Speaker:
    """Names for the axes of one fact."""

    def __init__(self) -> None:
        self.names: dict[Any, str] = {}
        self.notes: dict[Any, str] = {}

    def dims(self, dims: Dims) -> str:
        return ", ".join(self.group(group) for group in dims)

    def group(self, group: Group) -> str:
        return "·".join(map(self.digit, group)) or "0"

    def digit(self, digit: Digit) -> str:
        if isinstance(digit, At):
            return self.expr(digit.expr)
        if isinstance(digit, Part):
            inner = self.group(digit.group) if digit.group else ""
            step = f"{digit.step}*" if inner and digit.step != 1 else ""
            return " + ".join(
                [str(digit.start)] * bool(digit.start or not inner) + [step + inner] * bool(inner)
            )
        if isinstance(digit, Axis):
            return self._name(digit, _LETTERS)
        known = digit in self.names
        name = self._name(digit, "pqrs")
        if not known:
            self.notes[digit] = f"{name} runs over {self._order(digit)}"
        return name

    def _order(self, digit: Perm | Pick | Arrived) -> str:
        if isinstance(digit, Arrived):
            over, sort = self.group(digit.order.over), digit.order.sort.name
            whose = f"the {digit.ranks.world} ranks of group {digit.ranks.group}"
            return (
                f"the {over} of {whose} that this rank's experts take, each rank's in the order of `{sort}`"
            )
        over = self.group(digit.over)
        if isinstance(digit, Perm):
            return f"{over} in the order of `{digit.sort.name}`"
        whose = "" if digit.rank is None else f" that came from rank {digit.rank}"
        return f"the {over} of expert {digit.expert}{whose}, as `{digit.source.name}` lists them"

    def _name(self, digit: Digit, letters: str) -> str:
        if digit not in self.names:
            taken = sum(name[0] in letters for name in self.names.values())
            self.names[digit] = letters[taken % len(letters)] + "'" * (taken // len(letters))
        return self.names[digit]

    def expr(self, expr: Expr) -> str:
        for kind, say in _SAY.items():
            if isinstance(expr, kind):
                return str(say(self, expr))
        return type(expr).__name__.lower()

    def leaf(self, leaf: Leaf) -> str:
        return f"`{leaf.node.name}`" + (f"[{self.dims(leaf.index)}]" if leaf.index else "")

    def op(self, op: Op) -> str:
        name = op.target._schema.name.partition("::")[2]
        parts = [self.expr(arg) if isinstance(arg, Expr) else str(arg) for arg in op.args]
        if name in _INFIX and len(parts) == 2:
            return f"({parts[0]} {_INFIX[name]} {parts[1]})"
        return f"{name}({', '.join([*parts, *(f'{key}={value}' for key, value in op.kwargs)])})"

    def begin(self, begin: Begin) -> str:
        run = (
            "its run" if begin.source is None else f"the run {self.group((*begin.source, *(begin.at or ())))}"
        )
        order = "by expert" if begin.by_expert else "as they came"
        return f"where {run} of `{begin.ids.node.name}` {'ends' if begin.ends else 'begins'}, rows {order}"

    def total(self, over: Iterable[Axis], body: str) -> str:
        axes = "".join(self._name(axis, _LETTERS) for axis in over)
        return f"Σ{axes} {body}"

    def dot(self, dot: Dot) -> str:
        return f"({self.total(dot.over, f'{self.expr(dot.a)} * {self.expr(dot.b)}')})"

    def quantised(self, row: Quantised) -> str:
        text = self.expr(bind(row.row, dict(zip(row.over, row.at, strict=True))))
        return f"{_name_of(row.elements)}({text})" + (" times its scale" if row.scaled else "")

    def row_scale(self, scale: RowScale) -> str:
        row = f"{_name_of(scale.elements)}({self.expr(scale.row)})"
        return f"the scale of block {self.dims(scale.at)} of {row}" if scale.at else f"the scale of {row}"

    def dequant(self, weight: Dequant) -> str:
        stored = self.expr(weight.stored)
        if weight.offset is not None:
            stored = f"({stored} + {self.expr(weight.offset)})"
        return stored if weight.scale is None else f"{stored} * {self.expr(weight.scale)}"

    def cases(self, cases: Cases) -> str:
        case = cases.case
        rows = self.total(case.slots, f"{self.expr(case.rows)} where {self.expr(case.ids)} == {case.expert}")
        return f"{rows}, added to what the experts before it gave" if cases.earlier is not None else rows

    def base(self, total: Sum) -> str:
        body = self.total(total.over, self.expr(total.body))
        return body if total.base is None else f"`{total.base.name}` + {body}"


def _name_of(elements: torch.dtype) -> str:
    return str(elements).removeprefix("torch.")


_SAY: dict[type[Expr], Any] = {
    Leaf: _Speaker.leaf,
    Const: lambda _, e: f"{e.value:g}",
    Pos: lambda s, e: f"position({s.group(e.group)})",
    Op: _Speaker.op,
    Dot: _Speaker.dot,
    Sum: _Speaker.base,
    Cases: _Speaker.cases,
    Coords: lambda s, e: f"the indices ({s.dims(e.columns)}) of what isn't zero",
    OneHot: lambda s, e: f"({s.expr(e.ids)} == {s.group(e.at)})",
    Dense: lambda s, e: f"({s.expr(e.value)} where {s.expr(e.ids)} == {s.group(e.at)}, else {e.fill:g})",
    Count: lambda s, e: f"how many of {s.expr(e.ids)} are {s.group(e.at)}",
    Offs: lambda s, e: f"how many of {s.expr(e.ids)} are at most {s.group(e.at)}",
    Mean: lambda s, e: f"mean over {s.group(e.over)} of {s.expr(e.body)}",
    Table: lambda s, e: f"(`{e.nodes[0].name}` ... `{e.nodes[-1].name}`)[{s.dims(e.index)}]",
    Among: lambda s, e: f"{s.expr(e.ids)} less {e.first}, of {e.experts} experts",
    Spread: lambda s, e: f"{s.expr(e.ids)} modulo the {e.ranks.experts} experts of a rank",
    Quantised: lambda s, e: s.quantised(e),
    RowScale: _Speaker.row_scale,
    Dequant: lambda s, e: s.dequant(e),
    Tally: lambda s, e: f"how many of {s.expr(e.ids)} are one of {sorted(e.experts)}",
    Owned: lambda s, e: f"how many of `{e.ids.node.name}` are experts of rank {s.group(e.at)}",
    Inflow: lambda s, e: (
        f"how many of `{e.ids.node.name}` on rank {s.group(e.source)} are "
        + (f"this rank's expert {s.group(e.at)}" if e.at else "experts of this rank")
    ),
    Census: lambda s, e: f"how many of `{e.ids.node.name}` on rank {s.group(e.source)} are {s.group(e.at)}",
    Begin: lambda s, e: s.begin(e),
    Local: lambda s, e: f"({s.expr(e.ids)} among the experts of this rank)",
    Block: lambda s, e: f"(the rank of a row, and {s.expr(e.ids)} among the experts of this one)",
    Pieces: lambda s, e: f"`{e.node.name}`[{s.dims(e.index)}], by the expert {s.expr(e.ids)}",
}
