"""The command line of `moefuse simulate`. In: options as typed. Out: what `moefuse.simulate.command` is asked for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from moefuse.exits import USAGE, die
from moefuse.terminal import one_line


def simulate(
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=1024, help="of the expert-parallel group")] = 2,
    ranks_per_host: Annotated[int, typer.Option("--ranks-per-host", min=1, help="that share memory")] = 8,
    cores: Annotated[
        int | None, typer.Option("--cores", min=1, help="of a host [those of the measured machine]")
    ] = None,
    link: Annotated[float, typer.Option("--link", help="GB/s of a rank to other hosts")] = 25.0,
    latency: Annotated[float, typer.Option("--latency", help="microseconds of that link")] = 5.0,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="of each rank")] = 16,
    experts: Annotated[int, typer.Option("--experts", min=1)] = 128,
    top_k: Annotated[int, typer.Option("--top-k", min=1)] = 8,
    hidden: Annotated[int, typer.Option("--hidden", min=1)] = 2048,
    intermediate: Annotated[int, typer.Option("--intermediate", min=1)] = 768,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32")] = "bfloat16",
    routing: Annotated[
        str, typer.Option("--routing", help="balanced, zipf or zipf:SKEW; popular experts lie together")
    ] = "balanced",
    overlap: Annotated[
        bool, typer.Option("--overlap", help="rows are pulled by a second thread, or by a copy engine")
    ] = False,
    costs: Annotated[
        Path | None, typer.Option("--costs", metavar="FILE", help="of a machine that was calibrated")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option("--calibrate", metavar="FILE", help="measure this machine and keep it there"),
    ] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="measure on 2 and 4 ranks here, and compare")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="write the fused node's timeline")
    ] = None,
) -> None:
    """Predict an expert-parallel layer on more ranks than this machine has: time, bytes and launches.

    The fused node is compared with all_to_all as models write it, and with all_gather and reduce_scatter.
    """
    from moefuse.simulate import command
    from moefuse.simulate.workload import Topology, Workload

    try:
        if calibrate and costs:
            raise ValueError("--calibrate measures what --costs would read: give one of them")
        skew = command.skew_of(routing)
        layer = Workload(tokens, experts, top_k, hidden, intermediate, dtype)
        topology = Topology(ranks, ranks_per_host, link * 1e9, latency * 1e-6)
        known = command.calibrated(calibrate) if calibrate else command.costs_of(costs)
        known = dataclasses.replace(known, cores=cores or known.cores)
        predictions = command.simulated(layer, topology, known, skew, overlap)
        if validate:
            command.comparison(known)
            return
        title = (
            f"{ranks} ranks, {tokens} tokens each, {experts} experts, top-{top_k}, {hidden} -> {intermediate}, "
            f"{dtype}, {routing}"
        )
        if svg:
            command.write_svg(predictions, svg, f"fused node: {title}")
        if as_json:
            typer.echo(json.dumps(command.data(layer, topology, known, skew, predictions), indent=2))
        else:
            command.table(predictions, title)
    except (ImportError, ValueError, OSError) as error:
        die(one_line(error), USAGE)
