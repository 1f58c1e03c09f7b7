"""Capture keeps the meaning of a graph, or refuses: values, gradients, writes, sharing of memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._guards import TracingContext
from torch._subclasses import FakeTensorMode

from moefuse.graph.capture import Captured, CaptureError, capture, is_control_flow
from tests.graph.captures import EXACT, assert_functional, backend, compare, ops, refused, twin, w, x

# -- autocast


def island(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = a @ b
    with torch.autocast("cpu", enabled=False):
        g = h.float() @ b  # must stay float32
    return (h @ b).float(), g


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_autocast_off_inside_ambient_autocast(inner: str) -> None:
    a, b, p, q = x(), w(), None, None
    p, q = twin(a), twin(b)
    with torch.autocast("cpu", torch.bfloat16):
        expected = island(a, b)
        actual = torch.compile(island, backend=backend([], inner), fullgraph=True)(p, q)
    torch.testing.assert_close(actual, expected, **EXACT)
    (expected[0].sum() + expected[1].sum()).backward()
    (actual[0].sum() + actual[1].sum()).backward()
    # bfloat16 gradients of two uses are summed in another order (eager casts each weight once)
    torch.testing.assert_close((p.grad, q.grad), (a.grad, b.grad), atol=0.05, rtol=0.02)


def test_autocast_region_becomes_casts() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = a @ b
        return y.float() @ b

    captured = compare(fn, x(), w())
    assert ops(captured).count("aten._to_copy.default") == 3


def test_a_failure_inside_autocast_leaves_no_trace() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = a @ b
            h.detach().mul_(2)
            return h @ b

    refused(fn, x(), w(), match="unseen by autograd")
    assert not torch.is_autocast_enabled("cpu")


# -- writes and sharing of memory


def test_writes_to_inputs() -> None:
    def cache(c: torch.Tensor, n: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c.index_copy_(0, i, n)
        return c.sum(0), c[:2] * 2

    captured = compare(cache, torch.zeros(10, 8), torch.randn(2, 8), torch.tensor([1, 2]), inner="inductor")
    assert ops(captured)[-1] == "aten.copy_.default"


def test_outputs_that_are_inputs_or_views_of_them() -> None:
    def fn(n: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n.add_(1)
        return n, a[0], a.view(-1), a * 2

    n, a = torch.zeros(3), torch.randn(4, 8)
    out = torch.compile(fn, backend=backend([], "inductor"), fullgraph=True)(n, a)
    assert out[0] is n
    assert n.eq(1).all()
    out[1].fill_(5)
    assert out[2][:8].eq(5).all()
    assert a[0].eq(5).all()


def test_view_of_a_written_input_as_output_is_refused() -> None:
    def fn(n: torch.Tensor) -> torch.Tensor:
        n.add_(1)
        return n[0]

    refused(fn, torch.zeros(3, 4), match="shares memory")


def test_inputs_that_share_memory_may_be_read_beside_a_written_one() -> None:
    def fn(n: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        n[a] = 1.0
        return b.reshape(-1)

    log: list[Captured] = []
    mask = torch.tensor([True, False, True])[:, None]
    n = torch.zeros(3, 2)
    out = torch.compile(fn, backend=backend(log), fullgraph=True)(n, mask.expand(3, 2), mask.expand(3, 4))
    assert len(log) == 1
    assert n.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert out.tolist() == [True] * 4 + [False] * 4 + [True] * 4


def test_an_output_that_shares_memory_with_two_inputs_still_does() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a[1:], b * 2

    base = torch.zeros(4)
    part, _ = torch.compile(fn, backend=backend([]), fullgraph=True)(base[:3], base.view(2, 2))
    part.fill_(5)
    assert base.tolist() == [0, 5, 5, 0]


def test_writes_to_inputs_that_overlap_are_refused() -> None:
    base = torch.zeros(8)

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b * 2

    refused(fn, base[:], base[2:], match="shares its memory")


# -- shapes


@pytest.mark.parametrize("how", ["automatic", "dynamic", "marked"])
def test_no_more_graphs_than_without_capture(how: str) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(a)
        y[:, 1] = a[:, 0]
        return (y @ b).view(-1, 4).softmax(-1) + a.shape[0]

    def graphs(compile_graph: Any) -> int:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend(compile_graph)
        compiled = torch.compile(fn, backend=counter, dynamic=True if how == "dynamic" else None)
        for length in (3, 5, 9, 17):
            a = torch.randn(length, 8)
            if how == "marked":
                torch._dynamo.mark_dynamic(a, 0)
            torch.testing.assert_close(compiled(a, w0), fn(a, w0))
        return counter.frame_count

    w0 = torch.randn(8, 8)
    assert graphs(backend([])) == graphs("aot_eager") == {"automatic": 2, "dynamic": 1, "marked": 1}[how]


def test_sizes_are_the_symbols_of_the_original() -> None:
    seen: dict[str, Any] = {}

    def compile_graph(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        captured = capture(gm, inputs)
        seen.update(gm=gm, captured=captured)
        return gm.forward

    torch.compile(lambda a: a @ a.T, backend=compile_graph, dynamic=True)(torch.randn(5, 8))
    old = seen["gm"].graph.find_nodes(op="placeholder")
    new = seen["captured"].graph_module.graph.find_nodes(op="placeholder")
    assert [n.name for n in new] == [n.name for n in old]
    for o, n in zip(old, new, strict=True):
        before, after = o.meta["example_value"], n.meta["val"]
        if isinstance(before, torch.SymInt):
            assert isinstance(after, torch.SymInt)
            assert str(after) == str(before)
        else:
            assert str(before.shape) == str(after.shape)
    out = seen["captured"].graph_module.graph.output_node().args[0][0].meta["val"]
    assert isinstance(out.shape[0], torch.SymInt)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_sizes_that_depend_on_data(inner: str) -> None:
    def fn(n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = (n > 0).nonzero()
        k = (n > 0).sum().item()
        torch._check(k >= 0)
        torch._check(k <= 64)
        return rows.float().sum(0), torch.ones(k) * 2

    captured = compare(fn, torch.randn(4, 8), inner=inner)
    assert "aten._assert_scalar.default" in ops(captured)
    bindings = [n for n in captured.graph_module.graph.nodes if n.meta.get("unbacked_bindings")]
    assert len(bindings) == 2


def test_sizes_that_depend_on_data_keep_the_symbols_of_the_original() -> None:
    """What the graph was told of them, and outputs whose sizes Dynamo knows by these symbols, speak of the same."""
    sizes: list[tuple[Any, Any]] = []

    def look(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs = (gm, "example_value"), (capture(gm, inputs).graph_module, "val")
        outputs = [(module.graph.output_node().args[0][0], name) for module, name in graphs]
        old, new = (node.meta[name].shape[0].node.expr for node, name in outputs)
        sizes.append((old, new))
        return gm

    torch.compile(lambda n: (n > 0).nonzero(), backend=look, fullgraph=True)(torch.randn(4, 8))
    ((old, new),) = sizes
    assert old == new
    assert str(old).startswith("u")


@pytest.mark.parametrize("data", [False, True], ids=["static", "sizes from data"])
def test_the_cache_of_fake_results_isnt_filled_with_sizes_met_once(data: bool) -> None:
    """In a loop over experts that costs a quarter of the trace. Afterwards torch's cache works as before."""

    def fn(n: torch.Tensor) -> torch.Tensor:
        return (n[(n > 0).nonzero()[:, 0]] if data else n).sin().cos()

    seen = []

    def look(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        mode = TracingContext.get().fake_mode
        before = FakeTensorMode.cache_info().misses + FakeTensorMode.cache_info().hits
        capture(gm, example_inputs)
        after = FakeTensorMode.cache_info().misses + FakeTensorMode.cache_info().hits
        seen.append((after - before, mode.cache_enabled))
        return gm

    torch.compile(fn, backend=look, fullgraph=True)(torch.randn(4, 8))
    ((asked, enabled),) = seen
    assert (asked == 0) == data
    assert enabled


# -- graphs that aren't from Dynamo


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8, bias=False)
        self.again = torch.nn.Linear(8, 8, bias=False)
        self.again.weight = self.inner.weight
        self.register_buffer("steps", torch.zeros(()))
        self.plain = torch.arange(8.0)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        self.steps.add_(a.sum())
        return self.again(self.inner(a).relu()) * self.plain + self.steps


def test_attributes_stay_the_same_objects() -> None:
    model, other = Tied(), Tied()
    other.load_state_dict(model.state_dict())
    gm = fx.symbolic_trace(model)
    a = torch.randn(4, 8)
    captured = capture(gm, [a])
    assert model.steps.item() == 0, "capture runs on fake tensors only"
    torch.testing.assert_close(captured.graph_module(a)[0], other(a), **EXACT)
    torch.testing.assert_close(model.steps, a.sum(), **EXACT)
    (parameter,) = dict(captured.graph_module.named_parameters()).values()
    assert parameter is model.inner.weight
    (name,) = captured.parameters
    node = next(n for n in captured.graph_module.graph.nodes if n.name == name)
    assert (node.op, node.target) == ("get_attr", "inner.weight")


def test_exported_program() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
    a = torch.randn(4, 8)
    gm = torch.export.export(model, (a,)).module()
    captured = capture(gm, [a])
    torch.testing.assert_close(captured.graph_module(a)[0], model(a), **EXACT)


def test_wrong_number_of_inputs() -> None:
    gm = fx.symbolic_trace(Tied())
    with pytest.raises(ValueError, match="expected 1 values, one per placeholder, got 0"):
        capture(gm, [])


def test_sparse_input_is_refused() -> None:
    gm = fx.symbolic_trace(lambda a: a + a)
    with pytest.raises(CaptureError, match="layout"):
        capture(gm, [torch.eye(3).to_sparse()])


def test_a_failed_trace_is_named_and_leaves_no_trace() -> None:
    gm = fx.symbolic_trace(lambda a: a.view(3, 3))
    with pytest.raises(CaptureError, match="tracing failed"):
        capture(gm, [torch.randn(4, requires_grad=True)])
    assert torch.is_grad_enabled()


def test_threads() -> None:
    traced = [fx.symbolic_trace(lambda a: ((a * 2).relu() + 1).sum(-1)) for _ in range(4)]
    results: list[Any] = [None] * 4

    def work(i: int) -> None:
        results[i] = ops(capture(traced[i], [torch.randn(3, 4)]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    expected = ["aten.mul.Tensor", "aten.relu.default", "aten.add.Tensor", "aten.sum.dim_IntList"]
    assert results == [expected] * 4


# -- real models


@pytest.mark.parametrize(("family", "training"), [("qwen3_moe", False), ("deepseek_v3", True)])
def test_models(family: str, training: bool) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 48, "vocab_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {
        "num_experts": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 8 if family == "deepseek_v3" else 16,
    }
    mla = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    extra = mla | {"n_group": 2, "topk_group": 1, "v_head_dim": 16, "first_k_dense_replace": 1}
    config = AutoConfig.for_model(
        family, **sizes, **heads, **experts, **(extra if "deepseek" in family else {})
    )
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation="grouped_mm"
    ).train(training)
    log: list[Captured] = []
    compiled = torch.compile(model, backend=backend(log), fullgraph=True)
    ids = torch.randint(0, 64, (2, 16))
    with torch.set_grad_enabled(training):
        expected, actual = model(ids).logits, compiled(ids).logits
    torch.testing.assert_close(actual, expected, **EXACT)
    if training:
        weights = list(model.parameters())
        before = torch.autograd.grad(expected.float().square().mean(), weights, allow_unused=True)
        after = torch.autograd.grad(actual.float().square().mean(), weights, allow_unused=True)
        torch.testing.assert_close(after, before, **EXACT)
    (captured,) = log
    assert_functional(captured.graph_module)
    calls = [n for n in captured.graph_module.graph.nodes if n.op == "call_function"]
    assert sum("nn_module_stack" in n.meta for n in calls) >= 0.95 * len(calls)
    assert sum("stack_trace" in n.meta for n in calls) >= 0.95 * len(calls)
    assert len(captured.parameters) == len(list(model.parameters()))


def test_dynamo_steering_exceptions_are_told_apart() -> None:
    from torch._dynamo import exc

    assert is_control_flow(exc.SkipFrame("frame"))
    assert is_control_flow(exc.TensorifyScalarRestartAnalysis())
    assert not is_control_flow(RuntimeError("no"))
    assert not is_control_flow(exc.TorchRuntimeError("no"))
