"""What is simulated: a layer, how its tokens are routed, and where its ranks are.

In: sizes. Out: expected numbers of rows. All source ranks are alike, so what goes to a rank depends on the rank alone.
A token's K experts are drawn without replacement by popularity; with a clock per expert that rings at random, the K
that ring first, the chance of expert e is 1 - exp(-t p_e), where t is such that K are expected.
"""

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

MAX_RANKS = 1024
_ITEM = {"float16": 2, "bfloat16": 2, "float32": 4}


def _positive(value: Any, name: str) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}: expected a positive integer, got {value!r}")


@dataclass(frozen=True)
class Workload:
    """One layer: tokens on each rank, top_k of `experts` each, H -> I (gated) -> H. Raises ValueError for a field."""

    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "dtype":
                _positive(getattr(self, field.name), field.name)
        if self.dtype not in _ITEM:
            raise ValueError(f"dtype: expected one of {', '.join(_ITEM)}, got {self.dtype!r}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k: expected at most experts={self.experts}, got {self.top_k}")

    @property
    def row_bytes(self) -> int:
        """Of a token row, and of a result row."""
        return self.hidden * _ITEM[self.dtype]

    @property
    def expert_bytes(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.intermediate * _ITEM[self.dtype]

    @property
    def row_flops(self) -> int:
        """Of one row through one expert."""
        return 6 * self.hidden * self.intermediate


@dataclass(frozen=True)
class Topology:
    """ranks on hosts of ranks_per_host. A rank's link to other hosts: bytes per second, seconds until the first one."""

    ranks: int
    ranks_per_host: int = 8
    link_bytes: float = 25e9
    link_seconds: float = 5e-6

    def __post_init__(self) -> None:
        _positive(self.ranks, "ranks")
        _positive(self.ranks_per_host, "ranks_per_host")
        if self.ranks > MAX_RANKS:
            raise ValueError(f"ranks: expected at most {MAX_RANKS}, got {self.ranks}")
        for name in ("link_bytes", "link_seconds"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: expected a positive number, got {value!r}")

    @property
    def near(self) -> int:
        """Other ranks of a full host."""
        return min(self.ranks, self.ranks_per_host) - 1

    @property
    def far(self) -> int:
        """Ranks of other hosts, seen from there."""
        return self.ranks - 1 - self.near


@dataclass(frozen=True)
class Routing:
    """How popular experts are: the i-th as 1 / i^skew, 0 for all alike; the popular ones lie on the first ranks."""

    workload: Workload
    ranks: int
    skew: float = 0.0

    def __post_init__(self) -> None:
        if not (isinstance(self.skew, int | float) and 0 <= self.skew <= 3):
            raise ValueError(f"skew: expected 0 (balanced) to 3, got {self.skew!r}")
        if self.workload.experts % self.ranks:
            raise ValueError(
                f"experts: expected a multiple of ranks={self.ranks}, got {self.workload.experts}"
            )

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """t p_e: how often the clock of each expert rings until K have."""
        count, top_k = self.workload.experts, self.workload.top_k
        weights = [(i + 1.0) ** -self.skew for i in range(count)]
        total = math.fsum(weights)
        popularity = [weight / total for weight in weights]
        if top_k == count:
            return (math.inf,) * count
        low, high = 0.0, 1.0
        while math.fsum(-math.expm1(-high * p) for p in popularity) < top_k:
            low, high = high, 2 * high
        for _ in range(60):
            middle = (low + high) / 2
            chosen = math.fsum(-math.expm1(-middle * p) for p in popularity)
            low, high = (middle, high) if chosen < top_k else (low, middle)
        return tuple(high * p for p in popularity)

    def own(self, rank: int) -> tuple[float, ...]:
        """The rates of one rank's experts."""
        local = self.workload.experts // self.ranks
        return self.rates[rank * local : (rank + 1) * local]

    def slots(self, rank: int) -> list[float]:
        """Rows that each expert of a rank computes, from all ranks together."""
        tokens = self.ranks * self.workload.tokens
        return [tokens * -math.expm1(-rate) for rate in self.own(rank)]

    def pulls(self, rank: int) -> list[float]:
        """Token rows that one source rank sends for each expert: those that no expert of the rank before it wants."""
        before, rows = 0.0, []
        for rate in self.own(rank):
            rows.append(self.workload.tokens * math.exp(-before) * -math.expm1(-rate))
            before += rate
        return rows
