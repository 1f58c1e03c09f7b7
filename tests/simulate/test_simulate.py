"""The simulator: its rows against counted ones, its ways against what they launch, and the limits of its arguments."""

import dataclasses
import json
import math
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from moefuse import cli
from moefuse.comm.capacity import NOTES
from moefuse.simulate import Routing, Topology, Workload, load_costs, measure, predict, svg
from moefuse.simulate.predict import WAYS
from moefuse.simulate.ways import Ways
from tests.comm.ranks import run_ranks, values

LAYER = Workload(tokens=400, experts=8, top_k=3, hidden=32, intermediate=16, dtype="float32")


@pytest.mark.parametrize("skew", [0.0, 1.2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_expected_rows_are_those_of_drawn_tokens(skew, ranks) -> None:
    routing = Routing(LAYER, ranks, skew)
    draw = torch.Generator().manual_seed(0)
    clocks = torch.empty(40_000, LAYER.experts).exponential_(generator=draw) / torch.tensor(routing.rates)
    chosen = torch.zeros(40_000, LAYER.experts).scatter_(1, clocks.argsort(1)[:, : LAYER.top_k], 1)
    local, share = LAYER.experts // ranks, LAYER.tokens / 40_000
    for rank in range(ranks):
        own = chosen[:, rank * local : (rank + 1) * local]
        rows = own.any(1).sum().item() * share
        # Exactly K clocks against K on average: up to a tenth for 3 of 8 experts, less for more of them.
        assert sum(routing.pulls(rank)) == pytest.approx(rows, rel=0.1)
        assert sum(routing.slots(rank)) == pytest.approx(own.sum().item() * share * ranks, rel=0.1)
    assert math.fsum(sum(routing.slots(rank)) for rank in range(ranks)) == pytest.approx(
        ranks * LAYER.tokens * LAYER.top_k
    )


def counted(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Operators and collectives of each way; all ways give the same y."""
    ways = Ways(dataclasses.replace(LAYER, tokens=9, dtype="bfloat16"))
    names: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    found = {}
    with torch.no_grad():
        want = ways.all_to_all()
        for name in ("fused", "all_to_all", "all_gather", "over_collectives", "all_reduce"):
            names.clear()
            with Count():
                y = getattr(ways, name)()
            # bfloat16: where parts of a sum travel they are rounded, values of size 1 to 1/256
            torch.testing.assert_close(y, want, rtol=2e-2, atol=2e-2)
            found[name] = (len(names), sum("c10d" in each for each in names))
    found["traffic"] = (ways.shared.traffic.rows + ways.shared.traffic.results, 0)
    return found


def test_launches_and_bytes_are_those_of_the_real_ways() -> None:
    first, second = values(run_ranks(2, counted))
    layer = dataclasses.replace(LAYER, tokens=9, dtype="bfloat16")
    predicted = {each.way: each for each in predict(layer, Topology(2), load_costs())}
    assert first["fused"] == (1, 0)
    for name in WAYS:
        assert predicted[name].launches == first[name][0], name
    assert first["all_to_all"][1] == first["all_gather"][1] == 4
    routing = (NOTES + layer.experts // 2 + 1) * 8 + layer.tokens * layer.top_k / 2 * 4
    moved = (first["traffic"][0] + second["traffic"][0]) / 2
    # drawn tokens of one seed against expected ones
    assert predicted["fused"].bytes - routing == pytest.approx(moved, rel=0.2)


def test_predictions_are_ordered_as_they_must_be() -> None:
    costs = load_costs()
    layer = Workload(tokens=16, experts=64, top_k=4, hidden=512, intermediate=256)
    one = predict(layer, Topology(2), costs)[0]
    assert one.seconds < min(way.seconds for way in predict(layer, Topology(2), costs)[1:])
    skewed = predict(layer, Topology(2), costs, skew=1.0)[0]
    assert skewed.computing > one.computing
    assert skewed.bytes > one.bytes
    many = dataclasses.replace(layer, tokens=2048)
    serial, overlapped = (predict(many, Topology(8), costs, overlap=overlap)[0] for overlap in (False, True))
    assert serial.computing == pytest.approx(overlapped.computing)
    assert overlapped.seconds < serial.seconds
    far = predict(many, Topology(8, ranks_per_host=2, link_bytes=1e9), costs)
    near = predict(many, Topology(8, ranks_per_host=2, link_bytes=1e11), costs)
    assert all(a.seconds > b.seconds for a, b in zip(far, near, strict=True))
    assert [way.bytes for way in far] == [way.bytes for way in near]
    everything = predict(dataclasses.replace(layer, experts=1024), Topology(1024), costs, skew=0.5)
    assert all(math.isfinite(way.seconds) for way in everything)
    every_expert = Routing(Workload(4, 8, 8, 16, 16), 2)
    assert every_expert.slots(1) == [8.0] * 4
    assert every_expert.pulls(1) == [4.0, 0.0, 0.0, 0.0]  # a token crosses once


def test_the_timeline_is_drawn_with_all_its_bars() -> None:
    bars = predict(LAYER, Topology(2), load_costs(), overlap=True)[0].bars
    assert {"publish", "pull", "experts", "wait", "combine"} == {bar.kind for bar in bars}
    drawn = ElementTree.fromstring(svg.timeline(bars, "a < b"))
    tips = drawn.findall(".//{*}title")
    assert len(tips) == len(bars)
    with pytest.raises(ValueError, match="at least one bar"):
        svg.timeline([], "")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Workload(0, 8, 2, 16, 16), "tokens: expected a positive integer, got 0"),
        (lambda: Workload(1, 8, 9, 16, 16), "top_k: expected at most experts=8, got 9"),
        (lambda: Workload(1, 8, 2, 16, 16, "int8"), "dtype: expected one of .*, got 'int8'"),
        (lambda: Topology(2048), "ranks: expected at most 1024, got 2048"),
        (lambda: Topology(2, link_bytes=math.inf), "link_bytes: expected a positive number"),
        (lambda: Routing(LAYER, 3), "experts: expected a multiple of ranks=3, got 8"),
        (lambda: Routing(LAYER, 2, -1.0), "skew: expected 0 .* got -1.0"),
        (lambda: dataclasses.replace(load_costs(), flops=0.0), "costs: flops: expected a positive number"),
    ],
)
def test_errors_name_the_argument(make, words) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def run(*arguments: str):
    return CliRunner().invoke(cli.app, ["simulate", *arguments])


def test_the_command_says_what_is_wrong(tmp_path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    less = load_costs().to_dict()
    del less["flops"]
    (tmp_path / "less.json").write_text(json.dumps(less))
    for arguments, words in [
        (["--routing", "random"], "--routing: expected balanced, zipf or zipf:SKEW, got 'random'"),
        (["--routing", "zipf:x"], "--routing: expected balanced"),
        (["--ranks", "3"], "experts: expected a multiple of ranks=3, got 128"),
        (["--costs", str(tmp_path / "none.json")], "--costs: "),
        (["--costs", str(other)], "isn't a moefuse.costs/1 file"),
        (["--costs", str(broken)], "isn't JSON"),
        (["--costs", str(tmp_path / "less.json")], "missing or unknown: flops"),
        (["--costs", str(other), "--calibrate", str(other)], "give one of them"),
    ]:
        result = run(*arguments)
        assert result.exit_code == 2, arguments
        assert words in result.stderr, arguments


def test_the_command_writes_a_table_and_a_picture(tmp_path) -> None:
    picture = tmp_path / "a.svg"
    result = run("--ranks", "4", "--routing", "zipf:1.1", "--overlap", "--cores", "16", "--svg", str(picture))
    assert result.exit_code == 0, result.stderr
    assert "fused node" in result.stdout
    assert "all_gather" in result.stdout
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert json.loads(run("--cores", "16", "--json").stdout)["costs"]["cores"] == 16


def on_rank(rank: int, world: int, function, args):
    with torch.no_grad():
        return function(*args)


def test_calibration_and_comparison_run(tmp_path, monkeypatch) -> None:
    """Whatever they find on a busy machine."""

    def in_forks(world: int, function, *args):
        return values(run_ranks(world, on_rank, function, args))[0]

    calibrate, validate = measure.calibrate, measure.validate
    monkeypatch.setattr(measure, "run_ranks", in_forks)
    monkeypatch.setattr(measure, "calibrate", lambda: calibrate(rounds=1))
    monkeypatch.setattr(
        measure, "validate", lambda costs: validate(costs, [Workload(2, 8, 2, 32, 16)], [2], 1)
    )
    file = tmp_path / "costs.json"
    result = run("--calibrate", str(file), "--validate")
    assert result.exit_code == 0, result.output
    assert load_costs(file).cores >= 1
    assert "median error" in result.stdout


def test_ranks_of_a_measurement_are_processes_of_one_group() -> None:
    assert measure.run_ranks(1, dist.get_world_size) == 1


def timings(rank: int, world: int) -> dict[str, list[float]]:
    found = measure.timed({"a": dist.barrier, "b": lambda: None}, rounds=3, steps=2)
    return {name: list(time) for name, time in found.items()}


def test_times_are_best_and_median() -> None:
    for found in values(run_ranks(2, timings)):
        assert set(found) == {"a", "b"}
        assert all(0 <= best <= median for best, median in found.values())
