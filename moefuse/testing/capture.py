"""Functional ATen graphs of small models, for tests of passes.

In: a module (or plain function) and example inputs. Out: `Captured`, a graph whose placeholders are the
parameters, buffers and inputs as flat tensors, together with the real values to run it on.

`capture_graph` traces without Dynamo, for code without graph breaks. `capture_model` goes through
`torch.compile` and gives one `Captured` for each graph, as the backend would see them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from moefuse.graph.capture import capture


@dataclass(frozen=True)
class Captured:
    """A functional ATen graph and the values of its placeholders, in order."""

    graph_module: GraphModule
    inputs: tuple[Any, ...]


def capture_graph(
    model: Callable[..., Any],
    args: Sequence[Any],
    *,
    dynamic: Mapping[int, Sequence[int]] | None = None,
) -> Captured:
    """Trace `model(*args)` to a functional ATen graph.

    Args:
        model: an `nn.Module` (its parameters and buffers become placeholders) or a function.
        args: positional tensors.
        dynamic: symbolic dimensions, `{position in args: dimensions}`; equal sizes share one symbol.

    Raises:
        TypeError: an argument that isn't a tensor.
    """
    for position, arg in enumerate(args):
        if not isinstance(arg, torch.Tensor):
            raise TypeError(f"args[{position}]: expected a tensor, got {type(arg).__name__}")
    state: dict[str, torch.Tensor] = {}
    if isinstance(model, torch.nn.Module):
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = list(state)

    def flat(*values: torch.Tensor) -> Any:
        rest = values[len(names) :]
        if not isinstance(model, torch.nn.Module):
            return model(*rest)
        return torch.func.functional_call(model, dict(zip(names, values, strict=False)), tuple(rest))

    inputs = (*(state[name].detach() for name in names), *args)
    marks = {len(names) + position: dims for position, dims in (dynamic or {}).items()}
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=not marks)
    fakes = [_fake(mode, value, marks.get(i, ())) for i, value in enumerate(inputs)]
    return Captured(_trace(mode, flat, fakes), inputs)


def capture_model(model: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Captured]:
    """The functional ATen graphs that Dynamo makes of `model(*args, **kwargs)`, in the order of their calls.

    Runs the model once, without gradients. Tensors made by a graph are inputs of the next one.
    """
    found: list[Captured] = []

    def backend(graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        traced = capture(graph_module, example_inputs).graph_module

        def call(*values: Any) -> Any:
            real = tuple(v.detach() if isinstance(v, torch.Tensor) else v for v in values)
            found.append(Captured(traced, real))
            return graph_module(*values)

        return call

    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(model, backend=backend)(*args, **kwargs)
    finally:
        torch._dynamo.reset()
    return found


def _fake(mode: FakeTensorMode, value: torch.Tensor, dynamic: Sequence[int]) -> torch.Tensor:
    if mode.static_shapes:
        return mode.from_tensor(value)
    # DUCK: equal sizes get one symbol, as the token counts of x, ids and weights must.
    sizes: Any = [DimDynamic.DUCK if d in dynamic else DimDynamic.STATIC for d in range(value.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(value, symbolic_context=context, source=_source(next(_SERIAL)))


def _source(serial: int) -> Any:
    from torch._dynamo.source import ConstantSource

    return ConstantSource(f"input_{serial}")


_SERIAL = itertools.count()


def _trace(mode: FakeTensorMode, function: Callable[..., Any], fakes: Sequence[Any]) -> GraphModule:
    """One flat-output functional graph of `function` on fake inputs."""

    def flat_outputs(*values: Any) -> list[Any]:
        return pytree.tree_leaves(function(*values))

    functional = torch.func.functionalize(flat_outputs, remove="mutations")
    with mode, torch.no_grad(), torch.fx.traceback.preserve_node_meta(), enable_python_dispatcher():
        graph_module = make_fx(functional)(*fakes)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module
