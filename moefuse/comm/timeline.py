"""What a rank did when, in one step: kept on demand, by the kernel itself.

In: room for some events. Out: `Timeline.events()`. Times are nanoseconds of `time.monotonic_ns()`, the same clock for
all processes of a host.
"""

from array import array
from typing import NamedTuple

KINDS = ("publish", "wait", "pull", "first gemm", "second gemm", "combine")
"""In the order of `Work` in targets/cpu/native/remote.h."""
_FIELDS = 5


class Event(NamedTuple):
    """One stretch of work. expert: a local one, -1 where the work is for all of them."""

    kind: str
    thread: int
    expert: int
    begin: int
    end: int


class Timeline:
    """Room for `capacity` events; later ones are dropped, and counted."""

    def __init__(self, capacity: int = 1 << 16) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: expected at least 1, got {capacity}")
        self._events = array("q", bytes(8 * _FIELDS * capacity))
        self._trace = array("q", (self._events.buffer_info()[0], capacity, 0))

    @property
    def address(self) -> int:
        """Of a `Trace`, for the kernel."""
        return self._trace.buffer_info()[0]

    @property
    def dropped(self) -> int:
        """Events that had no room."""
        return max(0, self._trace[2] - self._trace[1])

    def events(self) -> list[Event]:
        """Those kept so far, by their beginning."""
        count = min(self._trace[2], self._trace[1])
        rows = (self._events[i * _FIELDS : (i + 1) * _FIELDS] for i in range(count))
        return sorted(
            (Event(KINDS[row[0]], *row[1:]) for row in rows),
            key=lambda event: (event.begin, event.thread),
        )
