"""What names and paths in a function stand for, without running anything.

In: a function's source and the module whose method it is. Out: for an expression all objects that it may be, as far
as they are there before the function runs; `DATA` for what is computed: a tensor, a number, or what is made of them;
`UNKNOWN` for anything else: what a property gives, or an object of one's own.
"""

import ast
import builtins
import enum
import inspect
import types
from typing import Any

import torch
from torch import nn

from moefuse.frontend.source import Source

PURE = frozenset(
    (
        *("len", "range", "int", "float", "bool", "min", "max", "abs", "sum", "enumerate", "zip"),
        *("isinstance", "list", "tuple", "slice", "reversed", "sorted", "round", "str"),
    )
)
"""Builtins without effects."""

DATA, UNKNOWN = object(), object()

_CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), range, slice, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Tensor),
)
_CONTEXTS = (
    *(torch.no_grad, torch.enable_grad, torch.inference_mode, torch.autocast, torch.amp.autocast),
    *(torch.finfo, torch.iinfo, torch.device, torch.Size),
)
_FUNCTIONS = ("torch.nn.functional", "torch.functional", "torch._jit_internal")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def harmless(value: Any) -> bool:
    """True for computed values, tensors and constants: nothing that code could change beside the graph."""
    if isinstance(value, tuple):
        return all(map(harmless, value))
    return value is DATA or isinstance(value, _CONSTANTS)


def of_torch(value: Any) -> bool:
    """True for operators and for builtins without effects."""
    if isinstance(value, type) and value in _CONTEXTS:
        return True
    if any(value is getattr(builtins, name) for name in PURE):
        return True
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True
    if isinstance(value, types.FunctionType):  # where it is from: a wrapper says of itself what it wraps
        return value.__globals__.get("__name__") in _FUNCTIONS
    if not isinstance(value, types.BuiltinFunctionType) or value.__name__.startswith(("_", "set", "manual")):
        return False
    home = value.__self__
    if isinstance(home, types.ModuleType):
        return home.__name__.partition(".")[0] in ("torch", "math")
    return getattr(torch._C._VariableFunctions, value.__name__, None) is value


class Scope:
    """The names of one function. local: those it assigns, parameters among them. self_name: what `owner` is called."""

    def __init__(self, source: Source, owner: nn.Module | None) -> None:
        definition = source.definition
        arguments = [a.arg for a in ast.walk(definition.args) if isinstance(a, ast.arg)]
        self.owner = owner
        self.self_name = arguments[0] if owner is not None and arguments else None
        self.parameters = set(arguments) - {self.self_name}
        self.local = set(arguments) | {
            n.id for n in ast.walk(definition) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
        }
        inner = source.function
        self.globals = inner.__globals__
        self.cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
        self._bound: dict[str, list[tuple[ast.expr, bool]]] = {}
        for node in ast.walk(definition):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, node.value, False)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                self._bind(node.target, node.value, False)
            elif isinstance(node, ast.For | ast.comprehension):
                self._bind(node.target, node.iter, True)
        self._busy: set[str] = set()

    def _bind(self, target: ast.expr, value: ast.expr, element: bool) -> None:
        """Note what a target is given: a value, or an element of one."""
        if isinstance(target, ast.Name):
            self._bound.setdefault(target.id, []).append((value, element))
            return
        if not isinstance(target, ast.Tuple | ast.List):
            return
        parts: list[ast.expr] | None = None
        if not element and isinstance(value, ast.Tuple | ast.List):
            parts = value.elts
        elif element and _builtin(value) == "zip":
            parts = value.args  # type: ignore[attr-defined]
        elif element and _builtin(value) == "enumerate" and len(value.args) == 1:  # type: ignore[attr-defined]
            parts = [ast.Call(ast.Name("range", ast.Load()), [], []), *value.args]  # type: ignore[attr-defined]
        starred = any(isinstance(part, ast.Starred) for part in (*target.elts, *(parts or ())))
        if parts is not None and not starred and len(parts) == len(target.elts):
            for part, given in zip(target.elts, parts, strict=True):
                self._bind(part, given, element)
            return
        for name in (n.id for n in ast.walk(target) if isinstance(n, ast.Name)):
            whole = ast.Subscript(value, ast.Constant(0), ast.Load())
            self._bound.setdefault(name, []).append((whole, element))

    def is_own_list(self, name: str) -> bool:
        """True for a list that the function makes, wherever it assigns the name."""
        given = self._bound.get(name, [])
        lists = all(isinstance(value, ast.List) and not element for value, element in given)
        return bool(given) and lists and name not in self.parameters

    def aliases(self, name: str) -> set[str]:
        """The name, and those that the same object, or one that it is part of, may go by."""
        found: list[Any] = [name]
        for one in found:
            for value, _ in self._bound.get(one, []):
                ends = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
                ends = [v for end in ends for v in (end.values if isinstance(end, ast.BoolOp) else [end])]
                roots = [root_of(end) for end in ends]
                found += [root for root in roots if root in self.local and root not in found]
        return set(found)

    def values(self, node: ast.expr) -> list[Any]:
        """All that an expression may be."""
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.Attribute):
            return [_attribute(value, node.attr) for value in self.values(node.value)]
        if isinstance(node, ast.Subscript):
            return [one for value in self.values(node.value) for one in _elements(value)]
        if isinstance(node, ast.IfExp):
            return [*self.values(node.body), *self.values(node.orelse)]
        if isinstance(node, ast.BoolOp):
            return [one for value in node.values for one in self.values(value)]
        return [DATA]

    def _named(self, name: str) -> list[Any]:
        if name == self.self_name:
            return [self.owner]
        if name not in self.local:
            if name in self.cells:
                return [self.cells[name].cell_contents]
            return [self.globals.get(name, getattr(builtins, name, UNKNOWN))]
        if name in self._busy:
            return []
        self._busy.add(name)
        found = [DATA] if name in self.parameters or name not in self._bound else []
        for value, element in self._bound.get(name, []):
            found += self._run_over(value) if element else self.values(value)
        self._busy.discard(name)
        return found

    def _run_over(self, value: ast.expr) -> list[Any]:
        """What `for name in value` gives."""
        if not isinstance(value, ast.Call):
            return [one for whole in self.values(value) for one in _elements(whole)]
        if _builtin(value) in ("range", "enumerate", "zip"):
            given = [one for part in value.args for one in self.values(part)]
            return [DATA if all(map(harmless, given)) else UNKNOWN]
        known = all(one is DATA or of_torch(one) for one in self.values(value.func))
        return [DATA if known else UNKNOWN]


def _builtin(value: ast.expr) -> str:
    """The name in `name(...)`."""
    return value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""


def _attribute(value: Any, name: str) -> Any:
    """`value.name`, if nothing of the user's runs for it."""
    if value is DATA or isinstance(value, torch.Tensor):
        return DATA if hasattr(torch.Tensor, name) else UNKNOWN
    if value is UNKNOWN:
        return UNKNOWN
    if isinstance(value, types.ModuleType | torch._ops.OpOverloadPacket):
        return getattr(value, name, UNKNOWN)
    kind = type(value)
    plain: tuple[Any, ...] = (object.__getattribute__, nn.Module.__getattribute__)
    if isinstance(value, type) or kind.__getattribute__ not in plain:
        return UNKNOWN
    of_class = inspect.getattr_static(kind, name, UNKNOWN)
    if hasattr(type(of_class), "__set__"):
        return UNKNOWN
    held = dict(getattr(value, "__dict__", {}))
    if isinstance(value, nn.Module):
        held = {**held["_modules"], **held["_buffers"], **held["_parameters"], **held}
    if name in held:
        return held[name]
    if isinstance(of_class, types.FunctionType):
        return types.MethodType(of_class, value)
    if isinstance(of_class, staticmethod):
        return of_class.__func__
    return of_class if harmless(of_class) else UNKNOWN


def _elements(value: Any) -> list[Any]:
    """What is in a container."""
    if value is DATA or isinstance(value, torch.Tensor | nn.ParameterList):
        return [DATA]
    for kind in _CONTAINERS:
        if isinstance(value, kind):
            own = any(getattr(type(value), m) is not getattr(kind, m) for m in ("__getitem__", "__iter__"))
            return [UNKNOWN] if own else list(value.children())
    if type(value) in (list, tuple, torch.Size, range):
        return list(value)
    return list(value.values()) if type(value) is dict else [UNKNOWN]


def root_of(node: ast.expr) -> str | None:
    """The name at which `a.b[c].d` begins; None for anything else."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
