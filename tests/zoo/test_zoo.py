"""`moefuse zoo`: what it finds, what it measures, and that nothing gets lost on the way to its pages.

The whole table is the command's own work and takes an hour; here are a few of its cells.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("transformers")

from typer.testing import CliRunner

from moefuse import backend, hf
from moefuse.cli import app
from moefuse.ops import kernels
from moefuse.zoo import command, render, scan, sweep
from moefuse.zoo.cell import Cell, measure
from moefuse.zoo.rounding import Fused
from moefuse.zoo.rows import BARE, EAGER, IMPLEMENTATIONS, Row, registry, rows

ROOT = Path(__file__).resolve().parents[2]
STYLES = ROOT / "tests" / "zoo" / "styles.py"

SOURCE = """
@use_experts_implementation(is_transposed=True)
class NewExperts(nn.Module):
    pass
class NewSharedExperts(nn.Module):
    pass
class NewTextMoE(nn.Module):
    def __init__(self, config):
        self.experts = NewExperts(config)
        self.shared = NewSharedExperts(config)
class NewVisionMoE(nn.Module):
    def __init__(self, config):
        self.experts = NewExperts(config)
"""
PLAIN = """
class OldMoe(nn.ModuleList):
    pass
class OldMoeModel(PreTrainedModel):
    pass
class OldLayer(nn.Module):
    def __init__(self, config):
        self.mlp = OldMoe(config)
"""


def row(name):
    (found,) = [row for row in rows((STYLES,)) if row.name == name]
    return found


def cell(name, implementation="grouped_mm", dtype="float32", shapes="static"):
    return measure(row(name), Cell(name, implementation, dtype, shapes, "eager"))


# -- finding


def written(tmp_path, source):
    file = tmp_path / "new" / "modeling_new.py"
    file.parent.mkdir()
    file.write_text(source)
    return scan.read(file)


def test_a_new_module_gives_a_row_for_each_family(tmp_path):
    found = written(tmp_path, SOURCE)
    assert [(a.name, a.block, a.experts, a.interface) for a in found] == [
        ("new/NewTextMoE", "NewTextMoE", "NewExperts", True),
        ("new/NewVisionMoE", "NewVisionMoE", "NewExperts", True),
    ]


def test_experts_without_the_interface_are_found_by_name(tmp_path):
    (found,) = written(tmp_path, PLAIN)
    assert (found.name, found.block, found.experts, found.interface) == ("new", "OldLayer", "OldMoe", False)


def test_a_module_without_experts_has_no_row(tmp_path):
    assert not written(tmp_path, "class Model(nn.Module):\n    pass\n")


def test_the_installed_transformers():
    modules = {found.module for found in scan.scan()}
    assert {"mixtral", "qwen3_moe", "llama4", "dbrx", "doge", "vitpose_backbone", "inkling"} <= modules
    assert len(modules) >= 76  # those of 5.24
    assert sum(found.interface for found in scan.scan()) >= 67
    families = [found.block for found in scan.scan() if found.module == "qwen3_omni_moe"]
    assert len(families) == 2


def test_every_architecture_has_a_model_type():
    assert not [found.module for found in scan.scan() if not hf.model_types(found.module)]


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no such file"), ("x = 1\n", "has no mapping STYLES"), ("STYLES = [1]\n", "got list")],
)
def test_bad_files_of_styles_are_named(tmp_path, text, message):
    file = tmp_path / "styles.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message):
        registry(file)


# -- measuring


@pytest.mark.parametrize(
    ("name", "implementation", "dtype", "shapes"),
    [
        ("gpt_oss", "batched_mm", "bfloat16", "static"),
        ("olmoe", "eager", "float32", "dynamic"),
        ("ernie4_5_vl_moe/image tokens", "grouped_mm", "float32", "static"),
        ("diffusion_gemma/DiffusionGemmaDecoderTextLayer", "grouped_mm", "float32", "static"),
        ("qwen3_omni_moe/Qwen3OmniMoeTalkerTextSparseMoeBlock", "grouped_mm", "float32", "static"),
        ("llama4", "eager", "float32", "static"),
        ("style/gpt_fast", "eager", "bfloat16", "static"),
        ("style/torchtitan_grouped_before", "eager", "float32", "static"),  # bfloat16 inside
    ],
)
def test_a_cell_in_which_every_layer_is_fused(name, implementation, dtype, shapes):
    result = cell(name, implementation, dtype, shapes)
    assert result.ok, result
    assert result.fused == result.layers > 0
    assert not result.wrong
    assert result.graphs == (result.plain_graphs or 1)
    assert result.capture > 0
    assert result.passes > 0


def test_a_layer_that_is_overlooked_shows():
    with mock.patch.object(backend, "worth_a_look", return_value=False):
        result = cell("mixtral")
    assert (result.layers, result.fused) == (2, 0)
    assert result.reason == "0 of 2 layers fused: no MoE layer found in 1 graph"
    assert not result.ok


def test_what_breaks_the_graph_is_the_reason():
    result = cell("mixtral", BARE)
    assert result.fused == 0
    assert result.breaks
    assert "nonzero" in result.reason


@pytest.mark.parametrize("scale", [1.0, 1.02])
def test_a_layer_that_can_not_run_alone_is_judged_in_its_model(scale):
    right = kernels.kernel("cpu")

    def scaled(*arguments):
        y, counts = right(*arguments)
        return y * scale, counts

    with (
        mock.patch.dict(kernels._KERNELS, {"cpu": scaled}),
        mock.patch.object(Fused, "runs_unfused", False),
    ):
        result = cell("mixtral", dtype="bfloat16")
    assert result.wrong == (scale != 1)
    assert (result.ratio > 1.5) == (scale != 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_kernel_shows(dtype):
    right = kernels.kernel("cpu")

    def wrong(*arguments):
        y, counts = right(*arguments)
        return y * 1.02, counts

    with mock.patch.dict(kernels._KERNELS, {"cpu": wrong}):
        result = cell("mixtral", dtype=dtype)
    assert result.wrong
    assert result.reason.startswith("WRONG")
    assert not result.ok


def test_tokens_with_a_cache_are_eagers():
    result = cell("mixtral", shapes="generate")
    assert result.ok, result
    assert result.fused == result.layers == 2


def test_what_can_not_be_built_is_a_cell_with_its_error():
    unbuildable = Row("none", module="mixtral", block="NoSuchBlock", experts="NoSuchExperts", interface=True)
    result = measure(unbuildable, Cell("none", "grouped_mm", "float32", "static", "eager"))
    assert "no model has NoSuchBlock" in result.reason
    assert not result.ok


def test_what_must_be_refused_and_is_fused_is_wrong():
    fusable = row("style/gpt_fast")
    measured = measure(
        replace(fusable, fusable=False), Cell(fusable.name, EAGER, "float32", "static", "eager")
    )
    assert measured.wrong
    assert measured.reason == "WRONG: 1 layers fused that must be refused"


def test_what_must_be_refused_is_refused_with_its_reason():
    name = "style/expert_choice"
    assert row(name).reason
    assert cell(name, EAGER).refused
    other = measure(replace(row(name), reason="the moon"), Cell(name, EAGER, "float32", "static", "eager"))
    assert not other.refused
    assert not other.ok


# -- sweeping

DEADLY = """
import os, time
from types import SimpleNamespace
import torch


def good():
    return torch.nn.Linear(4, 4), (torch.zeros(1, 3, 4),)


STYLES = {
    "dies": SimpleNamespace(build=lambda: os._exit(7), fusable=True),
    "sleeps": SimpleNamespace(build=lambda: time.sleep(600), fusable=True),
    "raises": SimpleNamespace(build=lambda: 1 / 0, fusable=True),
    "runs": SimpleNamespace(build=good, fusable=True),
}
"""


@pytest.fixture
def deadly(tmp_path):
    file = tmp_path / "deadly.py"
    file.write_text(DEADLY)
    chosen = [row for row in rows((file,)) if row.name.startswith("style/")]
    return sweep.plan(chosen, [EAGER], ["float32"], ["static"])


def test_a_sweep_survives_its_cells_and_goes_on_where_it_stopped(deadly, tmp_path):
    store = tmp_path / "cells.json"
    seen = []
    results = sweep.run(deadly, limit=8, store=store, done=seen.append)
    assert [result.reason for result in results[:3]] == [
        "the process died with exit code 7",
        "stopped after 8 s",
        "ZeroDivisionError: division by zero",
    ]
    assert results[3].layers == 1
    assert results[3].error is not None
    assert len(seen) == 4
    assert sweep.load(store) == results
    with mock.patch.object(sweep, "_Worker", side_effect=AssertionError("measured again")):
        assert sweep.run(deadly, store=store, resume=True) == results
    renewed = sweep.run(deadly[2:3], store=store, resume=True, retry=True)
    assert renewed == results[2:3]
    assert renewed[0] is not results[2]
    assert len(sweep.load(store)) == 4


def test_the_bare_line_is_measured_in_one_setting():
    tasks = sweep.plan([row("mixtral")], IMPLEMENTATIONS, ["float32", "bfloat16"], ["static", "dynamic"])
    assert len(tasks) == 3 * 4 + 1
    assert len({cell.key for _, cell in tasks}) == len(tasks)


def test_results_of_other_versions_are_not_mixed_in(tmp_path):
    file = tmp_path / "cells.json"
    sweep.save(file, [])
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data | {"versions": {"torch": "1.0"}}))
    with pytest.raises(ValueError, match=r"measured with .*1\.0"):
        sweep.load(file)
    file.write_text("{}")
    with pytest.raises(ValueError, match="isn't a file of zoo results"):
        sweep.load(file)


# -- the pages


def line(name="m", **fields):
    results = [
        Cell("m", implementation, "float32", "static", "eager", **fields) for implementation in (EAGER, BARE)
    ]
    (made,) = render.lines([Row(name, file="f")], results)
    return made


def test_a_row_says_yes_only_when_every_cell_is_right():
    good = Cell("m", EAGER, "float32", "static", "eager", layers=2, fused=2, graphs=1, error=1e-7)
    bad = Cell("m", EAGER, "bfloat16", "static", "eager", layers=2, reason="0 of 2 layers fused: a | b")
    (made,) = render.lines([Row("m", file="f")], [good, bad])
    assert made.verdicts == {"grouped_mm": "-", "batched_mm": "-", EAGER: "no", BARE: ""}
    assert made.reason == bad.reason
    assert "a \\| b" in render.markdown([made])
    assert line(layers=2, fused=2).verdicts[EAGER] == "yes"
    assert line(layers=2, fused=2, wrong=True, reason="WRONG").verdicts[EAGER] == "WRONG"
    assert line(layers=2, reason="capacity", refused=True).verdicts[EAGER] == "refused"


def test_the_pages_hold_every_row(tmp_path):
    table = [line(layers=2, fused=2, graphs=1), line("n<b>", reason="x")]
    command.write(table, markdown=tmp_path / "zoo.md", html=tmp_path / "zoo.html")
    assert "| `m` | 2 | - | - | yes | yes | 1 |" in (tmp_path / "zoo.md").read_text()
    assert "n&lt;b&gt;" in (tmp_path / "zoo.html").read_text()


def test_the_summary_counts_rows_modules_and_refusals():
    def one(name, module="", **fields):
        return Row(name, module=module, file="" if module else "f", **fields)

    chosen = [one("a/1", "a"), one("a/2", "a"), one("b", "b"), one("style/c"), one("style/d", fusable=False)]
    results = [Cell(row.name, EAGER, "float32", "static", "eager", layers=1, fused=1) for row in chosen]
    results[1].reason = "not found"
    results[4].reason, results[4].refused = "capacity", True
    assert render.summary(render.lines(chosen, results)) == [
        (
            "transformers, own code, moefuse.compile: every layer is fused in 2 of 3 rows that a node can do "
            "(1 of 2 modules); 0 wrong results. Measured: float32 static"
        ),
        (
            "plain styles, own code, moefuse.compile: every layer is fused in 1 of 1 rows that a node can do; "
            "1 of 1 others are refused with their reason; 0 wrong results. Measured: float32 static"
        ),
    ]


def test_the_documented_table_has_the_rows_of_this_transformers():
    text = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE) == [row.name for row in rows((STYLES,))]


# -- the command


def wanted(*only):
    return command.Wanted(only, (), IMPLEMENTATIONS, ("float32",), ("static",), "eager", False)


def test_rows_are_chosen_by_name_pattern_or_module():
    assert len(command.rows_of(wanted("dots3_note"))) == 2
    assert [row.name for row in command.rows_of(wanted("mixtral", "qwen3_m*"))] == ["mixtral", "qwen3_moe"]
    with pytest.raises(ValueError, match="no row is called nope"):
        command.rows_of(wanted("mixtral", "nope"))


def invoke(*arguments):
    result = CliRunner().invoke(app, ["zoo", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command_measures_and_writes(tmp_path):
    store = tmp_path / "cells.json"
    chosen = ("--only", "mixtral", "--impl", "grouped_mm", "--dtype", "float32", "--shapes", "static")
    code, output = invoke(*chosen, "--json", store, "--markdown", tmp_path / "zoo.md", "--fail-on-unfused")
    assert code == 0, output
    assert "every layer is fused in 1 of 1 rows" in output
    (result,) = sweep.load(store)
    assert result.ok
    assert "| `mixtral` | 2 | yes |" in (tmp_path / "zoo.md").read_text()
    result.reason, result.wrong = "WRONG: relative error 1", True
    sweep.save(store, [result])
    shown = (*chosen, "--json", store, "--resume", "--jobs", 0)
    assert invoke(*shown)[0] == 1  # a wrong result is a failure, also without --fail-on-unfused
    result.wrong = False
    sweep.save(store, [result])
    assert invoke(*shown)[0] == 0
    assert invoke(*shown, "--fail-on-unfused")[0] == 3


def test_the_command_lists_its_rows():
    assert invoke("--list", "--only", "dots3_note") == (
        0,
        "dots3_note/Dots3NoteTextMoE\ndots3_note/Dots3NoteVisionMoE\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--impl", "fast"), "--impl must be from grouped_mm, batched_mm, eager, eager-bare, got fast"),
        (("--only", "nope"), "no row is called nope"),
        (("--resume",), "--resume needs --json FILE"),
        (("--retry",), "--retry needs --resume"),
        (("--styles", "nowhere.py"), "no such file: nowhere.py"),
    ],
)
def test_bad_arguments_of_the_command_are_named(arguments, message):
    code, output = invoke(*arguments)
    assert code == 2
    assert message in output
