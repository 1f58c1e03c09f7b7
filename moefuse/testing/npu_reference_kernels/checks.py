"""What a reference kernel can't do is an error, never a guess.

In: an argument and what the kernel handles. Out: nothing, or NotImplementedError that names both.
"""

from typing import Any

from torch import Tensor

UNDEFINED = float("nan")
"""Fills what the operator leaves unwritten: whoever reads it gets NaN, where a device gives whatever was there."""


def only(operator: str, argument: str, value: Any, *handled: Any) -> None:
    """Demand one of the values that the reference kernel handles."""
    if value not in handled:
        raise NotImplementedError(
            f"{operator}: {argument}: the reference kernel handles {list(handled)}, got {value!r}"
        )


def absent(operator: str, **arguments: Tensor | list[Tensor] | None) -> None:
    """Demand that optional tensors are left out."""
    for argument, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{operator}: {argument}: the reference kernel handles None only")
