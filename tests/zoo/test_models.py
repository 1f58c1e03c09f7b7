"""Real models through the one line a user writes; the whole matrix is `moefuse zoo`.

Each transformers model appears once, the settings are spread over them. Tolerances: tests/zoo/harness.py.
"""

import copy
import pickle
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")

import moefuse
from moefuse.ops import kernels
from tests.zoo import harness

F32, BF16 = torch.float32, torch.bfloat16
STATIC, DYNAMIC = None, True

CELLS = [
    ("qwen3_moe", "batched_mm", F32, STATIC, 16),
    ("mixtral", "grouped_mm", BF16, DYNAMIC, 16),
    ("deepseek_v3", "grouped_mm", BF16, STATIC, 16),
    ("gpt_oss", "batched_mm", BF16, STATIC, 1),
    ("nemotron_h", "grouped_mm", BF16, STATIC, 16),
    ("gemma4", "grouped_mm", F32, STATIC, 1),
    ("llama4", "own", BF16, DYNAMIC, 1),
    ("olmoe", "grouped_mm", F32, DYNAMIC, 1),
    ("granitemoe", "batched_mm", F32, DYNAMIC, 16),
    ("minimax_m3_vl", "batched_mm", BF16, STATIC, 16),
    (harness.GATHER_EINSUM, "own", BF16, DYNAMIC, 16),
]


@pytest.mark.parametrize(("model", "implementation", "dtype", "dynamic", "tokens"), CELLS)
def test_every_moe_layer_is_one_node_and_the_logits_stay(model, implementation, dtype, dynamic, tokens):
    (cell,) = harness.run_cells(
        model, implementation, dtype, dynamic=dynamic, inner="eager", lengths=(tokens,), count=False
    )
    assert not cell.failures, cell


@pytest.mark.parametrize(
    ("model", "implementation", "dtype"),
    [("olmoe", "grouped_mm", BF16), (harness.GATHER_EINSUM, "own", F32)],
)
def test_under_inductor_too(model, implementation, dtype):
    # One layer: what takes the time here is the C++ compiler.
    (cell,) = harness.run_cells(
        model, implementation, dtype, dynamic=STATIC, inner="inductor", lengths=(16,), layers=1, count=False
    )
    assert not cell.failures, cell


@pytest.mark.parametrize("dynamic", [STATIC, DYNAMIC])
def test_a_new_length_compiles_when_it_would_without_moefuse(dynamic):
    cells = harness.run_cells(
        harness.GATHER_EINSUM, "own", F32, dynamic=dynamic, inner="eager", lengths=(16, 24, 40, 1)
    )
    assert not [cell for cell in cells if cell.failures], cells
    assert sum(cell.graphs for cell in cells) == (2 if dynamic else 3)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_checks_see_a_kernel_that_is_slightly_wrong(dtype):
    right = kernels.kernel("cpu")

    def wrong(*arguments):
        y, counts = right(*arguments)
        return y * 1.02, counts

    with mock.patch.dict(kernels._KERNELS, {"cpu": wrong}):
        (cell,) = harness.run_cells(
            harness.GATHER_EINSUM, "own", dtype, dynamic=STATIC, inner="eager", lengths=(16,), count=False
        )
    assert cell.failures


def test_greedy_generation_with_a_cache_gives_the_same_tokens():
    model, kwargs = harness.build("qwen3_moe", "grouped_mm", F32)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "use_cache": True}
    want = model.generate(kwargs["input_ids"], **options)
    model.forward = torch.compile(model.forward, backend="moefuse", options={"inner": "eager"})
    with harness.watch() as seen:
        got = model.generate(kwargs["input_ids"], **options)
    assert torch.equal(got, want)
    assert want.shape == (harness.BATCH, 16 + 8)
    # Prefill and decoding are different graphs; both were fused, and both ran.
    assert len(seen) >= 2
    assert all(len(fused.calls) == harness.LAYERS and fused.inputs for fused in seen)


@pytest.mark.parametrize(("inner", "layers"), [("eager", 2), ("inductor", 1)])
def test_loss_and_gradients(inner, layers):
    model, kwargs = harness.build("qwen3_moe", "grouped_mm", F32, layers)
    compiled = torch.compile(model, backend="moefuse", fullgraph=True, options={"inner": inner})
    labels = kwargs["input_ids"].roll(1, -1)

    def step(run):
        model.zero_grad()
        loss = run(**kwargs, labels=labels).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    want_loss, want = step(model)
    with harness.watch() as seen:
        loss, got = step(compiled)
    assert [len(fused.calls) for fused in seen] == [layers]
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=0)
    assert got.keys() == want.keys()
    for name in want:
        # Two layers of float32 sums in another order, forwards and backwards.
        assert (got[name] - want[name]).norm() <= 1e-5 * want[name].norm(), name


@pytest.mark.parametrize("implementation", harness.IMPLEMENTATIONS)
def test_an_exported_program_is_fused_without_compiling(implementation):
    model, kwargs = harness.build("mixtral", implementation, F32)
    with torch.no_grad():
        exported = torch.export.export(model, (), kwargs)
        result = moefuse.fuse(exported)
        assert result.report.fused == harness.LAYERS
        calls = result.graph_module.graph.find_nodes(
            op="call_function", target=torch.ops.moefuse.mega_moe.default
        )
        assert len(calls) == harness.LAYERS
        other = kwargs | {"input_ids": harness.token_ids(16, seed=5)}
        got, want = result.graph_module(*other.values()), model(**other).logits
    logits = next(value for value in got if value.shape == want.shape)
    torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-5)  # logits of size about 1


def test_a_compiled_model_can_be_copied_and_pickled():
    model, kwargs = harness.build("qwen3_moe", "grouped_mm", F32)
    compiled = torch.compile(model, backend="moefuse", options={"inner": "eager"})
    with torch.no_grad():
        want = compiled(**kwargs).logits
        twin = copy.deepcopy(compiled)
        stored = pickle.loads(pickle.dumps(model))
        assert torch.equal(twin(**kwargs).logits, want)
        next(iter(twin.parameters())).zero_()  # the copy has weights of its own
        assert torch.equal(compiled(**kwargs).logits, want)
        assert not torch.equal(twin(**kwargs).logits, want)
        again = torch.compile(stored, backend="moefuse", options={"inner": "eager"})
        assert torch.equal(again(**kwargs).logits, want)
