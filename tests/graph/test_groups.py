"""Groups by torch's names, and by those that HCCL gives."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moefuse.graph.groups import group_of, place_in


@pytest.fixture
def group() -> Iterator[Any]:
    """Two ranks, of which this process is the first; the other is one of torch's fake ones."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_by_its_own_name(group: Any) -> None:
    assert group_of(group.group_name) is group
    assert place_in(group.group_name) == (group.group_name, 2, 0, False)
    assert place_in("nothing") is None


def test_a_group_by_the_name_that_hccl_gives_it(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def name(rank: int, *, init_comm: bool) -> str:
        asked.append((rank, init_comm))
        return "10.0.0.1%lo_60000_0_1"

    backend = SimpleNamespace(get_hccl_comm_name=name)
    world: Any = dist.distributed_c10d._world
    with_npus: Any = ModuleType("a group")
    with_npus._get_backend = lambda _: backend
    groups = dict.fromkeys([ModuleType("without"), with_npus], (None, None))
    monkeypatch.setattr(type(world), "pg_map", property(lambda _: groups))
    assert group_of("10.0.0.1%lo_60000_0_1") is None  # nobody has an NPU
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "device", lambda name: name)  # torch knows of no NPUs here
    assert group_of("10.0.0.1%lo_60000_0_1") is with_npus
    assert group_of("another") is None
    assert group_of("") is None
    assert asked == [(0, False)] * 2  # no communicator is made for being asked
