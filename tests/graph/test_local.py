"""Distributed inputs: local ones become plain inputs of the graph, others stay what they are."""

import pytest
import torch
import torch.distributed as dist

from moefuse.graph.local import read_locally


@pytest.fixture
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Linear(torch.nn.Module):
    def __init__(self, mesh, *, whole: bool = False) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        super().__init__()
        self.weight = torch.nn.Parameter(distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]))
        self.whole = whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight.to_local().t() + self.weight.to_local().sum()
        return y + (self.weight * 2).to_local().sum() if self.whole else y


def compiled(model):
    """The compiled model, and the (graph, inputs) that `read_locally` was given and made."""
    seen = []

    def backend(gm, inputs):
        news, taking_the_whole = read_locally(gm, inputs)
        seen.append((gm, inputs, news))
        return taking_the_whole(gm.forward)

    return torch.compile(model, backend=backend, fullgraph=True), seen


def test_an_input_that_is_read_locally_becomes_the_local_tensor(mesh) -> None:
    model = Linear(mesh)
    run, seen = compiled(model)
    x = torch.randn(2, 3)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
        ((gm, olds, news),) = seen
        assert not gm.graph.find_nodes(op="call_method", target="to_local")
        (at,) = (i for i, old in enumerate(olds) if old is model.weight)
        assert type(news[at]) is torch.nn.Parameter
        assert news[at].data_ptr() == model.weight.to_local().data_ptr()
        placeholder = gm.graph.find_nodes(op="placeholder")[at]
        assert placeholder.meta["example_value"].shape == (4, 3)
        model.weight.to_local().mul_(2)  # each call reads the weight as it is then
        torch.testing.assert_close(run(x), model(x))
    assert len(seen) == 1


def test_gradients_reach_the_distributed_parameter(mesh) -> None:
    model = Linear(mesh)
    run, _ = compiled(model)
    x = torch.randn(2, 3)
    run(x).square().sum().backward()
    got, model.weight.grad = model.weight.grad, None
    model(x).square().sum().backward()
    torch.testing.assert_close(got.to_local(), model.weight.grad.to_local())


def test_an_input_that_is_used_as_a_whole_too_stays(mesh) -> None:
    model = Linear(mesh, whole=True)
    run, seen = compiled(model)
    with torch.no_grad():
        run(torch.randn(2, 3))
    ((gm, olds, news),) = seen
    assert gm.graph.find_nodes(op="call_method", target="to_local")
    assert all(old is new for old, new in zip(olds, news, strict=True))


def test_plain_inputs_are_left_alone() -> None:
    def backend(gm, inputs):
        before = str(gm.graph)
        news, taking_the_whole = read_locally(gm, inputs)
        assert str(gm.graph) == before
        assert news == list(inputs)
        assert taking_the_whole(gm.forward) == gm.forward
        return gm.forward

    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))
