"""Reference kernels of the exchange of token rows between the ranks of an expert-parallel group.

In: CPU tensors of one rank, and the name of a torch.distributed group that all ranks are in. Out: the rows of this
rank's experts, by expert, then rank, then slot; and back again. Every rank tells every other all it has: slow, plain.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d

from moefuse.testing.npu_reference_kernels import mx
from moefuse.testing.npu_reference_kernels.checks import UNDEFINED, absent, only
from moefuse.testing.npu_reference_kernels.quant import dynamic_int8

_LEFT_OUT = (
    *(
        "x_active_mask",
        "expert_scales",
        "elastic_info",
        "performance_info",
        "activation_scale",
        "weight_scale",
    ),
    *(
        "group_list",
        "expand_scales",
        "shared_expert_x",
        "ori_x",
        "const_expert_alpha_1",
        "const_expert_alpha_2",
        "const_expert_v",
    ),
)
BLOCKS = 4
"""The quant_mode of MX blocks."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "tp_world_size": (0, 1),
    "expert_shard_type": (0,),
    "shared_expert_rank_num": (0,),
    "zero_expert_num": (0,),
    "copy_expert_num": (0,),
    "const_expert_num": (0,),
    "out_dtype": (0,),
    "comm_quant_mode": (0,),
    "x_dtype": (None,),
    "scales_dtype": (None,),
}


def _check(name: str, options: dict[str, Any]) -> None:
    absent(name, **{argument: options.get(argument) for argument in _LEFT_OUT})
    for argument, handled in _PLAIN.items():
        only(name, argument, options.get(argument, handled[0]), *handled)


def _told(group: str, world: int, value: Any) -> list[Any]:
    """What each rank tells; a group of one needs no torch.distributed."""
    told = [value] * world
    if world > 1:
        dist.all_gather_object(told, value, group=distributed_c10d._resolve_process_group(group))  # type: ignore[arg-type,attr-defined]
    return told


def _received(every_ids: list[Tensor], rank: int, experts: int) -> Iterator[tuple[int, int, int, int]]:
    """(expert, rank, token, slot) of each row that a rank receives, in its order. experts: of all ranks."""
    local = experts // len(every_ids)
    for expert in range(rank * local, (rank + 1) * local):
        for source, ids in enumerate(every_ids):
            for token, slot in (ids == expert).nonzero().tolist():
                yield expert, source, token, slot


def _dispatch_shapes(
    v2: bool, x: Tensor, ids: Tensor, world: int, experts: int, **options: Any
) -> list[Tensor]:
    """The outputs, unwritten."""
    local, k = experts // world, ids.shape[1]
    rows = (options.get("global_bs") or x.shape[0] * world) * min(local, k)
    dtype = x.dtype if options.get("quant_mode", 0) == 0 and options.get("scales") is None else torch.int8
    received = [
        x.new_empty((rows, x.shape[1]), dtype=dtype),
        x.new_empty((rows,), dtype=torch.float32),
    ]
    if options.get("quant_mode", 0) == BLOCKS:
        elements, scales = mx.quantise(x[:1], mx.ELEMENTS[options["y_dtype"]])
        received = [
            x.new_empty((rows, elements.shape[1]), dtype=elements.dtype),
            x.new_empty((rows, scales.shape[1:].numel()), dtype=torch.uint8),
        ]
    return [
        *received,
        x.new_empty((rows * 128 if v2 else x.shape[0] * k,), dtype=torch.int32),
        x.new_empty((local,), dtype=torch.int64),
        x.new_empty((world * local,), dtype=torch.int32),
        x.new_empty((options.get("tp_world_size", 0),), dtype=torch.int32),
        x.new_empty((0,), dtype=torch.float32),
    ]


def _dispatch(
    v2: bool, x: Tensor, ids: Tensor, group: str, world: int, rank: int, experts: int, **options: Any
) -> tuple[Tensor, ...]:
    name = "npu_moe_distribute_dispatch" + ("_v2" if v2 else "")
    _check(name, options)
    mode, smooth = options.get("quant_mode", 0), options.get("scales")
    only(name, "quant_mode", mode, 0, 2, *([BLOCKS] if v2 else []))
    only(name, "y_dtype", options.get("y_dtype"), *(mx.ELEMENTS if mode == BLOCKS else (None,)))
    if mode == BLOCKS:
        absent(name, scales=smooth)
    outputs = _dispatch_shapes(v2, x, ids, world, experts, **options)
    rows, scales, where, counts, received, *_ = outputs
    rows.fill_(UNDEFINED if rows.is_floating_point() else 0)
    scales.fill_(UNDEFINED if scales.is_floating_point() else mx.NAN_BYTE)
    for unwritten in (where, counts, received):
        unwritten.zero_()
    told = _told(group, world, (x, ids))
    local = experts // world
    for i, (expert, source, token, slot) in enumerate(_received([each for _, each in told], rank, experts)):
        row = told[source][0][token]
        if mode == 2:
            row, scales[i] = dynamic_int8(row, None if smooth is None else smooth[expert])
        elif mode == BLOCKS:
            row, exponents = mx.quantise(row, mx.ELEMENTS[options["y_dtype"]])
            scales[i] = exponents.flatten()
        rows[i] = row
        counts[expert % local] += 1
        received[expert % local * world + source] += 1
        if v2:
            where[i * 128 : i * 128 + 3] = torch.tensor([source, token, slot])
    outputs[4] = received.cumsum(0).int()
    if not v2:
        flat = ids.flatten()
        outputs[2] = (flat.unsqueeze(1) == flat).tril(-1).sum(1).int()  # earlier slots of the same expert
    if options.get("expert_token_nums_type", 1) == 0:
        outputs[3] = counts.cumsum(0)
    return tuple(outputs)


def distribute_dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Send each token's row to the ranks of its experts.

    Out: the rows of this rank's experts, their scales (quant_mode 2: int8 per row), expand_idx, rows per expert,
    running receive counts by expert, then rank, and two more that nothing here reads.
    """
    return _dispatch(False, x, expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, **options)


def distribute_dispatch_v2(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    **options: Any,
) -> tuple[Tensor, ...]:
    """As the first version, with (rank, token, slot) of each row in the third output, 128 words a row.

    quant_mode 4: MX blocks of y_dtype (see mx.py), whose scales are bytes [rows, blocks].
    """
    return _dispatch(True, x, expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, **options)


def _combine(
    name: str,
    rows: Tensor,
    ids: Tensor,
    weights: Tensor,
    group: str,
    world: int,
    rank: int,
    experts: int,
    **options: Any,
) -> Tensor:
    _check(name, options)
    told = _told(group, world, (rows, ids))
    y = torch.zeros(ids.shape[0], rows.shape[1])
    for owner, (own, _) in enumerate(told):
        for i, (_, source, token, slot) in enumerate(_received([each for _, each in told], owner, experts)):
            if source == rank:
                y[token] += weights[token, slot].float() * own[i].float()
    return y.to(rows.dtype)


def distribute_combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    **options: Any,
) -> Tensor:
    """Each token's rows back from the ranks of its experts, times expert_scales, summed."""
    name, group = "npu_moe_distribute_combine", (group_ep, ep_world_size, ep_rank_id, moe_expert_num)
    return _combine(name, expand_x, expert_ids, expert_scales, *group, **options)


def distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    **options: Any,
) -> Tensor:
    """As the first version."""
    name, group = "npu_moe_distribute_combine_v2", (group_ep, ep_world_size, ep_rank_id, moe_expert_num)
    return _combine(name, expand_x, expert_ids, expert_scales, *group, **options)


def distribute_combine_add_rms_norm(
    expand_x: Tensor,
    expert_ids: Tensor,
    expand_idx: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    residual_x: Tensor,
    gamma: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    norm_eps: float = 1e-6,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The second version's combine [T, H], added to a residual [T, 1, H]: as `add_rms_norm`."""
    name = "npu_moe_distribute_combine_add_rms_norm"
    group = (group_ep, ep_world_size, ep_rank_id, moe_expert_num)
    y = _combine(name, expand_x, expert_ids, expert_scales, *group, **options)
    return add_rms_norm(y.unsqueeze(1), residual_x, gamma, norm_eps)


def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """(x / rms * gamma, 1 / rms in float32, x) of x = x1 + x2, over the last dimension."""
    x = x1.float() + x2.float()
    inverse = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x * inverse * gamma.float()).to(x1.dtype), inverse, x.to(x1.dtype)


def _combine_add_shape(
    expand_x: Tensor, expert_ids: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, hidden = expert_ids.shape[0], expand_x.shape[1]
    inverse = expand_x.new_empty((tokens, 1, 1), dtype=torch.float32)
    return expand_x.new_empty((tokens, 1, hidden)), inverse, expand_x.new_empty((tokens, 1, hidden))


def _combine_shape(expand_x: Tensor, expert_ids: Tensor, *args: Any, **options: Any) -> Tensor:
    return expand_x.new_empty(expert_ids.shape[0], expand_x.shape[1])


def _shapes_of(v2: bool) -> Callable[..., tuple[Tensor, ...]]:
    def shapes(
        x: Tensor, ids: Tensor, group: str, world: int, rank: int, experts: int, **options: Any
    ) -> Any:
        return tuple(_dispatch_shapes(v2, x, ids, world, experts, **options))

    return shapes


SHAPES: dict[str, Callable[..., Any]] = {
    "npu_moe_distribute_dispatch": _shapes_of(False),
    "npu_moe_distribute_dispatch_v2": _shapes_of(True),
    "npu_moe_distribute_combine": _combine_shape,
    "npu_moe_distribute_combine_v2": _combine_shape,
    "npu_moe_distribute_combine_add_rms_norm": _combine_add_shape,
}
"""What tells the shapes where the kernel itself would communicate."""
