"""The kernels that mega_moe calls, by target name.

In: targets register here when `moefuse.targets` is imported. Out: one dictionary lookup per call. It lives
below the targets so that the operator depends on none of them.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

from torch import Tensor

from moefuse.ops.options import Options


class Kernel(Protocol):
    """Computes one layer. Shapes and dtypes were checked by the operator; ids were not."""

    def __call__(
        self,
        context: Tensor | None,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weight1: Sequence[Tensor],
        weight2: Sequence[Tensor],
        bias1: Sequence[Tensor],
        bias2: Sequence[Tensor],
        options: Options,
        row_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns y [T, O] and expert_token_nums [local experts] int32."""
        ...


_KERNELS: dict[str, Kernel] = {}


def register_kernel(name: str, kernel: Kernel) -> None:
    """Make `kernel` answer mega_moe(target=name). The last registration holds."""
    _KERNELS[name] = kernel


def kernel(name: str) -> Kernel:
    """The kernel of a target. Raises ValueError listing the known names."""
    found = _KERNELS.get(name)
    if found is not None:
        return found
    import_module("moefuse.targets")  # the operator may be called before anything imported the targets
    if name not in _KERNELS:
        raise ValueError(f"mega_moe: target: expected one of {sorted(_KERNELS)}, got {name!r}")
    return _KERNELS[name]
