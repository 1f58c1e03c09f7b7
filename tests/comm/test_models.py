"""Models whose experts lie on several ranks, compiled: each rank's part is one node, their all_reduce stays once."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import moefuse
from moefuse.testing.programs import Sizes
from tests.comm.ranks import run_ranks, values
from tests.support import qwen3_block

EXPERTS, WORLD = 8, 2
SIZES = Sizes(tokens=12, top_k=2, experts=EXPERTS, hidden=16, inter=8)


def sharded(rank: int, implementation: str) -> tuple[torch.nn.Module, torch.nn.Module, torch.Tensor]:
    """The whole block, and the same with this rank's experts, masked and summed as transformers' AllReduceEP does."""
    whole, (x,) = qwen3_block(SIZES, experts=implementation)
    block, _ = qwen3_block(SIZES, experts=implementation)
    local = EXPERTS // WORLD
    experts: Any = block.experts
    experts.num_experts, experts._is_expert_parallel = local, True
    for name in ("gate_up_proj", "down_proj"):
        own = getattr(experts, name)[rank * local : (rank + 1) * local].clone()
        setattr(experts, name, torch.nn.Parameter(own, requires_grad=False))
    own_forward = experts.forward

    def forward(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        elsewhere = (ids // local) != rank
        masked = torch.where(elsewhere, local, ids % local)
        partial = own_forward(hidden, masked, weights.masked_fill(elsewhere, 0.0))
        functional = torch.ops._c10d_functional
        return functional.wait_tensor(functional.all_reduce(partial, "sum", dist.group.WORLD.group_name))

    experts.forward = forward
    return whole, block, x


def compiled_block(rank: int, world: int, implementation: str) -> tuple[int, int, str]:
    """Layers fused, all_reduces in the final graph, and what the node holds."""
    whole, block, x = sharded(rank, implementation)
    graphs = []

    def count(gm: torch.fx.GraphModule, *_: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    from moefuse import backend

    backend.compile_inner = lambda gm, *args, **kwargs: count(gm)
    with torch.no_grad():
        got = torch.compile(block, backend="moefuse", fullgraph=True, options={"inner": "eager"})(x)
        want = whole(x)
    # float32 sums of a few products in another order, over two ranks
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    (site,) = moefuse.reports()[-1].sites
    reduces = sum("all_reduce" in str(node.target) for node in graphs[-1].graph.nodes)
    return moefuse.reports()[-1].fused, reduces, f"{site.spec.num_experts} of top-{site.spec.top_k}"


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_local_experts_fuse_and_their_sum_over_ranks_stays_once(implementation) -> None:
    assert values(run_ranks(WORLD, compiled_block, implementation)) == [(1, 1, "4 of top-2")] * WORLD
