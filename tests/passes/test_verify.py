"""verify=True: a right node passes, a wrong one is caught on the first real inputs, and nothing runs it again."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse
from moefuse import targets
from moefuse.ops.kernels import register_kernel
from moefuse.passes.verify import difference, tolerance
from moefuse.targets.cpu import CpuTarget
from tests.moe_model import E, H, Model, Routed

X = torch.randn(6, H, generator=torch.Generator().manual_seed(0))
LOGITS = torch.randn(6, E, generator=torch.Generator().manual_seed(1))


def compiled(model: torch.nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="moefuse", options={"inner": "eager", "verify": True, **options})


class WrongTarget(CpuTarget):
    """The cpu target, off by one per cent of each token, in one layer only if `layer` says so."""

    def __init__(self, error: float = 0.01, only: int | None = None) -> None:
        self.error, self.only, self.calls = error, only, 0

    def run(self, *args: Any) -> tuple[Tensor, Tensor]:
        y, nums = super().run(*args)
        hit = self.only is None or self.calls == self.only
        self.calls += 1
        return (y * (1 + self.error) if hit else y), nums


@pytest.fixture
def wrong() -> Iterator[WrongTarget]:
    target = WrongTarget()
    register_kernel("cpu", target.run)
    yield target
    register_kernel("cpu", targets.get("cpu").run)


# --- the measure -----------------------------------------------------------------------------------------


def test_the_difference_is_the_worst_token_s() -> None:
    old = torch.nn.functional.normalize(torch.randn(50, 8), dim=1)
    new = old.clone()
    new[3] *= 1.1
    new[7] *= 1.25
    assert difference(old, new) == pytest.approx(0.25, rel=1e-5)
    assert difference(old, old.clone()) == 0


def test_a_token_whose_experts_cancel_out_is_no_alarm() -> None:
    old = torch.randn(50, 8)
    old[3] = 1e-9
    new = old.clone()
    new[3] = -1e-9
    assert difference(old, new) < 1e-8


def test_nan_in_both_is_equal_and_in_one_is_not() -> None:
    old = torch.randn(4, 8)
    old[1, 2] = float("nan")
    assert difference(old, old.clone()) == 0
    assert difference(old, torch.zeros(4, 8)) == float("inf")


def test_zero_outputs_are_compared() -> None:
    assert difference(torch.zeros(4, 8), torch.zeros(4, 8)) == 0
    assert difference(torch.zeros(4, 8), torch.ones(4, 8)) > 1


# --- in the backend --------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_right_node_is_verified_and_stays(inner: str) -> None:
    model = Routed()
    run = compiled(model, inner=inner)
    with torch.no_grad():
        run(X, LOGITS)
    (site,) = moefuse.reports()[-1].sites
    assert site.fused
    assert site.verified is not None
    assert site.spec is not None
    assert 0 < site.verified < tolerance(site.spec), "another order of sums: neither equal nor far"
    assert "verified: differs by" in str(moefuse.reports()[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_far_below_its_tolerance(dtype: torch.dtype) -> None:
    run = compiled(Model().to(dtype))
    with torch.no_grad():
        run(X.to(dtype))
    for site in moefuse.reports()[-1].sites:
        assert site.spec is not None
        assert site.verified is not None
        assert site.verified < tolerance(site.spec) / 2


def test_a_wrong_node_is_left_and_said(wrong: WrongTarget, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    run = compiled(model)
    with torch.no_grad(), caplog.at_level("WARNING", logger="moefuse"):
        for _ in range(2):
            assert torch.equal(run(X), model(X)), "the graph runs as it came"
    report = moefuse.reports()[-1]
    assert [(site.fused, site.check) for site in report.sites] == [(False, "verify")] * 2
    assert "layers.0.experts: the node differs from its region by 0.01" in report.sites[0].reason
    assert "not fused: layers.0.experts" in caplog.text
    assert wrong.calls == 2, "one run per layer, none after the verdict"


def test_one_wrong_layer_is_told_from_a_right_one(wrong: WrongTarget) -> None:
    wrong.only = 0
    model = Model()
    with torch.no_grad():
        assert torch.equal(compiled(model)(X), model(X))
    first, second = moefuse.reports()[-1].sites
    assert first.verified == pytest.approx(0.01, rel=0.01)
    assert second.verified is not None
    assert second.verified < 1e-5, "the first layer's error isn't carried into the second"
    assert "verify=True found a difference in layers.0.experts" in second.reason


def test_mode_on_raises_each_time(wrong: WrongTarget) -> None:
    run = compiled(Model(), mode="on")
    for _ in range(2):
        with (
            torch.no_grad(),
            pytest.raises(moefuse.VerifyError, match=r"layers\.1\.experts: the node differs"),
        ):
            run(X)


def test_without_tokens_the_next_call_is_compared(wrong: WrongTarget) -> None:
    model = Routed()
    run = compiled(model)
    with torch.no_grad():
        torch._dynamo.mark_dynamic(x := X[:0].clone(), 0)
        torch._dynamo.mark_dynamic(logits := LOGITS[:0].clone(), 0)
        run(x, logits)
        assert all(site.verified is None for site in moefuse.reports()[-1].sites)
        assert torch.equal(run(X, LOGITS), model(X, LOGITS))
    assert [site.check for graph in moefuse.reports()[-1].graphs for site in graph.sites][-1] == "verify"


def test_buffers_random_numbers_and_gradients_are_as_without() -> None:
    model = Model(train=True)
    x = X.clone().requires_grad_()
    wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    runs, state = int(model.layers[0].runs), torch.get_rng_state()
    got = torch.autograd.grad(compiled(model)(x).square().sum(), [x, *model.parameters()])
    assert int(model.layers[0].runs) == runs + 1, "the check counts no run of its own"
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)  # gradients are sums of products up to 1e2
    assert all(site.verified is not None for site in moefuse.reports()[-1].sites)


def test_explain_verifies_too(wrong: WrongTarget) -> None:
    model = Model()
    report = moefuse.explain(model, X, moefuse_options={"verify": True})
    assert [site.check for site in report.sites] == ["verify"] * 2
    wrong.error = 0.0
    report = moefuse.explain(model, X, moefuse_options={"verify": True})
    assert report.fused == 2
    assert all(site.verified is not None for site in report.sites)


def test_on_the_meta_device_nothing_is_verified() -> None:
    with torch.device("meta"):
        report = moefuse.explain(
            Model(), torch.empty(6, H), moefuse_options={"verify": True, "target": "reference"}
        )
    assert report.fused == 2
    assert all(site.verified is None for site in report.sites)
