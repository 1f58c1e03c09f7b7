"""The limits of aclnnMegaMoe as values, read from `npu_limits.toml`.

In: that file. Out: `limits(revision, family)`, `schemes()`, `family_of(soc)`, and the table that the docs and `moefuse
doctor --ascend` print.
"""

import functools
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Range:
    """low, low + step, ... up to high (no upper end where high is None)."""

    low: int
    high: int | None = None
    step: int = 1

    def __contains__(self, value: int) -> bool:
        return self.low <= value and (self.high is None or value <= self.high) and value % self.step == 0

    def __str__(self) -> str:
        ends = f"{self.low}..{self.high}" if self.high is not None else f"{self.low} or more"
        return f"{ends} by {self.step}" if self.step > 1 else ends


@dataclass(frozen=True)
class Values:
    """Exactly these."""

    values: tuple[int, ...]

    def __contains__(self, value: int) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return ", ".join(map(str, self.values))


Limit = Range | Values


@dataclass(frozen=True)
class Limits:
    """One row: what one revision accepts on some device families.

    intermediate: I, the GEMM's N is 2 I. clamps: the activation's numbers can be passed. transposed_weights: an
    expert's matrix is [N, K], otherwise [K, N].
    """

    revision: str
    families: tuple[str, ...]
    source: str
    hidden: Limit
    intermediate: Limit
    top_k: Limit
    num_experts: Limit
    experts_per_rank: Limit
    ep_world_size: Limit
    tokens_per_rank: Limit
    activations: tuple[str, ...]
    clamps: bool
    schemes: tuple[str, ...]
    transposed_weights: bool

    @property
    def operator(self) -> str:
        """Whose limits these are."""
        return operator_of(self.revision)

    @property
    def title(self) -> str:
        """The operator with its revision, where there are several."""
        return self.operator if self.operator == self.revision else f"{self.operator} {self.revision}"


@dataclass(frozen=True)
class Scheme:
    """How the experts are quantised, and the operator's arguments that say so.

    dispatch_dtype: in torch, of the rows that travel; dispatch_quant_out_dtype is its number.
    """

    weight_dtypes: tuple[str, ...]
    values_per_element: int
    weight_format: str
    biases: bool
    dispatch_quant_mode: int
    dispatch_dtype: str
    dispatch_quant_out_dtype: int


COMBINE = "dispatch_ffn_combine"
"""vllm-ascend's operator, which has one known revision, called as it is."""


def operator_of(revision: str) -> str:
    """The operator that a revision is of."""
    return COMBINE if revision == COMBINE else "aclnnMegaMoe"


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files("moefuse.policy").joinpath("npu_limits.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _value(raw: Any) -> Any:
    if isinstance(raw, dict):
        return Range(**raw)
    if isinstance(raw, list):
        return Values(tuple(raw)) if all(isinstance(item, int) for item in raw) else tuple(raw)
    return raw


@functools.cache
def rows() -> tuple[Limits, ...]:
    """All rows, in the file's order."""
    return tuple(Limits(**{key: _value(raw) for key, raw in row.items()}) for row in _data()["row"])


@functools.cache
def schemes() -> dict[str, Scheme]:
    """The quantisation schemes by name."""
    return {
        name: Scheme(**{key: _value(raw) for key, raw in scheme.items()})
        for name, scheme in _data()["scheme"].items()
    }


def family_of(soc: str) -> str:
    """The device family of a SoC name (`Ascend910_9382` -> A3), "" for an unknown one."""
    known: dict[str, str] = _data()["families"]
    fitting = [family for family, prefix in known.items() if soc.startswith(prefix)]
    return max(fitting, key=lambda family: len(known[family]), default="")


def limits(revision: str, family: str) -> Limits | None:
    """The row of a revision and family; None where the limits aren't known."""
    return next((row for row in rows() if row.revision == revision and family in row.families), None)


_SHOWN: dict[type, Callable[[Any], str]] = {tuple: ", ".join, bool: lambda cell: "yes" if cell else "no"}


def table() -> str:
    """All rows as a Markdown table, one column each."""
    columns = rows()
    lines = [
        "| | " + " | ".join(f"{row.revision}, {' and '.join(row.families)}" for row in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for field in fields(Limits):
        if field.name in ("revision", "families"):
            continue
        cells = (getattr(row, field.name) for row in columns)
        shown = (_SHOWN[type(cell)](cell) if type(cell) in _SHOWN else str(cell) for cell in cells)
        lines.append(f"| {field.name.replace('_', ' ')} | " + " | ".join(shown) + " |")
    return "\n".join(lines)
