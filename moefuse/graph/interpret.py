"""The interpreter that the functional trace runs.

In: a Dynamo graph and functional tensors. Out: its results, with eager mode's meaning kept in the trace.

A tracer below autograd sees ATen calls only. This interpreter writes into the trace what it would miss:
where gradients are off, and what a checkpointed region is. What can't be written down is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

__all__ = ["CaptureError", "EagerInterpreter", "SymbolKeeper", "tracing"]


class CaptureError(RuntimeError):
    """The graph can't be made functional without risk of another meaning; the message says why."""

    @staticmethod
    def because(what: str, error: Exception) -> CaptureError:
        """what: can't be done, for an error of torch's, of which the first line is told."""
        reason = str(error).strip().split("\n", 1)[0]
        return CaptureError(f"{what}: {type(error).__name__}: {reason}")


@contextlib.contextmanager
def tracing(mode: FakeTensorMode) -> Iterator[None]:
    """What a graph's interpreter is traced under. Symbols of an abandoned trace don't wait for a binding any more."""
    from torch._dispatch.python import enable_python_dispatcher

    shape_env = mode.shape_env
    pending = list(shape_env.pending_fresh_unbacked_symbols) if shape_env else []
    try:
        with mode, fx.traceback.preserve_node_meta(), enable_python_dispatcher():
            yield
    except Exception:
        if shape_env:
            shape_env.pending_fresh_unbacked_symbols[:] = pending
        raise


class SymbolKeeper(fx.Interpreter):
    """Sizes that depend on data keep the symbols that the original graph gave them."""

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        result = super().run_node(n)
        if not n.meta.get("unbacked_bindings"):
            return result
        from torch.fx.experimental.symbolic_shapes import rebind_unbacked

        mode = detect_fake_mode()
        assert mode is not None
        rebind_unbacked(mode.shape_env, n, result)
        return result


class EagerInterpreter(SymbolKeeper):
    """Runs a graph under functionalization and a tracer.

    attributes: functional tensors that stand for the tensors on the graph module, by qualified name.
    training: whether gradients will be asked of the result.
    """

    def __init__(self, gm: fx.GraphModule, attributes: dict[str, Any], training: bool) -> None:
        super().__init__(gm)
        self.attributes = attributes
        self.training = training
        self.grad_at_start = torch.is_grad_enabled()
        self.requires_grad = training
        self.autocasts: list[Any] = []
        # Memory of tensors that autograd follows; weak references, or freed memory would be taken for it.
        self.with_history: set[StorageWeakRef] = set()

    def run_whole(self, *args: Any) -> Any:
        """Run all nodes; global modes are as before afterwards, also when a node fails."""
        from torch._C import _functorch

        self.requires_grad = any(
            t.requires_grad
            for t in pytree.tree_leaves((args, self.attributes))
            if isinstance(t, torch.Tensor)
        )
        layers = len(_functorch.get_interpreter_stack() or ())
        try:
            result = self.run(*args)
            if torch.is_grad_enabled() != self.grad_at_start or self.autocasts:
                raise CaptureError("the graph leaves gradient or autocast mode changed for its caller")
            return result
        finally:
            for context in reversed(self.autocasts):
                context.__exit__(None, None, None)
            while len(_functorch.get_interpreter_stack() or ()) > layers:
                _functorch.pop_dynamic_layer_stack()
            torch._C._set_grad_enabled(self.grad_at_start)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The functional tensor that stands for the attribute."""
        known = self.attributes.get(target)
        return super().get_attr(target, args, kwargs) if known is None else known

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function; the ones that switch global modes are followed."""
        if target is torch.autograd.grad_mode._enter_inference_mode:
            # Inference tensors can't be traced by autograd; only "no history" matters here.
            previous = torch.is_grad_enabled()
            torch._C._set_grad_enabled(not args[0] and previous)
            return previous
        if target is torch.autograd.grad_mode._exit_inference_mode:
            torch._C._set_grad_enabled(args[0])
            return None
        if target is torch._C._set_grad_enabled and args[0] and self.requires_grad and not self.grad_at_start:
            raise CaptureError("gradients are switched on inside a graph that is called without them")
        if target is torch.Tensor.set_ and len(args) == 2 and args[0] is args[1]:
            return args[0]  # what is left of `self.router = self.router.to(dtype)` in a module of that dtype
        if target is torch.amp.autocast_mode._enter_autocast:
            self.autocasts.append(super().call_function(target, args, kwargs))
            return self.autocasts[-1]
        if target is torch.amp.autocast_mode._exit_autocast:
            self.autocasts.remove(args[0])
        if self.training and target is torch.ops.higher_order.tag_activation_checkpoint:
            return self._checkpoint(*args)
        if self.training and target is torch.ops.higher_order.autograd_function_apply:
            waited = _waited(*args[:2])
            if waited is not None:
                return (self._call(super().call_function, _WAIT, (args[2 + waited],), {}),)
        if self.training and isinstance(target, torch._ops.HigherOrderOperator):
            # It brings its own backward, which a trace below autograd would lose.
            raise CaptureError(f"higher order operator {_name(target)} under gradients")
        return self._call(super().call_function, target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a tensor method."""
        return self._call(super().call_method, target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a module."""
        return self._call(super().call_module, target, args, kwargs)

    def _checkpoint(self, body: fx.GraphModule, *args: Any) -> Any:
        """Inline a checkpointed region; its nodes carry the tags by which AOTAutograd recomputes them."""
        from torch._higher_order_ops.wrap import uid
        from torch.fx.experimental.proxy_tensor import get_proxy_mode
        from torch.utils.checkpoint import CheckpointPolicy

        if "_checkpoint_context_fn" in body.meta:
            raise CaptureError("selective activation checkpointing (context_fn) under gradients")
        mode = get_proxy_mode()
        assert mode is not None
        last = next(reversed(mode.tracer.graph.nodes))
        inner = EagerInterpreter(body, {}, self.training)
        inner.with_history = self.with_history
        result = inner.run(*args)
        region = next(uid)
        while (last := last.next).op != "root":
            last.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
            last.meta.setdefault("ac_graph_id", region)
        return result

    def _call(self, run: Callable[..., Any], target: Any, args: Any, kwargs: Any) -> Any:
        if not self.training:
            return run(target, args, kwargs)
        originals: dict[int, torch.Tensor] = {}
        if not torch.is_grad_enabled():
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda t: _cut_history(t, originals), (args, kwargs)
            )
        operands = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        before = [(t, t._version, t.requires_grad) for t in operands]
        self._remember([t for t in operands if t.requires_grad])
        self._remember(originals.values())
        result = run(target, args, kwargs)
        if torch.is_grad_enabled() and _name(target) != "detach":
            followed = {_memory(t) for t, _, required in before if required}
            result = pytree.tree_map_only(torch.Tensor, lambda t: _without_history(t, followed), result)
        for t, version, required in before:
            if required and not t.requires_grad:
                raise CaptureError(f"{_name(target)} drops the history of a tensor in place")
            if t._version != version and not required and _memory(t) in self.with_history:
                # Eager mode keeps the old derivative here; a functional graph would lose it.
                raise CaptureError(f"{_name(target)} writes to a tensor with history, unseen by autograd")
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        self._remember([t for t in outputs if t.requires_grad])
        # The node may hand back its very input (`x.contiguous()`): that keeps its history.
        return pytree.tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), result)

    def _remember(self, tensors: Iterable[torch.Tensor]) -> None:
        self.with_history.update(map(_memory, tensors))


_WAIT = torch.ops._c10d_functional.wait_tensor.default


def _waited(forward: fx.GraphModule, backward: fx.GraphModule) -> int | None:
    """The argument that a function waits for, if its gradient is that of the result: what a wait has by itself.

    None for a function that does anything else.
    """
    given = forward.graph.find_nodes(op="placeholder")
    body = [n for gm in (forward, backward) for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    (wait,) = (
        calls
        if len(calls := [n for n in body if n.target is not torch._C._set_grad_enabled]) == 1
        else (None,)
    )
    if wait is None or wait.target not in (_WAIT, _WAIT.overloadpacket) or wait.args[0] not in given:
        return None
    (results, _), gradients = _returned(forward), _returned(backward)
    (gradient, *_) = backward.graph.find_nodes(op="placeholder")
    own = tuple(gradient if n is wait.args[0] else None for n in given)
    same = results == (wait,) and (gradients if isinstance(gradients, tuple) else (gradients,)) == own
    return given.index(wait.args[0]) if same else None


def _returned(gm: fx.GraphModule) -> Any:
    (output,) = gm.graph.find_nodes(op="output")
    return output.args[0]


def _memory(t: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(t.untyped_storage())


def _cut_history(t: torch.Tensor, originals: dict[int, torch.Tensor]) -> torch.Tensor:
    """What flows into a gradient-free region goes through a detach that stands in the graph."""
    if not t.requires_grad:
        return t
    detached = t.detach()
    originals[id(detached)] = t
    return detached


def _without_history(t: torch.Tensor, followed: set[StorageWeakRef]) -> torch.Tensor:
    """`x.data` leaves no node, and would be x: a detach that stands in the graph takes its place."""
    return t if t.requires_grad or _memory(t) not in followed else t.detach()


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))
