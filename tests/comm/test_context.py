"""Contexts: one per group, device and capacity; what goes wrong while they are made; how they end."""

import dataclasses
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from moefuse.comm import (
    Capacity,
    ContextError,
    ContextInUseError,
    RendezvousError,
    close_contexts,
    context_for,
    contexts,
)
from moefuse.comm.context import resolve
from moefuse.comm.rendezvous import Meeting
from tests.comm.layers import spread
from tests.comm.ranks import run_ranks, values

CAPACITY = Capacity(2, 8, 2, 6, 5, 16, torch.float32)
FOUR = dataclasses.replace(CAPACITY, ep_world_size=4)


def many_layers(rank: int, world: int) -> tuple[int, int, bool]:
    layers = [context_for(None, CAPACITY, timeout=20) for _ in range(48)]
    other = context_for(None, dataclasses.replace(CAPACITY, hidden=12), timeout=20)
    first = layers[0]
    assert (first.rank, first.world_size, first.transport) == (rank, world, "shared memory")
    assert first.bytes == CAPACITY.window_bytes
    assert resolve(first.tensor) is first
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(context_for(None, CAPACITY, timeout=20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(set(map(id, layers + found))), len(contexts()), other is first


def test_one_context_for_all_layers_of_a_capacity() -> None:
    assert values(run_ranks(2, many_layers)) == [(1, 2, False)] * 2


def two_groups(rank: int, world: int) -> list[float]:
    """Two threads per rank, each with a group, a context and steps of its own."""
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
    pair, everyone = (low if rank < 2 else high), dist.new_group([0, 1, 2, 3])
    layer = spread(5, top_k=2)
    made = [(2, context_for(pair, CAPACITY, timeout=30)), (4, context_for(everyone, FOUR, timeout=30))]
    worst = [0.0, 0.0]

    def steps(which: int) -> None:
        size, context = made[which]
        tokens = layer.tokens(rank, 7 + which)
        want = layer.alone(tokens)
        for _ in range(10):
            y, _ = layer.together(context.tensor, context.rank, size, tokens, "reference")
            worst[which] = max(worst[which], (y - want).abs().max().item())

    threads = [threading.Thread(target=steps, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[0][1].traffic != made[1][1].traffic
    return worst


def test_two_groups_and_two_threads_do_not_disturb_each_other() -> None:
    for worst in values(run_ranks(4, two_groups)):
        assert max(worst) < 1e-5  # float32 rounding of values of size 1


def late(rank: int, world: int) -> str:
    """Rank 1 comes too late, is told so, and at the second try all is well."""
    if rank == 1:
        time.sleep(1.5)
    with pytest.raises(RendezvousError) as caught:
        context_for(None, FOUR, timeout=0.7)
    assert not contexts()
    again = context_for(None, FOUR, timeout=20)
    assert again is context_for(None, FOUR, timeout=20)
    return str(caught.value)


def test_the_missing_rank_is_named_and_a_failure_is_not_remembered() -> None:
    said = values(run_ranks(4, late))
    assert "no word (hello) from rank 1 of 4 within 0.7 s" in said[0]
    assert "gave up" in said[1]
    assert "no word (hello) from rank 1 of 4" in said[1]


def disagree(rank: int, world: int, field: str) -> str:
    wanted = dataclasses.replace(CAPACITY, **{field: 16 if rank == 0 else 24})
    with pytest.raises((ContextError, RendezvousError)) as caught:
        context_for(None, wanted, timeout=10)
    return str(caught.value)


@pytest.mark.parametrize("field", ["max_tokens_per_rank", "hidden", "num_experts"])
def test_ranks_that_disagree_are_told_about_what(field) -> None:
    for said in values(run_ranks(2, disagree, field)):
        assert f"{field} is 16 on rank 0 and 24 on rank 1" in said


def no_room(rank: int, world: int) -> str:
    if rank == 1:
        os.posix_fallocate = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    with pytest.raises(Exception, match="No space left") as caught:
        context_for(None, CAPACITY, timeout=10)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_rank_without_room_fails_all_ranks_and_leaves_nothing() -> None:
    first, second = values(run_ranks(2, no_room))  # values() looks at /dev/shm
    assert first.startswith("RendezvousError: rank 1 gave up: no window of")
    assert second.startswith("WindowError: no window of")


def arguments(rank: int, world: int) -> None:
    cases = [
        (lambda: context_for(None, FOUR), r"group: expected 4 ranks \(ep_world_size\), got 2"),
        (lambda: context_for("tp", CAPACITY), "group: expected a process group .*, got 'tp'"),
        (lambda: context_for(None, CAPACITY, transport="tcp"), "transport: expected auto, .*, got 'tcp'"),
        (
            lambda: context_for(None, CAPACITY, device="meta", transport="shared memory", timeout=10),
            "transport: shared memory needs all ranks on one host, and tensors on the CPU",
        ),
        (lambda: resolve(torch.zeros(4, dtype=torch.int64)), "context: expected the tensor of an open"),
        (lambda: resolve(torch.zeros(4)), r"context: expected int64 \[4\], got torch.float32 \[4\]"),
    ]
    for call, words in cases:
        with pytest.raises(ContextError, match=words):
            call()


def test_errors_name_the_argument() -> None:
    values(run_ranks(2, arguments))


def test_without_a_group() -> None:
    with pytest.raises(ContextError, match=r"torch\.distributed isn't initialised"):
        context_for(None, CAPACITY)


def wrong_layers(rank: int, world: int) -> list[str]:
    """A layer that the context wasn't made for is refused before anything is sent; the context stays usable."""
    layer = spread(1, top_k=2)
    context = context_for(None, layer.capacity(world, 4), timeout=10)
    said = []
    changes = ({"top_k": 3}, {"hidden": 7}, {"out": 9}, {"dtype": torch.float64})
    for other in (spread(1, **{"top_k": 2} | change) for change in changes):
        with pytest.raises(ContextError) as caught:
            other.together(context.tensor, rank, world, other.tokens(rank, 2), "cpu")
        said.append(str(caught.value))
    layer.together(context.tensor, rank, world, layer.tokens(rank, 2), "cpu")
    return said


def test_a_layer_of_another_capacity() -> None:
    for top_k, hidden, out, dtype in values(run_ranks(2, wrong_layers)):
        assert top_k == "top_k: the context was made for 2, got 3"
        assert hidden == "hidden: the context was made for 6, got 7"
        assert out == "out_features: the context was made for 5, got 9"
        assert dtype == "dtype: the context was made for torch.float32, got torch.float64"


def endings(rank: int, world: int) -> None:
    layer = spread(1, top_k=2)
    tokens = layer.tokens(rank, 2)

    def step(context) -> None:
        layer.together(context.tensor, rank, world, tokens, "reference")

    first = context_for(None, CAPACITY, timeout=10)
    step(first)
    close_contexts()
    assert contexts() == []
    with pytest.raises(ContextError, match="expected the tensor of an open CommContext"):
        step(first)
    second = context_for(None, CAPACITY, timeout=10)
    assert second is not first
    step(second)

    if pid := os.fork():  # a fork shares the memory, and may not touch it
        assert os.waitpid(pid, 0)[1] == 0
    else:
        try:
            step(second)
        except ContextError as error:
            os._exit(0 if "belongs to another process" in str(error) else 1)
        os._exit(2)
    step(second)

    group = dist.new_group([0, 1])
    of_group = context_for(group, CAPACITY, transport="collectives", timeout=10)
    step(of_group)
    dist.destroy_process_group(group)
    assert contexts() == [second]  # a context ends with its group, also where somebody holds on to the object
    assert of_group.closed == "it was closed"
    group = dist.new_group([0, 1])
    of_group = context_for(group, CAPACITY, timeout=10)
    step(of_group)
    dist.destroy_process_group(group)
    del group
    assert of_group.closed == "it was closed"


def test_how_contexts_end() -> None:
    values(run_ranks(2, endings))


def busy(rank: int, world: int) -> str:
    """A forward of rank 0 waits for rank 1 while rank 0 tries to close the context under it."""
    layer = spread(1, top_k=2)
    context = context_for(None, CAPACITY, timeout=20)
    said = ""
    if rank == 0:
        thread = threading.Thread(
            target=lambda: layer.together(context.tensor, 0, 2, layer.tokens(0, 2), "reference")
        )
        thread.start()
        time.sleep(0.3)
        with pytest.raises(ContextInUseError) as caught:
            context.close(timeout=0.2)
        said = str(caught.value)
        dist.barrier()
        thread.join()
    else:
        dist.barrier()
        layer.together(context.tensor, 1, 2, layer.tokens(1, 2), "reference")
    context.close()
    return said


def test_a_context_in_use_is_not_closed() -> None:
    assert "using the context for more than 0.2 s" in values(run_ranks(2, busy))[0]


def test_a_meeting_in_one_process() -> None:
    store = dist.HashStore()
    first, second = (Meeting(store, "m/0", rank, 2, timeout=5) for rank in range(2))
    said: list[object] = []
    thread = threading.Thread(target=lambda: said.append(first.exchange("a", {"x": 1})))
    thread.start()
    assert second.exchange("a", [2]) == [{"x": 1}, [2]]
    thread.join()
    assert said == [[{"x": 1}, [2]]]
    first.abandon("no reason")
    second.abandon("another")
    with pytest.raises(RendezvousError, match=r"^rank 0 gave up: no reason$"):
        second.exchange("b", None)


def test_a_meeting_ends_alike_for_all_ranks() -> None:
    """A rank that is too late where another one has concluded stays; after a rank gave up nobody concludes."""
    store = dist.HashStore()
    first, second = (Meeting(store, "m/1", rank, 2, timeout=0) for rank in range(2))
    first.say("a", 1)
    second.say("a", 2)
    first.conclude()
    assert not second.abandon("too late")
    second.conclude()
    assert second.exchange("a", 2) == [1, 2]

    first, second = (Meeting(store, "m/2", rank, 2, timeout=0) for rank in range(2))
    first.say("a", 1)
    assert second.abandon("no time")
    assert second.exchange("a", 2) == [1, 2]
    for rank in (first, second):
        with pytest.raises(RendezvousError, match=r"^rank 1 gave up: no time$"):
            rank.conclude()


def test_a_meeting_without_a_rank_that_has_ended() -> None:
    """Not where it said its word before."""
    store = dist.HashStore()
    first, second, third = (Meeting(store, "m/3", rank, 3, 30, lambda rank: rank > 0) for rank in range(3))
    second.say("a", None)
    with pytest.raises(RendezvousError, match=r"^rank 2 failed: its process ended before its word \(a\)$"):
        first.exchange("a", None)
    with pytest.raises(RendezvousError, match="rank 2 failed: its process ended"):
        first.exchange("b", None)
    third.say("a", None)
    with pytest.raises(RendezvousError, match="gave up: rank 2 failed: its process ended"):
        second.conclude()


def test_few_of_many_silent_ranks_are_looked_after_at_a_time() -> None:
    asked: list[int] = []
    meeting = Meeting(dist.HashStore(), "m/5", 3, 100, 0.5, lambda rank: asked.append(rank) is not None)
    with pytest.raises(RendezvousError, match="no word"):
        meeting.exchange("a", None)
    assert set(asked) == {0, 1, 2, 4, 5, 6, 7, 8}


class _Gone:
    """A store whose process has ended."""

    def set(self, *_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    check = compare_set = set


def test_a_meeting_whose_store_is_gone() -> None:
    meeting = Meeting(_Gone(), "m/4", 0, 2, timeout=30)
    for call in (lambda: meeting.exchange("a", 1), meeting.conclude, meeting.begin):
        with pytest.raises(RendezvousError, match=r"store can't be reached, .* holds it\? Connection reset"):
            call()
    assert meeting.abandon("for whatever reason")
