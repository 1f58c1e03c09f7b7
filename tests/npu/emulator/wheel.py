"""What the torch_npu wheel needs from CANN: libraries and symbols that neither it, torch nor the system has.

In: the site-packages folder. Out: `needs(site)`. Read from the shared objects, so that another wheel gets its own
list.
"""

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Needs:
    """libraries: the names torch_npu links against and nobody has; symbols: the names it expects in them."""

    libraries: tuple[str, ...]
    symbols: tuple[str, ...]


def needs(site: Path) -> Needs:
    """Collect the gaps. Raises FileNotFoundError without the wheel."""
    wheel = sorted((site / "torch_npu").rglob("*.so*"))
    if not wheel:
        raise FileNotFoundError(f"{site / 'torch_npu'}: no shared objects; is torch-npu installed?")
    torch = sorted((site / "torch" / "lib").glob("*.so*"))
    wanted = set[str]().union(*(_symbols(path, "--undefined-only", "U") for path in wheel))
    defined = set[str]().union(*(_symbols(path, "--defined-only", "") for path in (*wheel, *torch)))
    process = ctypes.CDLL(None)  # Python's own symbols and the C library's
    symbols = sorted(name for name in wanted - defined if not hasattr(process, name))
    shipped = {path.name for path in (*wheel, *torch)}
    linked = set[str]().union(*(_linked(path) for path in wheel)) - shipped
    return Needs(tuple(sorted(name for name in linked if not _loads(name))), tuple(symbols))


def _symbols(path: Path, which: str, kind: str) -> set[str]:
    """Dynamic symbols of a shared object. Versioned ones (`memcpy@GLIBC_..`) are the system's: left out."""
    lines = _run("nm", "-D", "--format=posix", which, str(path)).splitlines()
    fields = [line.split() for line in lines if line]
    if kind:
        return {name for name, found, *_ in fields if found == kind and "@" not in name}
    return {name.partition("@")[0] for name, *_ in fields}


def _linked(path: Path) -> set[str]:
    lines = _run("readelf", "-d", str(path)).splitlines()
    return {line.partition("[")[2].rstrip("]") for line in lines if "(NEEDED)" in line}


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
