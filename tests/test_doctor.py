import importlib.util
import subprocess
import sys

import pytest
import torch

from moefuse import doctor, targets
from moefuse.policy import Verdict


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_every_finding_says_what_is_there_and_what_for():
    findings = doctor.checkup()
    assert all(finding.name and finding.found and finding.enables for finding in findings)
    names = by_name(findings)
    assert len(names) == len(findings)
    assert torch.__version__ in names["torch"].found
    for name in ("transformers", "C++ compiler", "threads", "transparent huge pages", "CUDA devices"):
        assert name in names
    for name in ("torch_npu", "CANN toolkit", "cann_ops_transformer", "aclnnMegaMoe", "dot"):
        assert name in names
    assert {f"target {name}" for name in targets.names()} <= set(names)
    assert names["target reference"].ok


def test_vendor_packages_are_located_but_never_imported(tmp_path, monkeypatch):
    (tmp_path / "torch_npu.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    finding = by_name(doctor.checkup())["torch_npu"]
    assert finding.ok
    assert finding.found == str(tmp_path / "torch_npu.py")
    assert "torch_npu" not in sys.modules


def test_an_old_torch_is_named(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.1.30")
    finding = by_name(doctor.checkup())["torch"]
    assert not finding.ok
    assert "2.13 only" in finding.found


def test_a_missing_compiler_is_named(monkeypatch):
    from torch._inductor import cpp_builder

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "no-such-compiler")
    finding = by_name(doctor.checkup())["C++ compiler"]
    assert not finding.ok
    assert "no-such-compiler" in finding.found

    def broken(*args, **kwargs):
        raise subprocess.TimeoutExpired("g++", 20)

    monkeypatch.setattr(subprocess, "run", broken)
    assert not by_name(doctor.checkup())["C++ compiler"].ok


@pytest.mark.parametrize(
    ("setting", "ok", "found"),
    [
        ("always [madvise] never", True, "madvise"),
        ("always madvise [never]", False, "never"),
        (None, False, "no such setting on this system"),
    ],
)
def test_huge_pages(setting, ok, found, tmp_path, monkeypatch):
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting)
    monkeypatch.setattr(doctor, "_HUGE_PAGES", file)
    finding = by_name(doctor.checkup())["transparent huge pages"]
    assert (finding.ok, finding.found) == (ok, found)


def test_instruction_sets_come_from_the_cpu(monkeypatch):
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_tile": False})
    names = by_name(doctor.checkup())
    assert names["AVX2"].ok
    assert not names["AMX_TILE"].ok
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"sve": True, "bf16": False, "cores": 4})
    assert by_name(doctor.checkup())["aarch64 features"].found == "sve"


def test_cann_is_found_by_its_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert by_name(doctor.checkup())["CANN toolkit"].ok
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "gone"))
    finding = by_name(doctor.checkup())["CANN toolkit"]
    assert not finding.ok
    assert str(tmp_path / "gone") in finding.found


def test_targets_tell_their_reason_and_a_broken_one_hides_nothing(monkeypatch):
    monkeypatch.setattr(
        targets.get("cpu"), "supported", lambda: Verdict.refuse("compiler", "no compiler here")
    )

    def broken():
        raise RuntimeError("driver lost")

    monkeypatch.setattr(targets.get("reference"), "supported", broken)
    names = by_name(doctor.checkup())
    assert names["target cpu"].found == "compiler: no compiler here"
    assert not names["target cpu"].ok
    assert names["target reference"].found == "its check failed: RuntimeError: driver lost"
