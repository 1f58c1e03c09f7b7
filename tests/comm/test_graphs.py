"""Models whose rows travel between processes, compiled: one node per layer, outputs as in one process."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import moefuse
from moefuse.comm import contexts
from tests.comm import spread_models
from tests.comm.matrix import BFLOAT16, Case, compiled, one_case
from tests.comm.ranks import run_ranks, values
from tests.comm.spread_models import (
    Block,
    ByBlocks,
    ByExpert,
    ByPieces,
    ByRank,
    ByRuns,
    E,
    Gathered,
    InPlace,
    alone,
    tokens,
)

PATTERNS = {
    2: [(7, 5), (0, 6), (1, 9), (3, 3), (6, 0), (0, 0)],
    4: [(7, 5, 2, 3), (0, 0, 0, 6)],
}


def check(
    run: Any, whole: nn.Module, rank: int, counts: tuple[int, ...], step: int, **tolerance: float
) -> None:
    x = tokens(counts[rank], rank, step)
    with torch.no_grad():
        torch.testing.assert_close(run(x), whole(x), **(tolerance or {"rtol": 1e-5, "atol": 1e-5}))


def every_pattern(rank: int, world: int, cases: list[Any], inner: str) -> list[Any]:
    """Of each model: whether all layers were fused, the reasons of those that weren't; at the end the contexts."""
    found: list[Any] = []
    for form, changes in cases:
        torch._dynamo.reset()
        run, whole = compiled(form(rank, world, **changes), inner=inner), alone(**changes)
        patterns = PATTERNS[world][: None if inner == "eager" else 1]
        for step, counts in enumerate(patterns):
            if form is not Gathered or len(set(counts)) == 1:
                check(run, whole, rank, counts, step, **BFLOAT16.get(form, {}))
        sites = moefuse.reports()[-1].sites
        found.append((all(site.fused for site in sites) and bool(sites), {site.reason for site in sites}))
    return [*found, len(contexts())]


WAYS = {
    "eager-2": (
        2,
        [
            (ByExpert, {"k": 8}),
            (ByRank, {"k": 1}),
            (InPlace, {"k": 7, "shared": True}),
            (Gathered, {"k": 6, "shared": True}),
        ],
    ),
    "inductor-2": (2, [(ByBlocks, {"k": 3})]),
    "eager-4": (4, [(ByRuns, {"k": 4}), (ByPieces, {"k": 2})]),
}


@pytest.mark.parametrize("ways", WAYS)
def test_outputs_are_those_of_one_process(ways) -> None:
    """Ranks without tokens and with one compile a frame anew, by themselves."""
    world, cases = WAYS[ways]
    expected = [*[(True, {""})] * len(cases), len({changes.get("k", 2) for _, changes in cases})]
    assert (
        values(run_ranks(world, every_pattern, cases, ways.partition("-")[0], timeout=300))
        == [expected] * world
    )


CASES = {
    "2 processes, gradients": (2, [Case(ByExpert, 1, train=True), Case(Gathered, 5, True, True)]),
    "2 processes, gradients, inductor": (2, [Case(ByRank, 2, True, True, inner="inductor")]),
}


def run_cases(rank: int, world: int, cases: list[Case]) -> list[bool]:
    return [one_case(rank, world, case, 1 if case.inner == "inductor" else 2) for case in cases]


@pytest.mark.parametrize("some", CASES)
def test_part_of_the_matrix(some) -> None:
    """All of it: python -m tests.comm.matrix."""
    world, cases = CASES[some]
    assert values(run_ranks(world, run_cases, cases, timeout=300)) == [[True] * len(cases)] * world


def skipping(rank: int, world: int) -> set[int]:
    """How many layers of the graphs are fused. All tokens choose the last two experts at first."""
    model, whole = spread_models.Skipping(rank, world), alone()
    run = moefuse.compile(model, inner="eager", dynamic=True, ep_max_tokens=64)
    for block in (model, whole):
        with torch.no_grad():
            block.gate[:, :-2] -= 9
    for step, counts in enumerate(PATTERNS[2]):
        x = tokens(counts[rank], rank, step).abs()
        with torch.no_grad():
            torch.testing.assert_close(run(x), whole(x), rtol=1e-5, atol=1e-5)
    return {graph.fused for report in moefuse.reports() for graph in report.graphs}


def test_a_loop_that_skips_experts_without_rows() -> None:
    """Rank 0 gets no rows: what it goes on with instead of them is what the graph has."""
    assert values(run_ranks(2, skipping)) == [{1}] * 2


class Stack(nn.Module):
    """Layers of equal sizes, all slots of one of them on one expert, and one of other sizes."""

    def __init__(self, rank: int, world: int, build: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(build(rank, world, k=k, seed=seed) for seed, k in enumerate((2, 2, 2, 3)))
        with torch.no_grad():
            self.layers[1].gate.zero_()[:, 0] = 10

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def a_model_twice(rank: int, world: int) -> tuple[Any, ...]:
    whole, model = Stack(0, 1, Block), Stack(rank, world, ByExpert)
    for compilation in range(2):
        torch._dynamo.reset()
        run = compiled(model, ep_group=torch.distributed.group.WORLD)
        for step, counts in enumerate([(6, 2), (2, 6)][compilation:]):
            check(run, whole, rank, counts, step + 2 * compilation, rtol=1e-4, atol=1e-4)
    first, second = (report.graphs[0] for report in moefuse.reports()[-2:])
    shown = [(context.ranks, context.layers, context.bytes > 0) for context in first.contexts]
    absorbed = first.sites[0].comm.partition("absorbed: ")[2]
    return first.fused, shown, second.contexts == first.contexts, len(contexts()), absorbed


def test_layers_of_equal_sizes_share_a_context_that_a_second_compile_uses_again() -> None:
    expected = (4, [(2, 3, True), (2, 1, True)], True, 2, "4 all_to_all_single")
    assert values(run_ranks(2, a_model_twice)) == [expected] * 2


def layer_by_layer(rank: int, world: int) -> list[tuple[bool, int]]:
    """Layers of one class, of other sizes, compiled each by itself: one frame for Dynamo, asked about one by one."""
    for k in (2, 3, 2):
        run = compiled(ByExpert(rank, world, k=k))
        for step, counts in enumerate([(6, 2), (1, 5)]):
            check(run, alone(k=k), rank, counts, step)
    return [(site.fused, site.spec.top_k) for report in moefuse.reports() for site in report.sites]


def test_layers_of_one_class_are_agreed_on_one_by_one() -> None:
    first, second = values(run_ranks(2, layer_by_layer))
    assert {*first, *second} == {(True, 2), (True, 3)}


def replaced(rank: int, world: int) -> tuple[Any, ...]:
    """Experts twice on the ranks, moved to other places between steps: the same graph, the same context."""
    model, whole = ByExpert(rank, world, replicas=True), alone()
    run = compiled(model)
    seen: list[int] = []
    for step, counts in enumerate([(7, 5), (4, 6), (5, 5)]):
        if step:
            places = torch.randperm(2 * E, generator=torch.Generator().manual_seed(step))
            own = torch.arange(2 * E).view(world, -1)[rank]
            with torch.no_grad():
                for expert, home in enumerate(places.view(E, 2)):
                    model.homes[expert] = home
                    for part, each in ((model.w1, whole.w1), (model.w2, whole.w2)):
                        part[torch.isin(own, home)] = each[expert]
        check(run, whole, rank, counts, step)
        seen.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    (site,) = {site.layer: site for report in moefuse.reports() for site in report.sites}.values()
    return site.fused, site.spec.num_experts, site.spec.ids_checked, len(set(seen)), len(contexts())


def test_experts_that_move_between_steps() -> None:
    """Redundant experts: ids name places, and the table of places is data, as the weights are."""
    assert values(run_ranks(2, replaced)) == [(True, 2 * E, False, 1, 1)] * 2


def data_and_experts(rank: int, world: int) -> tuple[Any, ...]:
    """Two groups of two ranks, each with all experts and tokens of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    group = mesh.get_group("experts")
    run = compiled(ByRank(rank % 2, 2, group=group))
    for step, counts in enumerate(PATTERNS[4]):
        check(run, alone(), rank, counts, step)
    (graph, *_) = (graph for report in moefuse.reports() for graph in report.graphs)
    return graph.fused, [context.group == group.group_name for context in graph.contexts]


def test_groups_for_data_and_for_experts() -> None:
    assert values(run_ranks(4, data_and_experts)) == [(1, [True])] * 4


def one_rank_says_no(rank: int, world: int, mode: str) -> Any:
    form = ByExpert if rank == 0 else spread_models.ByRank
    model = form(rank, world)
    run = compiled(model, mode=mode, exclude=["*"] if rank == 1 else [])
    try:
        check(run, alone(), rank, (3, 4), 0)
    except Exception as error:
        return type(getattr(error, "inner_exception", error)).__name__, "rank 1 doesn't fuse" in str(error)
    (site,) = moefuse.reports()[-1].sites
    return site.fused, site.check, site.reason.partition(":")[0]


def test_one_no_is_everybodys() -> None:
    """auto: the model's own collectives run on all ranks; on: an error, also on the rank that could."""
    outcomes = values(run_ranks(2, one_rank_says_no, "auto"))
    assert outcomes == [
        (False, "ep_agreement", "rank 1 doesn't fuse (root)"),
        (False, "exclude", outcomes[1][2]),
    ]
    assert values(run_ranks(2, one_rank_says_no, "on"))[0] == ("RejectedError", True)


class Moody(ByExpert):
    """Another layer where there is one token: its rows are scaled by what each rank has for itself."""

    def gathered(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = super().gathered(rows, ids)
        return rows * self.side[0] if self.few else rows

    def routed(self, x: torch.Tensor) -> torch.Tensor:
        self.few = x.shape[0] == 1
        return super().routed(x)


def another_layer_when_compiled_anew(rank: int, world: int) -> Any:
    run = compiled(Moody(rank, world, shared=True))
    check(run, alone(shared=True), rank, (3, 4), 0)
    with torch.no_grad():
        run(tokens((3, 1)[rank], rank))


def test_what_was_agreed_on_holds_when_a_rank_compiles_anew() -> None:
    """It may not go its own way: an error there, and one that names it on the others; nobody waits."""
    stays, goes = run_ranks(2, another_layer_when_compiled_anew)
    assert goes.error is not None
    assert "aren't those that all ranks fused before" in goes.error[1]
    assert stays.error is not None
    assert "rank 1" in stays.error[1]


def summed(rank: int, world: int) -> tuple[Any, ...]:
    run = compiled(spread_models.Summed(rank, world))
    with torch.no_grad():
        x = tokens(5, 0)
        torch.testing.assert_close(run(x), alone()(x), rtol=1e-5, atol=1e-5)
    (site,) = moefuse.reports()[-1].sites
    return site.fused, site.spec.num_experts, "all_reduce" in site.comm and "stays, once" in site.comm


def test_a_sum_over_ranks_with_all_tokens_stays() -> None:
    assert values(run_ranks(2, summed)) == [(True, E // 2, True)] * 2


def test_the_script_of_the_page_runs_under_torchrun(tmp_path) -> None:
    page = Path(__file__).parents[2] / "docs" / "expert-parallel.md"
    (script,) = re.findall(r"^```py\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "spread.py").write_text(script, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(page.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "spread.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "absorbed: 4 all_to_all_single" in done.stdout
    assert "shared by 1 layer" in done.stdout
