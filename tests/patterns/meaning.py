"""Facts as text, so that a test can say what a tensor means: `x[t h] over P(t k), h`.

In: a fact of a graph whose sizes are those of `SIZES`. Out: one line. An axis is written by the letter of its
size; another axis object of the same size gets a prime, so that identity shows.
"""

from collections.abc import Iterable

from moefuse.patterns.axes import At, Axis, Digit, Group, Part, Perm
from moefuse.patterns.facts import Const, Count, Dense, Dot, Expr, Fact, Leaf, Offs, OneHot, Op, Pos, Sum

SIZES = {"t": 6, "k": 2, "e": 4, "h": 16, "i": 24, "n": 48, "s": 12}
"""Tokens, slots per token, experts, hidden, intermediate, rows of the first weight, slots: all different."""

_LETTER = {size: letter for letter, size in SIZES.items()}


def show(fact: Fact) -> str:
    """`expression over dims`, one comma-separated group of axes per tensor dimension (`1` for size one)."""
    writer = _Writer()
    dims = [writer.group(group) or "1" for group in fact.dims]  # first, so that dims carry no primes
    return f"{writer.expr(fact.expr)} over {', '.join(dims)}"


class _Writer:
    """Gives each axis its name once."""

    def __init__(self) -> None:
        self.names: dict[Axis, str] = {}

    def axis(self, axis: Axis) -> str:
        if axis not in self.names:
            name = _LETTER.get(axis.size, str(axis.size)) if isinstance(axis.size, int) else str(axis.size)
            while name in self.names.values():
                name += "'"
            self.names[axis] = name
        return self.names[axis]

    def group(self, group: Group) -> str:
        return " ".join(map(self.digit, group))

    def digit(self, digit: Digit) -> str:
        if isinstance(digit, Axis):
            return self.axis(digit)
        if isinstance(digit, Perm):
            return f"P({self.group(digit.over)})"
        if isinstance(digit, Part):
            return f"{digit.start}:{digit.step}({self.group(digit.group)})"
        assert isinstance(digit, At)
        return f"<{self.expr(digit.expr)}>"

    def index(self, groups: Iterable[Group]) -> str:
        return "[" + " ".join(self.group(group) or "0" for group in groups) + "]"

    def expr(self, expr: Expr) -> str:
        match expr:
            case Leaf():
                return f"{expr.node.name}{self.index(expr.index)}"
            case Const():
                return f"{expr.value:g}"
            case Pos():
                return f"pos({self.group(expr.group)})"
            case Op():
                args = ", ".join(self.expr(a) if isinstance(a, Expr) else str(a) for a in expr.args)
                return f"{expr.target._schema.name.removeprefix('aten::')}({args})"
            case Dot():
                return f"dot({self.expr(expr.a)}, {self.expr(expr.b)}; {self.group(expr.over)})"
            case Sum():
                return f"sum({self.expr(expr.body)}; {self.group(expr.over)})"
            case OneHot():
                return f"({self.expr(expr.ids)} == {self.group(expr.at)})"
            case Dense():
                where = f"{self.expr(expr.ids)} == {self.group(expr.at)}"
                return f"dense({self.expr(expr.value)} where {where} else {expr.fill:g})"
            case Count():
                return f"count({self.expr(expr.ids)} == {self.group(expr.at)})"
            case Offs():
                return f"count({self.expr(expr.ids)} <= {self.group(expr.at)})"
        raise TypeError(type(expr))
