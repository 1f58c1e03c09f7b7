"""The vendor's communication context: one per expert-parallel group and sizes, read-only, shared by all layers.

In: a process group and the sizes of its layers; or a context that an engine has made itself. Out: `NpuContext`, whose
`tensor` is the first argument of `mega_moe.ep`. Making one is collective. Nothing is fenced at a launch, and nothing is
read back from the device: what a call needs besides the tensor is known here.
"""

import importlib
import importlib.util
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moefuse.comm import ContextError
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.policy.npu_limits import schemes

PACKAGE = "cann_ops_transformer"


class NpuContextError(ContextError):
    """A context that can't be made, or that doesn't fit a call."""


@dataclass(frozen=True)
class Sizes:
    """What a context is made for; equal on all ranks and for all layers that share it.

    num_max_tokens_per_rank: the true maximum of any rank's token count. max_recv_token_num: rows that a rank can
    receive, 0 for the worst case. scheme: how the experts are quantised, and with them the rows that travel.
    """

    ep_world_size: int
    num_experts: int
    top_k: int
    hidden: int
    num_max_tokens_per_rank: int
    max_recv_token_num: int = 0
    scheme: str = "none"

    @property
    def worst_receive(self) -> int:
        """Rows that a rank can receive at most."""
        local = self.num_experts // self.ep_world_size
        return self.ep_world_size * self.num_max_tokens_per_rank * min(self.top_k, local)

    def __post_init__(self) -> None:
        if self.scheme not in schemes():
            raise NpuContextError(f"scheme: expected one of {', '.join(schemes())}, got {self.scheme!r}")
        for name, value in vars(self).items():
            if name == "scheme":
                continue
            least = 0 if name == "max_recv_token_num" else 1
            if type(value) is not int or value < least:
                raise NpuContextError(f"{name}: expected an integer of at least {least}, got {value!r}")


@dataclass(frozen=True)
class NpuContext:
    """See the module text.

    tensor: int32 or int64 on the device, the vendor's own; its address is what names the context.
    ccl_buffer_size, topo_type, rank_num_per_server: as the vendor's helper says them, None where it doesn't.
    hccl: the group's name in HCCL, of a context for dispatch_ffn_combine, which has no tensor of the vendor's.
    uniform_tokens: every rank has as many tokens as the others at every call. Where that isn't promised and the device
        wants it, calls are padded to `num_max_tokens_per_rank`.
    """

    tensor: Tensor
    sizes: Sizes
    ccl_buffer_size: int
    topo_type: int | None = None
    rank_num_per_server: int | None = None
    uniform_tokens: bool = False
    release: Callable[[], None] | None = None
    hccl: str = ""

    def check(self, operands: Operands, options: Options, scheme: str = "none") -> None:
        """Raise NpuContextError naming what in a call isn't what the context was made for."""
        asked = Asked.of(operands.x.shape[1], operands.topk_ids.shape[1], options, scheme)
        if difference := asked.difference(self.sizes):
            raise NpuContextError(f"{difference} for the context at {self.tensor.data_ptr():#x}")
        tokens = operands.x.shape[0]
        if tokens > self.sizes.num_max_tokens_per_rank:
            raise NpuContextError(
                f"num_max_tokens_per_rank: the context holds {self.sizes.num_max_tokens_per_rank} tokens per rank, "
                f"got {tokens}; make it with the true maximum over all ranks and batches"
            )


_open: dict[int, NpuContext] = {}
_of_group: "weakref.WeakKeyDictionary[Any, dict[tuple[Sizes, bool], NpuContext]]" = (
    weakref.WeakKeyDictionary()
)


def adopt(
    tensor: Tensor,
    sizes: Sizes,
    *,
    ccl_buffer_size: int,
    topo_type: int | None = None,
    rank_num_per_server: int | None = None,
    uniform_tokens: bool = False,
) -> NpuContext:
    """Use a context that an engine has made and keeps alive: all layers of its group and these sizes share it.

    Raises NpuContextError for a tensor that is no context, or that was adopted with other sizes.
    """
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 1 or not tensor.numel():
        raise NpuContextError(
            f"tensor: expected the vendor's context, integers [n], got {tensor.dtype} {list(tensor.shape)}"
        )
    return _remember(
        NpuContext(tensor, sizes, ccl_buffer_size, topo_type, rank_num_per_server, uniform_tokens)
    )


def npu_context_for(
    group: Any, sizes: Sizes, *, intermediate: int, uniform_tokens: bool = False
) -> NpuContext:
    """The context of a group; made at the first call, by all ranks together, with the vendor's own helper.

    group: a ProcessGroup, or None for the default group. intermediate: I of the layers that share it.

    Raises:
        NpuContextError: no such group, another world size, or no `get_symm_buffer_for_mega_moe`.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise NpuContextError(
            "group: torch.distributed isn't initialised (torch.distributed.init_process_group)"
        )
    chosen: Any = dist.group.WORLD if group is None else group
    if chosen.size() != sizes.ep_world_size:
        raise NpuContextError(
            f"group: expected {sizes.ep_world_size} ranks (ep_world_size), got {chosen.size()}"
        )
    known = _of_group.setdefault(chosen, {})
    key = (sizes, uniform_tokens)
    if key not in known:
        known[key] = _made(chosen, sizes, intermediate, uniform_tokens)
    return known[key]


def combine_context_for(group: Any, sizes: Sizes) -> NpuContext:
    """As `npu_context_for`, for dispatch_ffn_combine: it finds the group by HCCL's name, and its buffer in HCCL.

    Raises NpuContextError for a group without HCCL.
    """
    known = _of_group.setdefault(group, {})
    key = (replace(sizes, max_recv_token_num=sizes.worst_receive), False)
    if key not in known:
        try:
            device = torch.device("npu")
            name = str(group._get_backend(device).get_hccl_comm_name(dist.get_rank()))
        except (AttributeError, RuntimeError) as error:
            raise NpuContextError(f"group: HCCL has no communicator for it: {error}") from None
        marker = torch.zeros(1, dtype=torch.int64, device=device)
        known[key] = _remember(NpuContext(marker, key[0], 0, hccl=name))
    return known[key]


def _made(group: Any, sizes: Sizes, intermediate: int, uniform_tokens: bool) -> NpuContext:
    helper, scheme = _helper(), schemes()[sizes.scheme]
    quantised: dict[str, Any] = {}
    if scheme.dispatch_quant_mode:
        rows = getattr(torch, scheme.dispatch_dtype)
        quantised = {"dispatch_quant_mode": scheme.dispatch_quant_mode, "dispatch_quant_out_dtype": rows}
    buffer = helper(
        group,
        sizes.num_experts,
        sizes.num_max_tokens_per_rank,
        sizes.top_k,
        sizes.hidden,
        intermediate,
        max_recv_token_num=sizes.max_recv_token_num,
        **quantised,
    )
    return _remember(
        NpuContext(
            buffer.context,
            sizes,
            int(buffer.ccl_buffer_size),
            getattr(buffer, "topo_type", None),
            getattr(buffer, "rank_num_per_server", None),
            uniform_tokens,
            buffer.destroy,
        )
    )


def _helper() -> Callable[..., Any]:
    if importlib.util.find_spec(PACKAGE) is None:
        raise NpuContextError(
            f"{PACKAGE} isn't installed: only its get_symm_buffer_for_mega_moe makes a context; an engine that has one "
            "of its own hands it over with moefuse.targets.npu.adopt"
        )
    helper = getattr(importlib.import_module(f"{PACKAGE}.ops"), "get_symm_buffer_for_mega_moe", None)
    if helper is None:
        raise NpuContextError(
            f"{PACKAGE}.ops has no get_symm_buffer_for_mega_moe: install the package's current version"
        )
    found: Callable[..., Any] = helper
    return found


def _remember(context: NpuContext) -> NpuContext:
    known = _open.get(context.tensor.data_ptr())
    if known is not None and (known.sizes, known.uniform_tokens) != (context.sizes, context.uniform_tokens):
        raise NpuContextError(
            f"sizes: this context is in use for {known.sizes}, got {context.sizes}: one for each, or one size for all"
        )
    # a graph compiler mustn't copy what is found by its address
    torch._dynamo.mark_static_address(context.tensor)
    _open[context.tensor.data_ptr()] = context
    return context


class Asked(NamedTuple):
    """The sizes of a layer that must be those of its context."""

    ep_world_size: int
    num_experts: int
    top_k: int
    hidden: int
    scheme: str

    @staticmethod
    def of(hidden: int, top_k: int, options: Options, scheme: str) -> "Asked":
        """Of a call."""
        return Asked(options.ep_world_size, options.num_experts, top_k, hidden, scheme)

    def difference(self, sizes: Sizes) -> str:
        """The first size that differs, in words; "" where all are equal."""
        for name, value in self._asdict().items():
            if value != getattr(sizes, name):
                return f"{name}: expected {getattr(sizes, name)}, got {value}"
        return ""


def resolve(tensor: Tensor, operands: Operands, options: Options, scheme: str = "none") -> NpuContext:
    """The open context that a call means: the one at the tensor's address, else the only one of the call's sizes.

    A graph compiler may hand over a copy of the context; its values are the same. Raises NpuContextError.
    """
    found = _open.get(tensor.data_ptr())
    return found or only_one(Asked.of(operands.x.shape[1], operands.topk_ids.shape[1], options, scheme))


def only_one(asked: Asked) -> NpuContext:
    """The only open context that fits a layer. Raises NpuContextError where there is none, or more than one."""
    fitting = [one for one in _open.values() if not asked.difference(one.sizes)]
    if len(fitting) != 1:
        count = "no" if not fitting else f"{len(fitting)}"
        raise NpuContextError(
            f"context: {count} open contexts fit this layer ({len(_open)} are open); make one with npu_context_for "
            "and pass its tensor itself"
        )
    return fitting[0]


def close_npu_contexts() -> None:
    """Give all contexts back to the vendor's library, after everything that uses them. Collective."""
    _of_group.clear()
    while _open:
        _, context = _open.popitem()
        if context.release is not None:
            context.release()
