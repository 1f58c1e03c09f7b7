"""A change to a user's model that lasts while anybody computes with it.

In: what changes it and what changes it back. Out: `Held`, a context manager for any number of calls at a time.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Held:
    """Every call that enters makes the change (again); the last of concurrent calls to leave undoes it."""

    def __init__(self, change: Callable[[], None], undo: Callable[[], None]) -> None:
        self._change, self._undo = change, undo
        self._lock = threading.Lock()
        self._calls = 0

    @contextmanager
    def during(self) -> Iterator[None]:
        """The model is changed inside."""
        with self._lock:
            self._calls += 1
        try:
            with self._lock:
                self._change()
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if not self._calls:
                    self._undo()
