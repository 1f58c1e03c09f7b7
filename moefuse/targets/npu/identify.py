"""Which revision of aclnnMegaMoe a library is, from what its package says about itself.

In: a `Library`, and the torch schema of `cann_ops_transformer` where that package is imported. Out: `Identified`, the
revision and the evidence, or `InstallError` with what was found. Sources: the C header (the argument list itself), the
operator information files (inputs and attributes), the torch schema. All that are there must agree.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moefuse.targets.npu.abi import OUTPUTS, REVISIONS, Kind, Signature
from moefuse.targets.npu.library import WORKSPACE, InstallError, Library

_SUFFIXES = re.compile(r"(optional|opt|out)$")
_KINDS = {
    "aclTensor*": Kind.TENSOR,
    "aclTensorList*": Kind.TENSORS,
    "int64_t": Kind.INT,
    "char*": Kind.TEXT,
    "float": Kind.FLOAT,
    "aclFloatArray*": Kind.FLOATS,
}
_TORCH_ONLY = (
    "weight1_type",
    "weight2_type",
    "shared_weight1_type",
    "shared_weight2_type",
    "activation_clamp",
)
_GRAPH_ONLY = ("activation_out_dtype", "transpose_weight1", "transpose_weight2", "weight1_interleave")
"""Names of the torch and of the graph operator that the C function doesn't have. Any other new name is a revision
that isn't known."""
_COMMENTS = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


@dataclass(frozen=True)
class Identified:
    """A revision and the files (or schema) that say so."""

    revision: str
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class _Finding:
    """What one source says: the revisions that it fits (none: an operator that isn't known), and its own words."""

    source: str
    fits: frozenset[str]
    words: str


def identify(
    library: Library, *, schema: str | None = None, environment: Mapping[str, str] = os.environ
) -> Identified:
    """Identify a library.

    Args:
        library: from `find`.
        schema: of `cann_ops_transformer::npu_mega_moe`, if that operator is registered in this process.
        environment: where ASCEND_HOME_PATH stands, against whose compiler the package was built.

    Raises:
        InstallError: nothing tells the revision, sources disagree or fit no known revision, or the package was built
            for another toolkit.
    """
    _demand_same_toolkit(library, environment)
    findings = [*_headers(library), *_info_files(library)]
    if schema is not None:
        findings.append(_schema(schema))
    if not findings:
        raise InstallError(
            f"{library.path} has aclnnMegaMoe, but neither its header (op_api/include) nor its operator information "
            "files are installed: its argument list isn't known. Install the complete package"
        )
    for finding in findings:
        if not finding.fits:
            raise InstallError(
                f"{finding.source} describes an aclnnMegaMoe that moefuse doesn't know ({finding.words}); known are "
                f"{', '.join(REVISIONS)}"
            )
    fits = frozenset.intersection(*(finding.fits for finding in findings))
    if not fits:
        said = "; ".join(f"{finding.source}: {' or '.join(sorted(finding.fits))}" for finding in findings)
        raise InstallError(
            f"the installed parts of aclnnMegaMoe disagree ({said}): reinstall them from one version"
        )
    if len(fits) > 1:
        raise InstallError(
            f"{', '.join(finding.source for finding in findings)}: fits {' and '.join(sorted(fits))}, which are called "
            "differently; install the package's headers"
        )
    return Identified(next(iter(fits)), tuple(finding.source for finding in findings))


def _demand_same_toolkit(library: Library, environment: Mapping[str, str]) -> None:
    home = environment.get("ASCEND_HOME_PATH")
    if library.package is None or not home:
        return
    built = _version(library.package / "version.info", "custom_opp_compiler_version")
    toolkit = _version(Path(home) / "compiler" / "version.info", "Version")
    if built and toolkit and built != toolkit:
        raise InstallError(
            f"{library.package} was built for CANN {built}, the toolkit in {home} is {toolkit}: install the package of "
            "this toolkit's version"
        )


def _version(path: Path, key: str) -> str:
    if not path.is_file():
        return ""
    lines = (line.partition("=") for line in path.read_text(encoding="utf-8").splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "")


# --- sources ---------------------------------------------------------------------------------------------


def _same(name: str) -> str:
    """A name as it compares: topkIds, topk_ids and topkIdsOptional are one."""
    return _SUFFIXES.sub("", name.replace("_", "").lower())


def _headers(library: Library) -> list[_Finding]:
    if library.package is None:
        return []
    files = sorted((library.package / "op_api" / "include").rglob("aclnn_mega_moe.h"))
    return [_header(path) for path in files]


def _header(path: Path) -> _Finding:
    text = _COMMENTS.sub(" ", path.read_text(encoding="utf-8", errors="replace"))
    found = re.search(rf"\b{WORKSPACE}\s*\(([^)]*)\)", text)
    if found is None:
        return _Finding(str(path), frozenset(), f"no {WORKSPACE}")
    parameters = [_parameter(part) for part in found[1].split(",")]
    words = f"{len(parameters)} arguments: {', '.join(name for _, name in parameters)}"
    if [kind for kind, _ in parameters[-2:]] != ["uint64_t*", "aclOpExecutor**"]:
        return _Finding(str(path), frozenset(), words)
    own = [(_KINDS.get(kind), _same(name)) for kind, name in parameters[:-2]]
    return _Finding(str(path), _fitting(lambda sig: [(s.kind, _same(s.name)) for s in sig] == own), words)


def _parameter(text: str) -> tuple[str, str]:
    """(type, name) of a C parameter, without const and with its stars on the type."""
    words = re.sub(r"\bconst\b", " ", text).replace("*", " * ").split()
    stars = "*" * words.count("*")
    plain = [word for word in words if word != "*"]
    return f"{' '.join(plain[:-1])}{stars}", plain[-1] if plain else ""


def _info_files(library: Library) -> list[_Finding]:
    if library.package is None:
        return []
    findings = []
    for path in sorted((library.package / "op_impl").rglob("aic-*-ops-info.json")):
        operator = json.loads(path.read_text(encoding="utf-8")).get("MegaMoe")
        if operator is not None:
            findings.append(_info(path, operator))
    return findings


def _info(path: Path, operator: dict[str, dict[str, str]]) -> _Finding:
    """Inputs in order, and the names of the attributes."""
    numbers = sorted(int(key.removeprefix("input")) for key in operator if re.fullmatch(r"input\d+", key))
    inputs = [_same(operator[f"input{number}"]["name"]) for number in numbers]
    listed = operator.get("attr", {}).get("list", "")
    attributes = {_same(name) for name in listed.split(",") if name} - set(map(_same, _GRAPH_ONLY))

    def fits(signature: Signature) -> bool:
        tensors = [s for s in signature if s.kind in (Kind.TENSOR, Kind.TENSORS) and s.name not in OUTPUTS]
        others = {_same(s.name) for s in signature if s.kind not in (Kind.TENSOR, Kind.TENSORS)}
        return [_same(s.name) for s in tensors] == inputs and others == attributes

    return _Finding(str(path), _fitting(fits), f"inputs {', '.join(inputs)}; attributes {listed}")


def _schema(schema: str) -> _Finding:
    """The torch operator's arguments, whose order is its own: the names alone are compared."""
    arguments = schema.partition("(")[2].rpartition("->")[0].rpartition(")")[0]
    names = {_same(part.split("=")[0].split()[-1]) for part in _split(arguments) if part.strip() != "*"}
    torch_only = set(map(_same, _TORCH_ONLY))

    def fits(signature: Signature) -> bool:
        own = {_same(slot.name) for slot in signature if slot.name not in OUTPUTS}
        return own <= names and names - own <= torch_only

    return _Finding(
        "cann_ops_transformer::npu_mega_moe", _fitting(fits), f"arguments {', '.join(sorted(names))}"
    )


def _split(arguments: str) -> list[str]:
    """The arguments of a schema; `Dict(str, float)?` has a comma of its own."""
    return re.split(r",(?![^()]*\))", arguments)


def _fitting(fits: Callable[[Signature], bool]) -> frozenset[str]:
    return frozenset(name for name, signature in REVISIONS.items() if fits(signature))
