"""Custom activation programs as C++, compiled into the kernel's cache.

In: the text of a program (see ops/program.py) and the dtypes of the layer and of its activation. Out: the address of
a function (gate, up, out, n) over whole vectors, which the kernel calls for each row of hidden features, or the reason
why there is none. Every operator's result is rounded to the dtype that it has in torch.
"""

import ast
import ctypes
import math
import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from moefuse.targets.cpu import build
from moefuse.targets.cpu.isa import Isa

# Formulas over f32v, by the names that the operator's schema gives its arguments.
_FORMS = {
    "neg.default": "-{self}",
    "abs.default": "abs_of({self})",
    "exp.default": "exp_of({self})",
    "sigmoid.default": "sigmoid_of({self})",
    "tanh.default": "tanh_of({self})",
    "silu.default": "silu_of({self})",
    "relu.default": "relu_of({self})",
    "erf.default": "erf_of({self})",
    "sqrt.default": "each_lane({self}, sqrtf)",
    "rsqrt.default": "1.f / each_lane({self}, sqrtf)",
    "log.default": "each_lane({self}, logf)",
    "log1p.default": "each_lane({self}, log1pf)",
    "expm1.default": "each_lane({self}, expm1f)",
    "reciprocal.default": "1.f / {self}",
    "square.default": "{self} * {self}",
    "mul.Tensor": "{self} * {other}",
    "mul.Scalar": "{self} * {other}",
    "div.Tensor": "{self} / {other}",
    "div.Scalar": "{self} / {other}",
    "add.Tensor": "{self} + {alpha} * {other}",
    "add.Scalar": "{self} + {alpha} * {other}",
    "sub.Tensor": "{self} - {alpha} * {other}",
    "sub.Scalar": "{self} - {alpha} * {other}",
    "rsub.Tensor": "{other} - {alpha} * {self}",
    "rsub.Scalar": "{other} - {alpha} * {self}",
    "pow.Tensor_Scalar": "power({self}, {exponent})",
    "minimum.default": "least({self}, {other})",
    "maximum.default": "greatest({self}, {other})",
    "clamp.default": "at_most(at_least({self}, {min}), {max})",
    "clamp_min.default": "at_least({self}, {min})",
    "clamp_max.default": "at_most({self}, {max})",
    "hardtanh.default": "at_most(at_least({self}, {min_val}), {max_val})",
    "leaky_relu.default": "select({self} > splat(0.f), {self}, {self} * {negative_slope})",
    "softplus.default": "softplus_of({self}, {beta}, {threshold})",
    "where.self": "select({condition}, {self}, {other})",
}
_GELU = {"none": "gelu_of({self})", "tanh": "gelu_tanh_of({self})"}
_COMPARISONS = {"gt": ">", "lt": "<", "ge": ">=", "le": "<=", "eq": "==", "ne": "!="}
# Beside tensors of half precision, torch rounds these operators' numbers to the tensors' dtype, and no others'.
_ROUNDING = ("add", "sub", "rsub", "pow")
_ROUNDED = ("other", "alpha", "exponent")
_WITHOUT_LIMIT = {"min": -math.inf, "max": math.inf}
_SOURCE = """#include "program.h"

using namespace moefuse;
using D = {dtype};

extern "C" void moefuse_activation(const float* gate, const float* up, float* out, int n) {{
    for (int i = 0; i < n; i += LANES) {{
        const f32v g = rounded<D>(load(gate + i)), u = rounded<D>(load(up + i));
{body}
        store(out + i, {result});
    }}
}}
"""


class NoFormError(ValueError):
    """The program can't be written in C++; the text says why."""


class _Value(NamedTuple):
    """An expression in C++. dtype: of the tensor in torch; None for a number, which is then `number`."""

    text: str
    dtype: torch.dtype | None
    number: float | None = None


@lru_cache(maxsize=256)
def compiled(isa: Isa, program: str, dtype: torch.dtype, inside: torch.dtype) -> int | str:
    """The address of the function, or why there is none. dtype: of the layer, inside: of the activation."""
    try:
        text = source(program, dtype, inside)
    except NoFormError as error:
        return str(error)
    try:
        library = build.small_library(isa, "activation", "a custom activation", text)
    except build.BuildError as error:
        warnings.warn(f"moefuse: a custom activation runs in torch operators, slower: {error}", stacklevel=2)
        return str(error)
    address = ctypes.cast(library.moefuse_activation, ctypes.c_void_p).value
    assert address is not None
    return address


def source(program: str, dtype: torch.dtype, inside: torch.dtype) -> str:
    """The C++ of a checked program. Raises NoFormError."""
    writer = _Writer(dtype, inside)
    result = writer.value(ast.parse(program.strip(), mode="eval").body)
    if result.dtype not in (dtype, torch.float32):
        raise NoFormError(f"activation_program: a result of {result.dtype} has no C++ form")
    return _SOURCE.format(dtype=build.TYPES[dtype], body="\n".join(writer.lines), result=result.text)


class _Writer:
    """Writes one statement per operator."""

    def __init__(self, dtype: torch.dtype, inside: torch.dtype) -> None:
        self.lines: list[str] = []
        self._half, self._inside = dtype, inside

    def value(self, node: ast.expr) -> _Value:
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Name) and node.id in ("g", "u"):
            return _Value(node.id, self._inside)
        return _Value(_number(_constant(node)), None, float(_constant(node)))

    def _call(self, node: ast.Call) -> _Value:
        name = ast.unparse(node.func)
        packet, _, overload = name.partition(".")
        schema = getattr(getattr(torch.ops.aten, packet), overload)._schema
        given: dict[str, ast.expr] = {
            parameter.name: argument for parameter, argument in zip(schema.arguments, node.args, strict=False)
        } | {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if name == "_to_copy.default":
            return self._cast(given)
        form = self._form(name, given)
        values = {
            parameter.name: self._argument(form, parameter, given)
            for parameter in schema.arguments
            if f"{{{parameter.name}}}" in form
        }
        unread = [key for key in given if key not in values and key != "approximate"]
        if unread:
            raise NoFormError(f"activation_program: {name} with {unread[0]} has no C++ form")
        return self._written(name, form, values)

    def _form(self, name: str, given: dict[str, ast.expr]) -> str:
        packet, _, overload = name.partition(".")
        if packet in _COMPARISONS and overload in ("Tensor", "Scalar"):
            return f"({{self}} {_COMPARISONS[packet]} {{other}})"
        if name == "gelu.default":
            return _GELU[_constant(given["approximate"]) if "approximate" in given else "none"]
        if name not in _FORMS:
            raise NoFormError(f"activation_program: {name} has no C++ form")
        return _FORMS[name]

    def _argument(self, form: str, parameter: Any, given: dict[str, ast.expr]) -> _Value:
        node = given.get(parameter.name)
        if node is None or (isinstance(node, ast.Constant) and node.value is None):
            value = parameter.default_value
            value = _WITHOUT_LIMIT[parameter.name] if value is None else value
            return _Value(_number(value), None, float(value))
        found = self.value(node)
        vector = parameter.name in ("self", "other", "condition") and found.dtype is None
        return found._replace(text=f"splat({found.text})") if vector else found

    def _cast(self, given: dict[str, ast.expr]) -> _Value:
        value, dtype = self.value(given["self"]), _constant(given.get("dtype"))
        if len(given) != 2 or dtype not in (self._half, torch.float32):
            raise NoFormError(f"activation_program: a cast to {dtype} has no C++ form")
        if value.dtype == torch.bool:
            value = _Value(f"select({value.text}, splat(1.f), splat(0.f))", torch.float32)
        return self._assign(value.text, dtype)

    def _written(self, name: str, form: str, values: dict[str, _Value]) -> _Value:
        dtypes = {key: value.dtype for key, value in values.items() if value.dtype is not None}
        condition = dtypes.pop("condition", torch.bool)
        if condition != torch.bool or torch.bool in dtypes.values():
            raise NoFormError(f"activation_program: {name} of {condition} has no C++ form")
        # the wider of a half precision dtype and float32; numbers count for nothing
        wide = torch.float32 in dtypes.values() or not dtypes
        compares = name.partition(".")[0] in _COMPARISONS
        texts = {key: value.text for key, value in values.items()}
        if not wide:
            texts |= {
                key: self._rounded(values[key]) for key in values if self._rounds(name, key, values[key])
            }
        text = form.format(**texts)
        if compares:
            return _Value(text, torch.bool)
        return self._assign(text, torch.float32 if wide else self._half)

    def _rounds(self, name: str, key: str, value: _Value) -> bool:
        """True for a number that torch rounds to the dtype of the tensors beside it."""
        packet = name.partition(".")[0]
        return (
            value.number is not None and (packet in _COMPARISONS or packet in _ROUNDING) and key in _ROUNDED
        )

    def _rounded(self, value: _Value) -> str:
        number = _number(torch.tensor(value.number, dtype=torch.float64).to(self._half).item())
        return f"splat({number})" if value.text.startswith("splat(") else number

    def _assign(self, text: str, dtype: torch.dtype) -> _Value:
        name = f"v{len(self.lines)}"
        rounds = dtype != torch.float32
        self.lines.append(f"        const f32v {name} = {f'rounded<D>({text})' if rounds else text};")
        return _Value(name, dtype)


def _constant(node: ast.expr | None) -> Any:
    """What ops/program.py lets through besides calls and leaves."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp):
        return -_constant(node.operand)
    if isinstance(node, ast.Name):
        return float(node.id)  # inf, nan
    return getattr(torch, node.attr) if isinstance(node, ast.Attribute) else None


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NoFormError(f"activation_program: {value!r} has no C++ form")
    if math.isnan(value):
        return '__builtin_nanf("")'
    if math.isinf(value):
        return f"({'-' if value < 0 else ''}__builtin_inff())"
    return f"({float(value)!r}f)"
