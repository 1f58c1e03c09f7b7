"""The registry of targets, the seam of the operator, and what the cpu target promises about memory."""

import os
import subprocess
import sys

import pytest
import torch

from moefuse import targets
from moefuse.ops import kernels
from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.ops.spec import MoeSpec
from moefuse.targets import Target
from moefuse.targets.cpu import gemm, torch_kernel
from tests.ops.moe_loop import make_layer


def test_names_and_get() -> None:
    assert {"cpu", "reference"} <= set(targets.names())
    assert targets.get("cpu").name == "cpu"
    assert targets.get("cpu").supported().ok
    with pytest.raises(ValueError, match=r"expected one of \['cpu', .*got 'tpu'"):
        targets.get("tpu")


def test_a_target_answers_with_its_policy() -> None:
    layer = MoeSpec(8, 2, 4, 4, 4, "cuda", *[torch.float32] * 4)
    assert targets.get("reference").supports(layer).ok
    assert targets.get("cpu").supports(layer).check == "device"


def test_a_registered_target_runs_under_the_operator(monkeypatch) -> None:
    class Toy(Target):
        name = "toy"

        def run(self, context, operands, options):
            return operands.x + 1, torch.zeros(options.num_experts, dtype=torch.int32)

    monkeypatch.setattr(targets, "_TARGETS", dict(targets._TARGETS))
    monkeypatch.setattr(kernels, "_KERNELS", dict(kernels._KERNELS))
    targets.register(Toy())
    layer = make_layer(1, out=6)
    torch.testing.assert_close(layer.call("toy")[0], layer.x + 1)


@pytest.mark.parametrize("wrong", [object(), Target, type("Nameless", (Target,), {"run": None})()])
def test_what_is_no_target_is_named(wrong) -> None:
    with pytest.raises(
        TypeError, match="target: expected an instance of a Target class that has a name, got"
    ):
        targets.register(wrong)


def test_the_operator_finds_its_targets_by_itself() -> None:
    code = (
        "import torch, moefuse.ops; from moefuse.ops.kernels import _KERNELS; _KERNELS.clear();"
        "import sys; [sys.modules.pop(n) for n in list(sys.modules) if n.startswith('moefuse.targets')];"
        "x = torch.ones(1, 2); e = torch.zeros(1, 1, dtype=torch.int64);"
        "print(torch.ops.moefuse.mega_moe(None, x, e, torch.ones(1, 1), [torch.ones(1, 2, 2)],"
        " [torch.ones(1, 2, 1)], [], [], num_experts=1)[0].shape)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert "torch.Size([1, 2])" in done.stdout


def test_reference_sums_in_the_dtype_asked_for() -> None:
    # 1 + 2^-30 is lost in float32 and kept in float64
    x, e = torch.ones(1, 1), torch.tensor([[0, 1]])
    weights = torch.tensor([[1.0, 2.0**-30]])
    operands = Operands(x, e, weights, [torch.ones(2, 1, 1)], [torch.ones(2, 1, 1)])
    options = Options(2, gate_up="none", activation="identity", output_dtype=torch.float64)
    reference = targets.get("reference")
    assert reference.run(None, operands, options)[0].item() == 1
    assert reference.run(None, operands, options, accumulate=torch.float64)[0].item() == 1 + 2.0**-30


def test_reference_is_differentiable_by_itself() -> None:
    layer = make_layer(1, dtype=torch.float64)
    layer.x.requires_grad_()
    options = Options(**layer.kwargs)
    y, _ = targets.get("reference").run(None, Operands(*layer.args[1:]), options)
    (direct,) = torch.autograd.grad(y.sum(), layer.x)
    (operator,) = torch.autograd.grad(layer.call("cpu")[0].sum(), layer.x)
    torch.testing.assert_close(direct, operator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["stacked", "view", "strided", "list"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_cpu_makes_no_copy_of_a_weight(dtype, form, tokens) -> None:
    layer = make_layer(
        1,
        tokens=tokens,
        hidden=256,
        inner=256,
        out=256,
        experts=8,
        dtype=dtype,
        form=form,
        router_dtype=dtype,
    )
    layer.call("cpu")
    one_expert = 256 * 256 * dtype.itemsize
    with torch.profiler.profile(profile_memory=True) as profile:
        layer.call("cpu")
    largest = max((event.self_cpu_memory_usage for event in profile.events()), default=0)
    assert 0 < largest < one_expert / 4


@pytest.mark.parametrize("rows", [1, 2, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["row", "column", "row gaps", "column gaps", "both strided"])
@pytest.mark.parametrize("bias", ["none", "plain", "strided"])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_route_of_the_gemm(rows, dtype, layout, bias, threads) -> None:
    torch.manual_seed(0)
    n, k = 48, 32
    w = {
        "row": torch.randn(n, k),
        "column": torch.randn(k, n).t(),
        "row gaps": torch.randn(n, k + 5)[:, 2:-3],
        "column gaps": torch.randn(k, n + 5)[:, 2:-3].t(),
        "both strided": torch.randn(2 * n, 3 * k)[::2, ::3],
    }[layout]
    w = torch.empty_strided(w.shape, w.stride(), dtype=dtype).copy_(w) if layout == "column" else w.to(dtype)
    x = torch.randn(rows, k).to(dtype)
    b = {"none": None, "plain": torch.randn(n).to(dtype), "strided": torch.randn(n, 3).to(dtype)[:, 1]}[bias]
    out = torch.full((rows, n), torch.nan, dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gemm.multiply_into(out, x, w, b)
    finally:
        torch.set_num_threads(before)
    want = x.double() @ w.double().t() + (0 if b is None else b.double())
    # one rounding of the product and one of the sum with the bias, of values up to about 25
    torch.testing.assert_close(out.double(), want, rtol=0, atol=64 * torch.finfo(dtype).eps)


def test_blocks_cover_every_row_once() -> None:
    counts = [0, 3, 600, 0, 511, 1, 1, 0]
    bounds = [2]
    for count in counts:
        bounds.append(bounds[-1] + count)
    blocks = list(torch_kernel._blocks(bounds))
    assert blocks == [[1], [2], [4, 5], [6]]
