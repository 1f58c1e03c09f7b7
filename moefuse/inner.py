"""The compiler behind moefuse.

In: a functional ATen graph from `capture`, fused or not. Out: the callable that runs it.

The inner compiler is Inductor, one of torch_npu's (npugraph_ex, torchair) or plain PyTorch. What AOTAutograd reads from
a Dynamo graph (where inputs come from, which of them are static, cache identity) is copied from the original graph, so
that caches, CUDA graphs and guards on equal parameters behave as they would without moefuse.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

import moefuse.ops  # noqa: F401  registers the operators

INNER_COMPILERS = ("inductor", "eager", "npugraph_ex", "torchair")

# Dynamo's facts about a graph that AOTAutograd looks up by these names.
_GRAPH_ATTRIBUTES = (
    "_param_name_to_source",
    "_source_to_user_stacks",
    "_backend_id",
    "compile_subgraph_reason",
    "saved_tensors_hooks_pack_0",
    "saved_tensors_hooks_unpack_0",
)


def compile_inner(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inner: str,
    *,
    inner_options: Mapping[str, Any] | None = None,
    original: fx.GraphModule | None = None,
) -> Callable[..., Any]:
    """Compile the functional graph `gm` for inputs like `example_inputs`.

    gm: placeholders as in the original graph, a tuple as output. The inner compiler may change it.
    inner: one of `INNER_COMPILERS`. All results can be differentiated.
    inner_options: for "inductor" its config entries, as `torch._inductor.list_mode_options(mode)` gives; for
        "npugraph_ex" its own options; for "torchair" entries of its CompilerConfig by dotted path ("mode").
    original: the Dynamo graph that `gm` was captured from, if any.
    Raises ValueError for an unknown `inner`, or for options that `inner` doesn't take; RuntimeError where torch_npu is
    needed and can't be imported.
    """
    if inner not in INNER_COMPILERS:
        raise ValueError(f"inner: expected one of {', '.join(INNER_COMPILERS)}, got {inner!r}")
    options = dict(inner_options or {})
    if inner == "eager" and options:
        raise ValueError(f"inner_options: expected none with inner='eager', got {sorted(options)}")
    if original is not None:
        _copy_dynamo_facts(original, gm)
    # Capture wrote every cast into the graph. With autocast on, the compiler, and fallback kernels
    # at run time, would cast a second time, also inside regions that had switched it off.
    ambient = original is not None and torch._C._is_any_autocast_enabled()
    with torch._C._DisableAutocast() if ambient else contextlib.nullcontext():
        run = _COMPILE[inner](gm, example_inputs, options)
    return _without_autocast(run) if ambient else run


def choose(inner: str, example_inputs: Sequence[Any]) -> str:
    """What "auto" stands for: npugraph_ex where a tensor of the graph is on an NPU, Inductor elsewhere."""
    if inner != "auto":
        return inner
    on_npu = any(isinstance(x, torch.Tensor) and x.device.type == "npu" for x in example_inputs)
    return "npugraph_ex" if on_npu else "inductor"


def _eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Run the graph as it is.

    A view was recorded where fake strides allowed it; the real ones of a dimension of size one may not: a reshape
    copies there, and only there.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    gm.recompile()
    return gm.forward


def _inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    _order_collectives()
    compiled = compile_fx(gm, example_inputs, config_patches=dict(options))
    return cast(Callable[..., Any], compiled)


def _npugraph_ex(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    compiler = _of_torch_npu("npugraph_ex")
    backend = compiler.get_npu_backend(compiler_config=compiler.CompilerConfig())
    return cast(Callable[..., Any], backend(gm, example_inputs, options=dict(options)))


def _torchair(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    from moefuse.targets.npu import ge

    compiler = _of_torch_npu("torchair")
    ge.register()
    config = compiler.CompilerConfig()
    for path, value in options.items():
        owner, _, name = path.rpartition(".")
        try:
            section = functools.reduce(getattr, owner.split("."), config) if owner else config
            getattr(section, name)
        except AttributeError:
            raise ValueError(f"inner_options: torchair's CompilerConfig has no {path!r}") from None
        setattr(section, name, value)
    return cast(Callable[..., Any], compiler.get_npu_backend(compiler_config=config)(gm, example_inputs))


def _of_torch_npu(name: str) -> Any:
    """One of the compilers that torch_npu brings along; it is a module of that name once torch_npu is imported."""
    try:
        importlib.import_module("torch_npu")
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(f"inner={name!r} needs torch_npu, which can't be imported: {error}") from error


_COMPILE: dict[str, Callable[[fx.GraphModule, Sequence[Any], Mapping[str, Any]], Callable[..., Any]]] = {
    "inductor": _inductor,
    "eager": _eager,
    "npugraph_ex": _npugraph_ex,
    "torchair": _torchair,
}


@functools.lru_cache(maxsize=1)
def _order_collectives() -> None:
    """Let Inductor see `mega_moe.ep`, `quant_ep` and the gradient as the collectives they are.

    The scheduler moves nodes to save memory, by sizes that differ between ranks; collectives it keeps in their order.
    """
    from torch._inductor.lowering import add_needs_realized_inputs, register_lowering

    mega_moe = torch.ops.moefuse.mega_moe
    for op in (mega_moe.ep, mega_moe.quant_ep, torch.ops.moefuse.mega_moe_backward.ep):
        add_needs_realized_inputs(op)
        register_lowering(op, type_promotion_kind=None)(functools.partial(_as_collective, op))


def _as_collective(op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor import ir

    outputs: Any = ir._CollectiveKernel.create(op, *args, **kwargs)
    return type(outputs)(output.wrap_for_lowering() for output in outputs)


def _without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with torch._C._DisableAutocast():
            return run(*args)

    return call


def _copy_dynamo_facts(original: fx.GraphModule, gm: fx.GraphModule) -> None:
    for key, value in original.meta.items():
        gm.meta.setdefault(key, value)
    for name in _GRAPH_ATTRIBUTES:
        if hasattr(original, name):
            setattr(gm, name, getattr(original, name))
    olds, news = original.graph.find_nodes(op="placeholder"), gm.graph.find_nodes(op="placeholder")
    if len(olds) != len(news):
        raise ValueError(f"original: expected {len(news)} placeholders as in gm, got {len(olds)}")
    for old, new in zip(olds, news, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
        if "tensor_dict" in old.meta:  # says which inputs are static, for CUDA graphs
            new.meta["tensor_dict"] = old.meta["tensor_dict"]
