"""Layers spread over real processes give what one process gives, for every way to spread tokens and ids."""

import gc
import os

import pytest
import torch

from moefuse.comm import context_for, contexts
from tests.comm.layers import EXPERTS, Spread, spread
from tests.comm.ranks import run_ranks, values

MAX_TOKENS = 16
TOKENS = {
    2: [(6, 0), (0, 6), (0, 0), (1, 0), (5, 3), (16, 16)],
    4: [(6, 0, 0, 0), (0, 0, 0, 6), (0, 0, 0, 0), (1, 0, 0, 5), (9, 2, 16, 1)],
}
LAYOUTS = [
    {"bias": (True, True), "gate_up": "separate", "form": "list"},
    {"dtype": torch.bfloat16, "gate_up": "interleaved_swapped", "transposed": (False, False)},
    {"dtype": torch.float64, "position": "input", "output_dtype": torch.float32},
    {"position": "mid", "ids_dtype": torch.int32, "router_dtype": torch.bfloat16, "norm": ("rms", 0.5), "scale": "own"},
    {"identities": 2, "out": 6, "position": "mid", "norm": ("scaled_rms", 0.5), "scale": "shared"},
    {"identities": 2, "out": 6, "gate_up": "none", "activation": ("relu2", ())},
]  # fmt: skip
TRANSPORTS = ["shared memory", "collectives"]


def check(
    layer: Spread, rank: int, counts: tuple[int, ...], transport: str, ids=None, target="reference"
) -> None:
    """One step on all ranks against this rank's tokens in one process; slots and bytes against the other ranks'."""
    world = len(counts)
    context = context_for(
        None, layer.capacity(world, max(MAX_TOKENS, *counts)), transport=transport, timeout=30
    )
    everyone = [
        layer.tokens(r, n, None if ids is None else ids.expand(n, layer.top_k)) for r, n in enumerate(counts)
    ]
    before = context.traffic
    y, nums = layer.together(context.tensor, rank, world, everyone[rank], target)
    want = layer.alone(everyone[rank])
    assert y.dtype == want.dtype
    # The same roundings of the same rows, summed in another order and rounded once: an ulp of y, and of the sum.
    eps = max(torch.finfo(torch.float32).eps if y.dtype != torch.float64 else 0, torch.finfo(y.dtype).eps)
    torch.testing.assert_close(y, want, rtol=4 * eps, atol=8 * eps)

    local = EXPERTS // world
    pairs = [
        (r, t, e) for r, tokens in enumerate(everyone) for t, es in enumerate(tokens[1].tolist()) for e in es
    ]
    mine = [(r, t, e) for r, t, e in pairs if rank * local <= e < (rank + 1) * local]
    assert nums.tolist() == [sum(e == rank * local + i for _, _, e in mine) for i in range(local)]
    foreign = [(r, t) for r, t, _ in mine if r != rank]
    item = layer.layer.x.itemsize
    assert context.traffic.rows - before.rows == len(set(foreign)) * layer.layer.x.shape[1] * item
    assert context.traffic.results - before.results == len(foreign) * layer.layer.down.shape[1] * item


def every_case(rank: int, world: int, transport: str) -> None:
    for top_k in range(1, 9):
        layer = spread(top_k, top_k=top_k)
        for counts in TOKENS[world][: None if top_k <= 2 else 2]:
            check(layer, rank, counts, transport)
    layer = spread(20, top_k=2)
    for counts in TOKENS[world][-2:]:
        for expert in range(EXPERTS):  # all on one expert; all to one rank
            check(layer, rank, counts, transport, torch.tensor([[expert, expert]]))
            check(layer, rank, counts, transport, torch.tensor([[expert, expert ^ 1]]))
        check(layer, rank, counts, transport, torch.tensor([[-1, EXPERTS]]))  # to nobody
        check(layer, rank, counts, transport, torch.tensor([[-(2**40), 3]]))
    for seed, layout in enumerate(LAYOUTS):
        for target in ("reference", "cpu"):
            check(spread(30 + seed, top_k=3, **layout), rank, TOKENS[world][-1], transport, target=target)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 4])
def test_every_spread_of_tokens_and_ids(world, transport) -> None:
    values(run_ranks(world, every_case, transport))


def many_blocks(rank: int, world: int) -> int:
    """More rows than a block: a token that an earlier block pulled isn't pulled again (`check` counts the bytes)."""
    layer = spread(3, top_k=3, position="mid")
    for counts in [(700, 350), (0, 1100)]:
        check(layer, rank, counts, "shared memory", target="cpu")
    return len(contexts())


def test_rows_in_several_blocks() -> None:
    assert values(run_ranks(2, many_blocks)) == [2, 2]


def slots_without_expert(rank: int, world: int) -> bool:
    """Whatever weights such slots have, and whatever an earlier step left in their planes."""
    layer = spread(4, top_k=2)
    context = context_for(None, layer.capacity(world, MAX_TOKENS), timeout=30)
    x, ids, weights = layer.tokens(rank, 5)
    layer.together(context.tensor, rank, world, (torch.full_like(x, torch.nan), ids, weights), "reference")
    ids[:, 0] = -1
    weights[:, 0] = torch.nan
    y, _ = layer.together(context.tensor, rank, world, (x, ids, weights), "reference")
    torch.testing.assert_close(y, layer.alone((x, ids, weights)))
    return bool(y.isfinite().all())


def test_slots_without_an_expert_may_hold_anything() -> None:
    assert values(run_ranks(2, slots_without_expert)) == [True, True]


def random_steps(rank: int, world: int, steps: int) -> tuple[int, int, int]:
    """Open files, open contexts and live tensors that came with the last four fifths of the steps."""
    layers = [spread(seed, top_k=2) for seed in range(3)]
    draw = torch.Generator().manual_seed(world)  # the same on all ranks
    counted = []
    for step in range(steps):
        counts = tuple((torch.randint(0, MAX_TOKENS + 1, (world,), generator=draw)).tolist())
        check(layers[step % 3], rank, counts, "shared memory", target="cpu")
        if step in (steps // 5, steps - 1):
            gc.collect()
            tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
            counted.append((len(os.listdir("/proc/self/fd")), len(contexts()), tensors))
    return tuple(b - a for a, b in zip(*counted, strict=True))


@pytest.mark.parametrize(("world", "steps"), [(2, 200), (4, 60)])
def test_random_steps_leak_nothing(world, steps) -> None:
    for files, made, tensors in values(run_ranks(world, random_steps, steps)):
        assert made == 0
        assert files <= 0  # the group itself may close one meanwhile
        assert tensors <= 0
