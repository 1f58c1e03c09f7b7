"""What the commands of `moefuse` have in common at a terminal.

In: options as typed, errors, tables. Out: words that are allowed, one line per error, a console as wide as its reader.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def words(option: str, text: str, allowed: Sequence[str] = ()) -> tuple[str, ...]:
    """The parts of `a,b`, each once. allowed: what they may be; empty for anything.

    Raises ValueError, naming the option, for an empty list and for what isn't allowed.
    """
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [part for part in parts if allowed and part not in allowed]
    if unknown or not parts:
        expected = f"from {', '.join(allowed)}" if allowed else "words with commas in between"
        raise ValueError(f"{option} must be {expected}, got {', '.join(unknown) or repr(text)}")
    return parts


def one_line(error: BaseException) -> str:
    """The error's message on one line."""
    return " ".join(str(error).split()) or "no message"


def console(width: int) -> Console:
    """Standard output for tables. width: columns in a file or a pipe; a terminal has its own."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width)
