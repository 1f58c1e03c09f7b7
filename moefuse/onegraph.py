"""`moefuse.compile`: torch.compile, plus what keeps loops over experts in one graph.

In: a model and the backend's options. Out: the compiled model. A backend sees only what Dynamo hands over, and
Dynamo breaks the graph at a loop over experts before that. Around each call this module
- lets Dynamo capture data-dependent sizes (`torch.where(ids == e)`, `nonzero`, `bincount`),
- switches transformers models from their Python loop ("eager") to the equivalent grouped GEMMs,
- takes the branch on received rows out of their exchange between ranks (`moefuse.frontend.exchange`), and
- puts rewritten code in the place of other loops that branch on data (`moefuse.frontend`),
and undoes all of it after the call, so that the model object stays as the user made it.
"""

import copy
import functools
import logging
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from moefuse.frontend.exchange import Exchanges
from moefuse.frontend.held import Held
from moefuse.frontend.lifter import OWN_FRAME, Loops
from moefuse.ops.loop_markers import NO_BOUND
from moefuse.options import OptionError, Options
from moefuse.passes.pipeline import RejectedError
from moefuse.patterns.markers import UnprovedError
from moefuse.report.journal import JOURNAL
from moefuse.report.model import NO_GRAPH, GraphReport, LayerReport

log = logging.getLogger("moefuse")

LOOP, GROUPED = "eager", "grouped_mm"
"""transformers' names of the loop over experts and of its equivalent in one graph."""

_SETTING = "_experts_implementation_internal"


def compile(
    model: Callable[..., Any] | None = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="moefuse", options=options)` that also gets loops over experts into one graph.

    model: a module or a function; without one the result is a decorator. fullgraph, dynamic: as for torch.compile.
    options: as for the backend. Raises at once: OptionError for unknown names and impossible values, TypeError for
    what can't be called.
    """
    if not isinstance(fullgraph, bool):
        raise TypeError(f"fullgraph: expected True or False, got {fullgraph!r}")
    if not (dynamic is None or isinstance(dynamic, bool)):
        raise TypeError(f"dynamic: expected True, False or None, got {dynamic!r}")
    if "options" in options:
        raise OptionError("options: moefuse.compile takes each option as an argument of its own")
    parsed = Options.parse(options)
    if model is None:
        return functools.partial(compile, fullgraph=fullgraph, dynamic=dynamic, **options)
    if not callable(model):
        raise TypeError(f"model: expected a module or a function, got {type(model).__name__} {model!r:.60}")
    model = uncompiled(model)
    arguments: dict[str, Any] = {"backend": "moefuse", "fullgraph": fullgraph, "dynamic": dynamic}
    arguments["options"] = options or None
    run = FrontEnd(model, lambda frame: torch.compile(frame, **arguments), parsed, _to_journal, fullgraph)
    if not isinstance(model, nn.Module):
        return run
    from moefuse.compiled import CompiledModule

    compiled = torch.compile(model, **arguments)
    assert isinstance(compiled, torch._dynamo.OptimizedModule)
    return CompiledModule(
        model, compiled.dynamo_ctx, run, {"fullgraph": fullgraph, "dynamic": dynamic, **options}
    )


def uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """What is in a compiled model or function: as for torch.compile, compiling it again compiles that."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        return model._orig_mod
    return model._model if isinstance(model, FrontEnd) else model


def _to_journal(refused: tuple[LayerReport, ...]) -> None:
    JOURNAL.record(GraphReport(JOURNAL.next_index(), refused, note=NO_GRAPH), None)


_Version = tuple[int, bool, tuple[int, ...]]


def _hooks(root: nn.Module | None) -> tuple[int, ...]:
    """The hooks that a model runs around its forward: they are in its frame, and Dynamo doesn't guard them."""
    if root is None:
        return ()
    return (
        *root._forward_pre_hooks,
        -1,
        *root._forward_hooks,
        -1,
        *root._backward_hooks,
        *root._backward_pre_hooks,
    )


class FrontEnd:
    """What is done around each call of a model; calling it calls the model.

    compile_frame: makes a compiled function of the model's frame. tell: is given the loops that stay as they are.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        compile_frame: Callable[[Callable[..., Any]], Callable[..., Any]],
        options: Options,
        tell: Callable[[tuple[LayerReport, ...]], None],
        fullgraph: bool = False,
    ) -> None:
        self._model = model
        owner, self._method = _owner(model)
        self._compile_frame = compile_frame
        self._options = options
        self._fullgraph = fullgraph
        self._capture = True
        self._tell = tell
        self._loops = Loops(owner if options.mode != "off" else None, self._method)
        self._owner = owner
        self._switched_parts: tuple[_ExpertsSwitch, Exchanges] | None = None
        self._lock = threading.Lock()
        self._root = owner if isinstance(owner, nn.Module) else None
        self._compiled: tuple[_Version, Callable[..., Any]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs. Somebody else's compilation goes through to the model, as through torch's own."""
        if torch.compiler.is_dynamo_compiling():
            return self._model(*args, **kwargs)
        while True:
            version = self._version()
            try:
                with self._data_dependent_capture(), self._in_place():
                    self._tell_refused()
                    version = self._version()
                    return self._frame(version)(*args, **kwargs)
            except Exception as error:
                inner = getattr(error, "inner_exception", None)
                unproved = isinstance(inner, UnprovedError)
                if isinstance(inner, UnprovedError) and inner.empty and not _has_begun(error):
                    log.info("a call without tokens runs uncompiled: %s", inner)
                    return self._model(*args, **kwargs)
                if not (unproved and version != self._version()) and not self._give_up(error):
                    raise  # otherwise nothing has run: once more, with less
            finally:
                self._tell_refused()

    @property
    def switched(self) -> bool:
        """True while a transformers model runs with another experts implementation than its own."""
        return self._parts()[0].switched

    def _parts(self) -> tuple["_ExpertsSwitch", Exchanges]:
        """Looked for at the first call: a module whose method is compiled is copied before it has its parts."""
        with self._lock:
            if self._switched_parts is None:
                exchanging = self._owner if self._options.mode != "off" else None
                self._switched_parts = (_ExpertsSwitch(self._owner), Exchanges(exchanging))
            return self._switched_parts

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrontEnd":
        """The same around a copy of the model."""
        model = copy.deepcopy(self._model, memo)
        return FrontEnd(model, self._compile_frame, self._options, self._tell, self._fullgraph)

    def _version(self) -> _Version:
        return self._loops.version, self._capture, _hooks(self._root)

    def _give_up(self, error: Exception) -> bool:
        """Do without rewritten loops, then without data-dependent sizes, if it is they that can't be traced."""
        if self._fullgraph or not _of_tracing(error) or _has_begun(error):
            return False
        reason = str(error).strip().split("\n", 1)[0]
        if self._loops.refuse_all(f"tracing it failed: {reason}"):
            return True
        given_up, self._capture = self._capture, False
        return given_up

    def _data_dependent_capture(self) -> Any:
        """Dynamo's flags for outputs whose size depends on the data, which are off by default."""
        wanted = self._capture
        return torch._dynamo.config.patch(
            capture_dynamic_output_shape_ops=wanted, capture_scalar_outputs=wanted
        )

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """What is put in the place of the model's own code."""
        switch, exchanges = self._parts()
        with switch.grouped(), exchanges.straight(), self._loops.in_place():
            yield

    def _frame(self, version: _Version) -> Callable[..., Any]:
        """The compiled frame; a new one where rewritten code went back to its original, or hooks came or went."""
        with self._lock:
            if self._compiled is None or self._compiled[0] != version:
                called = self._loops.rewritten_method() or self._model
                self._compiled = (version, self._compile_frame(own_frame(called)))
            return self._compiled[1]

    def _tell_refused(self) -> None:
        refused = self._loops.take_refused()
        if not refused:
            return
        self._tell(refused)
        if self._options.mode == "on":
            raise RejectedError(
                "\n".join(f"  {site.layer or '(root)'}: {site.reason} [{site.source}]" for site in refused)
            )


def _owner(model: Callable[..., Any]) -> tuple[Callable[..., Any], str]:
    """(where loops are looked for, method): of a module's method, the module and its name; else the model and ""."""
    owner = getattr(model, "__self__", None)
    if not isinstance(model, types.MethodType) or not isinstance(owner, nn.Module):
        return model, ""
    name = model.__name__
    if getattr(type(owner), name, None) is not model.__func__:
        return model, ""  # not what its name says: it can't be found again
    return owner, name


def own_frame(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model behind a code object of its own.

    Dynamo remembers per code object what it has compiled, how often, and which frames it gave up: a loop that broke
    its graph once would be skipped for ever, and the ninth model of a class would not be compiled.
    """

    def _moefuse_own_frame(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    assert _moefuse_own_frame.__name__ == OWN_FRAME
    code, cells = _moefuse_own_frame.__code__, _moefuse_own_frame.__closure__
    return types.FunctionType(code.replace(), _moefuse_own_frame.__globals__, closure=cells)


def _of_tracing(error: Exception) -> bool:
    """True for an error that data-dependent sizes bring: without them Dynamo breaks the graph there."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    dependent = isinstance(error, GuardOnDataDependentSymNode | torch._dynamo.exc.UserError)
    pending = "PendingUnbackedSymbolNotFound" in str(error)
    return dependent or pending or NO_BOUND in str(error)


def _has_begun(error: Exception) -> bool:
    """True when a part of the model ran before the error: its frame is among those that the error came through."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(OWN_FRAME in frame.f_code.co_name for frame, _ in frames)


class _ExpertsSwitch:
    """The configurations by which a transformers model chooses how to run its experts."""

    def __init__(self, model: Callable[..., Any]) -> None:
        modules = model.modules() if isinstance(model, nn.Module) else ()
        # Modules with a choice have the hook that every implementation calls between the GEMMs.
        configs = {
            id(m.config): m.config for m in modules if hasattr(m, "_apply_gate") and hasattr(m, "config")
        }
        self._configs = [config for config in configs.values() if hasattr(config, _SETTING)]
        self._switched: list[Any] = []
        self._held = Held(self._change, self._undo)

    @property
    def switched(self) -> bool:
        """True while some configuration is switched."""
        return bool(self._switched)

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Loops are grouped GEMMs inside."""
        with self._held.during() if self._configs else nullcontext():
            yield

    def _change(self) -> None:
        for config in self._configs:
            if getattr(config, _SETTING) == LOOP:
                setattr(config, _SETTING, GROUPED)
                self._switched.append(config)

    def _undo(self) -> None:
        for config in self._switched:
            setattr(config, _SETTING, LOOP)
        self._switched.clear()
