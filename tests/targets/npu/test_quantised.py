"""Quantised experts on the npu target, over a fake library that computes: numbers, formats, scales, refusals."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import moefuse.ops  # noqa: F401  registers the operator
from moefuse import targets
from moefuse.policy.npu import NotAllowedError
from moefuse.targets.npu import (
    NpuContext,
    NpuContextError,
    PlanError,
    PreparationError,
    Sizes,
    adopt,
    close_npu_contexts,
    copied_bytes,
    formats,
    refresh,
)
from moefuse.targets.npu import weights as npu_weights
from moefuse.targets.npu.target import NpuTarget
from moefuse.testing.npu_reference_kernels.quant import packed
from tests.npu.emulator.kernels import tiled
from tests.support import off
from tests.targets.npu.computing import Fake, fake, table

W, E, K, H, I = 2, 4, 2, 1024, 1024  # noqa: E741  the smallest that aclnnMegaMoe R1 takes
MOST = 4
OWN = E // W
SCHEMES = ("w8a8", "w4a8")
CLOSE = (
    1e-2  # norm-wise; y is bfloat16, and an activation rounded otherwise moves some integers of a row by one
)


class Experts(NamedTuple):
    """All experts' integers as they are [E, K, N], scales [E, N], biases (of w4a8) [E, N]; the matrices as they lie."""

    q1: Tensor
    q2: Tensor
    s1: Tensor
    s2: Tensor
    b1: Tensor
    b2: Tensor
    w1: Tensor
    w2: Tensor

    def own(self, rank: int) -> "Experts":
        return Experts(*(t[rank * OWN : (rank + 1) * OWN] for t in self))


@pytest.fixture(scope="module", params=["R1", "R6"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return fake(tmp_path_factory.mktemp("vendor"), request.param)


@pytest.fixture
def target(library: Fake) -> Iterator[NpuTarget]:
    before, made = targets.get("npu"), NpuTarget(lambda: library.machine, lambda _: 0)
    targets.register(made)
    yield made
    targets.register(before)
    close_npu_contexts()
    assert library.live_handles == 0


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Tensors on the CPU count as tiled where their memory is in this set; casting puts them there."""
    known: set[int] = set()

    def memory_format(tensor: Tensor) -> str:
        return "FRACTAL_NZ" if tensor.untyped_storage().data_ptr() in known else "ND"

    def in_format(tensor: Tensor, name: str) -> Tensor:
        if memory_format(tensor) == name:
            return tensor
        made = tiled(tensor)
        known.add(made.untyped_storage().data_ptr())
        return made

    monkeypatch.setattr(formats, "memory_format", memory_format)
    monkeypatch.setattr(formats, "in_format", in_format)
    return known


@pytest.fixture(scope="module", params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def experts(scheme: str) -> Experts:
    generator = torch.Generator().manual_seed(3)
    top = 127 if scheme == "w8a8" else 8
    integers, scales, assists = [], [], []
    for inputs, outputs in ((H, 2 * I), (I, H)):
        q = torch.randint(-top + 1, top, (E, inputs, outputs), generator=generator, dtype=torch.int8)
        s = (torch.rand(E, outputs, generator=generator) + 0.5) / top / inputs**0.5
        integers.append(q)
        scales.append(s)
        assists.append(8 * (q.float() * s.unsqueeze(1)).sum(1))
    lie = integers if scheme == "w8a8" else [packed(q) for q in integers]
    return Experts(*integers, *scales, *assists, *lie)


def encoded(scale: Tensor) -> Tensor:
    return scale.view(torch.int32).to(torch.int64)


def routing(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    weights, ids = torch.randn(tokens, E, generator=generator).softmax(-1).topk(K)
    return x, ids, weights


def context(rank: int, experts: Experts, scheme: str, **options: Any) -> tuple[NpuContext, list[Tensor]]:
    """The context of a rank; and all tensors that it names, which must live as long."""
    lie = [tiled(experts.w1), tiled(experts.w2), encoded(experts.s1), encoded(experts.s2)]
    lie += [experts.b1, experts.b2] if scheme == "w4a8" else []
    made = adopt(
        table(rank, *(t.unbind() for t in lie)),
        Sizes(W, E, K, H, MOST, scheme=options.pop("sizes", scheme)),
        ccl_buffer_size=200 << 20,
        **options,
    )
    return made, lie


def call(where: NpuContext, own: Experts, given: tuple[Any, ...], scheme: str, **changed: Any) -> Any:
    biases = [[own.b1], [own.b2]] if scheme == "w4a8" else [[], []]
    lists: dict[str, Any] = dict(
        zip(
            ("weight1", "weight2", "weight_scales1", "weight_scales2"),
            ([t] for t in own[6:] + own[2:4]),
            strict=True,
        )
    )
    lists |= {"bias1": biases[0], "bias2": biases[1]}
    constants = {"quant": scheme, "transpose_weight1": False, "transpose_weight2": False} | changed
    lists |= {name: constants.pop(name) for name in list(constants) if name in lists}
    return torch.ops.moefuse.mega_moe.quant_ep(
        where.tensor,
        *given,
        *(
            lists[name]
            for name in ("weight1", "weight2", "bias1", "bias2", "weight_scales1", "weight_scales2")
        ),
        [],
        [],
        num_experts=E,
        ep_world_size=W,
        target="npu",
        **constants,
    )


def by_loop(experts: Experts, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """In float64, each row quantised by itself. The assist of w4a8 takes back what int4 hardware takes off."""
    x, ids, weights = given

    def product(row: Tensor, q: Tensor, s: Tensor) -> Tensor:
        scale = row.abs().max() / 127
        return ((row / scale).round() @ q.double()) * s.double() * scale

    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, k in ((t, k) for t in range(x.shape[0]) for k in range(K)):
        e = int(ids[t, k])
        gate, up = product(x[t].double(), experts.q1[e], experts.s1[e]).chunk(2)
        h = product(torch.nn.functional.silu(gate) * up, experts.q2[e], experts.s2[e])
        y[t] += float(weights[t, k]) * h
    return y


def cast(own: Experts) -> Experts:
    """The experts with matrices that an engine has cast: tensors of their own in tiles."""
    w1, w2 = (formats.in_format(w.clone(), "FRACTAL_NZ") for w in (own.w1, own.w2))
    return own._replace(w1=w1, w2=w2)


def placed(rank: int, experts: Experts, scheme: str) -> tuple[NpuContext, Experts, list[Any]]:
    """A context whose own matrices are those that the call passes, cast by the engine."""
    own = cast(experts.own(rank))
    others = [tiled(t) for t in (experts.w1, experts.w2)]
    every = [
        [*o[: rank * OWN], *mine, *o[(rank + 1) * OWN :]] for o, mine in zip(others, own[6:], strict=True)
    ]
    beside = [encoded(experts.s1), encoded(experts.s2)]
    beside += [experts.b1, experts.b2] if scheme == "w4a8" else []
    addresses = table(rank, *every, *(t.unbind() for t in beside))
    made = adopt(addresses, Sizes(W, E, K, H, MOST, scheme=scheme), ccl_buffer_size=200 << 20)
    return made, own, [every, beside]


# --- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "tokens"), [(0, 3), (1, MOST), (1, 0)])
def test_each_rank_gets_its_tokens_results(
    rank: int, tokens: int, target: NpuTarget, experts: Experts, scheme: str, tiles: set[int]
) -> None:
    where, own, _alive = placed(rank, experts, scheme)
    given = routing(tokens)
    y, nums = call(where, own, given, scheme)
    assert (y.shape, y.dtype, nums.dtype) == ((tokens, H), torch.bfloat16, torch.int32)
    counts = torch.bincount(given[1].flatten(), minlength=E)
    assert nums.tolist() == counts[rank * OWN : (rank + 1) * OWN].tolist()
    if tokens:
        assert off(y, by_loop(experts, given)) < CLOSE


def test_scales_in_any_dtype_and_a_tensor_per_expert(
    target: NpuTarget, experts: Experts, scheme: str, tiles: set[int]
) -> None:
    where, own, _alive = placed(0, experts, scheme)
    given = routing(3)
    want, _ = call(where, own, given, scheme)
    for scales in ([encoded(own.s1)], list(own.s1)):
        lists = {"weight1": [own.w1]} if len(scales) == 1 else {"weight1": list(own.w1)}
        assert call(where, own, given, scheme, weight_scales1=scales, **lists)[0].equal(want)
    assert copied_bytes() == 0  # encoded at each call: nothing is promised of the originals
    target.tell(copy_weights=True)
    assert call(where, own, given, scheme)[0].equal(want)
    assert copied_bytes() == 2 * (own.s1.nbytes + own.s2.nbytes)


# --- weights ----------------------------------------------------------------------------------------------


def test_weights_are_cast_once_where_copies_are_allowed(
    target: NpuTarget, experts: Experts, scheme: str, tiles: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = experts.own(0)
    own = own._replace(w1=own.w1.mT.contiguous(), w2=own.w2.clone())
    before = copied_bytes()
    turned = {"transpose_weight1": True}
    given = routing(3)
    where, alive = context(0, experts, scheme)
    with pytest.raises(NotAllowedError, match=r"weight_format: weights lie in ND format; .* FRACTAL_NZ here"):
        call(where, own, given, scheme, **turned)
    target.tell(copy_weights=True)
    ready = [
        npu_weights.prepare([own.w1], True, "FRACTAL_NZ"),
        npu_weights.prepare([own.w2], False, "FRACTAL_NZ"),
    ]
    assert copied_bytes() - before == own.w1.nbytes + own.w2.nbytes
    every = [[*mine, *t[OWN:]] for mine, t in zip(ready, alive, strict=False)]
    addresses = table(0, *every, *(t.unbind() for t in alive[2:]))
    where = adopt(addresses, where.sizes, ccl_buffer_size=200 << 20)
    monkeypatch.setattr(npu_weights, "_capturing", lambda weight: weight.dim() == 3)
    assert off(call(where, own, given, scheme, **turned)[0], by_loop(experts, given)) < CLOSE
    own.w2.mul_(0)
    with pytest.raises(
        PreparationError, match=r"must be copied for aclnnMegaMoe .* a graph is being captured"
    ):
        call(where, own, given, scheme, **turned)
    monkeypatch.undo()


def test_changes_are_seen(target: NpuTarget, experts: Experts, scheme: str, tiles: set[int]) -> None:
    where, own, _alive = placed(0, experts, scheme)
    target.tell(copy_weights=True)
    given = routing(3)
    scales = own.s2.clone()
    changed = {"weight_scales2": [scales]}
    y, _ = call(where, own, given, scheme, **changed)
    assert off(y, by_loop(experts, given)) < CLOSE
    scales.mul_(0)
    local = (given[1] < OWN).all(1)
    assert call(where, own, given, scheme, **changed)[0].float()[local].abs().max() < y.float().abs().max()
    scales.data.copy_(own.s2)
    assert refresh() >= 2
    assert call(where, own, given, scheme, **changed)[0].equal(y)


# --- refusals ---------------------------------------------------------------------------------------------


def test_what_the_operator_does_not_take(
    target: NpuTarget, experts: Experts, scheme: str, tiles: set[int]
) -> None:
    where, own, _alive = placed(0, experts, scheme)
    given = routing(3)
    grouped = [own.s1.unsqueeze(1).expand(OWN, 4, 2 * I).contiguous()]
    with pytest.raises(NotAllowedError, match=r"weight_scales: the weights have scales for 4 and 1 groups"):
        call(where, own, given, scheme, weight_scales1=grouped)
    with pytest.raises(
        NotAllowedError, match=r"scheme: quantisation w.a16: aclnnMegaMoe takes none, w8a8, w4a8"
    ):
        call(where, own, given, scheme.replace("a8", "a16"))
    odd = adopt(where.tensor.clone(), Sizes(W, E, K, H, MOST), ccl_buffer_size=200 << 20)
    with pytest.raises(NpuContextError, match=r"scheme: expected none, got w.a8 for the context"):
        call(odd, own, given, scheme)
    with pytest.raises(NpuContextError, match="scheme: expected one of none, w8a8, w4a8, mxfp8, got 'w2'"):
        Sizes(W, E, K, H, MOST, scheme="w2")


def test_a_cpus_weights_have_no_tiles(target: NpuTarget, experts: Experts, scheme: str) -> None:
    target.tell(copy_weights=True)
    where, _alive = context(0, experts, scheme)
    with pytest.raises(PreparationError, match="on cpu can't be cast to FRACTAL_NZ"):
        call(where, experts.own(0), routing(2), scheme)


def test_without_gradients_and_other_targets(experts: Experts, scheme: str) -> None:
    where, _alive = context(0, experts, scheme)
    known = r"mega_moe.quant_ep: target: expected one of \['npu', 'reference'\], got 'cpu'"
    with pytest.raises(ValueError, match=known):
        torch.ops.moefuse.mega_moe.quant_ep(
            where.tensor,
            *routing(2),
            *([t] for t in experts.own(0)[6:]),
            *([[], []] if scheme == "w8a8" else ([t] for t in experts.own(0)[4:6])),
            *([t] for t in experts.own(0)[2:4]),
            [],
            [],
            num_experts=E,
            ep_world_size=W,
            quant=scheme,
            transpose_weight1=False,
            transpose_weight2=False,
            target="cpu",
        )
    x, ids, weights = routing(2)
    with pytest.raises(NotImplementedError, match=r"mega_moe.quant_ep has no gradient"):
        call(where, experts.own(0), (x.requires_grad_(), ids, weights), scheme)
    close_npu_contexts()


def test_a_revision_without_the_arguments(library: Fake, scheme: str) -> None:
    from moefuse.targets.npu.plan import Plan

    with pytest.raises(PlanError, match="bias1: aclnnMegaMoe R0 has no such argument"):
        Plan("R0").own({"bias1": [1]})
