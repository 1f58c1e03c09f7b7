"""The ways to run mega_moe, by name.

In: `register(target)`. Out: `get(name)` and `names()`; each registered target's kernel answers
`mega_moe(target=name)`.
"""

from moefuse import policy
from moefuse.ops.kernels import (
    register_communicator,
    register_kernel,
    register_quant_communicator,
    register_quant_kernel,
)
from moefuse.targets.base import Target
from moefuse.targets.cpu import CpuTarget
from moefuse.targets.npu.target import NpuTarget
from moefuse.targets.reference import ReferenceTarget

__all__ = ["Target", "get", "names", "register"]

_TARGETS: dict[str, Target] = {}


def register(target: Target) -> None:
    """Add a target (or replace the one of its name), here and for the operator. TypeError for anything else."""
    if not isinstance(target, Target) or not isinstance(getattr(target, "name", None), str):
        raise TypeError(f"target: expected an instance of a Target class that has a name, got {target!r}")
    _TARGETS[target.name] = target
    register_kernel(target.name, target.run)
    if target.communicates:
        register_communicator(
            lambda _, context, operands, options, training: target.run(context, operands, options),
            target.name,
        )
    if type(target).run_quantised is not Target.run_quantised:
        known = register_quant_communicator if target.communicates else register_quant_kernel
        known(target.name, target.run_quantised)


def get(name: str) -> Target:
    """The target of that name. Raises ValueError listing the known ones."""
    if name not in _TARGETS:
        raise ValueError(f"target: expected one of {names()}, got {name!r}")
    return _TARGETS[name]


def names() -> list[str]:
    """All target names, sorted."""
    return sorted(_TARGETS)


register(ReferenceTarget())
register(CpuTarget())
_NPU = NpuTarget()
register(_NPU)
policy.register(
    _NPU.name,
    judge=lambda spec, max_tokens: get(_NPU.name).supports(spec, max_tokens),
    communicates=True,
    device_type="npu",
)
