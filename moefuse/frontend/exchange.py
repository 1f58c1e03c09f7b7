"""transformers' exchange of rows between ranks, without its branch on whether any row came.

In: a model. Out: `Exchanges`, a context manager for a call: while Dynamo traces, the experts run on the rows that came,
however many, where transformers' own code runs them on one row of zeros if there are none, and takes no row of what
they give. To row-wise experts of plain torch operators that is the same, with gradients where what they give of no rows
has a history too; a branch breaks the graph.
"""

import ast
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from moefuse.frontend.held import Held
from moefuse.frontend.source import RefusedError, build, read

log = logging.getLogger("moefuse")

_HOME, _CLASS = "transformers.distributed.expert_parallel", "AllToAllEP"
_STRAIGHT = "_moefuse_straight"
_ROW_WISE = ("eager", "grouped_mm", "batched_mm")
"""transformers' experts implementations of plain torch operators, none of which minds having no rows."""


class Exchanges:
    """The exchanges of a model's experts."""

    def __init__(self, model: Callable[..., Any] | None) -> None:
        modules = model.modules() if isinstance(model, nn.Module) else ()
        self._found = [found for module in modules for found in _exchanges(module)]
        self._changed: list[tuple[Any, type]] = []
        self._held = Held(self._change, self._undo)

    @contextmanager
    def straight(self) -> Iterator[None]:
        """Exchanges are straight lines inside."""
        with self._held.during() if self._found else nullcontext():
            yield

    def _change(self) -> None:
        for exchange in self._found:
            kind = type(exchange)
            if _STRAIGHT in vars(kind):
                continue  # by another compiled model around this one
            if (straight := _straightened(kind)) is not None:  # type: ignore[arg-type]  # types are hashable
                exchange.__class__ = straight
                self._changed.append((exchange, kind))

    def _undo(self) -> None:
        for exchange, kind in self._changed:
            exchange.__class__ = kind
        self._changed.clear()


def _exchanges(module: nn.Module) -> Iterator[Any]:
    """What transformers put around the forward of a module: it is known to that function only."""
    kind = getattr(sys.modules.get(_HOME), _CLASS, None)
    forward = vars(module).get("forward")
    if kind is None or not isinstance(forward, types.FunctionType) or not _row_wise(module):
        return
    for cell in forward.__closure__ or ():
        for found in (cell.cell_contents, getattr(cell.cell_contents, "all_to_all", None)):
            if type(found) is kind:
                yield found


def _row_wise(module: nn.Module) -> bool:
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    return implementation in _ROW_WISE and on_cpu


def _keeps_history(exchange: Any) -> bool:
    """True for experts of whose result of no rows a backward pass knows: a loop would have run none of them.

    Without it a rank to which no rows come would send no gradients back, and the others wait for them.
    """
    experts = getattr(getattr(exchange, "experts_forward", None), "__self__", None)
    return getattr(getattr(experts, "config", None), "_experts_implementation", None) in _ROW_WISE[1:]


@functools.cache  # one class for good: Dynamo guards on it
def _straightened(kind: type) -> type | None:
    """The class with a straight call; None where its call isn't as it is known."""
    written = vars(kind)["__call__"]
    try:
        source = read(written)
        straight = build(source, _without_branch(source.definition), None)
    except RefusedError as refusal:
        log.warning("%s.%s stays as it is: %s", _HOME, _CLASS, refusal.reason)
        return None

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = not torch.compiler.is_compiling() or (torch.is_grad_enabled() and not _keeps_history(self))
        return written(self, *args, **kwargs) if plain else straight(self, *args, **kwargs)

    own = {"__call__": call, "__module__": kind.__module__, _STRAIGHT: True}
    return type(kind.__name__, (kind,), own)


def _without_branch(definition: ast.FunctionDef) -> ast.FunctionDef:
    """The definition with `if rows.shape[0] == 0: y = f(..)[:0] else: y = ..` replaced by its second half."""
    body: list[ast.stmt] = []
    branches = 0
    for statement in definition.body:
        if isinstance(statement, ast.If):
            branches += 1
            if not _of_no_rows(statement):
                raise RefusedError(
                    "it branches on something else than whether any row came", statement.lineno
                )
            body += statement.orelse
        else:
            body.append(statement)
    if branches != 1:
        raise RefusedError(f"expected one branch, it has {branches}", definition.lineno)
    definition.body = body
    return definition


def _of_no_rows(branch: ast.If) -> bool:
    test, sides = branch.test, (branch.body, branch.orelse)
    compared = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and len(test.ops) == 1
    if not compared or not ast.unparse(test).endswith(".shape[0] == 0"):
        return False
    if not all(len(side) == 1 and isinstance(side[0], ast.Assign) for side in sides):
        return False
    (none,), (some,) = sides
    assert isinstance(none, ast.Assign)
    assert isinstance(some, ast.Assign)
    same = [ast.unparse(target) for target in none.targets] == [
        ast.unparse(target) for target in some.targets
    ]
    return same and isinstance(none.value, ast.Subscript) and ast.unparse(none.value.slice) == ":0"
