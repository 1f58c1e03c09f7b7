"""The operator against loops over Python floats, on both targets."""

import pytest
import torch
from hypothesis import given, settings
from torch.library import opcheck

import moefuse.ops  # noqa: F401  (registers the operator)
from moefuse.targets import names
from tests.ops.moe_loop import GATED, PLAIN, Layer, layers, make_layer

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CPU_TARGETS = ("reference", "cpu")


def assert_right(layer: Layer, target: str) -> None:
    """Within rounding of the float64 loop.

    A value is rounded at most 6 times (scaled row, hidden row, bias, activation in up to 5 steps, scaled row,
    second GEMM, output) and summed over few slots; entries are of size about 1, so 32 eps of the coarsest
    dtype leaves some room while a swapped, dropped or doubled term is of size about 1.
    """
    y, nums = layer.call(target)
    want, counts = layer.loop()
    dtype = layer.kwargs["output_dtype"] or layer.x.dtype
    assert y.dtype == dtype
    assert nums.dtype == torch.int32
    assert nums.tolist() == counts
    eps = max(torch.finfo(layer.x.dtype).eps, torch.finfo(dtype).eps)
    scale = 1 + want.abs().max().item() if want.numel() else 1
    torch.testing.assert_close(y.double(), want, rtol=0, atol=32 * eps * scale)


@pytest.mark.parametrize("target", CPU_TARGETS)
@settings(max_examples=250, deadline=None)
@given(layer=layers(DTYPES))
def test_any_layer(target: str, layer: Layer) -> None:
    assert_right(layer, target)


@pytest.mark.parametrize("target", CPU_TARGETS)
@pytest.mark.parametrize("activation", [*GATED, *PLAIN], ids=str)
def test_every_activation_sharply(target, activation) -> None:
    layer = make_layer(
        3, dtype=torch.float64, router_dtype=torch.float64, activation=activation, tokens=9,
        gate_up="none" if activation in PLAIN else "interleaved", bias=(True, True),
    )  # fmt: skip
    y, _ = layer.call(target)
    torch.testing.assert_close(y, layer.loop()[0], rtol=1e-12, atol=1e-12)  # float64 throughout


@pytest.mark.parametrize("target", CPU_TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [(True, True), (False, False)])
@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
def test_sizes_that_take_the_kernel_routes(target, dtype, transposed, tokens) -> None:
    layer = make_layer(
        7, tokens=tokens, top_k=3, experts=8, hidden=64, inner=48, out=64, dtype=dtype, transposed=transposed,
        bias=(True, True), ids="wild",
    )  # fmt: skip
    assert_right(layer, target)


@pytest.mark.parametrize("target", CPU_TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routing_weights_keep_their_precision(target, dtype) -> None:
    """Two experts that give 1 and -1, with weights that differ by less than the rows' dtype can tell apart."""
    y, _ = torch.ops.moefuse.mega_moe(
        None, torch.ones(1, 1, dtype=dtype), torch.tensor([[0, 1]]), torch.tensor([[1 + 2.0**-12, 1.0]]),
        [torch.tensor([[[1.0]], [[-1.0]]], dtype=dtype)], [torch.ones(2, 1, 1, dtype=dtype)], [], [],
        num_experts=2, gate_up="none", activation="identity", target=target,
    )  # fmt: skip
    assert y.item() == 2.0**-12


@pytest.mark.parametrize("target", CPU_TARGETS)
@pytest.mark.parametrize("norm", ["rms", "scaled_rms"])
@pytest.mark.parametrize("scale", ["none", "shared", "own"])
def test_row_norms_sharply(target, norm, scale) -> None:
    layer = make_layer(
        3, dtype=torch.float64, router_dtype=torch.float64, tokens=9, norm=(norm, 1e-3), scale=scale,
        bias=(True, True),
    )  # fmt: skip
    y, _ = layer.call(target)
    torch.testing.assert_close(y, layer.loop()[0], rtol=1e-12, atol=1e-12)  # float64 throughout


@pytest.mark.parametrize("target", CPU_TARGETS)
@pytest.mark.parametrize("position", ["output", "mid", "input"])
def test_identity_experts_are_neither_counted_nor_off_by_one(target, position) -> None:
    layer = make_layer(3, out=6, identities=2, tokens=4, position=position)
    layer.args[2].copy_(torch.tensor([[4, 5], [6, 4], [-1, 5], [3, 6]]))  # 4 experts, then 4 and 5 identities
    layer.ids.copy_(layer.args[2])
    y, nums = layer.call(target)
    assert nums.tolist() == [0, 0, 0, 1]
    weights = layer.weights
    want = torch.stack([weights[0].sum(), weights[1, 1], weights[2, 1]])[:, None] * layer.x[:3]
    torch.testing.assert_close(y[:3], want)  # one product and one sum, in float32 as in the model
    assert_right(layer, target)


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_nan_stays_in_its_token(target) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = make_layer(5, tokens=7, dtype=dtype, hidden=32, inner=16)
        layer.x[2] = torch.nan
        y, _ = layer.call(target)
        assert y.isnan().any(1).tolist() == [i == 2 for i in range(7)]


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_slots_without_an_expert_may_hold_anything(target) -> None:
    layer = make_layer(5, tokens=6, ids="wild")
    outside = (layer.ids < 0) | (layer.ids >= 4)
    assert outside.any()
    layer.weights[outside] = torch.nan
    layer.ids[outside] = torch.tensor([2**62, -(2**62)]).repeat(20)[: int(outside.sum())]
    layer.args[2].copy_(layer.ids)
    assert_right(layer, target)


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_an_unused_expert_with_nan_weights_is_never_read(target) -> None:
    layer = make_layer(5, ids="one")
    layer.args[4][0][0] = torch.nan
    layer.args[5][0][0] = torch.nan
    assert layer.call(target)[0].isfinite().all()


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_no_slots_at_all(target) -> None:
    x = torch.randn(3, 4)
    y, nums = torch.ops.moefuse.mega_moe(
        None, x, torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3, 0), [torch.randn(2, 6, 4)],
        [torch.randn(2, 5, 3)], [], [], num_experts=2, target=target,
    )  # fmt: skip
    assert y.tolist() == [[0.0] * 5] * 3
    assert nums.tolist() == [0, 0]


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_custom_program_equals_the_activation_it_spells(target) -> None:
    layer = make_layer(2, tokens=6)
    want = layer.call(target)[0]
    layer.kwargs |= {"activation": "custom", "activation_program": "mul.Tensor(silu.default(g), u)"}
    torch.testing.assert_close(layer.call(target)[0], want)


@pytest.mark.parametrize("target", CPU_TARGETS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"form": "list", "bias": (True, True), "gate_up": "separate"},
        {"dtype": torch.bfloat16, "transposed": (False, False), "gate_up": "interleaved"},
        {"gate_up": "none", "activation": ("relu2", ()), "form": "strided", "output_dtype": torch.bfloat16},
        {"norm": ("rms", 1e-6), "scale": "own", "identities": 2, "out": 6, "weight_dtype": torch.bfloat16},
    ],
    ids=str,
)
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(target, changes, grad) -> None:
    layer = make_layer(4, **changes)
    if grad:
        layer.x.requires_grad_()
        layer.args[4][0].requires_grad_()
    opcheck(torch.ops.moefuse.mega_moe.default, layer.args, layer.kwargs | {"target": target})


def test_the_token_count_stays_symbolic() -> None:
    layer = make_layer(4)
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def f(x, ids, weights):
        return torch.ops.moefuse.mega_moe(None, x, ids, weights, *layer.args[4:], **layer.kwargs)[0] + 1

    compiled = torch.compile(f, backend=counted, fullgraph=True, dynamic=True)
    for tokens in (11, 7, 64):  # not a size of the weights: equal sizes share a symbol
        other = make_layer(tokens, tokens=tokens)
        inputs = (other.x, other.args[2], other.weights)
        torch.testing.assert_close(compiled(*inputs), f(*inputs))
    assert counted.frame_count == 1


def test_inductor_keeps_weight_strides_and_result() -> None:
    layer = make_layer(4, form="view", tokens=5, hidden=16, inner=8)

    def f(x, w1):
        return torch.ops.moefuse.mega_moe(None, x, *layer.args[2:4], [w1], *layer.args[5:], **layer.kwargs)[
            0
        ].sin()

    inputs = (layer.x, layer.args[4][0])
    torch.testing.assert_close(torch.compile(f, fullgraph=True)(*inputs), f(*inputs))


def test_mode_and_subclass_tensors_reach_their_handlers() -> None:
    """The shortcut past the dispatcher must not skip a dispatch mode."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    layer = make_layer(1)
    with Spy():
        layer.call("reference")
    assert seen[0] == "moefuse.mega_moe.default"


def broken(**changes):
    layer = make_layer(1)
    order = ["context", "x", "topk_ids", "topk_weights", "weight1", "weight2", "bias1", "bias2", "row_scale"]
    args = dict(zip(order, (*layer.args, None), strict=True))
    kwargs = dict(layer.kwargs)
    for name, value in changes.items():
        (args if name in args else kwargs)[name] = value
    return args, kwargs


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"x": torch.ones(5)}, ValueError, r"x: expected \[T, H\]"),
        ({"x": torch.ones(5, 6, dtype=torch.int64)}, TypeError, "x: expected a floating"),
        ({"x": torch.ones(4, 6)}, ValueError, "topk_ids: expected 4 rows"),
        ({"topk_ids": torch.ones(5, 2)}, TypeError, "topk_ids: expected int32 or int64"),
        ({"topk_ids": torch.ones(5, 3, dtype=torch.int64)}, ValueError, "topk_weights: expected"),
        (
            {"topk_weights": torch.ones(5, 2, dtype=torch.int64)},
            TypeError,
            "topk_weights: expected a floating",
        ),
        ({"topk_weights": torch.ones(4, 2)}, ValueError, "topk_weights: expected 5 rows"),
        ({"weight1": []}, ValueError, "weight1: expected at least one"),
        ({"weight1": [torch.ones(4, 8, 7)]}, ValueError, r"weight1: expected \[.., N, H\] with H = 6"),
        ({"weight1": [torch.ones(3, 8, 6)]}, ValueError, r"weight1: expected \[4"),
        ({"weight1": [torch.ones(8, 6)] * 3}, ValueError, "weight1: expected 4 per-expert"),
        ({"weight1": [torch.ones(4, 7, 6)]}, ValueError, "weight1: .*even N"),
        ({"weight1": [torch.ones(4, 8, 6).char()]}, TypeError, "weight1: expected one of torch.float16, "),
        ({"weight2": [torch.ones(4, 5, 3)]}, ValueError, r"weight2: expected \[.., O, I\] with I = 4"),
        ({"weight2": [torch.ones(5, 4)] * 3 + [torch.ones(5, 3)]}, ValueError, "weight2: shapes differ"),
        ({"bias1": [torch.ones(4, 7)]}, ValueError, r"bias1: expected \(4, 8\)"),
        ({"bias1": [torch.ones(8)] * 3}, ValueError, "bias1: expected 4 per-expert"),
        ({"bias2": [torch.ones(4, 5).char()]}, TypeError, "bias2: expected one of"),
        ({"row_norm": "layer"}, ValueError, "row_norm: expected one of .*'rms'"),
        ({"row_norm": "rms", "row_norm_eps": -1.0}, ValueError, "row_norm_eps: expected 0 or more"),
        ({"row_norm_eps": 1e-5}, ValueError, "row_norm_eps: .*got 1e-05 with row_norm='none'"),
        ({"row_scale": torch.ones(5)}, ValueError, "row_scale: needs row_norm"),
        (
            {"row_scale": torch.ones(4), "row_norm": "rms"},
            ValueError,
            r"row_scale: expected \(5,\) or \(4, 5\), got \(4,\)",
        ),
        ({"row_scale": torch.ones(5).int(), "row_norm": "rms"}, TypeError, "row_scale: expected one of"),
        ({"num_identity_experts": -1}, ValueError, "num_identity_experts: expected 0 or more"),
        ({"num_identity_experts": 1}, ValueError, "num_identity_experts: needs as many .* 6, got 5"),
        (
            {"topk_ids": torch.zeros(6, 2, dtype=torch.int64, device="meta")},
            ValueError,
            "topk_ids: expected .* on cpu",
        ),
        ({"weight2": [torch.empty(4, 6, 6, device="meta")]}, ValueError, "weight2: .* got one on meta"),
        ({"num_experts": 0}, ValueError, "num_experts"),
        ({"ep_world_size": 3}, ValueError, "ep_world_size"),
        ({"ep_world_size": 2, "num_experts": 8}, ValueError, "ep_world_size: this target"),
        ({"gate_up": "gateless"}, ValueError, "gate_up: expected one of"),
        ({"weight_position": "nowhere"}, ValueError, "weight_position: expected one of"),
        ({"activation": "swish"}, ValueError, "activation 'swish' is unknown"),
        ({"activation": "relu"}, ValueError, "plain expert"),
        ({"activation": "swigluoai"}, ValueError, r"takes 3 activation_params \(limit, alpha, beta\)"),
        ({"output_dtype": torch.int32}, TypeError, "output_dtype"),
        ({"target": "tpu"}, ValueError, "target: expected one of .*'cpu'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_errors_name_the_argument(changes, error, words) -> None:
    args, kwargs = broken(**changes)
    with pytest.raises(error, match=words):
        torch.ops.moefuse.mega_moe(*args.values(), **kwargs)


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_default_device_does_not_move_the_work(target) -> None:
    layer = make_layer(1, experts=3, dtype=torch.bfloat16, tokens=1, hidden=10, inner=11, out=12)
    with torch.device("meta"):
        y, nums = layer.call(target)
    assert {y.device.type, nums.device.type} == {"cpu"}
    assert_right(layer, target)


@pytest.mark.parametrize("name", ["mega_moe", "mega_moe_backward"])
def test_tags(name) -> None:
    tags = getattr(torch.ops.moefuse, name).default.tags
    assert {torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag} <= set(tags)


def test_both_targets_are_tested() -> None:
    assert set(CPU_TARGETS) <= set(names())
