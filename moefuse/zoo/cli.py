"""`moefuse zoo`. In: options as typed. Out: what `moefuse.zoo.command` is asked for, and exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moefuse.exits import FAILED, UNFUSED, USAGE, die
from moefuse.terminal import one_line, words


def zoo(
    only: Annotated[
        str | None, typer.Option("--only", metavar="A,B,...", help="rows: names, * allowed; default all")
    ] = None,
    styles: Annotated[
        list[Path] | None, typer.Option("--styles", help="Python file with a mapping STYLES; adds its rows")
    ] = None,
    impl: Annotated[
        str, typer.Option("--impl", metavar="A,B,...", help="what is compiled")
    ] = "grouped_mm,batched_mm,eager,eager-bare",
    dtype: Annotated[str, typer.Option("--dtype", metavar="A,B,...")] = "float32,bfloat16",
    shapes: Annotated[str, typer.Option("--shapes", metavar="A,B")] = "static,dynamic",
    inner: Annotated[str, typer.Option("--inner", help="inner compiler: eager or inductor")] = "eager",
    generate: Annotated[
        bool, typer.Option("--generate", help="also compare 20 greedy tokens with eager's")
    ] = False,
    jobs: Annotated[
        int, typer.Option("--jobs", min=0, help="processes at a time; 0 shows what --resume finds")
    ] = 1,
    limit: Annotated[float, typer.Option("--limit", min=1, help="seconds that one cell may take")] = 300.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write every cell, as it is done")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="keep the cells that the --json file has")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="of those, measure again what wasn't right")] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="write the page docs/zoo.md")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="write a page for a browser")] = None,
    list_rows: Annotated[bool, typer.Option("--list", help="print the rows and stop")] = False,
    fail_on_unfused: Annotated[
        bool, typer.Option("--fail-on-unfused", help="exit 3 when a layer isn't fused")
    ] = False,
) -> None:
    """Fuse tiny models of every MoE architecture that the installed transformers has, and tabulate the results.

    Exit code 1 when a fused model gives another result than eager.
    """
    from moefuse.zoo import command

    try:
        wanted = command.Wanted(
            only=words("--only", only) if only else (),
            styles=tuple(styles or ()),
            implementations=words("--impl", impl, command.IMPLEMENTATIONS),
            dtypes=words("--dtype", dtype, ("float32", "bfloat16", "float16")),
            shapes=words("--shapes", shapes, command.SHAPES),
            inner=words("--inner", inner, ("eager", "inductor"))[0],
            generate=generate,
        )
        rows = command.rows_of(wanted)
        if list_rows:
            typer.echo("\n".join(row.name for row in rows))
            return
        if resume and json_file is None:
            raise ValueError("--resume needs --json FILE")
        if retry and not resume:
            raise ValueError("--retry needs --resume")
        table, cells = command.measured(
            wanted, rows, jobs=jobs, limit=limit, store=json_file, resume=resume, retry=retry
        )
        command.write(table, markdown=markdown, html=html)
    except (ImportError, ValueError, OSError) as error:
        die(one_line(error), USAGE)
    if any(cell.wrong for cell in cells):
        raise typer.Exit(FAILED)
    if fail_on_unfused and not all(cell.ok for cell in cells):
        raise typer.Exit(UNFUSED)
