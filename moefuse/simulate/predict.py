"""Time, bytes and launches of one expert-parallel layer, written in one of three ways.

In: a workload, its routing, a topology and measured costs. Out: `Prediction`, with the stretches of work of the ranks
that are worth a look. One thread per rank; ranks beyond a host's cores take turns. The fused node pulls an expert's
rows on an engine of its own where `overlap` says so (a second thread, or a device's copy engine), otherwise in turn.
Between hosts it is taken to read and write over the link as it does over shared memory.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from moefuse.simulate.costs import Costs
from moefuse.simulate.svg import Bar
from moefuse.simulate.workload import Routing, Topology, Workload

# Torch operators of the layer as models write it, besides the collectives and the experts (simulate/ways.py).
ALL_TO_ALL_OPS, ALL_GATHER_OPS = 23, 7
ALL_TO_ALL_COLLECTIVES, ALL_GATHER_COLLECTIVES = 4, 4
_ID_BYTES, _WEIGHT_BYTES, _COUNT_BYTES, _NOTES = 8, 4, 8, 2


@dataclass(frozen=True)
class Prediction:
    """One way to run the layer. bytes: what the busiest rank gets from other ranks. bars: of some ranks."""

    way: str
    seconds: float
    bytes: float
    launches: int
    communicating: float
    computing: float
    bars: list[Bar] = field(default_factory=list, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the bars."""
        return {name: value for name, value in asdict(self).items() if name != "bars"}


class _Machine:
    """Costs of stretches of work, ranks in turn where a host has too few cores."""

    def __init__(self, layer: Workload, topology: Topology, costs: Costs) -> None:
        self.layer, self.topology, self.costs = layer, topology, costs
        self.turns = max(1.0, (topology.near + 1) / costs.cores)

    def experts(self, rows: float, touched: float) -> float:
        """GEMMs of so many rows through so many experts: by operations or by weights read, whichever is longer."""
        flops, read = rows * self.layer.row_flops, touched * self.layer.expert_bytes
        return self.turns * max(flops / self.costs.flops, read / self.costs.weight_bytes)

    def copy(self, size: float) -> float:
        return self.turns * size / self.costs.copy_bytes

    def moved(self, size_per_rank: float) -> float:
        """One-sided: so many bytes from, or to, each other rank."""
        near = self.copy(self.topology.near * size_per_rank)
        if not self.topology.far:
            return near
        return (
            near + self.topology.link_seconds + self.topology.far * size_per_rank / self.topology.link_bytes
        )

    def meeting(self) -> float:
        """All ranks wait for each other, besides what the node's own cost has of it."""
        more = self.topology.ranks - 2
        link = self.topology.link_seconds if self.topology.far else 0.0
        return self.turns * max(0, more) * self.costs.meeting_seconds + link

    def exchange(self, size: float) -> float:
        """An all_to_all: so many bytes from each other rank, counted at the busiest."""
        return self._collective(self.costs.exchange_seconds, self.costs.exchange_rank_seconds, size)

    def gather(self, size: float) -> float:
        """An all_gather of so many bytes per rank, or a reduce_scatter that leaves them there."""
        return self._collective(self.costs.gather_seconds, self.costs.gather_rank_seconds, size)

    def _collective(self, two_ranks: float, rank_more: float, size: float) -> float:
        near = self.topology.near * size / self.costs.collective_bytes
        fixed = two_ranks + max(0, self.topology.ranks - 2) * rank_more
        if not self.topology.far:
            return self.turns * (fixed + near)
        far = self.topology.link_seconds + self.topology.far * size / self.topology.link_bytes
        return self.turns * (fixed + near) + far

    def operators(self, count: int) -> float:
        return self.turns * count * self.costs.op_seconds


def _touched(slots: list[float]) -> float:
    """Experts that get a row at all, where `slots` are expected."""
    return sum(min(1.0, rows) for rows in slots)


def _shown(ranks: int) -> list[int]:
    """The busiest ranks come first under skewed routing; the last is the idlest."""
    return sorted({*range(min(ranks, 3)), ranks - 1})


def _fused(machine: _Machine, routing: Routing, overlap: bool) -> Prediction:
    layer, ranks = machine.layer, machine.topology.ranks
    start = machine.turns * machine.costs.node_seconds / 2
    published = start + machine.copy(layer.tokens * (layer.row_bytes + layer.top_k * _ID_BYTES))
    met = published + machine.meeting() / 2
    ends, computing, moving, received, bars = [], [], [], [], []
    for rank in range(ranks):
        pulls, slots = routing.pulls(rank), routing.slots(rank)
        pulled = computed = met
        own: list[Bar] = [Bar(f"rank {rank}", "publish", start, published, "publish")]
        busy = moved = 0.0
        for expert, (rows, work) in enumerate(zip(pulls, slots, strict=True)):
            begin = pulled if overlap else computed
            pulled = begin + machine.moved(rows * layer.row_bytes)
            gemm = max(pulled, computed)
            # results go straight to their owners as they are made
            back = machine.moved(work / ranks * layer.row_bytes)
            computed = gemm + machine.experts(work, min(1.0, work)) + back
            own.append(Bar(f"rank {rank}, rows", f"{expert}", begin, pulled, "pull"))
            own.append(Bar(f"rank {rank}", f"{expert}", gemm, computed, "experts"))
            busy, moved = busy + computed - gemm - back, moved + pulled - begin + back
        ends.append(computed)
        computing.append(busy)
        moving.append(moved)
        received.append((ranks - 1) * (sum(pulls) * layer.row_bytes + sum(slots) / ranks * _ID_BYTES / 2))
        if rank in _shown(ranks):
            bars += own
    results = layer.tokens * layer.top_k * (ranks - 1) / ranks * layer.row_bytes
    met_again = max(ends) + machine.meeting() / 2
    summed = met_again + machine.copy(layer.tokens * layer.top_k * layer.row_bytes)
    for rank in _shown(ranks):
        bars.append(Bar(f"rank {rank}", "wait", ends[rank], met_again, "wait"))
        bars.append(Bar(f"rank {rank}", "combine", met_again, summed, "combine"))
    end = summed + machine.turns * machine.costs.node_seconds / 2
    pushed = (ranks - 1) * (layer.experts // ranks + 1 + _NOTES) * _COUNT_BYTES
    return Prediction("fused", end, max(received) + results + pushed, 1, max(moving), max(computing), bars)


def _stages(stages: list[tuple[str, str, float]]) -> tuple[float, list[Bar]]:
    """Work that all ranks do at the same time, one after another."""
    now, bars = 0.0, []
    for label, kind, seconds in stages:
        bars.append(Bar("all ranks", label, now, now + seconds, kind))
        now += seconds
    return now, bars


def _all_to_all(machine: _Machine, routing: Routing, overlap: bool) -> Prediction:
    layer, ranks = machine.layer, machine.topology.ranks
    busiest = max(range(ranks), key=lambda rank: sum(routing.slots(rank)))
    slots = routing.slots(busiest)
    rows = sum(slots) / ranks  # between the busiest rank and each other
    back = max(rows, layer.tokens * layer.top_k / ranks)
    experts = machine.turns * machine.costs.experts_seconds + machine.experts(sum(slots), _touched(slots))
    local = machine.operators(ALL_TO_ALL_OPS) / 2 + machine.copy(layer.tokens * layer.top_k * layer.row_bytes)
    exchanges = [
        machine.exchange(_COUNT_BYTES),
        machine.exchange(rows * _ID_BYTES),
        machine.exchange(rows * layer.row_bytes),
        machine.exchange(back * layer.row_bytes),
    ]
    seconds, bars = _stages(
        [
            ("sort, gather", "publish", local),
            ("counts", "wait", exchanges[0]),
            ("ids", "wait", exchanges[1]),
            ("rows", "pull", exchanges[2]),
            ("experts", "experts", experts),
            ("results", "pull", exchanges[3]),
            ("combine", "combine", local),
        ]
    )
    moved = (ranks - 1) * (_COUNT_BYTES + rows * (_ID_BYTES + layer.row_bytes))
    results = layer.tokens * layer.top_k * (ranks - 1) / ranks * layer.row_bytes
    launches = ALL_TO_ALL_OPS + ALL_TO_ALL_COLLECTIVES + 1
    return Prediction("all_to_all", seconds, moved + results, launches, sum(exchanges), experts, bars)


def _all_gather(machine: _Machine, routing: Routing, overlap: bool) -> Prediction:
    layer, ranks = machine.layer, machine.topology.ranks
    busiest = max(range(ranks), key=lambda rank: sum(routing.slots(rank)))
    slots = routing.slots(busiest)
    sizes = [layer.row_bytes, layer.top_k * _ID_BYTES, layer.top_k * _WEIGHT_BYTES]
    gathered = sum(machine.gather(layer.tokens * size) for size in sizes)
    reduced = machine.gather(layer.tokens * layer.row_bytes)
    experts = machine.turns * machine.costs.experts_seconds + machine.experts(sum(slots), _touched(slots))
    local = machine.operators(ALL_GATHER_OPS) + machine.copy(ranks * layer.tokens * layer.row_bytes)
    seconds, bars = _stages(
        [
            ("gather", "pull", gathered),
            ("ids", "publish", local),
            ("experts", "experts", experts),
            ("reduce", "pull", reduced),
        ]
    )
    moved = (ranks - 1) * layer.tokens * (sum(sizes) + layer.row_bytes)
    launches = ALL_GATHER_OPS + ALL_GATHER_COLLECTIVES + 1
    return Prediction("all_gather", seconds, moved, launches, gathered + reduced, experts, bars)


WAYS: dict[str, Callable[[_Machine, Routing, bool], Prediction]] = {
    "fused": _fused,
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
}


def predict(
    workload: Workload, topology: Topology, costs: Costs, *, skew: float = 0.0, overlap: bool = False
) -> list[Prediction]:
    """All ways, in the order of `WAYS`. Raises ValueError where ranks don't divide the experts, or for a bad skew."""
    routing = Routing(workload, topology.ranks, skew)
    machine = _Machine(workload, topology, costs)
    return [way(machine, routing, overlap) for way in WAYS.values()]
