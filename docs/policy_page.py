"""Write docs/policy.md from the checks themselves: `python docs/policy_page.py`. In: nothing. Out: the page."""

from pathlib import Path

from moefuse import policy, targets
from moefuse.policy import Check, shared, spread

COLUMNS = "| check | reads | says when it fails |\n|---|---|---|\n"
PAGE = Path(__file__).with_name("policy.md")
ELSEWHERE = (
    "Its checks depend on the installed operator: see [what it takes](ascend.md#what-aclnnmegamoe-takes).\n"
)
HEAD = """# Policy reference

Made from the code by `python docs/policy_page.py`; a test keeps it true.

Before a layer is rewritten, its specification (`moefuse.ops.spec.MoeSpec`) has to pass every check of the target that
would run it. A check reads fields of the specification and nothing else: no token count, nothing local, so all ranks
decide alike. All checks are in the report (`report.sites[0].checks`), with the values that they read; the first that
fails gives the reason. `{name}` in a reason stands for the value.

What to do about a reason is in [why isn't my layer fused?](why-not-fused.md). What `aclnnMegaMoe` demands of a layer is
on [the Ascend page](ascend.md).
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for target in targets.names():
        checks = [_row(check) for check in policy.checks_of(target)]
        parts.append(f"\n## Target `{target}`\n\n" + ("".join([COLUMNS, *checks]) if checks else ELSEWHERE))
    parts.append(f"\n## Experts spread over ranks\n\nAsked after the target's.\n\n{COLUMNS}")
    parts += [_row(check) for check in spread.CHECKS]
    parts.append(
        f"\n## Shared experts\n\nAsked after the target's; no is no reason against the layer.\n\n{COLUMNS}"
    )
    parts += [_row(check) for check in shared.CHECKS]
    return "".join(parts)


def _row(check: Check) -> str:
    reads = ", ".join(f"`{name}`" for name in check.reads)
    words = check.reason or " ".join((check.test.__doc__ or "what the layer can't do").split())
    return f"| `{check.name}` | {reads} | {words.replace('|', '/')} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
