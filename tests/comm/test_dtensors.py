"""Models spread over ranks by DTensor: experts as hooks of a ParallelStyle, weights and rows moved in the graph."""

from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_reduce,
    all_to_all_single,
    all_to_all_single_autograd,
)

import moefuse
from moefuse.testing import fake_ep_group
from moefuse.testing.programs import Sizes
from tests.comm.ranks import run_ranks, values
from tests.support import qwen3_block

WORLD, H, I, E, K = 2, 16, 8, 4, 2  # noqa: E741


class Experts(nn.Module):
    """Three grouped GEMMs over rows in the order of the experts."""

    def __init__(self, w1: Tensor, w2: Tensor, w3: Tensor) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = map(nn.Parameter, (w1, w2, w3))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        own = [w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3)]
        w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in own)
        rows, offsets = rows.bfloat16(), torch.cumsum(counts, 0, dtype=torch.int32)
        gate, up = (torch._grouped_mm(rows, w, offs=offsets) for w in (w1, w3))
        return torch._grouped_mm(F.silu(gate) * up, w2, offs=offsets).float()


class Block(nn.Module):
    """A router, whose weights may lie in pieces on all ranks, and experts."""

    def __init__(self, inner: int = I) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        gate, *rest = (
            torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
            for shape in ((E, H), (E, inner, H), (E, H, inner), (E, inner, H))
        )
        self.gate = nn.Parameter(gate)
        self.experts = Experts(*rest)

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        gate = self.gate.full_tensor() if isinstance(self.gate, DTensor) else self.gate
        weights, ids = F.softmax(F.linear(x, gate), -1).topk(K, -1)
        order = torch.argsort(ids.view(-1), stable=True)
        counts = torch.histc(ids.view(-1).float(), E, 0, E).long()
        rows = self.experts(x[order // K], counts) * weights.view(-1)[order].unsqueeze(1)
        return torch.zeros_like(x).scatter_add(0, (order // K).unsqueeze(1).expand(-1, H), rows)


class ExpertParallel:
    """Sends the rows of a module's first input to the ranks of their experts, and what it gives back."""

    def dispatch(self, module: nn.Module, inputs: tuple[Tensor, Tensor], mesh: Any) -> tuple[Tensor, Tensor]:
        rows, counts = inputs
        world, group = mesh.size(), mesh.get_group()
        with torch.no_grad():
            here = torch.ops._c10d_functional.wait_tensor(all_to_all_single(counts, None, None, group))
            self.sent = counts.view(world, -1).sum(1).to("cpu", non_blocking=True).tolist()
            self.received = here.view(world, -1).sum(1).to("cpu").tolist()
        rows = all_to_all_single_autograd(rows, self.received, self.sent, group)
        lengths = here.view(world, -1).t().reshape(-1)
        begins = (here.cumsum(0) - here).view(world, -1).t().reshape(-1)
        run = torch.arange(lengths.shape[0]).repeat_interleave(lengths, output_size=rows.shape[0])
        self.places = begins[run] + torch.arange(run.shape[0]) - (lengths.cumsum(0) - lengths)[run]
        self.shape = rows.shape
        return rows[self.places, :], here.view(world, -1).sum(0)

    def shard(self, name: str, module: nn.Module, mesh: Any) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        for own, parameter in module.named_parameters(recurse=False):
            module.register_parameter(own, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    def combine(self, module: nn.Module, outputs: Tensor, mesh: Any) -> Tensor:
        rows = outputs.new_empty(self.shape)
        rows[self.places, :] = outputs
        return all_to_all_single_autograd(rows, self.sent, self.received, mesh.get_group())

    def apply(self, module: nn.Module, mesh: Any) -> None:
        from torch.distributed.tensor import distribute_module

        distribute_module(module, mesh, self.shard, self.dispatch, self.combine)


def titan(rank: int, world: int) -> Any:
    """Whether the layer is fused at each step, and what became of its collectives."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole, block = Block(), Block()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    block.gate = nn.Parameter(distribute_tensor(block.gate, mesh, [Shard(0)]))
    ExpertParallel().apply(block.experts, mesh)
    run = moefuse.compile(block, fullgraph=True, dynamic=True, inner="eager", mode="on", ep_max_tokens=64)
    for step, counts in enumerate([(7, 5), (3, 6)]):
        x = torch.randn(counts[rank], H, generator=torch.Generator().manual_seed(10 * step + rank))
        with torch.no_grad():
            # bfloat16 experts, each of their roundings up to 2^-9
            torch.testing.assert_close(run(x), whole(x), rtol=0.02, atol=0.02)
    (site,) = moefuse.reports()[-1].sites
    return site.fused, site.spec.weight_form, site.comm.partition("; ")[2]


def shared_batch(rank: int, world: int) -> Any:
    """Ranks that share a batch: each sends its slice of it, which DTensor cuts off, and gathers the outputs."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    sizes = Sizes(tokens=9, top_k=2, experts=8, hidden=16, inter=8)
    whole, (x,) = qwen3_block(sizes, experts="grouped_mm")
    block, _ = qwen3_block(sizes, experts="grouped_mm")
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    plan = {f"experts.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")}
    apply_expert_parallelism(block, mesh, mesh, {**plan, "experts": "ep_dispatch_experts"}, "all_to_all")
    run = moefuse.compile(block, fullgraph=True, inner="eager", mode="on", ep_max_tokens=64)
    with torch.no_grad():
        torch.testing.assert_close(run(x), whole(x), rtol=1e-5, atol=1e-5)
    (site,) = moefuse.reports()[-1].sites
    return site.fused, site.comm.partition("; ")[2]


class Dense(nn.Module):
    """All experts on all tokens, weighted by a mask: rows that every rank has stay distributed tensors."""

    def __init__(self, mesh: Any) -> None:
        from torch.distributed.tensor import Replicate, distribute_tensor

        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate, self.w1, self.w2 = (
            nn.Parameter(
                distribute_tensor(
                    torch.randn(*shape, generator=generator) * shape[-1] ** -0.5, mesh, [Replicate()]
                )
            )
            for shape in ((E, H), (E, H, 2 * I), (E, I, H))
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = F.softmax(x @ self.gate.t(), -1)
        weights, ids = scores.topk(K, -1)
        gate, up = torch.matmul(x.unsqueeze(0), self.w1).chunk(2, -1)
        rows = torch.matmul(F.silu(gate) * up, self.w2)
        mask = torch.zeros_like(scores).scatter(-1, ids, weights)
        return (rows * mask.t().unsqueeze(-1)).sum(0)


def changing_sizes(rank: int, world: int) -> Any:
    """A distributed output whose sizes become symbolic at the second call."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    block = Dense(mesh)
    run = torch.compile(block, backend="moefuse", options={"inner": "eager", "mode": "on"})
    for count in (5, 8, 3):
        x = distribute_tensor(torch.randn(count, H), mesh, [Replicate()])
        with torch.no_grad():
            want, got = block(x), run(x)
        assert (want.shape, want.stride(), want.placements) == (got.shape, got.stride(), got.placements)
        torch.testing.assert_close(got.full_tensor(), want.full_tensor(), rtol=1e-5, atol=1e-5)
    return [site.fused for site in moefuse.reports()[-1].sites]


class Halves(Dense):
    """Experts without gates, whose inner features may lie on several ranks: each has a part of the sums."""

    def forward(self, x: Tensor) -> Tensor:
        scores = F.softmax(x @ self.gate.t(), -1)
        weights, ids = scores.topk(K, -1)
        rows = torch.matmul(F.silu(torch.matmul(x.unsqueeze(0), self.w1)), self.w2)
        mask = torch.zeros_like(scores).scatter(-1, ids, weights)
        return (rows * mask.t().unsqueeze(-1)).sum(0)


def halves(rank: int, world: int) -> Any:
    """Tensor parallel experts: a rank's part is a node, and what it gives is a part of a sum for DTensor as before."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    whole, block = Halves(mesh), Halves(mesh)
    w1 = whole.w1.full_tensor().detach()
    w2 = torch.randn(E, 2 * I, H, generator=torch.Generator().manual_seed(1)) / 4
    whole.w2 = nn.Parameter(distribute_tensor(w2, mesh, [Replicate()]))
    block.w1 = nn.Parameter(distribute_tensor(w1, mesh, [Shard(2)]))
    block.w2 = nn.Parameter(distribute_tensor(w2, mesh, [Shard(1)]))
    run = torch.compile(block, backend="moefuse", options={"inner": "eager"})
    for train in (False, True):
        for count in (7, 5):
            x = distribute_tensor(torch.randn(count, H), mesh, [Replicate()]).requires_grad_(train)
            with torch.set_grad_enabled(train):
                want, got = whole(x), run(x)
            assert got.placements == block(x).placements
            torch.testing.assert_close(got.full_tensor(), want.full_tensor(), rtol=1e-5, atol=1e-5)
    report = moefuse.reports()[-1]
    return [site.fused for site in report.sites], {graph.note for graph in report.graphs}


def every(rank: int, world: int) -> Any:
    return (
        titan(rank, world),
        shared_batch(rank, world),
        changing_sizes(rank, world),
        halves(rank, world),
    )


def test_layers_spread_by_dtensor_are_nodes() -> None:
    absorbed = "absorbed: 3 all_to_all_single"
    left = "left as it is: DTensors are moved or computed with, and gradients are wanted"
    parts = ([True, True], {"", left})  # without gradients a node, for 7 tokens and for any
    expected = ((True, "stacked", absorbed), (True, absorbed), [True, True], parts)
    assert values(run_ranks(WORLD, every, timeout=180)) == [expected] * WORLD


class TensorParallel(ExpertParallel):
    """Each expert is cut over a second dimension of the mesh: what a rank computes is a part of a sum over it."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def shard(self, name: str, module: nn.Module, mesh: Any) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        for own, parameter in module.named_parameters(recurse=False):
            halves = [Shard(0), Shard(2 if own == "w2" else 1)]
            module.register_parameter(own, nn.Parameter(distribute_tensor(parameter, self.mesh, halves)))

    def combine(self, module: nn.Module, outputs: Tensor, mesh: Any) -> Tensor:
        return super().combine(module, all_reduce(outputs, "sum", self.mesh["other"].get_group()), mesh)


def explained(style: type[ExpertParallel], inner: int) -> tuple[Any, str]:
    """(the one layer of a block on a mesh of two dimensions, the group of its experts)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with fake_ep_group(4, 1), torch.no_grad():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "other"))
        block = Block(inner)
        block.gate = nn.Parameter(distribute_tensor(block.gate, mesh, [Replicate(), Shard(0)]))
        (style(mesh) if style is TensorParallel else style()).apply(block.experts, mesh["ep"])
        run = torch.compile(block, backend="moefuse", options={"inner": "eager"}, fullgraph=True)
        counted = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
        # a fake group writes no counts: what is run on them may fail
        with torch._dynamo.config.patch(counted), suppress(RuntimeError):
            run(torch.randn(7, H))
        (site,) = moefuse.reports()[-1].sites
        return site, mesh["ep"].get_group().group_name


def test_the_experts_of_a_mesh_of_two_dimensions_are_those_of_one() -> None:
    site, group = explained(ExpertParallel, I)
    assert site.fused
    assert (site.spec.num_experts, site.spec.ep_world_size) == (E, 2)
    assert f"the 2 ranks of group {group}" in site.comm


def test_experts_that_are_cut_besides_stay_by_name() -> None:
    site, _ = explained(TensorParallel, 2 * I)
    assert not site.fused
    assert "no rule says what _c10d_functional::all_reduce of expert outputs" in site.reason
