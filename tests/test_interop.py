"""Beside the rest of PyTorch: AOTInductor, exported programs, stances, and TORCH_LOGS."""

import os
import subprocess
import sys
from pathlib import Path

import torch

import moefuse
from tests.report.models import H, model

ROOT = Path(__file__).resolve().parents[1]


def test_aot_inductor_packages_a_fused_program(tmp_path):
    """The node is called through the dispatcher, so the program that loads the package has to import moefuse."""
    module, x = model("sum").requires_grad_(False), torch.randn(6, H)
    fused = moefuse.fuse(torch.export.export(module, (x,)))
    assert fused.report.fused == 1
    program = torch.export.export(fused.graph_module, (x,))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "moe.pt2"))
    (got,) = torch._inductor.aoti_load_package(package)(x)
    torch.testing.assert_close(got, module(x), rtol=1e-5, atol=1e-5)


def test_a_fused_program_is_exported_saved_and_loaded(tmp_path):
    module, x = model("sum").requires_grad_(False), torch.randn(6, H)
    rows = {0: torch.export.Dim("rows", min=2)}
    fused = moefuse.fuse(torch.export.export(module, (x,), dynamic_shapes=(rows,)))
    torch.export.save(
        torch.export.export(fused.graph_module, (x,), dynamic_shapes=(rows,)), tmp_path / "p.pt2"
    )
    loaded = torch.export.load(tmp_path / "p.pt2")
    assert sum("mega_moe" in str(node.target) for node in loaded.graph.nodes) == 1
    other = torch.randn(9, H)
    (got,) = loaded.module()(other)
    torch.testing.assert_close(got, module(other), rtol=1e-5, atol=1e-5)


def test_stances_are_obeyed():
    module, x = model("sum").requires_grad_(False), torch.randn(6, H)
    run = torch.compile(module, backend="moefuse", options={"inner": "eager"})
    before = len(moefuse.reports())
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(run(x), module(x))
    assert len(moefuse.reports()) == before
    run(x)
    assert len(moefuse.reports()) == before + 1
    with torch.compiler.set_stance("eager_on_recompile"):
        run(torch.randn(9, H, dtype=torch.float32))
    assert len(moefuse.reports()) == before + 1


def logged(setting: str) -> str:
    code = (
        "import torch; from tests.report.models import H, model\n"
        "with torch.no_grad():\n"
        "    torch.compile(model('sum', 'mean'), backend='moefuse', options={'inner': 'eager'})(torch.randn(6, H))\n"
    )
    environment = os.environ | {"TORCH_LOGS": setting, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stderr


def test_torch_logs_shows_verdicts_and_graphs():
    plain = logged("moefuse")
    assert "fused 0 (4 experts" in plain
    assert "not fused: 1: `mean`: expert rows are reduced by mean" in plain
    assert "= aten.bmm" not in plain
    full = logged("+moefuse")
    assert "before:" in full
    assert full.count("= moefuse.mega_moe.default(") == 1
    assert "= aten.topk.default(" in full
