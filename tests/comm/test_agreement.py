"""Ranks that don't all do the same while they agree: none fuses alone, none waits twice, and they stay in step."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import moefuse
from moefuse import backend
from moefuse.comm import native, plans, presence
from moefuse.comm.plans import what_all_want
from moefuse.comm.rendezvous import Meeting
from tests.comm.matrix import compiled
from tests.comm.ranks import run_ranks, values
from tests.comm.spread_models import ByExpert, tokens

VICTIM = 1
AT_ONCE = 5.0
"""Seconds: what a busy machine may take for nothing; ranks would wait for 60."""


@contextmanager
def broken(rank: int, where: Any, name: str, instead: Callable[..., Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if rank == VICTIM:
            patch.setattr(where, name, instead)
        yield


# --- meetings --------------------------------------------------------------------------------------------


def ask(rank: int, then: Callable[[list[Any]], Any] = list, timeout: float = 60) -> tuple[str, Any]:
    try:
        return "", what_all_want(dist.group.WORLD, rank, timeout, then)
    except BaseException as error:
        return type(error).__name__, str(error)


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def meetings(rank: int, world: int) -> list[tuple[str, Any]]:
    conclude = Meeting.conclude

    def concluded(meeting: Meeting) -> None:
        conclude(meeting)
        interrupted()

    def said(meeting: Meeting, step: str, value: Any) -> None:
        meeting.say(step, value)
        interrupted()

    def fails(wishes: list[Any]) -> list[Any]:
        return wishes if rank != VICTIM else interrupted()

    found = [ask(rank, fails)]
    with broken(rank, Meeting, "conclude", concluded):
        found.append(ask(rank))
    with broken(rank, Meeting, "exchange", said):
        if rank == VICTIM:
            found.append(ask(rank))
        dist.barrier()
        if rank != VICTIM:
            found.append(ask(rank, interrupted))
    if rank != VICTIM:
        found.append(ask(rank, timeout=0.5))
    dist.barrier()
    begun = time.monotonic()
    found += [ask(rank), ask(rank)]
    assert time.monotonic() - begun < AT_ONCE
    return found


def test_all_ranks_get_as_far_or_none() -> None:
    """It fails between their words and the end; at the end; it gave up before the others came; it doesn't come."""
    other, victim = values(run_ranks(2, meetings))
    gave_up = ("RendezvousError", "rank 1 gave up: KeyboardInterrupt")
    late = "no word (wish) from rank 1 of 2 within 0.5 s; every rank has to compile and run the same layers"
    since = "the ranks ask each other no more since"
    assert other[:4] == [gave_up, ("", [0, 1]), gave_up, ("OutOfStepError", late)]
    assert other[4:] == [("OutOfStepError", f"{since} {late}")] * 2
    assert victim[:3] == [
        ("KeyboardInterrupt", ""),
        ("ConcludedError", "all ranks have agreed, but then, on this one: KeyboardInterrupt"),
        ("KeyboardInterrupt", ""),
    ]
    assert victim[3:] == [
        ("OutOfStepError", f"rank 0 gave up: {late}"),
        ("OutOfStepError", f"{since} rank 0 gave up: {late}"),
    ]


# --- frames ----------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two layers, and on a rank that is loud a print between them: two graphs there, and one on the others."""

    def __init__(self, rank: int, world: int, loud: bool) -> None:
        super().__init__()
        self.a, self.b = ByExpert(rank, world), ByExpert(rank, world, seed=1)
        self.loud = loud

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        if self.loud:
            print(end="")
        return x + self.b(x)


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("not enough")


def run(model: nn.Module, rank: int) -> list[tuple[bool, str]]:
    torch._dynamo.reset()
    return again(compiled(model, ep_timeout=60), rank, False)


def again(call: Any, rank: int, grad: bool) -> list[tuple[bool, str]]:
    """The layers of the last graph: fused, and the check."""
    with torch.set_grad_enabled(grad):
        call(tokens(3 + rank, rank))
    return [(site.fused, site.check) for site in moefuse.reports()[-1].graphs[-1].sites]


def in_step(rank: int, world: int) -> list[Any]:
    """One model after another; what becomes of each."""
    found: list[Any] = []
    if rank == VICTIM:
        if (child := os.fork()) == 0:
            presence.announce()
            os._exit(0)
        os.waitpid(child, 0)
    dist.barrier()
    found.append(presence.ended(dist.group.WORLD, VICTIM))

    with broken(rank, native.NativeStep, "__init__", out_of_memory):
        found.append(run(ByExpert(rank, world), rank))
    found.append(run(ByExpert(rank, world), rank))  # which wants that context again

    call = compiled(ByExpert(rank, world), ep_timeout=60, verify=True)
    with broken(rank, backend, "capture", out_of_memory):
        found.append(again(call, rank, False))
    found.append(again(call, rank, True))
    found.append(run(ByExpert(rank, world, k=3), rank))

    loud = torch.compile(
        Two(rank, world, rank == 0),
        backend="moefuse",
        dynamic=True,
        options={"ep_timeout": 6.0, "inner": "eager"},
    )
    found.append(again(loud, rank, False))
    dist.barrier()
    begun = time.monotonic()
    found.append(run(ByExpert(rank, world), rank))
    return [*found, time.monotonic() - begun < 20, plans._out_of_step[dist.group.WORLD]]


def test_whatever_one_rank_does_the_others_stay_in_step() -> None:
    other, victim = values(run_ranks(2, in_step, timeout=200))
    fused, verify, context = [(True, "")], [(False, "ep_verify")], [(False, "ep_context")]
    assert other[:6] == [False, context, fused, verify, verify, fused]
    assert victim[:6] == [False, [], fused, [], verify, fused]
    assert other[6:9] == [context, context, True]
    assert victim[6:9] == [[(False, "ep_agreement")] * 2, context, True]
    assert "no word (wish) from rank 1 of 2 within 6 s" in other[9]
    assert "no word (wish) from rank 1 of 2 within 6 s" in victim[9]
