"""The reference kernels that exchange rows, on one rank and on two, against a loop over all ranks' slots."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

import tests.npu.ready  # noqa: F401  (before the operators: a spawned process begins here)
from moefuse.testing import npu_reference_kernels
from tests.comm.ranks import run_ranks, values

H, K, E = 8, 2, 4


def tokens_of(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids, weights of one rank; as many tokens on every rank, as the operators demand."""
    generator = torch.Generator().manual_seed(10 * world + rank)
    x, scores = torch.randn(3, H, generator=generator), torch.rand(3, E, generator=generator)
    weights, ids = scores.topk(K, dim=-1)
    return x, ids.int(), weights


def exchange(rank: int, world: int, v2: bool, quant_mode: int) -> None:
    """Dispatch, an expert that multiplies by its number + 1, combine: each step against a loop."""
    npu = torch.ops.npu
    dispatch = npu.npu_moe_distribute_dispatch_v2 if v2 else npu.npu_moe_distribute_dispatch
    combine = npu.npu_moe_distribute_combine_v2 if v2 else npu.npu_moe_distribute_combine
    name = dist.group.WORLD.group_name if world > 1 else ""
    group, local = (name, world, rank, E), E // world
    every = [tokens_of(r, world) for r in range(world)]
    x, ids, weights = every[rank]
    rows, scales, where, counts, received, *_ = dispatch(x, ids, *group, quant_mode=quant_mode)
    expected = [
        (e, source, t)
        for e in range(rank * local, (rank + 1) * local)
        for source in range(world)
        for t in range(3)
        for j in range(K)
        if int(every[source][1][t, j]) == e
    ]
    assert rows.shape == (3 * world * min(local, K), H)
    assert counts.tolist() == [sum(e == rank * local + i for e, *_ in expected) for i in range(local)]
    assert int(received[-1]) == len(expected)
    outputs = torch.zeros(rows.shape)
    for i, (e, source, t) in enumerate(expected):
        row = [float(v) for v in every[source][0][t]]
        if quant_mode == 2:
            top = max(abs(v) for v in row) / 127
            assert float(scales[i]) == pytest.approx(top, rel=1e-6)
            assert rows[i].tolist() == [round(v / top) for v in row]
        else:
            assert rows[i].tolist() == row
        outputs[i] = every[source][0][t] * (e + 1)
    y = combine(outputs, ids, where, received, weights, *group)
    summed = torch.stack(
        [x[t] * sum(float(weights[t, j]) * (int(ids[t, j]) + 1) for j in range(K)) for t in range(3)]
    )
    torch.testing.assert_close(y, summed)
    if v2:
        _demand_norm(
            npu.npu_moe_distribute_combine_add_rms_norm(
                *(outputs, ids, where, received, weights, x.unsqueeze(1), torch.arange(1.0, H + 1), *group),
                norm_eps=0.5,
            ),
            (x + summed).tolist(),
        )


def _demand_norm(outputs: tuple[Tensor, Tensor, Tensor], rows: list[list[float]]) -> None:
    """Rows, with a weight of 1, 2, ... per feature and 0.5 under the root: element by element."""
    normed, inverse, sums = outputs
    assert [tuple(t.shape) for t in outputs] == [(3, 1, H), (3, 1, 1), (3, 1, H)]
    for t, row in enumerate(rows):
        root = (sum(v * v for v in row) / H + 0.5) ** 0.5
        assert float(inverse[t]) == pytest.approx(1 / root, rel=1e-5)
        assert sums[t, 0].tolist() == pytest.approx(row, rel=1e-5, abs=1e-6)
        assert normed[t, 0].tolist() == pytest.approx(
            [v / root * (h + 1) for h, v in enumerate(row)], rel=1e-4
        )


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("quant_mode", [0, 2])
def test_one_rank(v2: bool, quant_mode: int) -> None:
    npu_reference_kernels.install()
    exchange(0, 1, v2, quant_mode)


def _two(rank: int, world: int) -> None:
    npu_reference_kernels.install()
    for v2 in (False, True):
        exchange(rank, world, v2, 2)


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="the ranks have no emulated runtime")
def test_two_ranks() -> None:
    values(run_ranks(2, _two))


def test_what_the_kernels_do_not_do_is_an_error() -> None:
    npu_reference_kernels.install()
    x, ids, _ = tokens_of(0, 1)
    with pytest.raises(NotImplementedError, match="x_active_mask: the reference kernel handles None only"):
        torch.ops.npu.npu_moe_distribute_dispatch_v2(x, ids, "", 1, 0, E, x_active_mask=torch.ones(3))
    with pytest.raises(NotImplementedError, match="zero_expert_num: the reference kernel handles"):
        torch.ops.npu.npu_moe_distribute_dispatch_v2(x, ids, "", 1, 0, E, zero_expert_num=1)
