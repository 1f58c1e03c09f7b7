"""Where gradients flow, where they are off and where checkpoints are, captured graphs say what eager does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from moefuse.graph.capture import Captured, capture
from tests.graph.captures import EXACT, backend, compare, ops, refused, w, x


def no_grad_region(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        s = (a @ b).abs().sum(-1, keepdim=True)
    return (a @ b) * s


def no_grad_hands_back_its_input(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = a.contiguous()
    return y @ b


def enable_grad_inside(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        p = a @ b
        with torch.enable_grad():
            q = a * b.sum()
        r = q * 2
    return p * q + r * a


def inference_mode_region(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        s = (a @ b).sum(-1, keepdim=True)
    return a @ b, s


def user_detach(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b) * (a * b.sum()).detach()


def partial_writes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(a)  # needs the derivative of aten.copy
    y[1] = a[0]
    y[:, 2] += b[0, :4]
    return y * a


def set_grad_calls(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    y = a @ b
    torch.set_grad_enabled(True)
    return y * a


@pytest.mark.parametrize(
    ("fn", "inner"),
    [
        (no_grad_region, "eager"),
        (no_grad_region, "inductor"),
        (no_grad_hands_back_its_input, "eager"),
        (enable_grad_inside, "eager"),
        (user_detach, "eager"),
        (partial_writes, "eager"),
        (partial_writes, "inductor"),
        (set_grad_calls, "eager"),
    ],
)
def test_gradients_equal_eager(fn: Callable[..., Any], inner: str) -> None:
    compare(fn, x(), w(), inner=inner)


def test_inference_mode_region_has_no_gradient() -> None:
    captured = compare(inference_mode_region, x(), w())
    assert "aten.detach.default" in ops(captured)


def test_the_no_grad_test_can_fail() -> None:
    """Without the detach nodes the gradient differs: what capture guards against is real."""
    a, b = x(), w()
    log: list[Captured] = []
    torch.compile(no_grad_region, backend=backend(log))(a, b)
    gm = log[0].graph_module
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        node.replace_all_uses_with(node.args[0])
    gm.recompile()
    wrong = torch.autograd.grad(gm(a, b)[0].sum(), b)[0]
    assert not torch.allclose(wrong, torch.autograd.grad(no_grad_region(a, b).sum(), b)[0])


def test_counter_update_under_no_grad_stays_free_of_history() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        h = a @ b
        with torch.no_grad():
            mean.mul_(0.9).add_(h.mean(0))
        return h * mean

    compare(fn, x(), w(), torch.zeros(8), inner="inductor")


def write_without_grad(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = a @ b
    with torch.no_grad():
        h.mul_(2)
    return h * h


def write_through_detach(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = a @ b
    h.detach().mul_(2)
    return h * a


def write_through_data(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = a @ b
    h.data.mul_(2)
    return h * a


@pytest.mark.parametrize("fn", [write_without_grad, write_through_detach, write_through_data])
def test_writes_that_autograd_does_not_see_are_refused(fn: Callable[..., Any]) -> None:
    refused(fn, x(), w(), match="unseen by autograd")


def test_a_module_cast_to_its_own_dtype_is_no_write() -> None:
    """`self.router = self.router.to(dtype)`: Dynamo leaves a set_ of the parameter to itself."""
    linear = torch.nn.Linear(4, 3)

    def fn(a: torch.Tensor) -> torch.Tensor:
        return linear.to(a.dtype)(a)

    log: list[Captured] = []
    a = torch.randn(2, 4)
    got = torch.compile(fn, backend=backend(log))(a)
    assert torch.equal(got, linear(a))
    assert "aten::set_" not in ops(log[0])


def test_the_same_writes_are_fine_without_gradients() -> None:
    with torch.no_grad():
        compare(write_through_data, x(), w())


def test_switching_gradients_on_inside_no_grad_is_refused() -> None:
    def fn(a: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return a * 2

    with torch.no_grad():
        refused(fn, x(), match="switched on inside a graph")
        compare(fn, torch.randn(3))


def test_detach_in_place_is_refused() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        h = a @ b
        h.detach_()
        return h * a

    refused(fn, x(), w(), match="drops the history")


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return a.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def test_an_own_backward_is_refused_in_training_and_captured_in_inference() -> None:
    refused(StraightThrough.apply, x(), match="autograd_function_apply")
    with torch.no_grad():
        compare(lambda a: StraightThrough.apply(a * 2), x())


class Wait(torch.autograd.Function):
    """What people write around a wait that had no derivative once."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return torch.ops._c10d_functional.wait_tensor(a)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class OtherGradient(Wait):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class NoGradient(Wait):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None


class MoreThanAWait(Wait):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return torch.ops._c10d_functional.wait_tensor(a).round()


class OfTwo(Wait):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.ops._c10d_functional.wait_tensor(b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def test_a_wait_with_the_gradient_of_a_wait_is_one() -> None:
    compare(lambda a, b: Wait.apply(a @ b) * 2, x(), w())


@pytest.mark.parametrize("function", [OtherGradient, NoGradient, MoreThanAWait])
def test_any_other_gradient_of_a_wait_is_refused(function: type[torch.autograd.Function]) -> None:
    refused(lambda a: function.apply(a * 2), x(), match="autograd_function_apply")


def test_the_gradient_of_another_argument_is_refused() -> None:
    refused(lambda a: OfTwo.apply(a * 2, a + 1), x(), match="autograd_function_apply")


def test_cond_is_refused_in_training_and_captured_in_inference() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.cond(a.sum() > 0, lambda p, q: p @ q, lambda p, q: (p @ q).sin(), (a, b))

    refused(fn, x(), w(), match="higher order operator cond")
    with torch.no_grad():
        compare(fn, x(), w())


def checkpointed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        a = checkpoint(lambda p, q: torch.sin(torch.exp(p @ q / 8)), a, b, use_reentrant=False)
    return a * 2


def test_checkpointed_regions_are_recomputed_as_without_capture() -> None:
    """The backward graph holds as many exp nodes as when AOTAutograd gets Dynamo's graph."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def backward_exps(captured: bool, fn: Callable[..., Any]) -> int:
        torch._dynamo.reset()
        count: list[int] = []

        def bw(gm: fx.GraphModule, _: Any) -> Any:
            count.append(len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)))
            return gm.forward

        aot = aot_autograd(
            fw_compiler=lambda gm, _: gm.forward,
            bw_compiler=bw,
            partition_fn=min_cut_rematerialization_partition,
        )

        def compile_graph(gm: fx.GraphModule, inputs: list[Any]) -> Any:
            return aot(capture(gm, inputs).graph_module if captured else gm, inputs)

        torch.compile(fn, backend=compile_graph)(x(), w()).sum().backward()
        return count[0]

    assert backward_exps(True, checkpointed) == backward_exps(False, checkpointed) > 0
    compare(checkpointed, x(), w(), inner="inductor")


def test_selective_checkpointing_is_refused() -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    def fn(a: torch.Tensor, b: torch.Tensor) -> Any:
        return checkpoint(lambda p, q: torch.sin(p @ q), a, b, use_reentrant=False, context_fn=contexts)

    refused(fn, x(), w(), match="selective activation checkpointing")


def test_batch_norm_trains() -> None:
    """Its running statistics are read by autograd and written at the end of the graph."""
    layer = torch.nn.BatchNorm1d(8)
    other = copy.deepcopy(layer)
    a = x()
    torch.compile(layer, backend=backend([], "inductor"))(a).square().sum().backward()
    other(a.detach()).square().sum().backward()
    torch.testing.assert_close(layer.running_var, other.running_var)
    torch.testing.assert_close(layer.weight.grad, other.weight.grad)


def test_dropout_draws_the_same_numbers() -> None:
    a, b = x(), w()
    log: list[Captured] = []
    compiled = torch.compile(lambda p, q: torch.nn.functional.dropout(p @ q, 0.5, True), backend=backend(log))
    torch.manual_seed(7)
    expected = torch.nn.functional.dropout(a @ b, 0.5, True)
    torch.manual_seed(7)
    torch.testing.assert_close(compiled(a, b), expected, **EXACT)
