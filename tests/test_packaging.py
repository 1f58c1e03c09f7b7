"""What is installed: the wheel's content, the entry points, and what `import moefuse` pulls in."""

import configparser
import importlib.metadata
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Optional, heavy or vendor packages. `import moefuse` must work, and be quick, without any of them.
LAZY = (
    "transformers",
    "triton",
    "rich",
    "typer",
    "graphviz",
    "jinja2",
    "matplotlib",
    "torch_npu",
    "torchair",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy: a build inside the checkout would pick up and leave `build/`."""
    tree = tmp_path_factory.mktemp("checkout") / "moefuse"
    out = tmp_path_factory.mktemp("dist")
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "out")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=unwanted)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", out, tree], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile):
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]

    wanted = {
        str(path.relative_to(ROOT))
        for pattern in (
            "*.py",
            "py.typed",
            "policy/*.toml",
            "report/*.[jcm]*",
            "schemas/*.json",
            "simulate/*.json",
            "bench/*.cpp",
            "targets/**/*.cpp",
            "targets/**/*.h",
        )
        for path in (ROOT / "moefuse").rglob(pattern)
    }
    assert len(names) == len(set(names))
    assert set(names) == wanted
    assert "moefuse/py.typed" in names


def test_wheel_registers_the_backend_once(wheel: zipfile.ZipFile):
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    points = configparser.ConfigParser()
    points.read_string(wheel.read(name).decode())

    assert {group: dict(points[group]) for group in points.sections()} == {
        "torch_dynamo_backends": {"moefuse": "moefuse.backend:moefuse"},
        "console_scripts": {"moefuse": "moefuse.cli:main"},
    }


def test_backend_is_found_by_name_without_an_import():
    found = importlib.metadata.entry_points(group="torch_dynamo_backends", name="moefuse")
    assert len(found) == 1

    seen = run_python("import json, torch; print(json.dumps(torch._dynamo.list_backends()))")
    assert seen.count("moefuse") == 1


def test_import_pulls_in_nothing_optional():
    code = f"import json, sys, moefuse; print(json.dumps([m for m in {LAZY!r} if m in sys.modules]))"
    assert run_python(code) == []


def test_version_is_the_installed_one():
    code = "import json, moefuse; print(json.dumps(moefuse.__version__))"
    assert run_python(code) == importlib.metadata.version("moefuse")


@pytest.mark.parametrize("cwd", [ROOT, Path("/")], ids=["repository root", "elsewhere"])
def test_backend_compiles_from_any_folder(cwd: Path):
    """In the root the links `passes` and `patterns` are importable by accident: nothing may use them."""
    code = """
import json, sys, torch
f = torch.compile(torch.nn.Linear(2, 2), backend="moefuse", options={"inner": "eager"})
f(torch.ones(1, 2))
print(json.dumps([m for m in sys.modules if m.split(".")[0] in ("passes", "patterns")]))
"""
    assert run_python(code, cwd) == []


def run_python(code: str, cwd: Path = ROOT):
    """The JSON value that `code` prints last, run in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
