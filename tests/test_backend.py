"""torch.compile(backend="moefuse"): options, reports, fallbacks, threads, weights that change, warm caches."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse
from moefuse import backend
from moefuse.patterns import rules
from tests.moe_model import E, Experts, H, Model, Routed

X = torch.randn(6, H, generator=torch.Generator().manual_seed(0))

LOGITS = torch.randn(6, E, generator=torch.Generator().manual_seed(1))

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""The same float32 products summed in another order."""


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="moefuse", options={"inner": "eager", **options})


def last() -> moefuse.Report:
    return moefuse.reports()[-1]


def check(model: Callable[..., Any], *inputs: Tensor, **options: Any) -> moefuse.Report:
    """Compile, compare with eager, and return the report."""
    known = len(moefuse.reports())
    torch.testing.assert_close(compiled(model, **options)(*inputs), model(*inputs), **CLOSE)
    assert len(moefuse.reports()) == known + 1
    return last()


# --- the plain case --------------------------------------------------------------------------------------


def test_every_layer_is_fused_and_reported() -> None:
    report = check(Model(), X)
    assert [(site.layer, site.fused, site.target) for site in report.sites] == [
        ("layers.0.experts", True, "cpu"),
        ("layers.1.experts", True, "cpu"),
    ]
    (graph,) = report.graphs
    assert graph.nodes_after < graph.nodes_before
    assert set(graph.seconds) >= {"capture", "canonicalize", "lift", "fuse"}
    assert (graph.error, graph.note) == ("", "")


def test_the_kernel_runs() -> None:
    """The compiled code calls the operator: one call for each layer and run."""
    run = compiled(Model())
    run(X)
    with torch.profiler.profile() as profile:
        run(X)
    assert [event.name for event in profile.events()].count("moefuse::mega_moe") == 2


def test_by_name_without_an_import() -> None:
    assert "moefuse" in torch._dynamo.list_backends()


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_any_number_of_tokens(tokens: int) -> None:
    check(Model(), torch.randn(tokens, H))


def test_changing_numbers_of_tokens_compile_twice_at_most() -> None:
    model = Model()
    run = compiled(model)
    known = len(moefuse.reports())
    for tokens in (4, 6, 9, 3):
        x = torch.randn(tokens, H)
        torch.testing.assert_close(run(x), model(x), **CLOSE)
    assert len(moefuse.reports()) == known + 1, "one report for one model"
    assert [[site.fused for site in graph.sites] for graph in last().graphs] == [[True, True]] * 2


def test_gradients() -> None:
    model, x = Model(train=True), X.clone().requires_grad_()
    run = compiled(model)
    wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    got = torch.autograd.grad(run(x).square().sum(), [x, *model.parameters()])
    assert last().fused == 2
    assert all(site.spec is not None and site.spec.training for site in last().sites)
    # Gradients are sums over tokens of products as large as 1e2.
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


# --- options ---------------------------------------------------------------------------------------------


def raised(model: Callable[..., Any], **options: Any) -> BaseException:
    """What compiling raises, out of Dynamo's wrapping."""
    with pytest.raises(Exception, match=r"moefuse|option|MoE") as caught:
        torch.compile(model, backend="moefuse", options=options)(X)
    return getattr(caught.value, "inner_exception", None) or caught.value.__cause__ or caught.value


def test_an_unknown_option_is_an_error() -> None:
    error = raised(Model(), targett="cpu")
    assert isinstance(error, moefuse.OptionError)
    assert "unknown option 'targett'; did you mean 'target'" in str(error)


def test_an_impossible_target_is_an_error() -> None:
    assert "options['target']: expected one of auto, cpu, npu, reference" in str(
        raised(Model(), target="tpu")
    )


def test_the_target_that_was_asked_for() -> None:
    assert {site.target for site in check(Model(), X, target="reference").sites} == {"reference"}


def test_mode_off_fuses_nothing() -> None:
    report = check(Model(), X, mode="off")
    assert not report.sites
    assert report.graphs[0].note == "mode='off': nothing is fused"


def test_mode_on_raises_for_a_refused_layer() -> None:
    error = raised(Model("sum", "amax"), mode="on", inner="eager")
    assert isinstance(error, moefuse.RejectedError)
    assert "1 MoE layer(s) not fused" in str(error)
    assert "layers.1.experts: `amax`: expert rows are reduced by amax" in str(error)
    assert "moe_model.py:" in str(error)


def test_mode_on_with_nothing_to_refuse() -> None:
    assert check(Model(), X, mode="on").fused == 2


def test_mode_auto_leaves_a_refused_layer() -> None:
    report = check(Model("sum", "amax"), X)
    assert [site.fused for site in report.sites] == [True, False]


def test_exclude_leaves_exactly_that_layer() -> None:
    report = check(Model("sum", "sum", "sum"), X, exclude=["layers.1.*"])
    assert [(site.layer, site.fused, site.check) for site in report.sites] == [
        ("layers.0.experts", True, ""),
        ("layers.1.experts", False, "exclude"),
        ("layers.2.experts", True, ""),
    ]
    assert report.sites[1].reason == "excluded by the option exclude='layers.1.*'"


def test_an_exclude_that_matches_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "moefuse"):
        report = check(Model(), X, exclude=["layers.0.*", "layers.7.*"])
    note = "exclude patterns that match no MoE layer of this graph: layers.7.*"
    assert note in report.graphs[0].note
    assert "(layers: layers.0.experts, layers.1.experts)" in report.graphs[0].note
    assert any(note in message for message in caplog.messages)


def test_dump_writes_both_graphs(tmp_path: Path) -> None:
    report = check(Model(), X, dump=str(tmp_path / "new"))
    index = report.graphs[0].index
    before = (tmp_path / "new" / f"graph{index}.before.txt").read_text(encoding="utf-8")
    after = (tmp_path / "new" / f"graph{index}.after.txt").read_text(encoding="utf-8")
    assert before.count("aten.bmm.default(") == 4
    assert "moefuse.mega_moe" not in before
    assert (after.count("aten.bmm.default("), after.count("moefuse.mega_moe.default(")) == (0, 2)
    assert json.loads((tmp_path / "new" / f"graph{index}.after.json").read_text(encoding="utf-8"))["nodes"]


def test_a_dump_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    report = check(Model(), X, dump=str(tmp_path / "file"))
    assert "FileExistsError" in report.graphs[0].error or "NotADirectoryError" in report.graphs[0].error


# --- torch.compile's own arguments -----------------------------------------------------------------------


def test_a_mode_of_torch_compile_reaches_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def compile_inner(gm: Any, inputs: Any, inner: str, **kwargs: Any) -> Any:
        seen.append((inner, kwargs["inner_options"]))
        return gm.forward

    monkeypatch.setattr(backend, "compile_inner", compile_inner)
    model = Model()
    torch.testing.assert_close(
        torch.compile(model, backend="moefuse", mode="reduce-overhead")(X), model(X), **CLOSE
    )
    ((inner, options),) = seen
    assert inner == "inductor"
    assert options == {
        "emulate_precision_casts": True,
        **torch._inductor.list_mode_options("reduce-overhead"),
    }
    assert options["triton.cudagraphs"] is True


def test_a_mode_for_eager_is_an_error() -> None:
    with pytest.raises(Exception, match="only the inner compiler inductor has modes, got inner='eager'"):
        backend.moefuse(
            torch.fx.symbolic_trace(torch.nn.Linear(2, 2)),
            [],
            mode="max-autotune",
            options={"inner": "eager"},
        )


def test_inductor_compiles_the_fused_graph() -> None:
    model = Routed()
    run = torch.compile(model, backend="moefuse", mode="reduce-overhead", fullgraph=True)
    torch.testing.assert_close(run(X, LOGITS), model(X, LOGITS), **CLOSE)
    assert last().fused == 1


# --- graphs without a layer ------------------------------------------------------------------------------


def test_a_model_without_moe_is_compiled_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.fx.GraphModule] = []
    passed: list[torch.fx.GraphModule] = []

    def outer(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        given.append(gm)
        return backend.moefuse(gm, inputs, options={"inner": "eager"})

    def compile_inner(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        passed.append(gm)
        return gm.forward

    monkeypatch.setattr(backend, "compile_inner", compile_inner)
    model = torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.SiLU())
    torch.testing.assert_close(torch.compile(model, backend=outer)(X), model(X), rtol=0, atol=0)
    assert passed == given
    assert not last().sites
    assert last().graphs[0].note == "no routing operation in this graph"
    assert "No MoE layer was found." in str(last())


def test_a_router_without_experts_is_compiled_as_it_is() -> None:
    """Something routes, so it is looked at; nothing is found, and nothing is changed."""
    report = check(lambda x: x.softmax(-1).topk(2)[0], X)
    assert not report.sites
    assert report.graphs[0].seconds["lift"] >= 0


def test_unfused_graphs_keep_their_numbers_bit_for_bit() -> None:
    model = Model("amax")
    torch.testing.assert_close(compiled(model)(X), model(X), rtol=0, atol=0)
    assert last().fused == 0


# --- when something goes wrong ---------------------------------------------------------------------------


def broken_rule(lift: Any, node: Any) -> None:
    raise ZeroDivisionError("a bug in a rule")


@pytest.fixture
def a_broken_rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(rules._RULES, "aten::index", broken_rule)
    return


@pytest.mark.usefixtures("a_broken_rule")
def test_an_internal_error_leaves_the_model_running(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "moefuse"):
        report = check(Model(), X)
    (graph,) = report.graphs
    assert "ZeroDivisionError: a bug in a rule" in graph.error
    assert "broken_rule" in graph.error, "the traceback"
    assert not graph.sites
    assert any("internal error" in message for message in caplog.messages)
    assert "moefuse failed in 1 graph" in str(report)


@pytest.mark.usefixtures("a_broken_rule")
def test_an_internal_error_is_raised_in_mode_on() -> None:
    assert isinstance(raised(Model(), mode="on", inner="eager"), ZeroDivisionError)


@pytest.mark.parametrize("place", ["fuse_site", "canonicalize", "find"])
def test_an_error_in_a_pass_leaves_the_model_running(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.passes import pipeline

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError(place)

    monkeypatch.setattr(pipeline, place, fail)
    assert f"ZeroDivisionError: {place}" in check(Model(), X).graphs[0].error


def failing_on_fused(error: Exception) -> Callable[..., Any]:
    def compile_inner(gm: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("original") is not None:
            raise error
        return gm.forward

    return compile_inner


def test_an_inner_compiler_that_fails_on_the_fused_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "compile_inner", failing_on_fused(RuntimeError("no such kernel")))
    with caplog.at_level(logging.WARNING, "moefuse"):
        report = check(Model(), X)
    assert "RuntimeError: no such kernel" in report.graphs[0].error
    assert report.fused == 0
    assert any("compiling it unfused" in message for message in caplog.messages)


def test_an_inner_compiler_that_fails_in_mode_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "compile_inner", failing_on_fused(RuntimeError("no such kernel in moefuse")))
    assert str(raised(Model(), mode="on")) == "no such kernel in moefuse"


def test_exceptions_by_which_dynamo_steers_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    steering = torch._dynamo.exc.SkipFrame("leave this frame")
    monkeypatch.setattr(backend, "compile_inner", failing_on_fused(steering))
    gm: list[Any] = []
    model = Model()
    torch.compile(model, backend=lambda g, inputs: gm.append((g, inputs)) or g.forward)(X)
    with pytest.raises(torch._dynamo.exc.SkipFrame):
        backend.moefuse(*gm[0], options={"inner": "eager"})


def test_a_graph_that_cannot_be_captured_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise moefuse.CaptureError("input c is a tensor subclass")

    monkeypatch.setattr(backend, "capture", refuse)
    report = check(Model(), X)
    assert report.graphs[0].note == "left as it is: input c is a tensor subclass"
    assert report.graphs[0].error == ""


# --- threads ---------------------------------------------------------------------------------------------


def test_two_threads_compile_at_once() -> None:
    models = [Model(), Model("sum", "amax")]
    wanted = [model(X) for model in models]
    got: list[Any] = [None, None]
    start = threading.Barrier(2)

    def work(index: int) -> None:
        start.wait(timeout=60)
        with torch.no_grad():
            got[index] = compiled(models[index])(X)

    known = len(moefuse.reports())
    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    torch.testing.assert_close(got, wanted, **CLOSE)
    assert sum(report.fused for report in moefuse.reports()[known:]) == 3


# --- weights that change after compilation ---------------------------------------------------------------


def in_place(experts: Experts) -> None:
    with torch.no_grad():
        experts.w1.mul_(-2)
        experts.w2.copy_(torch.randn_like(experts.w2))


def load(experts: Experts) -> None:
    experts.load_state_dict({name: torch.randn_like(value) for name, value in experts.state_dict().items()})


def swap(experts: Experts) -> None:
    experts.w1.data = torch.randn_like(experts.w1)
    experts.w2.data = torch.randn_like(experts.w2)


def replace(experts: Experts) -> None:
    experts.w1 = torch.nn.Parameter(torch.randn_like(experts.w1), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "inner"),
    [
        (in_place, "eager"),
        (load, "eager"),
        (swap, "eager"),
        (replace, "eager"),
        (in_place, "inductor"),
        (swap, "inductor"),
    ],
)
def test_changed_weights_are_seen(change: Callable[[Experts], None], inner: str) -> None:
    model = Routed()
    run = compiled(model, inner=inner)
    before = run(X, LOGITS)
    assert last().fused == 1
    change(model.experts)
    after = run(X, LOGITS)
    torch.testing.assert_close(after, model(X, LOGITS), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, after, rtol=0.1), "the change shows at all"


# --- warm caches -----------------------------------------------------------------------------------------

PROCESS = """
import torch, moefuse
from torch._dynamo.utils import counters
from tests.moe_model import E, H, Routed
torch.manual_seed(0)
model, inputs = Routed(), (torch.randn(4, H), torch.randn(4, E))
torch.testing.assert_close(torch.compile(model, backend="moefuse")(*inputs), model(*inputs))
(report,) = moefuse.reports()
print(report.fused, len(report.sites), counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_a_second_process_with_warm_caches_reports_too(tmp_path: Path) -> None:
    """Nothing of the report lives where a cache hit skips it."""
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}
    command = [sys.executable, "-c", PROCESS]
    lines = []
    for _ in range(2):
        run = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=240, cwd=root, check=False
        )
        assert run.returncode == 0, run.stderr
        lines.append(run.stdout.split())
    assert lines == [["1", "1", "0"], ["1", "1", "1"]], (
        "the second run hits the cache, and reports as the first"
    )


@pytest.mark.parametrize("as_eager", [True, False])
def test_half_precision_is_rounded_as_eager_does_unless_told_otherwise(as_eager: bool) -> None:
    """Around the layer too: Inductor alone keeps silu(x) * x in float32, and the router would see the difference."""
    routed = Routed().bfloat16().eval()
    logits = torch.randn(256, E).bfloat16()
    x = torch.randn(256, H).bfloat16()

    def model(x: torch.Tensor) -> torch.Tensor:
        return routed(torch.nn.functional.silu(x) * x + 1.5, logits)

    fused = torch.compile(model, backend="moefuse", options={"round_as_eager": as_eager})
    with torch.no_grad():
        same = torch.equal(fused(x), model(x))
    assert moefuse.reports()[-1].fused == 1
    assert same == as_eager
