"""`moefuse simulate`: from what the user asked for to the table.

In: options, checked here. Out: a table on the terminal, JSON, a timeline. Errors of the user are ValueErrors that name
the option.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from moefuse.simulate import svg
from moefuse.simulate.costs import Costs, load_costs
from moefuse.simulate.predict import Prediction, predict
from moefuse.simulate.workload import Topology, Workload
from moefuse.terminal import console

__all__ = ["calibrated", "comparison", "costs_of", "data", "simulated", "skew_of", "table", "write_svg"]

_WIDE = 120
"""Columns of the table in a file or a pipe."""
_TITLES = {"fused": "fused node", "all_to_all": "all_to_all", "all_gather": "all_gather"}


def skew_of(text: str) -> float:
    """The skew that `balanced`, `zipf` or `zipf:1.2` means. Raises ValueError."""
    name, _, number = text.partition(":")
    try:
        if name == "balanced" and not number:
            return 0.0
        if name == "zipf":
            return float(number or 1)
    except ValueError:
        pass
    raise ValueError(f"--routing: expected balanced, zipf or zipf:SKEW, got {text!r}")


def costs_of(path: Path | None) -> Costs:
    """As `load_costs`; a file that can't be read is a ValueError too."""
    try:
        return load_costs(path)
    except OSError as error:
        raise ValueError(f"--costs: {error}") from None


def calibrated(path: Path) -> Costs:
    """Measure this machine, and keep it in a file."""
    from moefuse.simulate.measure import calibrate

    costs = calibrate()
    path.write_text(json.dumps(costs.to_dict(), indent=1) + "\n", encoding="utf-8")
    return costs


def simulated(
    workload: Workload, topology: Topology, costs: Costs, skew: float, overlap: bool
) -> list[Prediction]:
    """All ways of the layer."""
    return predict(workload, topology, costs, skew=skew, overlap=overlap)


def data(
    workload: Workload, topology: Topology, costs: Costs, skew: float, predictions: Sequence[Prediction]
) -> dict[str, Any]:
    """JSON-ready, as schemas/simulation.schema.json says."""
    return {
        "schema": "moefuse.simulation/1",
        "workload": asdict(workload),
        "topology": asdict(topology),
        "skew": skew,
        "costs": costs.to_dict(),
        "ways": [prediction.to_dict() for prediction in predictions],
    }


def table(predictions: Sequence[Prediction], title: str) -> None:
    """Print the ways, each beside the fused node."""
    shown = Table(title=title, title_justify="left")
    for column in ("", "time", "x fused", "communicating", "experts", "bytes per rank", "launches"):
        shown.add_column(column, justify="left" if not column else "right")
    for way in predictions:
        shown.add_row(
            _TITLES[way.way],
            _time(way.seconds),
            f"{way.seconds / predictions[0].seconds:.2f}",
            _time(way.communicating),
            _time(way.computing),
            _size(way.bytes),
            str(way.launches),
        )
    console(_WIDE).print(shown)


def comparison(costs: Costs) -> None:
    """Measure the layer's ways on 2 and 4 ranks of this machine, beside what is predicted."""
    from moefuse.simulate.measure import validate

    compared = validate(costs)
    shown = Table(title="measured here (best of the rounds) and predicted", title_justify="left")
    for column in ("ranks", "tokens", "hidden", "way", "measured", "predicted", "error"):
        shown.add_column(column, justify="left" if column == "way" else "right")
    for each in compared:
        shown.add_row(
            str(each.ranks),
            str(each.workload.tokens),
            str(each.workload.hidden),
            _TITLES[each.way],
            _time(each.measured),
            _time(each.predicted),
            f"{each.error:+.0%}",
        )
    console(_WIDE).print(shown)
    errors = sorted(abs(each.error) for each in compared)
    console(_WIDE).print(f"median error {errors[len(errors) // 2]:.0%}, largest {errors[-1]:.0%}")


def write_svg(predictions: Sequence[Prediction], path: Path, title: str) -> None:
    """The timeline of the fused node, ranks below each other."""
    path.write_text(svg.timeline(predictions[0].bars, title), encoding="utf-8")


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-2 else f"{seconds * 1e3:.1f} ms"


def _size(size: float) -> str:
    return f"{size / 1024:.1f} KiB" if size < 1 << 20 else f"{size / (1 << 20):.1f} MiB"
