"""dispatch_ffn_combine as the second operator: when it's taken, what it is given, what is said where neither fits."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse.ops  # noqa: F401  registers the operator
from moefuse import targets
from moefuse.ops.options import Options
from moefuse.ops.spec import MoeSpec
from moefuse.targets.npu import (
    Identified,
    NpuContext,
    NpuContextError,
    Sizes,
    close_npu_contexts,
    formats,
    ge,
)
from moefuse.targets.npu import combine as module
from moefuse.targets.npu import context as contexts
from moefuse.targets.npu.combine import loaded
from moefuse.targets.npu.machine import Machine
from moefuse.targets.npu.plan import PlanError
from moefuse.targets.npu.target import NpuTarget

W, E, K, H, I = 2, 4, 2, 1024, 1024  # noqa: E741
BF16 = torch.bfloat16
SPEC = MoeSpec(
    E, K, H, I, H, "npu:0", BF16, torch.int8, torch.float32, BF16, ep_world_size=W, ids_checked=True,
    transpose_weight1=False, transpose_weight2=False, quant="w8a8",
)  # fmt: skip
SCHEMA = (
    "dispatch_ffn_combine(Tensor x, Tensor[] weight1, Tensor[] weight2, Tensor expert_idx, Tensor[] scale1,"
    " Tensor[] scale2, Tensor[] bias1, Tensor[] bias2, Tensor probs, str group, int max_output_size, Tensor! out,"
    " Tensor! expert_token_nums, Tensor? x_active_mask=None, float swiglu_limit=1000000.0)"
    " -> (Tensor out, Tensor expert_token_nums)"
)
CALLS: list[tuple[Any, ...]] = []
LIBRARY = torch.library.Library("tests_C_ascend", "FRAGMENT")
LIBRARY.define(SCHEMA)
LIBRARY.define(
    SCHEMA.replace("_combine(", "_combine_of_tomorrow(").replace("int max", "int world_size, int max")
)


def note(*args: Any) -> tuple[Tensor, Tensor]:
    CALLS.append(args)
    args[11].fill_(2)
    return args[11], args[12]


LIBRARY.impl("dispatch_ffn_combine", note, "CompositeExplicitAutograd")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NAMESPACE", "tests_C_ascend")
    monkeypatch.setattr(formats, "memory_format", lambda t: "FRACTAL_NZ" if t.dtype == torch.int8 else "ND")


def target(revision: str = "") -> NpuTarget:
    """On a machine with the operator, and with an aclnnMegaMoe of that revision."""
    library: Any = None
    identified = Identified(revision, ()) if revision else None
    made = NpuTarget(lambda: Machine("Ascend910_9382", library, identified, combine=loaded()))
    made.tell(weights_cast=True)
    return made


def test_only_the_known_version_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded() is torch.ops.tests_C_ascend.dispatch_ffn_combine.default
    monkeypatch.setattr(module, "NAME", "dispatch_ffn_combine_of_tomorrow")
    assert loaded() is None  # it has an argument more
    monkeypatch.setattr(module, "NAME", "dispatch_gmm_combine_decode")
    assert loaded() is None


def test_it_is_taken_where_only_it_fits() -> None:
    operators = {"": "dispatch_ffn_combine", "R4": "dispatch_ffn_combine", "R6": "aclnnMegaMoe"}
    for revision, operator in operators.items():
        verdict = target(revision).supports(SPEC, 64)
        assert verdict.ok, verdict.reason
        assert verdict.checks[0].facts["conditions"].revision == (
            operator if operator == "dispatch_ffn_combine" else revision
        )
    assert not target("R4").supports(SPEC, 513).ok  # more tokens than it takes
    assert target("R6").supports(SPEC, 513).ok


def test_where_neither_fits_both_say_why() -> None:
    floats = replace(SPEC, quant="none", expert_dtype=BF16, intermediate=3584)
    verdict = target("R6").supports(floats)
    assert verdict.check == "intermediate"
    assert verdict.reason == (
        "intermediate 3584: aclnnMegaMoe takes 512..3072 by 512; dispatch_ffn_combine: intermediate 3584: "
        "dispatch_ffn_combine takes 1024..3072 by 512"
    )
    alone = target().supports(replace(SPEC, quant="none", expert_dtype=BF16))
    assert (alone.check, alone.reason) == (
        "scheme",
        "quantisation none: dispatch_ffn_combine takes w8a8, w4a8 here",
    )


@pytest.fixture
def registered() -> Iterator[NpuTarget]:
    before, made = targets.get("npu"), target()
    targets.register(made)
    yield made
    targets.register(before)
    close_npu_contexts()


def test_what_it_is_given(registered: NpuTarget) -> None:
    sizes = Sizes(W, E, K, H, 16, scheme="w8a8")
    assert sizes.worst_receive == W * 16 * K
    where = contexts._remember(
        NpuContext(
            torch.zeros(1, dtype=torch.int64), replace(sizes, max_recv_token_num=64), 0, hccl="10.0.0.1_0"
        )
    )
    w1, w2 = torch.zeros(E // W, H, 2 * I, dtype=torch.int8), torch.zeros(E // W, I, H, dtype=torch.int8)
    y, nums = torch.ops.moefuse.mega_moe.quant_ep(
        where.tensor,
        torch.randn(3, H).to(BF16),
        torch.tensor([[0, 1]] * 3),
        torch.ones(3, K),
        *([w1], [w2], [], []),
        *([torch.ones(E // W, 2 * I)], [torch.ones(E // W, H)], [], []),
        quant="w8a8",
        num_experts=E,
        ep_world_size=W,
        transpose_weight1=False,
        transpose_weight2=False,
        target="npu",
    )
    assert (y.shape, float(y.float().min()), nums.shape) == ((3, H), 2.0, (E // W,))
    given = dict(zip(module.ARGUMENTS, CALLS.pop(), strict=False))
    assert (given["group"], given["max_output_size"], given["x"].shape) == ("10.0.0.1_0", 64, (16, H))
    assert given["x_active_mask"].tolist() == [True] * 3 + [False] * 13
    assert [len(given[n]) for n in ("weight1", "weight2", "scale1", "scale2", "bias1")] == [2, 2, 2, 2, 1]
    assert given["weight1"][1].data_ptr() == w1[1].data_ptr()
    assert (given["scale1"][0].dtype, given["bias1"][0].numel()) == (torch.int64, 0)
    assert (given["expert_idx"].dtype, given["probs"].dtype) == (torch.int32, torch.float32)


def test_it_goes_into_no_ge_graph(registered: NpuTarget) -> None:
    sizes = Sizes(W, E, K, H, 16, scheme="w8a8", max_recv_token_num=64)
    contexts._remember(NpuContext(torch.zeros(1, dtype=torch.int64), sizes, 0, hccl="10.0.0.1_0"))
    own: Any = (SimpleNamespace(symsize=(3, H)), SimpleNamespace(symsize=(3, K)), None)
    options = Options(num_experts=E, ep_world_size=W)
    with pytest.raises(PlanError, match="DispatchFFNCombine infers no shape of its outputs"):
        ge._converted("npu", None, own, [], [], options, "w8a8")


def test_a_group_without_hccl() -> None:
    class Group:
        """No backend for NPUs."""

    with pytest.raises(NpuContextError, match="group: HCCL has no communicator for it"):
        contexts.combine_context_for(Group(), Sizes(W, E, K, H, 16, scheme="w8a8"))
