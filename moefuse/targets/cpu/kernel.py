"""The C++ kernel behind the cpu target: which calls it takes, and how they get there.

In: a layer's tensors on the CPU. Out: y and the slots each expert received. Everything per call is packed into one
`Layer` (native/layer.h): pointers, strides and sizes, read anew each time, so that swapped `.data` is seen. The call
releases the GIL and uses as many threads of torch's OpenMP pool as `torch.get_num_threads()` says.
"""

import ctypes
import math
import struct
import threading
import warnings
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefuse.ops import activations
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.targets.cpu import build, huge_pages, isa, program

# Each tuple is in the order of an enumeration in native/.
KINDS = (
    "swiglu", "swiglustep", "swigluoai", "situglu", "geglu", "geglu_tanh", "quick_geglu", "reglu", "relu2glu",
    "sigmoidglu", "bilinear", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh", "identity",
    "custom",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GATE_UPS = ("none", "concat", "interleaved", "concat_swapped", "interleaved_swapped", "separate")
POSITIONS = ("output", "mid", "input")
ROW_NORMS = ("plain", "rms", "scaled_rms")

_KIND = {name: i for i, name in enumerate(KINDS)}
_DTYPE = {dtype: i for i, dtype in enumerate(DTYPES)}
_GATE_UP = {name: i for i, name in enumerate(GATE_UPS)}
_POSITION = {name: i for i, name in enumerate(POSITIONS)}
_ROW_NORM = {"none": 0} | {name: i for i, name in enumerate(ROW_NORMS)}
_COMPUTED = frozenset(build.TYPES)
# The options that the kernel follows. Any other must have its default value: one that is added to the operator
# later is not skipped over, the call goes to torch operators.
_READ = frozenset(
    (
        "num_experts", "ep_world_size", "transpose_weight1", "transpose_weight2", "gate_up", "activation",
        "activation_params", "activation_program", "activation_dtype", "weight_position", "product_dtype",
        "output_dtype", "row_norm", "row_norm_eps", "num_identity_experts",
    )
)  # fmt: skip
_OTHERS = {name: default for name, default in Options._field_defaults.items() if name not in _READ}
_LAYER = struct.Struct("=16q3d35qd9q")
_ABSENT = (0, 0, 0, 0, 0)
_MOST_SLOTS = 2**31 - 1

_lock = threading.Lock()
_loaded: dict[tuple[isa.Isa, torch.dtype], ctypes.CDLL | str] = {}


def load(dtype: torch.dtype) -> ctypes.CDLL | str:
    """The library for layers of `dtype` and this process's instruction set, built if need be; or why there is none."""
    chosen = isa.chosen()
    if chosen is None:
        return f"{isa.VARIABLE}={isa.OFF}"
    if dtype not in _COMPUTED:
        return f"{dtype} is computed by torch operators"
    key = chosen, dtype
    found = _loaded.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _loaded:
            _loaded[key] = _open(chosen, dtype)
        return _loaded[key]


def _open(chosen: isa.Isa, dtype: torch.dtype) -> ctypes.CDLL | str:
    try:
        library = build.library(chosen, dtype)
    except build.BuildError as error:
        warnings.warn(f"moefuse: the cpu target runs in torch operators, slower: {error}", stacklevel=2)
        return str(error)
    library.moefuse_run.argtypes = [ctypes.c_char_p]
    library.moefuse_step.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.moefuse_step.restype = ctypes.c_int64
    library.moefuse_workspace_bytes.restype = ctypes.c_int64
    library.moefuse_layer_bytes.restype = ctypes.c_int64
    if library.moefuse_layer_bytes() != _LAYER.size:
        raise AssertionError("native/layer.h and kernel.py disagree about the size of a Layer")
    return library


def supports(operands: Operands, options: Options) -> str:
    """Why the C++ kernel can't take this call, "" when it can."""
    x, topk_ids, topk_weights, weight1, weight2, bias1, bias2, row_scale = operands
    return (
        _options(x.dtype, options)
        or ("" if topk_ids.numel() <= _MOST_SLOTS else f"more than {_MOST_SLOTS} slots")
        or _placement((x, topk_ids, topk_weights, *weight1, *weight2, *bias1, *bias2))
        or _placement(() if row_scale is None else (row_scale,))
        or _same_dtype(x.dtype, (*weight1, *weight2, *bias1, *bias2))
        or _layout("weight1", weight1, options.transpose_weight1)
        or _layout("weight2", weight2, options.transpose_weight2)
        or _same_strides("bias1", bias1)
        or _same_strides("bias2", bias2)
        or _program(x.dtype, options)
    )


def _options(dtype: torch.dtype, options: Options) -> str:
    if dtype not in _COMPUTED:
        return f"{dtype} is computed by torch operators"
    if options.activation_dtype not in (None, dtype, torch.float32):
        return f"the activation runs in {options.activation_dtype}"
    if options.product_dtype not in (None, dtype, torch.float32):
        return f"products are rounded to {options.product_dtype}"
    if options.output_dtype is not None and options.output_dtype not in _COMPUTED:
        return f"the output is {options.output_dtype}"
    for name, default in _OTHERS.items():
        if getattr(options, name) != default:
            return f"{name}={getattr(options, name)!r} is computed by torch operators"
    return ""


def _program(dtype: torch.dtype, options: Options) -> str:
    found = _activation(dtype, options)
    return found if isinstance(found, str) else ""


def _activation(dtype: torch.dtype, options: Options) -> int | str:
    """The address of a custom activation, built if need be, or why there is none; 0 for an activation by name."""
    if options.activation != activations.CUSTOM:
        return 0
    chosen = isa.chosen()
    if chosen is None:
        return f"{isa.VARIABLE}={isa.OFF}"
    return program.compiled(chosen, options.activation_program, dtype, options.activation_dtype or dtype)


def _placement(tensors: Sequence[Tensor]) -> str:
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout != torch.strided:
            return f"a tensor is {tensor.layout} on {tensor.device}"
    return ""


def _same_dtype(dtype: torch.dtype, tensors: Sequence[Tensor]) -> str:
    other = next((tensor.dtype for tensor in tensors if tensor.dtype != dtype), None)
    return "" if other is None else f"an expert tensor is {other} and x is {dtype}"


def _layout(name: str, weights: Sequence[Tensor], transposed: bool) -> str:
    if 1 not in _strides(weights[0], transposed):
        return f"{name} has strides {weights[0].stride()}; one of the last two must be 1"
    return _same_strides(name, weights)


def _same_strides(name: str, tensors: Sequence[Tensor]) -> str:
    same = all(tensor.stride() == tensors[0].stride() for tensor in tensors)
    return "" if same else f"{name}: the tensors have different strides"


def run(library: ctypes.CDLL, operands: Operands, options: Options) -> tuple[Tensor, Tensor]:
    """y [T, O] and expert_token_nums [E] int32; `supports` has said yes. Raises MemoryError."""
    layer = pack(operands, options)
    if library.moefuse_run(layer.description):
        raise out_of_memory()
    return layer.y, layer.nums


def out_of_memory() -> MemoryError:
    """What a call raises that the kernel found no memory for."""
    return MemoryError("mega_moe: the cpu target has no memory left for the rows between the GEMMs")


class Packed(NamedTuple):
    """A call as the kernel reads it. description: a `Layer` (native/layer.h), valid while this value lives."""

    description: bytes
    y: Tensor
    nums: Tensor
    keep: list[object]


def pack(operands: Operands, options: Options) -> Packed:
    """The call's description, and its outputs, y [T, O] and nums [E] int32, not yet written."""
    x, topk_ids, topk_weights, weight1, weight2, bias1, bias2, row_scale = operands
    tokens, hidden = x.shape
    experts, outputs = options.num_experts, weight2[0].shape[-2 if options.transpose_weight2 else -1]
    inner = weight2[0].shape[-1 if options.transpose_weight2 else -2]
    dtype = options.output_dtype or x.dtype
    huge_pages.use_for(weight1)
    huge_pages.use_for(weight2)
    y, nums = x.new_empty((tokens, outputs), dtype=dtype), x.new_empty((experts,), dtype=torch.int32)
    if x.stride(1) != 1 and hidden > 1:
        x = x.contiguous()
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    params = [*options.activation_params, math.inf, 0.0, 0.0][:3]  # a swiglu without limit has none
    keep: list[object] = [x, topk_ids, topk_weights]  # and tables of pointers
    separate = options.gate_up == "separate"
    first = _parts(weight1, 2 if separate else 1, experts, 3)
    first_bias = _parts(bias1, 2 if separate else 1, experts, 2)
    layer = _LAYER.pack(
        x.data_ptr(), x.stride(0), topk_ids.data_ptr(), topk_ids.dtype == torch.int64,
        topk_weights.data_ptr(), _DTYPE[topk_weights.dtype], tokens, topk_ids.shape[1], experts, hidden, inner,
        outputs, _DTYPE[x.dtype], _DTYPE[dtype], _GATE_UP[options.gate_up], _KIND[options.activation], *params,
        options.activation_dtype in (None, x.dtype), _activation(x.dtype, options), _POSITION[options.weight_position],
        options.product_dtype == x.dtype,
        *_weights(first[0], options.transpose_weight1, keep), *_weights(first[-1], options.transpose_weight1, keep),
        *_weights(weight2, options.transpose_weight2, keep),
        *_biases(first_bias[0], keep), *_biases(first_bias[-1], keep), *_biases(bias2, keep),
        _ROW_NORM[options.row_norm], options.row_norm_eps, *_row_scale(row_scale), options.num_identity_experts,
        y.data_ptr(), nums.data_ptr(), torch.get_num_threads(), 0,
    )  # fmt: skip
    return Packed(layer, y, nums, keep)


def workspace_bytes() -> int:
    """Bytes that the kernel keeps for the rows between the GEMMs, all dtypes and concurrent calls together."""
    return sum(int(library.moefuse_workspace_bytes()) for library in _libraries())


def release_workspace() -> None:
    """Give that memory back; the next call takes it anew."""
    for library in _libraries():
        library.moefuse_release_workspace()


def _libraries() -> list[ctypes.CDLL]:
    return [library for library in list(_loaded.values()) if not isinstance(library, str)]


def _strides(weight: Tensor, transposed: bool) -> tuple[int, int]:
    """Strides between output features and between input features; 1 for a dimension of size 1."""
    n, k = (-2, -1) if transposed else (-1, -2)
    return (
        1 if weight.shape[n] == 1 else weight.stride(n),
        1 if weight.shape[k] == 1 else weight.stride(k),
    )


def _parts(tensors: Sequence[Tensor], parts: int, experts: int, stacked_dim: int) -> list[Sequence[Tensor]]:
    """One stacked tensor, or one per expert, for each part."""
    if not tensors:
        return [()]
    size = 1 if tensors[0].dim() == stacked_dim else experts
    return [tensors[part * size : (part + 1) * size] for part in range(parts)]


def _weights(weights: Sequence[Tensor], transposed: bool, keep: list[object]) -> tuple[int, ...]:
    table, base, step = _where(weights, 3, keep)
    return table, base, step, *_strides(weights[0], transposed)


def _biases(biases: Sequence[Tensor], keep: list[object]) -> tuple[int, ...]:
    return (*_where(biases, 2, keep), biases[0].stride(-1), 0) if biases else _ABSENT


def _row_scale(scale: Tensor | None) -> tuple[int, int, int, int]:
    if scale is None:
        return 0, 0, 0, 0
    return scale.data_ptr(), _DTYPE[scale.dtype], scale.stride(0) if scale.dim() == 2 else 0, scale.stride(-1)


def _where(tensors: Sequence[Tensor], stacked_dim: int, keep: list[object]) -> tuple[int, int, int]:
    """A table of pointers, or the first expert's pointer and the bytes to the next."""
    first = tensors[0]
    if first.dim() == stacked_dim:
        return 0, first.data_ptr(), first.stride(0) * first.element_size()
    table = array("q", [tensor.data_ptr() for tensor in tensors])
    keep.append(table)
    return table.buffer_info()[0], 0, 0
