"""What code does besides computing tensors.

In: functions and modules that a loop over experts calls. Out: nothing, or `RefusedError` naming the line that has an
effect: an expert that the original skips would have it too many times. Effects on tensors needn't be found here: they
are values in the captured graph, where the lifter follows them.

Code may read tensors, numbers and the like, and call modules, functions and torch's operators on them. What it reads
of `self` or of globals is looked up, never run: no list, no dictionary and no object that could be changed is ever in
its hands, but those that it makes itself. Arguments are tensors and numbers too: calls get nothing else, and those of
a loop's own function are looked at when it runs (`runtime.seen`).
"""

import ast
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from moefuse.frontend.lookup import DATA, UNKNOWN, Scope, harmless, of_torch, root_of
from moefuse.frontend.source import RefusedError, Source, read

DEEPEST = 8
"""How deep calls are followed."""

_FORBIDDEN = {
    ast.Global: "rebinds a global name",
    ast.Nonlocal: "rebinds a name of the function around it",
    ast.Yield: "is a generator",
    ast.YieldFrom: "is a generator",
    ast.Await: "waits",
    ast.Delete: "deletes something",
    ast.Try: "catches exceptions",
    ast.Import: "imports",
    ast.ImportFrom: "imports",
    ast.FunctionDef: "defines a function",
    ast.ClassDef: "defines a class",
    ast.Lambda: "defines a function",
    ast.NamedExpr: "assigns inside of an expression",
}

_LOOKS_AT_MODULES = frozenset(("len", "isinstance", "enumerate", "zip"))
_OUTLIVES = frozenset(
    ("requires_grad_", "register_hook", "backward", "retain_grad", "share_memory_", "set_", "resize_")
)
"""Methods of tensors whose effect isn't a value in the graph."""


def demand_pure_module(module: nn.Module) -> None:
    """RefusedError unless running the module, and all modules in it, only computes."""
    if nn.modules.module._has_any_global_hook():
        raise RefusedError("there are hooks on all modules")
    known: set[Any] = set()
    for part in module.modules():
        name = type(part).__name__
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            raise RefusedError(f"{name} has hooks")
        if "forward" in vars(part):
            raise RefusedError(f"{name}.forward is replaced on the instance")
        if type(part).__module__.startswith("torch.nn."):
            continue
        for method in ("__call__", "_call_impl", "__getattr__", "__getattribute__"):
            if getattr(type(part), method) is not getattr(nn.Module, method):
                raise RefusedError(f"{name} has its own {method}")
        # Modules of a class differ in what they hold.
        key = (type(part), *((held, id(value)) for held, value in vars(part).items() if not _own(held)))
        if key not in known:
            known.add(key)
            demand_pure_function(type(part).forward, part)


def _own(name: str) -> bool:
    """Attributes that every module has for itself: what differs there are parameters."""
    return name in ("_parameters", "_buffers", "_modules") or name.endswith("_hooks")


def demand_pure_function(function: Callable[..., Any], owner: nn.Module | None, depth: int = 0) -> None:
    """RefusedError unless the function only computes. owner: what `self` is in it."""
    if depth > DEEPEST:
        raise RefusedError(f"`{function.__name__}` calls too deep to follow")
    source = read(function)
    defaults = (*(source.function.__defaults__ or ()), *(source.function.__kwdefaults__ or {}).values())
    if not all(harmless(value) for value in defaults):
        raise RefusedError(
            f"`{function.__name__}` has a default that may be changed", source.definition.lineno
        )
    calls = Calls(source, owner, depth)
    calls.check_all(source.definition.body)
    if given := sorted(calls.changed & calls.scope.parameters):
        raise RefusedError(
            f"`{function.__name__}` changes its argument `{given[0]}`", source.definition.lineno
        )


class Calls(ast.NodeVisitor):
    """Checks the calls and statements of one function, and of everything that it calls.

    owner: what `self` is. changed: the names of what is changed
    in place by code that means something else for a list than for a tensor.
    """

    def __init__(self, source: Source, owner: nn.Module | None, depth: int = 0) -> None:
        self.source = source
        self.scope = Scope(source, owner)
        self.depth = depth
        self.changed: set[str] = set()

    def check_all(self, body: list[ast.stmt]) -> None:
        """Visit statements."""
        for statement in body:
            self.visit(statement)

    def refuse(self, node: ast.AST, what: str) -> RefusedError:
        """The error that names the line."""
        return RefusedError(f"`{self.source.definition.name}` {what}", getattr(node, "lineno", 0))

    def generic_visit(self, node: ast.AST) -> None:
        """Everything that isn't looked at below: its parts, unless it is an effect by itself."""
        if (what := _FORBIDDEN.get(type(node))) is not None:
            raise self.refuse(node, what)
        super().generic_visit(node)

    # --- what is read

    def visit_Name(self, node: ast.Name) -> None:
        """Reading a name."""
        if isinstance(node.ctx, ast.Load):
            self._read(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Reading an attribute; setting one outlives the call."""
        if not isinstance(node.ctx, ast.Load):
            raise self.refuse(node, f"sets `{ast.unparse(node)}`")
        self._read(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Reading an element; writing to one of something that isn't local outlives the call."""
        if isinstance(node.ctx, ast.Load):
            self._read(node)
            return
        self._change(node)
        self._indices(node)

    def _read(self, node: ast.expr, *, callables: bool = False) -> None:
        """A value that can't be changed; with `callables`, a module or a function."""
        for value in self.scope.values(node):
            if not (
                harmless(value) or (callables and isinstance(value, nn.Module | types.FunctionType | type))
            ):
                raise self.refuse(
                    node, f"reads `{ast.unparse(node)}`, which may be more than tensors and numbers"
                )
        self._indices(node)

    def _indices(self, node: ast.expr) -> None:
        """Visit what isn't a path itself in `a.b[i].c`."""
        while isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Subscript):
                self.visit(node.slice)
            node = node.value
        if not isinstance(node, ast.Name):
            self.visit(node)

    def _taken(self, node: ast.expr) -> None:
        """A value that is given a name, or run over: it may be a module or a function."""
        if isinstance(node, ast.IfExp):
            self.visit(node.test)
            self._taken(node.body)
            self._taken(node.orelse)
        elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            self._read(node, callables=True)
        else:
            self.visit(node)

    # --- what is written

    def _change(self, node: ast.expr) -> None:
        root = root_of(node)
        if root is None or root == self.scope.self_name or root not in self.scope.local:
            raise self.refuse(node, f"sets `{ast.unparse(node)}`")
        self.changed |= self.scope.aliases(root)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Names, and elements of tensors."""
        for target in node.targets:
            self.visit(target)
        if all(isinstance(target, ast.Name) for target in node.targets):
            self._taken(node.value)
        else:
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """What is annotated isn't evaluated for a local name."""
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """`x += y` changes a list, and everybody's who has it."""
        self.visit(node.target)
        if isinstance(node.target, ast.Name):
            self._change(node.target)
        self.visit(node.value)

    def visit_For(self, node: ast.For) -> None:
        """A loop may run over modules."""
        self._taken(node.iter)
        self.check_all([*node.body, *node.orelse])

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """So may a comprehension."""
        self._taken(node.iter)
        for test in node.ifs:
            self.visit(test)

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call for its effect: a tensor's in-place method is followed in the graph, anything else isn't."""
        call = node.value
        if isinstance(call, ast.Constant):
            return
        if not isinstance(call, ast.Call):
            self.visit(call)
            return
        function = call.func
        in_place = isinstance(function, ast.Attribute) and function.attr.endswith("_")
        if not in_place and not self._appends(call):
            raise self.refuse(node, f"calls `{ast.unparse(function)}` for an effect")
        self.visit(call)

    def _appends(self, call: ast.Call) -> bool:
        """True for `name.append(value)` on a list that the function has made."""
        function = call.func
        return (
            isinstance(function, ast.Attribute)
            and function.attr == "append"
            and isinstance(function.value, ast.Name)
            and self.scope.is_own_list(function.value.id)
        )

    # --- what is called

    def visit_Call(self, node: ast.Call) -> None:
        """What is called must be known and pure; what it is given, tensors and numbers."""
        looks = isinstance(node.func, ast.Name) and node.func.id in _LOOKS_AT_MODULES
        if not self._appends(node):
            values = self.scope.values(node.func)
            for value in values or [UNKNOWN]:
                self._callee(node.func, value)
            self._indices(node.func)
        for part in (*node.args, *(keyword.value for keyword in node.keywords)):
            if looks and isinstance(part, ast.Name | ast.Attribute | ast.Subscript):
                self._read(part, callables=True)
            else:
                self.visit(part)

    def _callee(self, function: ast.expr, value: Any) -> None:
        if value is DATA and isinstance(function, ast.Attribute) and function.attr not in _OUTLIVES:
            return  # a tensor's method: it has no other
        if isinstance(value, nn.Module) and value is not self.scope.owner:
            demand_pure_module(value)
        elif isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            demand_pure_function(value.__func__, value.__self__, self.depth + 1)
        elif value is not DATA and of_torch(value):
            return
        elif isinstance(value, types.FunctionType):
            demand_pure_function(value, None, self.depth + 1)
        else:
            raise self.refuse(function, f"calls `{ast.unparse(function)}`, which isn't known")
