"""MX sequences that aren't what they seem: refused with the reason, also where sizes collide."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import moefuse
from moefuse.passes.lift import explain, find
from moefuse.patterns.engine import lift
from moefuse.testing import capture_graph
from moefuse.testing.judge import judge, redraw
from moefuse.testing.mutations import mutants
from tests.npu.mx_sequences import CASES, E4M3, E5M2, FLOAT4, Layer, gmm, paired, weights
from tests.npu.quant_sequences import dispatch
from tests.npu.sequences import E, K, finalize, npu, route
from tests.npu.test_quant_mutations import written

T, H, I = 32, 128, 64  # noqa: E741  (as many slots as inner features, as many rows as a block has)
assert T * K == I


def operands(number: int = E4M3, **changed: Any) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, logits = torch.randn(T, H, generator=generator).bfloat16(), torch.randn(T, E, generator=generator)
    return (x, logits, *weights(number, **changed))


def why(graph_module: GraphModule) -> str:
    """All reasons; AssertionError where something is found."""
    lifted = lift(graph_module.graph)
    assert not lifted.sites, lifted.sites[0].spec.describe()
    assert find(graph_module.graph, frozenset(), lifted), "the layer isn't even reported"
    return "\n".join(explain(loss) for loss in lifted.losses.values())


def with_scales(change: Callable[[dict[str, Tensor]], Tensor], second: bool = False) -> Layer:
    """By steps, with other scales of the rows of one product. change: of all there are, by name."""

    def layer(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, s13: Tensor, s2: Tensor) -> Tensor:
        routing, ids = route(logits)
        plain, row_idx, counts, _ = dispatch(x, ids, quant_mode=-1)
        rows, own = npu.npu_dynamic_mx_quant(plain, dst_type=E4M3)
        known = {
            "own": own,
            "other dispatch": paired(dispatch(x, route(-logits)[1], quant_mode=3)[3]),
            "other tokens": npu.npu_dynamic_mx_quant(plain * 2, dst_type=E4M3)[1],
            "slots": npu.npu_dynamic_mx_quant(x.repeat_interleave(K, dim=0), dst_type=E4M3)[1],
            "e5m2": npu.npu_dynamic_mx_quant(plain, dst_type=E5M2)[1],
            "int8": npu.npu_dynamic_quant(plain)[1],
        }
        h = npu.npu_swiglu(gmm(rows, own if second else change(known), w13, s13, counts))
        a, known["hidden"] = npu.npu_dynamic_mx_quant(h, dst_type=E4M3)
        y = gmm(a, change(known) if second else known["hidden"], w2, s2, counts)
        return finalize(y, routing.to(x.dtype), row_idx, ids)

    return layer


OTHER = "is multiplied by the scales of other rows"
UNKNOWN = "are not what its rows were quantised with"
REFUSED: dict[str, tuple[Layer, str]] = {
    "scales of another dispatch": (with_scales(lambda s: s["other dispatch"]), "meet rows in the order of"),
    "scales of other tokens": (with_scales(lambda s: s["other tokens"]), OTHER),
    "scales in slot order": (with_scales(lambda s: s["slots"]), "do not line up"),
    "scales of other elements": (with_scales(lambda s: s["e5m2"]), OTHER),
    "blocks in another order": (with_scales(lambda s: s["own"].flip(1)), UNKNOWN),
    "halves for pairs": (with_scales(lambda s: s["own"].transpose(1, 2)), OTHER),
    "the first product's scales": (with_scales(lambda s: s["own"][:, :1], second=True), OTHER),
    "scales that were changed": (with_scales(lambda s: s["own"] + 1), UNKNOWN),
}


@pytest.mark.parametrize("case", REFUSED)
def test_scales_that_belong_to_other_rows(case: str) -> None:
    layer, reason = REFUSED[case]
    assert reason in why(capture_graph(layer, operands()).graph_module)


def test_the_layer_itself_is_found() -> None:
    """So that what is refused above is refused for its reason alone."""
    for layer in (with_scales(lambda s: s["own"]), with_scales(lambda s: s["hidden"], second=True)):
        assert lift(capture_graph(layer, operands()).graph_module.graph).sites


DROPPED = object()
GMM, MX, FUSED, INIT = (
    *("npu_grouped_matmul", "npu_dynamic_mx_quant"),
    *("npu_grouped_matmul_swiglu_quant_v2", "npu_moe_init_routing_v2"),
)
ARGUMENTS: Sequence[tuple[str, str, str, Any, str]] = (
    ("mxfp8_by_steps", GMM, "bias", ["w"], "a grouped GEMM with scales of blocks, and bias"),
    (
        "mxfp8_by_steps",
        GMM,
        "antiquant_offset",
        ["w"],
        "a grouped GEMM with scales of blocks, and antiquant_offset",
    ),
    ("mxfp8_by_steps", GMM, "scale", DROPPED, "with no scales of its weights' blocks"),
    ("mxfp8_by_steps", GMM, "antiquant_scale", ["w"], "of its weights' blocks, or with two"),
    ("mxfp8_by_steps", GMM, "scale_dtype", DROPPED, "with other scales of its weights"),
    ("mxfp8_by_steps", GMM, "per_token_scale_dtype", DROPPED, "a grouped GEMM with scale_dtype"),
    ("mxfp8_by_steps", GMM, "x_dtype", 290, "elements of torch.float8_e4m3fn as number 290"),
    ("mxfp8_by_steps", GMM, "weight_dtype", 297, "elements of torch.float8_e4m3fn as number 297"),
    ("mxfp8_by_steps", GMM, "x_dtype", E5M2, "elements of torch.float8_e4m3fn as number 23"),
    ("mxfp8_by_steps", GMM, "weight_dtype", E5M2, "elements of torch.float8_e4m3fn as number 23"),
    ("mxfp8_e5m2", GMM, "weight_dtype", 292, "elements of torch.float8_e5m2 as number 292"),
    ("mxfp8_by_steps", GMM, "weight_dtype", FLOAT4, "elements of torch.float8_e4m3fn as number 296"),
    ("mxfp4_by_steps", GMM, "x_dtype", E4M3, "elements of torch.uint8 as number 24"),
    ("mxfp4a8", GMM, "weight_dtype", E5M2, "elements of torch.uint8 as number 23"),
    ("mxfp8_fused_first_product", FUSED, "x_dtype", E5M2, "elements of torch.float8_e4m3fn as number 23"),
    ("mxfp8_by_steps", GMM, "act_type", 1, "a grouped GEMM with act_type=1"),
    ("mxfp8_by_steps", GMM, "offset", ["w"], "a grouped GEMM with offset"),
    ("mxfp4_by_steps", GMM, "weight_dtype", DROPPED, "elements of torch.uint8 as number None"),
    ("mxfp4a16", GMM, "x_dtype", FLOAT4, "a grouped GEMM of torch.bfloat16 rows without scales"),
    ("mxfp8_by_steps", MX, "round_mode", "floor", "quantised by blocks with round_mode=floor"),
    ("mxfp8_by_steps", MX, "block_size", 64, "quantised by blocks with block_size=64"),
    ("mxfp8_by_steps", MX, "scale_alg", 1, "quantised by blocks with scale_alg=1"),
    ("mxfp8_by_steps", MX, "max_low_bound", 1.0, "quantised by blocks with max_low_bound=1.0"),
    ("mxfp8_by_steps", MX, "axis", 0, "quantised by blocks along dimension 0"),
    (
        "mxfp8_by_steps",
        MX,
        "dst_type",
        E5M2,
        "by blocks to torch.float8_e5m2 are multiplied as torch.float8_e4m3fn",
    ),
    ("mxfp8_by_steps", MX, "dst_type", 297, "by blocks to dtype number 297"),
    ("mxfp8_fused_first_product", FUSED, "quant_dtype", 297, "to other than int8 per row or MX blocks"),
    ("mxfp8_fused_first_product", FUSED, "dequant_dtype", 15, "to other than int8 per row or MX blocks"),
    ("mxfp8_fused_first_product", FUSED, "quant_mode", 0, "a grouped GEMM with weight_scale_dtype"),
    ("mxfp8_fused_first_product", FUSED, "weight_scale_dtype", DROPPED, "with other scales of its weights"),
    ("mxfp8_fused_first_product", FUSED, "smooth_scale", "w", "and smooth_scale"),
    ("mxfp8_fused_first_product", FUSED, "weight_assist_matrix", ["w"], "and weight_assist_matrix"),
    ("mxfp8_fused_first_product", INIT, "scale", "w", "smooth scales"),
)


@pytest.mark.parametrize(("name", "operator", "argument", "value", "reason"), ARGUMENTS)
def test_an_argument_that_has_no_rule(
    name: str, operator: str, argument: str, value: Any, reason: str
) -> None:
    case = CASES[name]
    graph_module = capture_graph(case.layer, (*operands()[:2], *case.tensors)).graph_module
    node = next(n for n in graph_module.graph.nodes if str(n.target) == f"npu.{operator}.default")
    tensor = next(n for n in graph_module.graph.nodes if n.op == "placeholder")
    given: Any = [tensor] if value == ["w"] else tensor if value == "w" else value
    node.kwargs = {key: each for key, each in {**node.kwargs, argument: given}.items() if each is not DROPPED}
    assert reason in why(graph_module)


def test_scales_of_the_other_weight() -> None:
    graph_module = capture_graph(CASES["mxfp8_by_steps"].layer, operands()).graph_module
    *_, s13, s2 = (node for node in graph_module.graph.nodes if node.op == "placeholder")
    for node in graph_module.graph.nodes:
        if str(node.target) == f"npu.{GMM}.default":
            node.kwargs = {**node.kwargs, "scale": [s2 if node.kwargs["scale"] == [s13] else s13]}
    assert "128 and 64 elements do not line up" in why(graph_module)


def test_weights_of_other_elements_than_the_rows() -> None:
    def layer(x: Tensor, logits: Tensor, w13: Tensor, *rest: Tensor) -> Tensor:
        return CASES["mxfp8_by_steps"].layer(x, logits, w13.view(torch.float8_e5m2), *rest)

    reason = "quantised as float8_e4m3fn rows times float8_e5m2 weights"
    assert reason in why(capture_graph(layer, operands()).graph_module)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_scales_said_to_be_powers_of_two(dtype: torch.dtype) -> None:
    """The number of such scales beside a tensor whose dtype says that it holds something else."""
    graph_module = capture_graph(CASES["mxfp8_by_steps"].layer, operands()).graph_module
    *_, s13, s2 = (node for node in graph_module.graph.nodes if node.op == "placeholder")
    for node in (s13, s2):
        node.meta["val"] = node.meta["val"].view(dtype)
    assert "with other scales of its weights" in why(graph_module)


def test_rows_that_are_no_multiple_of_64() -> None:
    _, logits, *rest = operands(hidden=192, inner=96)
    layer, wide = CASES["mxfp8_by_steps"].layer, torch.randn(T, 192).bfloat16()
    reason = "rows of 96 features are quantised by blocks of 32 whose scales lie in pairs: no multiple of 64"
    assert reason in why(capture_graph(layer, (wide, logits, *rest)).graph_module)


@pytest.mark.parametrize("name", ["mxfp8_by_steps", "mxfp8_fused_first_product", "mxfp4_by_steps", "mxfp4a8"])
def test_changed_sequences_are_refused_or_right(name: str) -> None:
    case = CASES[name]
    captured = capture_graph(case.layer, operands(case.weights_as))
    inputs = [captured.inputs, (*redraw(captured.inputs[:2], 1), *captured.inputs[2:])]
    rewrite = partial(moefuse.fuse, options={"target": "reference"})
    kinds: Counter[str] = Counter()
    for mutant in mutants(captured.graph_module, limit=10, seed=7):
        if all(written(mutant.graph_module, values) for values in inputs):
            verdict = judge(mutant.graph_module, inputs, rewrite)
            assert verdict.kind != "wrong", f"{mutant.kind}: {mutant.detail}\n{verdict.reason}"
            kinds[verdict.kind] += 1
    assert kinds["refused"] > 0, kinds
