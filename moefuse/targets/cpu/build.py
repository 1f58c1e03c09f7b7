"""The C++ kernel, and small sources that include its headers, as loaded libraries: built at first use, then cached.

In: an `Isa`, and for the kernel a dtype: one library each, of which a model needs one. Out: a `ctypes.CDLL`. The file
in the cache is named after everything that went into it: sources, flags, compiler, torch. Processes that need the same
one wait for each other; a half-written file is never seen.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from moefuse.targets.cpu.isa import Isa

SOURCES = Path(__file__).parent / "native"
CACHE_VARIABLE = "MOEFUSE_CACHE_DIR"
# -O2: the loops that matter say themselves how far they are unrolled; -O3 gains nothing and takes a fifth longer.
# -fno-math-errno and no trapping: nothing reads either. Not -ffast-math: NaN and infinity must stay what they are.
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-w")
TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
"""Of the kernel in C++, by dtype."""
UNITS = ("gemm", "run", "exchange")
_TIMEOUT = 300

Compile = Callable[[Path, str, Sequence[str]], None]
"""Makes the library at a path with a compiler and flags."""


class BuildError(Exception):
    """The kernel can't be built here; the text says why."""


def library(isa: Isa, dtype: torch.dtype) -> ctypes.CDLL:
    """The kernel for `isa` and one of TYPES, out of the cache or built now. Raises BuildError."""
    name = TYPES[dtype]

    def compile_kernel(path: Path, compiler: str, flags: Sequence[str]) -> None:
        compile_into(path, compiler, flags, dtype)

    what = f"the CPU kernel of {str(dtype).removeprefix('torch.')}"
    return _cached(isa, f"moefuse-{name}", what, "", compile_kernel)


def small_library(isa: Isa, name: str, what: str, source: str) -> ctypes.CDLL:
    """One source text, which may include the kernel's headers. `what` is said while it is built. Raises BuildError."""

    def compile_text(path: Path, compiler: str, flags: Sequence[str]) -> None:
        text = path.with_suffix(".cpp")
        text.write_text(source, encoding="utf-8")
        _call([compiler, *flags, f"-I{SOURCES}", "-shared", str(text), "-o", str(path)])

    return _cached(isa, name, what, source, compile_text)


def _cached(isa: Isa, name: str, what: str, source: str, compile_to: Compile) -> ctypes.CDLL:
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler: $CXX is not set, and g++, c++ and clang++ are not on the path")
    path = cache_dir() / f"{name}-{isa.name}-{_key(isa, compiler, source)}.so"
    if not path.exists():
        with _locked(path.with_suffix(".lock")):
            if not path.exists():  # another process may have built it while this one waited
                _build(isa, compiler, path, what, compile_to)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} can't be loaded: {error}") from None


def find_compiler() -> str | None:
    """$CXX, or the first of g++, c++ and clang++ on the path."""
    names = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def cache_dir() -> Path:
    """Where built kernels are kept: $MOEFUSE_CACHE_DIR, or moefuse/ in the user's cache, or a folder in /tmp.

    Raises BuildError when none of them can be written, or when the last belongs to someone else.
    """
    named = os.environ.get(CACHE_VARIABLE)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    places = (
        [Path(named)] if named else [Path(home) / "moefuse", Path(tempfile.gettempdir()) / f"moefuse-{user}"]
    )
    for place in places:
        with contextlib.suppress(OSError):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            owned = not hasattr(os, "getuid") or place.stat().st_uid == os.getuid()
            if owned and os.access(place, os.W_OK):
                return place
    raise BuildError(
        f"no folder for built kernels: tried {', '.join(map(str, places))}; set {CACHE_VARIABLE}"
    )


def _key(isa: Isa, compiler: str, source: str) -> str:
    status = os.stat(compiler)
    parts = [
        torch.__version__,
        *FLAGS,
        *isa.flags,
        os.path.realpath(compiler),
        f"{status.st_size} {status.st_mtime_ns}",
        source,
    ]
    digest = hashlib.sha256("\n".join(parts).encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _build(isa: Isa, compiler: str, path: Path, what: str, compile_to: Compile) -> None:
    start = time.perf_counter()
    print(f"moefuse: building {what} for {isa.name}, once ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compile_to(Path(folder) / path.name, compiler, (*FLAGS, *isa.flags))
        os.replace(Path(folder) / path.name, path)
    print(f"moefuse: built in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def compile_into(library: Path, compiler: str, flags: Sequence[str], dtype: torch.dtype) -> None:
    """Compile the sources, one process for each side by side, and link them. Raises BuildError."""
    objects = [str(library.with_name(f"{unit}.o")) for unit in UNITS]
    flags = (*flags, f"-DMOEFUSE_TYPE={TYPES[dtype]}")
    commands = [
        [compiler, *flags, "-c", str(SOURCES / f"{unit}.cpp"), "-o", to]
        for unit, to in zip(UNITS, objects, strict=True)
    ]
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(_call, commands))
    _call([compiler, *flags, "-shared", *objects, "-o", str(library)])


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{command[0]} failed: {error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0] if lines else f'exit status {done.returncode}'}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock; released by the system if this process dies."""
    try:
        import fcntl
    except ImportError:  # no such locks here: two processes may build the same file, the last one stays
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
