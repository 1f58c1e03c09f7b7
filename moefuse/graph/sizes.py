"""Size arithmetic that never adds a guard.

In: sizes as they stand in `node.meta["val"]`: int or torch.SymInt. Out: sizes and plain booleans. Everything
is decided on the sympy expressions; what can't be proved is False, never a new guard in the ShapeEnv.
"""

import functools
from collections.abc import Iterable

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

Size = int | torch.SymInt


def expr(size: Size) -> sympy.Expr:
    """The sympy expression of a size, with the replacements that its ShapeEnv has already proved."""
    if isinstance(size, torch.SymInt):
        node = size.node
        return sympy.sympify(node.shape_env.replace(node.expr) if node.shape_env is not None else node.expr)
    return sympy.Integer(size)


def is_unbacked(size: Size) -> bool:
    """True for a size that depends on the values of some tensor."""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def same(a: Size, b: Size) -> bool:
    """True when both sizes are proved equal."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return _same(expr(a), expr(b))


@functools.lru_cache(maxsize=4096)
def _same(a: sympy.Expr, b: sympy.Expr) -> bool:
    return a == b or bool(sympy.expand(a - b) == 0)


def is_one(size: Size) -> bool:
    """True when the size is statically one (a symbol is never taken for one)."""
    return isinstance(size, int) and size == 1


def product(sizes: Iterable[Size]) -> Size:
    """The product; 1 for nothing."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def quotient(a: Size, b: Size) -> Size | None:
    """a / b where b is proved to divide a, otherwise None. A symbolic result keeps a's ShapeEnv.

    0 / 0 is 1: an index without elements is one with itself.
    """
    if isinstance(a, int) and isinstance(b, int):
        return 1 if a == b else a // b if b and a % b == 0 else None
    if same(a, b):
        return 1
    if expr(b) == 0:
        return None
    # Products of symbols and numbers cancel by themselves, sums where they are multiples of each other; anything deeper
    # isn't worth sympy's time.
    ratio = _ratio(expr(a), expr(b))
    if not ratio.is_integer:
        return None
    if ratio.is_Integer:
        return int(ratio) if ratio > 0 else None
    return a // b


@functools.lru_cache(maxsize=4096)
def _ratio(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    (factor, left), (divisor, right) = sympy.expand(a).primitive(), sympy.expand(b).primitive()
    return factor / divisor if left == right else a / b
