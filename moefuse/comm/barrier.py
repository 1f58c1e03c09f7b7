"""Waiting for the other ranks of a host, with a time limit and an ear for those that fail.

In: the ranks' windows. Out: `Barrier`. Each rank counts its arrivals in its own window and reads the others'. A rank
that raises leaves its name there; one that dies loses the lock on its window. Whoever notices tells the rest.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from moefuse.comm.errors import PeerError
from moefuse.comm.plans import Asked
from moefuse.comm.window import Window, fence

_SPINS = 200
_YIELDS_SECONDS = 0.002
_LONGEST_SLEEP = 0.001
_LOOK_EVERY = 0.01
_BLAME_SECONDS = 0.2
_ENDED = "its process ended, or closed its context"


def poll(done: Callable[[], bool], look: Callable[[], None]) -> None:
    """Wait until `done`: first hot, then yielding the core, then in short sleeps; `look` now and then, it may raise."""
    for _ in range(_SPINS):
        if done():
            return
    look()
    start = looked = time.monotonic()
    while not done():
        now = time.monotonic()
        if now - looked > _LOOK_EVERY:
            look()
            looked = now
        waited = now - start
        time.sleep(0 if waited < _YIELDS_SECONDS else min(waited / 10, _LONGEST_SLEEP))


class Barrier:
    """All ranks of a context, window by window in rank order. asked: whether a rank is elsewhere, None: nobody asks."""

    def __init__(
        self, windows: Sequence[Window], rank: int, timeout: float, asked: Asked | None = None
    ) -> None:
        self.windows, self.rank, self.timeout = windows, rank, timeout
        self._asked = asked

    @property
    def epoch(self) -> int:
        """Barriers that this rank has reached; the C++ step counts on in the same place."""
        return self.windows[self.rank].words[Window.EPOCH]

    def wait(self) -> None:
        """Return when every rank is here. Raises PeerError naming a rank that failed or isn't here in time."""
        fence()
        self.windows[self.rank].words[Window.EPOCH] = self.epoch + 1
        deadline = time.monotonic() + self.timeout
        for peer in range(len(self.windows)):
            if not self._arrived(peer):
                poll(partial(self._arrived, peer), partial(self.look, peer, deadline))
        fence()

    def _arrived(self, peer: int) -> bool:
        return self.windows[peer].words[Window.EPOCH] >= self.epoch

    def look(self, late: int, deadline: float) -> None:
        """Raise PeerError where a rank that isn't here never will be, or where it is too late for rank `late`."""
        self._look_for_word()
        for peer, window in enumerate(self.windows):
            # asked again: it may have arrived, and then ended, since
            if not self._arrived(peer) and not window.alive() and not self._arrived(peer):
                raise self.failure(peer, _ENDED)
        if self._asked is not None and (asking := self._asked.by()) is not None and not self._arrived(asking):
            self._asked.refuse()
            raise self.failure(asking, Asked.WHY)
        if time.monotonic() > deadline:
            raise self.failure(late, f"it didn't reach the barrier within {self.timeout:g} s")

    def blame(self) -> None:
        """Raise PeerError naming the rank at fault, where a rank failed elsewhere than at a barrier and it is known."""
        end = time.monotonic() + _BLAME_SECONDS  # a process that ends closes one thing after another
        while time.monotonic() < end:
            self._look_for_word()
            for peer, window in enumerate(self.windows):
                if not window.alive():
                    raise self.failure(peer, _ENDED)
            time.sleep(_LONGEST_SLEEP)

    def _look_for_word(self) -> None:
        for window in self.windows:
            if (poisoned := window.poisoned()) is not None:
                raise self.failure(*poisoned)

    def failure(self, culprit: int, reason: str) -> PeerError:
        """Pass the news on, and the error to raise."""
        self.windows[self.rank].poison(culprit, reason)
        return PeerError(f"rank {culprit} failed: {reason}", culprit)
