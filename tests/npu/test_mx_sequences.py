"""Sequences in MX formats become one node, with the numbers that they had and those of a plain loop."""

from functools import partial

import pytest
import torch
from torch import Tensor

import moefuse
from moefuse.patterns.engine import lift
from moefuse.patterns.words import words
from moefuse.policy import decide
from moefuse.testing import capture_graph
from tests.npu.mx_loops import E4M3, E5M2, FLOAT4, layer
from tests.npu.mx_sequences import CASES, REFUSED, H, I
from tests.npu.sequences import E, K
from tests.support import off

fuse = partial(moefuse.fuse, options={"target": "reference"})

WRITTEN_OUT = 2e-2
"""Norm-wise, where the graph rounds within its activation: its steps in bfloat16 are off by up to 2^-9 each, which
moves elements by a step of 2^-4. Elsewhere fused and unfused are equal bit by bit."""
LOOP = {0: 2e-2, E4M3: 2e-2, E5M2: 4e-2, FLOAT4: 1e-1}
"""Norm-wise against the float64 loop, which rounds nothing to bfloat16, by the rows' elements: one of the activation
may round the other way, by 2^-4 of itself, 2^-3 or 2^-2. With another block's scale it's off by half of itself or
more."""


def inputs(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, H, generator=generator).bfloat16(), torch.randn(tokens, E, generator=generator)


@pytest.mark.parametrize("name", CASES)
def test_a_sequence_becomes_one_node(name: str) -> None:
    case = CASES[name]
    arguments = (*inputs(3), *case.tensors)
    captured = capture_graph(case.layer, arguments, dynamic={0: (0,), 1: (0,)})
    result = fuse(captured.graph_module)
    assert result.report.fused == 1, result.report
    targets = [str(node.target) for node in result.graph_module.graph.nodes if node.op == "call_function"]
    assert [target for target in targets if "mega_moe" in target] == ["moefuse.mega_moe.quant"]
    assert not [target for target in targets if target.startswith("npu.")]
    spec = result.report.sites[0].spec
    assert (spec.quant, spec.activation, spec.gate_up) == (case.scheme, case.activation, "concat")
    assert (spec.num_experts, spec.top_k, spec.hidden, spec.intermediate) == (E, K, H, I)
    assert spec.weight_scale_groups == (H // 32, I // 32)
    # as they lie, whatever turns them
    assert (spec.transpose_weight1, spec.transpose_weight2) == (True, True)
    (node,) = (node for node in result.graph_module.graph.nodes if "mega_moe" in str(node.target))
    own = [argument.meta["val"] for i in (4, 5, 8, 9) for argument in node.args[i]]
    assert all(tensor.is_contiguous() for tensor in own)
    assert spec.weight_bytes == E * 3 * H * I // (1 if case.scheme == "mxfp8" else 2)
    for tokens in (3, 16):
        given = (*inputs(tokens), *case.tensors)
        want, got = case.layer(*given), result.graph_module(*given)[0]
        assert got.dtype == want.dtype
        assert off(got, want) <= (WRITTEN_OUT if name == "mxfp8_swiglustep" else 0)
    by_slots = layer(case.weights_as, case.rows_as, *arguments, activation=case.activation)
    assert off(result.graph_module(*captured.inputs)[0], by_slots) < LOOP[case.rows_as]


@pytest.mark.parametrize("name", REFUSED)
def test_a_sequence_without_a_scheme(name: str) -> None:
    case, reason = REFUSED[name]
    report = fuse(capture_graph(case.layer, (*inputs(5), *case.tensors)).graph_module).report
    assert report.fused == 0
    assert reason in report.sites[0].reason


def test_the_cpu_target_refuses_by_name() -> None:
    case = CASES["mxfp8_by_steps"]
    report = moefuse.fuse(capture_graph(case.layer, (*inputs(5), *case.tensors)).graph_module).report
    assert report.fused == 0
    assert "the experts are quantised as mxfp8; the cpu target has no kernel" in report.sites[0].reason
    assert decide(report.sites[0].spec, target="reference").ok


def test_no_tokens() -> None:
    case = CASES["mxfp8_by_steps"]
    result = fuse(
        capture_graph(case.layer, (*inputs(5), *case.tensors), dynamic={0: (0,), 1: (0,)}).graph_module
    )
    assert result.graph_module(*inputs(0), *case.tensors)[0].shape == (0, H)


def test_torch_compile() -> None:
    case = CASES["mxfp8_fused_first_product"]
    arguments = (*inputs(6), *case.tensors)
    torch._dynamo.reset()
    compiled = torch.compile(case.layer, backend="moefuse", options={"inner": "eager", "target": "reference"})
    with torch.no_grad():
        got = compiled(*arguments)
    assert moefuse.reports()[-1].fused == 1
    assert off(got, case.layer(*arguments)) == 0


def test_the_meaning_of_a_product_in_words() -> None:
    case = CASES["mxfp8_by_steps"]
    facts = lift(capture_graph(case.layer, (*inputs(5), *case.tensors)).graph_module.graph).facts
    texts = [words(part) for fact in facts.values() if isinstance(fact, tuple) for part in fact if part]
    assert any("float8_e4m3fn(`arg0_1`[i, " in text and " times its scale * " in text for text in texts), (
        texts
    )
    assert any("the scale of block " in text for text in texts), texts
