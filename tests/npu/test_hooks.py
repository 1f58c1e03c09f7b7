"""The pass inside the real npugraph_ex, on the emulated runtime; the graphs run on CPU tensors and aren't captured.

`test_device.py` captures them. torchair has its own file: the two compilers register the same overrides of torch and
don't go into one process.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import moefuse
from moefuse.passes import as_torchair_pass
from tests.npu.sequences import SEQUENCES
from tests.npu.test_sequences import operands

# bfloat16 has eight bits; both sides round their intermediate values
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}
WHOLE = [name for name in SEQUENCES if name != "unpermute_then_weigh"]  # its bincount breaks Dynamo's graph


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


class Watch:
    """The operators of each compiled graph, noted by the compiler's last hook."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, gm: GraphModule, example_inputs: Any, config: Any) -> None:
        self.graphs.append([str(node.target) for node in gm.graph.nodes if node.op == "call_function"])

    @property
    def counts(self) -> list[int]:
        return [graph.count("moefuse.mega_moe.default") for graph in self.graphs]


def npugraph_ex(layer: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Watch]:
    watch = Watch()
    hooks = {
        "post_grad_custom_pre_pass": as_torchair_pass(**options),
        "post_grad_custom_post_pass": watch,
    }
    return torch.compile(layer, backend="npugraph_ex", options={"force_eager": True} | hooks), watch


@pytest.mark.parametrize("name", WHOLE)
def test_npugraph_ex_gets_one_node(name: str) -> None:
    inputs = operands(6)
    run, watch = npugraph_ex(SEQUENCES[name])
    torch.testing.assert_close(run(*inputs), SEQUENCES[name](*inputs), **TOLERANCE)
    assert watch.counts == [1]
    assert not [op for op in watch.graphs[0] if "npu." in op and "gating" not in op]
    assert moefuse.reports()[-1].fused == 1


class Model(nn.Module):
    """Two layers whose weights are parameters; a token axis that may be symbolic, as engines write it today."""

    def __init__(self) -> None:
        super().__init__()
        _, _, w13, w2 = operands(6, torch.float32)
        self.gates = nn.ParameterList(torch.randn(16, 8) for _ in range(2))
        self.w13 = nn.ParameterList(w13.clone() for _ in range(2))
        self.w2 = nn.ParameterList(w2.clone() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for gate, w13, w2 in zip(self.gates, self.w13, self.w2, strict=True):
            x = x + SEQUENCES["cumulative"](x, x @ gate, w13, w2)
        return x


def test_one_compile_for_every_token_count() -> None:
    model = Model()
    run, watch = npugraph_ex(model)
    x = operands(6, torch.float32)[0]
    torch._dynamo.mark_dynamic(x, 0)
    run(x)
    for tokens in (2, 5, 9, 17):
        x = operands(tokens, torch.float32)[0]
        # float32: another order of summation in products of 16 and 12
        torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
    assert watch.counts == [2]


def test_a_refused_layer_keeps_its_operators() -> None:
    inputs = operands(6)
    run, watch = npugraph_ex(SEQUENCES["sglang_bf16"], exclude=["*"])
    torch.testing.assert_close(run(*inputs), SEQUENCES["sglang_bf16"](*inputs), rtol=0, atol=0)
    assert watch.counts == [0]
    assert "npu.npu_grouped_matmul.default" in watch.graphs[0]
    assert moefuse.reports()[-1].sites[0].check == "exclude"


def test_cached_models_are_keyed_by_options_and_sources() -> None:
    from npugraph_ex.inference._cache_compiler import _get_code_digest

    plain, other = as_torchair_pass(), as_torchair_pass(exclude=["a"])
    assert _get_code_digest(plain) == _get_code_digest(as_torchair_pass())
    assert _get_code_digest(plain) != _get_code_digest(other)


def test_as_the_inner_compiler_of_moefuse() -> None:
    inputs, layer = operands(6), SEQUENCES["vllm_allgather"]
    options = {"inner": "npugraph_ex", "inner_options": {"force_eager": True}}
    got = torch.compile(layer, backend="moefuse", options=options)(*inputs)
    torch.testing.assert_close(got, layer(*inputs), **TOLERANCE)
    assert moefuse.reports()[-1].fused == 1


def test_an_option_that_npugraph_ex_does_not_have() -> None:
    options = {"inner": "npugraph_ex", "inner_options": {"fast": True}}
    with pytest.raises(Exception, match="Invalid option 'fast'"):
        torch.compile(SEQUENCES["cumulative"], backend="moefuse", options=options)(*operands(6))
