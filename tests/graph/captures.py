"""Captured graphs beside eager: outputs, gradients and inputs afterwards must agree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from moefuse.graph.capture import Captured, CaptureError, capture
from moefuse.inner import compile_inner

# Same ATen calls in the same order: any difference is an error, not rounding.
EXACT = {"atol": 0.0, "rtol": 0.0}


def backend(log: list[Captured], inner: str = "eager") -> Callable[..., Any]:
    def compile_graph(gm: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Callable[..., Any]:
        captured = capture(gm, example_inputs)
        log.append(captured)
        return compile_inner(captured.graph_module, example_inputs, inner, original=gm)

    return compile_graph


def twin(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return copy.deepcopy(value)


def compare(fn: Callable[..., Any], *args: Any, inner: str = "eager", **options: Any) -> Captured:
    """Run eager and captured on equal inputs: outputs, gradients and inputs afterwards must agree."""
    mine, theirs = [twin(a) for a in args], [twin(a) for a in args]
    log: list[Captured] = []
    tolerance = EXACT if inner == "eager" else {"atol": 1e-5, "rtol": 1e-4}  # Inductor reorders sums

    def run(f: Callable[..., Any], values: list[Any]) -> list[torch.Tensor]:
        outputs = torch.utils._pytree.tree_leaves(f(*values))
        loss = [o.square().sum() for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
        if loss:
            torch.stack(loss).sum().backward()
        grads = [v.grad for v in values if isinstance(v, torch.Tensor)]
        leaves = [v.detach() for v in values if isinstance(v, torch.Tensor)]
        return [*outputs, *grads, *leaves]

    expected = run(fn, theirs)
    actual = run(torch.compile(fn, backend=backend(log, inner), fullgraph=True, **options), mine)
    torch.testing.assert_close(actual, expected, **tolerance)
    (captured,) = log
    assert_functional(captured.graph_module)
    return captured


def assert_functional(gm: fx.GraphModule) -> None:
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert not [n for n in gm.graph.nodes if n.op in ("call_method", "call_module")]
    writes = [n for n in calls if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable]
    assert all(n.target is torch.ops.aten.copy_.default and n.args[0].op == "placeholder" for n in writes)
    tail = calls[len(calls) - len(writes) :]
    assert tail == writes, "writes to inputs come last"


def ops(captured: Captured) -> list[str]:
    return [str(n.target) for n in captured.graph_module.graph.nodes if n.op == "call_function"]


def refused(fn: Callable[..., Any], *args: Any, match: str) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=match) as caught:
        torch.compile(fn, backend=backend([]), fullgraph=True)(*args)
    assert isinstance(caught.value.inner_exception, CaptureError)


def x() -> torch.Tensor:
    return torch.randn(4, 8, requires_grad=True)


def w() -> torch.Tensor:
    return torch.randn(8, 8, requires_grad=True)
