"""How an NPU's tensor lies in memory: plain (ND), or in tiles (FRACTAL_NZ), as the operator wants integer weights.

In: a tensor. Out: `memory_format`, its format's name; `in_format`, the tensor in another one. Strides don't show it:
torch_npu notes it beside the tensor, and other devices have plain tensors only.
"""

import importlib

from torch import Tensor

NUMBERS = {"ND": 2, "FRACTAL_NZ": 29}
"""Of the C interface, by name."""
_NAMES = {-1: "ND", 0: "ND", 2: "ND", 29: "FRACTAL_NZ"}
"""Of torch_npu's numbers; plain ones all lie alike."""


class PreparationError(RuntimeError):
    """A copy of a weight would have to be made where none can be."""


def memory_format(tensor: Tensor) -> str:
    """ND, FRACTAL_NZ, or `format N` for one that nothing here knows."""
    if tensor.device.type != "npu":
        return "ND"
    number = int(importlib.import_module("torch_npu").get_npu_format(tensor))
    return _NAMES.get(number, f"format {number}")


def in_format(tensor: Tensor, name: str) -> Tensor:
    """The tensor itself where it lies so, else a copy that does.

    Raises PreparationError where none can be made.
    """
    if memory_format(tensor) == name:
        return tensor
    made = tensor
    if tensor.device.type == "npu":
        made = importlib.import_module("torch_npu").npu_format_cast(tensor, NUMBERS[name])
    if memory_format(made) != name:
        raise PreparationError(
            f"a weight of {tuple(tensor.shape)} on {tensor.device} can't be cast to {name}; on an NPU that takes "
            "torch.npu.config.allow_internal_format = True"
        )
    return made
