"""What all ranks of a group must decide alike, before any of them runs what was decided.

In: what this rank wants. Out: what every rank wants. Collective: each rank asks as often as the others, in the same
order. A rank that doesn't come in time is named, and every rank hears of it.
"""

import itertools
from collections.abc import Iterator
from typing import Any, cast

import torch.distributed as dist

from moefuse.comm.context import TIMEOUT
from moefuse.comm.rendezvous import Meeting, Store

_asked: dict[str, Iterator[int]] = {}


def what_all_want(group: Any, wish: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Every rank's wish (JSON data), in rank order.

    group: a ProcessGroup. Raises RendezvousError naming the ranks that didn't come within `timeout` seconds.
    """
    meeting = _next_meeting(group, timeout)
    try:
        return meeting.exchange("wish", wish)
    except BaseException as error:
        meeting.abandon(" ".join(str(error).split()) or type(error).__name__)
        raise


def tell_all(group: Any, wish: Any) -> None:
    """As `what_all_want`, for a rank whose wish decides for all: it needn't wait for the others'."""
    _next_meeting(group, TIMEOUT).say("wish", wish)


def _next_meeting(group: Any, timeout: float) -> Meeting:
    store = cast(Store, dist.distributed_c10d._world.pg_map[group][1])
    number = next(_asked.setdefault(group.group_name, itertools.count()))
    return Meeting(store, f"plan/{group.group_name}/{number}", group.rank(), group.size(), timeout)
