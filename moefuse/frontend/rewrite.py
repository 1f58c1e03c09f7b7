"""Loops over experts that branch on data, rewritten so that Dynamo can follow them.

In: a function, and the module whose method it is. Out: the same function with calls of `moefuse.frontend.runtime` in
its loops; or `RefusedError`. Rewritten are

- `for e in T`, T from a nonzero or the like: a loop over all numbers that T may hold;
- `if test: continue` and `if test: ...` without else, where the test counts something: the path that does the work.

That both mean the same is proved later, on the captured graph. Here it is made sure that the graph will show all that
the loop does: its iterations leave nothing behind but tensors, lists of tensors for a torch.cat, and running offsets.
"""

import ast
import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from moefuse.frontend import runtime
from moefuse.frontend.admit import admit, asks_whether_empty, is_cat
from moefuse.frontend.liveness import live_names, loads, stores
from moefuse.frontend.lookup import root_of
from moefuse.frontend.search import (
    Found,
    counts_of,
    enumerated,
    is_bincount,
    loops_of,
    skip_test,
    statements,
    worth_reading,
)
from moefuse.frontend.source import HELPERS, RefusedError, Source, build, demand_plain, parse


def rewrite(
    function: Callable[..., Any],
    owners: Sequence[nn.Module],
    number: Callable[[Source, Found], int],
) -> Callable[..., Any] | None:
    """The function with its loops rewritten, None where it has none.

    owners: the modules whose method it is. number: gives each loop its number. Raises RefusedError as `examine`.
    """
    source, found = examine(function, owners)
    if source is None:
        return None
    from torch._dynamo.eval_frame import skip_code

    # by itself, where Dynamo leaves the caller to Python, it says nothing
    skip_code(runtime.bincount.__code__)
    for loop in found:
        loop.number = number(source, loop)
    definition = _Rewriter(found, source.definition).visit(source.definition)
    for loop in found:
        if loop.lists:  # what is asked of the list where the loop didn't run
            nothing = ast.Assign([ast.Name(_token(loop), ast.Store())], ast.Constant(None))
            definition.body.insert(0, ast.copy_location(nothing, source.definition.body[0]))
    return build(source, definition, runtime)


def examine(function: Callable[..., Any], owners: Sequence[nn.Module]) -> tuple[Source | None, list[Found]]:
    """A function's source and the loops in it to rewrite; (None, []) where it has none.

    Raises RefusedError where a loop does more than a graph would show, with the modules as they are now.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not worth_reading(code):
        return None, []
    source = parse(function)
    found = list(loops_of(source.definition)) or list(counts_of(source.definition))
    if not found:
        return None, []
    demand_plain(function, source)
    live = live_names(source.definition.body)
    for loop in (loop for loop in found if loop.kind != "counts"):
        for owner in owners:
            admit(loop, source, owner, live[loop.node])
    shared = [name for loop in found for name in loop.lists]
    if twice := sorted(name for name in shared if shared.count(name) > 1):
        raise RefusedError(f"several loops append to the list `{twice[0]}`", source.definition.lineno)
    return source, found


# --- the rewritten code -----------------------------------------------------------------------------------


def _helper(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(HELPERS, ast.Load()), name, ast.Load()), list(arguments), [])


def _allocates(value: ast.expr) -> bool:
    """True for `x.new_empty(...)` and its kin, with sizes of tensors at most: it may as well be made for nothing."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    made = value.func.attr in ("new_empty", "new_zeros")
    made = made or (value.func.attr in ("empty", "zeros") and root_of(value.func) == "torch")
    calls = [n for n in ast.walk(value) if isinstance(n, ast.Call) and n is not value]
    sizes = all(isinstance(call.func, ast.Attribute) and call.func.attr == "size" for call in calls)
    return made and sizes and not any(isinstance(n, ast.NamedExpr) for n in ast.walk(value))


def _of_numpy(value: ast.expr) -> ast.expr | None:
    """x of `x.cpu().numpy()`."""
    if (
        not isinstance(value, ast.Call)
        or not isinstance(value.func, ast.Attribute)
        or value.func.attr != "numpy"
    ):
        return None
    moved = value.func.value
    if (
        not isinstance(moved, ast.Call)
        or not isinstance(moved.func, ast.Attribute)
        or moved.func.attr != "cpu"
    ):
        return None
    return moved.func.value


class _Rewriter(ast.NodeTransformer):
    """Puts the helpers in: around the loops, and at the calls that can't be traced."""

    def __init__(self, found: list[Found], definition: ast.FunctionDef) -> None:
        self.found = {loop.node: loop for loop in found}
        self.definition = definition
        self.lists = {name: _token(loop) for loop in found for name in loop.lists}

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """`torch.cat(outputs)` leaves the loop; bincount has a length that is known while tracing."""
        self.generic_visit(node)
        if is_bincount(node):
            first = min(loop.number for loop in self.found.values())
            call = _helper("bincount", ast.Constant(first), node.args[0], node.keywords[0].value)
            return ast.copy_location(call, node)
        if is_cat(node) and isinstance(node.args[0], ast.Name) and node.args[0].id in self.lists:
            return ast.copy_location(
                _helper("result", ast.Name(self.lists[node.args[0].id], ast.Load()), node), node
            )
        return node

    def visit_If(self, node: ast.If) -> ast.stmt:
        """`if outputs:` has the answer that the data give."""
        self.generic_visit(node)
        node.test = self._asked(node.test)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        """`a if outputs else b`; of `torch.cat(outputs) if outputs else x.new_empty(0, n)` both are looked at."""
        rows = [n.args[0] for n in (node.body, node.orelse) if isinstance(n, ast.Call) and is_cat(n)]
        other = [n for n in (node.body, node.orelse) if _allocates(n)]
        name = rows[0].id if len(rows) == len(other) == 1 and isinstance(rows[0], ast.Name) else ""
        self.generic_visit(node)
        node.test = self._asked(node.test, (name, other[0]) if name else None)
        return node

    def _asked(self, test: ast.expr, instead: tuple[str, ast.expr] | None = None) -> ast.expr:
        """instead: (a list, what the program has in the place of its `cat` where it is empty)."""
        for asked in asks_whether_empty(test):
            if isinstance(asked, ast.Name) and asked.id in self.lists:
                load = ast.Name(self.lists[asked.id], ast.Load())
                given = [copy.deepcopy(instead[1])] if instead is not None and instead[0] == asked.id else []
                call = _helper("filled", load, ast.Name(asked.id, ast.Load()), test, *given)
                return ast.copy_location(call, test)
        return test

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        """`counts = counts.cpu().numpy()`, of which only elements are used."""
        self.generic_visit(node)
        values, target = _of_numpy(node.value), node.targets[0]
        if values is not None and isinstance(target, ast.Name) and self._only_elements(target.id, node):
            node.value = ast.copy_location(_helper("plain", values), node.value)
        return node

    def _only_elements(self, name: str, since: ast.Assign) -> bool:
        allowed: set[ast.AST] = set()
        for node in ast.walk(self.definition):
            if isinstance(node, ast.For):
                allowed.add(node.iter)
            elif isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice | ast.Tuple):
                allowed.add(node.value)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                allowed |= set(node.args) if node.func.id in ("enumerate", "zip", "len") else set()
        return all(
            node in allowed
            for node in ast.walk(self.definition)
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
            if node.lineno > since.lineno
        )

    def visit_For(self, node: ast.For) -> Any:
        """The loop between its markers, followed by what leaves it."""
        loop = self.found.get(node)
        if loop is None:
            return self.generic_visit(node)
        token = _token(loop)
        node.body = [s for old in node.body for s in _Body(loop, self.definition).lines(old)]
        load = ast.Name(token, ast.Load())
        begin = ast.Assign([ast.Name(token, ast.Store())], _helper("loop", ast.Constant(loop.number)))
        if loop.kind == "rows" and (listed := enumerated(node.iter)) is not None:
            node.iter.args[0] = _helper("rows", load, listed)  # type: ignore[attr-defined]
        elif loop.kind == "rows":
            node.iter = _helper("rows", load, node.iter)
        elif loop.kind == "numbers":
            assert isinstance(node.iter, ast.Call)
            assert isinstance(node.iter.func, ast.Attribute)
            node.iter = _helper("numbers", load, node.iter.func.value)
        step: list[ast.stmt] = [ast.Expr(_helper("step", load))]
        if loop.kind != "plain":
            error = ast.Attribute(ast.Name(HELPERS, ast.Load()), "NeverError", ast.Load())
            handler = ast.ExceptHandler(error, None, [ast.Expr(_helper("never", load))])
            node.body = [ast.Try(node.body, [handler], [], [])]
        node.body = step + node.body
        after: list[ast.stmt] = [ast.Expr(_helper("end", load))]
        for name in loop.results:
            value = _helper("result", load, ast.Name(name, ast.Load()))
            after.append(ast.Assign([ast.Name(name, ast.Store())], value))
        seen = (
            ast.Tuple([ast.Name(n, ast.Load()) for n in names], ast.Load())
            for names in (loop.changed, loop.seen)
        )
        look = ast.Expr(_helper("seen", load, *seen))
        return [ast.copy_location(line, node) for line in (begin, look, node, *after)]


class _Body(ast.NodeTransformer):
    """The body of one loop."""

    def __init__(self, loop: Found, definition: ast.FunctionDef) -> None:
        self.loop = loop
        self.definition = definition
        self.numbers = _numbers(loop.node) if loop.kind != "plain" else set()

    def lines(self, statement: ast.stmt) -> list[ast.stmt]:
        """One statement, rewritten."""
        made = self.visit(statement)
        return made if isinstance(made, list) else [made]

    def visit_If(self, node: ast.If) -> ast.stmt:
        """A test that only the data can answer is taken for the path that does the work."""
        test = skip_test(node, self.loop.node, self.definition)
        self.generic_visit(node)
        if test is not None:
            token = ast.Name(_token(self.loop), ast.Load())
            left = self.visit(copy.deepcopy(test.left))
            call: ast.expr = _helper("skips", token, left, ast.Constant(test.relation), test.right)
            skipping = len(node.body) == 1 and isinstance(node.body[0], ast.Continue)
            node.test = ast.copy_location(call if skipping else ast.UnaryOp(ast.Not(), call), node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """`base[e]` where e is the expert's number."""
        self.generic_visit(node)
        index = node.slice
        if not isinstance(node.ctx, ast.Load) or isinstance(index, ast.Slice | ast.Tuple | ast.Constant):
            return node
        if not self._is_number(index):
            return node
        return ast.copy_location(_helper("take", node.value, index), node)

    def _is_number(self, value: ast.expr) -> bool:
        """True for an expression of nothing but the expert's number."""
        names = loads(value) - {HELPERS}
        return bool(names) and names <= self.numbers

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        """`f"expert_{e}"`."""
        self.generic_visit(node)
        if node.conversion == -1 and self._is_number(node.value):
            node.value = ast.copy_location(_helper("formatted", node.value), node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """`int(e)`."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "int" and len(node.args) == 1 and self.numbers:
            return ast.copy_location(_helper("integer", node.args[0]), node)
        return node


def _numbers(loop: ast.For) -> set[str]:
    """The loop's variable, and what is made of nothing else."""
    names = set(stores(loop.target))
    for statement in statements(loop.body):
        if (
            isinstance(statement, ast.Assign)
            and loads(statement.value) - {"int"} <= names
            and loads(statement.value)
        ):
            for target in statement.targets:
                names |= stores(target)
    return names


def _token(loop: Found) -> str:
    return f"_moefuse_loop_{loop.node.lineno}"
