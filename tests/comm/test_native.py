"""The C++ step: the bits of one rank, beside ranks that run it in torch operators, and its own times."""

import os

import pytest
import torch

from moefuse.comm import ContextError, context_for
from moefuse.comm.barrier import Barrier
from moefuse.comm.native import NativeStep
from moefuse.targets.cpu import isa, kernel
from tests.comm.layers import spread
from tests.comm.ranks import run_ranks, values

LAYOUTS = [
    {"dtype": dtype, "position": position, "hidden": 33, "inner": 20, "out": 37} | more
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for position, more in (
        ("output", {"norm": ("rms", 0.5), "scale": "own", "identities": 3, "out": 33}),
        ("mid", {"norm": ("scaled_rms", 0.5), "scale": "shared", "identities": 2, "out": 33}),
        ("output", {"bias": (True, True), "gate_up": "interleaved"}),
        ("mid", {"router_dtype": torch.float64, "output_dtype": torch.float32}),
        ("input", {"ids_dtype": torch.int32, "gate_up": "separate", "form": "list"}),
    )
]

KERNEL = kernel.load(torch.float32)
pytestmark = pytest.mark.skipif(isinstance(KERNEL, str), reason=f"no C++ kernel: {KERNEL}")


def alone(layer, tokens, **more) -> torch.Tensor:
    """y of the cpu target in one process."""
    weights = layer.layer.args[4:]
    return torch.ops.moefuse.mega_moe(None, *tokens, *weights, **layer.layer.kwargs | more, target="cpu")[0]


def same_bits(rank: int, world: int, threads: int) -> int:
    torch.set_num_threads(threads)
    seen = 0
    for seed, layout in enumerate(LAYOUTS):
        layer = spread(40 + seed, top_k=3, **layout)
        for product in (None, layer.layer.x.dtype):
            layer.layer.kwargs["product_dtype"] = product
            context = context_for(None, layer.capacity(world, 30), timeout=30)
            everyone = [layer.tokens(r, n) for r, n in enumerate((11, 30, 0, 4)[:world])]
            with context.recording() as timeline:
                y, _ = layer.together(context.tensor, rank, world, everyone[rank], "cpu")
            # all tokens in one process: an expert's number of tokens decides the order of its sums over k
            want = alone(layer, tuple(map(torch.cat, zip(*everyone, strict=True))))
            own = want.split([len(x) for x, *_ in everyone])[rank]
            assert torch.equal(y, own), layout
            seen += bool(timeline.events())
    return seen


@pytest.mark.parametrize(("world", "threads"), [(2, 1), (4, 1), (2, 3)])
def test_the_bits_are_those_of_one_rank(world, threads) -> None:
    """And each of them came from C++."""
    assert values(run_ranks(world, same_bits, threads)) == [2 * len(LAYOUTS)] * world


def mixed(rank: int, world: int) -> int:
    if rank % 2:
        os.environ[isa.VARIABLE] = isa.OFF
    layer = spread(7, top_k=3, position="mid", hidden=20, inner=20, out=12)
    context = context_for(None, layer.capacity(world, 600), timeout=30)
    with context.recording() as timeline:
        for step in range(20):
            tokens = layer.tokens(rank, (step * 31 + rank * 17) % 600)
            before = context.traffic
            y, nums = layer.together(context.tensor, rank, world, tokens, "cpu")
            # float32 sums in another order
            torch.testing.assert_close(y, alone(layer, tokens), rtol=1e-5, atol=1e-5)
            assert context.traffic.rows - before.rows <= 3 * 600 * 20 * 4
            assert int(nums.sum()) >= 0
    return len(timeline.events())


def test_ranks_without_the_kernel_take_part() -> None:
    first, second, third, fourth = values(run_ranks(4, mixed))
    assert first > 0
    assert third > 0
    assert (second, fourth) == (0, 0)


def times(rank: int, world: int) -> list[tuple[str, int, int, int, int]]:
    layer = spread(8, top_k=3, hidden=200, inner=100, out=50)
    context = context_for(None, layer.capacity(world, 64), timeout=30)
    with context.recording() as timeline:
        layer.together(context.tensor, rank, world, layer.tokens(rank, 64), "cpu")
    assert not timeline.dropped
    with context.recording(2) as short:
        layer.together(context.tensor, rank, world, layer.tokens(rank, 64), "cpu")
    assert len(short.events()) == 2
    assert short.dropped > 2
    layer.together(context.tensor, rank, world, layer.tokens(rank, 64), "cpu")
    assert len(short.events()) == 2
    over = context_for(None, layer.capacity(world, 64), transport="collectives", timeout=30)
    with pytest.raises(ContextError, match="keeps no times"), over.recording():
        pass
    return [tuple(event) for event in timeline.events()]


def test_times_tell_what_was_done_in_which_order() -> None:
    for events in values(run_ranks(2, times)):
        kinds = [kind for kind, *_ in events]
        assert kinds[:2] == ["publish", "wait"]
        assert kinds[-2:] == ["wait", "combine"]
        assert all(begin <= end for *_, begin, end in events)
        pulls = {expert: end for kind, _, expert, _, end in events if kind == "pull"}
        assert pulls
        for kind, _, expert, begin, _ in events:
            if kind == "first gemm" and expert in pulls:
                assert pulls[expert] <= begin
        assert {expert for kind, _, expert, *_ in events if kind == "first gemm"} == set(range(4))


def test_python_and_cpp_agree_about_the_structures() -> None:
    capacity = spread(1).capacity(1, 4)
    x = torch.empty(capacity.sections["x"].shape)
    step = NativeStep(capacity, [x], Barrier([], 0, 1))
    assert len(step._exchange) * 8 == KERNEL.moefuse_exchange_bytes()
    assert KERNEL.moefuse_step_bytes() == 8 * 8
