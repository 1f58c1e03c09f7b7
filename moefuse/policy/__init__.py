"""May this layer be fused, and on what? One function decides for selection, sizing and preparation.

In: a `MoeSpec` and the target that the user asked for. Out: a `Decision`: the target, and a verdict with
every check, its reason and the facts it read. Equal on every rank, since a spec holds nothing local.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moefuse.ops.spec import MoeSpec
from moefuse.policy import cpu, reference, shared, spread
from moefuse.policy.check import Check, CheckResult, Verdict, judge
from moefuse.policy.spread import Terms

__all__ = [
    "Check",
    "CheckResult",
    "Decision",
    "Verdict",
    "checks_of",
    "decide",
    "decide_shared",
    "decide_spread",
    "judge",
    "register",
]

AUTO = "auto"

_CHECKS: dict[str, tuple[Check, ...]] = {"cpu": cpu.CHECKS, "reference": reference.CHECKS}
Judge = Callable[[MoeSpec, int], Verdict]
"""(layer, the most tokens of one rank) -> verdict."""

_JUDGES: dict[str, Judge] = {}
"""Of targets whose checks depend on the machine."""
_COMMUNICATING: set[str] = set()
"""Targets that exchange rows themselves: their checks judge a layer as it is spread."""
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


def register(
    target: str,
    checks: Sequence[Check] = (),
    *,
    judge: Judge | None = None,
    communicates: bool = False,
    device_type: str | None = None,
) -> None:
    """Add a target's checks; with `device_type`, target="auto" chooses it there.

    judge: instead of `checks`, for a target whose checks depend on what the machine has. communicates: the target
    exchanges the rows of experts that are spread over ranks itself.
    """
    _CHECKS[target] = tuple(checks)
    _JUDGES.pop(target, None)
    _COMMUNICATING.discard(target)
    if judge is not None:
        _JUDGES[target] = judge
    if communicates:
        _COMMUNICATING.add(target)
    if device_type is not None:
        _DEVICE_TARGETS[device_type] = target


def checks_of(target: str) -> tuple[Check, ...]:
    """A target's checks, in order. Raises ValueError for an unknown target."""
    if target not in _CHECKS:
        raise ValueError(
            f"target: expected one of {[AUTO, *sorted(_CHECKS)]}, got {target!r}; "
            "moefuse.policy.register gives a target its checks"
        )
    return _CHECKS[target]


def decide_spread(spec: MoeSpec, terms: Terms, *, target: str = AUTO) -> Decision:
    """As `decide`, for a layer whose experts are spread over ranks.

    The target's checks judge the part of one rank, or the whole layer where the target communicates itself.
    """
    chosen = target if target != AUTO else _DEVICE_TARGETS.get(spec.device.partition(":")[0], "")
    whole_layer = chosen in _COMMUNICATING
    judged = spec if whole_layer else replace(spec, ep_world_size=1)
    local = decide(judged, target=target, max_tokens=terms.ep_max_tokens)
    layer = spread.SpreadLayer.of(spec, local.target, terms)
    whole = judge(layer, spread.CHECKS)
    worse = whole if local.ok else local.verdict
    return Decision(local.target, replace(worse, checks=(*local.verdict.checks, *whole.checks)))


def decide_shared(spec: MoeSpec, *, target: str, spread: bool, tokens: int | None) -> Verdict:
    """May a shared expert, as a layer of one expert, run on the target of the layer beside it? See `shared.py`."""
    local = _judged(target, spec, 1)
    own = judge(shared.SharedExpert.of(spec, target, spread, tokens), shared.CHECKS)
    worse = own if local.ok else local
    return replace(worse, checks=(*local.checks, *own.checks))


def decide(spec: MoeSpec, *, target: str = AUTO, max_tokens: int = 1) -> Decision:
    """Choose the target of a layer and judge it, for the most tokens of one rank. ValueError for an unknown target."""
    if target != AUTO:
        return Decision(target, _judged(target, spec, max_tokens))
    device_type = spec.device.partition(":")[0]
    chosen = _DEVICE_TARGETS.get(device_type)
    if chosen is None:
        reason = f'no target runs on {device_type!r} yet; target="reference" runs everywhere'
        return Decision("", Verdict.refuse("target", reason, device=spec.device))
    return Decision(chosen, _judged(chosen, spec, max_tokens))


def _judged(target: str, spec: MoeSpec, max_tokens: int) -> Verdict:
    return _JUDGES[target](spec, max_tokens) if target in _JUDGES else judge(spec, checks_of(target))
