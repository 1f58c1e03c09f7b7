"""Quantised sequences become one node, with the numbers that they had and those of a plain loop."""

from functools import partial

import pytest
import torch
from torch import Tensor

import moefuse
from moefuse.passes.verify import tolerance
from moefuse.patterns.engine import lift
from moefuse.patterns.words import words
from moefuse.policy import decide
from moefuse.testing import capture_graph
from tests.npu.loops import quantised
from tests.npu.quant_sequences import CASES, ROUNDED, H, I
from tests.npu.ready import WHEEL
from tests.npu.sequences import E, K
from tests.support import off

fuse = partial(moefuse.fuse, options={"target": "reference"})

EQUAL, LOOP = 1e-2, 2e-2
"""Norm-wise. Fused and unfused are equal bit by bit but where the graph rounds within its activation, which moves some
integers of a row by one. The loop in float64 rounds nothing to bfloat16's eight bits, and int4 has seven steps."""


FIXED = ("w8a8_legacy_prefill", "w8a8_legacy_decode", "weights_alone", "w8a8_fused_last_product")
"""Their token count is a number of the graph."""


def inputs(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, H, generator=generator).bfloat16(), torch.randn(tokens, E, generator=generator)


@pytest.mark.parametrize("name", CASES)
def test_a_sequence_becomes_one_node(name: str) -> None:
    if WHEEL and name == "w4a8_fused_first_product":
        pytest.skip("torch_npu 2.13 gives npu_grouped_matmul_swiglu_quant_v2 no shape for packed weights")
    case = CASES[name]
    arguments = (*inputs(5), *case.tensors)
    captured = capture_graph(case.layer, arguments)
    result = fuse(captured.graph_module)
    assert result.report.fused == 1, result.report
    targets = [str(node.target) for node in result.graph_module.graph.nodes if node.op == "call_function"]
    assert [target for target in targets if "mega_moe" in target] == ["moefuse.mega_moe.quant"]
    assert not [target for target in targets if target.startswith("npu.")]
    spec = result.report.sites[0].spec
    assert (spec.quant, spec.activation, spec.gate_up) == (case.scheme, case.activation, case.gate_up)
    assert (spec.num_experts, spec.top_k, spec.hidden, spec.intermediate) == (E, K, H, I)
    assert spec.weight_scale_groups == (case.groups, case.groups)
    assert spec.has_weight_offsets == case.scheme.endswith("a16")
    for tokens in (1, 5, 16):
        x, logits = inputs(tokens)
        if tokens != 5 and case.layer.__name__ in FIXED:
            continue  # their token count is a number of the graph
        want, got = case.layer(x, logits, *case.tensors), result.graph_module(x, logits, *case.tensors)[0]
        assert got.dtype == want.dtype
        assert off(got, want) <= (EQUAL if name in ROUNDED else 0)
    assert off(result.graph_module(*captured.inputs)[0], quantised(case, *arguments)) < LOOP


def test_every_target_but_the_reference_refuses_by_name() -> None:
    case = CASES["w8a8_integer_product"]
    captured = capture_graph(case.layer, (*inputs(5), *case.tensors))
    report = moefuse.fuse(captured.graph_module).report
    assert report.fused == 0
    assert "the experts are quantised as w8a8; the cpu target has no kernel" in report.sites[0].reason
    assert decide(report.sites[0].spec, target="reference").ok


def test_one_graph_for_every_token_count() -> None:
    case = CASES["w8a8_fused_first_product"]
    captured = capture_graph(case.layer, (*inputs(5), *case.tensors), dynamic={0: (0,), 1: (0,)})
    fused = fuse(captured.graph_module)
    assert fused.report.fused == 1, fused.report
    for tokens in (0, 1, 9):
        arguments = (*inputs(tokens), *case.tensors)
        got, want = fused.graph_module(*arguments)[0], case.layer(*arguments)
        assert got.shape == want.shape
        assert tokens == 0 or off(got, want) < EQUAL


def test_torch_compile() -> None:
    case = CASES["w4a8"]
    arguments = (*inputs(6), *case.tensors)
    torch._dynamo.reset()
    compiled = torch.compile(case.layer, backend="moefuse", options={"inner": "eager", "target": "reference"})
    with torch.no_grad():
        got = compiled(*arguments)
    assert moefuse.reports()[-1].fused == 1
    assert off(got, case.layer(*arguments)) < EQUAL


@pytest.mark.parametrize("name", ["w8a8_swiglustep", "w4a4", "w4a16"])
def test_a_layer_is_verified_on_its_first_inputs(name: str) -> None:
    case = CASES[name]
    torch._dynamo.reset()
    options = {"inner": "eager", "target": "reference", "verify": True}
    with torch.no_grad():
        torch.compile(case.layer, backend="moefuse", options=options)(*inputs(6), *case.tensors)
    (site,) = moefuse.reports()[-1].sites
    assert site.verified is not None
    assert site.spec is not None
    assert site.verified <= tolerance(site.spec) < (0.3 if case.scheme == "w4a4" else 0.1)


def test_the_meaning_of_a_product_in_words() -> None:
    case = CASES["w8a8_swiglu_dynamic_quant"]
    graph = capture_graph(case.layer, (*inputs(5), *case.tensors)).graph_module.graph
    facts = lift(graph).facts
    products = [
        fact for node, fact in facts.items() if "grouped_matmul" in node.name and isinstance(fact, tuple)
    ]
    text = words(products[0][0])  # type: ignore[arg-type]
    assert "int8(`arg0_1`[i, l]) times its scale * `arg2_1`" in text
