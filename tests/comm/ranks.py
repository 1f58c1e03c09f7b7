"""Runs a function on several ranks, each a process of its own, with a gloo group.

In: the number of ranks and a function of (rank, world, *args). Out: what each rank returned, raised or died of. The
processes are forked from a server that has imported torch once, so a rank starts in milliseconds.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "moefuse.targets", "moefuse.comm", "tests.comm.ranks"])


class Outcome(NamedTuple):
    """value: what the function returned. error: the exception, as (type name, message), and its traceback.

    windows: names of the rank's windows that are left in /dev/shm after its end.
    """

    value: Any = None
    error: tuple[str, str] | None = None
    trace: str = ""
    exit_code: int | None = 0
    windows: tuple[str, ...] = ()


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 90) -> list[Outcome]:
    """All ranks' outcomes. A rank that doesn't end in time is killed, and the test fails."""
    with tempfile.TemporaryDirectory() as directory:
        pairs = [_context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            _context.Process(target=_rank, args=(send, rank, world, directory, function, args))
            for rank, (_, send) in enumerate(pairs)
        ]
        for process in processes:
            process.start()
        for _, send in pairs:
            send.close()
        outcomes = _collect([receive for receive, _ in pairs], time.monotonic() + timeout)
        late = []
        for rank, process in enumerate(processes):
            process.join(5)
            if process.is_alive():
                late.append(rank)
                process.kill()
                process.join()
            left = tuple(path.name for path in Path("/dev/shm").glob(f"moefuse-{process.pid}-*"))
            outcomes[rank] = outcomes[rank]._replace(exit_code=process.exitcode, windows=left)
    assert not late, f"ranks {late} didn't end within {timeout} s"
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; fails with the first traceback where one raised or died."""
    # what went wrong first, before what others heard of it
    order = sorted(
        enumerate(outcomes),
        key=lambda each: each[1].error is not None and each[1].error[0] in ("PeerError", "RendezvousError"),
    )
    for rank, outcome in order:
        assert outcome.error is None, f"rank {rank}:\n{outcome.trace}"
        assert outcome.exit_code == 0, f"rank {rank} ended with {outcome.exit_code}"
        assert not outcome.windows, f"rank {rank} left {outcome.windows} in /dev/shm"
    return [outcome.value for outcome in outcomes]


def _collect(pipes: list[Any], deadline: float) -> list[Outcome]:
    outcomes = [Outcome() for _ in pipes]
    waiting = dict(enumerate(pipes))
    while waiting and time.monotonic() < deadline:
        ready = wait(list(waiting.values()), timeout=0.5)
        for rank, pipe in list(waiting.items()):
            if pipe in ready:
                del waiting[rank]
                with suppress(EOFError):  # it died
                    outcomes[rank] = pipe.recv()
    return outcomes


def _rank(send: Any, rank: int, world: int, directory: str, function: Callable[..., Any], args: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        outcome = Outcome(function(rank, world, *args))
    except BaseException as error:
        outcome = Outcome(error=(type(error).__name__, str(error)), trace=traceback.format_exc())
    send.send(outcome)
    send.close()
    if outcome.error is None:
        dist.destroy_process_group()
    else:
        os._exit(0)  # a broken group may not be destroyed in time
