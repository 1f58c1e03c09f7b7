"""What this machine offers to moefuse, and what each missing thing would enable.

In: nothing but the machine. Out: a list of `Finding`, printed by `moefuse doctor`. Nothing is changed:
torch_npu and vendor packages are located, never imported or called.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

_TORCH = "2.13"  # the release whose private interfaces moefuse was tested with, see pyproject.toml
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CANN_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_CANN_DEFAULT = Path("/usr/local/Ascend/ascend-toolkit/latest")
# Keys of torch.cpu.get_capabilities() that kernels look at, in rising order.
_X86 = {
    "avx2": "vectorised float32 kernels",
    "avx512_f": "wider float32 kernels",
    "avx512_bf16": "bfloat16 dot products, no widening to float32",
    "amx_tile": "matrix tiles",
    "amx_bf16": "bfloat16 expert GEMMs on matrix tiles, the fastest CPU path",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    found: what is there, in words, or why it counts as missing.
    enables: what it is good for, so that a missing one can be weighed.
    """

    name: str
    ok: bool
    found: str
    enables: str


def checkup() -> list[Finding]:
    """Look at everything once, from the Python packages down to the targets."""
    return [
        *_packages(),
        _compiler(),
        *_isa(),
        _threads(),
        _huge_pages(),
        _cuda(),
        *_npu(),
        _dot(),
        *_targets(),
    ]


def _packages() -> Iterator[Finding]:
    fits = torch.__version__.startswith(f"{_TORCH}.")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    found = f"{torch.__version__}, {build}" + ("" if fits else f"; moefuse is tested with {_TORCH} only")
    yield Finding("torch", fits, found, "everything")
    for name, enables in (
        ("transformers", "`hf:` targets, models from transformers"),
        ("graphviz", "DOT files of `moefuse dump` (the Python package)"),
    ):
        try:
            yield Finding(name, True, metadata.version(name), enables)
        except metadata.PackageNotFoundError:
            yield Finding(name, False, "not installed", enables)


def _compiler() -> Finding:
    from torch._inductor import cpp_builder, exc

    enables = 'compiled CPU kernels of moefuse and Inductor; without it use `inner="eager"`'
    try:
        program = cpp_builder.get_cpp_compiler()
        lines = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=True, timeout=20
        ).stdout.splitlines()
    except (exc.InvalidCxxCompiler, OSError, subprocess.SubprocessError) as error:
        return Finding("C++ compiler", False, f"none that works: {_first_line(error)}", enables)
    return Finding("C++ compiler", True, f"{program}: {lines[0] if lines else 'no version'}", enables)


def _isa() -> Iterator[Finding]:
    capabilities = torch.cpu.get_capabilities()
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        flags = [name for name, value in capabilities.items() if value is True]
        yield Finding(
            f"{machine} features", bool(flags), ", ".join(flags) or "none", "vectorised CPU kernels"
        )
        return
    for name, enables in _X86.items():
        has = bool(capabilities.get(name))
        yield Finding(name.upper(), has, "yes" if has else "not on this CPU", enables)


def _threads() -> Finding:
    threads = torch.get_num_threads()
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"{threads} torch threads on {cpus} CPUs"
    if threads > cpus:
        found += "; more threads than CPUs slow every kernel down, set OMP_NUM_THREADS"
    return Finding("threads", threads <= cpus, found, "parallel experts and tokens in CPU kernels")


def _huge_pages() -> Finding:
    enables = "fewer TLB misses while expert weights stream from memory"
    try:
        text = _HUGE_PAGES.read_text(encoding="utf-8")
    except OSError:
        return Finding("transparent huge pages", False, "no such setting on this system", enables)
    setting = text.partition("[")[2].partition("]")[0]
    return Finding("transparent huge pages", setting in ("always", "madvise"), setting, enables)


def _cuda() -> Finding:
    enables = 'layers on CUDA devices, so far with target="reference" alone'
    if torch.version.cuda is None and torch.version.hip is None:
        return Finding("CUDA devices", False, "this torch is built without CUDA", enables)
    if not torch.cuda.is_available():
        return Finding("CUDA devices", False, "no usable device or driver", enables)
    devices = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        devices.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})")
    return Finding("CUDA devices", True, ", ".join(devices), enables)


def _npu() -> Iterator[Finding]:
    yield _located("torch_npu", "Ascend NPUs as torch devices")
    home = next((os.environ[name] for name in _CANN_HOMES if os.environ.get(name)), str(_CANN_DEFAULT))
    there = Path(home).is_dir()
    found = home if there else f"{home} doesn't exist; source the toolkit's set_env.sh"
    yield Finding("CANN toolkit", there, found, "the npu target's operators")
    yield _located("cann_ops_transformer", "aclnnMegaMoe as a torch operator (vendor op package)")
    yield _aclnn()


def _aclnn() -> Finding:
    """The vendor's operator and its revision. Its library is loaded, nothing of it is called."""
    from moefuse.targets import npu

    enables = "one fused operator per layer on Ascend"
    try:
        library = npu.find()
        identified = npu.identify(library)
    except npu.InstallError as error:
        return Finding("aclnnMegaMoe", False, str(error), enables)
    return Finding("aclnnMegaMoe", True, f"{identified.revision}, {library.path}", enables)


def _located(package: str, enables: str) -> Finding:
    """Where a package lies, without running any of it."""
    spec = importlib.util.find_spec(package)
    found = (spec.origin or "namespace package") if spec else "not installed"
    return Finding(package, spec is not None, found, enables)


def _dot() -> Finding:
    path = shutil.which("dot")
    found = path or "not on PATH; install the system package graphviz"
    return Finding("dot", path is not None, found, "SVG pictures of `moefuse dump`")


def _targets() -> Iterator[Finding]:
    from moefuse import targets

    for name in targets.names():
        enables = f'mega_moe kernels for options={{"target": "{name}"}}'
        try:
            verdict = targets.get(name).supported()
        except Exception as error:  # a broken target must not hide the other findings
            found = f"its check failed: {type(error).__name__}: {_first_line(error)}"
            yield Finding(f"target {name}", False, found, enables)
            continue
        found = "ready" if verdict.ok else f"{verdict.check}: {verdict.reason}"
        yield Finding(f"target {name}", verdict.ok, found, enables)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
