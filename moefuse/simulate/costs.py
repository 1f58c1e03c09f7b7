"""What things cost on a machine: measured once, kept as JSON.

In: a file that `moefuse simulate --calibrate` wrote, or the one that comes with the package. Out: `Costs`.
"""

import json
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

SCHEMA = "moefuse.costs/1"


@dataclass(frozen=True)
class Costs:
    """Seconds, and bytes or operations per second, of one rank with one thread. Raises ValueError naming the field.

    flops: the experts' GEMMs with many tokens. weight_bytes: expert weights read, with few. copy_bytes: rows between
    two windows of a host. node_seconds: a fused node on two ranks with nothing to compute, both meetings included;
    meeting_seconds: of a rank more. op_seconds: a small torch operator. experts_seconds: the experts' operator with
    nothing to compute. exchange_seconds, gather_seconds: in a layer, an all_to_all, and an all_gather or
    reduce_scatter, of two ranks with hardly any data; *_rank_seconds: of a rank more; collective_bytes: what each rank
    gets by one. cores: of the host; more ranks than that take turns.
    """

    machine: str
    cores: int
    flops: float
    weight_bytes: float
    copy_bytes: float
    node_seconds: float
    meeting_seconds: float
    op_seconds: float
    experts_seconds: float
    exchange_seconds: float
    exchange_rank_seconds: float
    gather_seconds: float
    gather_rank_seconds: float
    collective_bytes: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "machine":
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"costs: {field.name}: expected a positive number, got {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"schema": SCHEMA, **asdict(self)}


def load_costs(path: Path | None = None) -> Costs:
    """Of a file; None: of the machine that moefuse was measured on. Raises ValueError for a file that isn't one."""
    source = files(__package__).joinpath("costs.json") if path is None else path
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"costs: {path} isn't JSON: {error}") from None
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise ValueError(f"costs: {path} isn't a {SCHEMA} file")
    known = {field.name for field in fields(Costs)}
    if data.keys() != known:
        wrong = ", ".join(sorted(data.keys() ^ known))
        raise ValueError(f"costs: {path}: missing or unknown: {wrong}")
    return Costs(**data)
