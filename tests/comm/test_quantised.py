"""Quantised experts that are spread over ranks, on a target that doesn't communicate itself."""

from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse.targets  # noqa: F401  (registers the operators)
from moefuse.comm import Capacity, ContextError, PeerError, context_for
from moefuse.ops.quantised import BLOCKS, SCHEMES
from tests.comm.ranks import run_ranks, values
from tests.npu import mx_sequences
from tests.npu.mx_sequences import E4M3, FLOAT4
from tests.npu.quant_sequences import E, H, K, weights

TOKENS = (5, 0)
"""Of each of two ranks: one has none."""


def lists(scheme: str, own: slice) -> dict[str, list[Tensor]]:
    """Some of the experts' tensors, by the names of the operator's arguments."""
    if scheme in BLOCKS:
        w13, w2, s13, s2 = mx_sequences.weights(E4M3 if scheme == "mxfp8" else FLOAT4)
        names = ("weight1", "weight2", "weight_scales1", "weight_scales2")
        mine = dict(zip(names, ([tensor[own]] for tensor in (w13, w2, s13, s2)), strict=True))
        return mine | {name: [] for name in ("bias1", "bias2", "weight_offsets1", "weight_offsets2")}
    w = weights(scheme)
    offsets = scheme.endswith("a16")
    given: dict[str, list[Tensor]] = {
        "weight1": [w.w13[own]],
        "weight2": [w.w2[own]],
        "bias1": [w.o13[own]] if scheme == "w4a8" else [],
        "bias2": [w.o2[own]] if scheme == "w4a8" else [],
        "weight_scales1": [w.s13[own]],
        "weight_scales2": [w.s2[own]],
        "weight_offsets1": [w.o13[own]] if offsets else [],
        "weight_offsets2": [w.o2[own]] if offsets else [],
    }
    return given


def hidden(scheme: str) -> int:
    """Features of a token."""
    return mx_sequences.H if scheme in BLOCKS else H


def tokens(rank: int, hidden: int = H) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids, routing weights of one rank. One slot's expert is nowhere."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS[rank], hidden, generator=generator).bfloat16()
    routing, ids = torch.randn(TOKENS[rank], E, generator=generator).softmax(-1).topk(K)
    ids[:1, :1] = E
    return x, ids, routing


def over_ranks(
    rank: int, world: int, scheme: str, transport: Any, rows_dtype: torch.dtype | None = None, **dtypes: Any
) -> tuple[list[list[float]], list[int]]:
    """y of this rank's tokens, rows of each of its experts: as numbers, since a tensor's memory ends with its rank."""
    made = context_for(
        None,
        Capacity(world, E, K, hidden(scheme), hidden(scheme), max(TOKENS), torch.bfloat16, rows_dtype),
        transport=transport,
    )
    own = slice(rank * E // world, (rank + 1) * E // world)
    y, nums = torch.ops.moefuse.mega_moe.quant_ep(
        *(made.tensor, *tokens(rank, hidden(scheme))),
        **lists(scheme, own),
        quant=scheme,
        num_experts=E,
        ep_world_size=world,
        transpose_weight1=False,
        transpose_weight2=False,
        target="reference",
        rows_dtype=rows_dtype,
        **dtypes,
    )
    return y.tolist(), nums.tolist()


CASES = [
    *(
        (scheme, way)
        for scheme in SCHEMES
        if scheme not in BLOCKS
        for way in ("shared memory", "collectives")
    ),
    *(("mxfp8", "shared memory"), ("mxfp4", "collectives")),
]


@pytest.mark.parametrize(("scheme", "transport"), CASES)
def test_two_ranks_give_what_one_gives(scheme: str, transport: str) -> None:
    got = values(run_ranks(2, over_ranks, scheme, transport))
    x, ids, routing = (
        torch.cat(parts) for parts in zip(*(tokens(rank, hidden(scheme)) for rank in (0, 1)), strict=True)
    )
    want, counts = torch.ops.moefuse.mega_moe.quant(
        *(None, x, ids, routing),
        **lists(scheme, slice(None)),
        quant=scheme,
        num_experts=E,
        transpose_weight1=False,
        transpose_weight2=False,
    )
    assert [row for y, _ in got for row in y] == want.tolist()  # rows are bfloat16 either way
    assert [count for _, nums in got for count in nums] == counts.tolist()
    assert int(counts.sum()) == ids.numel() - 1


@pytest.mark.parametrize("transport", ["shared memory", "collectives"])
@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.float16])
def test_rows_come_back_as_experts_round_them(rows_dtype: torch.dtype, transport: str) -> None:
    """float32 rows of bfloat16 tokens, and float16 ones: in bfloat16 they would lose digits on the way."""
    got = values(run_ranks(2, in_rows_of, transport, rows_dtype))
    everyone = (tokens(rank) for rank in (0, 1))
    x, ids, routing = (torch.cat(parts) for parts in zip(*everyone, strict=True))
    want, _ = torch.ops.moefuse.mega_moe.quant(
        *(None, x, ids, routing),
        **lists("w8a8", slice(None)),
        quant="w8a8",
        num_experts=E,
        transpose_weight1=False,
        transpose_weight2=False,
        rows_dtype=rows_dtype,
        output_dtype=torch.float32,
    )
    assert [row for y, _ in got for row in y] == want.tolist()  # two terms a sum: in either order the same


def in_rows_of(rank: int, world: int, transport: Any, rows_dtype: torch.dtype) -> Any:
    return over_ranks(rank, world, "w8a8", transport, rows_dtype, output_dtype=torch.float32)


def of_other_rows(rank: int, world: int) -> None:
    made = context_for(None, Capacity(world, E, K, H, H, max(TOKENS), torch.bfloat16))
    torch.ops.moefuse.mega_moe.quant_ep(
        *(made.tensor, *tokens(rank)),
        **lists("w8a8", slice(rank * E // world, (rank + 1) * E // world)),
        quant="w8a8",
        num_experts=E,
        ep_world_size=world,
        rows_dtype=torch.float32,
        transpose_weight1=False,
        transpose_weight2=False,
    )


def test_a_context_for_other_rows_is_refused() -> None:
    text = "rows_dtype: the context was made for torch.bfloat16, got torch.float32"
    assert [outcome.error for outcome in run_ranks(2, of_other_rows)] == [(ContextError.__name__, text)] * 2


def of_other_schemes(rank: int, world: int) -> None:
    over_ranks(rank, world, ("w8a8", "w8a16")[rank], "collectives")


def test_ranks_with_other_schemes_are_told() -> None:
    errors = [outcome.error or ("", "") for outcome in run_ranks(2, of_other_schemes)]
    assert {name for name, _ in errors} <= {ContextError.__name__, PeerError.__name__}  # who sees it first
    assert all("runs another layer than rank 0" in text for _, text in errors)


def test_an_unknown_target_names_those_that_can() -> None:
    with pytest.raises(
        ValueError, match=r"quant_ep: target: expected one of \['npu', 'reference'\], got 'cpu'"
    ):
        torch.ops.moefuse.mega_moe.quant_ep(
            *(torch.zeros(4, dtype=torch.int64), *tokens(0)),
            **lists("w8a8", slice(E // 2)),
            quant="w8a8",
            num_experts=E,
            ep_world_size=2,
            transpose_weight1=False,
            transpose_weight2=False,
            target="cpu",
        )
