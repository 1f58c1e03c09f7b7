"""The C++ kernel: as exact as torch on every instruction set, the same bits for any number of threads, clear limits."""

import ctypes
import hashlib
import platform
import re
import subprocess
import sys
import threading
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings

from moefuse import targets
from moefuse.ops.activations import ACTIVATIONS, CUSTOM
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.targets.cpu import build, huge_pages, isa, kernel, torch_kernel
from moefuse.targets.cpu.binding import BINDING
from tests.ops.moe_loop import GATED, PLAIN, Layer, layers, make_layer

ISAS = [each.name for each in isa.available()]
# AMX without AMX: the tile instructions are emulated (emulated_tiles.h), everything around them is the real code.
TILES = Path(__file__).with_name("emulated_tiles.h")
EMULATED = isa.Isa(
    "amx_emulated",
    (),
    (
        *isa.AMX_FLAGS,
        f'-DMOEFUSE_EMULATED_TILES="{TILES}"',
        f"-DTILES_TEXT={hashlib.sha256(TILES.read_bytes()).hexdigest()}",  # so that an edit means a new build
    ),
)
EVERY = ISAS + ([EMULATED.name] if "avx512_bf16" in ISAS else [])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What each takes part in: every form of the GEMM, full and cut tiles, blocks of k, of tokens and of features.
SHAPES = [
    {"tokens": 1, "experts": 4, "hidden": 100, "inner": 70, "out": 90},
    {"tokens": 1, "experts": 3, "hidden": 67, "inner": 300, "out": 8300},
    {"tokens": 7, "experts": 4, "hidden": 2210, "inner": 50, "out": 50},
    {"tokens": 9, "experts": 2, "hidden": 65, "inner": 500, "out": 30},
    {"tokens": 40, "experts": 3, "hidden": 130, "inner": 100, "out": 300},
    {"tokens": 300, "experts": 3, "hidden": 1100, "inner": 97, "out": 50},
    {"tokens": 420, "experts": 2, "hidden": 65, "inner": 1030, "out": 49},
]


@cache
def library(name: str, dtype: torch.dtype) -> ctypes.CDLL:
    (chosen,) = (each for each in (*isa.ISAS, EMULATED) if each.name == name)
    loaded = kernel._open(chosen, dtype)
    assert not isinstance(loaded, str), loaded
    return loaded


def run(name: str, operands: Operands, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    return kernel.run(library(name, operands.x.dtype), operands, options)


def arguments(layer: Layer) -> tuple:
    """Of a call that the kernel takes."""
    args = (Operands(*layer.args[1:]), Options(**layer.kwargs))
    assert kernel.supports(*args) == ""
    return args


def exact(layer: Layer) -> torch.Tensor:
    """The layer in float64."""
    x, ids, weights, *lists = layer.args[1:8]
    lists = [[tensor.double() for tensor in tensors] for tensors in lists]
    scales = [scale.double() for scale in layer.args[8:]]
    options = Options(**layer.kwargs)._replace(output_dtype=torch.float64, product_dtype=None)
    operands = Operands(x.double(), ids, weights.double(), *lists, *scales)
    return targets.get("reference").run(None, operands, options)[0]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['tokens']} tokens")
def test_as_exact_as_torch_operators(name, shape) -> None:
    for dtype in DTYPES:
        for transposed in ((True, True), (False, False)):
            for gate_up in ("concat", "interleaved_swapped", "separate"):
                layer = make_layer(
                    1,
                    **shape,
                    dtype=dtype,
                    transposed=transposed,
                    gate_up=gate_up,
                    bias=(True, True),
                    ids="wild",
                )
                args, want = arguments(layer), exact(layer)
                error = (run(name, *args)[0].double() - want).norm()
                torch_error = (torch_kernel.run(*args)[0].double() - want).norm()
                # Roundings to the dtype are the same ones; float32 sums over k have their own order, which at one
                # token is a matter of chance.
                assert error <= 1.5 * torch_error, (dtype, transposed, gate_up)


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("norm", [("none", 0.0), ("rms", 1e-5), ("scaled_rms", 1e-5)], ids=str)
@pytest.mark.parametrize("scale", ["none", "shared", "own"])
@pytest.mark.parametrize("position", ["output", "mid"])
def test_row_norms_and_identity_experts_are_as_exact(name, norm, scale, position) -> None:
    if norm[0] == "none" and scale != "none":
        pytest.skip("a scale needs a norm")
    for dtype in DTYPES:
        for rounds in (False, True):
            layer = make_layer(
                1, tokens=40, top_k=3, hidden=100, out=100, inner=30, dtype=dtype, identities=2, norm=norm,
                scale=scale, ids="wild", position=position,
            )  # fmt: skip
            layer.kwargs["product_dtype"] = dtype if rounds else None
            args, want = arguments(layer), exact(layer)
            error = (run(name, *args)[0].double() - want).norm()
            torch_error = (torch_kernel.run(*args)[0].double() - want).norm()
            assert error <= 1.5 * torch_error, (dtype, rounds)


@pytest.mark.parametrize("name", EVERY[1:])  # the first one runs under the operator's own tests
@settings(max_examples=60)
@given(layer=layers(DTYPES))
def test_any_layer(name: str, layer: Layer) -> None:
    assume(not kernel.supports(Operands(*layer.args[1:]), Options(**layer.kwargs)))
    y, nums = run(name, *arguments(layer))
    want, counts = layer.loop()
    assert nums.tolist() == counts
    dtypes = (layer.x.dtype, layer.kwargs["output_dtype"] or layer.x.dtype)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    scale = 1 + want.abs().max().item() if want.numel() else 1
    torch.testing.assert_close(y.double(), want, rtol=0, atol=32 * eps * scale)  # as in test_mega_moe.py


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("activation", [*GATED, *PLAIN], ids=str)
@pytest.mark.parametrize("activation_dtype", [None, torch.float32])
def test_activations_are_rounded_as_the_model_rounds_them(name, activation, activation_dtype) -> None:
    """Products with 1 are exact, so that the activation's own roundings are what is left to compare."""
    gated = activation in GATED
    g = torch.randn(200, 1).bfloat16()
    w1 = torch.ones(1, 2 if gated else 1, 1).bfloat16()
    options = Options(
        1, gate_up="concat" if gated else "none", activation=activation[0], activation_params=activation[1],
        activation_dtype=activation_dtype,
    )  # fmt: skip
    operands = Operands(g, torch.zeros(200, 1, dtype=torch.int32), torch.ones(200, 1), [w1], [w1[:, :1]])
    got, _ = run(name, operands, options)
    want, _ = torch_kernel.run(operands, options)
    # the last bit of exp decides now and then
    assert (got != want).float().mean() <= 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [(True, True), (False, False)])
@pytest.mark.parametrize("tokens", [1, 6, 90])
@pytest.mark.parametrize("name", [*ISAS[:1], *EVERY[len(ISAS) :]])
def test_the_same_bits_for_any_number_of_threads(dtype, transposed, tokens, name) -> None:
    layer = make_layer(
        3, tokens=tokens, experts=3, hidden=1150, inner=1150, out=1150, dtype=dtype, transposed=transposed,
        norm=("rms", 1e-5), scale="own", identities=1,
    )  # fmt: skip
    layer.args[2][:60, 0] = 0  # one expert has most of the work
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(run(name, *arguments(layer))[0])
    finally:
        torch.set_num_threads(before)
    assert results[0].abs().sum() > 0
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_several_python_threads_at_once() -> None:
    work = [make_layer(seed, tokens=20 + seed, hidden=64, inner=48, out=64) for seed in range(4)]
    want = [run(ISAS[0], *arguments(layer))[0] for layer in work]
    same = [True] * len(work)

    def repeat(i: int) -> None:
        for _ in range(30):
            same[i] &= torch.equal(run(ISAS[0], *arguments(work[i]))[0], want[i])

    workers = [threading.Thread(target=repeat, args=(i,)) for i in range(len(work))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert same == [True] * len(work)


def test_swapped_data_is_seen() -> None:
    layer = make_layer(1)
    before = layer.call("cpu")[0]
    layer.args[4][0].data = torch.zeros_like(layer.args[4][0])
    assert before.abs().sum() > 0
    assert layer.call("cpu")[0].abs().sum() == 0


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"dtype": torch.float64}, {}, "float64 is computed by torch"),
        ({"output_dtype": torch.float64}, {}, "the output is torch.float64"),
        ({}, {"activation": "custom", "activation_program": "sin.default(g)"}, "sin.default has no C++ form"),
        ({}, {"activation_dtype": torch.bfloat16}, "the activation runs in torch.bfloat16"),
        ({}, {"product_dtype": torch.float16}, "products are rounded to torch.float16"),
    ],
    ids=str,
)
def test_what_runs_in_torch_operators_instead(changes, options, reason) -> None:
    layer = make_layer(1, **changes)
    assert reason in kernel.supports(Operands(*layer.args[1:]), Options(**layer.kwargs)._replace(**options))


def test_an_option_that_the_kernel_doesnt_know_runs_in_torch_operators(monkeypatch) -> None:
    monkeypatch.setattr(kernel, "_OTHERS", {"num_identity_experts": 0})
    layer = make_layer(1, hidden=5, identities=1)
    reason = kernel.supports(Operands(*layer.args[1:]), Options(**layer.kwargs))
    assert reason == "num_identity_experts=1 is computed by torch operators"


def test_expert_tensors_of_another_dtype_run_in_torch_operators() -> None:
    """Reading bfloat16 weights as float32 would be garbage without an error."""
    layer = make_layer(1, bias=(True, True))
    for position in (4, 5, 6, 7):
        args = list(layer.args[1:])
        args[position - 1] = [tensor.bfloat16() for tensor in args[position - 1]]
        assert "an expert tensor is torch.bfloat16 and x is" in kernel.supports(
            Operands(*args), Options(**layer.kwargs)
        )


def test_strides_that_no_form_reads_run_in_torch_operators() -> None:
    layer = make_layer(1)
    (weight,) = layer.args[4]
    both = torch.empty(*weight.shape, 2)[..., 0].copy_(weight)
    assert "one of the last two must be 1" in kernel.supports(
        Operands(*layer.args[1:4], [both], *layer.args[5:]), Options(**layer.kwargs)
    )
    layer.args = (*layer.args[:4], [both], *layer.args[5:])
    torch.testing.assert_close(layer.call("cpu")[0].double(), layer.loop()[0], rtol=1e-5, atol=1e-5)


def test_enumerations_have_the_order_of_the_sources() -> None:
    def names(header: str, enum: str) -> tuple[str, ...]:
        (body,) = re.findall(
            rf"enum {enum} : int64_t {{(.*?)}}", (build.SOURCES / header).read_text(), re.DOTALL
        )
        return tuple(name.strip().lower() for name in body.split(","))

    assert names("activation.h", "Kind") == kernel.KINDS
    assert set(kernel.KINDS) == {*ACTIVATIONS, CUSTOM}  # each named one has its formula in C++
    assert names("layer.h", "GateUp") == kernel.GATE_UPS
    assert names("layer.h", "Position") == kernel.POSITIONS
    assert names("layer.h", "RowNorm") == kernel.ROW_NORMS
    assert names("vec.h", "Type") == tuple(str(dtype).removeprefix("torch.") for dtype in kernel.DTYPES)


def test_workspace_is_kept_and_given_back() -> None:
    kernel.release_workspace()
    assert kernel.workspace_bytes() == 0
    layer = make_layer(1, tokens=50)
    layer.call("cpu")
    held = kernel.workspace_bytes()
    layer.call("cpu")
    assert 0 < held == kernel.workspace_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_openmp_runtime() -> None:
    library(ISAS[0], torch.float32)
    maps = Path("/proc/self/maps").read_text()
    assert len(set(re.findall(r"\S*/lib(?:g|i)?omp\S*\.so\S*", maps))) == 1


def test_huge_pages_change_no_value_and_no_pointer(monkeypatch) -> None:
    weight = torch.randn(3 << 20)
    pointer, copy = weight.data_ptr(), weight.clone()
    assert huge_pages.use_for([weight]) in range(weight.nbytes + 1)
    assert huge_pages.use_for([weight]) == 0  # asked once
    assert weight.data_ptr() == pointer
    assert torch.equal(weight, copy)
    monkeypatch.setenv(huge_pages.VARIABLE, "yes")
    with pytest.raises(ValueError, match="MOEFUSE_HUGE_PAGES: expected 0 or 1, got 'yes'"):
        huge_pages.enabled()


def test_an_unknown_instruction_set_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv(isa.VARIABLE, "avx3")
    with pytest.raises(ValueError, match=r"MOEFUSE_CPU_ISA: expected one of .*'plain'.*got 'avx3'"):
        isa.chosen()


@pytest.mark.parametrize("allowed", [True, False])
def test_tiles_need_the_systems_permission(monkeypatch, allowed) -> None:
    has = dict.fromkeys(name for each in isa.ISAS for name in each.needs)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(has, True))
    monkeypatch.setattr(isa, "_tiles_allowed", lambda: allowed)
    isa.available.cache_clear()
    try:
        assert isa.available()[0].name == ("amx_bf16" if allowed else "avx512_bf16")
    finally:
        isa.available.cache_clear()


@pytest.mark.skipif(build.find_compiler() is None or platform.machine() != "x86_64", reason="no x86 compiler")
def test_the_real_tile_instructions_are_in_the_amx_build(tmp_path) -> None:
    """They can't run everywhere; that they are compiled can be seen everywhere."""
    text = ""
    for unit in ("run", "gemm"):
        path = tmp_path / f"{unit}.s"
        command = [build.find_compiler(), *build.FLAGS, *isa.AMX_FLAGS, "-DMOEFUSE_TYPE=bf16", "-S"]
        subprocess.run(
            [*command, str(build.SOURCES / f"{unit}.cpp"), "-o", str(path)], check=True, timeout=200
        )
        text += path.read_text()
    for instruction in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease"):
        assert instruction in text


def test_switched_off_it_runs_in_torch_operators(monkeypatch) -> None:
    monkeypatch.setenv(isa.VARIABLE, isa.OFF)
    assert kernel.load(torch.float32) == "MOEFUSE_CPU_ISA=none"
    layer = make_layer(1)
    torch.testing.assert_close(layer.call("cpu")[0].double(), layer.loop()[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("script", "words"),
    [(None, "no C++ compiler"), ("echo 'x.h:1: error: no' >&2; exit 1", "x.h:1: error: no")],
)
def test_without_a_working_compiler_it_warns_once_and_runs(monkeypatch, tmp_path, script, words) -> None:
    tools, cache = tmp_path / "bin", tmp_path / "cache"
    tools.mkdir()
    if script:
        (tools / "g++").write_text(f"#!/bin/sh\n{script}\n")
        (tools / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(build.CACHE_VARIABLE, str(cache))
    monkeypatch.setattr(kernel, "_loaded", {})
    layer = make_layer(1)
    BINDING.enable(False)  # which may know such calls from another test
    try:
        with pytest.warns(UserWarning, match=re.escape(words)):
            layer.call("cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once is enough
            y = layer.call("cpu")[0]
    finally:
        BINDING.enable(True)
    torch.testing.assert_close(y.double(), layer.loop()[0], rtol=1e-5, atol=1e-5)


def test_only_the_dtype_that_a_layer_has_is_built(monkeypatch, tmp_path) -> None:
    built = []

    def fail(*arguments: object) -> None:
        built.append(arguments[-1])
        raise build.BuildError("not now")

    monkeypatch.setattr(build, "compile_into", fail)
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(kernel, "_loaded", {})
    layer = make_layer(1, dtype=torch.float16)
    BINDING.enable(False)
    try:
        with pytest.warns(UserWarning, match="not now"):
            layer.call("cpu")
    finally:
        BINDING.enable(True)
    assert built == [torch.float16]


def test_a_built_kernel_is_found_again(monkeypatch, tmp_path, capfd) -> None:
    """Another process, the same sources: no compiler runs."""
    library(ISAS[0], torch.bfloat16)
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("built again"))
    assert build.library(isa.available()[0], torch.bfloat16)
    assert "building" not in capfd.readouterr().err


@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES)
def test_sanitizers_find_nothing(tmp_path, dtype) -> None:
    """Address and undefined behaviour, the best instruction set, every tensor in a block of its size."""
    compiler, flags = build.find_compiler(), isa.available()[0].flags
    sanitize = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1")
    build.compile_into(tmp_path / "kernel.so", compiler, (*build.FLAGS, *flags, *sanitize), dtype)
    objects = [str(path) for path in sorted(tmp_path.glob("*.o"))]
    here = Path(__file__).parent
    for source, said in (
        (here / "drive.cpp", "96 layers\n"),
        (here.parent / "comm/drive_exchange.cpp", "48 steps\n"),
    ):
        driver = tmp_path / source.stem
        command = [compiler, "-std=c++17", *flags, *sanitize, "-w", str(source), "-fopenmp", "-pthread"]
        subprocess.run([*command, *objects, "-o", str(driver)], check=True, timeout=200)
        call = [driver, str(kernel.DTYPES.index(dtype))]
        done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout == said
