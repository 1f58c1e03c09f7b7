"""A rank's window: shared memory of one host that the other ranks map.

In: a size. Out: `Window`, whose tensors lie in the shared memory, and whose header the barrier reads. The file in
/dev/shm has a name from the moment it is complete until all ranks have mapped it, so nothing is left behind by a
process that is killed later. Its owner holds a lock on it for as long as it lives: a file that can be locked belongs
to a process that died between the two, and `remove_stale` removes it.
"""

import errno
import fcntl
import mmap
import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from moefuse.comm.capacity import ALIGNMENT, HEADER_BYTES, Section
from moefuse.comm.errors import WindowError

SHM = Path("/dev/shm")
PREFIX = "moefuse-"
_MAGIC = 0x6D6F65667573652E  # "moefuse."
_VERSION = 1
_REASON, _REASON_BYTES = 512, 1024

# windows of this process: opening one of them anew and closing it would drop its lock
_names: set[str] = set()
_names_lock = threading.Lock()
_fence = threading.Lock()


class Window:
    """One rank's shared memory, as the owner or as a peer sees it."""

    MAGIC, VERSION, RUN, RANK, WORLD, SIZE, EPOCH, CULPRIT, REASON_BYTES = range(9)

    def __init__(self, fd: int, size: int, name: str, *, owned: bool) -> None:
        self.size, self.name, self.owned = size, name, owned
        self._fd = fd
        self._map = mmap.mmap(fd, size)
        self._view = memoryview(self._map)
        self.words = self._view[:_REASON].cast("q")
        """The header's integers; the class constants index them. A word is written by its owner only."""

    @staticmethod
    def create(size: int, run: int, rank: int, world: int) -> "Window":
        """Make and name a window of this process. Raises WindowError where there is no room for it."""
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            fd = os.open(SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise WindowError(f"no shared memory can be made in {SHM}: {error}") from error
        try:
            os.posix_fallocate(fd, 0, size)  # now, not as a bus error at the first use
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            window = Window(fd, size, name, owned=True)
            window._write_header(run, rank, world)
            _link(fd, name)
        except OSError as error:
            os.close(fd)
            hint = f"; is {SHM} too small (docker: --shm-size)?" if error.errno == errno.ENOSPC else ""
            raise WindowError(f"no window of {size} bytes can be made in {SHM}: {error}{hint}") from error
        return window

    @staticmethod
    def attach(name: str, size: int, run: int, rank: int, world: int) -> "Window":
        """Map another rank's window. Raises WindowError where it isn't the window that its owner announced."""
        if not name.startswith(PREFIX) or "/" in name:
            raise WindowError(f"rank {rank}: expected the name of a window, got {name!r}")
        try:
            fd = os.open(SHM / name, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise WindowError(f"rank {rank}: its window {name} can't be opened: {error}") from error
        span = os.fstat(fd).st_size
        if span != size:
            os.close(fd)
            raise WindowError(f"rank {rank}: its window spans {span} bytes, expected {size}")
        window = Window(fd, size, name, owned=False)
        wanted = [_MAGIC, _VERSION, run, rank, world, size]
        if (found := window.words[:6].tolist()) != wanted:
            window.close()
            raise WindowError(f"rank {rank}: its window's header is {found}, expected {wanted}")
        return window

    def tensor(self, section: Section) -> Tensor:
        """A tensor inside the window. Raises WindowError for one that is out of bounds or not aligned."""
        end = section.offset + section.bytes
        if section.offset < HEADER_BYTES or end > self.size:
            raise WindowError(f"bytes {section.offset} to {end} aren't in a window of {self.size} bytes")
        elements = section.bytes // section.dtype.itemsize
        flat = torch.frombuffer(self._map, dtype=section.dtype, count=elements, offset=section.offset)
        if flat.data_ptr() % ALIGNMENT:
            raise WindowError(f"a tensor at byte {section.offset} isn't aligned to {ALIGNMENT} bytes")
        return flat.view(section.shape)

    def alive(self) -> bool:
        """Does the owner still hold its lock? The kernel drops it when the process ends, however it ends."""
        if self.owned:
            return True  # and asking would give the lock away
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.lockf(self._fd, fcntl.LOCK_UN)
        return False

    def poison(self, culprit: int, reason: str) -> None:
        """Say to all who read this window that rank `culprit` failed; the first word on it stands."""
        if self.words[self.CULPRIT]:
            return
        text = reason.encode()[:_REASON_BYTES]
        self._view[_REASON : _REASON + len(text)] = text
        self.words[self.REASON_BYTES] = len(text)
        fence()
        self.words[self.CULPRIT] = culprit + 1

    def poisoned(self) -> tuple[int, str] | None:
        """The failed rank and the reason, None while all is well."""
        culprit = self.words[self.CULPRIT]
        if not culprit:
            return None
        fence()
        text = bytes(self._view[_REASON : _REASON + self.words[self.REASON_BYTES]])
        return culprit - 1, text.decode(errors="replace")

    def unlink(self) -> None:
        """Take the name away; who has mapped the window keeps it."""
        with suppress(FileNotFoundError):
            os.unlink(SHM / self.name)
        with _names_lock:
            _names.discard(self.name)

    def close(self) -> None:
        """Let go of the window; its memory goes when the last tensor in it does."""
        if self._fd < 0:
            return
        if self.owned:
            self.unlink()
        os.close(self._fd)
        self._fd = -1

    def _write_header(self, run: int, rank: int, world: int) -> None:
        for index, value in enumerate((_MAGIC, _VERSION, run, rank, world, self.size)):
            self.words[index] = value


def fence() -> None:
    """Order this thread's memory accesses: what was written before is seen before what is written after.

    A lock taken and released twice is a full barrier on every processor: a release can't pass the
    acquire that follows it.
    """
    for _ in range(2):
        _fence.acquire()
        _fence.release()


def _link(fd: int, name: str) -> None:
    with _names_lock:
        _names.add(name)
    directory = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(fd), SHM / name, src_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)


def available() -> bool:
    """Can this system share memory by name?"""
    return SHM.is_dir() and hasattr(os, "O_TMPFILE") and Path("/proc/self/fd").is_dir()


def remove_stale() -> list[str]:
    """Remove windows whose owners died before all ranks had mapped them; returns their names."""
    if not available():
        return []
    removed = []
    with _names_lock:
        for name in os.listdir(SHM):
            if not name.startswith(PREFIX) or name in _names:
                continue
            with suppress(OSError):  # another user's, or gone meanwhile
                fd = os.open(SHM / name, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    os.unlink(SHM / name)
                    removed.append(name)
                finally:
                    os.close(fd)
    return removed
