"""The loops of one model: which functions have them, and putting the rewritten ones in place around a call.

In: a model. Out: `Loops`, a context manager for the call. The model is as its user made it before and after each call.
A loop whose rewritten form isn't proved by the captured graph goes back to its original code, with a reason.
"""

import inspect
import itertools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moefuse.frontend.rewrite import examine, rewrite
from moefuse.frontend.search import Found
from moefuse.frontend.source import RefusedError, Source
from moefuse.patterns.markers import UnprovedError
from moefuse.report.model import LayerReport

log = logging.getLogger("moefuse")

CHECK = "loop"
"""The check that a refused loop failed, in reports."""

ADVICE = "the loop runs as it is written, and breaks the graph here"


@dataclass(frozen=True)
class Known:
    """A rewritten loop. method: (module class, method name) that it is in."""

    source: str
    construct: str
    method: tuple[type, str]
    loops: "weakref.ref[Loops]"
    layers: tuple[str, ...]


_KNOWN: dict[int, Known] = {}
_NUMBERS = itertools.count()


def known(number: int) -> Known:
    """The loop of that number."""
    return _KNOWN[number]


class Loops:
    """The rewritten loops of a model.

    method: the method of the model that is compiled instead of the model; its name may hold what was compiled of it.
    version: changes whenever code goes back to its original.
    """

    def __init__(self, model: Callable[..., Any] | None, method: str = "") -> None:
        self._refused: list[LayerReport] = []
        self.version = 0
        self._lock = threading.RLock()
        self._calls = 0
        self._model = model
        self._method = method
        self._new: dict[tuple[type, str], Callable[..., Any]] | None = None
        self._owners: dict[tuple[type, str], list[nn.Module]] = {}
        self._originals: dict[tuple[type, str], Any] = {}
        self._patched: list[tuple[nn.Module, str, types.MethodType]] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Rewritten functions are the modules' own inside; the last of concurrent calls to leave takes them out."""
        with self._lock:
            if self._new is None:
                self._find()
            self._put()
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if not self._calls:
                    self._take_out()

    def rewritten_method(self) -> types.MethodType | None:
        """The rewritten form of the method that is compiled, where it has one; not looked up by its name."""
        with self._lock:
            function = (self._new or {}).get((type(self._model), self._method))
        return None if function is None else types.MethodType(function, self._model)

    def refuse(self, reasons: dict[int, str]) -> None:
        """These loops go back to their original code."""
        with self._lock:
            self._drop(reasons)
            self._take_out()
            self._put()

    def _drop(self, reasons: dict[int, str]) -> None:
        assert self._new is not None
        for number, reason in reasons.items():
            loop = _KNOWN[number]
            if self._new.pop(loop.method, None) is None:
                continue
            self._report(loop.layers, loop.source, loop.construct, reason)
            self.version += 1

    def refuse_all(self, reason: str) -> bool:
        """All loops go back to their original code; False where none was rewritten."""
        with self._lock:
            active = {
                n: reason
                for n, loop in _KNOWN.items()
                if loop.loops() is self and loop.method in (self._new or {})
            }
            if active:
                self.refuse(active)
        return bool(active)

    def examine(self, method: tuple[type, str]) -> None:
        """RefusedError if a method that was rewritten wouldn't be any more."""
        with self._lock:
            if method in self._owners:
                examine(self._originals[method], self._owners[method])

    def take_refused(self) -> tuple[LayerReport, ...]:
        """The report entries of loops that stay as they are, each once."""
        with self._lock:
            taken, self._refused = tuple(self._refused), []
        return taken

    def _report(self, layers: tuple[str, ...], source: str, construct: str, reason: str) -> None:
        text = f"`{construct}`: {reason}; {ADVICE}"
        self._refused += [LayerReport(layer, False, "", source, text, CHECK) for layer in layers]

    def _put(self) -> None:
        for key, function in list((self._new or {}).items()):
            owners, (_, name) = self._owners[key], key
            if any(getattr(type(module), name, None) is not self._originals[key] for module in owners):
                number = next(n for n, loop in _KNOWN.items() if loop.loops() is self and loop.method == key)
                self._drop({number: f"{name} of its class has been replaced"})
                continue
            for module in owners:
                if name not in vars(module):
                    vars(module)[name] = method = types.MethodType(function, module)
                    self._patched.append((module, name, method))

    def _take_out(self) -> None:
        for module, name, method in self._patched:
            if vars(module).get(name) is method:  # the user's code may have set another meanwhile
                del vars(module)[name]
        self._patched.clear()

    def _find(self) -> None:
        """Read each class once."""
        self._new = {}
        if not isinstance(self._model, nn.Module):
            return
        by_class: dict[type, list[tuple[str, nn.Module]]] = {}
        for path, module in self._model.named_modules():
            if not type(module).__module__.startswith("torch."):
                by_class.setdefault(type(module), []).append((path, module))
        for kind, members in by_class.items():
            if _chooses(members[0][1]):
                continue
            for name in _methods(kind):
                self._read(kind, name, members)

    def _is_compiled(self, module: nn.Module, name: str) -> bool:
        return module is self._model and name == self._method

    def _read(self, kind: type, name: str, members: list[tuple[str, nn.Module]]) -> None:
        assert self._new is not None
        key = (kind, name)
        layers = tuple(path for path, _ in members)
        place = ""

        def number(source: Source, loop: Found) -> int:
            nonlocal place
            place = f"{source.file}:{loop.node.lineno}"
            index = next(_NUMBERS)
            _KNOWN[index] = Known(place, loop.construct, key, weakref.ref(self), layers)
            return index

        function = getattr(kind, name)
        owners = [module for _, module in members]
        if any(name in vars(module) and not self._is_compiled(module, name) for module in owners):
            return  # the user's own replacement
        try:
            made = rewrite(function, owners, number)
        except RefusedError as refusal:
            file = getattr(getattr(function, "__code__", None), "co_filename", "")
            self._report(layers, f"{file}:{refusal.line}", f"{kind.__name__}.{name}", refusal.reason)
            return
        except Exception as error:  # a fault of ours is no reason for the user's model not to run
            log.warning("an internal error in reading %s.%s", kind.__name__, name, exc_info=True)
            self._report(
                layers, "", f"{kind.__name__}.{name}", f"moefuse failed, {type(error).__name__}: {error}"
            )
            return
        if made is not None:
            self._new[key] = made
            self._originals[key] = function
            self._owners[key] = owners


def _chooses(module: nn.Module) -> bool:
    """transformers' experts with a choice of implementations: their loop is switched off, not rewritten."""
    return hasattr(module, "_apply_gate") and hasattr(module, "config")


def _methods(kind: type) -> list[str]:
    """`forward`, and the methods of the user's classes that it names, directly or through others."""
    found = ["forward"]
    for name in found:
        code = getattr(inspect.unwrap(getattr(kind, name)), "__code__", None)
        for other in code.co_names if code is not None else ():
            method = inspect.getattr_static(kind, other, None)
            if isinstance(method, types.FunctionType) and other not in found and other not in vars(nn.Module):
                found.append(other)
    return found


def hooked(number: int) -> str:
    """Why a rewritten loop may not be used any more: hooks, or other modules, that came later; "" if it may."""
    loops = _KNOWN[number].loops()
    if loops is None:
        return "its model is gone"
    try:
        loops.examine(_KNOWN[number].method)
    except RefusedError as refusal:
        return refusal.reason
    return ""


@contextmanager
def refusals(inputs: Sequence[Any]) -> Iterator[None]:
    """Around a backend's work: loops that aren't proved go back to their original code.

    At the model's own frame nothing has run yet: the error goes on, and the caller starts anew. Anywhere else a part of
    the model has run: Dynamo is told to leave the frame to Python, for which rewritten code means what was written.
    Without tokens the loops stay as they are: the caller runs the model without any of this, once.

    inputs: of the graph.
    """
    try:
        yield
    except UnprovedError as unproved:
        unproved.empty = any(map(_is_empty, inputs)) and _at_start()
        if unproved.empty:
            raise
        by_model: dict[Loops, dict[int, str]] = {}
        for number, reason in unproved.reasons.items():
            if (loops := _KNOWN[number].loops()) is not None:
                by_model.setdefault(loops, {})[number] = reason
        for loops, reasons in by_model.items():
            loops.refuse(reasons)
        if _at_start():
            raise
        from torch._dynamo.exc import SkipFrame

        raise SkipFrame(str(unproved)) from unproved


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and any(isinstance(n, int) and n == 0 for n in value.shape)


def _at_start() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    code = getattr(InstructionTranslator.current_tx(), "f_code", None)
    return code is not None and code.co_name == OWN_FRAME


OWN_FRAME = "_moefuse_own_frame"
"""The name of the frame that `onegraph.own_frame` puts around a model."""
