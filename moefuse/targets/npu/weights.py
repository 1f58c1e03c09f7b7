"""Expert weights as aclnnMegaMoe takes them on A2 and A3: one [K, N] matrix per expert.

In: a layer's weights as they lie. Out: views of them where they lie that way already, as engines for Ascend store them;
else transposed copies, made once and shared by all calls. The originals stay what they are. A copy is a cache: a call
whose weight has another version or address writes the copy anew, at its old address. Changes that show in neither
(`weight.data.copy_`) need `refresh()`: so copies are made only where the engine has promised that (`copy_weights`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class PreparationError(RuntimeError):
    """A copy would have to be made where none can be."""


@dataclass
class _Copy:
    """Of a weight as it was at an address, in a version; None where that isn't known."""

    state: tuple[int, int] | None
    tensor: Tensor


_copies: dict[bool, WeakTensorKeyDictionary] = {
    False: WeakTensorKeyDictionary(),
    True: WeakTensorKeyDictionary(),
}
"""By `transposed`, by the original."""


def prepare(weights: Sequence[Tensor], transposed: bool) -> list[Tensor]:
    """Per expert [K, N], contiguous. What needs a copy gets it now, so that a later capture finds it.

    weights: one stacked 3-D tensor or one 2-D tensor per expert; transposed: they lie as [.., N, K].
    Raises PreparationError where a copy is due while a graph is captured: the copying would be captured with it.
    """
    ready = [_prepared(weight, transposed) for weight in weights]
    return list(ready[0].unbind(0)) if ready[0].dim() == 3 else ready


def refresh() -> int:
    """Write all copies anew; returns how many there are.

    For changes that no version counter shows, and for captured graphs, which run no Python: they read the old values
    until this, or a call outside of the graph, was made.
    """
    count = 0
    for transposed, copies in _copies.items():
        for weight, copy in copies.items():
            copy.state = None
            _prepared(weight, transposed)
            count += 1
    return count


def copied_bytes() -> int:
    """Memory that the copies of all weights take."""
    return sum(copy.tensor.nbytes for copies in _copies.values() for copy in copies.values())


def _prepared(weight: Tensor, transposed: bool) -> Tensor:
    wanted = weight.detach()
    wanted = wanted.mT if transposed else wanted
    if wanted.is_contiguous():
        return wanted
    known: _Copy | None = _copies[transposed].get(weight)
    state = None if weight.is_inference() else (weight.data_ptr(), weight._version)
    if known is not None and state is not None and known.state == state:
        return known.tensor
    if _capturing(weight):
        raise PreparationError(
            f"a weight of {tuple(weight.shape)} must be transposed for aclnnMegaMoe, and a graph is being captured: "
            "store it as [E, K, N], or call moefuse.targets.npu.prepare before"
        )
    if known is None or known.tensor.shape != wanted.shape:
        known = _copies[transposed][weight] = _Copy(state, wanted.contiguous())
    else:
        known.tensor.copy_(wanted)
        known.state = state
    return known.tensor


def _capturing(weight: Tensor) -> bool:
    if weight.device.type != "npu":
        return False
    return bool(torch.get_device_module(weight.device).is_current_stream_capturing())
