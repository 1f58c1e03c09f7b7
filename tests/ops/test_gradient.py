"""Gradients of the operator: against autograd through the loop's formula, numerically, and under compilers."""

import pytest
import torch
from torch.autograd import forward_ad, gradcheck
from torch.library import opcheck

import moefuse.ops  # noqa: F401  (registers the operator)
from tests.ops.moe_loop import make_layer

LAYOUTS = [
    {"bias": (True, True)},
    {"gate_up": "separate", "form": "list", "bias": (True, True)},
    {"gate_up": "interleaved", "transposed": (False, False), "position": "input", "bias": (True, False)},
    {"gate_up": "none", "activation": ("gelu", ()), "position": "mid", "bias": (False, True)},
    {"gate_up": "concat_swapped", "activation": ("swigluoai", (0.7, 1.702, 1.0)), "form": "strided"},
    {"gate_up": "interleaved_swapped", "ids": "wild", "form": "view"},
    {"norm": ("rms", 0.1), "scale": "shared", "bias": (False, True)},
    {"norm": ("scaled_rms", 0.1), "scale": "own", "form": "list", "position": "mid"},
    {"identities": 3, "out": 3, "ids": "wild"},
    {"identities": 2, "out": 3, "position": "input", "norm": ("rms", 0.1)},
]


def leaves(layer):
    """Everything differentiable, as flat leaves, and the operator as a function of them."""
    tensors = [layer.x, layer.weights, *(t for ts in layer.args[4:8] for t in ts), *layer.args[8:]]
    flat = [t.detach().requires_grad_() for t in tensors]

    def rebuild(values):
        x, weights, *rest = values
        items = iter(rest)
        lists = [[next(items) for _ in ts] for ts in layer.args[4:8]]
        return (None, x, layer.args[2], weights, *lists, *items)

    return flat, rebuild


def by_hand(layer, values):
    """The layer in float64, one slot at a time, differentiable, for stacked "concat" swiglu with biases."""
    x, weights, w1, w2, b1, b2 = values
    rows = []
    for t, ids in enumerate(layer.ids.tolist()):
        total = torch.zeros(w2.shape[1], dtype=torch.float64)
        for k, e in enumerate(ids):
            h = w1[e] @ x[t] + b1[e]
            g, u = h.chunk(2)
            total = total + weights[t, k] * (w2[e] @ (g * torch.sigmoid(g) * u) + b2[e])
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_against_autograd_through_a_loop(target) -> None:
    layer = make_layer(1, dtype=torch.float64, router_dtype=torch.float64, bias=(True, True), tokens=6)
    flat, rebuild = leaves(layer)
    probe = torch.randn(6, 5, dtype=torch.float64)
    y, _ = torch.ops.moefuse.mega_moe(*rebuild(flat), **layer.kwargs, target=target)
    want = by_hand(layer, flat)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
    for got, wanted in zip(
        torch.autograd.grad(y, flat, probe), torch.autograd.grad(want, flat, probe), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
def test_gradcheck(changes) -> None:
    layer = make_layer(
        2,
        dtype=torch.float64,
        router_dtype=torch.float64,
        tokens=3,
        hidden=3,
        inner=2,
        experts=3,
        **{"out": 2} | changes,
    )
    flat, rebuild = leaves(layer)

    def f(*values):
        return torch.ops.moefuse.mega_moe(*rebuild(values), **layer.kwargs, target="cpu")[0]

    assert gradcheck(f, flat)


@pytest.mark.parametrize("changes", [*LAYOUTS[:3], LAYOUTS[7]], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gradients_are_the_eager_ones(changes, backend) -> None:
    layer = make_layer(3, tokens=7, **changes)
    flat, rebuild = leaves(layer)

    def f(*values):
        return torch.ops.moefuse.mega_moe(*rebuild(values), **layer.kwargs)[0].square().sum()

    want = torch.autograd.grad(f(*flat), flat)
    got = torch.autograd.grad(torch.compile(f, backend=backend, fullgraph=True)(*flat), flat)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_only_needed_gradients_are_computed() -> None:
    layer = make_layer(3, tokens=7)
    layer.args[5][0].requires_grad_()
    y, nums = layer.call("reference")
    assert not nums.requires_grad
    seen = []

    def spy(*args, **kwargs):
        seen.append(kwargs["needs"])
        return original(*args, **kwargs)

    original = torch.ops.moefuse.mega_moe_backward
    torch.ops.moefuse.mega_moe_backward = spy
    try:
        y.sum().backward()
    finally:
        torch.ops.moefuse.mega_moe_backward = original
    assert seen == [[False, False, False, True, False, False, False]]
    assert layer.args[5][0].grad is not None


def test_nothing_is_recorded_where_nothing_needs_a_gradient() -> None:
    layer = make_layer(3)
    assert not layer.call("cpu")[0].requires_grad
    layer.x.requires_grad_()
    with torch.no_grad():
        assert not layer.call("cpu")[0].requires_grad
    assert layer.call("cpu")[0].requires_grad
    with torch.inference_mode():
        assert layer.call("cpu")[0].is_inference()


def test_low_precision_gradients_have_their_inputs_dtypes_and_sums() -> None:
    layer = make_layer(3, dtype=torch.bfloat16, tokens=9, bias=(True, True))
    flat, rebuild = leaves(layer)
    y = torch.ops.moefuse.mega_moe(*rebuild(flat), **layer.kwargs, target="cpu")[0]
    got = torch.autograd.grad(y.float().sum(), flat)
    wide = [t.detach().double().requires_grad_() for t in flat]
    want = torch.autograd.grad(by_hand(layer, wide).sum(), wide)
    for a, b, leaf in zip(got, want, flat, strict=True):
        assert a.dtype == leaf.dtype
        # about ten roundings of 2^-8 on the way to each gradient, whose entries reach b.max
        torch.testing.assert_close(a.double(), b, rtol=0, atol=0.08 * (1 + b.abs().max().item()))


def test_weights_of_another_dtype_get_gradients_of_their_own() -> None:
    layer = make_layer(3, dtype=torch.bfloat16, weight_dtype=torch.float32, tokens=9, bias=(True, True))
    flat, rebuild = leaves(layer)
    y = torch.ops.moefuse.mega_moe(*rebuild(flat), **layer.kwargs, target="cpu")[0]
    wide = [t.detach().double().requires_grad_() for t in flat]
    want = torch.autograd.grad(by_hand(layer, wide).sum(), wide)
    for a, b, leaf in zip(torch.autograd.grad(y.float().sum(), flat), want, flat, strict=True):
        assert a.dtype == leaf.dtype
        torch.testing.assert_close(a.double(), b, rtol=0, atol=0.08 * (1 + b.abs().max().item()))  # as above


def test_an_unused_expert_gets_a_zero_gradient() -> None:
    layer = make_layer(3, ids="one")
    layer.args[4][0].requires_grad_()
    layer.call("cpu")[0].sum().backward()
    grad = layer.args[4][0].grad
    assert grad[:-1].eq(0).all()
    assert grad[-1].ne(0).any()


def test_backward_operator_opcheck() -> None:
    layer = make_layer(3, bias=(True, False))
    _, *rest = layer.args
    kwargs = {"num_experts": 4, "needs": [True, False, True, True, True, False, True], "row_norm": "rms"}
    args = (torch.randn(5, 5), *rest, [torch.ones(5)])
    opcheck(torch.ops.moefuse.mega_moe_backward.default, args, kwargs)


def test_second_gradients_are_refused() -> None:
    layer = make_layer(3)
    layer.x.requires_grad_()
    (grad,) = torch.autograd.grad(layer.call("cpu")[0].sum(), layer.x, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        torch.autograd.grad(grad.sum(), layer.x)


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_tangents_of_forward_mode_are_refused(target: str) -> None:
    """A result without its tangent would be taken for a constant."""
    layer = make_layer(3)
    layer.call(target)
    layer.call(target)  # from here on, plain calls on the CPU skip Python

    def of(x: torch.Tensor) -> torch.Tensor:
        layer.args = (layer.args[0], x, *layer.args[2:])
        return layer.call(target)[0]

    x = layer.x.detach()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(of, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        of(forward_ad.make_dual(x, torch.ones_like(x)))
