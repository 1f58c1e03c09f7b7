"""Graphs over distributed tensors as graphs over each rank's local ones.

In: a Dynamo graph in which DTensors are made, moved between ranks or computed with. Out: the same program over local
tensors and collectives, as DTensor itself dispatches to them, and what takes a call's arguments to it. What only
reads an input locally is seen to before (`local.read_locally`), with gradients too; here there are none.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from moefuse.graph.capture import fake_mode_of, fake_of, is_control_flow
from moefuse.graph.interpret import CaptureError, SymbolKeeper, tracing

Run = Callable[..., Any]


@dataclass(frozen=True)
class Desugared:
    """A graph of local tensors, and its inputs. kept: which of a call's arguments it takes.

    wrap: makes of its outputs those of the graph it was made from; None where it is that graph itself.
    """

    gm: fx.GraphModule
    inputs: Sequence[Any]
    kept: tuple[int, ...] = ()
    wrap: Callable[[Sequence[Any]], list[Any]] | None = None

    def taking_the_whole(self, run: Run) -> Run:
        """A compiled `gm` as what takes and gives the original's arguments and outputs."""
        if (wrap := self.wrap) is None:
            return run
        return lambda *args: wrap(run(*(_local(args[i]) for i in self.kept)))


def desugared(gm: fx.GraphModule, inputs: Sequence[Any]) -> Desugared:
    """The graph over local tensors; the graph itself where nothing in it is distributed. `gm` isn't changed.

    inputs: one per placeholder. Raises CaptureError where gradients are wanted, or the graph can't be traced so.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    kinds = _kinds()
    if not kinds or not any(isinstance(x, kinds) for x in inputs):
        return Desugared(gm, inputs)
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        raise CaptureError("DTensors are moved or computed with, and gradients are wanted")
    (_, mesh) = kinds
    kept = tuple(i for i, x in enumerate(inputs) if not isinstance(x, mesh))
    try:
        traced, wrap = _traced(gm, placeholders, inputs, kept)
    except Exception as error:
        if is_control_flow(error):
            raise
        raise CaptureError.because("its DTensors can't be taken for local tensors", error) from error
    for old, new in zip(
        (placeholders[i] for i in kept), traced.graph.find_nodes(op="placeholder"), strict=True
    ):
        new._rename(old.name)
        new.target = new.name
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    traced.meta.update(gm.meta)
    traced.recompile()
    return Desugared(traced, [_weight(inputs[i]) for i in kept], kept, wrap)


def _kinds() -> tuple[Any, Any] | None:
    """(DTensor, DeviceMesh), where somebody has imported them: they are heavy."""
    tensor, mesh = (
        sys.modules.get("torch.distributed.tensor"),
        sys.modules.get("torch.distributed.device_mesh"),
    )
    return (tensor.DTensor, mesh.DeviceMesh) if tensor is not None and mesh is not None else None


def _local(x: Any) -> Any:
    kinds = _kinds()
    return x.to_local() if kinds is not None and isinstance(x, kinds[0]) else x


def _weight(x: Any) -> Any:
    """The local tensor; of a parameter a parameter, for it is a weight all the same."""
    local = _local(x)
    if local is x or not isinstance(x, torch.nn.Parameter):
        return local
    return torch.nn.Parameter(local.detach(), requires_grad=False)


def _traced(
    gm: fx.GraphModule, placeholders: Sequence[fx.Node], inputs: Sequence[Any], kept: Sequence[int]
) -> tuple[fx.GraphModule, Callable[[Sequence[Any]], list[Any]]]:
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = fake_mode_of(placeholders, inputs)
    fakes = [fake_of(mode, node, x) for node, x in zip(placeholders, inputs, strict=True)]
    wrap: list[Callable[[Sequence[Any]], list[Any]]] = []

    def run(*locals_: Any) -> list[Any]:
        args = list(fakes)
        for i, local in zip(kept, locals_, strict=True):
            args[i] = local if _local(fakes[i]) is fakes[i] else _like(fakes[i], local)
        outputs = pytree.tree_leaves(SymbolKeeper(gm).run(*args))
        wrapping, sizes = _wrapping(outputs)
        wrap.append(wrapping)
        return [*map(_local, outputs), *sizes]

    with tracing(mode), torch.no_grad():
        traced = make_fx(run, _error_on_data_dependent_ops=False, _disable_torch_fn_metadata_mode=True)(
            *(_local(fakes[i]) for i in kept)
        )
    return traced, wrap[-1]


def _like(whole: Any, local: torch.Tensor) -> Any:
    """A distributed tensor with another local one."""
    sizes = {"shape": whole.shape, "stride": whole.stride()}
    return type(whole).from_local(local, whole.device_mesh, whole.placements, run_check=False, **sizes)


def _wrapping(outputs: Sequence[Any]) -> tuple[Callable[[Sequence[Any]], list[Any]], list[torch.SymInt]]:
    """What makes distributed tensors of the local ones, where the outputs were distributed.

    It takes the local outputs and, after them, the values of the symbolic sizes that come with it.
    """
    kinds = _kinds()
    assert kinds is not None
    symbolic: list[torch.SymInt] = []

    def noted(size: Any) -> tuple[bool, int]:
        """(False, number) or (True, place among the symbolic ones)."""
        if isinstance(size, int):
            return False, size
        symbolic.append(size)
        return True, len(symbolic) - 1

    specs = [
        (out.device_mesh, out.placements, [*map(noted, out.shape)], [*map(noted, out.stride())])
        if isinstance(out, kinds[0])
        else None
        for out in outputs
    ]

    def wrap(results: Sequence[Any]) -> list[Any]:
        values = results[len(specs) :]

        def read(sizes: list[tuple[bool, int]]) -> tuple[int, ...]:
            return tuple(values[size] if later else size for later, size in sizes)

        return [
            local
            if spec is None
            else kinds[0].from_local(
                local, *spec[:2], run_check=False, shape=torch.Size(read(spec[2])), stride=read(spec[3])
            )
            for local, spec in zip(results, specs, strict=False)
        ]

    return wrap, symbolic
