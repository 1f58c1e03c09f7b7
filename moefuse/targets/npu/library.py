"""Which library holds aclnnMegaMoe: torch_npu's own search order, both symbols from one file.

In: the environment variables of an Ascend installation. Out: a `Library`, or `InstallError` that says what to
install or set. Loading a library runs its initialisers, nothing else of it.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

WORKSPACE = "aclnnMegaMoeGetWorkspaceSize"
EXECUTE = "aclnnMegaMoe"
CUSTOM = "libcust_opapi.so"
BUILT_IN = (
    *(
        "libopapi_math.so",
        "libopapi_nn.so",
        "libopapi_cv.so",
        "libopapi_transformer.so",
        "libopapi_legacy.so",
    ),
    "libopapi.so",
)


class InstallError(RuntimeError):
    """The installed packages don't offer a usable aclnnMegaMoe."""


@dataclass(frozen=True)
class Library:
    """The library that torch_npu would call. package: the vendor package's folder, None for the toolkit's own."""

    path: Path
    handle: ctypes.CDLL
    package: Path | None


class _Info(ctypes.Structure):
    """Dl_info of dladdr."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def candidates(environment: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Vendor packages in the order in which torch_npu asks them; folders that hold no library are left out."""
    folders = [Path(entry) for entry in environment.get("ASCEND_CUSTOM_OPP_PATH", "").split(":") if entry]
    if opp := environment.get("ASCEND_OPP_PATH"):
        folders += _listed(Path(opp) / "vendors")
    for folder in folders:
        if (folder / "op_api" / "lib" / CUSTOM).is_file():
            yield folder


def _listed(vendors: Path) -> list[Path]:
    """The packages that `vendors/config.ini` names; one that isn't named isn't asked, whatever lies in its folder."""
    config = vendors / "config.ini"
    if not config.is_file():
        return []
    for line in config.read_text(encoding="utf-8").splitlines():
        if line.startswith("load_priority="):
            names = line.removeprefix("load_priority=").split(",")
            return [vendors / name.strip() for name in names if name.strip()]
    return []


def find(environment: Mapping[str, str] = os.environ) -> Library:
    """The library that both symbols of aclnnMegaMoe resolve to.

    Each symbol is looked up by itself, as torch_npu does it: with two packages installed the first one may have one
    symbol only, and the pair would come from two libraries.

    Raises:
        InstallError: no library has them, one is missing, they come from two libraries, or a library doesn't load.
    """
    asked: list[str] = []
    loaded = list(_loaded(environment, asked))
    first, second = (_first(loaded, symbol) for symbol in (WORKSPACE, EXECUTE))
    where = ", ".join(asked) or "nothing"
    if first is None and second is None:
        raise InstallError(
            f"no library has aclnnMegaMoe (asked: {where}); install the vendor's transformer operator package for this "
            "toolkit, and source its set_env.bash or set ASCEND_CUSTOM_OPP_PATH"
        )
    if first is None or second is None:
        missing, holder = (WORKSPACE, second) if first is None else (EXECUTE, first)
        assert holder is not None
        raise InstallError(
            f"{holder.path} has one symbol of aclnnMegaMoe and nobody has {missing}: reinstall the package"
        )
    origins = [_origin(library, symbol) for library, symbol in ((first, WORKSPACE), (second, EXECUTE))]
    if origins[0] != origins[1]:
        raise InstallError(
            f"{WORKSPACE} is found in {origins[0]} and {EXECUTE} in {origins[1]}: two packages with different "
            "operators; leave one of them in ASCEND_CUSTOM_OPP_PATH and vendors/config.ini"
        )
    return first


def _loaded(environment: Mapping[str, str], asked: list[str]) -> Iterator[Library]:
    for package in candidates(environment):
        path = package / "op_api" / "lib" / CUSTOM
        asked.append(str(path))
        try:
            yield Library(path, ctypes.CDLL(str(path)), package)
        except OSError as error:
            raise InstallError(f"{path} doesn't load: {error}") from error
    for name in BUILT_IN:
        try:
            handle = ctypes.CDLL(name)
        except OSError:
            continue  # one toolkit splits its operators over several libraries, another has all in one
        asked.append(name)
        yield Library(Path(name), handle, None)


def _first(libraries: list[Library], symbol: str) -> Library | None:
    return next((library for library in libraries if hasattr(library.handle, symbol)), None)


def _origin(library: Library, symbol: str) -> Path:
    """The file that a symbol really lies in: a library's dependency may be what provides it."""
    info = _Info()
    address = ctypes.cast(getattr(library.handle, symbol), ctypes.c_void_p)
    process = ctypes.CDLL(None)
    if not process.dladdr(address, ctypes.byref(info)) or info.file is None:
        raise InstallError(f"{symbol} of {library.path} lies in no library")
    return Path(os.fsdecode(info.file)).resolve()
