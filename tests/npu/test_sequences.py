"""NPU operator sequences become one node, with the numbers that they had and those of a plain loop."""

import dataclasses

import pytest
import torch
from torch import Tensor

import moefuse
from moefuse.testing import capture_graph, rewrite_and_compare
from tests.npu.loops import floats
from tests.npu.sequences import SEQUENCES, E, K, Layer, route

H, I = 16, 12  # noqa: E741
ACTIVATIONS = {"written_out_activation": "swiglustep", "clipped_swiglu": "swigluoai"}


def operands(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, logits = draw(tokens, H), draw(tokens, E)
    w13, w2 = draw(E, H, 2 * I) / H**0.5, draw(E, I, H) / I**0.5
    return x.to(dtype), logits, w13.to(dtype), w2.to(dtype)


@pytest.mark.parametrize("tokens", [1, K, 5, E, H])
@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_becomes_one_node(name: str, tokens: int) -> None:
    captured = capture_graph(SEQUENCES[name], operands(tokens))
    outcome = rewrite_and_compare(captured.graph_module, captured.inputs, expect_fused=1)
    names = [str(node.target) for node in outcome.graph_module.graph.nodes if node.op == "call_function"]
    assert sum("mega_moe" in name for name in names) == 1
    assert not [name for name in names if "npu." in name and "gating" not in name]
    spec = outcome.report.sites[0].spec
    assert (spec.num_experts, spec.top_k, spec.hidden, spec.intermediate) == (E, K, H, I)
    gate_up = "interleaved" if name == "clipped_swiglu" else "concat"
    assert spec.activation == ACTIVATIONS.get(name, "swiglu")
    assert (spec.gate_up, spec.ids_checked) == (gate_up, True)
    assert spec.weight_position == ("mid" if name == "weights_between" else "output")


@pytest.mark.parametrize("name", SEQUENCES)
def test_the_fused_layer_against_a_loop(name: str) -> None:
    x, logits, w13, w2 = operands(7, torch.float32)
    captured = capture_graph(SEQUENCES[name], (x, logits, w13, w2))
    fused = moefuse.fuse(captured.graph_module).graph_module
    (got,) = fused(*captured.inputs)
    weights, ids = route(logits)
    if name == "vllm_allgather":
        scores = logits.sigmoid()
        ids = scores.topk(K, dim=-1).indices
        weights = scores.gather(1, ids)
        weights = 2.5 * weights / weights.sum(-1, keepdim=True)
    want = floats(x, weights, ids, w13, w2, range(E), ACTIVATIONS.get(name, "swiglu"))
    if name == "with_skip":
        want += 2 * x.double()
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)  # float32 sums of 16 and 12 products


@pytest.mark.parametrize(
    "name", ["cumulative", "counts_summed_up", "unbound_weights", "unpermute_then_weigh"]
)
def test_one_graph_for_every_token_count(name: str) -> None:
    captured = capture_graph(SEQUENCES[name], operands(5), dynamic={0: (0,), 1: (0,)})
    fused = moefuse.fuse(captured.graph_module)
    assert fused.report.fused == 1, fused.report
    for tokens in (0, 1, 9):
        inputs = operands(tokens)
        # bfloat16 has eight bits; both sides round their intermediate values
        torch.testing.assert_close(
            fused.graph_module(*inputs)[0], SEQUENCES[name](*inputs), rtol=2e-2, atol=2e-2
        )


def test_two_layers() -> None:
    def model(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        x = x + SEQUENCES["sglang_bf16"](x, logits, w13, w2)
        return x + SEQUENCES["sglang_legacy"](x, logits, w13, w2)

    captured = capture_graph(model, operands(6))
    rewrite_and_compare(captured.graph_module, captured.inputs, expect_fused=2)


def test_torch_compile() -> None:
    layer: Layer = SEQUENCES["vllm_allgather"]
    inputs = operands(6)
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(layer, backend="moefuse", options={"inner": "eager"})(*inputs)
    assert moefuse.reports()[-1].fused == 1
    torch.testing.assert_close(got, layer(*inputs), rtol=2e-2, atol=2e-2)


def test_the_policy_judges_the_lifted_layer() -> None:
    from moefuse.policy.npu import Conditions, decide_npu

    captured = capture_graph(SEQUENCES["sglang_bf16"], operands(6))
    spec = moefuse.fuse(captured.graph_module).report.sites[0].spec
    verdict = decide_npu(dataclasses.replace(spec, ep_world_size=2), Conditions("Ascend910B1", "R6", 64))
    assert verdict.check == "hidden"  # everything else of the layer fits
