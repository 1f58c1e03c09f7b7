"""What to do about a reason: the rows of docs/why-not-fused.md, which lies beside this file in the package.

In: a reason as a report has it. Out: the advice of the row that fits, "" where none does. A row that is added to the
page is what reports say from then on.
"""

import functools
import re
from importlib.resources import files


def advice(reason: str) -> str:
    """What would have made it work. The row with the longest text that fits counts."""
    fitting = [(len(pattern.pattern), words) for pattern, words in _rows() if pattern.search(reason)]
    return max(fitting)[1] if fitting else ""


@functools.cache
def _rows() -> tuple[tuple[re.Pattern[str], str], ...]:
    page = files("moefuse.report").joinpath("why-not-fused.md").read_text(encoding="utf-8")
    found: list[tuple[re.Pattern[str], str]] = []
    for reason, words in re.findall(
        r"^\| (?!-|reason)(.+?) \| (.+) \|$", page.partition("## The reasons")[2], re.MULTILINE
    ):
        said = words if words != "as above" or not found else found[-1][1]
        found.append((re.compile(_pattern(reason)), re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", said)))
    return tuple(found)


def _pattern(reason: str) -> str:
    """`...` stands for anything; a row that begins with a word isn't found in the middle of one."""
    text = reason.strip("`")
    start = r"\b" if text[:1].isalnum() else ""
    return start + ".+?".join(re.escape(part) for part in text.split("..."))
