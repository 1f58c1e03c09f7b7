"""Process groups by the names under which collectives of a graph call them.

In: a name, as `_c10d_functional` operators carry it, or a group. Out: the group, its size and this process's rank.
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

SENDS = ("all_to_all", "reduce_scatter", "moe_distribute_dispatch")
"""Part of the name of some collective in every graph in which rows go to the experts of other ranks and come back."""


class Place(NamedTuple):
    """This process's place in a process group. live: its ranks are processes, and not those of torch's fake group."""

    name: str
    world: int
    rank: int
    live: bool


def group_of(name: object) -> Any:
    """The process group of that name; None for a name of no group that this process is in.

    Ascend's operators name a group as HCCL does: that is found, too, once the group's communicator is made.
    """
    if not isinstance(name, str) or not torch.distributed.is_available():
        return None
    if not torch.distributed.is_initialized():
        return None
    resolve: Any = vars(torch.distributed.distributed_c10d)["_resolve_process_group"]  # has no public name
    try:
        return resolve(name)
    except (LookupError, RuntimeError, ValueError):
        return _of_hccl(name)


def _of_hccl(name: str) -> Any:
    """The group of which HCCL's communicator has that name."""
    if not name or "torch_npu" not in sys.modules:
        return None
    world: Any = torch.distributed.distributed_c10d._world
    return next((group for group in world.pg_map if _hccl_name(group) == name), None)


def _hccl_name(group: Any) -> str:
    try:
        backend = group._get_backend(torch.device("npu"))
        return str(backend.get_hccl_comm_name(torch.distributed.get_rank(), init_comm=False))
    except (AttributeError, RuntimeError):  # a group without NPUs
        return ""


def place_in(name: object) -> Place | None:
    """The place in the group of that name, by torch's own name for it; None where this process is in no such group."""
    group = group_of(name)
    if group is None:
        return None
    live = torch.distributed.get_backend(group) != "fake"
    return Place(str(group.group_name), group.size(), group.rank(), live)


def name_of(group: Any) -> str | None:
    """The name of a process group that this process is in, or of one that is given by name; None for anything else."""
    if isinstance(group, str):
        return group if group_of(group) is not None else None
    name = getattr(group, "group_name", None)
    return name if isinstance(name, str) and group_of(name) is not None else None


def senders(gm: GraphModule) -> Iterator[Place]:
    """The places in the groups whose ranks may send each other rows in this graph: known before anything is proved."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if any(word in str(node.target) for word in SENDS):
                places = map(place_in, map(name_of, (*node.args, *node.kwargs.values())))
                yield from (place for place in places if place is not None and place.live)
