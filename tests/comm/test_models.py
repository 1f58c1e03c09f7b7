"""Models whose experts lie on several ranks, compiled: each rank's part is one node, their all_reduce stays once."""

from typing import Any

import pytest
import torch

import moefuse
from moefuse.testing.programs import Sizes
from tests.comm.ranks import run_ranks, values
from tests.support import qwen3_block

EXPERTS, WORLD = 8, 2
SIZES = Sizes(tokens=12, top_k=2, experts=EXPERTS, hidden=16, inter=8)


def sharded(implementation: str) -> tuple[torch.nn.Module, torch.nn.Module, torch.Tensor]:
    """The whole block, and the same with this rank's experts: DTensors, spread by transformers itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    whole, (x,) = qwen3_block(SIZES, experts=implementation)
    block, _ = qwen3_block(SIZES, experts=implementation)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    plan = {"experts.gate_up_proj": "grouped_gemm", "experts.down_proj": "grouped_gemm"}
    plan["experts"] = "ep_dispatch_experts"
    apply_expert_parallelism(block, mesh, mesh, plan, "all_reduce")
    return whole, block, x


def compiled_block(rank: int, world: int, implementation: str) -> tuple[int, int, str]:
    """Layers fused, all_reduces in the final graph, and what the node holds."""
    whole, block, x = sharded(implementation)
    graphs = []

    def count(gm: torch.fx.GraphModule, *_: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    from moefuse import backend

    backend.compile_inner = lambda gm, *args, **kwargs: count(gm)
    run = torch.compile(block, backend="moefuse", fullgraph=True, options={"inner": "eager"})
    with torch.no_grad():
        # float32 sums of a few products in another order, over two ranks
        torch.testing.assert_close(run(x), whole(x), rtol=1e-5, atol=1e-5)
        block.experts.down_proj.to_local().mul_(2)
        whole.experts.down_proj.mul_(2)
        torch.testing.assert_close(run(x), whole(x), rtol=1e-5, atol=1e-5)
    (site,) = moefuse.reports()[-1].sites
    reduces = sum("all_reduce" in str(node.target) for node in graphs[-1].graph.nodes)
    return moefuse.reports()[-1].fused, reduces, f"{site.spec.num_experts} of top-{site.spec.top_k}"


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_local_experts_fuse_and_their_sum_over_ranks_stays_once(implementation) -> None:
    assert values(run_ranks(WORLD, compiled_block, implementation)) == [(1, 1, "4 of top-2")] * WORLD


def whole_model(rank: int, world: int) -> tuple[int, bool, set[str]]:
    """Layers fused, whether each names the all_reduce that stays, reasons."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    sizes = {
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "head_dim": 16,
        "num_experts": 8,
        "vocab_size": 64,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(num_hidden_layers=2, **sizes, **heads)
    config._experts_implementation = "grouped_mm"
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Qwen3MoeForCausalLM(config).eval())
    whole, model = models
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    plan = {}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        plan |= {f"{experts}.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")}
        plan[experts] = "ep_dispatch_experts"
    apply_expert_parallelism(model, mesh, mesh, plan, "all_reduce")
    options = {"inner": "eager", "mode": "on", "ep_group": mesh.get_group("ep")}
    run = torch.compile(model, backend="moefuse", fullgraph=True, options=options)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        given, expected = (m(ids, use_cache=False).logits for m in (run, whole))
    # float32 sums in another order, through two layers
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
    sites = moefuse.reports()[-1].sites
    stays = all("stays, once" in site.comm for site in sites)
    return sum(site.fused for site in sites), stays, {site.reason for site in sites}


def test_a_model_spread_by_transformers_gives_what_one_process_gives() -> None:
    assert values(run_ranks(WORLD, whole_model)) == [(2, True, {""})] * WORLD
