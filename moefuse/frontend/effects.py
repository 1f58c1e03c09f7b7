"""What code does besides computing tensors.

In: functions and modules that a loop over experts calls. Out: nothing, or `RefusedError` naming the line that has an
effect: an expert that the original skips would have it too many times. Effects on tensors needn't be found here: they
are values in the captured graph, where the lifter follows them.
"""

import ast
import builtins
import types
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import nn

from moefuse.frontend.source import RefusedError, Source, read

PURE = frozenset(
    (
        *(
            "len",
            "range",
            "int",
            "float",
            "bool",
            "min",
            "max",
            "abs",
            "sum",
            "enumerate",
            "zip",
            "isinstance",
            "getattr",
        ),
        *(
            "list",
            "tuple",
            "slice",
            "reversed",
            "sorted",
            "round",
            "hasattr",
            "str",
            "dict",
            "set",
            "super",
            "type",
        ),
    )
)
"""Builtins without effects."""

READERS = frozenset(("items", "keys", "values", "get"))
"""Methods of containers that only read."""

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


def demand_pure_module(module: nn.Module) -> None:
    """RefusedError unless running the module, and all modules in it, only computes."""
    known: set[Any] = set()
    for part in module.modules():
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            raise RefusedError(f"{type(part).__name__} has hooks")
        if type(part).__module__.startswith("torch.nn."):
            continue
        if "forward" in vars(part):
            raise RefusedError(f"{type(part).__name__}.forward is replaced on the instance")
        # Modules of a class differ in the functions they hold.
        key = (type(part), *((name, id(held)) for name, held in vars(part).items() if callable(held)))
        if key not in known:
            known.add(key)
            demand_pure_function(type(part).forward, part)


def demand_pure_function(function: Callable[..., Any], owner: nn.Module | None, depth: int = 0) -> None:
    """RefusedError unless the function only computes. owner: what `self` is in it."""
    if depth > DEEPEST:
        raise RefusedError(f"`{function.__name__}` calls too deep to follow")
    source = read(function)
    Calls(source, owner, [], depth).check_all(source.definition.body)


class Calls(ast.NodeVisitor):
    """Checks the calls and statements of one function, and of everything that it calls.

    owner: what `self` is. called: is filled with the modules that are called.
    """

    def __init__(
        self, source: Source, owner: nn.Module | None, called: list[nn.Module], depth: int = 0
    ) -> None:
        self.source = source
        self.owner = owner
        self.called = called
        self.depth = depth
        arguments = source.definition.args
        self.self_name = arguments.args[0].arg if owner is not None and arguments.args else None
        self.locals = {
            n.id
            for n in ast.walk(source.definition)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        } | {a.arg for a in ast.walk(arguments) if isinstance(a, ast.arg)}

    def check_all(self, body: list[ast.stmt]) -> None:
        """Visit statements."""
        for statement in body:
            self.visit(statement)

    def refuse(self, node: ast.AST, what: str) -> RefusedError:
        """The error that names the line."""
        line = getattr(node, "lineno", 0)
        where = "" if self.source.definition is None else f"`{self.source.definition.name}` "
        return RefusedError(f"{where}{what}", line)

    def generic_visit(self, node: ast.AST) -> None:
        """Everything that isn't looked at below: its parts, unless it is an effect by itself."""
        if (what := _FORBIDDEN.get(type(node))) is not None:
            raise self.refuse(node, what)
        super().generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Setting an attribute outlives the call."""
        if not isinstance(node.ctx, ast.Load):
            raise self.refuse(node, f"sets `{ast.unparse(node)}`")
        self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Writing to an element of something that isn't local outlives the call."""
        root = root_of(node)
        if not isinstance(node.ctx, ast.Load) and (
            root is None or root not in self.locals or root == self.self_name
        ):
            raise self.refuse(node, f"sets `{ast.unparse(node)}`")
        super().generic_visit(node)

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
        if not in_place and not self.appends(call):
            raise self.refuse(node, f"calls `{ast.unparse(function)}` for an effect")
        self.visit(call)

    def appends(self, call: ast.Call) -> bool:
        """True for `name.append(value)` on a local list."""
        function = call.func
        return (
            isinstance(function, ast.Attribute)
            and function.attr == "append"
            and isinstance(function.value, ast.Name)
            and function.value.id in self.locals
        )

    def visit_Call(self, node: ast.Call) -> None:
        """What is called must be known and pure."""
        if not self.appends(node):
            self._callee(node.func)
        for part in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(part)

    def _callee(self, function: ast.expr) -> None:
        root = root_of(function)
        if root is not None and root == self.self_name and self.owner is not None:
            self._member(function)
        elif root is None or root in self.locals:
            self._local(function)
        else:
            self._global(function)

    def _local(self, function: ast.expr) -> None:
        """A method of a local value, which is taken for a tensor, or a local that holds one of the owner's modules."""
        if isinstance(function, ast.Attribute):
            if not hasattr(torch.Tensor, function.attr) and function.attr not in READERS:
                raise self.refuse(function, f"calls `{ast.unparse(function)}`, which isn't known")
            self.visit(function.value)
            return
        members = self._members(function.id) if isinstance(function, ast.Name) else None
        if not members:
            raise self.refuse(function, f"calls `{ast.unparse(function)}`, which isn't known")
        for member in members:
            self._module(function, getattr(self.owner, member, None))

    def _members(self, name: str) -> set[str] | None:
        """The attributes of `self` that a name is taken out of, wherever it is assigned; None if it may be more."""
        values: list[ast.expr] = []
        for node in ast.walk(self.source.definition):
            if isinstance(node, ast.Assign) and any(_binds(target, name) for target in node.targets):
                values.append(node.value)
            elif isinstance(node, ast.For | ast.comprehension) and _binds(node.target, name):
                values.append(node.iter)
        found: set[str] = set()
        for value in values:
            whole = value.args if _enumerates(value) else [value]
            # Of what is enumerated beside the modules (numbers, tensors), nothing can be called.
            paths = [path_of(part) for part in whole if root_of(part) == self.self_name]
            if self.owner is None or not paths or any(len(path) < 2 for path in paths):
                return None
            found |= {path[1] for path in paths}
        return found or None

    def _module(self, function: ast.expr, value: Any) -> None:
        if not isinstance(value, nn.Module):
            raise self.refuse(function, f"calls `{ast.unparse(function)}`, which isn't known")
        demand_pure_module(value)
        self.called.append(value)

    def _member(self, function: ast.expr) -> None:
        """`self.method`, `self.module`, `self.experts[e]`, `self.w.view`."""
        value: Any = self.owner
        path = path_of(function)[1:]
        if not path and isinstance(function, ast.Subscript) and self.owner is not None:
            for child in self.owner.children():  # a ModuleList or ModuleDict of one's own: self[key](...)
                self._module(function, child)
            return
        for name in path:
            if isinstance(value, torch.Tensor):
                return
            if not hasattr(value, name):
                raise self.refuse(function, f"calls `{ast.unparse(function)}`, which isn't known")
            value = getattr(value, name)
        if isinstance(value, nn.Module) and value is not self.owner:
            self._module(function, value)
        elif isinstance(value, types.MethodType) and value.__self__ is self.owner:
            demand_pure_function(value.__func__, self.owner, self.depth + 1)
        else:
            self._object(function, value)

    def _global(self, function: ast.expr) -> None:
        first, *rest = path_of(function)
        inner = self.source.function
        cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
        if first in cells:
            value: Any = cells[first].cell_contents
        else:
            value = inner.__globals__.get(first, getattr(builtins, first, None))
            if value is getattr(builtins, first, function) and first not in PURE:
                raise self.refuse(function, f"calls `{first}`")
        for name in rest:
            value = getattr(value, name, None)
        self._object(function, value)

    def _object(self, function: ast.expr, value: Any) -> None:
        module = getattr(value, "__module__", None) or ""
        name = getattr(value, "__name__", "")
        if module.split(".")[0] in ("torch", "math") or (module == "builtins" and name in PURE):
            return
        if isinstance(getattr(value, "__self__", None), type(torch._C._VariableFunctions)):
            return
        if isinstance(value, types.FunctionType):
            demand_pure_function(value, None, self.depth + 1)
            return
        raise self.refuse(function, f"calls `{ast.unparse(function)}`, which isn't known")


def root_of(node: ast.expr) -> str | None:
    """The name at which `a.b[c].d` begins; None for anything else."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def path_of(node: ast.expr) -> list[str]:
    """`a.b[c].d` as [a, b, d]."""
    path: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
        node = node.value
    return [node.id, *path] if isinstance(node, ast.Name) else path


def _enumerates(value: ast.expr) -> TypeGuard[ast.Call]:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in ("enumerate", "zip")
    )


def _binds(target: ast.expr, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(target))
