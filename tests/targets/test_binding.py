"""Calls that skip Python: the same bits, and everything unusual still ends in Python, with its errors."""

import threading

import pytest
import torch
from hypothesis import given, settings
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from moefuse import targets
from moefuse.ops import kernels
from moefuse.ops.kernels import register_kernel
from moefuse.policy.shared import MOST_TOKENS
from moefuse.targets.cpu import build, isa, kernel, torch_kernel
from moefuse.targets.cpu.binding import BINDING
from tests.ops.moe_loop import layers, make_layer

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
IN_PYTHON = torch.ops.moefuse.mega_moe_in_python
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def contiguous(layer):
    """As a router makes its ids; others go through Python."""
    layer.args = (*layer.args[:2], layer.args[2].contiguous(), *layer.args[3:])
    return layer


def made(**kwargs):
    return contiguous(make_layer(1, **kwargs))


@pytest.fixture(autouse=True)
def bound():
    """The process's first call builds and binds."""
    made().call("cpu")


@pytest.fixture
def counted(monkeypatch):
    """How often the kernel was called from Python."""
    calls = []
    right = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *args: calls.append(1) or right(*args))
    return calls


def test_the_second_call_skips_python(counted) -> None:
    layer = made(bias=(True, True), form="list")
    with torch.no_grad():
        first, again = layer.call("cpu"), layer.call("cpu")
    assert len(counted) == 1
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_dtypes_take_turns_without_python(counted) -> None:
    """Each has a kernel of its own."""
    work = [made(dtype=dtype) for dtype in DTYPES]
    with torch.no_grad():
        want = [IN_PYTHON(*layer.args, **layer.kwargs, target="cpu")[0] for layer in work]
        for layer in work * 2:
            layer.call("cpu")
        del counted[:]
        got = [layer.call("cpu")[0] for layer in work * 2]
    assert not counted
    assert all(torch.equal(a, b) for a, b in zip(got, want * 2, strict=True))


def test_weights_not_met_before_come_to_python_once(counted) -> None:
    """It asks for huge pages under them."""
    layer = made()
    layer.call("cpu")
    del counted[:]
    others = [layer.args[4][0].clone() for _ in range(64)]  # some may lie where an earlier test's weights lay
    for other in others:
        layer.args[4][0] = other
        layer.call("cpu")
    met = len(counted)
    assert 0 < met <= len(others)
    for other in others:
        layer.args[4][0] = other
        layer.call("cpu")
    assert len(counted) == met


@settings(max_examples=150)
@given(layer=layers(DTYPES))
def test_the_same_bits_as_through_python(layer) -> None:
    contiguous(layer)
    want = IN_PYTHON(*layer.args, **layer.kwargs, target="cpu")
    for _ in range(2):
        got = layer.call("cpu")
        assert torch.equal(got[0].nan_to_num(7), want[0].nan_to_num(7))
        assert torch.equal(got[1], want[1])
        assert got[0].dtype == want[0].dtype


def other(position, change):
    def apply(args):
        args = list(args)
        given = args[position]
        args[position] = [change(tensor) for tensor in given] if isinstance(given, list) else change(given)
        return args

    return apply


@pytest.mark.parametrize(
    "change",
    [
        other(1, lambda x: x[:, :-1]),
        other(1, lambda x: x[0]),
        other(1, lambda x: x[1:]),
        other(1, lambda x: x.double()),
        other(1, lambda x: x.t().contiguous().t()),
        other(1, lambda x: x.to_sparse()),
        other(2, lambda ids: ids[1:]),
        other(2, lambda ids: ids.double()),
        other(2, lambda ids: ids.short()),
        other(2, lambda ids: ids.t().contiguous().t()),
        other(3, lambda w: w[:, :1]),
        other(3, lambda w: w.long()),
        other(3, lambda w: w.t().contiguous().t()),
        other(4, lambda w: w[:-1]),
        other(4, lambda w: w[:, :-1]),
        other(4, lambda w: w[:, :-2]),
        other(4, lambda w: w[:, :, :-1]),
        other(4, lambda w: w[0]),
        other(4, lambda w: w.bfloat16()),
        other(4, lambda w: torch.stack((w, w), -1)[..., 0]),
        other(5, lambda w: w[:, :, :-1]),
        other(5, lambda w: w[:, :-1]),
        other(6, lambda b: b[:, :-1]),
        other(6, lambda b: b[:-1]),
        other(6, lambda b: b[0]),
        other(7, lambda b: b[:, 1:]),
        other(7, lambda b: b.double()),
        lambda args: [*args[:4], args[4] * 2, *args[5:]],
        lambda args: [*args[:4], [], *args[5:]],
        lambda args: [*args, torch.ones(5)],
        lambda args: [torch.ones(1, dtype=torch.int64), *args[1:]],
    ],
)
def test_what_is_unusual_is_as_in_python(change) -> None:
    """After a call with the same constants has gone through: only the tensors can tell."""
    layer = made(bias=(True, True), hidden=6, inner=4, out=5)
    layer.call("cpu")

    def outcome(op):
        try:
            return op(*change(layer.args), **layer.kwargs, target="cpu")
        except Exception as error:
            return f"{type(error).__name__}: {error}".replace("mega_moe_in_python", "mega_moe")

    got, want = outcome(torch.ops.moefuse.mega_moe), outcome(IN_PYTHON)
    if isinstance(want, str):
        assert got == want
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    "constants",
    [
        {"num_experts": 5},
        {"gate_up": "interleaved"},
        {"gate_up": "concatenated"},
        {"activation": "geglu"},
        {"activation_params": [0.25]},
        {"weight_position": "input"},
        {"transpose_weight2": False},
        {"output_dtype": torch.bfloat16},
        {"row_norm": "rms", "row_norm_eps": 0.5},
        {"ep_world_size": 2},
    ],
)
def test_other_constants_are_other_calls(constants) -> None:
    layer = made(hidden=4, inner=4, out=4)
    layer.call("cpu")

    def outcome(op):
        try:
            return op(*layer.args, **(layer.kwargs | constants), target="cpu")
        except Exception as error:
            return str(error)

    for _ in range(2):
        got, want = outcome(torch.ops.moefuse.mega_moe), outcome(IN_PYTHON)
        assert isinstance(got, str) == isinstance(want, str)
        assert got == want if isinstance(want, str) else torch.equal(got[0], want[0])


def test_a_row_scale_once_given_isnt_kept() -> None:
    layer = made(norm=("rms", 0.3125), scale="shared")
    layer.call("cpu")
    without = [torch.ops.moefuse.mega_moe(*layer.args[:8], **layer.kwargs, target="cpu")[0] for _ in range(3)]
    want = IN_PYTHON(*layer.args[:8], **layer.kwargs, target="cpu")[0]
    assert all(torch.equal(y, want) for y in without)
    assert not torch.equal(layer.call("cpu")[0], want)


def test_gradients_are_recorded() -> None:
    layer = made()
    layer.call("cpu")
    layer.args[4][0].requires_grad_()
    y = layer.call("cpu")[0]
    assert y.requires_grad
    y.sum().backward()
    assert layer.args[4][0].grad.abs().sum() > 0
    with torch.no_grad():
        assert not layer.call("cpu")[0].requires_grad
    with torch.inference_mode():
        assert torch.equal(layer.call("cpu")[0], y)


def test_graphs_and_modes_see_the_operator_itself() -> None:
    layer = made()
    layer.call("cpu")

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    names = []
    with Seen():
        layer.call("cpu")
    assert names[0] == "moefuse::mega_moe"

    def call(x):
        return torch.ops.moefuse.mega_moe(None, x, *layer.args[2:], **layer.kwargs, target="cpu")

    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(call, tracing_mode=mode, _allow_non_fake_inputs=True)(layer.x).graph
        called = [node.target for node in graph.nodes if node.op == "call_function"]
        assert torch.ops.moefuse.mega_moe.default in called
        assert IN_PYTHON.default not in called


def test_another_kernel_for_the_target_is_called() -> None:
    layer = made()
    right = layer.call("cpu")[0]
    cpu = kernels.kernel("cpu")

    def scaled(*args):
        y, nums = cpu(*args)
        return 2 * y, nums

    try:
        register_kernel("cpu", scaled)
        assert all(torch.equal(layer.call("cpu")[0], 2 * right) for _ in range(3))
    finally:
        register_kernel("cpu", cpu)
    assert all(torch.equal(layer.call("cpu")[0], right) for _ in range(3))
    assert targets.get("cpu").run == kernels.kernel("cpu")


def test_another_target_that_uses_the_kernel_is_called(monkeypatch) -> None:
    layer = made()
    right = layer.call("cpu")[0]
    cpu = kernels.kernel("cpu")

    def scaled(*args):
        y, nums = cpu(*args)
        return 2 * y, nums

    monkeypatch.setattr(kernels, "_KERNELS", {**kernels._KERNELS, "mine": scaled})
    assert all(torch.equal(layer.call("mine")[0], 2 * right) for _ in range(3))


def test_the_environment_is_read_in_each_call(monkeypatch, counted) -> None:
    layer = made()
    right = layer.call("cpu")[0]
    with monkeypatch.context() as patch:
        patch.setenv(isa.VARIABLE, isa.OFF)
        del counted[:]
        torch.testing.assert_close(layer.call("cpu")[0], right)
        assert not counted  # torch operators
        patch.setenv(isa.VARIABLE, "avx3")
        with pytest.raises(ValueError, match="expected one of"):
            layer.call("cpu")
    layer.call("cpu")
    assert not counted


def test_several_threads_at_once() -> None:
    work = [made(tokens=20 + i, hidden=64, inner=48, out=64) for i in range(4)]
    want = [layer.call("cpu")[0] for layer in work]
    same = [True] * len(work)

    def repeat(i: int) -> None:
        for _ in range(50):
            same[i] &= torch.equal(work[i].call("cpu")[0], want[i])

    workers = [threading.Thread(target=repeat, args=(i,)) for i in range(len(work))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert same == [True] * len(work)


def test_without_the_binding_every_call_goes_through_python(counted) -> None:
    layer = made()
    try:
        BINDING.enable(False)
        layer.call("cpu")
        layer.call("cpu")
    finally:
        BINDING.enable(True)
    assert len(counted) == 2


def test_many_tokens_of_one_bfloat16_expert_are_dense_products(monkeypatch) -> None:
    """oneDNN's, which are faster: from the same number on in the policy, in Python and in C++."""
    dense, right = [], torch_kernel.run
    monkeypatch.setattr(torch_kernel, "run", lambda *args: dense.append(len(args[0].x)) or right(*args))
    weights = [torch.randn(1, 8, 8).bfloat16()]
    options = {"num_experts": 1, "gate_up": "none", "activation": "relu", "target": "cpu"}
    for tokens in (MOST_TOKENS, MOST_TOKENS, MOST_TOKENS + 1, MOST_TOKENS + 1, MOST_TOKENS):
        x, ids = torch.randn(tokens, 8).bfloat16(), torch.zeros(tokens, 1, dtype=torch.int64)
        args = (None, x, ids, torch.ones(tokens, 1), weights, weights, [], [])
        y = torch.ops.moefuse.mega_moe(*args, **options)[0]
        wanted = torch.relu(x @ weights[0][0].t()) @ weights[0][0].t()
        torch.testing.assert_close(y, wanted)
    assert dense == [MOST_TOKENS + 1] * 2
