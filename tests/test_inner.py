"""The inner compilers: options, Dynamo's facts, autocast at run time, exceptions, caches."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters

from moefuse.graph.capture import capture
from moefuse.inner import choose, compile_inner


def backend(inner: str, **options: Any) -> Callable[..., Any]:
    def compile_graph(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return compile_inner(
            capture(gm, example_inputs).graph_module, example_inputs, inner, original=gm, **options
        )

    return compile_graph


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.linear(x).relu() + self.calls


def test_unknown_inner_is_named() -> None:
    gm = fx.symbolic_trace(lambda x: (x + 1,))
    with pytest.raises(
        ValueError, match="inner: expected one of inductor, eager, npugraph_ex, torchair, got 'tvm'"
    ):
        compile_inner(gm, [torch.ones(2)], "tvm")


def test_options_for_eager_are_an_error() -> None:
    gm = fx.symbolic_trace(lambda x: (x + 1,))
    with pytest.raises(ValueError, match=r"inner_options: .*max_autotune"):
        compile_inner(gm, [torch.ones(2)], "eager", inner_options={"max_autotune": True})


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
@pytest.mark.parametrize("inner", ["npugraph_ex", "torchair"])
def test_a_compiler_that_is_not_installed_is_named(inner: str) -> None:
    gm = fx.symbolic_trace(lambda x: (x + 1,))
    with pytest.raises(RuntimeError, match=f"inner='{inner}' needs torch_npu, which can't be imported"):
        compile_inner(gm, [torch.ones(2)], inner)


def test_auto_takes_npugraph_ex_on_an_npu() -> None:
    class OnNpu(torch.Tensor):
        device = SimpleNamespace(type="npu")

    plain = torch.ones(2)
    assert choose("auto", [3, plain]) == "inductor"
    assert choose("auto", [3, plain, plain.as_subclass(OnNpu)]) == "npugraph_ex"
    assert choose("eager", [plain.as_subclass(OnNpu)]) == "eager"


def test_original_with_other_inputs_is_an_error() -> None:
    one, two = fx.symbolic_trace(lambda x: (x + 1,)), fx.symbolic_trace(lambda x, y: (x + y,))
    with pytest.raises(ValueError, match="original: expected 1 placeholders as in gm, got 2"):
        compile_inner(one, [torch.ones(2)], "eager", original=two)


def test_options_reach_inductor() -> None:
    seen: list[Any] = []

    def look(graph: fx.Graph) -> None:
        seen.append((torch._inductor.config.epilogue_fusion, len(graph.nodes)))

    options = {"epilogue_fusion": False, "post_grad_custom_post_pass": look}
    compiled = torch.compile(Counting(), backend=backend("inductor", inner_options=options))
    with torch.no_grad():
        compiled(torch.randn(2, 8))
    assert [s[0] for s in seen] == [False]


def test_aot_autograd_learns_the_same_about_inputs() -> None:
    """Sources (guards on equal parameters) and static inputs (CUDA graphs), as for Dynamo's graph."""
    from torch._functorch._aot_autograd.frontend_utils import _try_get_metadata_from_dynamo as facts

    seen: list[Any] = []

    def compile_graph(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        functional = capture(gm, inputs).graph_module
        run = compile_inner(functional, inputs, "eager", original=gm)
        seen.extend(facts(g, {}.keys(), len(inputs), []) for g in (gm, functional))
        assert functional.meta["dynamo_compile_id"] is gm.meta["dynamo_compile_id"]
        return run

    torch.compile(Counting(), backend=compile_graph)(torch.randn(2, 8))
    before, after = seen
    assert after == before
    assert after[1] == [0, 1, 2], "parameters and buffers are static"


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_autocast_is_off_while_the_compiled_code_runs(inner: str) -> None:
    """A custom op is opaque to the compiler: it sees the state at run time."""
    seen: list[bool] = []
    with torch.library._scoped_library("moefuse_test_inner", "FRAGMENT") as library:
        library.define("probe(Tensor x) -> Tensor")

        def probe(x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return x.clone()

        library.impl("probe", probe, "CPU")
        library.impl("probe", torch.empty_like, "Meta")
        compiled = torch.compile(
            lambda x: torch.ops.moefuse_test_inner.probe(x @ x), backend=backend(inner), fullgraph=True
        )
        with torch.autocast("cpu", torch.bfloat16):
            out = compiled(torch.randn(4, 4))
            assert torch.is_autocast_enabled("cpu")
    assert out.dtype is torch.bfloat16
    assert seen == [False]


def test_caches_hit_for_the_functional_graph() -> None:
    """The same in a second process is measured by `benchmarks/capture.py cache`."""
    from torch._inductor.utils import fresh_cache

    model, x = Counting(), torch.randn(4, 8)
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            torch.compile(model, backend=backend("inductor"))(x).sum().backward()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert counters["aot_autograd"]["autograd_cache_bypass"] == 0


@pytest.mark.parametrize("options", [{}, {"mode": "off"}], ids=["no MoE", "off"])
def test_a_graph_left_as_it_is_runs_under_the_autocast_around_it(options: dict[str, str]) -> None:
    """Only a captured graph holds its casts: any other needs autocast as much as it did before."""
    x = torch.randn(4, 8)

    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ x.t()

    fused = torch.compile(product, backend="moefuse", options={"inner": "eager", **options})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused(x).dtype == product(x).dtype == torch.bfloat16
