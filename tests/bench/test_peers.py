"""Other people's kernels: what their adapters hand over, and what is said where they can't run."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from moefuse.bench import shapes
from moefuse.bench.contestants import CONTESTANTS, node
from moefuse.bench.peers import kt, open_vino, vllm_cpu

PEERS = [name for name, one in CONTESTANTS.items() if one.peer]


def layer_of(name, dtype):
    torch.manual_seed(0)
    return shapes.build(shapes.SHAPES[name], dtype, 1 << 30)


def error(layer, run, tokens=5):
    given = x, ids, weights = shapes.inputs(layer, tokens, "uniform")
    before = [tensor.clone() for tensor in given]
    want = node(layer, "reference")(x.double(), ids, weights.double())
    got = run(*given)
    assert got.dtype == layer.dtype
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("shape", ["tiny", "tiny-oai"])
@pytest.mark.parametrize("name", PEERS)
def test_an_installed_kernel_is_right(name, shape):
    contestant = CONTESTANTS[name]
    if why := contestant.absent():
        pytest.skip(why)
    layer = layer_of(shape, torch.bfloat16)
    if why := contestant.limit(layer, 5):
        pytest.skip(why)
    assert error(layer, contestant.build(layer)) < 0.02  # a few roundings of 2^-9


@pytest.mark.parametrize("shape", ["tiny", "tiny-oai"])
def test_the_spelling_for_openvino_is_the_layer(shape):
    layer = layer_of(shape, torch.float32)
    assert error(layer, open_vino._Tiled(layer)) < 1e-6


def test_openvino_that_computes_every_expert_is_an_error(monkeypatch):
    compiled = SimpleNamespace(get_runtime_model=lambda: SimpleNamespace(get_ops=list))
    core = lambda: SimpleNamespace(available_devices=["CPU"], compile_model=lambda *_: compiled)  # noqa: E731
    fake = SimpleNamespace(Core=core, convert_model=lambda *_, **__: None, __version__="1")
    monkeypatch.setitem(sys.modules, "openvino", fake)
    assert open_vino.absent() == ""
    with pytest.raises(RuntimeError, match="OpenVINO 1 computes every expert on every token"):
        open_vino.build(layer_of("tiny", torch.float32))


def test_openvino_that_cant_be_imported_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert "it can't be imported: ModuleNotFoundError" in open_vino.absent()
    monkeypatch.setitem(
        sys.modules, "openvino", SimpleNamespace(Core=lambda: SimpleNamespace(available_devices=[]))
    )
    assert open_vino.absent() == "it has no CPU device"


class Operators:
    """`torch.ops._C` of vllm-cpu: packing reverses the experts, so that unpacked weights would give other numbers."""

    @staticmethod
    def prepack_moe_weight(weight, packed, isa):
        assert isa == vllm_cpu._isa(weight.dtype)
        packed.copy_(weight.flip(0))

    @staticmethod
    def convert_weight_packed(weight):
        return weight.flip(0)

    @staticmethod
    def cpu_fused_moe(y, x, w1, w2, b1, b2, weights, ids, skip_weighted, act, isa):
        assert not skip_weighted
        assert act == ("silu" if b1 is None else "swigluoai")
        y.copy_(computed(x, w1.flip(0), w2.flip(0), b1, b2, weights, ids))

    @staticmethod
    def fused_experts_cpu(y, x, w1, w2, weights, ids, method, *rest):
        scales, (b1, b2, alpha, limit, packed) = rest[:6], rest[6:]
        assert (method, packed, {*scales}) == (0, True, {None})
        assert (alpha, limit) == ((None, None) if b1 is None else (1.702, 7.0))
        assert b1 is None or b1.dtype == b2.dtype == torch.float32
        y.copy_(computed(x, w1.flip(0), w2.flip(0), b1, b2, weights, ids))


def computed(x, w1, w2, b1, b2, weights, ids):
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, k in ((t, k) for t in range(x.shape[0]) for k in range(ids.shape[1])):
        e = ids[t, k]
        rows = x[t].double() @ w1[e].double().t()
        if b1 is None:
            gate, up = rows.chunk(2, -1)
            out = (torch.nn.functional.silu(gate) * up) @ w2[e].double().t()
        else:
            gate, up = (rows + b1[e])[::2].clamp(max=7.0), (rows + b1[e])[1::2].clamp(-7.0, 7.0)
            out = ((up + 1) * gate * torch.sigmoid(gate * 1.702)) @ w2[e].double().t() + b2[e]
        y[t] += weights[t, k].double() * out
    return y


@pytest.mark.parametrize("shape", ["tiny", "tiny-oai"])
@pytest.mark.parametrize("build", [vllm_cpu.build, vllm_cpu.build_sgl], ids=["vllm-cpu", "sgl-kernel"])
def test_vllms_operators_get_what_they_ask_for(monkeypatch, build, shape):
    monkeypatch.setattr(vllm_cpu, "_why_not", lambda operator: "")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.ops, "_C", Operators)
    layer = layer_of(shape, torch.bfloat16)
    assert error(layer, build(layer)) < 0.01  # one rounding of y


def test_a_vllm_without_the_library_says_so(monkeypatch, tmp_path):
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(vllm_cpu.importlib.util, "find_spec", lambda name: spec)
    why_not = vllm_cpu._why_not.__wrapped__
    assert "it has no _C" in why_not("cpu_fused_moe")
    for name in ("_C.abi3.so", "_C_AVX512.abi3.so", "_C_AVX2.abi3.so"):
        (tmp_path / name).write_text("no library")
    assert "doesn't load with torch" in why_not("cpu_fused_moe")


def test_sgl_kernel_and_kt_kernel_name_what_they_dont_do(monkeypatch):
    half, whole = layer_of("tiny", torch.bfloat16), layer_of("tiny", torch.float32)
    assert vllm_cpu.limit_sgl(half, 1) == ""
    assert vllm_cpu.limit_sgl(whole, 1) == kt.limit(whole, 1) == "only bfloat16, not torch.float32"
    assert kt.limit(half, 4096) == ""
    assert kt.limit(half, 4097) == "at most 4096 tokens"
    assert kt.limit(layer_of("tiny-oai", torch.bfloat16), 1) == "no biases"
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert vllm_cpu.absent_sgl() == "sgl-kernel's part needs AVX-512 bfloat16"


def test_a_kt_kernel_without_bf16_says_so(monkeypatch):
    fake = ModuleType("kt_kernel")
    fake.kt_kernel_ext = SimpleNamespace(moe=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "kt_kernel", fake)
    assert kt.absent() == "it has no BF16 experts for this CPU"
    monkeypatch.setitem(sys.modules, "kt_kernel", None)
    assert "it can't be imported: ModuleNotFoundError" in kt.absent()
