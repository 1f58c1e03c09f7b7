"""Calling the fakes: each value in its own slot, handles destroyed, errors in words; random plans under ASan."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moefuse.targets.npu import REVISIONS, CallError, Kind, MegaMoe, Plan, PlanError, find
from moefuse.targets.npu.abi import DEFAULTS, REQUIRED
from moefuse.targets.npu.call import Buffer, Handles, meaning
from moefuse.targets.npu.plan import FLT_MAX
from tests.targets.npu.vendor import PROTOTYPES, RUNTIME, build, package, parameters, plain_name

KNOWN = [name for name in PROTOTYPES if name != "foreign"]


def buffer(address: int) -> Buffer:
    return Buffer(address, (4, 2), (2, 1), 27, *((29, (1, 1, 16, 16)) if address % 2 else ()))


def full(revision: str, start: int = 1000) -> dict[str, Any]:
    """A different value for every argument of a revision."""
    values: dict[str, Any] = {}
    for number, slot in enumerate(REVISIONS[revision], start):
        match slot.kind:
            case Kind.TENSOR:
                values[slot.name] = buffer(number)
            case Kind.TENSORS:
                values[slot.name] = [buffer(number), buffer(number + 5000)]
            case Kind.INT:
                values[slot.name] = number
            case Kind.TEXT:
                values[slot.name] = f"text{number}"
            case Kind.FLOAT | Kind.FLOATS:
                values["activation_params"] = [number + 0.5]
    return values


def shown(value: Any) -> str:
    """How the fake notes a value."""
    if isinstance(value, Buffer):
        axes = "".join(f":{size}/{stride}" for size, stride in zip(value.shape, value.strides, strict=True))
        storage = "".join(f":{size}" for size in value.storage or value.shape)
        return f"{value.address}:{value.dtype}:{value.format}{axes}{storage}+0"
    if isinstance(value, list):
        return ",".join(shown(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def notes(library: ctypes.CDLL) -> dict[str, str]:
    library.noted_call.restype = ctypes.c_char_p
    return dict(line.split("=", 1) for line in library.noted_call().decode().splitlines())


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(build(RUNTIME, tmp_path_factory.mktemp("runtime") / "libfake_acl.so")))


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("vendors")
    made = {revision: package(folder / revision, PROTOTYPES[revision]) for revision in KNOWN}
    return {name: find({"ASCEND_CUSTOM_OPP_PATH": str(one.folder)}) for name, one in made.items()}


def live(runtime: ctypes.CDLL) -> int:
    return ctypes.c_int.in_dll(runtime, "live_handles").value


@pytest.mark.parametrize("revision", KNOWN)
def test_every_value_arrives_in_its_own_slot(
    revision: str, fakes: dict[str, Any], runtime: ctypes.CDLL
) -> None:
    asked: list[int] = []
    call = MegaMoe(fakes[revision], revision, runtime, lambda size: asked.append(size) or 0x4000)
    values = full(revision)
    call(values, stream=77)
    noted = notes(fakes[revision].handle)
    for _, name in parameters(PROTOTYPES[revision]):
        plain = plain_name(name)
        wanted = values["activation_params" if plain == "activation_clamp" else plain]
        assert noted[name] == shown(wanted), name
    assert (noted["workspace"], noted["size"], noted["stream"]) == (str(0x4000), "64", "77")
    assert asked == [64]
    assert live(runtime) == 0


@pytest.mark.parametrize("revision", KNOWN)
def test_what_is_left_out_is_null_or_the_default(
    revision: str, fakes: dict[str, Any], runtime: ctypes.CDLL
) -> None:
    values = {name: value for name, value in full(revision).items() if name in REQUIRED}
    values["activation"] = "swiglu"
    if revision == "R0":
        del values["activation"]
    MegaMoe(fakes[revision], revision, runtime, lambda size: 1)(values, stream=0)
    noted = notes(fakes[revision].handle)
    for slot in REVISIONS[revision]:
        if slot.name in values:
            continue
        name = next(name for name in noted if plain_name(name) == slot.name)
        if slot.kind in (Kind.TENSOR, Kind.TENSORS):
            assert noted[name] == "null"
        elif slot.kind in (Kind.FLOAT, Kind.FLOATS):
            assert float(noted[name]) == pytest.approx(FLT_MAX, rel=1e-5)
        else:
            assert noted[name] == str(DEFAULTS[slot.name])
    assert live(runtime) == 0


def test_a_workspace_for_each_call(fakes: dict[str, Any], runtime: ctypes.CDLL) -> None:
    library, asked = fakes["R1"], []
    size = ctypes.c_uint64.in_dll(library.handle, "next_size")
    call = MegaMoe(library, "R1", runtime, lambda size: asked.append(size) or 0x1000 * len(asked))
    for wanted, address in ((64, 0x1000), (32, 0x2000), (0, 0), (65, 0x3000)):
        size.value = wanted
        call(full("R1"), stream=0)
        assert notes(library.handle)["workspace"] == str(address)
    size.value = 64
    assert asked == [64, 32, 65]


@pytest.mark.parametrize("stage", ["next_status", "execute_status"])
def test_a_refusal_says_stage_code_and_meaning(
    stage: str, fakes: dict[str, Any], runtime: ctypes.CDLL
) -> None:
    library = fakes["R6"]
    status = ctypes.c_int.in_dll(library.handle, stage)
    status.value = 161002
    try:
        with pytest.raises(
            CallError, match=r"R6 failed: error 161002, an argument is.*EZ0001: said the runtime$"
        ):
            MegaMoe(library, "R6", runtime, lambda size: 1)(full("R6"), stream=0)
    finally:
        status.value = 0
    assert live(runtime) == 0


def test_codes_in_words() -> None:
    assert "required argument is null" in meaning(161001)
    assert "kernels may not be installed" in meaning(561103)
    assert meaning(42) == "error 42"


def make_some(runtime: ctypes.CDLL) -> None:
    with Handles(runtime) as handles:
        handles.tensor(buffer(1))
        handles.tensors([buffer(2), buffer(3)])
        handles.floats([1.0])


@pytest.mark.parametrize("after", range(5))
def test_a_handle_that_can_not_be_made_leaves_none_behind(after: int, runtime: ctypes.CDLL) -> None:
    runtime.refuse_handles_after(after)
    try:
        with pytest.raises(CallError, match="returned null"):
            make_some(runtime)
    finally:
        runtime.refuse_handles_after(-1)
    assert live(runtime) == 0


# --- plans ------------------------------------------------------------------------------------------------

REFUSED = {
    "a missing tensor": ("R1", {"x": None}, "x: expected a value for aclnnMegaMoe R1, got None"),
    "a missing number": ("R1", {"ep_world_size": None}, "ep_world_size: expected a value"),
    "an unknown name": ("R1", {"expert_bias": 1}, "expert_bias: aclnnMegaMoe R1 has no such argument, got 1"),
    "a bias before there were any": ("R0", {"bias1": [buffer(1)]}, "bias1: aclnnMegaMoe R0 has no such"),
    "an activation before there were any": (
        "R0",
        {"activation": "situglu"},
        "activation: aclnnMegaMoe R0 has",
    ),
    "shared experts too early": (
        "R1",
        {"shared_weight1": [buffer(1)]},
        "shared_weight1: aclnnMegaMoe R1 has",
    ),
    "another weight type too early": (
        "R4",
        {"topk_weights_type": 1},
        "topk_weights_type: aclnnMegaMoe R4 has",
    ),
    "a list of numbers where one fits": (
        "R4",
        {"activation_params": [1.0, 2.0]},
        "activation_params: aclnnMegaMoe R4",
    ),
    "a clamp where none fits": (
        "R0",
        {"activation_params": [7.0]},
        "activation_params: aclnnMegaMoe R0 can't",
    ),
    "texts as numbers": ("R6", {"activation_params": ["7"]}, "activation_params: expected numbers"),
    "a tensor for a list": ("R1", {"weight1": buffer(1)}, "weight1: expected a list of at least one tensor"),
    "an empty list": ("R1", {"weight1": []}, "weight1: expected a list of at least one tensor"),
    "a truth value": ("R1", {"ep_world_size": True}, "ep_world_size: expected int, got True"),
    "a float": ("R1", {"ep_world_size": 8.0}, "ep_world_size: expected int, got 8.0"),
    "a number too large": ("R1", {"ccl_buffer_size": 2**63}, "ccl_buffer_size: expected a 64-bit integer"),
    "a text with a zero": ("R1", {"comm_alg": "a\0b"}, "comm_alg: expected a text without zero bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_make_no_call(case: str, runtime: ctypes.CDLL) -> None:
    revision, change, words = REFUSED[case]
    values = full(revision)
    if revision == "R0":
        values.pop("activation_params", None)
    with pytest.raises(PlanError) as caught, Handles(runtime) as handles:
        Plan(revision).arguments(values | change, handles.makers)
    assert words in str(caught.value)
    assert live(runtime) == 0


def test_defaults_may_be_given_to_every_revision(runtime: ctypes.CDLL) -> None:
    with Handles(runtime) as handles:
        Plan("R0").arguments(
            full("R0") | {"activation": "swiglu", "topo_type": 0, "bias1": None, "topk_weights_type": 0},
            handles.makers,
        )


def test_an_unknown_revision() -> None:
    with pytest.raises(PlanError, match=r"revision: expected one of \['R0', .*'R8'\], got 'R9'"):
        Plan("R9")


# --- random plans under ASan --------------------------------------------------------------------------------


def test_random_plans_under_asan(tmp_path: Path) -> None:
    asan = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    preload = asan.stdout.strip()
    if shutil.which("gcc") is None or not Path(preload).is_absolute():
        pytest.skip("gcc has no libasan here")
    runtime = build(RUNTIME, tmp_path / "libfake_acl.so", "-fsanitize=address", "-g")
    for revision in KNOWN:
        made = package(tmp_path / revision, PROTOTYPES[revision])
        build(made.library.with_suffix(".c").read_text(), made.library, "-fsanitize=address", "-g")
    environment = {**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.targets.npu.fuzz_plans", str(runtime), str(tmp_path)],
        check=False,
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "no slot differs", run.stderr[-3000:]
