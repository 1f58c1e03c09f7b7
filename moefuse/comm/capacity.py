"""How much one context can hold, and the bytes that takes: the one place where it is computed.

In: compile-time facts of a layer and the largest number of tokens a rank may bring. Out: `Capacity`, with the layout
of a rank's shared window. The windows are sized by it, and the transports read their offsets from it.
"""

import math
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch

from moefuse.comm.errors import ContextError
from moefuse.ops.expert import sum_dtype
from moefuse.ops.options import FLOATS

HEADER_BYTES = 4096
ALIGNMENT = 64
MAX_WORLD_SIZE = 1024
NOTES = 2
"""Columns after the edges of a pushed row: the rank's token count, and the fingerprint of its call."""


class Section(NamedTuple):
    """A tensor inside a window: where it begins, its shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def span(self) -> int:
        """Its size up to where the next tensor may begin."""
        return -(-self.bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Capacity:
    """What a context is made for; equal on all ranks. T is max_tokens_per_rank, E_l the experts of one rank.

    A window holds, besides its header: `edges` [W, E_l + 1 + NOTES], pushed by every source rank; `x` [T, H] and
    `slots` [T * K] and `weights` [T * K], from which the others pull; `planes` [T * K, O], into which they scatter.
    dtype: of x. rows_dtype: of the rows that come back, where it's another one.
    Raises ContextError naming the field that is impossible.
    """

    ep_world_size: int
    num_experts: int
    top_k: int
    hidden: int
    out_features: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    rows_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not field.name.endswith("dtype") and (type(value) is not int or value < 1):
                raise ContextError(f"{field.name}: expected a positive integer, got {value!r}")
        for name, dtype in (("dtype", self.dtype), ("rows_dtype", self.result_dtype)):
            if dtype not in FLOATS:
                raise ContextError(f"{name}: expected one of {', '.join(map(str, FLOATS))}, got {dtype!r}")
        if self.ep_world_size > MAX_WORLD_SIZE:
            raise ContextError(f"ep_world_size: expected at most {MAX_WORLD_SIZE}, got {self.ep_world_size}")
        if self.num_experts % self.ep_world_size:
            raise ContextError(
                f"num_experts: expected a multiple of ep_world_size={self.ep_world_size}, got {self.num_experts}"
            )
        if self.max_tokens_per_rank * self.top_k >= 2**31:
            raise ContextError(
                f"max_tokens_per_rank: expected fewer than {2**31 // self.top_k} at top-{self.top_k}, "
                f"got {self.max_tokens_per_rank}"
            )

    @property
    def local_experts(self) -> int:
        """Experts of one rank: rank r holds those from r * local_experts on."""
        return self.num_experts // self.ep_world_size

    @property
    def result_dtype(self) -> torch.dtype:
        """Of the rows that come back."""
        return self.rows_dtype or self.dtype

    @property
    def max_recv_tokens(self) -> int:
        """Token rows that one rank may receive: all tokens of all ranks, each once."""
        return self.ep_world_size * self.max_tokens_per_rank

    @cached_property
    def sections(self) -> dict[str, Section]:
        """The layout of a window."""
        slots = self.max_tokens_per_rank * self.top_k
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "edges": ((self.ep_world_size, self.local_experts + 1 + NOTES), torch.int64),
            "x": ((self.max_tokens_per_rank, self.hidden), self.dtype),
            "slots": ((slots,), torch.int32),
            "weights": ((slots,), sum_dtype(self.dtype)),
            "planes": ((slots, self.out_features), self.result_dtype),
        }
        offset = HEADER_BYTES
        sections = {}
        for name, (shape, dtype) in shapes.items():
            sections[name] = Section(offset, shape, dtype)
            offset += sections[name].span
        return sections

    @cached_property
    def window_bytes(self) -> int:
        """Bytes of shared memory that each rank owns."""
        last = self.sections["planes"]
        return last.offset + last.span

    @property
    def receive_bytes(self) -> int:
        """Private bytes for received rows when every token of every rank comes here; allocated as rows come."""
        return self.max_recv_tokens * self.hidden * self.dtype.itemsize

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; equal for equal capacities."""
        return {**asdict(self), "dtype": str(self.dtype), "rows_dtype": str(self.result_dtype)}
