"""Bringing the ranks of a process group together, once, when a context is made.

In: the group's store, rank and size. Out: `Meeting.exchange`, which gives every rank what all ranks said. A rank
that doesn't come in time is named; a rank that fails tells the others, also those that come later.
"""

import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

from moefuse.comm.errors import BusyError, ContextError, RendezvousError

TIMEOUT = 300.0
"""Seconds that a rank waits for the others: they may still be compiling."""
_LONGEST_SLEEP = 0.02


class Store(Protocol):
    """What is used of a process group's key-value store (torch's classes have no public name)."""

    def set(self, key: str, value: str, /) -> None:
        """Write."""

    def get(self, key: str, /) -> bytes:
        """Read; waits for a key that isn't there."""

    def check(self, keys: Sequence[str], /) -> bool:
        """Are all of these keys there?"""


class Meeting:
    """One attempt of all ranks to agree. `name` must be the same on all of them and never used before."""

    def __init__(self, store: Store, name: str, rank: int, world: int, timeout: float) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self._store, self._name = store, name
        self._deadline = time.monotonic() + timeout

    def say(self, step: str, value: Any) -> None:
        """Let the others know, without waiting for them."""
        self._store.set(self._key(step, self.rank), json.dumps(value))

    def exchange(self, step: str, value: Any) -> list[Any]:
        """What each rank said at this step, in rank order (JSON data).

        Raises RendezvousError naming the ranks that didn't come within the timeout, or with the reason of the rank
        that gave up: BusyError where it waits for this one elsewhere.
        """
        self.say(step, value)
        keys = [self._key(step, rank) for rank in range(self.world)]
        pause = 0.0005
        while not self._store.check(keys):
            if self._store.check([self._key("abandoned")]):
                said = json.loads(self._store.get(self._key("abandoned")))
                raise (BusyError if said["busy"] else RendezvousError)(said["reason"])
            if time.monotonic() > self._deadline:
                raise self._too_late(step, keys)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP)
        return [json.loads(self._store.get(key)) for key in keys]

    def abandon(self, reason: str, *, busy: bool = False) -> None:
        """Tell the others, now or when they come, that this attempt is over. busy: see `BusyError`."""
        if not self._store.check([self._key("abandoned")]):  # the first reason is the true one
            said = {"reason": f"rank {self.rank} gave up: {reason}", "busy": busy}
            self._store.set(self._key("abandoned"), json.dumps(said))

    def begin(self) -> None:
        """Let ranks that aren't here yet know that one waits for them."""
        self._store.set(self._key("begun"), str(self.rank))

    def begun(self) -> int | None:
        """A rank that waits here."""
        key = self._key("begun")
        return int(self._store.get(key)) if self._store.check([key]) else None

    def _too_late(self, step: str, keys: list[str]) -> RendezvousError:
        missing = tuple(rank for rank, key in enumerate(keys) if not self._store.check([key]))
        ranks = ", ".join(map(str, missing))
        return RendezvousError(
            f"no word ({step}) from rank {ranks} of {self.world} within {self.timeout:g} s; every rank has to "
            f"compile and run the same layers",
            missing,
        )

    def _key(self, *parts: object) -> str:
        return "/".join(["moefuse", self._name, *map(str, parts)])


def agree(said: list[dict[str, Any]], what: str) -> None:
    """Raise ContextError naming the first rank, and the field, that differs from rank 0."""
    for rank, theirs in enumerate(said):
        for name, value in said[0].items():
            if theirs.get(name) != value:
                raise ContextError(
                    f"{what}: {name} is {value!r} on rank 0 and {theirs.get(name)!r} on rank {rank}"
                )
