"""Layers spread over real processes give what one process gives, for every way to spread tokens and ids."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from moefuse.comm import context_for, contexts
from tests.comm.layers import EXPERTS, spread
from tests.comm.ranks import run_ranks, values
from tests.comm.steps import MAX_TOKENS, check, random_steps

TOKENS = {
    2: [(6, 0), (0, 6), (0, 0), (1, 0), (5, 3), (16, 16)],
    4: [(6, 0, 0, 0), (0, 0, 0, 6), (0, 0, 0, 0), (1, 0, 0, 5), (9, 2, 16, 1)],
    8: [(0, 0, 6, 0, 0, 0, 0, 0), (0,) * 8, (1, 0, 0, 5, 0, 16, 2, 7)],
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
@pytest.mark.parametrize("world", [2, 4, 8])
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


@pytest.mark.parametrize(("world", "steps"), [(2, 200), (4, 60), (8, 20)])
def test_random_steps_leak_nothing(world, steps) -> None:
    for grown in values(run_ranks(world, random_steps, steps)):
        assert grown.contexts == 0
        assert grown.files <= 0  # the group itself may close one meanwhile
        assert grown.tensors <= 0


def side_by_side(rank: int, world: int) -> None:
    """Two threads of each rank, a group each, layers of two sizes: nobody meets anybody else's ranks or rows."""
    groups = [dist.new_group(range(world)) for _ in range(2)]
    layers = [spread(seed, top_k=1 + seed) for seed in (1, 3)]
    contexts_of = [
        [
            context_for(group, layer.capacity(world, MAX_TOKENS), transport=transport, timeout=30)
            for layer in layers
        ]
        for group, transport in zip(groups, TRANSPORTS, strict=True)
    ]

    def steps(number: int) -> None:
        for step in range(20):
            layer, context = layers[step % 2], contexts_of[number][step % 2]
            tokens = layer.tokens(rank, (5 * step + 3 * rank + number) % MAX_TOKENS)
            y, _ = layer.together(context.tensor, rank, world, tokens, "cpu")
            # float32 sums of at most four terms of size 1 in another order
            torch.testing.assert_close(y, layer.alone(tokens), rtol=1e-5, atol=1e-5)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(steps, range(2)))


def test_threads_and_groups_do_not_disturb_each_other() -> None:
    values(run_ranks(2, side_by_side))
