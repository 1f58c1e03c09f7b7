"""MoE layers whose rows travel between ranks, spelled with Ascend's operators: what one rank of two runs.

Each is a function of (x [T, H], logits [T, E], and this rank's experts: w13, w2 and what belongs to them).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from moefuse.testing import fake_ep_group
from tests.npu import mx_sequences
from tests.npu.mx_sequences import E4M3, paired
from tests.npu.quant_sequences import INT32, Weights, encoded, gmm, second
from tests.npu.sequences import E, mlp, npu, route

WORLD, RANK = 2, 1
LOCAL = E // WORLD
FIRST = RANK * LOCAL
GROUP = "ep"

Mlp = Callable[[Tensor, Tensor | None, Tensor, tuple[Tensor, ...]], Tensor]
"""Rows, their scales (None for floats), rows per expert and the experts' tensors: their outputs in bfloat16."""


def floats(rows: Tensor, scales: Tensor | None, counts: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    return mlp(rows, counts, tensors[0], tensors[1])


def w8a8(rows: Tensor, scales: Tensor | None, counts: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    w = Weights(*tensors)
    h = gmm(rows, w.w13, counts, output_dtype=INT32)
    a, a_scales = npu.npu_dequant_swiglu_quant(
        h, weight_scale=w.s13, activation_scale=scales, group_index=counts, activate_left=True, quant_mode=1
    )
    return second(a, a_scales, w, counts)


def w4a8(rows: Tensor, scales: Tensor | None, counts: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    w = Weights(*tensors)
    h = gmm(rows, w.w13, counts, scale=[encoded(w.s13)], per_token_scale=[scales], bias=[w.o13])
    a, a_scales = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    return gmm(a, w.w2, counts, scale=[encoded(w.s2)], per_token_scale=[a_scales], bias=[w.o2])


def w4a16(rows: Tensor, scales: Tensor | None, counts: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    w = Weights(*tensors)
    h = gmm(rows, w.w13, counts, antiquant_scale=[w.s13], antiquant_offset=[w.o13])
    return gmm(npu.npu_swiglu(h), w.w2, counts, antiquant_scale=[w.s2], antiquant_offset=[w.o2])


def mxfp8(rows: Tensor, scales: Tensor | None, counts: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    w13, w2, s13, s2 = tensors
    if scales is None:  # of a dispatch that doesn't quantise so
        rows, scales = npu.npu_dynamic_mx_quant(rows, dst_type=E4M3)
    h = npu.npu_swiglu(mx_sequences.gmm(rows, paired(scales), w13, s13, counts))
    return mx_sequences.gmm(*npu.npu_dynamic_mx_quant(h, dst_type=E4M3), w2, s2, counts)


MLPS: dict[str, Mlp] = {"bf16": floats, "w8a8": w8a8, "w4a8": w4a8, "w4a16": w4a16, "mxfp8": mxfp8}
ROWS_OF_INTEGERS = ("w8a8", "w4a8")
ROUTED = {"w8a8": 1, "w4a8": 1, "mxfp8": 3}
"""quant_mode of the init routing."""
SENT: dict[str, dict[str, int]] = {
    "w8a8": {"quant_mode": 2},
    "w4a8": {"quant_mode": 2},
    "mxfp8": {"quant_mode": 4, "y_dtype": E4M3},
}
"""How the dispatch quantises; its first version has no y_dtype."""


def allgather(x: Tensor, logits: Tensor, *tensors: Tensor, scheme: str = "bf16") -> Tensor:
    """vllm-ascend, xLLM: every rank has all tokens, and takes those of its experts; an all_reduce follows."""
    routing, ids = route(logits)
    routing = routing * ((ids >= FIRST) & (ids < FIRST + LOCAL))
    rows, row_idx, counts, scales = npu.npu_moe_init_routing_v2(
        x,
        ids,
        expert_num=E,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[FIRST, FIRST + LOCAL],
        quant_mode=ROUTED.get(scheme, -1),
    )
    y = MLPS[scheme](rows, scales if scheme in ROUTED else None, counts, tensors)
    return npu.npu_moe_token_unpermute(y, row_idx.abs(), routing.to(x.dtype))


def without_shell(x: Tensor, logits: Tensor, *tensors: Tensor, scheme: str = "bf16") -> Tensor:
    """SGLang's path for its coming EP: the same, with a combine that leaves out slots without a row."""
    routing, ids = route(logits)
    rows, row_idx, counts, scales = npu.npu_moe_init_routing_v2(
        x,
        ids,
        expert_num=E,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[FIRST, FIRST + LOCAL],
        quant_mode=ROUTED.get(scheme, -1),
    )
    y = MLPS[scheme](rows, scales, counts, tensors)
    return npu.npu_moe_finalize_routing(
        y.unsqueeze(0), None, None, None, routing.to(x.dtype), row_idx, ids, drop_pad_mode=3
    )


def mc2(x: Tensor, logits: Tensor, *tensors: Tensor, scheme: str = "bf16") -> Tensor:
    """vllm-ascend, SGLang: dispatch and combine over the ranks, each one operator."""
    routing, ids = route(logits)
    sent = SENT.get(scheme, {})
    rows, scales, where, counts, received, _, _ = npu.npu_moe_distribute_dispatch_v2(
        x, ids, GROUP, WORLD, RANK, E, **sent
    )
    y = MLPS[scheme](rows, scales if sent else None, counts, tensors)
    return npu.npu_moe_distribute_combine_v2(y, ids, where, received, routing, GROUP, WORLD, RANK, E)


def mc2_and_norm(x: Tensor, logits: Tensor, *tensors: Tensor, scheme: str = "bf16") -> Tensor:
    """The combine that adds the residual and has the next norm in it; both of its outputs are read."""
    routing, ids = route(logits)
    sent = SENT.get(scheme, {})
    rows, scales, where, counts, received, _, _ = npu.npu_moe_distribute_dispatch_v2(
        x, ids, GROUP, WORLD, RANK, E, **sent
    )
    y = MLPS[scheme](rows, scales if sent else None, counts, tensors)
    gamma = torch.linspace(0.5, 1.5, x.shape[1], dtype=x.dtype)
    normed, _, residual = npu.npu_moe_distribute_combine_add_rms_norm(
        y, ids, where, received, routing, x.unsqueeze(1), gamma, GROUP, WORLD, RANK, E, norm_eps=1e-5
    )
    return torch.cat([normed, residual], dim=1)


def mc2_older(x: Tensor, logits: Tensor, *tensors: Tensor, scheme: str = "bf16") -> Tensor:
    """The first versions of both operators."""
    routing, ids = route(logits)
    sent = {} if scheme == "mxfp8" else SENT.get(scheme, {})
    rows, scales, index, counts, received, _, _ = npu.npu_moe_distribute_dispatch(
        x, ids, GROUP, WORLD, RANK, E, **sent
    )
    y = MLPS[scheme](rows, scales if sent else None, counts, tensors)
    return npu.npu_moe_distribute_combine(y, ids, index, received, routing, GROUP, WORLD, RANK, E)


def alltoall(x: Tensor, logits: Tensor, *tensors: Tensor, scheme: str = "bf16") -> Tensor:
    """Permute, exchange, order the rows by expert, and all of it back. Needs a group, see `grouped`."""
    routing, ids = route(logits)
    rows, row_idx = npu.npu_moe_token_permute(x, ids)
    counts = histogram(ids)
    arrived = exchange(counts, [LOCAL] * WORLD, [LOCAL] * WORLD).view(WORLD, LOCAL)
    sent, received = (lengths(runs.sum(1)) for runs in (counts.view(WORLD, LOCAL), arrived))
    rows = exchange(rows, received, sent)
    rows, _, order, counts = npu.npu_moe_re_routing(rows, arrived)
    scales = None
    if scheme in ROWS_OF_INTEGERS:
        rows, scales = npu.npu_dynamic_quant(rows)
    y = MLPS[scheme](rows, scales, counts, tensors)
    y = exchange(y[order.argsort()], sent, received)
    return npu.npu_moe_token_unpermute(y, row_idx, routing.to(x.dtype))


def alltoall_sent_quantised(x: Tensor, logits: Tensor, *tensors: Tensor, scheme: str = "bf16") -> Tensor:
    """The same with rows quantised before they travel: int8 or MX blocks, and their scales, go to the other ranks."""
    routing, ids = route(logits)
    rows, row_idx = npu.npu_moe_token_permute(x, ids)
    counts = histogram(ids)
    arrived = exchange(counts, [LOCAL] * WORLD, [LOCAL] * WORLD).view(WORLD, LOCAL)
    sent, received = (lengths(runs.sum(1)) for runs in (counts.view(WORLD, LOCAL), arrived))
    scales = None
    if scheme in ROUTED:
        by_blocks = scheme == "mxfp8"
        rows, scales = (
            npu.npu_dynamic_mx_quant(rows, dst_type=E4M3) if by_blocks else npu.npu_dynamic_quant(rows)
        )
        scales = exchange(scales, received, sent)
    rows = exchange(rows, received, sent)
    rows, scales, order, counts = npu.npu_moe_re_routing(rows, arrived, per_token_scales=scales)
    y = MLPS[scheme](rows, scales, counts, tensors)
    y = exchange(y[order.argsort()], sent, received)
    return npu.npu_moe_token_unpermute(y, row_idx, routing.to(x.dtype))


def alltoall_vllm(x: Tensor, logits: Tensor, *tensors: Tensor, scheme: str = "bf16") -> Tensor:
    """vllm-ascend: counts of all ranks are gathered, and the rows that came are permuted by their experts."""
    routing, ids = route(logits)
    counts = histogram(ids)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(counts, WORLD, group_name())
    every = torch.ops._c10d_functional.wait_tensor(gathered).view(WORLD, E)
    arrived = every[:, FIRST : FIRST + LOCAL]
    sent, received = (lengths(runs.sum(-1)) for runs in (counts.view(WORLD, LOCAL), arrived))
    rows, row_idx = npu.npu_moe_token_permute(x, ids)
    counts, scales = arrived.sum(0), None
    if scheme in ROWS_OF_INTEGERS:
        rows, scales = npu.npu_dynamic_quant(rows)
        scales = exchange(scales, received, sent)
    rows = exchange(rows, received, sent)
    experts = (torch.arange(E) % LOCAL)[torch.repeat_interleave(arrived.reshape(-1))].to(torch.int32)
    if scheme in ROWS_OF_INTEGERS:
        rows, order, _, scales = npu.npu_moe_init_routing_v2(
            rows,
            experts.unsqueeze(-1),
            scale=scales,
            expert_num=LOCAL,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[0, LOCAL],
            quant_mode=-1,
            row_idx_type=0,
        )
    else:
        rows, order = npu.npu_moe_token_permute(rows, experts)
    y = npu.npu_moe_token_unpermute(MLPS[scheme](rows, scales, counts, tensors), order)
    y = exchange(y, sent, received)
    return npu.npu_moe_token_unpermute(y, row_idx, routing.to(x.dtype), restore_shape=x.shape)


def group_name() -> str:
    """Of the group that all ranks are in."""
    name: str = dist.group.WORLD.group_name  # type: ignore[union-attr]
    return name


def exchange(rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
    """all_to_all_single over that group."""
    moved = torch.ops._c10d_functional.all_to_all_single(rows, received, sent, group_name())
    result: Tensor = torch.ops._c10d_functional.wait_tensor(moved)
    return result


def histogram(ids: Tensor) -> Tensor:
    """Slots per expert."""
    return torch.histc(ids.float(), bins=E, min=0, max=E).to(torch.int64)


def lengths(counts: Tensor) -> list[int]:
    """On the host; in a captured graph symbols."""
    return [count.item() for count in counts.unbind()]  # type: ignore[misc]


@contextmanager
def grouped() -> Iterator[None]:
    """In a process group whose other ranks are torch's fake ones."""
    with fake_ep_group(WORLD, RANK):
        yield


SHELLS = {
    "ALLGATHER": allgather,
    "none": without_shell,
    "MC2": mc2,
    "MC2 with add and norm": mc2_and_norm,
    "MC2, first version": mc2_older,
    "ALLTOALL": alltoall,
    "ALLTOALL, quantised rows travel": alltoall_sent_quantised,
    "ALLTOALL of vllm-ascend": alltoall_vllm,
}
