"""Checks and verdicts: why a layer may or may not be fused, as data.

In: a `MoeSpec` (facts equal on every rank, never a token count) and a list of checks. Out: a `Verdict` that
holds every check's answer, its reason in words and the facts it read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from moefuse.ops.spec import MoeSpec

Extended = TypeVar("Extended", bound=MoeSpec)


@dataclass(frozen=True)
class CheckResult:
    """One policy check: its name, its answer, the reason in words and the facts that it read."""

    name: str
    ok: bool
    reason: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One question about a spec.

    reads: the fields of `subject` that `test` and the reason use.
    test: True when the spec passes; or the reason of the refusal as text, "" when it passes.
    reason: text of the refusal, a format string over the fields in `reads`; unused where `test` gives the text.
    subject: what is judged; a target that asks more than a `MoeSpec` holds extends it.
    """

    name: str
    reads: tuple[str, ...]
    test: Callable[[Any], bool | str]
    reason: str = ""
    subject: type[MoeSpec] = MoeSpec

    def __post_init__(self) -> None:
        known = {f.name for f in fields(self.subject)}
        unknown = [name for name in self.reads if name not in known]
        if unknown:
            raise ValueError(
                f"Check {self.name!r}: reads: expected fields of {self.subject.__name__}, got {unknown}"
            )

    def __call__(self, spec: MoeSpec) -> CheckResult:
        """Judge one spec."""
        facts = {name: getattr(spec, name) for name in self.reads}
        answer = self.test(spec)
        if isinstance(answer, str):
            return CheckResult(self.name, not answer, answer, facts)
        return CheckResult(self.name, answer, "" if answer else self.reason.format(**facts), facts)


@dataclass(frozen=True)
class Verdict:
    """Yes or no; when no, the first check that failed, its reason and the facts it read.

    checks: every check in order, also those after the first failure.
    """

    ok: bool
    check: str = ""
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    checks: tuple[CheckResult, ...] = ()

    @staticmethod
    def refuse(check: str, reason: str, **facts: Any) -> "Verdict":
        """A refusal by one check."""
        result = CheckResult(check, False, reason, facts)
        return Verdict(False, check, reason, facts, (result,))


def extended(kind: type[Extended], spec: MoeSpec, **more: Any) -> Extended:
    """A layer as a kind of spec with more fields, of which checks may then ask."""
    return kind(**{field.name: getattr(spec, field.name) for field in fields(MoeSpec)}, **more)


def judge(spec: MoeSpec, checks: Sequence[Check]) -> Verdict:
    """Run all checks; the first failing one gives the reason."""
    results = tuple(check(spec) for check in checks)
    failed = next((result for result in results if not result.ok), None)
    if failed is None:
        return Verdict(True, checks=results)
    return Verdict(False, failed.name, failed.reason, failed.facts, results)
