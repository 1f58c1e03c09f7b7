"""Graphs over DTensors as graphs over local tensors and collectives. Traced in one process, as rank 1 of two."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse
from moefuse.graph.desugar import Desugared, desugared
from moefuse.patterns.rules import op_name
from moefuse.testing import fake_ep_group


class _Enough(Exception):
    """The graph is there; the program needn't run."""


def traced(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> Desugared:
    """The graph that Dynamo makes of a function, over local tensors."""
    found: list[Desugared] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(desugared(gm, inputs))
        raise _Enough

    torch._dynamo.reset()
    with pytest.raises(Exception, match="_Enough"):
        torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    return found[0]


def ops(made: Desugared) -> list[str]:
    return [
        op_name(node).partition("::")[2] for node in made.gm.graph.nodes if op_name(node).startswith("_c10d")
    ]


def whole(*shape: int) -> Any:
    """A tensor in two pieces along its first dimension."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(torch.randn(*shape), init_device_mesh("cpu", (2,)), [Shard(0)])


def test_graphs_of_plain_tensors_are_left_alone() -> None:
    with torch.no_grad():
        made = traced(lambda x: x + 1, torch.ones(3))
    assert made.wrap is None
    assert made.taking_the_whole(_only) is _only


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_weight_that_is_gathered(dynamic: bool) -> None:
    with fake_ep_group(2, 1), torch.no_grad():
        made = traced(lambda x, w: x @ w.full_tensor(), torch.ones(3, 4), whole(4, 6), dynamic=dynamic)
    assert ops(made) == ["all_gather_into_tensor", "wait_tensor"]
    assert sorted(tuple(x.shape) for x in made.inputs if isinstance(x, Tensor)) == [(2, 6), (3, 4)]


def test_a_mesh_is_no_input_any_more_and_outputs_are_what_they_were() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def function(x: Tensor, w: Any) -> Any:
        mine = DTensor.from_local(x, w.device_mesh, [Replicate()], run_check=False)
        return mine.redistribute(w.device_mesh, [Shard(0)]), w + 1, x + 1

    with fake_ep_group(2, 1), torch.no_grad():
        x, w = torch.ones(6, 4), whole(4, 6)
        made = traced(function, x, w)
        assert not ops(made)  # a slice of what every rank has
        results = made.taking_the_whole(made.gm.forward)(*(a for a in arguments(made, x, w)))
        assert [type(result) for result in results] == [DTensor, DTensor, Tensor]
        assert [tuple(result.shape) for result in results] == [(6, 4), (4, 6), (6, 4)]
        assert torch.equal(results[0].to_local(), x[3:])
        assert torch.equal(results[1].to_local(), w.to_local() + 1)


def arguments(made: Desugared, x: Tensor, w: Any) -> list[Any]:
    """What Dynamo's graph takes: the mesh somewhere among them."""
    every: list[Any] = [w.device_mesh] * (len(made.kept) + 1)
    for place, like in zip(made.kept, made.inputs, strict=True):
        every[place] = x if like.shape == x.shape else w
    return every


def test_with_gradients_it_is_refused() -> None:
    with fake_ep_group(2, 1):
        w = torch.nn.Parameter(whole(4, 6))
        with pytest.raises(Exception, match="moved or computed with, and gradients are wanted"):
            torch.compile(lambda x: x @ w.full_tensor(), backend=_only, fullgraph=True)(torch.ones(3, 4))


def _only(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    desugared(gm, inputs)
    return gm.forward


def test_what_can_not_be_traced_is_refused_with_the_reason(monkeypatch) -> None:
    import torch.fx.experimental.proxy_tensor as proxy

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no rule\nat all")

    monkeypatch.setattr(proxy, "make_fx", fails)
    with fake_ep_group(2, 1), torch.no_grad():
        w = whole(4, 6)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="can't be taken for local tensors: RuntimeError: no rule\n"):
            torch.compile(lambda x: x @ w.full_tensor(), backend=_only, fullgraph=True)(torch.ones(3, 4))


def test_such_a_graph_is_not_verified() -> None:
    with fake_ep_group(2, 1), torch.no_grad():
        w = whole(4, 6)
        report = moefuse.explain(
            lambda x: (x @ w.full_tensor()).topk(2), torch.ones(3, 4), moefuse_options={"verify": True}
        )
    assert "this one has DTensors" in report.graphs[0].note
