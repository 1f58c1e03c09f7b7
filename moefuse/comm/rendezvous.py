"""Bringing the ranks of a process group together, once, when a context is made.

In: the group's store, rank and size. Out: `Meeting.exchange`, which gives every rank what all ranks said. A rank
that doesn't come in time, or whose process ended, is named; a rank that fails tells the others, also those that come
later. How a meeting ended is written once, by whoever is first: it ends alike for all ranks.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from moefuse.comm.errors import BusyError, CommError, ContextError, OutOfStepError, RendezvousError, reason_of

TIMEOUT = 300.0
"""Seconds that a rank waits for the others: they may still be compiling."""
_LONGEST_SLEEP = 0.02
_LOOK_SECONDS = 0.2
_LOOKED_AFTER = 8
"""So many silent ranks are looked after at a time: each of a thousand that wait would ask about all others."""
_ENDS = {kind.__name__: kind for kind in (RendezvousError, BusyError, OutOfStepError)}


class Store(Protocol):
    """What is used of a process group's key-value store (torch's classes have no public name)."""

    def set(self, key: str, value: str, /) -> None:
        """Write."""

    def get(self, key: str, /) -> bytes:
        """Read; waits for a key that isn't there."""

    def check(self, keys: Sequence[str], /) -> bool:
        """Are all of these keys there?"""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write where the value is the expected one, "" for a key that isn't there; what it is then."""


class Meeting:
    """One attempt of all ranks to agree. `name` must be the same on all of them and never used before.

    ended: whether the process of a rank is known to have ended.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        world: int,
        timeout: float,
        ended: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self._store, self._name, self._ended = store, name, ended

    def say(self, step: str, value: Any) -> None:
        """Let the others know, without waiting for them."""
        with _reached():
            self._store.set(self._key(step, self.rank), json.dumps(value))

    def exchange(self, step: str, value: Any) -> list[Any]:
        """What each rank said at this step, in rank order (JSON data).

        Raises RendezvousError naming the ranks whose process ended, or with the reason of the rank that gave up:
        BusyError where it waits for this one elsewhere, OutOfStepError where some rank didn't come within the timeout.
        After all steps each rank has to `conclude`.
        """
        self.say(step, value)
        deadline = time.monotonic() + self.timeout
        keys = [self._key(step, rank) for rank in range(self.world)]
        silent = [rank for rank in range(self.world) if rank != self.rank]
        pause, next_look = 0.0005, time.monotonic() + _LOOK_SECONDS
        with _reached():
            while not self._store.check(keys):
                self.go_on()
                error = self._late(step, keys) if time.monotonic() > deadline else None
                if error is None and time.monotonic() > next_look:
                    next_look = time.monotonic() + _LOOK_SECONDS
                    error = self._left(step, keys, silent)
                if error is not None and self.abandon(str(error), type(error)):
                    raise error
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_SLEEP)
            return [json.loads(self._store.get(key)) for key in keys]

    def go_on(self) -> None:
        """Raise as `exchange` where a rank gave up by now, which it may do after its word."""
        with _reached():
            if self._store.check([self._key("end")]):
                self.conclude()

    def conclude(self) -> None:
        """All is said. Raises as `exchange` where a rank gave up before any rank was here."""
        with _reached():
            said = self._end({"reason": "", "kind": ""})
        if said["reason"]:
            raise _ENDS[said["kind"]](said["reason"])

    def abandon(self, reason: str, kind: type[RendezvousError] = RendezvousError) -> bool:
        """Tell the others, now or when they come, that this attempt is over. kind: what it is for them.

        False where it is too late for that: all ranks have said what there is to say, and one has concluded.
        """
        try:
            with _reached():
                said = self._end({"reason": f"rank {self.rank} gave up: {reason}", "kind": kind.__name__})
        except RendezvousError:  # nobody can conclude either
            return True
        return bool(said["reason"])

    def _end(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """How this ends: as the first rank said that said so."""
        end: dict[str, Any] = json.loads(self._store.compare_set(self._key("end"), "", json.dumps(verdict)))
        return end

    def begin(self) -> None:
        """Let ranks that aren't here yet know that one waits for them."""
        with _reached():
            self._store.set(self._key("begun"), str(self.rank))

    def begun(self) -> int | None:
        """A rank that waits here."""
        key = self._key("begun")
        return int(self._store.get(key)) if self._store.check([key]) else None

    def _late(self, step: str, keys: list[str]) -> RendezvousError:
        missing = tuple(rank for rank, key in enumerate(keys) if not self._store.check([key]))
        ranks = ", ".join(map(str, missing))
        return OutOfStepError(
            f"no word ({step}) from rank {ranks} of {self.world} within {self.timeout:g} s; every rank has to "
            f"compile and run the same layers",
            missing,
        )

    def _left(self, step: str, keys: list[str], silent: list[int]) -> RendezvousError | None:
        """silent: the ranks whose word hasn't been seen; those of which it is are taken out."""
        looks = _LOOKED_AFTER
        for rank in list(silent):
            ended = self._ended(rank)
            # its word is looked for last: it may have said it, and then ended
            if self._store.check([keys[rank]]):
                silent.remove(rank)
            elif ended:
                return RendezvousError(
                    f"rank {rank} failed: its process ended before its word ({step})", (rank,)
                )
            elif (looks := looks - 1) == 0:
                break
        return None

    def _key(self, *parts: object) -> str:
        return "/".join(["moefuse", self._name, *map(str, parts)])


@contextmanager
def _reached() -> Iterator[None]:
    """Whatever the store says is a RendezvousError."""
    try:
        yield
    except CommError:
        raise
    except RuntimeError as error:
        raise RendezvousError(
            f"the group's store can't be reached, did the process end that holds it? {reason_of(error)}"
        ) from error


def agree(said: list[dict[str, Any]], what: str) -> None:
    """Raise ContextError naming the first rank, and the field, that differs from rank 0."""
    for rank, theirs in enumerate(said):
        for name, value in said[0].items():
            if theirs.get(name) != value:
                raise ContextError(
                    f"{what}: {name} is {value!r} on rank 0 and {theirs.get(name)!r} on rank {rank}"
                )
