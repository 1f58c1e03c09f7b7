"""How a `moefuse` command ends: 0 done; the other codes are named here, and each comes with one line on stderr."""

from typing import NoReturn

import typer

FAILED, USAGE, UNFUSED, NOTHING, CHANGED = 1, 2, 3, 4, 5
"""The model or moefuse failed; the command line was wrong; a layer wasn't fused; there was no MoE layer; two reports
differ."""


def die(message: str, code: int) -> NoReturn:
    """End the command: one line on stderr, and the code."""
    typer.echo(f"moefuse: {message}", err=True)
    raise typer.Exit(code)
