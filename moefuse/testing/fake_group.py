"""A process group without other processes: graphs with collectives can be traced and rewritten, not run.

In: a world size and a rank. Out: a context in which torch's default process group has that many ranks, this process
being one of them. Collectives return at once, with whatever is in their outputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fake_ep_group(world: int, rank: int = 0) -> Iterator[str]:
    """Yields the group's name. Raises RuntimeError where a process group exists already."""
    from torch.testing._internal.distributed.fake_pg import (
        FakeStore,  # registers the backend; private to torch
    )

    if dist.is_initialized():
        raise RuntimeError("fake_ep_group: expected no process group, one is initialised")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()
