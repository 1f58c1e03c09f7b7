"""moefuse as a pass of Inductor: the same numbers, cached under its uuid, untouched graphs where it can't work."""

import logging

import pytest
import torch
from torch import nn

import moefuse
from moefuse.graph.capture import CaptureError
from moefuse.passes import as_inductor_pass
from moefuse.passes.inductor import _take_over
from moefuse.passes.pipeline import RejectedError
from tests.report.models import H, model


def compiled(module: nn.Module, hook: str = "pre_grad_custom_pass", **options):
    return torch.compile(module, options={hook: as_inductor_pass(**options)})


def last():
    return moefuse.reports()[-1]


def test_it_fuses_and_the_numbers_are_eagers():
    module, x = model("sum", "sum"), torch.randn(6, H)
    with torch.no_grad():
        got = compiled(module)(x)
        assert [site.fused for site in last().sites] == [True, True]
        # float32: another order of summation in products of 16 and 24.
        torch.testing.assert_close(got, module(x), rtol=1e-5, atol=1e-5)


def test_training_gets_its_gradients():
    module, x = model("sum").train(), torch.randn(6, H)
    compiled(module)(x).square().sum().backward()
    got = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(x).square().sum().backward()
    assert last().fused == 1
    for mine, theirs in zip(got, [p.grad for p in module.parameters()], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_buffer_that_the_model_writes_is_written():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = model("sum")
            self.register_buffer("runs", torch.zeros(()))

        def forward(self, x):
            self.runs.add_(1)
            return self.moe(x)

    module, x = Counting().eval(), torch.randn(6, H)
    with torch.no_grad():
        run = compiled(module)
        run(x)
        run(x)
    assert last().fused == 1
    assert module.runs == 2


@pytest.mark.parametrize(
    "hook", ["joint_custom_pre_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass"]
)
def test_later_hooks_leave_the_graph_and_say_so(hook, caplog):
    module, x = model("sum"), torch.randn(6, H)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "moefuse"):
        torch.testing.assert_close(compiled(module, hook)(x), module(x), rtol=1e-5, atol=1e-5)
    assert last().fused == 0
    assert "give the pass to Inductor as pre_grad_custom_pass" in last().graphs[-1].note


def test_vllms_pass_manager_can_hold_it():
    """vLLM calls its passes one after the other on the post-grad graph and joins their uuids into a cache key."""

    class PassManager:
        def __init__(self):
            self.passes = []

        def add(self, pass_):
            self.passes.append(pass_)

        def __call__(self, graph):
            for pass_ in self.passes:
                pass_(graph)

        def uuid(self):
            return [pass_.uuid() for pass_ in self.passes]

    manager, module, x = PassManager(), model("sum"), torch.randn(6, H)
    manager.add(as_inductor_pass())
    with torch.no_grad():
        run = torch.compile(module, options={"post_grad_custom_post_pass": manager})
        torch.testing.assert_close(run(x), module(x), rtol=1e-5, atol=1e-5)
    assert "decomposed already" in last().graphs[-1].note
    assert manager.uuid() == [as_inductor_pass().uuid()]


def test_mode_on_makes_an_obstacle_an_error():
    module, x = model("mean"), torch.randn(6, H)
    with torch.no_grad(), pytest.raises(Exception, match="reduced by mean") as caught:
        compiled(module, mode="on")(x)
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), RejectedError)
    graph = torch.fx.symbolic_trace(torch.nn.Identity()).graph
    with pytest.raises(CaptureError, match="decomposed already"):
        as_inductor_pass(mode="on")(graph)


def test_autocast_is_left_to_the_backend():
    module, x = model("sum"), torch.randn(6, H)
    with torch.no_grad(), torch.autocast("cpu"):
        compiled(module)(x)
    assert "under autocast" in last().graphs[-1].note


def test_the_uuid_tells_options_apart():
    assert as_inductor_pass().uuid() == as_inductor_pass().uuid()
    assert as_inductor_pass(target="reference").uuid() != as_inductor_pass().uuid()
    with pytest.raises(moefuse.OptionError, match="did you mean 'target'"):
        as_inductor_pass(taget="cpu")
    with pytest.raises(
        moefuse.OptionError, match=r"options\['verify'\]: Inductor compiles and runs the graph"
    ):
        as_inductor_pass(verify=True)


def test_dumps(tmp_path):
    with torch.no_grad():
        compiled(model("sum"), dump=tmp_path)(torch.randn(6, H))
    (after,) = tmp_path.glob("graph*.after.txt")
    (before,) = tmp_path.glob("graph*.before.txt")
    assert [("moefuse.mega_moe" in path.read_text(encoding="utf-8")) for path in (before, after)] == [
        False,
        True,
    ]


def test_what_a_new_graph_reads_is_taken_over_and_what_is_there_stays() -> None:
    module, source = nn.Module(), nn.Module()
    module.part, source.part = nn.Linear(1, 1), nn.Linear(1, 1)
    source.part.register_buffer("more", torch.ones(1))
    kept = module.part.weight
    for path in ("part.weight", "part.more", "new.other"):
        source.new = nn.Module()
        source.new.other = torch.zeros(2)
        _take_over(module, source, path)
    assert module.part.weight is kept
    assert module.part.more is source.part.more
    assert module.new.other.shape == (2,)
