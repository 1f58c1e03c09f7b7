"""Ranks that raise, die, stop or bring too much: the others hear of it, by name and in time."""

import signal
import time
from functools import partial

import pytest
import torch.distributed as dist

from moefuse.comm import CapacityError, CommError, ContextError, PeerError, context_for
from tests.comm.layers import spread
from tests.comm.ranks import run_ranks, values
from tests.comm.steps import TIMEOUT, steps_until_failure

SLACK = 3.0  # seconds that a busy machine may add


@pytest.mark.parametrize(("world", "after"), [(2, 0.0), (2, 0.0137), (4, 0.05), (4, 0.0291), (2, 0.0713)])
def test_a_killed_rank_is_named_in_time_and_leaves_nothing(world, after) -> None:
    victim = world - 1 if after else 0
    outcomes = run_ranks(world, steps_until_failure, victim, after, "shared memory")
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        assert not outcome.windows
        if rank != victim:
            named, seconds, said = outcome.value
            assert named == victim, said
            assert "its process ended" in said
            assert seconds < TIMEOUT  # the kernel's word is faster than the timeout


@pytest.mark.parametrize(("world", "after"), [(2, 0.0113), (4, 0.0391)])
def test_a_rank_that_is_killed_while_it_trains_is_named(world, after) -> None:
    """The group's collectives fail first; the windows know whose process ended."""
    outcomes = run_ranks(world, steps_until_failure, 1, after, "shared memory", True)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for named, seconds, said in [outcome.value for rank, outcome in enumerate(outcomes) if rank != 1]:
        assert named == 1, said
        assert seconds < TIMEOUT + SLACK


def test_a_killed_rank_of_a_group_without_shared_memory() -> None:
    survivor, victim = run_ranks(2, steps_until_failure, 1, 0.05, "collectives")
    assert victim.exit_code == -signal.SIGKILL
    assert survivor.error is None, survivor.trace
    _, seconds, said = survivor.value
    assert "a rank failed: the group's collective says" in said
    assert seconds < TIMEOUT + SLACK


def raises(rank: int, world: int, transport: str) -> tuple[str, str, int]:
    layer = spread(1, top_k=2)
    context = context_for(None, layer.capacity(world, 8), transport=transport, timeout=TIMEOUT + 20)
    tokens = layer.tokens(rank, 4)
    layer.together(context.tensor, rank, world, tokens, "reference")
    if rank == 1:

        def broken(*_):
            raise ValueError("out of luck")

        from moefuse.ops.kernels import register_kernel

        register_kernel("reference", broken)
    start = time.monotonic()

    def steps() -> None:
        while True:  # over a group that shares no memory, a rank may be a step ahead
            layer.together(context.tensor, rank, world, tokens, "reference")

    with pytest.raises(Exception, match="out of luck") as caught:
        steps()
    assert time.monotonic() - start < SLACK
    return type(caught.value).__name__, str(caught.value), getattr(caught.value, "rank", rank)


@pytest.mark.parametrize("transport", ["shared memory", "collectives"])
def test_what_a_rank_raises_reaches_the_others(transport) -> None:
    for rank, (kind, said, named) in enumerate(values_of_survivors(run_ranks(4, raises, transport))):
        assert named == 1
        assert (kind, said) == (
            ("ValueError", "out of luck")
            if rank == 1
            else ("PeerError", "rank 1 failed: ValueError: out of luck")
        )


def values_of_survivors(outcomes):
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}:\n{outcome.trace}"
    return [outcome.value for outcome in outcomes]


def stopped(rank: int, world: int, target: str) -> tuple[int, float, str]:
    layer = spread(1, top_k=2)
    context = context_for(None, layer.capacity(world, 8), timeout=1.0)
    if rank == 2:  # alive, and never there
        time.sleep(4)
        return -1, 0.0, ""
    start = time.monotonic()
    with pytest.raises(PeerError) as caught:
        layer.together(context.tensor, rank, world, layer.tokens(rank, 4), target)
    return caught.value.rank, time.monotonic() - start, str(caught.value)


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_a_rank_that_does_not_come_is_named_after_the_timeout(target) -> None:
    for rank, (named, seconds, said) in enumerate(values(run_ranks(4, stopped, target))):
        if rank != 2:
            assert named == 2
            assert "didn't reach the barrier within 1 s" in said
            assert seconds < 1.0 + SLACK


def too_many(rank: int, world: int, transport: str, target: str) -> tuple[str, float]:
    layer = spread(1, top_k=2)
    context = context_for(None, layer.capacity(world, 8), transport=transport, timeout=20)
    start = time.monotonic()
    with pytest.raises(CapacityError) as caught:
        layer.together(context.tensor, rank, world, layer.tokens(rank, (3, 9, 8, 12)[rank]), target)
    seconds = time.monotonic() - start
    tokens = layer.tokens(rank, 8)
    # and the next step is as good as any
    y, _ = layer.together(context.tensor, rank, world, tokens, target)
    assert (y - layer.alone(tokens)).abs().max() < 1e-5
    return str(caught.value), seconds


@pytest.mark.parametrize(
    ("transport", "target"),
    [("shared memory", "cpu"), ("shared memory", "reference"), ("collectives", "reference")],
)
def test_too_many_tokens_anywhere_are_an_error_everywhere(transport, target) -> None:
    for said, seconds in values(run_ranks(4, too_many, transport, target)):
        assert "rank 1 has 9, rank 3 has 12, max_tokens_per_rank is 8" in said
        assert seconds < SLACK


def trains_alone(rank: int, world: int, transport: str) -> str:
    layer = spread(1, top_k=2)
    context = context_for(None, layer.capacity(world, 8), transport=transport, timeout=20)
    x, ids, weights = layer.tokens(rank, 4)
    with pytest.raises(ContextError) as caught:
        layer.together(context.tensor, rank, world, (x.requires_grad_(rank > 0), ids, weights), "cpu")
    return str(caught.value)


@pytest.mark.parametrize("transport", ["shared memory", "collectives"])
def test_gradients_wanted_on_some_ranks_only(transport) -> None:
    said = values(run_ranks(4, trains_alone, transport))
    why = "inference on rank 0 and for training on rank 1, 2, 3: all ranks want its gradient, or none"
    assert said == [f"a layer runs for {why}"] * 4


def asks_meanwhile(rank: int, world: int, transport: str) -> tuple[str, str, float]:
    """Rank 0 compiles something new, the others run what they have."""
    from moefuse.comm.plans import what_all_want

    layer = spread(1, top_k=2)
    context = context_for(None, layer.capacity(world, 8), transport=transport, timeout=60)
    assert what_all_want(dist.group.WORLD, rank, 60, list) == list(range(world))
    layer.together(context.tensor, rank, world, layer.tokens(rank, 4), "cpu")
    start = time.monotonic()
    tokens = layer.tokens(rank, 4)
    asks = partial(what_all_want, dist.group.WORLD, 0, 60, list)
    runs = partial(layer.together, context.tensor, rank, world, tokens, "cpu")
    with pytest.raises(CommError) as caught:
        (runs if rank else asks)()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("transport", ["shared memory", "collectives"])
def test_a_rank_that_compiles_while_others_wait_for_it_in_a_layer(transport) -> None:
    """All of them hear of it at once, and need not wait for each other until it is too late."""
    asking, *waiting = values_of_survivors(run_ranks(4, asks_meanwhile, transport))
    assert asking[0] == "BusyError"
    assert "it waits in an expert-parallel layer that is compiled already" in asking[1]
    for kind, said, _ in waiting:
        assert kind == "PeerError"
        assert said.startswith("rank 0 failed: it compiles another frame of the model")
    assert max(seconds for *_, seconds in (asking, *waiting)) < 1 + SLACK


def other_layers(rank: int, world: int, target: str) -> str:
    layer = spread(1, top_k=2, activation=("swiglu", ()) if rank == 0 else ("geglu", ()))
    context = context_for(None, layer.capacity(world, 8), timeout=20)
    with pytest.raises(ContextError) as caught:
        layer.together(context.tensor, rank, world, layer.tokens(rank, 4), target)
    return str(caught.value)


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_ranks_in_different_layers_are_told(target) -> None:
    said = values(run_ranks(2, other_layers, target))
    assert said == ["rank 1 runs another layer than rank 0 at the same time"] * 2
