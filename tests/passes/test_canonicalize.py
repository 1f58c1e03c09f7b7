"""Canonicalisation removes views that change nothing and shares equal ones; everything else stays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from moefuse.passes.canonicalize import canonicalize
from moefuse.patterns.rules import op_name
from moefuse.testing.capture import capture_graph

X = torch.randn(6, 16)


def ops(gm: GraphModule) -> list[str]:
    return [op_name(node).removeprefix("aten::") for node in gm.graph.nodes if node.op == "call_function"]


def canonical(function: Callable[..., Any], *inputs: Tensor, training: bool = False) -> list[str]:
    """The operators that are left; the result is checked against the function."""
    captured = capture_graph(function, inputs)
    before = len(captured.graph_module.graph.nodes)
    gone = canonicalize(captured.graph_module.graph, training)
    captured.graph_module.graph.lint()
    captured.graph_module.recompile()
    assert before - len(captured.graph_module.graph.nodes) == gone
    (got,) = captured.graph_module(*inputs)
    torch.testing.assert_close(got, function(*inputs), rtol=0, atol=0)
    return ops(captured.graph_module)


NO_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(6, 16) + 1,
    "reshape": lambda x: x.reshape(6, 16) + 1,
    "slice": lambda x: x[0:6] + 1,
    "slice to the end": lambda x: x[0:99] + 1,
    "expand": lambda x: x.expand(6, 16) + 1,
    "squeeze of nothing": lambda x: x.squeeze(1) + 1,
    "several": lambda x: x[0:6].view(6, 16)[0:6].expand(6, -1) + 1,
}


def test_a_temporary_result_is_not_written_in_place() -> None:
    def norm(x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (16,), None, 1e-6)

    assert "add_" in ops(capture_graph(norm, (X,)).graph_module)
    assert canonical(norm, X) == ["pow", "mean", "add", "rsqrt", "mul"]


@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize("source", ["placeholder", "sin", "t"])
def test_only_a_temporary_result_is_spared_the_write(source: str, readers: int) -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = X
    if source != "placeholder":
        node = graph.call_function(getattr(torch.ops.aten, source).default, (node,))
        node.meta["val"] = X.t() if source == "t" else X
    written = graph.call_function(torch.ops.aten.add_.Scalar, (node, 1.0))
    written.meta["val"] = node.meta["val"]
    graph.output([written, node][:readers])
    canonicalize(graph, training=False)
    in_place = written.target is torch.ops.aten.add_.Scalar
    assert in_place == (source != "sin" or readers == 2)


@pytest.mark.parametrize("name", NO_OPS)
def test_views_that_change_nothing_go(name: str) -> None:
    assert canonical(NO_OPS[name], X) == ["add"]


EFFECTIVE: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "view to another shape": (lambda x: x.view(3, 32) + 1, ["view", "add"]),
    "slice of a part": (lambda x: x[1:] + 1, ["slice", "add"]),
    "slice with a step": (lambda x: x[::2] + 1, ["slice", "add"]),
    "transpose": (lambda x: x.t() + 1, ["t", "add"]),
    "clone": (lambda x: x.clone().add(1), ["clone", "add"]),
    "contiguous copy": (lambda x: x.t().contiguous() + 1, ["t", "clone", "add"]),
    "cast": (lambda x: x.to(torch.float64) + 1, ["_to_copy", "add"]),
    "times one": (lambda x: x * 1.0, ["mul"]),
    "two copies": (lambda x: x.clone() + x.clone(), ["clone", "clone", "add"]),
    "the same sum twice": (lambda x: (x + 1) * (x + 1), ["add", "add", "mul"]),
}


@pytest.mark.parametrize("name", EFFECTIVE)
def test_everything_else_stays(name: str) -> None:
    function, expected = EFFECTIVE[name]
    assert canonical(function, X) == expected


def test_detach_is_an_alias_unless_gradients_are_wanted() -> None:
    assert canonical(lambda x: x.detach() + 1, X) == ["add"]
    assert canonical(lambda x: x.detach() + 1, X, training=True) == ["detach", "add"]


def test_square_transposes_are_no_no_ops() -> None:
    """Same shape, other strides."""
    assert canonical(lambda x: x.transpose(0, 1) + 1, torch.randn(4, 4)) == ["transpose", "add"]


def test_equal_views_are_shared() -> None:
    assert canonical(lambda x: x.view(3, 32) + x.view(3, 32), X) == ["view", "add"]
    assert canonical(lambda x: x.select(0, 1) + x.select(0, 1), X) == ["select", "add"]
    assert canonical(lambda x: x.t()[0] + x.t()[0], X) == ["t", "select", "add"]


def test_views_that_differ_are_not_shared() -> None:
    assert canonical(lambda x: x.select(0, 1) + x.select(0, 2), X) == ["select", "select", "add"]
    assert canonical(lambda x: x[1:3] + x[2:4], X) == ["slice", "slice", "add"]
    assert canonical(lambda x: x.view(96)[1] + x.view(96).clone()[1], X) == [
        "view",
        "select",
        "clone",
        "select",
        "add",
    ]


def test_dead_nodes_go() -> None:
    captured = capture_graph(lambda x: x + 1, (X,))
    graph = captured.graph_module.graph
    (x,) = graph.find_nodes(op="placeholder")
    with graph.inserting_after(x):
        graph.call_function(torch.ops.aten.exp.default, (x,))
    assert canonicalize(graph, training=False) == 1
    assert ops(captured.graph_module) == ["add"]


def test_symbolic_sizes_are_compared_without_guards() -> None:
    captured = capture_graph(lambda x: x.view(x.shape[0], 16)[: x.shape[0]] + 1, (X,), dynamic={0: [0]})
    (x,) = captured.graph_module.graph.find_nodes(op="placeholder")
    shape_env = x.meta["val"].shape[0].node.shape_env
    guards = len(shape_env.guards)
    canonicalize(captured.graph_module.graph, training=False)
    assert ops(captured.graph_module) == ["add"]
    assert len(shape_env.guards) == guards


def test_a_second_run_changes_nothing() -> None:
    captured = capture_graph(lambda x: x.view(6, 16).view(3, 32) + x.view(3, 32), (X,))
    assert canonicalize(captured.graph_module.graph, training=False) > 0
    assert canonicalize(captured.graph_module.graph, training=False) == 0


def test_numbers_are_read_off_what_was_stacked_for_it() -> None:
    """Otherwise each number would wait for all of the tensors: counts that are exchanged, beside a rank's own."""

    def both(x: Tensor) -> Tensor:
        stacked = torch.stack([x[:, 0].long(), x[:, 1].long()])
        return x * stacked[1][2].item()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        left = canonical(both, X)
    assert "stack" not in left


STACKS: dict[str, Callable[[Tensor], Tensor]] = {
    "returned": lambda x: torch.stack([x, x + 1])[1],
    "computed with": lambda x: torch.stack([x, x + 1])[0] * 2,
    "along another dimension": lambda x: x * torch.stack([x[0].long(), x[1].long()], 1)[0][1].item(),
}


@pytest.mark.parametrize("use", STACKS)
def test_other_stacks_stay(use: str) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert "stack" in canonical(STACKS[use], X)
