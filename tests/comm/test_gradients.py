"""Gradients of layers over several processes are those of one process, and all ranks take part in them."""

import pytest
import torch
import torch.distributed as dist

from moefuse.comm import context_for
from tests.comm.gradients import check
from tests.comm.layers import EXPERTS, spread
from tests.comm.ranks import run_ranks, values

TOKENS = {
    2: [(5, 3), (6, 0), (0, 6), (0, 0), (1, 0)],
    4: [(9, 2, 16, 1), (0, 0, 0, 6)],
}
WIDE = {"dtype": torch.float64, "router_dtype": torch.float64}
LAYOUTS = [
    {"bias": (True, True), "gate_up": "separate", "form": "list"},
    {"dtype": torch.bfloat16, "gate_up": "interleaved_swapped", "transposed": (False, False)},
    {**WIDE, "position": "input", "output_dtype": torch.float32},
    {**WIDE, "position": "mid", "ids_dtype": torch.int32, "norm": ("rms", 0.5), "scale": "own"},
    {**WIDE, "identities": 2, "out": 6, "norm": ("scaled_rms", 0.5), "scale": "shared"},
    {**WIDE, "identities": 2, "out": 6, "gate_up": "none", "activation": ("relu2", ()), "position": "mid"},
]


def every_case(rank: int, world: int, transport: str) -> None:
    for top_k in (1, 2, 3, 4):
        layer = spread(top_k, top_k=top_k, **WIDE)
        for counts in TOKENS[world][: None if top_k == 2 else 2]:
            check(layer, rank, counts, transport)
    layer = spread(20, top_k=2, **WIDE)
    # one expert, one rank, nobody, half
    for ids in ([EXPERTS - 1] * 2, [0, 1], [-1, EXPERTS], [-(2**40), 3]):
        check(layer, rank, TOKENS[world][0], transport, torch.tensor([ids]))
    for seed, layout in enumerate(LAYOUTS):
        for target in ("reference", "cpu"):
            check(spread(30 + seed, top_k=3, **layout), rank, TOKENS[world][0], transport, target=target)


@pytest.mark.parametrize(
    ("world", "transport"), [(2, "shared memory"), (2, "collectives"), (4, "shared memory")]
)
def test_gradients_are_those_of_one_process(world, transport) -> None:
    values(run_ranks(world, every_case, transport))


def counted(rank: int, world: int) -> tuple[int, int]:
    """Collectives of a forward and of its gradient."""
    calls: list[int] = []
    plain = dist.all_to_all_single

    def watched(*args, **kwargs):
        calls.append(len(calls))
        return plain(*args, **kwargs)

    layer = spread(1, top_k=2, position="input")  # routing weights travel too
    context = context_for(None, layer.capacity(world, 16), transport="collectives", timeout=30)
    x, *routing = layer.tokens(rank, 5 * rank)
    dist.all_to_all_single = watched
    y, _ = layer.together(context.tensor, rank, world, (x.requires_grad_(), *routing), "cpu")
    forward = len(calls)
    y.sum().backward()
    dist.all_to_all_single = plain
    return forward, len(calls) - forward


def test_a_step_over_collectives_takes_three_of_them() -> None:
    """What there will be, rows, results; few tokens cost what their messages cost."""
    assert values(run_ranks(2, counted)) == [(3, 3)] * 2
