"""Functions as syntax trees, and back.

In: a function of the user's. Out: its definition with true line numbers, and a function made from a changed
definition: the same globals, closure cells, defaults, file and lines, so that errors and reports point at the user's
own text.
"""

import ast
import functools
import inspect
import linecache
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

GRADIENT_MODES = frozenset(("no_grad", "enable_grad", "inference_mode"))
"""Decorators that are known: `torch.no_grad()` and the like."""

HELPERS = "_moefuse_loops"
"""The name under which rewritten code finds `moefuse.frontend.runtime`."""


class RefusedError(Exception):
    """Code that isn't rewritten. reason: why; line: the line in the file (0 where unknown)."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line


@dataclass(frozen=True)
class Source:
    """A function's definition. function: the innermost one, behind its decorators."""

    function: types.FunctionType
    definition: ast.FunctionDef
    file: str


def read(function: Callable[..., Any]) -> Source:
    """The definition of a function; RefusedError where its source isn't known or says less than the function does."""
    source = parse(function)
    demand_plain(function, source)
    return source


def parse(function: Callable[..., Any]) -> Source:
    """The definition of a function, whatever is wrapped around it; RefusedError where its source isn't known."""
    inner = inspect.unwrap(function)
    if not isinstance(inner, types.FunctionType):
        raise RefusedError("it is no Python function")
    line = inner.__code__.co_firstlineno
    try:
        lines, start = inspect.getsourcelines(inner)
        # Within an `if`, for dedenting would change what is inside of strings.
        tree = ast.parse("if True:\n" + "".join(lines) if lines[0][:1].isspace() else "".join(lines))
    except (OSError, TypeError, SyntaxError):
        raise RefusedError("its source can't be read", line) from None
    definition = tree.body[0] if tree.body else None
    if isinstance(definition, ast.If):
        definition, start = definition.body[0], start - 1
    if not isinstance(definition, ast.FunctionDef) or definition.name != inner.__code__.co_name:
        raise RefusedError("its source can't be read", line)
    ast.increment_lineno(tree, start - 1)
    return Source(inner, definition, inner.__code__.co_filename)


def demand_plain(function: Callable[..., Any], source: Source) -> None:
    """RefusedError where a function is more than its definition, or its definition means something else elsewhere."""
    inner, definition = source.function, source.definition
    step: Any = function
    for decorator in definition.decorator_list:
        if not _known_decorator(decorator, inner) or not _is_made_by(decorator, step):
            raise RefusedError("it is wrapped by a decorator that may do anything", definition.lineno)
        step = step.__wrapped__
    if step is not inner:
        raise RefusedError("it is wrapped by a decorator that may do anything", definition.lineno)
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and node.attr.startswith("__") and not node.attr.endswith("__"):
            raise RefusedError(f"it uses a name that is private to its class, {node.attr}", node.lineno)
    if not _is_same(_compiled(inner.__code__), inner.__code__):
        raise RefusedError(
            "its source isn't what runs: the file has changed since, or the code", definition.lineno
        )


def _known_decorator(decorator: ast.expr, function: types.FunctionType) -> bool:
    plain = isinstance(decorator, ast.Call) and not decorator.args and not decorator.keywords
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (
        (plain or target is decorator)
        and isinstance(target, ast.Attribute)
        and target.attr in GRADIENT_MODES
        and isinstance(target.value, ast.Name)
        and function.__globals__.get(target.value.id) is torch
    )


def _is_made_by(decorator: ast.expr, outer: Any) -> bool:
    """True when a function is what torch's decorator makes, and not what somebody has put around that."""
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    if not isinstance(outer, types.FunctionType) or outer.__code__ is not torch.no_grad()(_nothing).__code__:
        return False
    context = inspect.getclosurevars(outer).nonlocals.get("ctx_factory")
    assert isinstance(target, ast.Attribute)
    return type(getattr(context, "__self__", None)) is getattr(torch, target.attr)


def _nothing() -> None:
    """For `_is_made_by` to decorate."""


def _compiled(code: types.CodeType) -> types.CodeType | None:
    """What the text at the place of a function's definition is compiled to, the file's text as it is now."""
    for found in _codes(code.co_filename, "".join(linecache.getlines(code.co_filename))):
        if (found.co_name, found.co_firstlineno) == (code.co_name, code.co_firstlineno):
            return found
    return None


@functools.lru_cache(maxsize=64)
def _codes(file: str, text: str) -> list[types.CodeType]:
    """All code in a file: whole, for what a name means to the compiler depends on the imports around it."""
    try:
        found = [compile(text, file, "exec", dont_inherit=True)]
    except SyntaxError:
        return []
    for code in found:
        found += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return found


def _is_same(one: Any, other: Any) -> bool:
    """True for constants, code among them, that can't be told apart."""
    if type(one) is not type(other):
        return False
    if isinstance(one, types.CodeType):
        fields = "code names varnames freevars cellvars argcount posonlyargcount kwonlyargcount exceptiontable flags"
        alike = all(getattr(one, f"co_{name}") == getattr(other, f"co_{name}") for name in fields.split())
        return alike and _is_same(one.co_consts, other.co_consts)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, frozenset):
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return repr(one) == repr(other)


def build(source: Source, definition: ast.FunctionDef, helpers: Any) -> Callable[..., Any]:
    """A function from a changed definition; `helpers` is known to it as `HELPERS`."""
    inner = source.function
    cells: dict[str, types.CellType] = dict(
        zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
    )
    if definition.decorator_list and cells.keys() - {"__class__"}:
        raise RefusedError("it is decorated and uses variables of the function around it", definition.lineno)
    _without_evaluation(definition)
    names = [HELPERS, *cells]
    factory = ast.FunctionDef(
        name="_moefuse_factory",
        args=ast.arguments(
            posonlyargs=[], args=[ast.arg(n) for n in names], kwonlyargs=[], kw_defaults=[], defaults=[]
        ),
        body=[definition, ast.Return(ast.Name(definition.name, ast.Load()))],
        decorator_list=[],
    )
    module = ast.fix_missing_locations(ast.Module([factory], []))
    namespace: dict[str, Any] = {}
    exec(compile(module, source.file, "exec"), inner.__globals__, namespace)
    made = namespace["_moefuse_factory"](helpers, *(cell.cell_contents for cell in cells.values()))
    core = inspect.unwrap(made)
    core.__defaults__, core.__kwdefaults__ = inner.__defaults__, inner.__kwdefaults__
    if core is not made:
        return made  # type: ignore[no-any-return]
    own: dict[str, types.CellType] = dict(zip(core.__code__.co_freevars, core.__closure__ or (), strict=True))
    closure = tuple(cells.get(name, cell) for name, cell in own.items())  # the very cells may be rebound
    rebuilt = types.FunctionType(
        core.__code__, inner.__globals__, inner.__name__, inner.__defaults__, closure
    )
    rebuilt.__kwdefaults__, rebuilt.__qualname__ = inner.__kwdefaults__, inner.__qualname__
    return rebuilt


def _without_evaluation(definition: ast.FunctionDef) -> None:
    """Defaults and annotations ran once, when the user's module was imported."""
    arguments = definition.args
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [ast.Constant(None) if d is not None else None for d in arguments.kw_defaults]
    definition.returns = None
    every = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    for argument in every:
        if argument is not None:
            argument.annotation = None
