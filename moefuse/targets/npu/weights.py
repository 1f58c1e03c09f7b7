"""Experts' tensors as aclnnMegaMoe takes them.

On A2 and A3 that is a [K, N] matrix per expert and an encoded scale per channel; on A5 [.., N, K], stacked or not, with
scales of MX blocks [.., N, K / 64, 2].

In: a layer's tensors as they lie. Out: views of them where they lie that way already, as engines for Ascend store them;
else copies, made once and shared by all calls. The originals stay what they are. A copy is a cache: a call whose weight
has another version or address writes the copy anew, at its old address. Changes that show in neither
(`weight.data.copy_`) need `refresh()`: so copies are kept only where the engine has promised that (`copy_weights`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from moefuse.targets.npu import formats
from moefuse.targets.npu.formats import PreparationError

__all__ = ["PreparationError", "biases", "copied_bytes", "encoded_scales", "prepare", "refresh"]


@dataclass
class _Copy:
    """Of a tensor as it was at an address, in a version; None where that isn't known. make: makes it anew."""

    state: tuple[int, int] | None
    tensor: Tensor
    make: Callable[[Tensor], Tensor]


_copies: dict[str, WeakTensorKeyDictionary] = {}
"""By what was made of it, by the original."""


def prepare(weights: Sequence[Tensor], transposed: bool, memory_format: str = "ND") -> list[Tensor]:
    """Per expert [K, N], contiguous, in a memory format. What needs a copy gets it now: a later capture finds it.

    weights: one stacked 3-D tensor or one 2-D tensor per expert; transposed: they lie as [.., N, K].
    Raises PreparationError where a copy is due while a graph is captured: the copying would be captured with it.
    """
    return _each([_weight(weight, transposed, memory_format) for weight in weights], 3)


def prepare_blocks(weights: Sequence[Tensor], transposed: bool, memory_format: str = "ND") -> list[Tensor]:
    """Weights in MX blocks as [.., N, K], stacked ones stacked; otherwise as `prepare`."""
    return [_weight(weight, not transposed, memory_format) for weight in weights]


def block_scales(scales: Sequence[Tensor], transposed: bool, keep: bool) -> list[Tensor]:
    """Those of MX blocks as [.., N, K / 64, 2]; from [.., K / 64, N, 2], unless transposed, at each call or kept."""

    def turned(scale: Tensor) -> Tensor:
        return (scale if transposed else scale.transpose(-3, -2)).contiguous()

    found = []
    for scale in scales:
        lies = scale.detach() if transposed else scale.detach().transpose(-3, -2)
        kept = keep and not lies.is_contiguous()
        found.append(
            _kept(scale, f"blocks, transposed={transposed}", turned) if kept else turned(scale.detach())
        )
    return found


def encoded_scales(scales: Sequence[Tensor], keep: bool) -> list[Tensor]:
    """Per expert [N] int64, a float32's bits in the low word; what is no int64 is encoded, at each call unless kept."""
    return _each([_beside(scale, "encoded", _encoded, keep) for scale in scales], 2)


def biases(tensors: Sequence[Tensor], keep: bool) -> list[Tensor]:
    """Per expert [N] float32; others are widened, at each call unless kept."""
    return _each([_beside(tensor, "float32", _widened, keep) for tensor in tensors], 2)


def refresh() -> int:
    """Write all copies anew; returns how many there are.

    For changes that no version counter shows, and for captured graphs, which run no Python: they read the old values
    until this, or a call outside of the graph, was made.
    """
    count = 0
    for form, copies in _copies.items():
        for original, copy in list(copies.items()):
            copy.state = None
            _kept(original, form, copy.make)
            count += 1
    return count


def copied_bytes() -> int:
    """Memory that the copies of all weights take."""
    return sum(copy.tensor.nbytes for copies in _copies.values() for copy in copies.values())


def _each(ready: list[Tensor], stacked: int) -> list[Tensor]:
    return list(ready[0].unbind(0)) if ready and ready[0].dim() == stacked else ready


def _weight(weight: Tensor, transposed: bool, memory_format: str) -> Tensor:
    def make(tensor: Tensor) -> Tensor:
        return formats.in_format((tensor.mT if transposed else tensor).contiguous(), memory_format)

    lies = weight.detach().mT if transposed else weight.detach()
    if lies.is_contiguous() and formats.memory_format(lies) == memory_format:
        return lies
    return _kept(weight, f"{memory_format}, transposed={transposed}", make)


def _encoded(scale: Tensor) -> Tensor:
    bits = scale.to(torch.float32).contiguous().view(torch.int32)
    return bits.to(torch.int64) & 0xFFFFFFFF


def _widened(bias: Tensor) -> Tensor:
    return bias.to(torch.float32).contiguous()


def _beside(tensor: Tensor, form: str, make: Callable[[Tensor], Tensor], keep: bool) -> Tensor:
    own = tensor.detach()
    wanted = torch.int64 if form == "encoded" else torch.float32
    if own.dtype == wanted:
        return own.contiguous()
    return _kept(tensor, form, make) if keep else make(own)


def _kept(original: Tensor, form: str, make: Callable[[Tensor], Tensor]) -> Tensor:
    """What `make` makes of the original: now, or earlier where that still holds."""
    copies = _copies.setdefault(form, WeakTensorKeyDictionary())
    known: _Copy | None = copies.get(original)
    state = None if original.is_inference() else (original.data_ptr(), original._version)
    if known is not None and state is not None and known.state == state:
        return known.tensor
    if _capturing(original):
        raise PreparationError(
            f"a weight of {tuple(original.shape)} must be copied for aclnnMegaMoe ({form}), and a graph is being "
            "captured: store it as the operator reads it, or call moefuse.targets.npu.prepare before"
        )
    made = make(original.detach())
    if known is None or known.tensor.shape != made.shape:
        known = copies[original] = _Copy(state, made, make)
    else:
        known.tensor.copy_(made)
        known.state = state
    return known.tensor


def _capturing(weight: Tensor) -> bool:
    if weight.device.type != "npu":
        return False
    return bool(torch.get_device_module(weight.device).is_current_stream_capturing())
