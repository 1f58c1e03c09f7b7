"""Experts in MX blocks on the npu target, with a fake operator of A5 that computes: what it's handed, and refusals."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse.ops  # noqa: F401  registers the operator
from moefuse import targets
from moefuse.policy.npu import NotAllowedError
from moefuse.targets.npu import PlanError, Sizes, adopt, close_npu_contexts, copied_bytes, ge
from moefuse.targets.npu.calls import _listed
from moefuse.targets.npu.machine import Machine
from moefuse.targets.npu.target import NpuTarget
from moefuse.testing import npu_reference_kernels
from tests.targets.npu.test_official import SCHEMA

npu_reference_kernels.install()
W, E, K, H, I = 2, 4, 2, 1024, 256  # noqa: E741
OWN = E // W
NAME = "npu_mega_moe"
CALLS: list[dict[str, Any]] = []
LIBRARY = torch.library.Library("fake_a5", "FRAGMENT")


def operator() -> Any:
    if not hasattr(torch.ops.fake_a5, NAME):
        LIBRARY.define(SCHEMA)
        LIBRARY.impl(NAME, compute, "CompositeExplicitAutograd")
    return torch.ops.fake_a5.npu_mega_moe.default


def compute(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Rank 0 of two: its own experts' part of the layer, as the operator text has it. It refuses what that refuses."""
    names = [argument.name for argument in operator()._schema.arguments]
    given = dict(zip(names, args, strict=False)) | options
    CALLS.append(given)
    w1, w2 = given["weight1"], given["weight2"]
    stacked = len(w1) == 1
    lead = (OWN,) if stacked else ()
    for weights, scales, shape in (
        (w1, given["weight_scales1"], (2 * I, H)),
        (w2, given["weight_scales2"], (H, I)),
    ):
        assert {tuple(weight.shape) for weight in weights} == {(*lead, *shape)}
        assert {tuple(scale.shape) for scale in scales} == {(*lead, shape[0], shape[1] // 64, 2)}
        assert all(each.is_contiguous() for each in (*weights, *scales))
    assert (given["dispatch_quant_mode"], given["dispatch_quant_out_dtype"]) == (4, 292)
    assert not {"bias1", "bias2", "x_active_mask"} & set(given)
    y, nums = torch.ops.moefuse.mega_moe.quant(
        *(None, given["x"], given["topk_ids"], given["topk_weights"], w1, w2, [], []),
        *(given["weight_scales1"], given["weight_scales2"], [], []),
        quant="mxfp8",
        num_experts=OWN,
    )
    return y, nums


@pytest.fixture
def target() -> Iterator[NpuTarget]:
    library: Any = None
    identified: Any = type("Identified", (), {"revision": "R6"})
    before, made = (
        targets.get("npu"),
        NpuTarget(lambda: Machine("Ascend950PR_9599", library, identified, operator())),
    )
    targets.register(made)
    CALLS.clear()
    yield made
    targets.register(before)
    close_npu_contexts()


def experts(number: int = 24) -> tuple[Tensor, ...]:
    """w1 [E, 2 I, H], w2 [E, H, I] and their scales."""
    generator = torch.Generator().manual_seed(1)
    made = [
        torch.ops.npu.npu_dynamic_mx_quant(
            torch.randn(OWN, n, c, generator=generator) / c**0.5, dst_type=number
        )
        for n, c in ((2 * I, H), (H, I))
    ]
    return made[0][0], made[1][0], made[0][1], made[1][1]


def inputs(tokens: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    weights, ids = torch.randn(tokens, OWN, generator=generator).softmax(-1).topk(K)
    return x, ids, weights


def call(lists: tuple[Any, ...], given: tuple[Tensor, ...], **changed: Any) -> Any:
    where = adopt(
        torch.zeros(4, dtype=torch.int32), Sizes(W, E, K, H, 16, scheme="mxfp8"), ccl_buffer_size=1 << 20
    )
    w1, w2, s1, s2 = (each if isinstance(each, list) else [each] for each in lists)
    return torch.ops.moefuse.mega_moe.quant_ep(
        *(where.tensor, *given, w1, w2, [], [], s1, s2, [], []),
        **{"quant": "mxfp8", "num_experts": E, "ep_world_size": W, "target": "npu"} | changed,
    )


def want(lists: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> Tensor:
    w1, w2, s1, s2 = ([each] for each in lists)
    y: Tensor = torch.ops.moefuse.mega_moe.quant(
        None, *given, w1, w2, [], [], s1, s2, [], [], quant="mxfp8", num_experts=OWN
    )[0]
    return y


@pytest.mark.parametrize("scales_as", [torch.uint8, torch.float8_e8m0fnu])
def test_tensors_are_handed_over_as_they_lie(target: NpuTarget, scales_as: torch.dtype) -> None:
    w1, w2, s1, s2 = experts()
    for tokens in (3, 1):
        given = inputs(tokens)
        y, _ = call((w1, w2, s1.view(scales_as), s2.view(scales_as)), given)
        assert y.equal(want((w1, w2, s1, s2), given))
        assert CALLS[-1]["x"].shape[0] == tokens  # ranks of A5 may have different numbers
    assert CALLS[-1]["weight1"][0].data_ptr() == w1.data_ptr()
    assert CALLS[-1]["weight_scales2"][0].data_ptr() == s2.data_ptr()
    assert copied_bytes() == 0


def test_a_tensor_per_expert(target: NpuTarget) -> None:
    lists, given = experts(), inputs()
    each = tuple(list(tensor.unbind()) for tensor in lists)
    assert call(each, given)[0].equal(want(lists, given))
    assert len(CALLS[-1]["weight1"]) == OWN


def test_an_empty_shard(target: NpuTarget) -> None:
    assert call(experts(), inputs(0))[0].shape == (0, H)
    assert CALLS[-1]["x"].shape[0] == 1


def test_weights_that_lie_the_other_way_round(target: NpuTarget) -> None:
    lists, given = experts(), inputs()
    turned = tuple(tensor.transpose(1, 2).contiguous() for tensor in lists)
    other = {"transpose_weight1": False, "transpose_weight2": False}
    with pytest.raises(NotAllowedError, match=r"weight_layout: aclnnMegaMoe reads weights as \[E, N, K\]"):
        call(turned, given, **other)
    target.tell(copy_weights=True)
    assert call(turned, given, **other)[0].equal(want(lists, given))
    assert copied_bytes() == sum(tensor.nbytes for tensor in lists)
    before = [CALLS[-1][name][0].data_ptr() for name in ("weight1", "weight_scales1")]
    assert call(turned, given, **other)[0].equal(want(lists, given))
    assert [CALLS[-1][name][0].data_ptr() for name in ("weight1", "weight_scales1")] == before
    views = tuple(tensor.transpose(1, 2) for tensor in lists)  # as engines hold them: no copy is due
    assert call(views, given, **other)[0].equal(want(lists, given))
    assert CALLS[-1]["weight1"][0].data_ptr() == lists[0].data_ptr()


def test_other_elements_are_refused_by_name(target: NpuTarget) -> None:
    with pytest.raises(
        NotAllowedError, match="weight_dtype: weights are float8_e5m2; quantisation mxfp8 takes"
    ):
        call(experts(23), inputs())


def test_numbers_of_the_c_interface() -> None:
    w1, _, s1, _ = experts()
    assert _listed("weight1", w1).dtype == 36
    assert _listed("weight1", experts(23)[0]).dtype == 35
    for scale in (s1, s1.view(torch.float8_e8m0fnu)):
        assert (_listed("weight_scales1", scale).dtype, _listed("weight_scales1", scale).shape) == (
            37,
            s1.shape,
        )


def test_ge_has_no_converter_for_it() -> None:
    with pytest.raises(PlanError, match="quant: GE has a converter for integers alone, got mxfp8"):
        ge.convert_quantised(*[None] * 4, *[[]] * 8, quant="mxfp8", num_experts=E, target="npu")
