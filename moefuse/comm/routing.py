"""The parts of an expert-parallel layer that need no other rank: sorting the slots, summing the planes.

In: one rank's tokens and routing. Out: slots sorted by expert with their edges, and y. Both transports use them, so
that they mean the same; the sum is that of a layer on one rank (ops/expert.py), slot by slot.
"""

import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moefuse.comm.capacity import Capacity
from moefuse.comm.errors import CapacityError, ContextError
from moefuse.ops.expert import identity_ids, scale_rows, sum_dtype
from moefuse.ops.kernels import Kernel
from moefuse.ops.operands import Operands
from moefuse.ops.options import PACKED, Options

_COMBINE_TOKENS = 64  # the rows of so many tokens are widened at a time, and stay in the cache


Kind = Literal["inference", "training", "backward"]
"""What a step is for: a forward without and with a gradient, and that gradient; alike on all ranks."""
_KINDS: tuple[Kind, ...] = ("inference", "training", "backward")
_KIND_BITS = 2


class Call(NamedTuple):
    """One step of one layer on this rank: its tokens, its own experts, and the kernel that computes them.

    scheme: how the experts are quantised. rows_dtype: to which their rows are rounded, None for the dtype of x.
    """

    operands: Operands
    options: Options
    kernel: Kernel
    kind: Kind = "inference"
    scheme: str = "none"
    rows_dtype: torch.dtype | None = None

    @property
    def result_dtype(self) -> torch.dtype:
        """Of the rows that experts give: they come back as they are, and are rounded no earlier than on one rank."""
        return self.rows_dtype or self.x.dtype

    @property
    def x(self) -> Tensor:
        """[T, H]."""
        return self.operands.x

    @property
    def topk_ids(self) -> Tensor:
        """[T, K], experts of all ranks."""
        return self.operands.topk_ids

    @property
    def topk_weights(self) -> Tensor:
        """[T, K]."""
        return self.operands.topk_weights

    @property
    def out_features(self) -> int:
        """O."""
        weight = self.operands.weight2[0]
        outputs: int = weight.shape[-2 if self.options.transpose_weight2 else -1]
        return outputs * PACKED if weight.dtype == torch.int32 else outputs

    def experts(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Rows [n, H], local expert of each [n, 1] int64, routing weights [n, 1] -> rows [n, O], result_dtype."""
        own = self.operands._replace(x=rows, topk_ids=ids, topk_weights=weights)
        return self.kernel(None, own, self.local_options)[0]

    @property
    def local_options(self) -> Options:
        """Of this rank's experts as a layer: what is applied at home, to the sum over all slots, isn't part of it."""
        return self.options._replace(
            num_experts=self.options.local_experts,
            ep_world_size=1,
            num_identity_experts=0,
            product_dtype=None,
            output_dtype=self.rows_dtype,
        )

    @property
    def weights_travel(self) -> bool:
        """True when an expert needs the routing weights; otherwise they are applied at home."""
        return self.options.weight_position != "output"

    @property
    def fingerprint(self) -> int:
        """Equal on all ranks that are in the same kind of layer, for the same."""
        shape = (self.topk_ids.shape[1], self.x.shape[1], self.x.dtype)
        layer = zlib.crc32(repr((self.options, *shape, self.scheme, self.result_dtype)).encode())
        return layer << _KIND_BITS | _KINDS.index(self.kind)


class Traffic(NamedTuple):
    """Bytes that crossed between ranks: token rows and routing that came in, result rows and counts that went out."""

    rows: int = 0
    results: int = 0
    routing: int = 0


def sort_slots(call: Call) -> tuple[Tensor, Tensor]:
    """Slots sorted by expert, and the E + 1 edges between the experts, both int64.

    Slot t * K + k is that of token t's k-th choice. Ids outside 0..E-1 lie before the first or after the last edge.
    """
    ids, order = call.topk_ids.reshape(-1).sort(stable=True)
    experts = torch.arange(call.options.num_experts + 1, dtype=ids.dtype, device=ids.device)
    return order, torch.searchsorted(ids, experts)


def check_notes(tokens: Sequence[int], prints: Sequence[int], call: Call, capacity: Capacity) -> None:
    """Each rank's token count and fingerprint. Every rank reads the same and raises the same.

    Raises CapacityError where a rank has too many tokens, ContextError where ranks are in different layers.
    """
    limit = capacity.max_tokens_per_rank
    over = [f"rank {rank} has {n}" for rank, n in enumerate(tokens) if n > limit]
    if over:
        raise CapacityError(
            f"more tokens than the context holds: {', '.join(over)}, max_tokens_per_rank is {limit}. Nothing was "
            f"sent; make the context for the largest batch"
        )
    other = [rank for rank, value in enumerate(prints) if value != prints[0]]
    if not other:
        return
    ranks = ", ".join(map(str, other))
    if any(prints[rank] >> _KIND_BITS != prints[0] >> _KIND_BITS for rank in other):
        raise ContextError(f"rank {ranks} runs another layer than rank 0 at the same time")
    first, theirs = (_KINDS[prints[rank] % 2**_KIND_BITS] for rank in (0, other[0]))
    raise ContextError(
        f"a layer runs for {first} on rank 0 and for {theirs} on rank {ranks}: all ranks want its gradient, or none"
    )


def combine(planes: Tensor, call: Call) -> Tensor:
    """y [T, O] from the result rows of all slots, planes [T, K, O].

    Rows of slots without an expert may hold anything; those of identity experts are filled in here.
    """
    x, ids, options = call.x, call.topk_ids, call.options
    dtype = sum_dtype(x.dtype)
    valid = (ids >= 0) & (ids < options.num_experts + options.num_identity_experts)
    all_valid = bool(valid.all())
    if options.num_identity_experts:
        token, slot = torch.where(identity_ids(ids, options))
        rows = x[token]
        if options.weight_position != "output":
            rows = scale_rows(rows, call.topk_weights[token, slot])
        planes[token, slot] = rows
    weights = call.topk_weights.to(dtype).unsqueeze(-1) if options.weight_position == "output" else None
    y = x.new_empty((x.shape[0], planes.shape[2]), dtype=options.output_dtype or x.dtype)
    for start in range(0, x.shape[0], _COMBINE_TOKENS):
        own = slice(start, start + _COMBINE_TOKENS)
        wide = planes[own].to(dtype)
        if weights is not None:
            wide = wide * weights[own]
        if options.product_dtype is not None:
            wide = wide.to(options.product_dtype).to(dtype)
        if not all_valid:
            wide = wide.where(valid[own].unsqueeze(-1), 0)
        y[own] = wide.sum(1)
    return y
