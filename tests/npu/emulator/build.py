"""Build and load the emulated CANN libraries.

In: what the wheel needs. Out: shared objects under the environment's prefix, built once, loaded before torch_npu is
imported. `runtime/` holds what must behave; every other symbol is a function that returns 0. What torch_npu only
looks up, if it is there, isn't provided: it then takes an older way, or says clearly what is missing.
"""

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from tests.npu.emulator.wheel import Needs, needs

HERE = Path(__file__).parent
FOLDER = Path(sys.prefix) / "emulated_cann"
BASE = "libascendcl.so"
"""Holds all symbols; the others depend on it, since torch_npu looks some acl names up in other libraries."""


def install() -> None:
    """Build what is missing, load it, import torch_npu. Safe to call twice and from several processes.

    Raises RuntimeError where torch was told to load device plug-ins by itself: that import has failed by now.
    """
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        raise RuntimeError("set TORCH_DEVICE_BACKEND_AUTOLOAD=0 before torch is imported")
    os.environ["TASK_QUEUE_ENABLE"] = "0"  # kernels are launched past torch_npu's queue: there must be none
    for path in _built(FOLDER):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    import torch_npu  # noqa: F401

    from tests.npu.emulator import hccl, kernels

    kernels.install(FOLDER / BASE)
    hccl.install(FOLDER / BASE)


def _built(folder: Path) -> list[Path]:
    sources = sorted((*HERE.glob("*.py"), *(HERE / "runtime").glob("*.c*")))
    stamp = folder / "built-for"
    newest = max(path.stat().st_mtime_ns for path in sources)
    wanted = f"torch_npu {metadata.version('torch-npu')}, sources of {newest}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != wanted:
            for old in folder.glob("*.so"):
                old.unlink()
            _build(folder, needs(Path(sysconfig.get_paths()["purelib"])))
            stamp.write_text(wanted)
    return sorted(folder.glob("*.so"), key=lambda path: path.name != BASE)


def _build(folder: Path, need: Needs) -> None:
    if shutil.which("gcc") is None:
        raise RuntimeError("the emulated runtime is built with gcc, which isn't on the path")
    runtime = folder / "runtime.o"
    _gcc("-r", "-nostdlib", *map(str, sorted((HERE / "runtime").glob("*.c"))), "-o", str(runtime))
    engine = folder / "engine.o"
    # torchair is built with libstdc++'s older strings
    _gcc("-D_GLIBCXX_USE_CXX11_ABI=0", "-c", str(HERE / "runtime" / "ge.cpp"), "-o", str(engine))
    behaves = _defined(runtime) | _defined(engine)
    stubs = folder / "stubs.c"
    names = [name for name in need.symbols if name not in behaves]
    stubs.write_text("\n".join(_stub(i, name) for i, name in enumerate(names)) + "\n")
    objects = (str(stubs), str(runtime), str(engine), "-lstdc++")
    _gcc("-shared", f"-Wl,-soname,{BASE}", *objects, "-o", str(folder / BASE))
    empty = folder / "empty.c"
    empty.write_text("")
    for name in need.libraries:
        if name != BASE:
            path = str(folder / name)
            link = ("-Wl,--no-as-needed", f"-L{folder}", f"-l:{BASE}")
            _gcc("-shared", f"-Wl,-soname,{name}", str(empty), *link, "-o", path)


def _stub(number: int, name: str) -> str:
    return f'long stub{number}(void) __asm__("{name}"); long stub{number}(void) {{ return 0; }}'


def _defined(path: Path) -> set[str]:
    command = ("nm", "--defined-only", "--format=posix", str(path))
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[0] for line in lines}


def _gcc(*arguments: str) -> None:
    subprocess.run(("gcc", "-O1", "-fPIC", *arguments), check=True)
