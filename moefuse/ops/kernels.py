"""The kernels that mega_moe calls, by target name, and what lets them work over several ranks.

In: targets register here when `moefuse.targets` is imported, the communicator when `moefuse.comm` is. Out: one
dictionary lookup per call. It lives below both so that the operator depends on neither.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.ops.quantised import Quantisation


class Kernel(Protocol):
    """Computes one layer. Shapes and dtypes were checked by the operator; ids were not."""

    def __call__(
        self,
        context: Tensor | None,
        operands: Operands,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        """Returns y [T, O] and expert_token_nums [local experts] int32."""
        ...


class _Table(dict[str, Kernel]):
    """Tells who wants to know of changes, however they are made."""

    def __setitem__(self, name: str, kernel: Kernel) -> None:
        super().__setitem__(name, kernel)
        _changed(self)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        _changed(self)

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        _changed(self)

    def clear(self) -> None:
        super().clear()
        _changed(self)


Watcher = Callable[[Mapping[str, Kernel]], None]
_WATCHERS: list[Watcher] = []
_KERNELS: dict[str, Kernel] = _Table()


def on_change(watcher: Watcher) -> None:
    """Call `watcher` with the table after each change: a way around it must know when another kernel answers."""
    _WATCHERS.append(watcher)


def _changed(table: Mapping[str, Kernel]) -> None:
    for watcher in _WATCHERS:
        watcher(table)


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


class QuantKernel(Protocol):
    """Computes one layer of quantised experts. All but the ids was checked by the operator."""

    def __call__(
        self, context: Tensor | None, operands: Operands, options: Options, quantisation: Quantisation
    ) -> tuple[Tensor, Tensor]:
        """Returns y [T, O] and expert_token_nums [local experts] int32."""
        ...


_QUANT_KERNELS: dict[str, QuantKernel] = {}


def register_quant_kernel(name: str, kernel: QuantKernel) -> None:
    """Make `kernel` answer mega_moe.quant(target=name). The last registration holds."""
    _QUANT_KERNELS[name] = kernel


def quant_kernel(name: str) -> QuantKernel:
    """The kernel of a target for quantised experts. Raises ValueError listing the known names."""
    if name not in _QUANT_KERNELS:
        import_module("moefuse.targets")
    if name not in _QUANT_KERNELS:
        raise ValueError(f"mega_moe.quant: target: expected one of {sorted(_QUANT_KERNELS)}, got {name!r}")
    return _QUANT_KERNELS[name]


_QUANT_COMMUNICATORS: dict[str, QuantKernel] = {}


def register_quant_communicator(name: str, kernel: QuantKernel) -> None:
    """Make `kernel`, which exchanges the rows itself, answer mega_moe.quant_ep(target=name)."""
    _QUANT_COMMUNICATORS[name] = kernel


class QuantTransport(Protocol):
    """Computes one layer of quantised experts over all ranks of a context, the experts' rows with `kernel`."""

    def __call__(
        self,
        kernel: QuantKernel,
        context: Tensor | None,
        operands: Operands,
        options: Options,
        quantisation: Quantisation,
    ) -> tuple[Tensor, Tensor]:
        """Returns y [T, O] of this rank's tokens and expert_token_nums [local experts] int32."""
        ...


_QUANT_TRANSPORT: list[QuantTransport] = []


def register_quant_transport(transport: QuantTransport) -> None:
    """Make `transport` answer mega_moe.quant_ep of targets that don't communicate. The last registration holds."""
    _QUANT_TRANSPORT[:] = [transport]


def quant_communicator(name: str) -> QuantKernel:
    """What answers mega_moe.quant_ep(target=name). Raises ValueError listing the known names."""
    if name not in _QUANT_COMMUNICATORS:
        import_module("moefuse.targets")
    if name in _QUANT_COMMUNICATORS:
        return _QUANT_COMMUNICATORS[name]
    if name not in _QUANT_KERNELS:
        known = sorted({*_QUANT_COMMUNICATORS, *_QUANT_KERNELS})
        raise ValueError(f"mega_moe.quant_ep: target: expected one of {known}, got {name!r}")
    if not _QUANT_TRANSPORT:
        import_module("moefuse.comm")
    return partial(_QUANT_TRANSPORT[0], _QUANT_KERNELS[name])


class Communicator(Protocol):
    """Computes one layer over all ranks of a context, the experts' rows with `kernel`."""

    def __call__(
        self,
        kernel: Kernel,
        context: Tensor,
        operands: Operands,
        options: Options,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns y [T, O] of this rank's tokens and expert_token_nums [local experts] int32.

        training: a gradient will be asked for; alike on all ranks.
        """
        ...


_COMMUNICATORS: dict[str, Communicator] = {}


def register_communicator(communicator: Communicator, target: str = "") -> None:
    """Make `communicator` answer mega_moe.ep, of one target or of all that have none. The last registration holds."""
    _COMMUNICATORS[target] = communicator


def communicator(target: str) -> Communicator:
    """What answers mega_moe.ep(target=target)."""
    if target in _COMMUNICATORS:
        return _COMMUNICATORS[target]
    if "" not in _COMMUNICATORS:
        import_module("moefuse.comm")
    return _COMMUNICATORS[""]


def has_gradient(target: str) -> bool:
    """True where the rows of mega_moe.ep(target=target) can travel back: the target leaves that to `moefuse.comm`."""
    return target not in _COMMUNICATORS


class Transposed(Protocol):
    """The gradient of one layer over all ranks of a context."""

    def __call__(
        self, context: Tensor, grad_y: Tensor, operands: Operands, options: Options, needs: Sequence[bool]
    ) -> list[Tensor]:
        """grad_y: [T, O]. Returns the gradients that `needs` asks for, as mega_moe_backward does."""
        ...


_TRANSPOSED: list[Transposed] = []


def register_transposed(transposed: Transposed) -> None:
    """Make `transposed` answer mega_moe_backward.ep. The last registration holds."""
    _TRANSPOSED[:] = [transposed]


def transposed() -> Transposed:
    """What answers mega_moe_backward.ep."""
    if not _TRANSPOSED:
        import_module("moefuse.comm")
    return _TRANSPOSED[0]
