"""Activation programs: a pointwise function of g and u written as text.

In: text such as `mul.Tensor(silu.default(g), u)`: nested calls of pointwise aten overloads over the leaves
`g` (gate, or the only part of a plain expert) and `u` (up), numbers, strings, None, True, False and torch
dtypes. Out: the same as a callable. The text is parsed with `ast`; nothing outside this grammar is run.
"""

import ast
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

import torch

Compiled = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
_Node = Callable[[torch.Tensor, torch.Tensor | None], Any]

_NUMBERS = {"inf": math.inf, "nan": math.nan}
_MAX_DEPTH = 200  # far above any real activation, far below Python's recursion limit


def evaluate(program: str, g: torch.Tensor, u: torch.Tensor | None = None) -> torch.Tensor:
    """Run `program` on g and u (same shape, any float dtype); the result has their shape.

    Raises ValueError when the text is not a program, or when it reads u and there is none.
    """
    return compile_program(program)(g, u)


def reads_up(program: str) -> bool:
    """True when the program reads `u`, that is, when it needs a gated expert."""
    compile_program(program)
    return any(isinstance(n, ast.Name) and n.id == "u" for n in ast.walk(ast.parse(program, mode="eval")))


@lru_cache(maxsize=256)
def compile_program(program: str) -> Compiled:
    """Parse and check `program`, once per text. Raises ValueError saying what is not understood."""
    try:
        body = ast.parse(program.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"activation_program: not an expression: {program!r} ({error})") from None
    leaves = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)} & {"g", "u"}
    if not leaves:
        _fail(program, body, "a program must read g or u")
    return _build(program, body, 0)


def _build(program: str, node: ast.expr, depth: int) -> _Node:
    if depth > _MAX_DEPTH:
        _fail(program, node, f"nested deeper than {_MAX_DEPTH} calls")
    if isinstance(node, ast.Call):
        return _build_call(program, node, depth)
    if isinstance(node, ast.Name) and node.id == "g":
        return lambda g, u: g
    if isinstance(node, ast.Name) and node.id == "u":
        return lambda g, u: u if u is not None else _no_up(program)
    value = _constant(program, node)
    return lambda g, u: value


def _build_call(program: str, node: ast.Call, depth: int) -> _Node:
    op = _overload(program, node.func)
    args = [_build(program, arg, depth + 1) for arg in node.args]
    kwargs: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            _fail(program, node, "** is not allowed")
        kwargs[keyword.arg] = _constant(program, keyword.value)
    if len(args) == 1 and not kwargs:
        (only,) = args
        return lambda g, u: op(only(g, u))
    return lambda g, u: op(*[arg(g, u) for arg in args], **kwargs)


def _overload(program: str, func: ast.expr) -> torch._ops.OpOverload:
    if not (isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name)):
        _fail(program, func, "a call must name an aten overload such as mul.Tensor")
    name, overload = func.value.id, func.attr
    packet = getattr(torch.ops.aten, name, None)
    op = getattr(packet, overload, None)
    if not isinstance(op, torch._ops.OpOverload):
        _fail(program, func, f"aten has no overload {name}.{overload}")
    pointwise = torch.Tag.pointwise in op.tags or op is torch.ops.aten._to_copy.default
    if not pointwise or op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
        _fail(program, func, f"aten.{name}.{overload} is not a pure pointwise operator")
    return op


def _constant(program: str, node: ast.expr) -> Any:
    """A number, string, None, bool or torch dtype; a sign before a number is part of it."""
    if isinstance(node, ast.Constant) and (
        node.value is None or isinstance(node.value, bool | int | float | str)
    ):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _constant(program, node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.Name) and node.id in _NUMBERS:
        return _NUMBERS[node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        dtype = getattr(torch, node.attr, None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return _fail(
        program, node, "expected g, u, a number, a string, None, True, False, a torch dtype or a call"
    )


def _no_up(program: str) -> NoReturn:
    raise ValueError(
        f"activation_program: {program!r} reads u, but the expert has no up part (gate_up='none')"
    )


def _fail(program: str, node: ast.expr, why: str) -> NoReturn:
    raise ValueError(f"activation_program: {ast.unparse(node)!r} in {program!r}: {why}")
