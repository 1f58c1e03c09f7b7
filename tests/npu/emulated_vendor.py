"""The vendor's package between processes, emulated: its contexts, and npu_mega_moe of all ranks over gloo.

In: a rank with an initialised process group. Out: `installed()`, in which `cann_ops_transformer` can be imported and
the npu target calls its operator. It computes in float64 on the host, on the stream's turn, and refuses what the
operator refuses of A3: other numbers of rows on other ranks, ids out of range, weights that don't lie as it reads them.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefuse import targets
from moefuse.targets.npu import Identified, close_npu_contexts, formats
from moefuse.targets.npu.combine import loaded
from moefuse.targets.npu.machine import Machine
from moefuse.targets.npu.target import NpuTarget
from tests.npu.emulator.kernels import host_view, launch, plain

SCHEMA = (
    "npu_mega_moe(Tensor context, Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] weight1, Tensor[] weight2,"
    " int moe_expert_num, int ep_world_size, int ccl_buffer_size, *, Tensor[]? weight_scales1=None,"
    " Tensor[]? weight_scales2=None, Tensor[]? bias1=None, Tensor[]? bias2=None, Tensor? x_active_mask=None,"
    " int max_recv_token_num=0, int dispatch_quant_mode=0, str comm_alg='', int num_max_tokens_per_rank=0,"
    " str activation='swiglu', float? activation_clamp=None, int? dispatch_quant_out_dtype=None) -> (Tensor, Tensor)"
)
PACKAGE = "cann_ops_transformer"
_groups: list[Any] = []
_library = torch.library.Library(PACKAGE, "FRAGMENT")


@dataclass
class SymmBuffer:
    """context: int32 [4], of which the first says which group it is of."""

    context: Tensor
    ccl_buffer_size: int = 300 << 20

    def destroy(self) -> None:
        """Nothing is held."""


def get_symm_buffer_for_mega_moe(group: Any, *sizes: int, **options: Any) -> SymmBuffer:
    """Collective over all ranks."""
    _groups.append(dist.new_group(dist.get_process_group_ranks(group), backend="gloo"))
    return SymmBuffer(torch.tensor([len(_groups) - 1, 0, 0, 0], dtype=torch.int32).npu())


@contextmanager
def installed() -> Iterator[None]:
    package, ops = ModuleType(PACKAGE), ModuleType(f"{PACKAGE}.ops")
    package.__spec__, ops.__spec__ = ModuleSpec(PACKAGE, None), ModuleSpec(ops.__name__, None)
    ops.get_symm_buffer_for_mega_moe = get_symm_buffer_for_mega_moe  # type: ignore[attr-defined]
    sys.modules |= {PACKAGE: package, ops.__name__: ops}
    _library.define(SCHEMA)
    _library.impl("npu_mega_moe", _call, "PrivateUse1")
    operator = torch.ops.cann_ops_transformer.npu_mega_moe.default
    library: Any = None
    before = targets.get("npu")
    targets.register(NpuTarget(lambda: Machine("Ascend910_9382", library, Identified("R6", ()), operator)))
    try:
        yield
    finally:
        targets.register(before)
        close_npu_contexts()


COMBINE = (
    "dispatch_ffn_combine(Tensor x, Tensor[] weight1, Tensor[] weight2, Tensor expert_idx, Tensor[] scale1,"
    " Tensor[] scale2, Tensor[] bias1, Tensor[] bias2, Tensor probs, str group, int max_output_size, Tensor! out,"
    " Tensor! expert_token_nums, Tensor? x_active_mask=None, float swiglu_limit=1000000.0)"
    " -> (Tensor out, Tensor expert_token_nums)"
)
_combine = torch.library.Library("_C_ascend", "FRAGMENT")
_by_name: dict[str, Any] = {}


@contextmanager
def combine_installed() -> Iterator[None]:
    """A machine with vllm-ascend's operator and without aclnnMegaMoe."""
    _combine.define(COMBINE)
    _combine.impl("dispatch_ffn_combine", _combined, "PrivateUse1")
    operator = loaded()
    world: Any = dist.group.WORLD
    name = world._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank())
    _by_name[name] = dist.new_group(backend="gloo")
    before = targets.get("npu")
    targets.register(NpuTarget(lambda: Machine("Ascend910_9382", None, None, combine=operator)))
    try:
        yield
    finally:
        targets.register(before)
        close_npu_contexts()


def _combined(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    w1, w2, ids, s1, s2, b1, b2, probs, group, room, out, nums, *rest = args
    x_active_mask = rest[0] if rest else None
    if any(bias.numel() for bias in (*b1, *b2)):
        raise RuntimeError("dispatch_ffn_combine: a bias beside int8")
    mask = None if x_active_mask is None else host_view(x_active_mask)
    own = [host_view(tensor) for tensor in (x, ids, probs)]
    experts = _Experts.of(w1, w2, {"dispatch_quant_mode": 2, "weight_scales1": s1, "weight_scales2": s2})
    into, total = (host_view(out), host_view(nums)), len(host_view(nums)) * dist.get_world_size()

    def compute() -> None:
        _layer(_by_name[group], (*own, mask), experts, total, into)
        if int(into[1].sum()) > room:
            raise RuntimeError(f"dispatch_ffn_combine: {int(into[1].sum())} rows, and room for {room}")

    launch(compute)
    return out, nums


def _call(context: Tensor, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x)
    nums = torch.empty(len(args[2]), dtype=torch.int32, device=x.device)
    own = [host_view(tensor) for tensor in (context, x, *args[:2])]
    mask = None if options.get("x_active_mask") is None else host_view(options["x_active_mask"])
    experts = _Experts.of(args[2], args[3], options)
    into = host_view(y), host_view(nums)

    total = args[4]  # `args` hold tensors of a captured graph's pool, which mustn't be kept

    def compute() -> None:
        _layer(_groups[int(own[0][0])], (*own[1:], mask), experts, total, into)

    launch(compute)
    return y, nums


@dataclass
class _Experts:
    """This rank's, as they lie; tiles: in FRACTAL_NZ."""

    first: list[Tensor]
    second: list[Tensor]
    scales: tuple[list[Tensor], list[Tensor]] | None

    @staticmethod
    def of(first: list[Tensor], second: list[Tensor], options: dict[str, Any]) -> "_Experts":
        quantised = options.get("dispatch_quant_mode", 0) == 2
        wanted, dtype = ("FRACTAL_NZ", torch.int8) if quantised else ("ND", torch.bfloat16)
        if any(formats.memory_format(w) != wanted or w.dtype != dtype for w in (*first, *second)):
            raise RuntimeError(f"npu_mega_moe: weights must be {dtype} in {wanted}")
        scales = None
        if quantised:
            lists = options["weight_scales1"], options["weight_scales2"]
            scales = tuple([host_view(s) for s in each] for each in lists)
        return _Experts([host_view(w) for w in first], [host_view(w) for w in second], scales)

    def __call__(self, rows: Tensor, e: int) -> Tensor:
        gate, up = self._product(rows, self.first[e], 0, e).chunk(2, -1)
        return self._product(torch.nn.functional.silu(gate) * up, self.second[e], 1, e)

    def _product(self, rows: Tensor, weight: Tensor, which: int, e: int) -> Tensor:
        if self.scales is None:
            return rows @ weight.double()
        own = rows.abs().amax(-1, keepdim=True) / 127
        scale = self.scales[which][e].to(torch.int32).view(torch.float32).double()
        return ((rows / own).round() @ plain(weight).double()) * scale * own


def _layer(
    group: Any, mine: tuple[Any, ...], experts: _Experts, total: int, into: tuple[Tensor, Tensor]
) -> None:
    world, rank, local = group.size(), group.rank(), len(experts.first)
    every: list[Any] = [None] * world
    dist.all_gather_object(every, mine, group=group)
    if len({len(x) for x, *_ in every}) != 1:
        raise RuntimeError(f"npu_mega_moe: ranks bring {[len(x) for x, *_ in every]} rows")
    x, ids, weights = (torch.cat([each[i] for each in every]) for i in range(3))
    active = torch.cat([m.bool() if m is not None else torch.ones(len(x)).bool() for x, *_, m in every])
    if int(ids.min()) < 0 or int(ids.max()) >= total:
        raise RuntimeError("npu_mega_moe: an id is out of range")
    y = torch.zeros(x.shape, dtype=torch.float64)
    for e in range(local):
        token, slot = torch.where((ids == rank * local + e) & active[:, None])
        into[1][e] = len(token)
        y.index_add_(0, token, experts(x[token].double(), e) * weights[token, slot].double()[:, None])
    dist.all_reduce(y, group=group)
    rows = len(into[0])
    into[0].copy_(y[rank * rows :][:rows])
