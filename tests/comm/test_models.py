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


def qwen3() -> tuple[Any, Any]:
    """The same model twice, of two layers with 8 experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

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
    return models[0], models[1]


def spread(model: torch.nn.Module, experts: Any, batch: Any, implementation: str) -> None:
    """Put the model's experts on the ranks of a mesh; batch: the mesh of the ranks that share a batch."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    plan = {}
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        plan |= {f"{path}.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")}
        plan[path] = "ep_dispatch_experts"
    apply_expert_parallelism(model, experts, batch, plan, implementation)


def whole_model(rank: int, world: int) -> tuple[int, bool, set[str]]:
    """Layers fused, whether each names the all_reduce that stays, reasons."""
    from torch.distributed.device_mesh import init_device_mesh

    whole, model = qwen3()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    spread(model, mesh, mesh, "all_reduce")
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


BATCHES = [(12, 5), (1, 9)]
"""Tokens of each rank, step by step."""


def exchanged(rank: int, world: int, implementation: str) -> Any:
    """What became of the layers, step by step, with a batch of its own on each rank; then what stays as it was."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import AllToAllEP

    whole, model = qwen3()
    for m in (whole, model):  # all tokens choose the same two experts: nothing comes to the other rank
        torch.nn.init.zeros_(m.model.layers[1].mlp.gate.weight)
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp"))
    spread(model, mesh["ep"], mesh["tp"], implementation)
    run = moefuse.compile(model, fullgraph=True, dynamic=True, inner="eager", mode="on", ep_max_tokens=64)
    for step, counts in enumerate(BATCHES):
        ids = torch.randint(64, (1, counts[rank]), generator=torch.Generator().manual_seed(10 * step + rank))
        with torch.no_grad():
            given, expected = (m(ids, use_cache=False).logits for m in (run, whole))
        # float32 sums in another order, through two layers
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
    sites = [site for report in moefuse.reports() for site in report.sites]
    cells = model.model.layers[0].mlp.experts.forward.__closure__
    kinds = {type(cell.cell_contents) for cell in cells} & {AllToAllEP}
    return all(site.fused for site in sites), {site.comm.partition("; ")[2] for site in sites}, len(kinds)


def trained(rank: int, world: int) -> list[bool]:
    """Whether a layer is a node, graph by graph: fused, and excluded, which is one graph too."""
    for options in ({}, {"exclude": ["*"]}):
        train(rank, world, options)
    return [site.fused for report in moefuse.reports() for site in report.sites]


def train(rank: int, world: int, options: dict[str, Any]) -> None:
    """Outputs and gradients are those of one process that has all tokens."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    whole, block = (qwen3_block(SIZES, experts="grouped_mm")[0].requires_grad_() for _ in range(2))
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp"))
    plan = {f"experts.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")}
    plan["experts"] = "ep_dispatch_experts"
    apply_expert_parallelism(block, mesh["ep"], mesh["tp"], plan, "all_to_all")
    run = moefuse.compile(block, fullgraph=True, dynamic=True, inner="eager", ep_max_tokens=64, **options)
    for step, counts in enumerate(BATCHES):
        if step:  # all tokens choose the same two experts: nothing comes to the other rank
            torch.nn.init.zeros_(whole.gate.weight)
            torch.nn.init.zeros_(block.gate.weight)
        generator = torch.Generator().manual_seed(step)
        every = [torch.randn(1, count, SIZES.hidden, generator=generator) for count in counts]
        own, of_all = every[rank].clone().requires_grad_(), torch.cat(every, 1).requires_grad_()
        results = run(own), whole(of_all)
        for module, y in zip((block, whole), results, strict=True):
            module.zero_grad()
            y.square().sum().backward()
        start = sum(counts[:rank])
        mine = slice(start, start + counts[rank])
        pairs = [(results[0], results[1][:, mine]), (own.grad, of_all.grad[:, mine])]
        for name in ("gate_up_proj", "down_proj"):
            grads = [getattr(module.experts, name).grad for module in (block, whole)]
            pairs.append((grads[0].to_local(), grads[1].chunk(world)[rank]))
        for got, expected in pairs:
            # float32 sums of some tens of products of size 1, in another order
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=5e-5)


def test_transformers_exchange_trains() -> None:
    nodes = values(run_ranks(WORLD, trained, timeout=180))
    assert [sorted(set(fused)) for fused in nodes] == [[False, True]] * WORLD
    assert all(fused == sorted(fused, reverse=True) for fused in nodes)


def test_rows_of_batches_of_their_own_travel_in_the_node() -> None:
    """The branch on received rows breaks the graph otherwise; the model is as it was after each call."""
    absorbed = {"absorbed: 3 all_to_all_single"}
    assert values(run_ranks(WORLD, exchanged, "all_to_all", timeout=180)) == [(True, absorbed, 1)] * WORLD
