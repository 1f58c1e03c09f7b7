"""The pass on AOTAutograd's graphs, called as torchair calls it. `tests/npu/test_hooks.py` has torchair itself."""

import dis
import io
import logging

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import moefuse
from moefuse.options import OptionError
from moefuse.passes import as_torchair_pass
from moefuse.passes.pipeline import RejectedError
from tests.report.models import H, model


class Compiler:
    """A backend that runs a pass as torchair does: on a functional graph, below autograd, under a fake mode."""

    def __init__(self, hook):
        self.hook, self.graphs = hook, []
        self.backend = aot_autograd(fw_compiler=self.compile)

    def compile(self, gm, example_inputs):
        with torch._guards.detect_fake_mode(example_inputs):
            assert self.hook(gm, example_inputs, object()) is None
        self.graphs.append([str(node.target) for node in gm.graph.nodes])
        return make_boxed_func(gm.forward)


def compiled(module: nn.Module, **options):
    compiler = Compiler(as_torchair_pass(**options))
    return torch.compile(module, backend=compiler.backend), compiler


def last():
    return moefuse.reports()[-1]


def count(graph):
    return graph.count("moefuse.mega_moe.default")


def test_it_fuses_and_the_numbers_are_eagers():
    module, x = model("sum", "sum"), torch.randn(6, H)
    run, compiler = compiled(module)
    with torch.no_grad():
        got = run(x)
        # float32: another order of summation in products of 16 and 24.
        torch.testing.assert_close(got, module(x), rtol=1e-5, atol=1e-5)
    assert [site.fused for site in last().sites] == [True, True]
    assert [count(graph) for graph in compiler.graphs] == [2]


def test_training_keeps_its_gradients():
    module, x = model("sum").train(), torch.randn(6, H)
    run, _ = compiled(module)
    run(x).square().sum().backward()
    got = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(x).square().sum().backward()
    for mine, theirs in zip(got, [p.grad for p in module.parameters()], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_one_graph_for_every_token_count():
    module = model("sum")
    run, compiler = compiled(module)
    x = torch.randn(6, H)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        run(x)
        for tokens in (2, 9, 17):
            x = torch.randn(tokens, H)
            torch.testing.assert_close(run(x), module(x), rtol=1e-5, atol=1e-5)
    assert [count(graph) for graph in compiler.graphs] == [1]


def test_options_are_obeyed():
    module, x = model("sum"), torch.randn(6, H)
    with torch.no_grad():
        run, compiler = compiled(module, exclude=["*"])
        run(x)
        assert [site.check for site in last().sites] == ["exclude"]
        torch._dynamo.reset()
        run, off = compiled(module, mode="off")
        run(x)
        assert last().sites == ()
    assert [count(graph) for graph in (*compiler.graphs, *off.graphs)] == [0, 0]


def test_mode_on_makes_a_refusal_an_error():
    with torch.no_grad(), pytest.raises(Exception, match="reduced by mean") as caught:
        compiled(model("mean"), mode="on")[0](torch.randn(6, H))
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), RejectedError)


def test_a_failure_leaves_the_graph_as_it_came(monkeypatch, caplog):
    from moefuse.passes import pipeline

    def half_way(gm, *_, **__):
        gm.graph.erase_node(next(reversed(gm.graph.nodes)))
        raise AssertionError("broken rule")

    monkeypatch.setattr(pipeline, "run", half_way)
    module, x = model("sum"), torch.randn(6, H)
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="moefuse"):
        run, _ = compiled(module)
        torch.testing.assert_close(run(x), module(x), rtol=0, atol=0)
        assert "broken rule" in last().graphs[0].error
        torch._dynamo.reset()
        run, _ = compiled(module, mode="on")
        with pytest.raises(Exception, match="broken rule"):
            run(x)
    assert "the graph stays as it is" in caplog.text


def test_a_graph_without_fake_values_is_left(caplog):
    gm = torch.fx.symbolic_trace(nn.Identity())
    before = str(gm.graph)
    as_torchair_pass()(gm, [torch.zeros(1)], None)
    assert str(gm.graph) == before
    assert "meta['val']" in last().graphs[0].error
    with pytest.raises(ValueError, match="expected a node with a fake value"):
        as_torchair_pass(mode="on")(gm, [torch.zeros(1)], None)


def test_dumps(tmp_path):
    with torch.no_grad():
        compiled(model("sum"), dump=str(tmp_path))[0](torch.randn(6, H))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert any("before" in name for name in names)
    assert any("after" in name for name in names)


@pytest.mark.parametrize("name", ["inner", "verify", "round_as_eager"])
def test_what_somebody_else_decides_is_no_option(name):
    with pytest.raises(OptionError, match=rf"options\['{name}'\]: torchair compiles and runs the graph"):
        as_torchair_pass(**{name: True})
    with pytest.raises(OptionError, match="did you mean 'target'"):
        as_torchair_pass(taget="cpu")


def test_the_uuid_and_the_disassembly_tell_options_apart():
    def disassembled(hook):  # what torchair hashes
        text = io.StringIO()
        dis.dis(hook, file=text)
        return text.getvalue()

    plain, other = as_torchair_pass(), as_torchair_pass(target="reference")
    assert plain.uuid() == as_torchair_pass().uuid() != other.uuid()
    assert plain.uuid() in disassembled(plain)
    assert disassembled(plain) != disassembled(other)


# --- streams ----------------------------------------------------------------------------------------------


def graph_of(module):
    graphs = []
    with torch.no_grad():
        torch.compile(module, backend=Compiler(lambda gm, *_: graphs.append(gm)).backend)(torch.randn(6, H))
    return graphs[0]


LIBRARY = torch.library.Library("air", "FRAGMENT")  # torchair's namespace for scopes and events
if not hasattr(torch.ops.air, "tagged_event_record"):
    LIBRARY.define("tagged_event_record(str tag, bool created_inside=False) -> ()")


@pytest.mark.parametrize("place", ["before", "inside", "behind"])
def test_a_layer_that_an_event_divides_is_left(place):
    gm = graph_of(model("sum"))
    nodes = list(gm.graph.nodes)
    gemms = [node for node in nodes if "bmm" in str(node.target)]
    anchor = {"before": gemms[0], "inside": gemms[-1], "behind": nodes[-1]}[place]
    with gm.graph.inserting_before(anchor):
        event = gm.graph.call_function(torch.ops.air.tagged_event_record.default, ("e",))
    event.meta["val"] = None
    torch.fx.node.has_side_effect(event.target)
    as_torchair_pass()(gm, [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")], None)
    (site,) = last().sites
    if place == "inside":
        assert (site.fused, site.check) == (False, "streams")
        assert f"`{event.name}` stands between the first GEMM and the output" in site.reason
    else:
        assert site.fused
        assert "air.tagged_event_record" in str(gm.graph)


def test_a_layer_on_two_streams_is_left():
    gm = graph_of(model("sum"))
    first = next(node for node in gm.graph.nodes if "bmm" in str(node.target))
    first.meta["custom"] = {"stream": 1}
    as_torchair_pass()(gm, [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")], None)
    assert [site.check for site in last().sites] == ["streams"]


# --- graphs that aren't functional ------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["before", "inside", "behind"])
@pytest.mark.parametrize("through", ["itself", "a view"])
def test_a_layer_whose_rows_are_written_in_place_is_left(place, through):
    """The node reads them where the layer ends, and the model read them before."""
    aten, gm = torch.ops.aten, graph_of(model("sum"))
    nodes = list(gm.graph.nodes)
    gemms = [node for node in nodes if "bmm" in str(node.target)]
    first = next(node for node in nodes if node.op == "call_function")
    anchor = {"before": first, "inside": gemms[-1], "behind": nodes[-1]}[place]
    (rows,) = (n for n in gm.graph.find_nodes(op="placeholder") if n.meta["val"].shape == (6, H))
    with gm.graph.inserting_before(anchor):
        shown = rows if through == "itself" else gm.graph.call_function(aten.view.default, (rows, [-1]))
        shown.meta["val"] = rows.meta["val"] if through == "itself" else rows.meta["val"].view(-1)
        write = gm.graph.call_function(aten.mul_.Tensor, (shown, 2.0))
    write.meta["val"] = shown.meta["val"]
    as_torchair_pass()(gm, [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")], None)
    (site,) = last().sites
    assert site.fused == (place != "inside")
    if place == "inside":
        assert (site.check, f"`{write.name}` writes in place" in site.reason) == ("in_place", True)
