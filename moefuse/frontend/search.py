"""Which loops branch on data in a way that is understood.

In: a function's definition. Out: its loops over experts, with the construct at which Dynamo would break the graph.
"""

import ast
import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

from moefuse.frontend.liveness import loads, stores

LISTS_HITS = frozenset(("nonzero", "argwhere", "where", "unique", "unique_consecutive"))
"""Calls whose result is as long as the data wants."""

COUNTS = frozenset(("any", "sum", "numel", "size", "item", "count_nonzero"))
"""Methods whose result is zero where nothing is there."""

OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_SIGNS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


@dataclass(frozen=True)
class Test:
    """`left relation right`, as source code."""

    left: ast.expr
    relation: str
    right: ast.expr


@dataclass
class Found:
    """A loop to rewrite. kind: "rows", "numbers" (of a tolist) or "plain"; construct: what breaks the graph there."""

    node: ast.For
    kind: str
    construct: str
    number: int = 0
    results: list[str] = field(default_factory=list)
    lists: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


def worth_reading(code: types.CodeType) -> bool:
    """Whether a function may have such a loop at all.

    Reading sources costs time: most functions have no loop, or none over what such a loop needs.
    """
    words = LISTS_HITS | COUNTS | {"shape", "tolist", "numpy", "len"}
    return not words.isdisjoint(code.co_names) and any(
        i.opname == "FOR_ITER" for i in dis.get_instructions(code)
    )


def loops_of(definition: ast.FunctionDef) -> Iterator[Found]:
    """The loops of a function that branch on data, outermost ones only."""
    for node in _outermost(definition.body):
        kind, construct = _kind(node, definition)
        tests = [t for t in ifs(node.body) if skip_test(t, node, definition) is not None]
        if kind == "plain" and tests:
            construct = f"if {ast.unparse(tests[0].test)}:"
        if kind != "plain" or tests:
            yield Found(node, kind, construct)


def _outermost(body: list[ast.stmt]) -> Iterator[ast.For]:
    for node in body:
        if isinstance(node, ast.For):
            yield node
        else:
            for block in ("body", "orelse", "finalbody"):
                yield from _outermost(getattr(node, block, []))


def _kind(node: ast.For, definition: ast.FunctionDef) -> tuple[str, str]:
    over = node.iter
    text = f"for {ast.unparse(node.target)} in {ast.unparse(over)}:"
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) and over.func.attr == "tolist":
        return ("numbers", text) if _lists_hits(over.func.value, definition) else ("plain", "")
    return ("rows", text) if _lists_hits(over, definition) else ("plain", "")


def _lists_hits(value: ast.expr, definition: ast.FunctionDef) -> bool:
    """True when the value comes from a call such as nonzero, as far as assignments in the function say."""
    if any(isinstance(n, ast.Attribute) and n.attr in LISTS_HITS for n in ast.walk(value)):
        return True
    if not isinstance(value, ast.Name):
        return False
    assigned = [
        n.value
        for n in ast.walk(definition)
        if isinstance(n, ast.Assign) and any(value.id in stores(target) for target in n.targets)
    ]
    return any(
        isinstance(n, ast.Attribute) and n.attr in LISTS_HITS for value in assigned for n in ast.walk(value)
    )


def ifs(body: list[ast.stmt]) -> Iterator[ast.If]:
    """The `if` statements of a loop body, nested ones too, those of loops within it excepted."""
    for node in body:
        if isinstance(node, ast.If):
            yield node
        for block in ("body", "orelse"):
            if not isinstance(node, ast.For | ast.While):
                yield from ifs(getattr(node, block, []))


def skip_test(node: ast.If, loop: ast.For, definition: ast.FunctionDef) -> Test | None:
    """What is true where the work isn't done, if the statement is `if skip: continue` or `if work: ...`."""
    if node.orelse:
        return None
    test = _relation(node.test)
    if test is None or not _about_data(test.left, loop, definition):
        return None
    if len(node.body) == 1 and isinstance(node.body[0], ast.Continue):
        return test
    return Test(test.left, OPPOSITE[test.relation], test.right)


def _relation(test: ast.expr) -> Test | None:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _relation(test.operand)
        return Test(inner.left, OPPOSITE[inner.relation], inner.right) if inner is not None else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and (sign := _SIGNS.get(type(test.ops[0]))):
        right = test.comparators[0]
        if isinstance(right, ast.Constant) and isinstance(right.value, int):
            return Test(test.left, sign, right)
        return None
    return Test(test, "!=", ast.Constant(0)) if _counts(test) else None


def _counts(value: ast.expr) -> bool:
    """True for `x.any()`, `len(x)`, `x.shape[0]`: zero, or false, where nothing is there."""
    if isinstance(value, ast.Call):
        function = value.func
        named = isinstance(function, ast.Name) and function.id == "len"
        return named or (isinstance(function, ast.Attribute) and function.attr in COUNTS)
    return (
        isinstance(value, ast.Subscript)
        and isinstance(value.value, ast.Attribute)
        and value.value.attr == "shape"
    )


def _about_data(left: ast.expr, loop: ast.For, definition: ast.FunctionDef) -> bool:
    """True when the left side may depend on data: no index of a range, no setting of `self`, no parameter."""
    over = loop.iter
    counted = set()
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Name):
        if over.func.id == "range":
            counted = set(stores(loop.target))
        elif over.func.id == "enumerate" and isinstance(loop.target, ast.Tuple):
            counted = set(stores(loop.target.elts[0]))
    if isinstance(left, ast.Name):
        return left.id not in counted and left.id in stores(definition)
    return bool(loads(left) - counted - {"self", "len", "torch"})


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements, nested ones too."""
    for node in body:
        yield node
        for block in ("body", "orelse"):
            yield from statements(getattr(node, block, []))
