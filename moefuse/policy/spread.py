"""May a layer whose experts are spread over several ranks become one node that communicates?

In: a `MoeSpec` and the options that say where and how much. Out: `CHECKS`, after those of the target. All that is
judged is equal on every rank: sizes and options, never a rank's own tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

from moefuse.comm import Capacity, ContextError
from moefuse.ops.spec import MoeSpec
from moefuse.policy.check import Check, extended

TARGETS = ("cpu", "npu", "reference")
"""Targets that can: rows travel as the context says, the npu target exchanges them itself."""
QUANTISED = ("npu", "reference")
"""Those that can with quantised experts."""


class Terms(NamedTuple):
    """Where the rows of a layer travel, and what the user said of it.

    group: the group over which they do. ep_group: the only one allowed, "" for any. ep_max_tokens: the most tokens of
    one rank.
    """

    group: str
    ep_group: str = ""
    ep_max_tokens: int = 1


@dataclass(frozen=True)
class SpreadLayer(MoeSpec):
    """A layer whose experts are spread over a group, on a target; the rest as in `Terms`."""

    target: str = ""
    group: str = ""
    ep_group: str = ""
    ep_max_tokens: int = 1

    @staticmethod
    def of(spec: MoeSpec, target: str, terms: Terms) -> "SpreadLayer":
        """The layer as these checks read it."""
        return extended(SpreadLayer, spec, target=target, **terms._asdict())

    def capacity(self) -> Capacity:
        """What the layer's context must hold. Raises ContextError for what none can hold."""
        return Capacity(
            ep_world_size=self.ep_world_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden=self.hidden,
            out_features=self.out_features,
            max_tokens_per_rank=self.ep_max_tokens,
            dtype=self.x_dtype,
            rows_dtype=None if self.rows_dtype == self.x_dtype else self.rows_dtype,
        )


def _capacity(layer: SpreadLayer) -> str:
    """No context can hold the layer: the text names the number, and what was expected."""
    try:
        layer.capacity()
    except ContextError as error:
        return str(error)
    return ""


def _group(layer: SpreadLayer) -> str:
    """Its rows travel over another group than the option says."""
    if layer.ep_group in ("", layer.group):
        return ""
    return f"its rows travel over group {layer.group!r}, the option ep_group is {layer.ep_group!r}"


CHECKS = (
    Check(
        "ep_target",
        ("target", "ep_world_size"),
        lambda s: s.target in TARGETS,
        "the experts are spread over {ep_world_size} ranks and the target {target!r} doesn't communicate",
        subject=SpreadLayer,
    ),
    Check(
        "ep_quant",
        ("target", "quant"),
        lambda s: s.quant == "none" or s.target in QUANTISED,
        "the experts are quantised as {quant} and spread over ranks; of the targets only npu and reference "
        "have a kernel for that",
        subject=SpreadLayer,
    ),
    Check("ep_group", ("group", "ep_group"), _group, subject=SpreadLayer),
    Check(
        "ep_capacity",
        (
            *("ep_world_size", "num_experts", "top_k", "hidden", "out_features", "ep_max_tokens"),
            *("x_dtype", "rows_dtype"),
        ),
        _capacity,
        subject=SpreadLayer,
    ),
)
