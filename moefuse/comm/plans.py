"""What all ranks of a group must decide alike, before any of them runs what was decided.

In: what this rank wants. Out: what every rank wants. Collective: each rank asks as often as the others, in the same
order. A rank that doesn't come in time is named, and every rank hears of it; as nobody knows any more who asks about
what, they don't ask each other again. A rank that waits in a step of a layer meanwhile, for a rank that asks here,
finds out by `Asked`.
"""

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch.distributed as dist

from moefuse.comm.errors import BusyError, ConcludedError, OutOfStepError, RendezvousError, reason_of
from moefuse.comm.presence import announce, ended
from moefuse.comm.rendezvous import TIMEOUT, Meeting, Store

T = TypeVar("T")
_LOOK_SECONDS = 0.5
_met: dict[str, int] = {}
"""By the name of a group: how often its ranks were asked."""
_out_of_step: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()
"""By group: since when its ranks don't ask each other any more."""


def what_all_want(group: Any, wish: Any, timeout: float, then: Callable[[list[Any]], T]) -> T:
    """What `then` makes of every rank's wish (JSON data), in rank order. Either all ranks get that far, or none.

    group: a ProcessGroup. then: what may still fail; if it raises on one rank, all others get a RendezvousError.

    Raises:
        RendezvousError: naming the rank that ended, gave up or raised: OutOfStepError where one didn't come within
            `timeout` seconds, now or ever before, BusyError where one waits for this one in a step.
        ConcludedError: too late to raise anything else: the other ranks got that far.
    """
    announce()
    meeting = _next_meeting(group, timeout)
    try:
        if (since := _out_of_step.get(group)) is not None:
            raise OutOfStepError(f"the ranks ask each other no more since {since}")
        meeting.begin()
        wishes = meeting.exchange("wish", wish)
        meeting.go_on()
        result = then(wishes)
        meeting.exchange("ready", True)
        meeting.conclude()
        return result
    except BaseException as error:
        reason = reason_of(error)
        if isinstance(error, OutOfStepError):
            _out_of_step.setdefault(group, reason)
        kind = type(error) if isinstance(error, RendezvousError) else RendezvousError
        if not meeting.abandon(reason, kind):
            raise ConcludedError(f"all ranks have agreed, but then, on this one: {reason}") from error
        raise


def tell_all(group: Any, wish: Any) -> None:
    """As `what_all_want`, for a rank whose wish decides for all: it needn't wait for the others'."""
    meeting = _next_meeting(group, TIMEOUT)
    meeting.say("wish", wish)
    meeting.say("ready", True)


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
                BusyError,
            )
