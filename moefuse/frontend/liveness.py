"""Which variables are read later.

In: the body of a function. Out: for every `for` loop, the names that are live after it and at the start of its body.
Where control flow is more than this knows (try, return, break), the answer errs towards live.
"""

import ast
from dataclasses import dataclass

Names = frozenset[str]


@dataclass(frozen=True)
class Live:
    """after: names read after the loop. head: names that an iteration reads before it writes them."""

    after: Names
    head: Names


def live_names(body: list[ast.stmt]) -> dict[ast.For, Live]:
    """Liveness of every `for` loop in these statements."""
    found: dict[ast.For, Live] = {}
    _block(body, frozenset(), frozenset(), found)
    return found


def loads(node: ast.AST) -> Names:
    """The names read anywhere in a piece of code; an augmented assignment reads its target."""
    read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store)}
    targets = [n.target for n in ast.walk(node) if isinstance(n, ast.AugAssign)]
    return frozenset(read | {t.id for t in targets if isinstance(t, ast.Name)})


def stores(node: ast.AST) -> Names:
    """The names assigned anywhere in a piece of code."""
    return frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _block(body: list[ast.stmt], after: Names, again: Names, found: dict[ast.For, Live]) -> Names:
    """The names live before the statements. again: those live where `continue` and `break` go."""
    live = after
    for statement in reversed(body):
        live = _statement(statement, live, again, found)
    return live


def _statement(node: ast.stmt, after: Names, again: Names, found: dict[ast.For, Live]) -> Names:
    if isinstance(node, ast.For | ast.AsyncFor):
        return _for(node, after, found)
    if isinstance(node, ast.If):
        branches = _block(node.body, after, again, found) | _block(node.orelse, after, again, found)
        return branches | loads(node.test)
    if isinstance(node, ast.With):
        live = _block(node.body, after, again, found)
        for item in node.items:
            live |= loads(item)
        return live
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr):
        return (after - whole_stores(node)) | loads(node)
    if isinstance(node, ast.Return | ast.Raise):
        return loads(node)
    if isinstance(node, ast.Continue | ast.Break):
        return again
    # while, try, match, ...: both what follows and all that is read inside
    live = after | again | loads(node)
    for child in ast.walk(node):
        if isinstance(child, ast.For) and child is not node:
            found[child] = Live(live, live)
    return live


def whole_stores(node: ast.stmt) -> Names:
    """The names that an assignment gives new values."""
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return frozenset()
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return frozenset()  # `name: int` assigns nothing
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    whole: set[str] = set()
    for target in targets:
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        whole |= {part.id for part in parts if isinstance(part, ast.Name)}
    return frozenset(whole)


def _for(node: ast.For | ast.AsyncFor, after: Names, found: dict[ast.For, Live]) -> Names:
    out = _block(node.orelse, after, after, found) | after
    head: Names = frozenset()
    while True:  # what an iteration reads is live at the end of the one before
        grown = _block(node.body, out | head, out | head, found) - stores(node.target)
        if grown <= head:
            break
        head |= grown
    if isinstance(node, ast.For):
        first = _block(node.body, frozenset(), frozenset(), found) - stores(node.target)
        found[node] = Live(out, first)
    return out | head | loads(node.iter)
