"""What a loop may do, so that the captured graph shows all of it.

In: a loop that was found. Out: nothing, and the names that leave the loop filled in; or `RefusedError`. Iterations may
leave behind tensors, lists of tensors for a torch.cat, and running offsets; nothing else.
"""

import ast

from torch import nn

from moefuse.frontend.effects import Calls
from moefuse.frontend.liveness import Live, loads, stores, whole_stores
from moefuse.frontend.lookup import root_of
from moefuse.frontend.search import Found, ifs, skip_test, statements
from moefuse.frontend.source import RefusedError, Source


def admit(loop: Found, source: Source, owner: nn.Module, live: Live) -> None:
    """RefusedError where the loop does more than the graph will show; otherwise fills in what leaves it."""
    node, definition = loop.node, source.definition
    if loop.refused:
        raise RefusedError(f"{loop.refused}: loop over the list itself", node.lineno)
    if node.orelse:
        raise RefusedError("the loop has an else branch", node.lineno)
    _check_scopes(node, definition)
    for inner in statements(node.body):
        _check_statement(inner, node, definition)
    calls = Calls(source, owner)
    calls.check_all(node.body)
    body = ast.Module(node.body, [])
    written = stores(body)
    carried = {name for name in written if name in live.after or name in live.head}
    tested = {
        ast.dump(test.left)
        for branch in ifs(node.body)
        if (test := skip_test(branch, node, definition)) is not None
    }
    offsets = {name for name in carried if _is_offset(name, node.body, tested)}
    changed = {root for root in _changed(node.body) if root not in written or root in live.head} - {"self"}
    loop.lists = sorted(name for name in changed if _is_list(name, node.body))
    for name in loop.lists:
        _check_list(name, node, definition)
    loop.results = sorted((carried - offsets | changed) - set(loop.lists))
    # What an iteration finds: lists that it appends to are looked at already, `self` and globals by name.
    found = (live.head | loads(node.iter)) & calls.scope.local - {calls.scope.self_name, *loop.lists}
    loop.changed = sorted(found & calls.changed)
    loop.seen = sorted(found - calls.changed)
    for name in (*loop.results, *loop.changed, *loop.seen):
        if name not in _bound_before(node, definition):
            raise RefusedError(f"`{name}`, used after it, may be assigned nowhere but in it", node.lineno)
    if stores(node.target) & live.after:
        raise RefusedError("the loop's variable is read after the loop", node.lineno)


def _check_scopes(loop: ast.For, definition: ast.FunctionDef) -> None:
    """What the loop assigns is seen nowhere but in the function itself, in the order of its statements."""
    assigned = stores(loop)
    for node in ast.walk(definition):
        if isinstance(node, ast.Global | ast.Nonlocal):
            raise RefusedError(f"it has `{ast.unparse(node)}`", node.lineno)
        if isinstance(node, ast.Name) and node.id in _SEES_LOCALS:
            raise RefusedError(f"it uses `{node.id}`, which sees all local names", node.lineno)
        if node is definition or not isinstance(node, _LATER):
            continue
        if captured := sorted(loads(node) & assigned):
            raise RefusedError(f"`{captured[0]}` is read by a function that may run later", node.lineno)


_LATER = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.GeneratorExp | ast.ClassDef
_SEES_LOCALS = frozenset(("locals", "vars", "eval", "exec", "dir"))


def _bound_before(loop: ast.For, definition: ast.FunctionDef) -> frozenset[str]:
    """The names that have a value for sure when the loop begins."""
    arguments = {a.arg for a in ast.walk(definition.args) if isinstance(a, ast.arg)}
    return _bound(definition.body, loop) | arguments


def _bound(body: list[ast.stmt], loop: ast.For | None) -> frozenset[str]:
    """The names that statements assign in any case; with a loop, on the way to it."""
    names: frozenset[str] = frozenset()
    for node in body:
        if node is loop:
            break
        blocks = [getattr(node, block, []) for block in ("body", "orelse", "finalbody")]
        if loop is not None and (around := [b for b in blocks if any(loop is n for n in statements(b))]):
            return names | _bound(around[0], loop)
        names |= whole_stores(node)
        if isinstance(node, ast.If):
            names |= _bound(node.body, None) & _bound(node.orelse, None)
        elif isinstance(node, ast.With):
            names |= _bound(node.body, None)
    return names


def _check_statement(node: ast.stmt, loop: ast.For, definition: ast.FunctionDef) -> None:
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.Pass | ast.Continue):
        return
    if isinstance(node, ast.If):
        return
    if isinstance(node, ast.With):
        for item in node.items:
            call = item.context_expr
            name = (
                call.func.attr if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else ""
            )
            if name not in ("no_grad", "enable_grad", "inference_mode", "autocast"):
                raise RefusedError(f"the loop enters `{ast.unparse(item.context_expr)}`", node.lineno)
        return
    words = {ast.For: "another loop", ast.While: "another loop", ast.Break: "`break`", ast.Return: "`return`"}
    what = words.get(type(node), f"`{ast.unparse(node).splitlines()[0]}`")
    raise RefusedError(f"the loop's body has {what}", node.lineno)


def _changed(body: list[ast.stmt]) -> set[str]:
    """Names of what is changed in place: `y.add_(...)`, `y[i] = ...`, `outputs.append(...)`."""
    found: set[str] = set()
    for statement in body:
        for node in ast.walk(statement):
            target: ast.expr | None = None
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                target = node
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                in_place = node.func.attr.endswith("_") or node.func.attr == "append"
                target = node.func.value if in_place else None
            if target is not None and (root := root_of(target)) is not None:
                found.add(root)
    return found


def _is_list(name: str, body: list[ast.stmt]) -> bool:
    return any(
        isinstance(n, ast.Call) and _is_append(n, name) for statement in body for n in ast.walk(statement)
    )


def _is_append(call: ast.Call, name: str) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "append"
        and isinstance(function.value, ast.Name)
        and function.value.id == name
    )


def _check_list(name: str, loop: ast.For, definition: ast.FunctionDef) -> None:
    """A list may be concatenated, or asked whether anything is in it: its length depends on what was skipped."""
    inside = set(ast.walk(loop))
    allowed: set[ast.AST] = set()
    made = [
        n for n in ast.walk(definition) if isinstance(n, ast.Assign | ast.AnnAssign) and name in stores(n)
    ]
    fresh = [n for n in ast.walk(definition) if isinstance(n, ast.Name) and n.id == name]
    written = [n for n in fresh if not isinstance(n.ctx, ast.Load)]
    if len(made) != 1 or len(written) != 1 or not is_empty_list(made[0]) or made[0] in inside:
        raise RefusedError(f"the list `{name}` isn't made by one `{name} = []` before the loop", loop.lineno)
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and node not in inside and is_cat(node):
            allowed.add(node.args[0])
        if isinstance(node, ast.If | ast.IfExp) and node not in inside and node.lineno > loop.lineno:
            allowed |= asks_whether_empty(node.test)
        if isinstance(node, ast.Call) and node in inside and _is_append(node, name):
            allowed.add(node.func.value)  # type: ignore[attr-defined]
    for node in ast.walk(definition):
        if (
            isinstance(node, ast.Name)
            and node.id == name
            and isinstance(node.ctx, ast.Load)
            and node not in allowed
        ):
            raise RefusedError(f"the list `{name}` is used for more than a torch.cat", node.lineno)


def is_empty_list(node: ast.Assign | ast.AnnAssign) -> bool:
    """True for `name = []`."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    plain = len(targets) == 1 and isinstance(targets[0], ast.Name)
    return plain and isinstance(node.value, ast.List) and not node.value.elts


def is_cat(call: ast.Call) -> bool:
    """True for `torch.cat(...)` by any of its names."""
    function = call.func
    named = isinstance(function, ast.Attribute) and function.attr in ("cat", "concat", "concatenate")
    return named and bool(call.args) and root_of(function) == "torch"


def asks_whether_empty(test: ast.expr) -> set[ast.AST]:
    """What is asked by `if outputs`, `if not outputs`, `if len(outputs) == 0`."""
    value = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else test
    if isinstance(value, ast.Compare) and len(value.ops) == 1:
        right = value.comparators[0]
        if not isinstance(right, ast.Constant) or right.value != 0:
            return set()
        value = value.left
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "len":
        value = value.args[0]
    return {value}


def _is_offset(name: str, body: list[ast.stmt], tested: set[str]) -> bool:
    """True when an iteration adds to the name only what was tested for zero: `start = start + n`."""
    written = [n for n in statements(body) if name in stores(n) and not isinstance(n, ast.If | ast.With)]
    if len(written) != 1:
        return False
    (only,) = written
    if isinstance(only, ast.AugAssign):
        return isinstance(only.op, ast.Add) and ast.dump(only.value) in tested
    if (
        not isinstance(only, ast.Assign)
        or len(only.targets) != 1
        or not isinstance(only.targets[0], ast.Name)
    ):
        return False
    value = only.value
    if isinstance(value, ast.Name):
        sources = [n for n in statements(body) if isinstance(n, ast.Assign) and value.id in stores(n)]
        if len(sources) != 1 or len(sources[0].targets) != 1:
            return False
        value = sources[0].value
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return False
    own = [isinstance(side, ast.Name) and side.id == name for side in (value.left, value.right)]
    added = value.right if own[0] else value.left
    return any(own) and ast.dump(added) in tested
