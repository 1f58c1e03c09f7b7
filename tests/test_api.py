"""explain, fuse and reports: what they tell, and that they change nothing."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import moefuse
from tests.moe_model import E, Experts, H, I, K, Model

X = torch.randn(6, H, generator=torch.Generator().manual_seed(0))


# --- explain ---------------------------------------------------------------------------------------------


def test_explain_tells_every_layer() -> None:
    report = moefuse.explain(Model("sum", "amax"), X)
    one, two = report.sites
    assert (one.layer, one.fused, one.reason, one.target) == ("layers.0.experts", True, "", "cpu")
    assert one.spec is not None
    assert one.spec.describe() == f"{E} experts, top-{K}, {H} -> {I} (swiglu) -> {H}, float32"
    assert one.bytes == 4 * E * (2 * I * H + H * I)
    assert (two.layer, two.fused, two.check) == ("layers.1.experts", False, "lift")
    assert "reduced by amax, not by a sum" in two.reason
    for site, words in ((one, "rows.sum(1)"), (two, "rows.amax(1)")):
        file, _, line = site.source.rpartition(":")
        assert Path(file).name == "moe_model.py"
        assert words in Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert report.fused == 1
    assert [graph.error for graph in report.graphs] == [""]


BOTH = [("layers.0.experts", True), ("layers.1.experts", True)]


@pytest.mark.parametrize("backend", ["moefuse", "eager"])
def test_explain_opens_a_compiled_model(backend: str) -> None:
    """As torch.compile does when it compiles one again: what is asked about is the model in it."""
    compiled = torch.compile(Model(), backend=backend)
    if backend == "moefuse":
        compiled = moefuse.compile(Model(), inner="eager")
    for model in (compiled, moefuse.compile(Model().forward, inner="eager")):
        report = moefuse.explain(model, X)
        assert [(site.layer, site.fused) for site in report.sites] == BOTH
        assert report.notes == ()


def test_explain_goes_through_compiled_parts_of_a_model() -> None:
    model = Model()
    model.forward = moefuse.compile(model.forward, inner="eager")  # type: ignore[method-assign]
    report = moefuse.explain(model, X)
    assert [(site.layer, site.fused) for site in report.sites] == BOTH
    assert report.notes == ()


class Stacked(torch.nn.Module):
    """Every expert, a module of its own, on every token: no rule knows the stack of their outputs."""

    def __init__(self, chooses: bool) -> None:
        super().__init__()
        self.chooses = chooses
        self.router = torch.nn.Linear(H, E)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(H, H) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        if self.chooses:
            weights, ids = scores.topk(K)
            scores = torch.zeros_like(scores).scatter(-1, ids, weights)
        return (torch.stack([expert(x) for expert in self.experts], 1) * scores[..., None]).sum(1)


def test_a_graph_without_a_layer_says_where_something_is_chosen() -> None:
    (graph,) = moefuse.explain(Stacked(True), X).graphs
    assert graph.sites == ()
    assert graph.note.startswith("`topk` (")
    assert "test_api.py:" in graph.note
    assert "chooses something, and no rule connects it with the products of this graph" in graph.note
    assert moefuse.explain(Stacked(False), X).graphs[0].note == "no routing operation in this graph"
    small = moefuse.explain(lambda x: x.topk(2)[0], X)  # no products that a layer could have
    assert small.graphs[0].note == ""


def test_what_is_fused_already_is_no_failure() -> None:
    result = moefuse.fuse(exported(Experts().requires_grad_(False), X, IDS, W))
    again = moefuse.fuse(exported(result.graph_module, X, IDS, W)).report
    assert again.graphs[0].note == "moefuse's own nodes are in this graph already"
    assert "What to try" not in str(again)


@pytest.mark.parametrize("wrong", ["mixtral", {"a": 1}])
def test_explain_and_compile_say_what_a_model_is(wrong: Any) -> None:
    for function in (moefuse.explain, moefuse.compile):
        with pytest.raises(TypeError, match=r"model: expected a module.* a function.*, got ") as caught:
            function(wrong)
        assert str(caught.value).endswith(f"got {type(wrong).__name__} {wrong!r}")


def test_explain_has_no_inner_compiler() -> None:
    options = {"inner": "inductor", "inner_options": {"max_autotune": True}}
    assert moefuse.explain(Model(), X, moefuse_options=options).fused == 2
    with pytest.raises(moefuse.OptionError, match="options: expected a dict"):
        moefuse.explain(Model(), X, moefuse_options="on")  # type: ignore[arg-type]


def test_a_report_prints_as_a_table() -> None:
    text = str(moefuse.explain(Model("sum", "amax"), X))
    assert "1 of 2 MoE layers fused in 1 graph" in text
    assert "reduced by amax" in text
    assert "moe_model.py:" in text


def test_explain_leaves_numbers_and_buffers_as_one_run_does() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    twin(X)
    state = torch.get_rng_state()
    moefuse.explain(model, X)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, got), expected in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, msg=name)
    assert model.layers[0].runs == 1


def test_explain_runs_what_was_captured_and_nothing_else() -> None:
    """Bit-equal to eager even where the rewrite would round differently."""
    seen: list[Tensor] = []
    model = Model()

    def keep(x: Tensor) -> Tensor:
        seen.append(model(x))
        return seen[-1]

    moefuse.explain(keep, X)
    torch.testing.assert_close(seen[-1], model(X), rtol=0, atol=0)


def test_explain_on_the_meta_device_needs_no_weights() -> None:
    with torch.device("meta"):
        model = Model()
        x = torch.empty(6, H)
    report = moefuse.explain(model, x, moefuse_options={"target": "reference"})
    assert [(site.layer, site.fused) for site in report.sites] == [
        ("layers.0.experts", True),
        ("layers.1.experts", True),
    ]
    assert next(model.parameters()).device.type == "meta"


def test_explain_on_the_meta_device_says_what_no_target_can() -> None:
    with torch.device("meta"):
        report = moefuse.explain(Model("sum"), torch.empty(6, H), moefuse_options={"meta_device": "abacus"})
    (site,) = report.sites
    assert not site.fused
    assert "no target runs on 'abacus'" in site.reason


def test_a_model_without_weights_is_judged_as_on_the_cpu_unless_told_otherwise() -> None:
    with torch.device("meta"):
        model, x = Model("sum"), torch.empty(6, H)
    (site,) = moefuse.explain(model, x).sites
    assert (site.fused, site.target, site.spec.device) == (True, "cpu", "cpu")
    # Real weights are where they are.
    (site,) = moefuse.explain(Model("sum"), X, moefuse_options={"meta_device": "npu"}).sites
    assert (site.fused, site.target) == (True, "cpu")
    with pytest.raises(moefuse.OptionError, match=r"meta_device.*such as cpu, cuda or npu, got 'cuda:0'"):
        moefuse.explain(model, x, moefuse_options={"meta_device": "cuda:0"})


def test_explain_of_an_exported_program() -> None:
    program = torch.export.export(Model().requires_grad_(False).eval(), (X,))
    report = moefuse.explain(program)
    assert [site.fused for site in report.sites] == [True, True]
    assert report.sites[0].region is not None
    with pytest.raises(TypeError, match="an ExportedProgram has its own, expected none"):
        moefuse.explain(program, X)


def test_explain_takes_options_and_keyword_arguments() -> None:
    report = moefuse.explain(Model(), x=X, moefuse_options={"exclude": ["layers.0.*"], "target": "reference"})
    one, two = report.sites
    assert (one.fused, one.check) == (False, "exclude")
    assert (two.fused, two.target) == (True, "reference")
    with pytest.raises(moefuse.OptionError, match="unknown option 'targett'; did you mean 'target'"):
        moefuse.explain(Model(), X, moefuse_options={"targett": "cpu"})


def test_explain_of_a_model_without_moe() -> None:
    report = moefuse.explain(torch.nn.Linear(H, H), X)
    assert not report.sites
    assert report.graphs[0].note == "no routing operation in this graph"
    assert "No MoE layer was found." in str(report)


def test_explain_of_a_broken_graph_tells_every_part() -> None:
    one, two = Model("sum").requires_grad_(False), Model("amax").requires_grad_(False)

    def broken(x: Tensor) -> Tensor:
        y = one(x)
        torch._dynamo.graph_break()
        return two(y)

    report = moefuse.explain(broken, X)
    assert [site.fused for site in report.sites] == [True, False]
    assert len(report.graphs) == 2


def test_explain_again_and_again() -> None:
    """Dynamo stops compiling a function after eight recompilations; explaining must not run out of them."""
    for number in range(12):
        report = moefuse.explain(Model("sum" if number % 2 else "amax"), torch.randn(3 + number, H))
        assert [site.fused for site in report.sites] == [bool(number % 2)], number


def test_explain_writes_a_dump(tmp_path: Path) -> None:
    report = moefuse.explain(Model(), X, moefuse_options={"dump": str(tmp_path)})
    index = report.graphs[0].index
    names = {path.name for path in tmp_path.iterdir()}
    assert {f"graph{index}.before.txt", f"graph{index}.after.txt", "report.txt", "report.json"} <= names
    assert "moefuse.mega_moe" in (tmp_path / f"graph{index}.after.txt").read_text(encoding="utf-8")
    assert "moefuse.mega_moe" not in (tmp_path / f"graph{index}.before.txt").read_text(encoding="utf-8")


def test_explain_does_not_fill_the_journal() -> None:
    before = len(moefuse.reports())
    moefuse.explain(Model(), X)
    assert len(moefuse.reports()) == before


def test_mode_on_makes_explain_raise() -> None:
    with pytest.raises(Exception, match="1 MoE layer") as caught:
        moefuse.explain(Model("amax"), X, moefuse_options={"mode": "on"})
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), moefuse.RejectedError)


# --- fuse ------------------------------------------------------------------------------------------------


def exported(model: torch.nn.Module, *inputs: Any) -> torch.export.ExportedProgram:
    return torch.export.export(model, inputs)


IDS = torch.randn(6, E, generator=torch.Generator().manual_seed(1)).topk(K)[1]
W = torch.rand(6, K, generator=torch.Generator().manual_seed(2))


def test_fuse_of_an_exported_program() -> None:
    model = Experts().requires_grad_(False)
    result = moefuse.fuse(exported(model, X, IDS, W))
    assert result.report.fused == 1
    (got,) = torch.utils._pytree.tree_leaves(result.graph_module(X, IDS, W))
    # The same products summed in another order.
    torch.testing.assert_close(got, model(X, IDS, W), rtol=1e-5, atol=1e-5)


def test_fuse_leaves_the_given_graph_alone() -> None:
    program = exported(Experts().requires_grad_(False), X, IDS, W)
    gm = program.module()
    before = str(gm.graph)
    assert moefuse.fuse(gm, [X, IDS, W]).report.fused == 1
    assert str(gm.graph) == before


def test_fuse_takes_options() -> None:
    program = exported(Experts().requires_grad_(False), X, IDS, W)
    (site,) = moefuse.fuse(program, options={"target": "reference"}).report.sites
    assert site.target == "reference"
    with pytest.raises(moefuse.RejectedError):
        moefuse.fuse(exported(Experts("amax").requires_grad_(False), X, IDS, W), options={"mode": "on"})
    off = moefuse.fuse(program, options={"mode": "off"}).report
    assert (off.fused, off.graphs[0].note) == (0, "mode='off': nothing is fused")
    with pytest.raises(
        moefuse.OptionError, match=r"options\['verify'\]: the caller of moefuse.fuse compiles"
    ):
        moefuse.fuse(program, options={"verify": True})


def test_fuse_dumps(tmp_path: Path) -> None:
    moefuse.fuse(exported(Experts().requires_grad_(False), X, IDS, W), options={"dump": tmp_path})
    before, after = (
        (tmp_path / f"graph0.{stage}.txt").read_text(encoding="utf-8") for stage in ("before", "after")
    )
    assert ("moefuse.mega_moe" in before, "moefuse.mega_moe" in after) == (False, True)
    assert (tmp_path / "report.json").is_file()


def test_fuse_needs_inputs_where_none_are_recorded() -> None:
    gm = torch.fx.symbolic_trace(lambda x, ids: x[ids])
    with pytest.raises(ValueError, match="example_inputs: placeholder 'x' has no recorded value"):
        moefuse.fuse(gm)
    with pytest.raises(ValueError, match="expected 2 values, one per placeholder, got 1"):
        moefuse.fuse(gm, [X])
    assert isinstance(moefuse.fuse(gm, [X, IDS]).graph_module, GraphModule)


def test_fuse_of_something_else_is_a_clear_error() -> None:
    with pytest.raises((TypeError, ValueError), match="graph: expected"):
        moefuse.fuse(Model())  # type: ignore[arg-type]


# --- the package -----------------------------------------------------------------------------------------


def test_the_public_names_exist() -> None:
    for name in moefuse.__all__:
        assert getattr(moefuse, name) is not None


def test_importing_moefuse_is_light() -> None:
    """torch and networkx at most: no rich, typer, transformers or graphviz, and Dynamo isn't started."""
    code = (
        "import sys, torch; before = set(sys.modules); import moefuse; "
        "print([m for m in ('rich', 'typer', 'transformers', 'graphviz', 'torch._dynamo') "
        "if m in sys.modules and m not in before])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert out.stdout.strip() == "[]"
