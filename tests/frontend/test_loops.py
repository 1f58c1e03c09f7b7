"""Loops that branch on data through `moefuse.compile`: one graph and one node, or the code as written and a reason."""

import copy
import inspect
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moefuse
from moefuse.passes.pipeline import RejectedError
from tests.frontend import models, near_misses
from tests.frontend.models import E, H

# Sums in another order: float32 noise is about 1e-7 of the values.
FP32 = 1e-5


def lonely(model: nn.Module) -> nn.Module:
    """The model with a router that leaves experts without tokens: all of `tokens` choose 1 and 3, the first 2 and 1."""
    with torch.no_grad():
        weight = model.router.weight  # type: ignore[union-attr]
        weight.zero_()
        weight[1, 0], weight[3, 0], weight[2, 1] = 5.0, 4.0, 9.0
    return model.eval()


def tokens(count: int = 6) -> Tensor:
    """Rows for `lonely`."""
    x = torch.randn(count, H)
    x[:, 0], x[:, 1] = 1.0, 0.0
    x[0, 1] = 1.0
    return x


def reports_of(model: nn.Module, *inputs: Tensor) -> tuple[Any, list[Tensor]]:
    """(everything that was reported, outputs) of a model behind moefuse.compile."""
    before = len(moefuse.reports())
    with torch.no_grad():
        fused = moefuse.compile(model, inner="eager")
        outputs = [fused(x) for x in inputs]
    return moefuse.reports()[before:], outputs


RIGHT = [
    models.HitList,
    models.HitListStacked,
    models.HitListNoGuard,
    models.HitNumbers,
    models.HitNames,
    models.Enumerated,
    models.TwoLayers,
    models.HitPieces,
    models.Tolist,
    models.Counts,
    models.Empty,
    models.Any_,
    models.NotAny,
    models.Where,
    models.Masked,
    models.Sorted,
    models.MoeInfer,
]


@pytest.mark.parametrize("style", RIGHT)
def test_a_loop_is_one_graph_and_one_node(style: type[nn.Module]) -> None:
    model = lonely(style())
    inputs = [tokens(), tokens(1)] if style in (models.HitNumbers, models.Any_) else [tokens()]
    reports, outputs = reports_of(model, *inputs)
    sites = [site for report in reports for site in report.sites]
    assert sites
    assert all(site.fused for site in sites), [site.reason for site in sites]
    assert len({id(report) for report in reports}) == 1, "one frame, recompiled for other shapes"
    for x, got in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(got, model(x), atol=FP32, rtol=FP32)
    assert not any("forward" in vars(module) for module in model.modules()), "the model is as it was"


WRONG = {
    near_misses.FewSkipped: "it skips an expert where a value is < 2, not where it has no tokens",
    near_misses.OtherSkipped: "is skipped by the tokens of expert",
    near_misses.OtherIds: "is skipped by the tokens of expert",
    near_misses.FirstHits: "isn't known to list the experts that have tokens",
    near_misses.ManyHits: "isn't known to list all experts that have tokens",
    near_misses.Capacity: "compared with a capacity",
    near_misses.CapacityAfter: "compared with a capacity",
    near_misses.TurnedPieces: "in another order than that of the experts",
    near_misses.RangeLen: "it counts through a list that is as long as the data want",
    near_misses.Ranked: "it reads the position in a list that is as long as the data want",
    near_misses.Break: "the loop's body has `break`",
    near_misses.Counter: "sets `self.worked`",
    near_misses.LocalCounter: "leaves something behind that is no tensor",
    near_misses.NextWeights: "leaves something behind that is no tensor",
    near_misses.Decay: "is used in a later one",
    near_misses.TensorCounter: "it isn't known to be a sum over experts",
    near_misses.BufferCounter: "is used after the loop by `copy_`",
    near_misses.Callee: "sets `self.calls`",
    near_misses.Printing: "calls `print` for an effect",
    near_misses.Stale: "it isn't known to be a sum over experts",
    near_misses.AfterTheLoop: "it isn't known to be a sum over experts",
    near_misses.LengthUsed: "the list `outputs` is used for more than a torch.cat",
    near_misses.Dropped: "draws random numbers in the loop",
    near_misses.FirstChoice: "is skipped by the tokens of expert",
}


@pytest.mark.parametrize("style", WRONG)
def test_a_loop_that_does_something_else_stays_as_it_is(style: type[nn.Module]) -> None:
    model = lonely(style())
    original = copy.deepcopy(model)
    x = tokens()
    torch.manual_seed(1)
    reports, (got,) = reports_of(model, x)
    torch.manual_seed(1)
    with torch.no_grad():
        assert torch.equal(got, original(x))
    assert sum(report.fused for report in reports) == 0
    (refused,) = [site for report in reports for site in report.sites if site.check == "loop"]
    assert WRONG[style] in refused.reason
    assert f"{Path(inspect.getfile(style.forward)).name}:" in refused.source
    for name in ("worked", "calls"):
        counted = [getattr(module, name, 0) for module in model.modules()]
        assert counted == [getattr(module, name, 0) for module in original.modules()]
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, original.get_buffer(name))


def test_an_expert_left_out_is_left_out() -> None:
    model = lonely(near_misses.FirstExpert())
    x = tokens()
    reports, (got,) = reports_of(model, x)
    assert sum(report.fused for report in reports) == 0
    with torch.no_grad():
        assert torch.equal(got, model(x))


def test_a_method_is_compiled_as_its_module() -> None:
    model = lonely(models.HitList())
    x = tokens()
    with torch.no_grad():
        got = moefuse.compile(model.forward, inner="eager")(x)
    assert moefuse.reports()[-1].fused == 1
    torch.testing.assert_close(got, model(x), atol=FP32, rtol=FP32)
    assert "forward" not in vars(model)


def test_a_compiled_method_may_take_the_method_s_place() -> None:
    """`model.forward = moefuse.compile(model.forward)`: what others of the model call is then compiled, too."""
    model = lonely(models.HitList())
    x = tokens()
    with torch.no_grad():
        want = model(x)
        compiled = model.forward = moefuse.compile(model.forward, inner="eager", mode="on")  # type: ignore[method-assign]
        torch.testing.assert_close(model(x), want, atol=FP32, rtol=FP32)
        other = copy.deepcopy(model)
        for parameter in other.experts.parameters():
            parameter.mul_(-2)
        assert not torch.allclose(other(x), model(x), rtol=0.1)
    assert [(site.layer, site.fused) for site in moefuse.reports()[-1].sites] == [("", True)]
    assert vars(model)["forward"] is compiled


@pytest.mark.parametrize("style", [models.HitList, models.Counts])
def test_a_batch_without_tokens_changes_nothing_for_later_ones(style: type[nn.Module]) -> None:
    model = lonely(style())
    x = tokens()
    _, outputs = reports_of(model, x[:0], x, x[:0])
    assert [len(y) for y in outputs] == [0, 6, 0]
    # The first graph that is kept may be counted to the frame before: only the last verdict is this model's for sure.
    last = moefuse.reports()[-1].sites[-1]
    assert (last.fused, last.spec is not None and last.spec.hidden) == (True, H)
    torch.testing.assert_close(outputs[1], model(x), atol=FP32, rtol=FP32)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))])
def test_a_copy_of_a_compiled_model_keeps_its_loops(copied: Callable[[Any], Any]) -> None:
    """With weights of its own, whether the first one has run or not."""
    run = moefuse.compile(lonely(models.HitList()), inner="eager", mode="on")
    x = tokens()
    for _ in range(2):
        other = copied(run)
        with torch.no_grad():
            for parameter in other.experts.parameters():
                parameter.mul_(-2)
            torch.testing.assert_close(other(x), other._orig_mod(x), atol=FP32, rtol=FP32)
            assert moefuse.reports()[-1].sites[-1].fused
            assert not torch.allclose(other(x), run(x), rtol=0.1)


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_layers_of_several_styles_are_one_graph() -> None:
    model = Stack(models.HitList(), models.Any_(), models.HitList()).eval()
    x = torch.randn(9, H)
    (report,), (got,) = reports_of(model, x)
    assert [site.fused for site in report.sites] == [True] * 3
    assert [site.layer for site in report.sites] == ["layers.0", "layers.1", "layers.2"]
    torch.testing.assert_close(got, model(x), atol=FP32, rtol=FP32)


def test_a_wrong_loop_leaves_the_others_alone() -> None:
    model = Stack(models.HitList(), near_misses.FewSkipped(), models.HitList()).eval()
    x = torch.randn(9, H)
    reports, (got,) = reports_of(model, x)
    assert sum(report.fused for report in reports) >= 1, (
        "the graph breaks: one graph of the class serves both"
    )
    (refused,) = [site for report in reports for site in report.sites if site.check == "loop"]
    assert refused.layer == "layers.1"
    torch.testing.assert_close(got, model(x), atol=FP32, rtol=FP32)


def test_training_and_copies() -> None:
    model = models.HitListStacked()
    plain = copy.deepcopy(model)
    x = torch.randn(9, H)
    fused = moefuse.compile(model, inner="eager")
    fused(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert moefuse.reports()[-1].fused == 1
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        # Gradients are sums over tokens of values near 1: a few units in the last place of the largest.
        torch.testing.assert_close(own.grad, other.grad, atol=1e-4, rtol=FP32)
    twin: Any = copy.deepcopy(fused)
    with torch.no_grad():
        twin.gate_up_proj.zero_()
        assert not twin(x).any(), "a copy has its own weights"
        torch.testing.assert_close(fused(x), plain(x), atol=FP32, rtol=FP32)


def test_hooks_on_an_expert_are_called_as_often_as_written() -> None:
    model = lonely(models.Empty())
    calls: list[int] = []
    model.experts[0].register_forward_hook(lambda *values: calls.append(0))  # type: ignore[index, union-attr]
    x = tokens()
    reports, (got,) = reports_of(model, x)
    with torch.no_grad():
        assert torch.equal(got, model(x))
    assert calls == [], "no token chooses expert 0"
    assert "has hooks" in str([site.reason for report in reports for site in report.sites])


def test_after_an_error_the_model_is_as_it_was() -> None:
    model = models.HitList().eval()
    fused = moefuse.compile(model, inner="eager")
    x = torch.randn(9, H)
    with torch.no_grad():
        with pytest.raises(Exception, match=r"must have same reduction dim|size mismatch"):
            fused(torch.randn(9, H + 1))
        assert not any("forward" in vars(module) for module in model.modules())
        torch.testing.assert_close(fused(x), model(x), atol=FP32, rtol=FP32)
    assert all(site.fused for site in moefuse.reports()[-1].sites), "a wrong input is no reason to give up"


def test_several_threads_on_the_first_call() -> None:
    model = models.HitList().eval()
    fused = moefuse.compile(model, inner="eager")
    x = torch.randn(9, H)
    with torch.no_grad():
        want = model(x)
    found: list[bool] = []

    def work() -> None:
        with torch.no_grad():
            found.append(torch.allclose(fused(x), want, atol=FP32, rtol=FP32))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 3
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_user_s_own_forward_is_kept() -> None:
    model = models.HitList().eval()
    model.forward = lambda x: x * 2  # type: ignore[method-assign]
    x = torch.randn(3, H)
    assert torch.equal(moefuse.compile(model, inner="eager")(x), x * 2)
    assert "forward" in vars(model)


def test_explain_says_the_same() -> None:
    x = tokens()
    assert moefuse.explain(lonely(models.HitList()), x).fused == 1
    report = moefuse.explain(lonely(near_misses.FewSkipped()), x)
    assert report.fused == 0
    assert "is < 2" in str(report)


def test_mode_on_makes_it_an_error_and_mode_off_leaves_it() -> None:
    x = tokens()
    with pytest.raises(RejectedError, match=r"is < 2, not where it has no tokens"):
        moefuse.compile(lonely(near_misses.FewSkipped()), inner="eager", mode="on")(x)
    model = lonely(models.HitList())
    with torch.no_grad():
        assert torch.equal(moefuse.compile(model, inner="eager", mode="off")(x), model(x))
    assert moefuse.reports()[-1].fused == 0


def test_an_excluded_layer_keeps_its_code() -> None:
    model = Stack(models.HitList()).eval()
    x = tokens()
    before = len(moefuse.reports())
    with torch.no_grad():
        got = moefuse.compile(model, inner="eager", exclude=["layers.0"])(x)
        assert torch.equal(got, model(x))
    (refused,) = [s for r in moefuse.reports()[before:] for s in r.sites if s.check == "loop"]
    assert "excluded" in refused.reason


class Unbounded(models.Base):
    """The list is as long as the tokens: nothing says how many experts there are."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in ids.unique():
            token, slot = torch.where(ids == e)
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


def test_a_list_that_nothing_bounds_runs_as_written() -> None:
    model = lonely(Unbounded())
    x = tokens()
    reports, (got,) = reports_of(model, x)
    assert torch.equal(got, model(x))
    assert any(site.check == "loop" for report in reports for site in report.sites)


class OwnIds(models.Base):
    """Ids that are given: nothing says that they are below the number of experts."""

    def forward(self, x: Tensor) -> Tensor:
        ids = x[:, :2].long().abs()
        counts = torch.bincount(ids.flatten(), minlength=self.num_experts).tolist()
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            if counts[e] == 0:
                continue
            token, _ = torch.where(ids == e)
            y.index_add_(0, token, self.experts[e](x[token]))
        return y


def test_bincount_of_unknown_ids_is_not_taken_for_its_minlength() -> None:
    model = lonely(OwnIds())
    x = tokens() * 3
    assert int(x[:, :2].long().abs().max()) < E + 3
    reports, (got,) = reports_of(model, x)
    torch.testing.assert_close(got, model(x), atol=FP32, rtol=FP32)
    assert any("more than its minlength" in site.reason for report in reports for site in report.sites)


class Begins(nn.Module):
    """Something runs, and breaks the graph, before a loop that isn't proved; an error of the user's comes after it."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.block = lonely(near_misses.FewSkipped())
        self.fails = fails
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        torch._dynamo.graph_break()
        y = self.block(x)
        if self.fails:
            torch._dynamo.graph_break()
            raise KeyError("the user's own")
        return y


@pytest.mark.parametrize("fails", [False, True])
def test_what_has_begun_is_not_run_twice(fails: bool) -> None:
    model = Begins(fails)
    fused = moefuse.compile(model, inner="eager")
    x = tokens()
    with torch.no_grad():
        if fails:
            with pytest.raises(KeyError, match="the user's own"):
                fused(x)
        else:
            assert torch.equal(fused(x), model.block(x))
    assert model.runs == 1
