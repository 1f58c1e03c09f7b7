"""`moefuse.compile`: torch.compile, plus what keeps loops over experts in one graph.

In: a model and the backend's options. Out: the compiled model. A backend sees only what Dynamo hands over, and
Dynamo breaks the graph at a loop over experts before that. Around each call this module
- lets Dynamo capture data-dependent sizes (`torch.where(ids == e)`, `nonzero`, `bincount`), and
- switches transformers models from their Python loop ("eager") to the equivalent grouped GEMMs, and back after the
  call, so that the model object stays as the user made it.
"""

import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moefuse.options import Options

LOOP, GROUPED = "eager", "grouped_mm"
"""transformers' names of the loop over experts and of its equivalent in one graph."""

_SETTING = "_experts_implementation_internal"


def compile(
    model: Callable[..., Any], *, fullgraph: bool = False, dynamic: bool | None = None, **options: Any
) -> Callable[..., Any]:
    """`torch.compile(model, backend="moefuse", options=options)` that also gets loops over experts into one graph.

    model: a module or a function. fullgraph, dynamic: as for torch.compile. options: as for the backend; raises
    OptionError at once for unknown names and impossible values.
    """
    Options.parse(options)
    arguments: dict[str, Any] = {"backend": "moefuse", "fullgraph": fullgraph, "dynamic": dynamic}
    arguments["options"] = options or None
    inner = torch.compile(own_frame(model), **arguments)
    switch = _ExpertsSwitch(model)

    def run(*args: Any, **kwargs: Any) -> Any:
        with _data_dependent_capture(), switch.grouped():
            return inner(*args, **kwargs)

    if not isinstance(model, nn.Module):
        return run
    compiled = torch.compile(model, **arguments)  # for its face: attributes and state of the model
    assert isinstance(compiled, nn.Module)
    compiled.forward = run
    return compiled


def own_frame(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model behind a code object of its own.

    Dynamo remembers per code object what it has compiled, how often, and which frames it gave up: a loop that broke
    its graph once would be skipped for ever, and the ninth model of a class would not be compiled.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return types.FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)


def _data_dependent_capture() -> Any:
    """Dynamo's flags for outputs whose size depends on the data, which are off by default."""
    return torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)


class _ExpertsSwitch:
    """The configurations by which a transformers model chooses how to run its experts."""

    def __init__(self, model: Callable[..., Any]) -> None:
        modules = model.modules() if isinstance(model, nn.Module) else ()
        # Modules with a choice have the hook that every implementation calls between the GEMMs.
        configs = {
            id(m.config): m.config for m in modules if hasattr(m, "_apply_gate") and hasattr(m, "config")
        }
        self._configs = [config for config in configs.values() if hasattr(config, _SETTING)]
        self._lock = threading.Lock()
        self._calls = 0
        self._switched: list[Any] = []

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """Loops are grouped GEMMs inside; the last of concurrent calls to leave switches back."""
        if not self._configs:
            yield
            return
        with self._lock:
            self._calls += 1
            for config in self._configs:
                if getattr(config, _SETTING) == LOOP:
                    setattr(config, _SETTING, GROUPED)
                    self._switched.append(config)
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if not self._calls:
                    for config in self._switched:
                        setattr(config, _SETTING, LOOP)
                    self._switched.clear()
