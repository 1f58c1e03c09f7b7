"""Operators of the emulated device: each runs on CPU views of its tensors, when its stream's turn comes.

In: tensors on the emulated NPU, whose memory is the host's. Out: `install(...)`, after which the listed operators run
there. What a captured stream gets isn't run but kept, and runs at each replay on what its memory then holds.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

ATEN = """
_softmax _to_copy abs add.Scalar add.Tensor add_.Tensor addmm arange arange.start arange.start_step
bitwise_and.Scalar bmm clamp copy_
cumsum div.Scalar div.Tensor div_.Tensor exp fill_.Scalar fill_.Tensor gather index.Tensor mm mul.Scalar mul.Tensor
mul_.Tensor neg repeat sigmoid silu sort sub.Tensor sub_.Tensor sum.dim_IntList topk where.self zero_
"""

# The MoE operators of the sequences, by moefuse's reference kernels, which must be installed by then.
NPU = """
npu_grouped_matmul npu_moe_compute_expert_tokens npu_moe_finalize_routing npu_moe_gating_top_k
npu_moe_gating_top_k_softmax npu_moe_init_routing npu_moe_init_routing_v2 npu_moe_token_permute
npu_moe_token_unpermute npu_swiglu
"""

ND, NZ = 2, 29
"""Numbers of memory formats."""

_kernels: list[Callable[[], None]] = []
_libraries: list[torch.library.Library] = []
_failures: list[BaseException] = []
_runtimes: list[ctypes.CDLL] = []


def _run(number: int) -> None:
    try:
        _kernels[number]()
    except BaseException as error:
        _failures.append(error)


_HOOK = ctypes.CFUNCTYPE(None, ctypes.c_int64)(_run)


def install(runtime: Path) -> None:
    """Give the operators of `ATEN` and `NPU` a kernel for NPU tensors. runtime: the emulated libascendcl, loaded."""
    library = ctypes.CDLL(str(runtime))
    library.emulated_set_hook(_HOOK)
    library.emulated_launch.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    _runtimes.append(library)
    for namespace, names in (("aten", ATEN), ("npu", NPU)):
        for name in names.split():
            _override(f"{namespace}::{name}")
    fragment = torch.library.Library("npu", "IMPL")
    _libraries.append(fragment)
    fragment.impl("npu_format_cast", _format_cast, "PrivateUse1", allow_override=True)


def _override(name: str) -> None:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    fragment = torch.library.Library(namespace, "IMPL")
    _libraries.append(fragment)  # an override ends with its library
    fragment.impl(rest, _kernel(operator), "PrivateUse1", allow_override=True)


def _kernel(operator: Any) -> Callable[..., Any]:
    mutable = [
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in operator._schema.arguments
    ]

    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
            # a copy to the host waits
            return operator(*pytree.tree_map_only(Tensor, host_view, args), **kwargs)
        results = args[mutable.index(True)] if any(mutable) else _outputs(operator, args, kwargs)
        cpu_args, cpu_kwargs = pytree.tree_map_only(Tensor, host_view, (args, _on_cpu(kwargs)))
        into = None if any(mutable) else pytree.tree_map_only(Tensor, host_view, results)

        def compute() -> None:
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)):
                made = operator(*cpu_args, **cpu_kwargs)
            if into is not None:
                for out, value in zip(pytree.tree_leaves(into), pytree.tree_leaves(made), strict=True):
                    out.copy_(value)

        launch(compute)
        return results

    return run


def launch(compute: Callable[[], None]) -> None:
    """Run something on the current stream: at once, or at each replay of the graph that is captured."""
    _kernels.append(compute)
    stream = torch.npu.current_stream().npu_stream
    assert _runtimes[0].emulated_launch(stream, len(_kernels) - 1) == 0
    if _failures:
        raise _failures.pop()


def _format_cast(
    tensor: Tensor, acl_format: int, *, customize_dtype: Any = None, input_dtype: Any = None
) -> Tensor:
    """npu_format_cast to FRACTAL_NZ and back to plain memory, of matrices that need no padding."""
    import torch_npu

    have = int(torch_npu.get_npu_format(tensor))
    given = (tuple(tensor.shape), tensor.dtype, tensor.device)
    allowed = torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT") == b"enable"
    becomes = acl_format if allowed else ND
    made = torch_npu.empty_with_format(given[0], dtype=given[1], device=given[2], acl_format=becomes)
    if not {have, becomes} <= {ND, NZ} or have == becomes == NZ:
        raise NotImplementedError(f"emulated npu_format_cast from format {have} to {becomes}")
    change: Callable[[Tensor], Tensor] = plain if have == NZ else tiled if becomes == NZ else Tensor.clone
    into, source = host_view(made), host_view(tensor)

    def compute() -> None:
        into.copy_(change(source))

    launch(compute)
    return made


def tiled(matrices: Tensor) -> Tensor:
    """The values of [.., K, N] as they lie in FRACTAL_NZ: strips of 32 bytes of N, in a tensor of the same shape."""
    wide = 32 // matrices.element_size()
    *rest, inputs, outputs = matrices.shape
    if inputs % 16 or outputs % wide:
        raise NotImplementedError(f"emulated FRACTAL_NZ of {inputs} by {outputs}: it would be padded")
    strips = matrices.reshape(*rest, inputs, outputs // wide, wide).transpose(-3, -2)
    return strips.contiguous().view(matrices.shape)


def plain(tiles: Tensor) -> Tensor:
    """The inverse of `tiled`."""
    wide = 32 // tiles.element_size()
    *rest, inputs, outputs = tiles.shape
    return tiles.reshape(*rest, outputs // wide, inputs, wide).transpose(-3, -2).reshape(tiles.shape)


def _outputs(operator: Any, args: Any, kwargs: Any) -> Any:
    """Uninitialised NPU tensors of the shapes that the operator says."""
    on_meta = {**kwargs, **({"device": "meta"} if "device" in kwargs else {})}
    meta_args, meta_kwargs = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), (args, on_meta))
    shapes = operator(*meta_args, **meta_kwargs)
    return pytree.tree_map_only(
        Tensor, lambda m: torch.empty_strided(m.shape, m.stride(), dtype=m.dtype, device="npu"), shapes
    )


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, **({"device": "cpu"} if "device" in kwargs else {})}


def host_view(tensor: Tensor) -> Tensor:
    """The same memory as a CPU tensor."""
    if tensor.device.type != "npu":
        return tensor
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = extent if tensor.numel() else 0
    if not count:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = (ctypes.c_char * (count * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
