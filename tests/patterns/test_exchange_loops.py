"""Loops over a rank's experts between the exchanges: which cuts and orders are believed, and which must not be."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.passes.lift import explain
from moefuse.passes.region import outliving
from moefuse.testing import fake_ep_group
from tests.comm.spread_models import Block, ByLoop, ByPieces, ByPiecesOfEach, E, H, tokens
from tests.patterns.test_exchange import lifted, site_of


@pytest.mark.parametrize(
    ("form", "world", "k", "count"),
    [
        *((form, 8, 2, 7) for form in (ByLoop, ByPieces, ByPiecesOfEach)),
        *((ByLoop, 4, 1, 1), (ByPieces, 2, 1, 0), (ByPiecesOfEach, 2, 2, 1), (ByPiecesOfEach, 4, 3, 0)),
    ],
)
def test_each_expert_of_the_rank_is_one_of_the_groups(form, world, k, count) -> None:
    """With 8 ranks each has one expert: nothing need be cut."""
    with fake_ep_group(world, world - 1):
        site = site_of(form(world - 1, world, k=k), tokens(count, 0))
    spec, own = site.spec, E // world
    assert (spec.num_experts, spec.ep_world_size, spec.top_k) == (E, world, k)
    assert (spec.weight_form, len(site.layer.weight1), len(site.layer.weight2)) == ("list", own, own)
    assert not outliving(site)  # the counts of each expert are gone too


class Reversed(ByLoop):
    """Another expert's matrices: a layer all the same, with the matrices in that order."""

    def expert(self, number: int, rows: Tensor) -> Tensor:
        return super().expert(self.local - 1 - number, rows)


def test_matrices_in_another_order_are_taken_in_it() -> None:
    with fake_ep_group(2, 1):
        site = site_of(Reversed(1, 2), tokens(7, 1))
    numbers = [leaf.node.args[2] for leaf in site.layer.weight2]
    assert numbers == [3, 2, 1, 0]


class OwnBias(ByLoop):
    """What every rank adds to its experts' rows is a bias of theirs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias = torch.nn.Parameter(torch.randn(H))

    def expert(self, number: int, rows: Tensor) -> Tensor:
        return super().expert(number, rows) + self.bias


def test_what_experts_add_is_their_bias() -> None:
    with fake_ep_group(2, 1):
        site = site_of(OwnBias(1, 2), tokens(7, 1))
    assert site.spec.has_bias2
    assert len(site.layer.bias2) == E // 2


# --- what must not be believed ---------------------------------------------------------------------------


class OwnScale(ByLoop):
    """A number of each rank's own, which the home of the rows doesn't have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = torch.nn.Parameter(torch.randn(1))

    def expert(self, number: int, rows: Tensor) -> Tensor:
        return super().expert(number, rows) * self.scale


class OwnScaleOfOne(OwnScale):
    """Of one expert only."""

    def expert(self, number: int, rows: Tensor) -> Tensor:
        return ByLoop.expert(self, number, rows) * (self.scale if number == 1 else 1)


class OwnScaleOnTheWayIn(OwnScale):
    def expert(self, number: int, rows: Tensor) -> Tensor:
        return ByLoop.expert(self, number, rows * self.scale)


class OwnRows(ByLoop):
    """The receiver's own tokens instead of those that came."""

    def routed(self, x: Tensor) -> Tensor:
        self.own = x
        return super().routed(x)

    def expert(self, number: int, rows: Tensor) -> Tensor:
        return super().expert(number, rows + self.own.sum(0))


class OneLess(ByLoop):
    """The bounds of the slices are those of the expert before."""

    def looped(self, rows: Tensor, counts: list[int]) -> Tensor:
        return super().looped(rows, [counts[-1], *counts[:-1]])


class Shifted(ByLoop):
    """Each slice begins and ends one row later."""

    def looped(self, rows: Tensor, counts: list[int]) -> Tensor:
        results, start = [], 1
        for number, count in enumerate(counts):
            results.append(self.expert(number, rows[start : start + count]))
            start += count
        return torch.cat(results)


class SameSlice(ByLoop):
    """All experts get the first one's rows."""

    def looped(self, rows: Tensor, counts: list[int]) -> Tensor:
        return torch.cat([self.expert(e, rows[: counts[0]]) for e in range(self.local)])


class Unordered(ByLoop):
    """The results of the experts last to first."""

    def looped(self, rows: Tensor, counts: list[int]) -> Tensor:
        return torch.cat([self.expert(e, part) for e, part in enumerate(rows.split(counts))][::-1])


class Dropped(ByLoop):
    """The last expert's rows are lost, and the first one's there twice."""

    def looped(self, rows: Tensor, counts: list[int]) -> Tensor:
        parts = [self.expert(e, part) for e, part in enumerate(rows.split(counts))]
        return torch.cat([*parts[:-1], parts[0]])


class LastIsMissing(ByLoop):
    def looped(self, rows: Tensor, counts: list[int]) -> Tensor:
        return torch.cat([self.expert(e, part) for e, part in enumerate(rows.split(counts)[:-1])])


class SentCounts(ByLoop):
    """Cut by how many rows go away for the experts of the same numbers, not by how many came."""

    def routed(self, x: Tensor) -> Tensor:
        ids = self.route(x)[1].view(-1)
        self.away = torch.histc(ids.float(), bins=self.experts, min=0, max=self.experts).long()
        return super().routed(x)

    def looped(self, rows: Tensor, counts: list[int]) -> Tensor:
        return super().looped(rows, self.away[: self.local].tolist())


class AsTheyCame(ByLoop):
    """Rows are cut by expert as they came, rank by rank."""

    def sorted_rows(self, rows: Tensor, here: Tensor) -> tuple[Tensor, Any]:
        return rows, None

    def unsorted_rows(self, rows: Tensor, by: Any) -> Tensor:
        return rows


class StaySorted(ByLoop):
    """Rows go back in the order of the experts."""

    def unsorted_rows(self, rows: Tensor, by: Any) -> Tensor:
        return rows


class OtherLengths(ByPieces):
    """What each rank sent is taken for what came for each expert."""

    def sorted_rows(self, rows: Tensor, here: Tensor) -> tuple[Tensor, Any]:
        turned = here.view(self.world, -1).t().flatten().tolist()
        return self.reordered(rows, turned, self.world), turned


class SameLengthsBack(ByPieces):
    def sorted_rows(self, rows: Tensor, here: Tensor) -> tuple[Tensor, Any]:
        lengths = here.tolist()
        return self.reordered(rows, lengths, self.world), lengths


class OtherOrderBack(ByPieces):
    """As if there were as many experts here as ranks, or the other way round."""

    def unsorted_rows(self, rows: Tensor, by: Any) -> Tensor:
        return self.reordered(rows, by, self.world)


class NoOrderBack(ByPieces):
    def unsorted_rows(self, rows: Tensor, by: Any) -> Tensor:
        return torch.cat(rows.split(by))


class PieceTwice(ByPieces):
    def reordered(self, rows: Tensor, lengths: list[int], outer: int) -> Tensor:
        parts = rows.split(lengths)
        inner = len(parts) // outer
        order = [o * inner + i for i in range(inner) for o in range(outer)]
        return torch.cat([parts[place] for place in [order[0], *order[:-1]]])


class ByAnySort(ByPieces):
    """A sort that needn't keep the order of the ranks, cut by rank."""

    def sorted_rows(self, rows: Tensor, here: Tensor) -> tuple[Tensor, Any]:
        number = (torch.arange(self.experts) % self.local).repeat_interleave(here)
        return rows[number.argsort()], here.view(self.world, -1).t().flatten().tolist()


class PieceOfAnother(ByPiecesOfEach):
    """The second rank's rows for an expert are those for the one after."""

    def unsorted_rows(self, rows: Tensor, by: Any) -> Tensor:
        parts, local = list(rows.split(by)), self.local
        parts[local:] = [*parts[local + 1 :], parts[local]]
        each = [self.expert(e, torch.cat(parts[e::local])) for e in range(local)]
        again = [part.split(by[e::local]) for e, part in enumerate(each)]
        return torch.cat([again[e][r] for r in range(self.world) for e in range(local)])


class BackOfAnother(ByPiecesOfEach):
    """Each rank gets the next one's results."""

    def unsorted_rows(self, rows: Tensor, by: Any) -> Tensor:
        parts, local = rows.split(by), self.local
        each = [self.expert(e, torch.cat(parts[e::local])).split(by[e::local]) for e in range(local)]
        return torch.cat([each[e][r - 1] for r in range(self.world) for e in range(local)])


class TwoArrivals(ByPiecesOfEach):
    """Rows come twice, the second time sorted otherwise; odd experts read those. Results go home by the first."""

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        order, other = self.orders(ids)
        here, away, came = self.announced(ids)
        both = [
            self.exchange(rows, came, away).split(here.tolist()) for rows in (x[order // self.k], x[other])
        ]
        local, lengths = self.local, here.tolist()
        parts = [both[self.choice(place % local, place // local)][place] for place in range(self.experts)]
        each = [self.expert(e, torch.cat(parts[e::local])).split(lengths[e::local]) for e in range(local)]
        rows = torch.cat([each[e][r] for r in range(self.world) for e in range(local)])
        rows = self.exchange(rows, away, came) * weights.view(-1)[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // self.k, rows)

    def orders(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        turned = torch.argsort(ids.t().reshape(-1), stable=True) % len(ids)
        return torch.argsort(ids.view(-1), stable=True), turned

    def choice(self, expert: int, rank: int) -> int:
        return expert % 2


class TwoArrivalsInOneExpert(TwoArrivals):
    """Each expert reads rank 0's rows as they came first and rank 1's as they came then."""

    def choice(self, expert: int, rank: int) -> int:
        return rank


class TwoSorts(TwoArrivals):
    """The second sort, of the same ids, may order slots of one expert otherwise."""

    def orders(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return torch.argsort(ids.view(-1), stable=True), torch.argsort(ids.view(-1)) // self.k


class PlaceAsWeight(ByLoop):
    """Where a row lies on the rank that computes it."""

    def expert(self, number: int, rows: Tensor) -> Tensor:
        return super().expert(number, rows) * torch.arange(len(rows)).unsqueeze(1)


class NumberAsWeight(ByLoop):
    """How many rows came."""

    def looped(self, rows: Tensor, counts: list[int]) -> Tensor:
        return super().looped(rows, counts) * self.here.sum()

    def sorted_rows(self, rows: Tensor, here: Tensor) -> tuple[Tensor, Any]:
        self.here = here
        return super().sorted_rows(rows, here)


class OwnBiasOnTheWayBack(OwnBias):
    """Here it's a bias of the rank that gets the rows."""

    def expert(self, number: int, rows: Tensor) -> Tensor:
        return ByLoop.expert(self, number, rows)

    def looped(self, rows: Tensor, counts: list[int]) -> Tensor:
        self.computed = True
        return super().looped(rows, counts)

    def exchange(self, rows: Tensor, received: Any, sent: Any) -> Tensor:
        rows = super().exchange(rows, received, sent)
        return rows + self.bias if self.computed else rows

    def routed(self, x: Tensor) -> Tensor:
        self.computed = False
        return super().routed(x)


OWN = "which each rank has for itself, takes part in the rows of all ranks"
TWICE = "that came from the ranks in two orders"
BETWEEN = "cut at other places than between two experts"
WRONG: dict[type[Block], str] = {
    OwnScale: OWN,
    OwnScaleOfOne: OWN,
    OwnScaleOnTheWayIn: OWN,
    OwnRows: OWN,
    OwnBiasOnTheWayBack: "which each rank has for itself, takes part in expert rows that came back to it",
    OneLess: BETWEEN,
    Shifted: BETWEEN,
    SameSlice: "isn't that of expert 1",
    Unordered: "isn't that of expert 0",
    Dropped: "piece 3 of the rows that are put together isn't that of expert 3",
    LastIsMissing: "rows of 3 experts are put together, and came for 4",
    SentCounts: BETWEEN,
    AsTheyCame: "not in the order of their experts",
    StaySorted: "neither in the order of a sort by expert",
    OtherLengths: "piece 1 of the rows that came from all ranks isn't as long",
    SameLengthsBack: "piece 1 of the rows that came from all ranks isn't as long",
    OtherOrderBack: "neither rank by rank nor expert by expert",
    NoOrderBack: "neither in the order of a sort by expert",
    PieceTwice: "neither rank by rank nor expert by expert",
    ByAnySort: "aren't proved to lie rank by rank or expert by expert",
    PieceOfAnother: "neither rank by rank nor expert by expert",
    BackOfAnother: "neither rank by rank nor expert by expert",
    TwoArrivalsInOneExpert: TWICE,
    TwoArrivals: TWICE,
    TwoSorts: TWICE,
    PlaceAsWeight: OWN,
    NumberAsWeight: OWN,
}


@pytest.mark.parametrize("form", WRONG)
def test_what_is_not_proved_is_not_a_layer_of_the_group(form) -> None:
    with fake_ep_group(2, 1):
        result = lifted(form(1, 2), tokens(7, 1))
    assert not [site for site in result.sites if site.layer.ranks is not None]
    assert WRONG[form] in "\n".join(map(explain, result.losses.values()))


@pytest.mark.parametrize("form", [OwnScale, OwnScaleOnTheWayIn, OwnRows, PlaceAsWeight, NumberAsWeight])
def test_the_one_expert_of_a_rank_has_nothing_of_the_ranks_own_either(form) -> None:
    with fake_ep_group(8, 1):
        result = lifted(form(1, 8), tokens(7, 1))
    assert not [site for site in result.sites if site.layer.ranks is not None]
    assert OWN in "\n".join(map(explain, result.losses.values()))
