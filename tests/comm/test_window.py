"""Windows: what is checked when they are mapped, and that none is left behind."""

import errno
import os
import signal

import pytest
import torch

from moefuse.comm import WindowError
from moefuse.comm import window as windows
from moefuse.comm.capacity import HEADER_BYTES, Section
from moefuse.comm.window import PREFIX, SHM, Window

SIZE = HEADER_BYTES + 4096


@pytest.fixture
def own():
    window = Window.create(SIZE, run=7, rank=1, world=2)
    yield window
    window.close()


def in_child(function) -> str:
    """What a forked process says about a window; forked, since a lock doesn't bind the process that holds it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, str(function()).encode())
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as file:
        return file.read()


def test_a_peer_reads_and_writes_the_same_memory(own) -> None:
    section = Section(HEADER_BYTES, (3, 4), torch.float32)
    own.tensor(section).fill_(1.5)

    def peer() -> str:
        view = Window.attach(own.name, SIZE, run=7, rank=1, world=2)
        seen = view.tensor(section).sum().item()
        view.tensor(section)[0] = -1
        return f"{seen} {view.alive()}"

    assert in_child(peer) == "18.0 True"
    assert own.tensor(section)[:, 0].tolist() == [-1, 1.5, 1.5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"size": SIZE + 1}, f"rank 1: its window spans {SIZE} bytes, expected {SIZE + 1}"),
        ({"run": 8}, "rank 1: its window's header is"),
        ({"rank": 0}, "rank 0: its window's header is"),
        ({"world": 4}, "rank 1: its window's header is"),
        ({"name": f"{PREFIX}gone"}, "rank 1: its window moefuse-gone can't be opened"),
        ({"name": "../etc/passwd"}, "expected the name of a window, got '../etc/passwd'"),
    ],
    ids=str,
)
def test_a_window_must_be_what_its_owner_said(own, arguments, words) -> None:
    said = in_child(
        lambda: Window.attach(
            **({"name": own.name, "size": SIZE, "run": 7, "rank": 1, "world": 2} | arguments)
        )
    )
    assert said.startswith("WindowError")
    assert words in said


@pytest.mark.parametrize("offset", [0, HEADER_BYTES - 64, SIZE - 32, SIZE])
def test_tensors_stay_inside(own, offset) -> None:
    with pytest.raises(WindowError, match="aren't in a window of"):
        own.tensor(Section(offset, (16,), torch.float32))


def test_tensors_are_aligned(own) -> None:
    with pytest.raises(WindowError, match="isn't aligned to 64 bytes"):
        own.tensor(Section(HEADER_BYTES + 32, (4,), torch.float32))


def test_closing_takes_the_name_away_and_unlinking_keeps_the_memory(own) -> None:
    tensor = own.tensor(Section(HEADER_BYTES, (4,), torch.float32))
    assert (SHM / own.name).exists()
    own.unlink()
    assert not (SHM / own.name).exists()
    own.close()
    own.close()
    assert tensor.fill_(2.0).sum() == 8


def test_the_first_word_on_a_failure_stands(own) -> None:
    assert own.poisoned() is None
    own.poison(3, "ä" * 2000)
    own.poison(4, "later")
    culprit, reason = own.poisoned()
    assert culprit == 3
    assert reason.startswith("ää")


def test_no_room_is_an_error_that_names_the_bytes(monkeypatch) -> None:
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WindowError, match=rf"{SIZE} bytes .*--shm-size"):
        Window.create(SIZE, 0, 0, 1)
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_dead_owner_is_noticed_and_its_window_removed(own) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # dies between naming its window and taking the name away
        os.write(write, Window.create(SIZE, run=7, rank=0, world=2).name.encode())
        os.kill(os.getpid(), signal.SIGKILL)
    name = os.read(read, 200).decode()
    os.waitpid(pid, 0)
    view = Window.attach(name, SIZE, run=7, rank=0, world=2)
    assert not view.alive()
    view.close()
    assert name in windows.remove_stale()
    assert not (SHM / name).exists()
    assert (SHM / own.name).exists()
    assert in_child(windows.remove_stale) == "[]"  # nor does another process take ours for stale
    assert (SHM / own.name).exists()
