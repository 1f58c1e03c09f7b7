"""The npu target over a fake library that computes on the CPU: numbers, padding, weights, contexts, refusals."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse.ops  # noqa: F401  registers the operator
from moefuse import policy, targets
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.policy.npu import NotAllowedError
from moefuse.targets.npu import (
    CallError,
    InstallError,
    NpuContext,
    NpuContextError,
    Sizes,
    adopt,
    close_npu_contexts,
    copied_bytes,
    formats,
    npu_context_for,
    refresh,
)
from moefuse.targets.npu import weights as npu_weights
from moefuse.targets.npu.target import NpuTarget, spec_of
from tests.targets.npu.computing import Fake, fake, table

W, E, K, H, I = 2, 4, 2, 1024, 1024  # noqa: E741  the smallest that aclnnMegaMoe R1 takes
MOST = 8
OWN = E // W
# y is rounded to bfloat16, which has eight bits; the sums before it run in float32
CLOSE = {"rtol": 2**-7, "atol": 1e-3}


@pytest.fixture(scope="module", params=["R1", "R6"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return fake(tmp_path_factory.mktemp("vendor"), request.param)


@pytest.fixture
def target(library: Fake) -> Iterator[NpuTarget]:
    """Registered in place of the real one, and taken away again."""
    before, made = targets.get("npu"), NpuTarget(lambda: library.machine, lambda _: 0)
    targets.register(made)
    yield made
    targets.register(before)
    close_npu_contexts()
    assert library.live_handles == 0


@pytest.fixture(scope="module")
def experts() -> tuple[Tensor, Tensor]:
    """[E, H, 2 I] and [E, I, H] of all ranks."""
    generator = torch.Generator().manual_seed(7)
    w1 = torch.randn(E, H, 2 * I, generator=generator) / H**0.5
    w2 = torch.randn(E, I, H, generator=generator) / I**0.5
    return w1.bfloat16(), w2.bfloat16()


def context(rank: int, experts: tuple[Tensor, Tensor], **options: Any) -> NpuContext:
    w1, w2 = experts
    sizes = Sizes(W, E, K, H, options.pop("most", MOST))
    return adopt(table(rank, w1.unbind(), w2.unbind()), sizes, ccl_buffer_size=200 << 20, **options)


def routing(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    weights, ids = torch.randn(tokens, E, generator=generator).softmax(-1).topk(K)
    return x, ids, weights


def own(weight: Tensor, rank: int) -> Tensor:
    return weight[rank * OWN : (rank + 1) * OWN]


def call(where: NpuContext, operands: tuple[Any, ...], **constants: Any) -> tuple[Tensor, Tensor]:
    given = {"transpose_weight1": False, "transpose_weight2": False} | constants
    return torch.ops.moefuse.mega_moe.ep(
        where.tensor, *operands, [], [], num_experts=E, ep_world_size=W, target="npu", **given
    )


def by_loop(
    x: Tensor, ids: Tensor, weights: Tensor, experts: tuple[Tensor, Tensor], limit: float = 1e30
) -> Tensor:
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, k in ((t, k) for t in range(x.shape[0]) for k in range(K)):
        w1, w2 = (w[ids[t, k]].double() for w in experts)
        gate, up = (x[t].double() @ w1).chunk(2)
        a = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        y[t] += float(weights[t, k]) * (a @ w2)
    return y


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize(("rank", "tokens"), [(0, 6), (1, 3), (1, 0), (0, 1), (0, MOST)])
def test_each_rank_gets_its_tokens_results(
    rank: int, tokens: int, uniform: bool, target: NpuTarget, library: Fake, experts: tuple[Tensor, Tensor]
) -> None:
    where = context(rank, experts, uniform_tokens=uniform)
    x, ids, weights = routing(tokens)
    y, nums = call(where, (x, ids, weights, [own(experts[0], rank)], [own(experts[1], rank)]))
    assert (y.shape, y.dtype, nums.dtype) == ((tokens, H), torch.bfloat16, torch.int32)
    torch.testing.assert_close(y.double(), by_loop(x, ids, weights, experts), **CLOSE)
    counts = torch.bincount(ids.flatten(), minlength=E)
    assert nums.tolist() == counts[rank * OWN : (rank + 1) * OWN].tolist()
    rows = max(tokens, 1) if uniform else MOST
    assert (library.count("last_rows"), library.count("last_masked")) == (rows, rows - tokens)


@pytest.mark.parametrize("dtypes", [(torch.int64, torch.bfloat16), (torch.int32, torch.float32)])
def test_ids_and_routing_weights_in_the_dtypes_of_models(
    dtypes: tuple[torch.dtype, torch.dtype], target: NpuTarget, experts: tuple[Tensor, Tensor]
) -> None:
    x, ids, weights = routing(4)
    ids, weights = ids.to(dtypes[0]), weights.to(dtypes[1])
    y, _ = call(context(0, experts), (x, ids, weights, list(own(experts[0], 0)), list(own(experts[1], 0))))
    torch.testing.assert_close(y.double(), by_loop(x, ids, weights, experts), **CLOSE)


def test_a_clamp_is_passed_on(target: NpuTarget, experts: tuple[Tensor, Tensor]) -> None:
    x, ids, weights = routing(4)
    y, _ = call(
        context(0, experts),
        (x, ids, weights, [own(experts[0], 0)], [own(experts[1], 0)]),
        activation_params=[0.5],
    )
    torch.testing.assert_close(y.double(), by_loop(x, ids, weights, experts, 0.5), **CLOSE)


# --- weights ----------------------------------------------------------------------------------------------


def test_weights_that_lie_the_other_way_are_copied_once(
    target: NpuTarget, experts: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    w1, w2 = (own(weight, 0).mT.contiguous() for weight in experts)
    before = copied_bytes()
    ready = [*npu_weights.prepare([w1], True)], [*npu_weights.prepare([w2], True)]
    assert copied_bytes() - before == w1.nbytes + w2.nbytes
    rest = [own(weight, 1).unbind() for weight in experts]
    where = adopt(
        table(0, [*ready[0], *rest[0]], [*ready[1], *rest[1]]),
        Sizes(W, E, K, H, MOST),
        ccl_buffer_size=200 << 20,
    )
    x, ids, weights = routing(5)
    operands = (x, ids, weights, [w1], [w2])
    with pytest.raises(NotAllowedError, match=r"weight_layout: .* as \[E, K, N\] and they lie the other way"):
        call(where, operands, transpose_weight1=True, transpose_weight2=True)
    target.tell(copy_weights=True)
    # a captured graph finds the copies that were made before
    monkeypatch.setattr(npu_weights, "_capturing", lambda _: True)
    y, _ = call(where, operands, transpose_weight1=True, transpose_weight2=True)
    torch.testing.assert_close(y.double(), by_loop(x, ids, weights, experts), **CLOSE)
    w2.mul_(2)
    with pytest.raises(npu_weights.PreparationError, match="a graph is being captured"):
        call(where, operands, transpose_weight1=True, transpose_weight2=True)
    monkeypatch.undo()
    y, _ = call(where, operands, transpose_weight1=True, transpose_weight2=True)
    w2.data.div_(2)  # no version counter shows it
    assert refresh() == 2
    y, _ = call(where, operands, transpose_weight1=True, transpose_weight2=True)
    torch.testing.assert_close(y.double(), by_loop(x, ids, weights, experts), **CLOSE)
    w2.mul_(2)
    # at the copy's old address: the table in the context still holds
    y, _ = call(where, operands, transpose_weight1=True, transpose_weight2=True)
    doubled = torch.cat([own(experts[1], 0) * 2, own(experts[1], 1)])
    torch.testing.assert_close(y.double(), by_loop(x, ids, weights, (experts[0], doubled)), **CLOSE)
    assert copied_bytes() - before == w1.nbytes + w2.nbytes
    del w1, w2, operands, ready
    assert copied_bytes() == before


# --- refusals ---------------------------------------------------------------------------------------------


def operands_of(experts: tuple[Tensor, Tensor], tokens: int = 3) -> tuple[Any, ...]:
    return (*routing(tokens), [own(experts[0], 0)], [own(experts[1], 0)])


def test_more_tokens_than_the_context_holds(target: NpuTarget, experts: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(NpuContextError, match=f"num_max_tokens_per_rank: .* {MOST} tokens per rank, got 9"):
        call(context(0, experts), operands_of(experts, 9))


def test_an_id_out_of_range_is_the_librarys_error(
    target: NpuTarget, library: Fake, experts: tuple[Tensor, Tensor]
) -> None:
    x, ids, weights, w1, w2 = operands_of(experts)
    ids[1, 1] = E
    with pytest.raises(CallError, match=r"aclnnMegaMoe of R\d failed: error 507035, a vector core stopped"):
        call(context(0, experts), (x, ids, weights, w1, w2))


def test_what_the_operator_does_not_take(target: NpuTarget, experts: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(NotAllowedError, match="activation: activation geglu: aclnnMegaMoe"):
        call(context(0, experts), operands_of(experts), activation="geglu")
    with pytest.raises(NotAllowedError, match="layout: gate_up='interleaved'"):
        call(context(0, experts), operands_of(experts), gate_up="interleaved")


def test_contexts_that_do_not_fit(target: NpuTarget, experts: tuple[Tensor, Tensor]) -> None:
    given = operands_of(experts)
    with pytest.raises(NpuContextError, match="no open contexts fit this layer"):
        torch.ops.moefuse.mega_moe.ep(
            torch.zeros(4, dtype=torch.int64),
            *given,
            [],
            [],
            num_experts=E,
            ep_world_size=W,
            transpose_weight1=False,
            transpose_weight2=False,
            target="npu",
        )
    made = context(0, experts)
    y, _ = call(replace(made, tensor=made.tensor.clone()), given)  # a graph compiler's copy
    torch.testing.assert_close(y.double(), by_loop(*given[:3], experts), **CLOSE)
    other = replace(made.sizes, top_k=1)
    with pytest.raises(NpuContextError, match="sizes: this context is in use for"):
        adopt(made.tensor, other, ccl_buffer_size=1)
    adopt(made.tensor.clone(), other, ccl_buffer_size=1)
    wrong = adopt(made.tensor.clone(), other, ccl_buffer_size=1)
    with pytest.raises(NpuContextError, match="top_k: expected 1, got 2"):
        call(wrong, given)
    twin = context(1, experts)
    with pytest.raises(NpuContextError, match="2 open contexts fit this layer"):
        call(replace(twin, tensor=twin.tensor.clone()), given)


@pytest.mark.parametrize(
    "name", ["ep_world_size", "num_experts", "top_k", "hidden", "num_max_tokens_per_rank"]
)
def test_impossible_sizes(name: str) -> None:
    with pytest.raises(NpuContextError, match=f"{name}: expected an integer of at least 1, got 0"):
        replace(Sizes(W, E, K, H, MOST), **{name: 0})


def test_no_context_without_the_vendors_helper() -> None:
    with pytest.raises(NpuContextError, match="isn't initialised"):
        npu_context_for(None, Sizes(W, E, K, H, MOST), intermediate=I)


def test_layers_of_one_rank_are_refused(target: NpuTarget, experts: tuple[Tensor, Tensor]) -> None:
    operands = Operands(*operands_of(experts))
    options = Options(E, W, transpose_weight1=False, transpose_weight2=False)
    spec = spec_of(operands, options)
    assert (spec.intermediate, spec.out_features) == (I, H)
    assert target.supports(spec).ok
    verdict = target.supports(replace(spec, ep_world_size=1))
    assert (verdict.check, verdict.reason) == (
        "ep_world_size",
        "ep world size 1: aclnnMegaMoe takes 2, 4, 8, 16, 32",
    )
    with pytest.raises(NotAllowedError, match="mega_moe on one rank"):
        target.run(None, operands, options)


def test_a_machine_without_a_device_says_what_is_missing() -> None:
    def missing() -> Any:
        raise InstallError("no Ascend device")

    target = NpuTarget(missing)
    assert target.supported().reason == "no Ascend device"
    before = targets.get("npu")
    assert policy.decide(_spec("npu:0")).target == "npu"
    assert policy.decide(_spec("npu:0")).verdict.check == "install"
    assert targets.get("npu") is before


def _spec(device: str) -> Any:
    from moefuse.ops.spec import MoeSpec

    dtypes = (torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16)
    return MoeSpec(E, K, H, I, H, device, *dtypes, ids_checked=True)


# --- graphs -----------------------------------------------------------------------------------------------


def test_one_compile_for_all_token_counts(
    target: NpuTarget, library: Fake, experts: tuple[Tensor, Tensor]
) -> None:
    where = context(0, experts, most=4096, uniform_tokens=True)
    graphs: list[Any] = []

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return call(where, (x, ids, weights, [own(experts[0], 0)], [own(experts[1], 0)]))[0]

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in gm.graph.nodes])
        return gm.forward

    run = torch.compile(layer, backend=backend)
    before = library.count("calls")
    for tokens in (0, 1, 2, 33, 4096):
        given = routing(tokens)
        for tensor in given:
            torch._dynamo.decorators.mark_unbacked(tensor, 0)  # 0 and 1 are sizes like any other
        library.set("computes", tokens < 100)
        y = run(*given)
        assert (library.count("last_rows"), y.shape[0]) == (max(tokens, 1), tokens)
        if tokens < 100:
            torch.testing.assert_close(y.double(), by_loop(*given, experts), **CLOSE)
    library.set("computes", True)
    assert len(graphs) == 1
    assert library.count("calls") - before == 5


def test_what_the_engine_tells(target: NpuTarget, experts: tuple[Tensor, Tensor]) -> None:
    where, given = context(0, experts), operands_of(experts)
    target.tell(lora=True)
    with pytest.raises(NotAllowedError, match="lora: LoRA adapters"):
        call(where, given)
    target.tell()
    call(where, given)
    with pytest.raises(ValueError, match="soc: expected one of tensor_parallel, lora, dynamic_eplb, streams"):
        target.tell(soc="Ascend910B1")


def test_weights_in_another_memory_format_are_refused(
    target: NpuTarget, experts: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "memory_format", lambda _: "FRACTAL_NZ")
    with pytest.raises(NotAllowedError, match="weight_format: weights lie in FRACTAL_NZ format"):
        call(context(0, experts), operands_of(experts))
