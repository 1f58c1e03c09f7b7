"""The vendor's own package, in place of which a fake one is imported: its torch operator and its contexts."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moefuse.ops  # noqa: F401  registers the operator
from moefuse import targets
from moefuse.targets.npu import (
    InstallError,
    NpuContextError,
    PlanError,
    Sizes,
    close_npu_contexts,
    formats,
    npu_context_for,
)
from moefuse.targets.npu import machine as machines
from moefuse.targets.npu.calls import named_activation
from moefuse.targets.npu.machine import Machine, hccl_buffer_bytes
from moefuse.targets.npu.target import NpuTarget

E, K, H, I = 4, 2, 1024, 1024  # noqa: E741
SCHEMA = (
    "npu_mega_moe(Tensor context, Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] weight1, Tensor[] weight2,"
    " int moe_expert_num, int ep_world_size, int ccl_buffer_size, *, Tensor[]? weight_scales1=None,"
    " Tensor[]? weight_scales2=None, Tensor[]? bias1=None, Tensor[]? bias2=None,"
    " Tensor? x_active_mask=None, int max_recv_token_num=0, int dispatch_quant_mode=0, str comm_alg='',"
    " int? dispatch_quant_out_dtype=None,"
    " int num_max_tokens_per_rank=0, str activation='swiglu', float? activation_clamp=None,"
    " Dict(str, float)? activation_params=None, int? topo_type=None, int? rank_num_per_server=None)"
    " -> (Tensor, Tensor)"
)
CALLS: list[dict[str, Any]] = []
LIBRARY = torch.library.Library("cann_ops_transformer", "FRAGMENT")


def operator() -> Any:
    if not hasattr(torch.ops.cann_ops_transformer, "npu_mega_moe"):
        LIBRARY.define(SCHEMA)
        LIBRARY.impl("npu_mega_moe", note, "CompositeExplicitAutograd")
    return torch.ops.cann_ops_transformer.npu_mega_moe.default


def note(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    names = [argument.name for argument in operator()._schema.arguments]
    CALLS.append(dict(zip(names, args, strict=False)) | options)
    return args[1] * 2, torch.zeros(len(args[4]), dtype=torch.int32)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """cann_ops_transformer on the path, with the helper that makes contexts."""
    folder = tmp_path / "cann_ops_transformer" / "ops"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(
        "import torch\n"
        "made, ended = [], []\n"
        "class SymmBuffer:\n"
        "    def __init__(self, group, ep):\n"
        "        self.context, self.ccl_buffer_size = torch.arange(8, dtype=torch.int32), 300 << 20\n"
        "        self.topo_type, self.rank_num_per_server = 1, ep\n"
        "    def destroy(self):\n"
        "        ended.append(self)\n"
        "def get_symm_buffer_for_mega_moe(group, *sizes, max_recv_token_num=0, **quantised):\n"
        "    made.append((sizes, max_recv_token_num, *quantised.values()))\n"
        "    return SymmBuffer(group, 2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    close_npu_contexts()
    for name in [name for name in sys.modules if name.startswith("cann_ops_transformer")]:
        del sys.modules[name]


@pytest.fixture
def group() -> Iterator[None]:
    """Two ranks, of which this process is the first; the others are torch's fake ones."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


SIZES = Sizes(2, E, K, H, 16, 64)


def test_one_context_per_group_and_sizes(package: Path, group: None) -> None:
    import cann_ops_transformer.ops as vendor

    first = npu_context_for(None, SIZES, intermediate=I)
    assert npu_context_for(None, SIZES, intermediate=I) is first
    assert vendor.made == [((E, 16, K, H, I), 64)]
    assert (first.ccl_buffer_size, first.topo_type, first.rank_num_per_server) == (300 << 20, 1, 2)
    close_npu_contexts()
    assert len(vendor.ended) == 1
    with pytest.raises(NpuContextError, match=r"group: expected 4 ranks \(ep_world_size\), got 2"):
        npu_context_for(None, Sizes(4, E, K, H, 16), intermediate=I)


def test_without_the_package_an_engine_hands_its_own_over(group: None) -> None:
    with pytest.raises(NpuContextError, match="an engine that has one of its own hands it over"):
        npu_context_for(None, SIZES, intermediate=I)


def test_a_package_without_the_helper(package: Path, group: None) -> None:
    (package / "__init__.py").write_text("")
    with pytest.raises(NpuContextError, match="has no get_symm_buffer_for_mega_moe"):
        npu_context_for(None, SIZES, intermediate=I)


def test_the_torch_operator_is_called_by_name(package: Path, group: None) -> None:
    library: Any = None
    identified: Any = type("Identified", (), {"revision": "R6"})
    target = NpuTarget(lambda: Machine("Ascend910_9382", library, identified, operator()))
    before = targets.get("npu")
    targets.register(target)
    try:
        where = npu_context_for(None, SIZES, intermediate=I, uniform_tokens=True)
        x = torch.randn(3, H).bfloat16()
        w1, w2 = torch.zeros(2, H, 2 * I).bfloat16(), torch.zeros(2, I, H).bfloat16()
        options = {
            "num_experts": E,
            "ep_world_size": 2,
            "transpose_weight1": False,
            "transpose_weight2": False,
        }
        y, _ = torch.ops.moefuse.mega_moe.ep(
            where.tensor,
            x,
            torch.zeros(3, K, dtype=torch.int64),
            torch.ones(3, K),
            [w1],
            [w2],
            [],
            [],
            **options,
            activation="swigluoai",
            activation_params=[7.0, 1.702, 1.0],
            target="npu",
        )
    finally:
        targets.register(before)
    torch.testing.assert_close(y, x * 2, rtol=0, atol=0)
    call = CALLS.pop()
    assert call["context"] is where.tensor
    assert [len(call["weight1"]), call["weight1"][1].data_ptr()] == [2, w1[1].data_ptr()]
    wanted = {
        "moe_expert_num": E,
        "ep_world_size": 2,
        "ccl_buffer_size": 300 << 20,
        "max_recv_token_num": 64,
        "num_max_tokens_per_rank": 16,
        "activation": "swigluoai",
        "activation_clamp": 7.0,
        "topo_type": 1,
        "rank_num_per_server": 2,
    }
    assert {name: call[name] for name in wanted} == wanted
    assert dict(call["activation_params"]) == {"alpha": 1.702, "beta": 1.0}
    assert (call["topk_ids"].dtype, call["topk_weights"].dtype) == (torch.int32, torch.float32)


def test_quantised_experts_by_name(package: Path, group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import cann_ops_transformer.ops as vendor

    monkeypatch.setattr(formats, "memory_format", lambda _: "FRACTAL_NZ")
    identified: Any = type("Identified", (), {"revision": "R6"})
    library: Any = None
    before = targets.get("npu")
    targets.register(NpuTarget(lambda: Machine("Ascend910_9382", library, identified, operator())))
    try:
        where = npu_context_for(None, replace(SIZES, scheme="w4a8"), intermediate=I)
        assert vendor.made == [((E, 16, K, H, I), 64, 2, torch.int8)]
        w1, w2 = torch.zeros(2, H, I // 4, dtype=torch.int32), torch.zeros(2, I, H // 8, dtype=torch.int32)
        torch.ops.moefuse.mega_moe.quant_ep(
            where.tensor,
            torch.randn(3, H).bfloat16(),
            torch.zeros(3, K, dtype=torch.int64),
            torch.ones(3, K),
            [w1],
            [w2],
            [torch.zeros(2, 2 * I).bfloat16()],
            [torch.zeros(2, H)],
            [torch.ones(2, 2 * I)],
            [torch.ones(2, H)],
            [],
            [],
            quant="w4a8",
            num_experts=E,
            ep_world_size=2,
            transpose_weight1=False,
            transpose_weight2=False,
            target="npu",
        )
    finally:
        targets.register(before)
    call = CALLS.pop()
    assert (call["dispatch_quant_mode"], call["dispatch_quant_out_dtype"]) == (2, 256 + 2)
    listed = {"weight_scales1": torch.int64, "weight_scales2": torch.int64, "bias1": torch.float32}
    assert {name: {t.dtype for t in call[name]} for name in listed} == {n: {d} for n, d in listed.items()}
    assert call["weight_scales1"][1].shape == (2 * I,)
    assert int(call["weight_scales2"][0][0]) == 0x3F800000  # the bits of 1.0


def test_activations_by_name() -> None:
    assert named_activation("swiglu", []) == {}
    assert named_activation("swiglustep", [7.0]) == {"activation_clamp": 7.0}
    assert named_activation("situglu", [2.0, 3.0]) == {"activation_params": {"beta": 2.0, "linear_beta": 3.0}}
    with pytest.raises(PlanError, match="npu_mega_moe has no 'geglu'"):
        named_activation("geglu", [])


def test_the_communication_buffer_of_the_environment() -> None:
    assert hccl_buffer_bytes({}) == 200 << 20
    assert hccl_buffer_bytes({"HCCL_BUFFSIZE": "512"}) == 512 << 20
    with pytest.raises(InstallError, match="HCCL_BUFFSIZE: expected a number of MB, got 'much'"):
        hccl_buffer_bytes({"HCCL_BUFFSIZE": "much"})


def test_a_machine_without_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    machines.machine.cache_clear()
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    with pytest.raises(InstallError, match="torch_npu isn't imported in this process"):
        machines.machine()
    npu = SimpleNamespace(device_count=lambda: 0)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=npu))
    with pytest.raises(InstallError, match="torch_npu sees no Ascend device"):
        machines.machine()


def test_a_package_whose_operator_does_not_load(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "__init__.py").write_text("raise OSError('no driver')\n")
    with pytest.raises(InstallError, match="installed, but its npu_mega_moe doesn't load: no driver"):
        machines._official()
