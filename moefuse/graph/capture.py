"""The functional trace.

In: the graph that Dynamo hands to a backend. Out: the same program as a functional ATen graph.

The result stands before autograd and before Inductor's decompositions, so that one analysis serves
inference and training. It is made by one trace of the graph's interpreter on fake tensors, with
autograd above functionalization above the tracer, the order in which AOTAutograd has them: operators
decompose exactly as they would without moefuse.

What a trace below autograd would lose is either written into the graph or refused:
gradient-free regions become `aten.detach` nodes, autocast regions become casts, writes to inputs
become `aten.copy_` nodes at the end. Everything else that can't be told apart afterwards raises
`CaptureError`; the caller then leaves the graph unfused.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from moefuse.graph.interpret import CaptureError, EagerInterpreter, tracing
from moefuse.graph.source import example_of

__all__ = ["CaptureError", "Captured", "capture", "is_control_flow"]


@dataclass(frozen=True)
class Captured:
    """A functional ATen graph and what was known about its inputs.

    graph_module: one placeholder per placeholder of the original graph, same order and names;
        every node has `meta["val"]`; the output is a tuple with the original's leaves.
    parameters: names of the placeholders and `get_attr` nodes that hold a `torch.nn.Parameter`.
    training: gradients are wanted: grad mode is on and some input requires them.
    """

    graph_module: fx.GraphModule
    parameters: frozenset[str]
    training: bool = False


def is_control_flow(exc: BaseException) -> bool:
    """Whether Dynamo itself raised `exc` to steer its analysis: a backend must let it pass."""
    from torch._dynamo import exc as dynamo

    return isinstance(
        exc,
        (dynamo.RestartAnalysis, dynamo.SkipFrame, dynamo.ResetRequired, dynamo.RecompileError),
    )


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """Trace `gm` into a functional ATen graph.

    gm: a Dynamo graph, or any fx graph over torch, ATen or module calls. It isn't changed.
    example_inputs: one value per placeholder: tensors (real or fake), ints, SymInts, floats, None.
    Raises ValueError if the number of inputs is wrong, CaptureError if the meaning can't be kept.
    Exceptions by which Dynamo steers itself (`is_control_flow`) pass through.
    """
    from torch._dynamo.convert_frame import compile_lock

    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(example_inputs):
        raise ValueError(
            f"example_inputs: expected {len(placeholders)} values, one per placeholder, "
            f"got {len(example_inputs)}"
        )
    # fx keeps the metadata of the node being traced in process-wide variables that Dynamo's own
    # threads guard with this lock; inside a backend it is already ours.
    with compile_lock:
        return _Capture(gm, placeholders, example_inputs).run()


def fake_mode_of(placeholders: Sequence[fx.Node], inputs: Sequence[Any]) -> FakeTensorMode:
    """The mode in which a graph's inputs are fake already, or in which Dynamo traces; otherwise a new one."""
    for value in inputs:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    mode = detect_fake_mode([example_of(node) for node in placeholders])
    if mode is not None:
        return mode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def fake_of(mode: FakeTensorMode, node: fx.Node, value: Any) -> Any:
    """The fake of one input, as AOTAutograd will make it: a later trace then reuses it."""
    recorded = example_of(node)
    if not isinstance(value, torch.Tensor):
        return recorded if isinstance(recorded, (torch.SymInt, torch.SymFloat)) else value
    if isinstance(value, FakeTensor) and value.fake_mode is mode:
        return value
    if isinstance(recorded, FakeTensor) and recorded.fake_mode is mode:
        return recorded
    context = TracingContext.try_get()
    known: Any = None
    if context is not None:
        known = context.tensor_to_context.get(value)
    if known is None:
        return mode.from_tensor(value, static_shapes=True)
    return mode.from_tensor(value, symbolic_context=known, source=known.tensor_source, trace=False)


@dataclass
class _Attributes:
    """Tensors that live on the graph module: `names[i]` holds `tensors[i]`."""

    names: list[str]
    tensors: list[torch.Tensor]

    @staticmethod
    def of(gm: fx.GraphModule) -> _Attributes:
        found: dict[str, torch.Tensor] = dict(gm.named_parameters(remove_duplicate=False))
        found.update(gm.named_buffers(remove_duplicate=False))
        for node in gm.graph.find_nodes(op="get_attr"):
            value = operator.attrgetter(str(node.target))(gm)
            if isinstance(value, torch.Tensor):
                found.setdefault(str(node.target), value)
        return _Attributes(list(found), list(found.values()))


class _Capture:
    """One capture: the pieces that the trace and its checks share."""

    def __init__(self, gm: fx.GraphModule, placeholders: Sequence[fx.Node], inputs: Sequence[Any]) -> None:
        self.gm = gm
        self.placeholders = placeholders
        self.inputs = inputs
        self.attributes = _Attributes.of(gm)
        self.mode = fake_mode_of(placeholders, inputs)
        self.training = False

    def run(self) -> Captured:
        for node, value in zip(self.placeholders, self.inputs, strict=True):
            _check_input(node, value)
        fakes = [fake_of(self.mode, n, x) for n, x in zip(self.placeholders, self.inputs, strict=True)]
        unique = {id(t): t for t in self.attributes.tensors}  # tied weights are one input
        fakes += [self.mode.from_tensor(t, static_shapes=True) for t in unique.values()]
        self.training = torch.is_grad_enabled() and any(
            isinstance(f, torch.Tensor) and f.requires_grad for f in fakes
        )
        traced = self._trace(fakes, list(unique))
        return self._finish(traced, list(unique.values()))

    # -- trace

    def _trace(self, fakes: list[Any], attribute_ids: list[int]) -> fx.GraphModule:
        from torch.fx.experimental.proxy_tensor import make_fx

        function = self._functional(len(self.placeholders), attribute_ids)
        try:
            with self._cache(), tracing(self.mode):
                return make_fx(
                    function,
                    decomposition_table={torch.ops.aten.copy.default: _copy},
                    _error_on_data_dependent_ops=False,
                    _disable_torch_fn_metadata_mode=True,
                )(*fakes)
        except Exception as error:
            if is_control_flow(error) or isinstance(error, CaptureError):
                raise
            raise CaptureError.because("tracing failed", error) from error

    @contextlib.contextmanager
    def _cache(self) -> Iterator[None]:
        """Without torch's cache of fake results where sizes depend on data: each such size is met only once.

        In a loop over experts nearly every operator has one; filling the cache takes a quarter of the trace.
        """
        before = self.mode.cache_enabled
        self.mode.cache_enabled = before and not any(
            n.meta.get("unbacked_bindings") for n in self.gm.graph.nodes
        )
        try:
            yield
        finally:
            self.mode.cache_enabled = before

    def _functional(self, count: int, attribute_ids: list[int]) -> Callable[..., Any]:
        """A function over fake inputs (placeholders, then attributes) for make_fx to trace."""

        def run(*flat: Any) -> tuple[Any, ...]:
            wrapped = pytree.tree_map_only(torch.Tensor, _wrap, list(flat))
            by_id = dict(zip(attribute_ids, wrapped[count:], strict=True))
            attributes = {
                name: by_id[id(t)]
                for name, t in zip(self.attributes.names, self.attributes.tensors, strict=True)
            }
            interpreter = EagerInterpreter(self.gm, attributes, self.training)
            with _functionalization(), _module_attributes(self.gm, attributes):
                outputs = pytree.tree_leaves(interpreter.run_whole(*wrapped[:count]))
                written = self._written(list(flat), wrapped)
                results = _plain_outputs(list(flat), wrapped, outputs)
            with torch.no_grad():  # a leaf that requires grad may be among them: nothing is computed here
                for i in written:
                    flat[i].copy_(_plain(wrapped[i]))
            return tuple(results)

        return run

    def _written(self, flat: list[Any], wrapped: list[Any]) -> list[int]:
        """Positions of the inputs that the graph writes to."""
        written: list[int] = []
        for i, (plain, functional) in enumerate(zip(flat, wrapped, strict=True)):
            if not isinstance(plain, torch.Tensor):
                continue
            if torch._functionalize_has_metadata_mutation(functional):
                raise CaptureError(f"{self._input_name(i)}: shape, strides or storage changed in place")
            if _plain(functional) is not plain:
                written.append(i)
        memory = [_storage(x) for x in flat]
        for i in written:
            # Reads through the other input would miss the write.
            if memory.count(memory[i]) > 1:
                raise CaptureError(f"{self._input_name(i)}: written to, and another input shares its memory")
        return written

    def _input_name(self, index: int) -> str:
        if index < len(self.placeholders):
            return f"input {self.placeholders[index].name}"
        return "a tensor attribute of the graph"

    # -- result

    def _finish(self, traced: fx.GraphModule, attributes: list[torch.Tensor]) -> Captured:
        graph = traced.graph
        for name in list(traced._buffers):
            # Constants made while tracing: AOTAutograd would ask Dynamo where such a buffer comes from.
            traced.__dict__[name] = traced._buffers.pop(name)
        nodes = graph.find_nodes(op="placeholder")
        parameters = set()
        for old, new, value in zip(self.placeholders, nodes, self.inputs, strict=False):
            new._rename(old.name)
            new.target = new.name
            if isinstance(value, torch.nn.Parameter):
                parameters.add(new.name)
        for node, tensor in zip(nodes[len(self.placeholders) :], attributes, strict=True):
            if not node.users:
                graph.erase_node(node)
                continue
            index = next(i for i, t in enumerate(self.attributes.tensors) if t is tensor)
            attr = _put_attribute(traced, self.attributes.names[index], tensor)
            with graph.inserting_before(node):
                getter = graph.get_attr(attr)
            getter.meta.update(node.meta)
            node.replace_all_uses_with(getter)
            graph.erase_node(node)
            if isinstance(tensor, torch.nn.Parameter):
                parameters.add(getter.name)
        graph.eliminate_dead_code(_must_stay)
        if self.training:
            _read_before_write(graph)
        graph.lint()
        traced.recompile()
        return Captured(traced, frozenset(parameters), self.training)


def _check_input(node: fx.Node, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise CaptureError(f"input {node.name} has layout {value.layout}, expected strided")
        if _is_subclass(value):
            raise CaptureError(f"input {node.name} is a tensor subclass, {type(value).__name__}")
    elif value is not None and not isinstance(
        value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    ):
        raise CaptureError(f"input {node.name} is a {type(value).__name__}, expected a tensor or a number")


def _is_subclass(value: Any) -> bool:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(value))


def _wrap(t: torch.Tensor) -> torch.Tensor:
    wrapped = torch._to_functional_tensor(t)
    torch._mirror_autograd_meta_to(t, wrapped)  # type: ignore[attr-defined]
    return wrapped


def _plain(t: torch.Tensor) -> torch.Tensor:
    """The tensor inside a functional one, all pending writes applied."""
    if not torch._is_functional_tensor(t):
        return t
    torch._functionalize_sync(t)
    return torch._from_functional_tensor(t)


def _plain_outputs(flat: list[Any], wrapped: list[Any], outputs: list[Any]) -> list[Any]:
    """The outputs without their functional wrappers, if they share memory as the originals do."""
    position = {id(w): i for i, w in enumerate(wrapped) if isinstance(w, torch.Tensor)}
    results: list[Any] = []
    for out in outputs:
        if not isinstance(out, torch.Tensor):
            results.append(out)
        elif id(out) in position:
            results.append(flat[position[id(out)]])  # an output that is an input stays that input
        else:
            results.append(_plain(out))
            _check_strides(out, results[-1])
    _check_aliases([*wrapped, *outputs], [*flat, *results], len(flat))
    return results


def _storage(t: Any) -> int | None:
    return t.untyped_storage()._cdata if isinstance(t, torch.Tensor) else None


def _check_aliases(before: list[Any], after: list[Any], inputs: int) -> None:
    """Values that shared memory must share it still, else later writes would be seen by one only.

    before, after: the `inputs` inputs and the outputs, wrapped and plain. Inputs that overlap each other, such as tied
    parameters, have wrappers of their own: none of them is written (see `_written`).
    """
    meant = {_storage(a): _storage(b) for a, b in zip(before[:inputs], after[:inputs], strict=True)}
    forth: dict[int, int] = {}
    back: dict[int, int] = {}
    for value, b in zip(before, map(_storage, after), strict=True):
        a = _storage(value)
        a = meant.get(a, a)
        if a is None or b is None:
            continue
        if forth.setdefault(a, b) != b or back.setdefault(b, a) != a:
            raise CaptureError("an output shares memory with a tensor that is written in place")


def _check_strides(meant: torch.Tensor, made: torch.Tensor) -> None:
    from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

    if not statically_known_true(sym_eq(meant.stride(), made.stride())):
        raise CaptureError(f"an output would get strides {made.stride()} instead of {meant.stride()}")


def _copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """aten.copy has no derivative of its own; this is what it computes, always in new memory."""
    value = src if src.dim() == self.dim() and src.shape == self.shape else src.expand(self.shape)
    if value.dtype == self.dtype and value.device == self.device:
        return value.clone()
    return torch.ops.aten._to_copy.default(  # type: ignore[no-any-return]
        value, dtype=self.dtype, device=self.device, non_blocking=non_blocking
    )


def _must_stay(node: fx.Node) -> bool:
    # A node that defines an unbacked size is used through the sizes of others.
    return node.is_impure() or bool(node.meta.get("unbacked_bindings"))


def _read_before_write(graph: fx.Graph) -> None:
    """Autograd must not save an input that the graph writes to at its end: let it save a copy."""
    for write in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target = write.args[0]
        readers = [user for user in target.users if user is not write and user.op != "output"]
        if not readers:
            continue
        with graph.inserting_before(min(readers)):
            clone = graph.call_function(torch.ops.aten.clone.default, (target,))
        clone.meta["val"] = target.meta["val"]
        for reader in readers:
            reader.replace_input_with(target, clone)


def _put_attribute(root: torch.nn.Module, path: str, tensor: torch.Tensor) -> str:
    """Put `tensor` itself on `root` at `path`, or near it where the tracer took the name."""
    *parents, leaf = path.split(".")
    owner = root
    for name in parents:
        child = getattr(owner, name, None)
        if child is None:
            child = torch.nn.Module()
            owner.add_module(name, child)
        owner = child
    while hasattr(owner, leaf):
        leaf += "_"
    if isinstance(tensor, torch.nn.Parameter):
        owner.register_parameter(leaf, tensor)
    else:
        owner.register_buffer(leaf, tensor)
    return ".".join([*parents, leaf])


@contextlib.contextmanager
def _module_attributes(gm: fx.GraphModule, values: dict[str, Any]) -> Iterator[None]:
    """Let `call_module` nodes see the traced parameters instead of the real ones."""
    if not gm.graph.find_nodes(op="call_module"):
        yield
        return
    from torch.nn.utils.stateless import _reparametrize_module

    known = {name for name, _ in gm.named_parameters(remove_duplicate=False)}
    known.update(name for name, _ in gm.named_buffers(remove_duplicate=False))
    with _reparametrize_module(gm, {n: v for n, v in values.items() if n in known}):
        yield


@contextlib.contextmanager
def _functionalization() -> Iterator[None]:
    torch._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        torch._disable_functionalization()
