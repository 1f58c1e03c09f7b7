"""`mega_moe.ep` as an operator: what compilers may do with it. What it computes over ranks: tests/comm."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import moefuse.ops  # noqa: F401  (registers the operator)
from moefuse.comm import Capacity, context_for, contexts
from moefuse.graph.capture import capture
from moefuse.inner import compile_inner
from tests.ops.moe_loop import make_layer

OP = torch.ops.moefuse.mega_moe.ep


@pytest.fixture
def context():
    """The context of a group of one rank: this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield context_for(None, Capacity(1, 4, 2, 6, 5, 64, torch.float32)).tensor
    dist.destroy_process_group()
    assert not contexts()


def call(context, layer, x=None):
    x = layer.x if x is None else x
    return OP(context, x, *layer.args[2:], **layer.kwargs)


def test_it_equals_the_layer_on_one_rank(context) -> None:
    layer = make_layer(1)
    y, nums = call(context, layer)
    want, counts = layer.call("reference")
    torch.testing.assert_close(y, want)
    assert nums.tolist() == counts.tolist()


def test_opcheck(context) -> None:
    layer = make_layer(1)
    opcheck(OP, (context, layer.x.requires_grad_(), *layer.args[2:]), layer.kwargs)
    lists = [*layer.args[4:], []]
    inputs = (context, torch.ones(5, 5), layer.x.detach(), *layer.args[2:4], *lists)
    opcheck(
        torch.ops.moefuse.mega_moe_backward.ep, inputs, {"needs": [True] * 4 + [False] * 3, "num_experts": 4}
    )


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_fake_gives_this_ranks_tokens_and_experts(world) -> None:
    with FakeTensorMode():
        x, ids = torch.empty(7, 6), torch.empty(7, 2, dtype=torch.int64)
        weights = [torch.empty(8 // world, 10, 6)], [torch.empty(8 // world, 9, 5)]
        y, nums = OP(
            torch.empty(4, dtype=torch.int64), x, ids, torch.empty(7, 2), *weights, [], [],
            num_experts=8, ep_world_size=world, output_dtype=torch.bfloat16,
        )  # fmt: skip
    assert (y.shape, y.dtype) == ((7, 9), torch.bfloat16)
    assert (nums.shape, nums.dtype) == ((8 // world,), torch.int32)


def test_all_experts_on_one_rank_of_two_are_too_many() -> None:
    layer = make_layer(1)
    with pytest.raises(ValueError, match=r"weight1: expected \[2, \.\., \.\.\]"):
        OP(torch.zeros(4, dtype=torch.int64), *layer.args[1:], **layer.kwargs | {"ep_world_size": 2})


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_no_compiler_removes_it_or_runs_it_twice(context, backend, monkeypatch) -> None:
    layer = make_layer(1)
    ran = []
    from moefuse.comm import expert_parallel
    from moefuse.ops import kernels

    def counted(kernel, context, operands, *rest):
        ran.append(operands.x[0, 0].item())
        return expert_parallel.run(kernel, context, operands, *rest)

    monkeypatch.setitem(kernels._COMMUNICATORS, "", counted)

    def f(x):
        call(context, layer, x + 1)  # nobody reads it
        y, _ = call(context, layer, x + 2)
        call(context, layer, x + 2)  # nobody reads it, and it equals one that somebody reads
        return y.sin()

    start = layer.x[0, 0].item()
    want = f(layer.x)
    assert [round(value - start) for value in ran] == [1, 2, 2]
    ran.clear()
    torch.testing.assert_close(torch.compile(f, backend=backend, fullgraph=True)(layer.x), want)
    assert [round(value - start) for value in ran] == [1, 2, 2]


@pytest.mark.parametrize("training", [False, True])
def test_inductor_keeps_it_in_its_place_among_collectives(context, training, monkeypatch) -> None:
    """The order of a graph's collectives is that of the graph, whatever would save memory."""
    from torch._inductor import comms

    layer = make_layer(1)
    seen = []
    real = comms.decide_global_ordering_of_comms

    def look(nodes, *args):
        seen.extend(str(node.node.op_overload) for node in nodes if comms.contains_collective(node))
        return real(nodes, *args)

    monkeypatch.setattr(comms, "decide_global_ordering_of_comms", look)

    def f(x):
        a = torch.ops._c10d_functional.all_reduce(x * 2, "sum", dist.group.WORLD.group_name)
        y, _ = call(context, layer, x + 1)
        b = torch.ops._c10d_functional.all_reduce(x * 3, "sum", dist.group.WORLD.group_name)
        z, _ = call(context, layer, x - 1)
        wait = torch.ops._c10d_functional.wait_tensor
        return y.cos() + z, wait(a).sin() + wait(b).cos()

    def backend(gm, inputs):
        return compile_inner(capture(gm, inputs).graph_module, inputs, "inductor", original=gm)

    x = layer.x.clone().requires_grad_(training)
    got = torch.compile(f, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(got, f(x))
    if training:
        grads = [torch.autograd.grad(sum(part.sum() for part in parts), x)[0] for parts in (got, f(x))]
        torch.testing.assert_close(*grads)
    names = ["mega_moe" if "mega_moe" in name else "all_reduce" for name in seen]
    order = ["all_reduce", "mega_moe", "all_reduce", "mega_moe"]
    assert names == (order + order[::-1] if training else order)


def test_the_token_count_stays_symbolic(context) -> None:
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer = make_layer(4)

    def f(x, ids, weights):
        return OP(context, x, ids, weights, *layer.args[4:], **layer.kwargs)[0] + 1

    compiled = torch.compile(f, backend=counted, fullgraph=True, dynamic=True)
    for tokens in (11, 7, 64):
        other = make_layer(tokens, tokens=tokens)
        inputs = (other.x, other.args[2], other.weights)
        torch.testing.assert_close(compiled(*inputs), f(*inputs))
    assert counted.frame_count == 1


def gradients(f, layer):
    x = layer.x.clone().requires_grad_()
    weights = [tensor.clone().requires_grad_() for part in layer.args[4:6] for tensor in part]
    return torch.autograd.grad(f(x, *weights).square().sum(), [x, *weights])


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_its_gradient_is_that_of_one_rank_under_compilers(context, backend) -> None:
    layer = make_layer(1)

    def spread(x, w1, w2):
        return OP(context, x.sin(), *layer.args[2:4], [w1], [w2], [], [], **layer.kwargs)[0].cos()

    def alone(x, w1, w2):
        y, _ = torch.ops.moefuse.mega_moe(None, x.sin(), *layer.args[2:4], [w1], [w2], [], [], **layer.kwargs)
        return y.cos()

    want = gradients(alone, layer)
    got = gradients(torch.compile(spread, backend=backend, fullgraph=True), layer)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(
            call(context, layer, layer.x.requires_grad_())[0], layer.call("reference")[0]
        )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_its_gradient_runs_once_for_each_forward_the_last_first(context, backend, monkeypatch) -> None:
    """And neither is removed where a rank needs nothing of it but for a weight."""
    ran = []
    from moefuse.comm.context import CommContext

    forward, backward = CommContext.forward, CommContext.backward
    monkeypatch.setattr(
        CommContext,
        "forward",
        lambda *call: ran.append(int(call[1].options.activation_params[0])) or forward(*call),
    )
    monkeypatch.setattr(
        CommContext,
        "backward",
        lambda *call: ran.append(-int(call[1].options.activation_params[0])) or backward(*call),
    )
    layer = make_layer(1)

    def f(x, w1, w2):
        for limit in (1.0, 2.0, 3.0):
            kwargs = layer.kwargs | {"activation_params": [limit]}
            y, _ = OP(context, x, *layer.args[2:4], [w1], [w2], [], [], **kwargs)
            x = x + torch.nn.functional.pad(y, (0, 1))
        return x

    weights = [tensor.clone().requires_grad_() for part in layer.args[4:6] for tensor in part]
    torch.compile(f, backend=backend, fullgraph=True)(layer.x, *weights).square().sum().backward()
    assert ran == [1, 2, 3, -3, -2, -1]


def test_what_has_no_gradient(context, monkeypatch) -> None:
    layer = make_layer(1)
    x = layer.x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(call(context, layer, x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradients of gradients are not supported"):
        grad.sum().backward()
    from moefuse.ops import kernels

    monkeypatch.setitem(kernels._COMMUNICATORS, "reference", None)
    with pytest.raises(
        NotImplementedError, match="target 'reference' exchanges rows itself and has no gradient"
    ):
        call(context, layer, x)


def test_the_overload_for_one_rank_refuses_several() -> None:
    layer = make_layer(1, experts=8)
    half = [[tensor[:4] for tensor in part] for part in layer.args[4:]]
    with pytest.raises(ValueError, match="ep_world_size: this target runs on one rank, got 2"):
        torch.ops.moefuse.mega_moe(*layer.args[:4], *half, **layer.kwargs, ep_world_size=2)
