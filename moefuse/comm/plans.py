"""What all ranks of a group must decide alike, before any of them runs what was decided.

In: what this rank wants. Out: what every rank wants. Collective: each rank asks as often as the others, in the same
order. A rank that doesn't come in time is named, and every rank hears of it; one that waits in a step of a layer
meanwhile, for a rank that asks here, finds out by `Asked`.
"""

import time
import weakref
from functools import partial
from typing import Any, cast

import torch.distributed as dist

from moefuse.comm.errors import BusyError
from moefuse.comm.presence import announce, ended
from moefuse.comm.rendezvous import TIMEOUT, Meeting, Store

_LOOK_SECONDS = 0.5
_met: dict[str, int] = {}
"""By the name of a group: how often its ranks were asked."""


def what_all_want(group: Any, wish: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Every rank's wish (JSON data), in rank order.

    group: a ProcessGroup. Raises RendezvousError naming the ranks that didn't come within `timeout` seconds, ended or
    gave up, BusyError where one of them waits for this one in a step. Either all ranks that ask get an answer, or none.
    """
    announce()
    meeting = _next_meeting(group, timeout)
    try:
        meeting.begin()
        wishes = meeting.exchange("wish", wish)
        meeting.conclude()
        return wishes
    except BusyError:
        raise
    except BaseException as error:
        meeting.abandon(" ".join(str(error).split()) or type(error).__name__)
        raise


def tell_all(group: Any, wish: Any) -> None:
    """As `what_all_want`, for a rank whose wish decides for all: it needn't wait for the others'."""
    _next_meeting(group, TIMEOUT).say("wish", wish)


def give_up(group: Any, reason: str) -> None:
    """For a rank that has no wish and never will: whoever asks for it gets a RendezvousError with the reason."""
    _next_meeting(group, TIMEOUT).abandon(reason)


def _next_meeting(group: Any, timeout: float) -> Meeting:
    meeting = _meeting(group, timeout)
    _met[group.group_name] = _met.get(group.group_name, 0) + 1
    return meeting


def _meeting(group: Any, timeout: float) -> Meeting:
    store = cast(Store, dist.distributed_c10d._world.pg_map[group][1])
    name = f"plan/{group.group_name}/{_met.get(group.group_name, 0)}"
    return Meeting(store, name, group.rank(), group.size(), timeout, partial(ended, group))


class Asked:
    """Does a rank of the group wait for this one's wish, while this one waits for that rank in a step?"""

    WHY = (
        "it compiles another frame of the model, and waits for this rank to do the same; all ranks have to run the "
        "same layers, with gradients or without"
    )

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)
        self._next_look = 0.0

    def by(self) -> int | None:
        """The rank that waits; asked of the store now and then, as it may be far away."""
        now, group = time.monotonic(), self._group()
        if now < self._next_look or group is None or dist.distributed_c10d._world.pg_map.get(group) is None:
            return None
        self._next_look = now + _LOOK_SECONDS
        return _meeting(group, TIMEOUT).begun()

    def refuse(self) -> None:
        """Tell it so."""
        group = self._group()
        if group is not None:
            _meeting(group, TIMEOUT).abandon(
                "it waits in an expert-parallel layer that is compiled already, for a rank that compiles another; all "
                "ranks have to run the same layers, with gradients or without",
                busy=True,
            )
