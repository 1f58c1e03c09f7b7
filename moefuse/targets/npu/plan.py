"""From named values to the argument list of one revision.

In: values by the names of `abi.py`. Out: C arguments in the revision's order, optional ones null. A value that the
revision has no argument for is an error, never dropped.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char_p, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moefuse.targets.npu.abi import DEFAULTS, REQUIRED, REVISIONS, Kind, Signature, Slot

FLT_MAX = 3.4028234663852886e38
"""The operator's own "no limit"."""


class PlanError(ValueError):
    """Values that don't make a call of this revision."""


@dataclass(frozen=True)
class Makers:
    """How handles are made: of one tensor, of a list of tensors, of a list of numbers. Each returns an address."""

    tensor: Callable[[Any], int]
    tensors: Callable[[Sequence[Any]], int]
    floats: Callable[[Sequence[float]], int]


@dataclass(frozen=True)
class Plan:
    """How one revision is called. Raises PlanError for an unknown one."""

    revision: str

    def __post_init__(self) -> None:
        if self.revision not in REVISIONS:
            raise PlanError(f"revision: expected one of {list(REVISIONS)}, got {self.revision!r}")

    @cached_property
    def signature(self) -> Signature:
        """The revision's arguments."""
        return REVISIONS[self.revision]

    @property
    def argtypes(self) -> list[Any]:
        """For ctypes: every argument, the workspace size and the executor included."""
        return [_CTYPES[slot.kind] for slot in self.signature] + [c_void_p, c_void_p]

    def arguments(self, values: Mapping[str, Any], make: Makers) -> list[Any]:
        """The C arguments.

        Args:
            values: by name. `activation_params` holds the activation's numbers (for all of `REVISIONS`; those with
                a single clamp take at most one, of swiglu).
            make: makes handles; called for given tensors only.

        Raises:
            PlanError: a missing, unknown or ill-typed value, or one that this revision has no argument for.
        """
        given = self.own(values)
        return [self._one(slot, given, make) for slot in self.signature]

    def own(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values by this revision's own names. Raises PlanError for one that it has no argument for."""
        own = {slot.name for slot in self.signature}
        given = self._activation(dict(values), own)
        for name, value in given.items():
            if name not in own and not _says_nothing(name, value):
                raise PlanError(f"{name}: aclnnMegaMoe {self.revision} has no such argument, got {value!r}")
        return {name: value for name, value in given.items() if name in own}

    def _activation(self, values: dict[str, Any], own: set[str]) -> dict[str, Any]:
        """Numbers as the revision wants them: a list that is never null, or one clamp."""
        params = list(values.pop("activation_params", None) or ())
        if any(not isinstance(number, int | float) or isinstance(number, bool) for number in params):
            raise PlanError(f"activation_params: expected numbers, got {params!r}")
        if "activation_params" in own:
            values["activation_params"] = [float(number) for number in params] or [FLT_MAX]
        elif "activation_clamp" in own and len(params) <= 1:
            values["activation_clamp"] = float(params[0]) if params else FLT_MAX
        elif params:
            raise PlanError(
                f"activation_params: aclnnMegaMoe {self.revision} can't pass them, got {params!r}"
            )
        return values

    def _one(self, slot: Slot, values: Mapping[str, Any], make: Makers) -> Any:
        value = values.get(slot.name, DEFAULTS.get(slot.name))
        if value is None:
            if slot.name in REQUIRED or slot.kind in (Kind.INT, Kind.TEXT):
                raise PlanError(f"{slot.name}: expected a value for aclnnMegaMoe {self.revision}, got None")
            return None
        if slot.kind is Kind.TENSOR:
            return make.tensor(value)
        if slot.kind is Kind.TENSORS:
            if not isinstance(value, list | tuple) or not value:
                raise PlanError(f"{slot.name}: expected a list of at least one tensor, got {value!r}")
            return make.tensors(value)
        if slot.kind is Kind.FLOATS:
            return make.floats(value)
        return _scalar(slot, value)


def _scalar(slot: Slot, value: Any) -> Any:
    wanted = _PYTHON[slot.kind]
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise PlanError(f"{slot.name}: expected {wanted.__name__}, got {value!r}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise PlanError(f"{slot.name}: expected a 64-bit integer, got {value!r}")
    if not isinstance(value, str):
        return value
    if "\0" in value:
        raise PlanError(f"{slot.name}: expected a text without zero bytes, got {value!r}")
    return value.encode()


def _says_nothing(name: str, value: Any) -> bool:
    """A value that asks for what a revision without the argument does anyway."""
    if name == "activation":
        return bool(value == "swiglu")
    known = {name for signature in REVISIONS.values() for name in (slot.name for slot in signature)}
    return name in known and (value is None or value == DEFAULTS.get(name, ...))


_PYTHON: dict[Kind, type] = {Kind.INT: int, Kind.TEXT: str, Kind.FLOAT: float}
_CTYPES = {
    Kind.TENSOR: c_void_p,
    Kind.TENSORS: c_void_p,
    Kind.FLOATS: c_void_p,
    Kind.INT: c_int64,
    Kind.TEXT: c_char_p,
    Kind.FLOAT: c_float,
}
