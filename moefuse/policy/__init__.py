"""May this layer be fused, and on what? One function decides for selection, sizing and preparation.

In: a `MoeSpec` and the target that the user asked for. Out: a `Decision`: the target, and a verdict with
every check, its reason and the facts it read. Equal on every rank, since a spec holds nothing local.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moefuse.ops.spec import MoeSpec
from moefuse.policy import cpu, reference
from moefuse.policy.check import Check, CheckResult, Verdict, judge

__all__ = ["Check", "CheckResult", "Decision", "Verdict", "checks_of", "decide", "judge", "register"]

AUTO = "auto"

_CHECKS: dict[str, tuple[Check, ...]] = {"cpu": cpu.CHECKS, "reference": reference.CHECKS}
_DEVICE_TARGETS: dict[str, str] = {"cpu": "cpu"}


@dataclass(frozen=True)
class Decision:
    """The target ("" where the device has none) and the verdict on it."""

    target: str
    verdict: Verdict

    @property
    def ok(self) -> bool:
        """True when the layer may be fused."""
        return self.verdict.ok


def register(target: str, checks: Sequence[Check], *, device_type: str | None = None) -> None:
    """Add a target's checks; with `device_type`, target="auto" chooses it there."""
    _CHECKS[target] = tuple(checks)
    if device_type is not None:
        _DEVICE_TARGETS[device_type] = target


def checks_of(target: str) -> tuple[Check, ...]:
    """A target's checks, in order. Raises ValueError for an unknown target."""
    if target not in _CHECKS:
        raise ValueError(f"target: expected one of {[AUTO, *sorted(_CHECKS)]}, got {target!r}")
    return _CHECKS[target]


def decide(spec: MoeSpec, *, target: str = AUTO) -> Decision:
    """Choose the target of a layer and judge it. Raises ValueError for an unknown target."""
    if target != AUTO:
        return Decision(target, judge(spec, checks_of(target)))
    device_type = spec.device.partition(":")[0]
    chosen = _DEVICE_TARGETS.get(device_type)
    if chosen is None:
        reason = f'no target runs on {device_type!r} yet; target="reference" runs everywhere'
        return Decision("", Verdict.refuse("target", reason, device=spec.device))
    return Decision(chosen, judge(spec, checks_of(chosen)))
