"""Rows sent to the ranks of their experts and back: what is proved of them, and what must not be believed.

Graphs are traced in one process, as a rank of torch's fake process group.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse
from moefuse.graph.capture import capture
from moefuse.passes.canonicalize import canonicalize
from moefuse.passes.lift import explain
from moefuse.passes.region import outliving
from moefuse.patterns.engine import Lifted, lift
from moefuse.patterns.site import Site
from moefuse.testing import fake_ep_group
from tests.comm.spread_models import (
    UNEVEN,
    Block,
    ByBlocks,
    ByExpert,
    ByRank,
    ByRuns,
    E,
    Gathered,
    H,
    Summed,
    tokens,
)


class _Enough(Exception):
    """The graph is there; the program needn't run."""


def lifted(model: Callable[..., Any], *inputs: Tensor, dynamic: bool = True) -> Lifted:
    """The one graph of a model, analysed."""
    found: list[Lifted] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        captured = capture(gm, inputs)
        canonicalize(captured.graph_module.graph, False)
        found.append(lift(captured.graph_module.graph))
        raise _Enough

    flags = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(flags), pytest.raises(Exception, match="_Enough"):
        torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    (result,) = found
    return result


def site_of(model: Callable[..., Any], *inputs: Tensor, dynamic: bool = True) -> Site:
    result = lifted(model, *inputs, dynamic=dynamic)
    assert len(result.sites) == 1, "\n".join(map(explain, result.losses.values()))
    return result.sites[0]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("form", UNEVEN)
def test_the_layer_is_that_of_the_whole_group(form, rank) -> None:
    with fake_ep_group(2, rank) as group:
        site = site_of(form(rank, 2), tokens(7, rank))
    ranks = site.layer.ranks
    assert ranks is not None
    assert (ranks.group, ranks.world, ranks.rank, ranks.experts) == (group, 2, rank, E // 2)
    assert (site.spec.num_experts, site.spec.ep_world_size, site.spec.top_k) == (E, 2, 2)
    assert site.spec.ids_checked


@pytest.mark.parametrize(
    ("world", "k", "count"), [(4, 2, 7), (4, 1, 1), (2, 1, 0), (2, 2, 1), (4, 3, 0), (2, 1, 5)]
)
@pytest.mark.parametrize("form", [ByRank, ByBlocks, ByRuns])
def test_edges_of_sizes(form, world, k, count) -> None:
    """One expert per rank, one slot, one token, none: for these a rank compiles its frame anew, alone."""
    with fake_ep_group(world, world - 1):
        site = site_of(form(world - 1, world, k=k), tokens(count, 0))
    spec = site.spec
    assert not outliving(site)  # or the rank would run collectives that the others don't
    assert (spec.num_experts, spec.ep_world_size, spec.top_k) == (E, world, k)


@pytest.mark.parametrize("form", [ByExpert, ByRuns])
def test_ids_may_come_from_a_table_of_places(form) -> None:
    """There are more places than experts that a router chooses from; nothing is known of what the table holds."""
    with fake_ep_group(2, 1):
        site = site_of(form(1, 2, replicas=True), tokens(7, 1))
    assert (site.spec.num_experts, site.spec.ep_world_size, site.spec.ids_checked) == (2 * E, 2, False)


# --- what must not be believed ---------------------------------------------------------------------------


class Changed(ByExpert):
    """`ByExpert` in steps, each of which a test may change."""

    def owner(self, experts: Tensor) -> Tensor:
        return experts // self.local

    def sent_rows(self, x: Tensor, order: Tensor) -> Tensor:
        return x[order // self.k]

    def number(self, here: Tensor) -> Tensor:
        return here - self.rank * self.local

    def sizes(
        self, sent: list[int], received: list[int]
    ) -> tuple[list[int], list[int], list[int], list[int]]:
        """Splits of the way there (received, sent) and back (received, sent)."""
        return received, sent, sent, received

    def result(self, rows: Tensor) -> Tensor:
        return rows

    def came_back(self, rows: Tensor) -> Tensor:
        return rows

    def ids_to_send(self, flat: Tensor, order: Tensor) -> Tensor:
        return flat[order]

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        experts = flat[order]
        counts = self.counts(self.owner(experts))
        sent, received = counts.tolist(), self.exchange(counts, None, None).tolist()
        there, back = self.sizes(sent, received)[:2], self.sizes(sent, received)[2:]
        here = self.exchange(self.ids_to_send(flat, order), *there)
        rows = self.gathered(self.exchange(self.sent_rows(x, order), *there), self.number(here))
        rows = self.came_back(self.exchange(self.result(rows), *back)) * weights.flatten()[order, None]
        return rows[order.argsort()].view(-1, self.k, H).sum(1)


class OtherOwner(Changed):
    def owner(self, experts: Tensor) -> Tensor:
        return experts % self.world


class ReversedOwner(Changed):
    def owner(self, experts: Tensor) -> Tensor:
        return self.world - 1 - experts // self.local


class OtherNumber(Changed):
    def number(self, here: Tensor) -> Tensor:
        return here - self.rank * self.local + 1 - 2 * (here % 2)


class NeighboursNumber(Changed):
    def number(self, here: Tensor) -> Tensor:
        return here - (1 - self.rank) * self.local


class IdsInOtherOrder(Changed):
    def ids_to_send(self, flat: Tensor, order: Tensor) -> Tensor:
        return flat


class OtherIds(Changed):
    def ids_to_send(self, flat: Tensor, order: Tensor) -> Tensor:
        return ((flat + 1) % E)[order]


class UnsortedRows(Changed):
    def sent_rows(self, x: Tensor, order: Tensor) -> Tensor:
        return x.repeat_interleave(self.k, 0)


class SwappedOnTheWayBack(Changed):
    def sizes(self, sent: list[int], received: list[int]) -> tuple[list[int], ...]:
        return received, sent, sent[::-1], received[::-1]


class OwnScale(Changed):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = torch.nn.Parameter(torch.randn(H))

    def result(self, rows: Tensor) -> Tensor:
        return rows * self.scale


class OwnNorm(OwnScale):
    """The scale is that of the rank that normalises, not of the one whose experts gave the rows."""

    def result(self, rows: Tensor) -> Tensor:
        return rows

    def came_back(self, rows: Tensor) -> Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5) * self.scale


class ExpertScale(Changed):
    """A factor for each expert: on the rank of the expert, where no routing weight is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = torch.nn.Parameter(torch.randn(self.local, 1))

    def gathered(self, rows: Tensor, ids: Tensor) -> Tensor:
        return super().gathered(rows, ids) * self.scale[ids]


class ExpertScaleOnTheWayIn(ExpertScale):
    def gathered(self, rows: Tensor, ids: Tensor) -> Tensor:
        return Changed.gathered(self, rows * self.scale[ids], ids)


class PlacesOfAnotherRank(Changed):
    """The receiver looks up its own tokens by the places that the sender's rows have there."""

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = self.counts(flat[order] // self.local)
        sent, received = counts.tolist(), self.exchange(counts, None, None).tolist()
        here = self.exchange(flat[order], received, sent)
        places = self.exchange(order // self.k, received, sent)
        rows = self.gathered(x[places % x.shape[0]], here - self.rank * self.local)
        rows = self.exchange(rows, sent, received) * weights.flatten()[order, None]
        return rows[order.argsort()].view(-1, self.k, H).sum(1)


class RunsByRank(ByRuns):
    """The lengths aren't turned around: each row stays where it came, and the experts get each other's rows."""

    def places(self, here: Tensor) -> Tensor:
        begins = (here.cumsum(0) - here).view(self.world, -1).t().reshape(-1)
        run = torch.arange(E).repeat_interleave(here)
        return begins[run] + torch.arange(run.shape[0]) - (here.cumsum(0) - here)[run]


class RunsTwiceTurned(ByRuns):
    """Begins among the experts where those among the ranks belong."""

    def places(self, here: Tensor) -> Tensor:
        lengths = here.view(self.world, -1).t().reshape(-1)
        begins = lengths.cumsum(0) - lengths
        run = torch.arange(E).repeat_interleave(lengths)
        return begins[run] + torch.arange(run.shape[0]) - begins[run]


class RunEnds(ByRuns):
    """Where runs end, which is where the next begins."""

    def places(self, here: Tensor) -> Tensor:
        ends = here.cumsum(0).view(self.world, -1).t().reshape(-1)
        lengths = here.view(self.world, -1).t().reshape(-1)
        run = torch.arange(E).repeat_interleave(lengths)
        return ends[run] - torch.arange(run.shape[0]) + (lengths.cumsum(0) - lengths)[run] - 1


class OtherRun(ByRuns):
    """The runs of the expert after."""

    def places(self, here: Tensor) -> Tensor:
        begins = (here.cumsum(0) - here).view(self.world, -1).t().reshape(-1)
        lengths = here.view(self.world, -1).t().reshape(-1)
        run = torch.arange(E).repeat_interleave(lengths)
        other = (run + 1) % E
        return begins[other] + torch.arange(run.shape[0]) - (lengths.cumsum(0) - lengths)[run]


class OtherArithmetic(ByRuns):
    """Begins that are negated, doubled and shifted."""

    def places(self, here: Tensor) -> Tensor:
        begins = (here.cumsum(0) - here).view(self.world, -1).t().reshape(-1)
        lengths = here.view(self.world, -1).t().reshape(-1)
        run = torch.arange(E).repeat_interleave(lengths)
        back = (-(lengths.cumsum(0) - lengths)[run]).clamp(-5, None) * 2 + 1
        return begins[run] + torch.arange(run.shape[0]) + back


class Padded(ByRuns):
    """Room for a multiple of 8 rows for each expert, the first of them its own."""

    def grouped(self, rows: Tensor, offsets: Tensor) -> Tensor:
        counts = torch.cat([offsets[:1], offsets[1:] - offsets[:-1]])
        rooms = (counts.clamp(min=8) + 8 - 1) // 8 * 8
        expert = torch.arange(self.local).repeat_interleave(counts)
        begins = (rooms.cumsum(0) - rooms)[expert] - (counts.cumsum(0) - counts)[expert]
        places = begins + torch.arange(expert.shape[0])
        room = rows.new_zeros(rows.shape[0] + 8 * self.local, H)
        room[places] = rows
        return super().grouped(room, rooms.cumsum(0).int())[places]


class TwosAdded(ByRuns):
    def exchange(self, rows: Tensor, received: Any, sent: Any) -> Tensor:
        return super().exchange(rows * 2 if received is None else rows, received, sent)


WRONG: dict[type[Block], str] = {
    OtherOwner: "their pieces count",
    ReversedOwner: "their pieces count",
    OtherNumber: "",
    NeighboursNumber: "",
    IdsInOtherOrder: "neither in the order of a sort by expert",
    OtherIds: "",
    UnsortedRows: "",
    SwappedOnTheWayBack: "isn't that of the experts of rank 0",
    OwnScale: "which each rank has for itself, takes part in the rows of all ranks",
    OwnNorm: "which each rank has for itself, takes part in expert rows that came back to it",
    ExpertScale: "scales the rows of each expert, and experts are on other ranks",
    ExpertScaleOnTheWayIn: "scales the rows of each expert, and experts are on other ranks",
    PlacesOfAnotherRank: "",
    RunsByRank: "not in the order of a sort by expert",
    RunsTwiceTurned: "taken by the inverse permutation",
    RunEnds: "not in the order of a sort by expert",
    OtherRun: "not in the order of a sort by expert",
    OtherArithmetic: "not in the order of a sort by expert",
    Padded: "each expert's rows are padded to a multiple of 8",
    TwosAdded: "isn't proved to be what each rank said it sends",
}


class Truncated(Changed):
    """-1 is the rank 0's as well."""

    def owner(self, experts: Tensor) -> Tensor:
        return torch.div(experts, self.local, rounding_mode="trunc")


class Wrapped(Changed):
    """Places beyond the last are the first again."""

    def owner(self, experts: Tensor) -> Tensor:
        return experts % self.experts // self.local


class LastBin(ByBlocks):
    """The place behind the last is counted as the last."""


@pytest.mark.parametrize(
    ("form", "why"),
    [(Truncated, "count"), (Wrapped, "count"), (LastBin, f"counts an id {2 * E} as one of {2 * E - 1}")],
)
def test_places_that_there_are_not_must_not_be_taken_for_others(form, why) -> None:
    """The node leaves such slots out: right only where the model would have failed on them."""
    with fake_ep_group(2, 1):
        result = lifted(form(1, 2, replicas=True), tokens(7, 1))
    assert not [site for site in result.sites if site.layer.ranks is not None]
    assert why in "\n".join(map(explain, result.losses.values()))


@pytest.mark.parametrize(
    ("form", "rank"), [*((form, 1) for form in WRONG), (OtherNumber, 0), (NeighboursNumber, 0), (OtherIds, 0)]
)
def test_what_is_not_proved_is_not_a_layer_of_the_group(form, rank) -> None:
    with fake_ep_group(2, rank):
        result = lifted(form(rank, 2), tokens(7, rank))
    assert not [site for site in result.sites if site.layer.ranks is not None]
    assert WRONG[form] in "\n".join(map(explain, result.losses.values()))


def test_the_steps_unchanged_are_a_layer() -> None:
    with fake_ep_group(2, 1):
        assert site_of(Changed(1, 2), tokens(7, 1)).spec.ep_world_size == 2


def test_sums_over_tensor_parallel_ranks_are_named() -> None:
    import torch.distributed._functional_collectives as funcol

    class Sharded(Changed):
        def result(self, rows: Tensor) -> Tensor:
            return funcol.all_reduce(rows, "sum", self.group)

    with fake_ep_group(2, 1):
        result = lifted(Sharded(1, 2), tokens(7, 1))
    assert not [site for site in result.sites if site.layer.ranks is not None]
    assert "all_reduce" in "\n".join(map(explain, result.losses.values()))


# --- a group of one rank ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [Gathered, Summed])
@pytest.mark.parametrize("count", [7, 1])
def test_what_one_rank_gives_itself_is_what_it_had(form, count) -> None:
    with fake_ep_group(1, 0):
        site = site_of(form(0, 1), tokens(count, 0))
    assert (site.layer.ranks, site.spec.num_experts, site.spec.top_k) == (None, E, 2)


def test_experts_of_rows_whose_number_depends_on_data_are_a_node() -> None:
    with fake_ep_group(1, 0):
        (site,) = moefuse.explain(ByExpert(0, 1), tokens(7, 0)).sites
    assert site.fused
    assert (site.spec.num_experts, site.spec.top_k) == (E, 1)


def test_rows_that_only_come_back_are_named() -> None:
    with fake_ep_group(1, 0):
        result = lifted(ByBlocks(0, 1), tokens(7, 0))
    assert not result.sites
    assert "over a group of one rank" in "\n".join(map(explain, result.losses.values()))
