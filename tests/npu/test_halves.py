"""The combine that has the next layer's norm in it: a layer ends within it, and the rest stays as it was."""

import operator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import moefuse
import tests.npu.ready  # noqa: F401  (before the operators)
from moefuse.passes.halves import WHOLE, join, split
from moefuse.testing import capture_graph
from tests.npu import shells
from tests.npu.sequences import E
from tests.npu.shells import MLPS
from tests.npu.test_shells import LOOP, by_slots, off, operands

NAME = f"{WHOLE.replace('::', '.')}.default"


def targets_of(graph_module: GraphModule) -> list[str]:
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD", 1), ("RANK", 0), ("LOCAL", E)):
        monkeypatch.setattr(shells, name, value)


@pytest.mark.parametrize("scheme", MLPS)
def test_the_layer_is_one_node_and_the_norm_stays(scheme: str, one_rank: None) -> None:
    arguments = operands(scheme, E)
    graph = capture_graph(partial(shells.mc2_and_norm, scheme=scheme), arguments)
    fused = moefuse.fuse(graph.graph_module, options={"target": "reference"})
    assert fused.report.fused == 1, fused.report
    names = targets_of(fused.graph_module)
    assert sum("mega_moe" in name for name in names) == 1
    assert names.count("npu.npu_add_rms_norm.default") == 1
    assert not [name for name in names if "distribute" in name]
    got, want = fused.graph_module(*graph.inputs)[0], shells.mc2_and_norm(*arguments, scheme=scheme)
    tokens, hidden = arguments[0].shape
    assert got.shape == want.shape == (tokens, 2, hidden)
    assert off(got, want) < 1e-2  # bfloat16, whose sums the combine may round in another place
    x = arguments[0].double() + by_slots(scheme, *arguments)
    normed = (
        x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * torch.linspace(0.5, 1.5, hidden).double()
    )
    assert off(got, torch.stack([normed, x], dim=1)) < LOOP


def test_what_is_not_fused_is_as_it_was(one_rank: None) -> None:
    """Two layers, and one of them isn't understood; its operands are those of the fused one's graph."""

    def model(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
        first = shells.mc2_and_norm(x, logits, *tensors)
        return shells.mc2_and_norm(first[:, 0].flip(0), -logits, *tensors)

    arguments = operands("bf16", E)
    graph = capture_graph(model, arguments)
    second = [node for node in graph.graph_module.graph.nodes if str(node.target) == NAME][1]
    second.kwargs = {**second.kwargs, "norm_eps": 1e-6}
    rows: Any = second.args[0]
    with graph.graph_module.graph.inserting_before(second):  # the rows of the second layer are lost
        strange = graph.graph_module.graph.call_function(torch.ops.aten.flip.default, (rows, [1]))
    strange.meta["val"] = rows.meta["val"]
    second.args = (strange, *second.args[1:])
    name, kwargs, shapes = second.name, dict(second.kwargs), [t.shape for t in second.meta["val"]]
    fused = moefuse.fuse(graph.graph_module, options={"target": "reference"})
    assert fused.report.fused == 1, fused.report
    (left,) = [node for node in fused.graph_module.graph.nodes if str(node.target) == NAME]
    assert str(left.args[0].target) == "aten.flip.default"
    assert [t.shape for t in left.meta["val"]] == shapes
    assert (left.name, left.args[7:]) == (name, (shells.GROUP, 1, 0, E))
    assert left.kwargs == {name: value for name, value in kwargs.items() if name != "norm_eps"}  # the default
    assert {user.target for user in left.users} == {operator.getitem}
    assert targets_of(fused.graph_module).count("npu.npu_add_rms_norm.default") == 1  # of the first
    fused.graph_module.graph.lint()


@pytest.mark.parametrize("argument", ["out_dtype", "group_list_type"])
def test_what_the_second_combine_has_not_is_left(argument: str, one_rank: None) -> None:
    graph = capture_graph(shells.mc2_and_norm, operands("bf16", E)).graph_module
    node: Node = next(node for node in graph.graph.nodes if str(node.target) == NAME)
    node.kwargs = {**node.kwargs, argument: 1}
    before = str(graph.graph)
    assert split(graph.graph) == []
    report = moefuse.fuse(graph, options={"target": "reference"}).report
    assert report.fused == 0
    assert str(graph.graph) == before


def test_both_halves_are_one_again(one_rank: None) -> None:
    graph = capture_graph(shells.mc2_and_norm, operands("bf16", E)).graph_module.graph
    before = str(graph)
    halves = split(graph)
    assert len(halves) == 1
    assert WHOLE.split("::")[1] + "(" not in str(graph)
    join(graph, halves)
    assert str(graph) == before
    graph.lint()
