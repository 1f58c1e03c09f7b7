import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

import moefuse
from moefuse import cli, hf, targets
from moefuse._version import __version__
from moefuse.report.model import GraphReport, LayerReport, Report

FUSED = LayerReport("mlp", True, "mega_moe", target="cpu")
LOST = LayerReport("mlp", False, "sum_1", reason="rows overlap", check="lift", source="m.py:3")
FACTORIES = """
import torch

model = torch.nn.Linear(4, 4)
x = torch.ones(2, 4)


def pair(): return model, (x,)
def triple(): return model, [x], {"scale": 2}
def named(): return model, {"input": x}
def single(): return model
def many(): return model, (x,), {}, 1
def tensor_args(): return model, x
def bad_kwargs(): return model, (x,), [1]
def no_model(): return 3, (x,)
def raising(): raise RuntimeError("no\\n  weights")
number = 3
"""


@pytest.fixture
def explain(monkeypatch):
    """Stands in for moefuse.explain: notes its calls, answers with `explain.report`."""

    class Explain:
        def __init__(self):
            self.report = Report((GraphReport(0, (FUSED,)),))
            self.calls = []

        def __call__(self, model, *args, moefuse_options=None, **kwargs):
            self.calls.append((model, args, kwargs, moefuse_options))
            self.gradients = torch.is_grad_enabled()
            return self.report

    stand_in = Explain()
    monkeypatch.setattr(moefuse, "explain", stand_in, raising=False)
    return stand_in


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "made_models.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "made_models.py"
    sys.modules.pop("made_models", None)


def run(*arguments):
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [("pair", 1, []), ("triple", 1, ["scale"]), ("named", 0, ["input"])],
)
@pytest.mark.parametrize("place", ["made_models", "made_models.py"])
def test_explain_calls_the_model_that_the_factory_made(place, name, args, kwargs, explain, factories):
    result = run("explain", f"{place}:{name}")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("moefuse: 1 of 1 MoE layer fused")
    ((model, given, named, options),) = explain.calls
    assert isinstance(model, torch.nn.Linear)
    assert (len(given), list(named), options) == (args, kwargs, {})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("made_models", "hf:MODEL_TYPE, hf:config.json or export:file.pt2, got 'made_models'"),
        ("made_models:", "TARGET must be"),
        ("gone.py:pair", "no such file: gone.py"),
        ("gone_module:pair", "importing gone_module raised ModuleNotFoundError"),
        ("made_models.py:gone", "made_models.py has no function 'gone'"),
        ("made_models.py:number", "made_models.py has no function 'number'"),
        ("made_models.py:raising", "made_models.py:raising raised RuntimeError: no weights"),
        (
            "made_models.py:single",
            "must return (model, args), (model, args, kwargs) or (model, kwargs), got Linear",
        ),
        ("made_models.py:many", "got tuple of 4"),
        ("made_models.py:tensor_args", "args must be a tuple, got Tensor"),
        ("made_models.py:bad_kwargs", "kwargs must be a dict, got list"),
        ("made_models.py:no_model", "its model is a int, which can't be called"),
        ("hf:nope", "model_type must be one that transformers knows"),
        ("hf:gone/config.json", "no such file: gone/config.json"),
        ("export:gone.pt2", "no such file: gone.pt2"),
        ("export:made_models.py", "made_models.py isn't a program that torch.export saved"),
    ],
)
def test_a_bad_target_is_one_line_and_exit_2(target, message, explain, factories):
    result = run("explain", target)
    assert result.exit_code == 2
    assert result.stderr.startswith("moefuse: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not result.stdout
    assert not explain.calls


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "x"), "--set must be key=value, got 'x'"),
        (("--set", "foo=1"), "MixtralConfig has no field 'foo'"),
        (("--set", "num_local_experts=many"), "num_local_experts"),
        (("--dtype", "int8"), "--dtype must be a floating point type of torch such as bfloat16, got 'int8'"),
        (("--experts-implementation", "zz"), "zz"),
        (("--mode", "maybe"), "--mode must be one of auto, on, off, got 'maybe'"),
        (("--target", "abacus"), "--target must be one of auto, "),
        (("--layers", "0"), "--layers"),
        (("--device", "cuda:1"), "expected a device type such as cpu, cuda or npu, got 'cuda:1'"),
    ],
)
def test_a_bad_option_is_exit_2(options, message, explain):
    result = run("explain", "hf:mixtral", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not explain.calls


def test_hf_options_need_an_hf_target(explain, factories):
    result = run("explain", "made_models.py:pair", "--layers", "2")
    assert result.exit_code == 2
    assert "need an hf: target" in result.stderr


def test_hf_options_reach_the_builder(explain, monkeypatch):
    asked = {}

    def build(model_type, **options):
        asked.update(options, model_type=model_type)
        return torch.nn.Identity(), {"input": torch.ones(1)}

    monkeypatch.setattr(hf, "build", build)
    settings = ("a=4", "b=true", "c=None", "d=silu", "e=[1, 2]", "f=x=y")
    flags = [flag for setting in settings for flag in ("--set", setting)]
    options = (
        "--layers",
        "3",
        "--dtype",
        "bfloat16",
        "--tokens",
        "7",
        "--experts-implementation",
        "batched_mm",
    )
    assert run("explain", "hf:mixtral", *options, *flags).exit_code == 0
    assert asked == {
        "model_type": "mixtral",
        "layers": 3,
        "dtype": torch.bfloat16,
        "tokens": 7,
        "experts_implementation": "batched_mm",
        "overrides": {"a": 4, "b": True, "c": None, "d": "silu", "e": [1, 2], "f": "x=y"},
    }
    assert list(explain.calls[0][2]) == ["input"]


def test_backend_options_are_passed_on(explain, factories):
    name = targets.names()[0]
    options = ("--mode", "on", "--target", name, "--exclude", "a.*", "--exclude", "b")
    assert run("explain", "made_models.py:pair", *options).exit_code == 0
    assert explain.calls[0][3] == {"mode": "on", "target": name, "exclude": ["a.*", "b"]}
    assert run("explain", "made_models.py:pair", "--device", "npu").exit_code == 0
    assert explain.calls[1][3] == {"meta_device": "npu"}


@pytest.mark.parametrize(("call", "gradients"), [("eval()", False), ("train()", True)])
def test_gradients_follow_the_mode_of_the_model(call, gradients, explain, factories):
    with open(factories, "a") as file:
        file.write(f"model.{call}\n")
    assert run("explain", "made_models.py:pair").exit_code == 0
    assert explain.gradients is gradients
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("sites", "flag", "code"),
    [
        ((FUSED,), True, 0),
        ((FUSED, LOST), True, 3),
        ((), True, 4),
        ((FUSED, LOST), False, 0),
        ((), False, 0),
    ],
)
def test_exit_codes(sites, flag, code, explain, factories):
    explain.report = Report((GraphReport(0, sites),))
    arguments = ["explain", "made_models.py:pair"] + ["--fail-on-unfused"] * flag
    result = run(*arguments)
    assert result.exit_code == code
    assert result.stdout == f"{explain.report}\n"


def test_json_is_the_only_thing_on_stdout(explain, factories):
    explain.report = Report((GraphReport(0, (LOST,)),))
    data = json.loads(run("explain", "made_models.py:pair", "--json").stdout)
    assert data == explain.report.to_dict()


def test_html_is_written_beside_the_report(explain, factories, tmp_path):
    path = tmp_path / "report.html"
    result = run("explain", "made_models.py:pair", "--html", str(path))
    assert result.exit_code == 0
    assert result.stdout == f"{explain.report}\n"
    assert result.stderr == f"written to {path}\n"
    assert "<title>moefuse: 1 of 1 MoE layer fused in 1 graph</title>" in path.read_text()
    failed = run("explain", "made_models.py:pair", "--html", str(tmp_path / "gone" / "r.html"))
    assert failed.exit_code == 1
    assert "--html" in failed.stderr


def test_diff_tells_what_changed_and_exits_5_when_asked(tmp_path):
    for name, sites in (("a", (FUSED, LOST)), ("b", (FUSED,))):
        (tmp_path / f"{name}.json").write_text(Report((GraphReport(0, sites),)).to_json())
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert run("diff", a, b).stdout == "- mlp (graph 2)\n"
    assert run("diff", a, b).exit_code == 0
    assert run("diff", a, b, "--fail-on-change").exit_code == 5
    assert run("diff", a, a, "--fail-on-change").exit_code == 0
    data = json.loads(run("diff", a, b, "--json").stdout)
    assert (data["schema"], data["same"], data["removed"]) == ("moefuse.diff/1", False, ["mlp (graph 2)"])
    missing = run("diff", a, str(tmp_path / "gone.json"))
    assert missing.exit_code == 2
    assert "gone.json" in missing.stderr


def test_schema_prints_a_schema():
    assert json.loads(run("schema", "report").stdout)["$id"] == "moefuse.report/1"
    unknown = run("schema", "nope")
    assert unknown.exit_code == 2
    assert "expected one of" in unknown.stderr


def test_completion_can_be_installed():
    result = run("--show-completion", "bash")
    assert result.exit_code == 0
    assert "_MOEFUSE_COMPLETE" in result.stdout


def test_a_failing_model_is_exit_1_and_debug_shows_the_traceback(factories, monkeypatch):
    def failing(*args, **kwargs):
        raise TypeError("shapes\n don't fit")

    monkeypatch.setattr(moefuse, "explain", failing, raising=False)
    result = run("explain", "made_models.py:pair")
    assert result.exit_code == 1
    assert result.stderr == "moefuse: TypeError: shapes don't fit (--debug shows the traceback)\n"
    assert isinstance(run("explain", "made_models.py:pair", "--debug").exception, TypeError)


def test_dump_asks_for_files_in_the_directory(explain, factories, tmp_path):
    result = run("dump", "made_models.py:pair", str(tmp_path / "out"))
    assert result.exit_code == 0, result.stderr
    assert explain.calls[0][3] == {"dump": str(tmp_path / "out")}
    assert result.stdout == f"{explain.report}\n"
    assert result.stderr == f"written to {tmp_path / 'out'}\n"


def test_dump_refuses_a_file_as_directory(explain, factories):
    result = run("dump", "made_models.py:pair", "made_models.py")
    assert result.exit_code == 2
    assert "DIR must be a directory" in result.stderr
    assert not explain.calls


def test_doctor_prints_and_gives_json():
    printed = run("doctor")
    assert printed.exit_code == 0
    assert f"target {targets.names()[0]}" in printed.stdout
    data = json.loads(run("doctor", "--json").stdout)
    assert data["schema"] == "moefuse.doctor/1"
    assert all(set(finding) == {"name", "ok", "found", "enables"} for finding in data["findings"])


def test_doctor_prints_what_the_ascend_operator_takes():
    assert "| hidden | 1024..8192 by 512 |" in run("doctor", "--ascend").stdout
    assert run("doctor", "--ascend", "--json").exit_code == 2


def test_doctor_says_what_a_missing_thing_would_enable(monkeypatch):
    from moefuse import doctor

    monkeypatch.setattr(doctor, "checkup", lambda: [doctor.Finding("dot", False, "not there", "pictures")])
    lines = run("doctor").stdout.splitlines()
    assert lines[0].split() == ["missing", "dot", "not", "there"]
    assert lines[1].strip() == "would enable: pictures"


def test_version():
    assert run("--version").stdout == f"moefuse {__version__} (torch {torch.__version__})\n"


def test_without_typer_the_error_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import moefuse.cli"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'moefuse[cli]'" in result.stderr


def test_end_to_end_on_a_real_model(tmp_path):
    result = run(
        "dump", "hf:qwen3_moe", str(tmp_path), "--target", "reference", "--json", "--fail-on-unfused"
    )
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["summary"] == {"layers": 2, "fused": 2, "graphs": 1}
    sites = data["graphs"][0]["sites"]
    assert [site["layer"] for site in sites] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert {site["target"] for site in sites} == {"reference"}
    assert json.loads((tmp_path / "report.json").read_text()) == data
    (before,), (after,) = (list(tmp_path.glob(f"graph*.{stage}.txt")) for stage in ("before", "after"))
    assert "moefuse.mega_moe" not in before.read_text()
    assert after.read_text().count("= moefuse.mega_moe") == 2
