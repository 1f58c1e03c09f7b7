"""The two ways in which the vendor's operator is called: its torch operator, or its C interface.

In: `Arguments`. Out: the operator enqueued on the current stream, its outputs written. Both take the same names.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from moefuse.targets.npu import formats
from moefuse.targets.npu.abi import OUTPUTS
from moefuse.targets.npu.arguments import Arguments
from moefuse.targets.npu.call import FORMAT_ND, Buffer, MegaMoe
from moefuse.targets.npu.machine import Machine
from moefuse.targets.npu.plan import PlanError

_DTYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.int64: 9,
    torch.bfloat16: 27,
    torch.float8_e5m2: 35,
    torch.float8_e4m3fn: 36,
    torch.float8_e8m0fnu: 37,
}
"""Numbers of the C interface."""
_UINT64 = 10
_WEIGHTS, _SCALES = ("weight1", "weight2"), ("weight_scales1", "weight_scales2")
_TORCH_NUMBERS = 256
"""In torch_npu's torch operators, dtypes of the C interface are numbered from here on."""


class Call(Protocol):
    """Runs the operator once."""

    def __call__(self, given: Arguments) -> tuple[Tensor, Tensor]:
        """Returns y [T, H] and expert_token_nums."""
        ...


class CCall:
    """The C interface. stream: gives the current stream's handle for a device."""

    def __init__(self, machine: Machine, stream: Callable[[torch.device], int]) -> None:
        assert machine.library is not None
        assert machine.runtime is not None
        self._stream = stream
        self._workspaces = threading.local()
        self._run = MegaMoe(machine.library, machine.revision, machine.runtime, self._allocate)

    def __call__(self, given: Arguments) -> tuple[Tensor, Tensor]:
        """Raises PlanError for what this revision can't be told, CallError where the library refuses."""
        device = given.tensors["x"].device
        values: dict[str, Any] = {name: buffer(tensor) for name, tensor in given.tensors.items()}
        values |= {name: [_listed(name, tensor) for tensor in each] for name, each in given.lists.items()}
        self._workspaces.device = device
        try:
            self._run(values | given.numbers, self._stream(device))
        finally:
            self._workspaces.tensor = (
                None  # enqueued: whoever gets this memory next comes later on the stream
            )
        return given.result

    def _allocate(self, size: int) -> int:
        tensor = torch.empty(size, dtype=torch.uint8, device=self._workspaces.device)
        self._workspaces.tensor = tensor
        return tensor.data_ptr()


def buffer(tensor: Tensor) -> Buffer:
    """A tensor as the C interface describes it. Raises PlanError for a dtype that it has no number for."""
    if tensor.dtype not in _DTYPES:
        raise PlanError(f"expected a dtype of {', '.join(map(str, _DTYPES))}, got {tensor.dtype}")
    return Buffer(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), _DTYPES[tensor.dtype])


def _listed(name: str, tensor: Tensor) -> Buffer:
    """One expert's, or all of them. Scales are unsigned; a weight in tiles tells how many elements."""
    if name in _SCALES and tensor.dtype == torch.uint8:
        return buffer(tensor.view(torch.float8_e8m0fnu))
    plain = buffer(tensor)
    if name in _SCALES and tensor.dtype == torch.int64:
        return replace(plain, dtype=_UINT64)
    number = formats.NUMBERS.get(formats.memory_format(tensor), 0) if name in _WEIGHTS else FORMAT_ND
    return plain if number == FORMAT_ND else replace(plain, format=number, storage=(tensor.numel(),))


class OfficialCall:
    """The torch operator of the vendor's package, which allocates its outputs itself."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._names = {argument.name for argument in operator._schema.arguments}

    def __call__(self, given: Arguments) -> tuple[Tensor, Tensor]:
        """Raises PlanError for what this version's schema can't be told."""
        inputs: dict[str, Any] = {name: t for name, t in given.tensors.items() if name not in OUTPUTS}
        inputs |= {name: tensors for name, tensors in given.lists.items() if self._takes(name, tensors)}
        y, nums = self._operator(**inputs, **self._numbers(given.numbers))
        return y[: given.tokens], nums

    def _numbers(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        values = dict(numbers)
        values |= named_activation(values["activation"], values.pop("activation_params"))
        if "dispatch_quant_out_dtype" in values:
            values["dispatch_quant_out_dtype"] += _TORCH_NUMBERS
        return {name: value for name, value in values.items() if self._takes(name, value)}

    def _takes(self, name: str, value: Any) -> bool:
        if name in self._names:
            return True
        if name == "activation" and value == "swiglu":  # the only one, before there was the argument
            return False
        raise PlanError(f"{name}: the installed npu_mega_moe has no such argument, got {value!r}")


def named_activation(activation: str, params: list[float]) -> dict[str, Any]:
    """An activation's numbers as the torch operator names them. Raises PlanError for an activation that it hasn't."""
    if activation in ("swiglu", "swiglustep"):
        return {"activation_clamp": float(params[0])} if params else {}
    if activation == "swigluoai":
        limit, alpha, beta = params
        return {"activation_clamp": limit, "activation_params": {"alpha": alpha, "beta": beta}}
    if activation == "situglu":
        return {"activation_params": dict(zip(("beta", "linear_beta"), params, strict=True))}
    raise PlanError(f"activation: npu_mega_moe has no {activation!r}")
