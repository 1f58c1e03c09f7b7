"""Which loops branch on data in a way that is understood.

In: a function's definition. Out: its loops over experts, with the construct at which Dynamo would break the graph.
"""

import ast
import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

from moefuse.frontend.liveness import loads, stores
from moefuse.frontend.lookup import root_of

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
    """A loop to rewrite. kind: "rows", "numbers" (of a tolist) or "plain"; construct: what breaks the graph there.

    Of kind "counts" it is a bincount in a function without such loops; node then has its place only.
    refused: why it can't be rewritten, whatever its body does; "" if it may be.
    """

    node: ast.For
    kind: str
    construct: str
    refused: str = ""
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
    names = set(code.co_names)
    loops = any(i.opname == "FOR_ITER" for i in dis.get_instructions(code))
    return (loops and not words.isdisjoint(names)) or {"bincount", "tolist"} <= names


def is_bincount(call: ast.AST) -> bool:
    """True for `torch.bincount(ids, minlength=n)`."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    named = call.func.attr == "bincount" and root_of(call.func) == "torch"
    return named and len(call.args) == 1 and [keyword.arg for keyword in call.keywords] == ["minlength"]


def counts_of(definition: ast.FunctionDef) -> Iterator[Found]:
    """The counts of a function whose number Dynamo doesn't know, where it makes lists of counts."""
    if not any(isinstance(n, ast.Attribute) and n.attr == "tolist" for n in ast.walk(definition)):
        return
    for call in ast.walk(definition):
        if isinstance(call, ast.Call) and is_bincount(call):
            place = ast.For(ast.Name("_", ast.Store()), call, [], [])
            yield Found(ast.copy_location(place, call), "counts", ast.unparse(call))


def loops_of(definition: ast.FunctionDef) -> Iterator[Found]:
    """The loops of a function that branch on data, outermost ones only."""
    for node in _outermost(definition.body):
        kind, construct = _kind(node, definition)
        tests = [t for t in ifs(node.body) if skip_test(t, node, definition) is not None]
        if kind == "plain" and tests:
            construct = f"if {ast.unparse(tests[0].test)}:"
        refused = _by_position(node, definition)
        if refused:
            construct = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}:"
        if kind != "plain" or tests or refused:
            yield Found(node, kind, construct, refused)


def _by_position(node: ast.For, definition: ast.FunctionDef) -> str:
    """Why a loop that needs the positions in a list of hit experts can't be rewritten: they depend on the data."""
    over = node.iter
    if not isinstance(over, ast.Call) or not isinstance(over.func, ast.Name):
        return ""
    if over.func.id == "range" and any(
        _is_length(n, definition) for part in over.args for n in ast.walk(part)
    ):
        return "it counts through a list that is as long as the data want"
    if over.func.id != "enumerate" or not over.args or not _lists_hits(over.args[0], definition):
        return ""
    if enumerated(over) is None or not _unread(node):
        return "it reads the position in a list that is as long as the data want"
    return ""


def _is_length(value: ast.AST, definition: ast.FunctionDef) -> bool:
    """True for `len(hits)`, `hits.shape`, `hits.size(0)`, `hits.numel()` of what is as long as the data want."""
    measured: ast.expr | None = None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "len":
        measured = value.args[0]
    elif isinstance(value, ast.Attribute) and value.attr in ("shape", "size", "numel"):
        measured = value.value
    return isinstance(measured, ast.Name) and any(
        isinstance(n, ast.Call)
        and isinstance(n.func, ast.Attribute)
        and (n.func.attr in LISTS_HITS - {"where"} or (n.func.attr == "where" and len(n.args) == 1))
        for assigned in _assigned(measured, definition)
        for n in ast.walk(assigned)
    )


def enumerated(over: ast.expr) -> ast.expr | None:
    """X of `enumerate(X)`."""
    named = isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "enumerate"
    return over.args[0] if named and len(over.args) == 1 and not over.keywords else None  # type: ignore[attr-defined]


def _unread(node: ast.For) -> bool:
    """True when nothing reads the position that enumerate gives."""
    target = node.target
    pair = isinstance(target, ast.Tuple) and len(target.elts) == 2
    return pair and not stores(target.elts[0]) & loads(ast.Module(node.body, []))  # type: ignore[attr-defined]


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
    if (listed := enumerated(over)) is not None:
        over = listed
    elif isinstance(over, ast.Call) and isinstance(over.func, ast.Name):
        return "plain", ""  # range(len(hits)) and the like: see _by_position
    return ("rows", text) if _lists_hits(over, definition) else ("plain", "")


def _lists_hits(value: ast.expr, definition: ast.FunctionDef) -> bool:
    """True when the value comes from a call such as nonzero, as far as assignments in the function say."""
    return any(
        isinstance(n, ast.Attribute) and n.attr in LISTS_HITS
        for made in (value, *_assigned(value, definition))
        for n in ast.walk(made)
    )


def _assigned(value: ast.expr, definition: ast.FunctionDef) -> list[ast.expr]:
    """What the function assigns to the name at which `a.b(c)[d]` begins."""
    while isinstance(value, ast.Attribute | ast.Subscript | ast.Call):
        value = value.func if isinstance(value, ast.Call) else value.value
    if not isinstance(value, ast.Name):
        return []
    assignments = (n for n in ast.walk(definition) if isinstance(n, ast.Assign))
    return [n.value for n in assignments if any(value.id in stores(target) for target in n.targets)]


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
