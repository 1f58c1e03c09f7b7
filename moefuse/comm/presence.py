"""Which ranks have ended, as far as it can be told from this host.

In: this process, when it begins to compile. Out: `announce`, which writes into the default group's store which process
this rank is, and `ended`, by which others of the same host see that it isn't there any more, before it said anything
else and however it ended. Of ranks on other hosts nothing is known here.
"""

import json
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist

from moefuse.comm.rendezvous import Store

_announced: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""The default groups for which all is said."""


def _say_nothing_of_parents() -> None:
    """What is forked from a rank, as a DataLoader's workers are, isn't that rank, and may end before it."""
    if dist.is_available() and dist.is_initialized():
        _announced.add(dist.group.WORLD)


os.register_at_fork(after_in_child=_say_nothing_of_parents)


def announce(_: object = None) -> None:
    """Once for each default group, by who made it. The argument is that of torch's hook where a compilation starts."""
    if not dist.is_available() or not dist.is_initialized():
        return
    world: Any = dist.group.WORLD
    if world in _announced or (host := _host()) is None:
        return
    _announced.add(world)
    with suppress(RuntimeError):  # a store that can't be reached: what comes next says so
        said = {"host": host, "pid": os.getpid(), "start": _start(os.getpid())}
        _store().set(_key(dist.get_rank()), json.dumps(said))


def ended(group: Any, rank: int) -> bool:
    """Has the process of a group's rank ended? False where it isn't known."""
    key = _key(dist.get_global_rank(group, rank))
    if not _store().check([key]):
        return False
    said = json.loads(_store().get(key))
    return bool(said["host"] == _host() and said["start"] != _start(said["pid"]))


def _key(rank: int) -> str:
    return f"moefuse/present/{rank}"


def _store() -> Store:
    world: Any = dist.group.WORLD
    return cast(Store, dist.distributed_c10d._world.pg_map[world][1])


def _host() -> str | None:
    """Equal for two processes exactly where they see each other under the same numbers; None where they can't."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return None
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def _start(pid: int) -> str:
    """When a process began, in the kernel's ticks; "" for one that has ended, also while its parent hasn't noticed."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
