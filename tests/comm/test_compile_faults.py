"""Ranks that fail or end while a frame is compiled first: the others, which wait for their word, hear of it at once."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.callback import on_compile_start

import moefuse
from moefuse import backend
from moefuse.comm import presence
from moefuse.comm.plans import what_all_want
from moefuse.graph.interpret import CaptureError
from moefuse.passes import agree, pipeline
from tests.comm.matrix import compiled
from tests.comm.ranks import run_ranks, values
from tests.comm.spread_models import ByExpert, alone, tokens

VICTIM = 1
AT_ONCE = 5.0
"""Seconds: one, and what a busy machine may add; ranks would wait for 300."""


def first_run(rank: int, k: int, **options: Any) -> tuple[str, str]:
    """Compile and run a new model; the class and the text of what is raised, or the check and why it isn't fused."""
    model = ByExpert(rank, dist.get_world_size(), k=k)
    x = tokens(3 + rank, rank)
    try:
        with torch.no_grad():
            y = compiled(model, **options)(x)
    except Exception as error:
        inner = getattr(error, "inner_exception", None) or error
        return type(inner).__name__, str(inner).partition("\n\n")[0]
    torch.testing.assert_close(y, alone(k=k)(x), rtol=1e-5, atol=1e-5)
    graph = moefuse.reports()[-1].graphs[-1]
    return next(((site.check, site.reason) for site in graph.sites), ("", graph.note or graph.error))


def one_at_fault(rank: int, broken: Callable[[pytest.MonkeyPatch], None], mode: str) -> list[Any]:
    """Of a model of which one rank says nothing, and of one that is compiled by ranks none the worse."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == VICTIM:
            broken(patch)
        first = first_run(rank, 2, mode=mode, ep_timeout=60)
    return [first, first_run(rank, 3)]


def run_at_fault(rank: int, world: int, cases: list[tuple[Any, str]]) -> list[Any]:
    found = []
    for broken, mode in cases:
        torch._dynamo.reset()
        found.append(one_at_fault(rank, broken, mode))
    return found


def refuse(*_: Any, **__: Any) -> Any:
    raise CaptureError("out of luck")


def break_down(*_: Any, **__: Any) -> Any:
    raise IndexError("out of range")


def not_captured(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backend, "capture", refuse)


def not_lifted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pipeline, "lift", break_down)


CASES = [(not_lifted, "auto", "out of range"), (not_captured, "on", "out of luck")]


def test_an_error_before_a_rank_has_said_a_word_is_news_for_the_others() -> None:
    """The model's own collectives run on all ranks then, and the next model is fused by all."""
    others, victims = values(run_ranks(2, run_at_fault, [case[:2] for case in CASES], timeout=200))
    for (_, mode, why), ((check, said), after) in zip(CASES, victims, strict=True):
        assert why in said
        assert check == ("" if mode == "auto" else "CaptureError")
        assert after == ("", "")
    for (_, mode, why), ((check, said), after) in zip(CASES, others, strict=True):
        assert why in said
        assert check == ("ep_context" if mode == "auto" else "RejectedError")
        assert f"rank {VICTIM} gave up: it doesn't fuse this graph" in said
        assert after == ("", "")


def not_compiled(rank: int, world: int) -> tuple[str, str, float]:
    """The inner compiler fails on one rank when all have agreed; it stays alive, and away."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == VICTIM:
            patch.setattr(backend, "_compile_fused", break_down)
        said = first_run(rank, 2)
    end = time.monotonic()
    dist.barrier()  # nobody hears of it because a process ends
    return *said, time.monotonic() - end


def test_an_error_after_all_have_agreed_is_news_for_those_in_the_layer() -> None:
    other, victim = values(run_ranks(2, not_compiled, timeout=100))
    assert victim[0] == "IndexError"
    assert other[:2] == ("PeerError", "rank 1 failed: IndexError: out of range")
    assert victim[2] < AT_ONCE


def killed(rank: int, world: int, stage: str, port: int) -> tuple[str, str, float]:
    """The victim is killed as Dynamo begins, or in the middle of a capture."""
    if port:  # the store is a rank's, and goes with it
        dist.destroy_process_group()
        store = dist.TCPStore(
            "127.0.0.1", port, world, is_master=rank == VICTIM, timeout=timedelta(seconds=60)
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    died: list[float] = []
    asked = what_all_want

    def watched(*args: Any) -> Any:
        try:
            return asked(*args)
        finally:
            died.append(time.monotonic() - begun)

    def die(*_: Any) -> None:
        time.sleep(2)  # the others wait for its word by then
        os.kill(os.getpid(), signal.SIGKILL)

    agree.what_all_want = watched
    if rank == VICTIM and stage == "trace":
        on_compile_start(die)
    elif rank == VICTIM:
        backend.capture = die
    begun = time.monotonic()
    first_run(rank, 2)  # unfused, in which the group's collectives fail
    (site,) = moefuse.reports()[-1].sites
    return site.check, site.reason, died[0]


@pytest.mark.parametrize(("world", "stage", "own_store"), [(4, "trace", False), (2, "capture", True)])
def test_a_rank_that_is_killed_while_it_compiles_is_named(world, stage, own_store) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] if own_store else 0
    outcomes = run_ranks(world, killed, stage, port, timeout=100)
    assert outcomes[VICTIM].exit_code == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank == VICTIM:
            continue
        assert outcome.error is None, outcome.trace
        check, said, seconds = outcome.value
        assert check == "ep_context"
        assert ("store can't be reached" if own_store else "rank 1 failed: its process ended before") in said
        assert seconds < 3 * AT_ONCE


def test_another_process_is_seen_to_end() -> None:
    """Also while its parent hasn't noticed, and when another one has got its number."""
    child = subprocess.Popen(["sleep", "60"])
    start = presence._start(child.pid)
    assert start == presence._start(child.pid) != ""
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert presence._start(child.pid) == ""
    child.wait()
    assert presence._start(child.pid) == ""
    assert presence._start(os.getpid()) not in ("", start)
