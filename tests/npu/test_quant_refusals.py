"""Quantised sequences that aren't what they seem: refused with the reason, also where sizes collide."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefuse.passes.lift import explain, find
from moefuse.patterns.engine import lift
from moefuse.testing import capture_graph
from tests.npu.quant_sequences import (
    BFLOAT16,
    CASES,
    INT32,
    Layer,
    Weights,
    dispatch,
    encoded,
    gmm,
    second,
    weights,
)
from tests.npu.sequences import E, K, finalize, npu, route

T = I = E  # noqa: E741
H = 2 * I


def operands(scheme: str = "w8a8", groups: int = 1) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, logits = torch.randn(T, H, generator=generator).bfloat16(), torch.randn(T, E, generator=generator)
    return (x, logits, *weights(scheme, groups, 0, H, I))


def why(graph_module: GraphModule) -> str:
    """All reasons; AssertionError where something is found."""
    lifted = lift(graph_module.graph)
    assert not lifted.sites, lifted.sites[0].spec.describe()
    assert find(graph_module.graph, frozenset(), lifted), "the layer isn't even reported"
    return "\n".join(explain(loss) for loss in lifted.losses.values())


def first(x: Tensor, logits: Tensor, w: Weights, **options: Any) -> tuple[Any, ...]:
    """(routing, ids, rows, row_idx, counts, scales, first product)."""
    routing, ids = route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids)
    given = {"scale": [w.s13], "per_token_scale": [scales]} | options
    h = gmm(rows, w.w13, counts, **{name: value for name, value in given.items() if value is not None})
    return routing.to(x.dtype), ids, rows, row_idx, counts, scales, h


def scales_of_other_rows(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w = Weights(*tensors)
    routing, ids, _, row_idx, counts, scales, h = first(x, logits, w)
    a, _ = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    return finalize(second(a, scales, w, counts), routing, row_idx, ids)


def scales_of_another_dispatch(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w = Weights(*tensors)
    other = dispatch(x, route(-logits)[1])[3]
    routing, ids, _, row_idx, counts, _, h = first(x, logits, w, per_token_scale=[other])
    a, scales = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    return finalize(second(a, scales, w, counts), routing, row_idx, ids)


def scales_of_other_tokens(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """The same dispatch, scales of 2 x: twice as large."""
    w = Weights(*tensors)
    other = dispatch(x * 2, route(logits)[1])[3]
    routing, ids, _, row_idx, counts, _, h = first(x, logits, w, per_token_scale=[other])
    a, scales = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    return finalize(second(a, scales, w, counts), routing, row_idx, ids)


def scales_in_slot_order(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """One scale per slot as the tokens lie."""
    w = Weights(*tensors)
    own = npu.npu_dynamic_quant(x)[1].unsqueeze(1).expand(-1, K).reshape(-1)
    routing, ids, _, row_idx, counts, _, h = first(x, logits, w, per_token_scale=[own])
    a, scales = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    return finalize(second(a, scales, w, counts), routing, row_idx, ids)


def routing_weights_as_scales(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w = Weights(*tensors)
    routing, ids, _, row_idx, counts, _, h = first(x, logits, w, per_token_scale=[route(logits)[0].view(-1)])
    a, scales = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    return finalize(second(a, scales, w, counts), routing, row_idx, ids)


def no_scales_of_rows(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w = Weights(*tensors)
    routing, ids, _, row_idx, counts, _, h = first(x, logits, w, per_token_scale=None)
    a, scales = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    return finalize(second(a, scales, w, counts), routing, row_idx, ids)


def no_scales_of_rows_at_the_end(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w = Weights(*tensors)
    routing, ids, _, row_idx, counts, _, h = first(x, logits, w)
    a, _ = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    return finalize(gmm(a, w.w2, counts, scale=[w.s2]), routing, row_idx, ids)


def no_scales_of_weights(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w = Weights(*tensors)
    routing, ids, _, row_idx, counts, scales, h = first(
        x, logits, w, scale=None, per_token_scale=None, output_dtype=INT32
    )
    a, a_scales = npu.npu_dequant_swiglu_quant(h, activation_scale=scales, quant_mode=1, activate_left=True)
    return finalize(second(a, a_scales, w, counts), routing, row_idx, ids)


def scales_twice(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w = Weights(*tensors)
    routing, ids, _, row_idx, counts, scales, h = first(x, logits, w)
    a, a_scales = npu.npu_dequant_swiglu_quant(h, activation_scale=scales, quant_mode=1, activate_left=True)
    return finalize(second(a, a_scales, w, counts), routing, row_idx, ids)


def weight_scales_twice(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w = Weights(*tensors)
    routing, ids, _, row_idx, counts, _, h = first(x, logits, w)
    a, a_scales = npu.npu_dequant_swiglu_quant(
        h, weight_scale=w.s13, group_index=counts, quant_mode=1, activate_left=True
    )
    return finalize(second(a, a_scales, w, counts), routing, row_idx, ids)


def integer(groups: Callable[[Tensor], Tensor | None], scale: Callable[[Tensor], Tensor]) -> Layer:
    """The integer product with other group sizes, or other scales, in the activation's operator."""

    def layer(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
        w = Weights(*tensors)
        routing, ids, _, row_idx, counts, scales, h = first(
            x, logits, w, scale=None, per_token_scale=None, output_dtype=INT32
        )
        a, a_scales = npu.npu_dequant_swiglu_quant(
            h,
            weight_scale=scale(w.s13),
            activation_scale=scales,
            group_index=groups(counts),
            quant_mode=1,
            activate_left=True,
        )
        return finalize(second(a, a_scales, w, counts), routing, row_idx, ids)

    return layer


def smooth_tokens(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w, (routing, ids) = Weights(*tensors), route(logits)
    rows, row_idx, counts, scales = dispatch(x, ids, scale=w.s2)
    h = gmm(rows, w.w13, counts, scale=[w.s13], per_token_scale=[scales])
    a, a_scales = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    return finalize(second(a, a_scales, w, counts), routing.to(x.dtype), row_idx, ids)


def smooth_activations(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w = Weights(*tensors)
    routing, ids, _, row_idx, counts, _, h = first(x, logits, w)
    a, scales = npu.npu_dynamic_quant(npu.npu_swiglu(h), smooth_scales=w.s13[0, :I])
    return finalize(second(a, scales, w, counts), routing, row_idx, ids)


def rows_of_integers_from_anywhere(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """int8 rows that the model made itself."""
    w, (routing, ids) = Weights(*tensors), route(logits)
    own = x.abs().amax(-1).float() / 127
    integers = (x / own.unsqueeze(1)).round().to(torch.int8)
    rows, row_idx, counts, scales = dispatch(integers, ids, scale=own, quant_mode=-1)
    h = gmm(rows, w.w13, counts, scale=[w.s13], per_token_scale=[scales])
    a, a_scales = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    return finalize(second(a, a_scales, w, counts), routing.to(x.dtype), row_idx, ids)


def one_product_of_floats(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w = Weights(*tensors)
    routing, ids, _, row_idx, counts, _, h = first(x, logits, w)
    (y,) = npu.npu_grouped_matmul(
        [npu.npu_swiglu(h)],
        [w.w2.to(x.dtype)],
        group_list=counts,
        group_list_type=1,
        group_type=0,
        split_item=2,
    )
    return finalize(y, routing, row_idx, ids)


def integer_bias(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    w = Weights(*tensors)
    routing, ids, _, row_idx, counts, _, h = first(x, logits, w, bias=[w.w13[:, 0].to(torch.int32)])
    a, scales = npu.npu_dynamic_quant(npu.npu_swiglu(h))
    return finalize(second(a, scales, w, counts), routing, row_idx, ids)


def part_of_the_rows(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
    """The second product reads half of what was quantised."""
    w = Weights(*tensors)
    routing, ids, _, row_idx, counts, _, h = first(x, logits, w)
    a, scales = npu.npu_dynamic_quant(h)
    return finalize(second(a[:, :I], scales, w, counts), routing, row_idx, ids)


REFUSED: dict[str, tuple[Layer, str]] = {
    "other rows": (scales_of_other_rows, "multiplied by the scales of other rows"),
    "another dispatch": (scales_of_another_dispatch, "meet rows in the order of"),
    "other tokens": (
        scales_of_other_tokens,
        "multiplied by the scales of other rows|meet rows in the order of",
    ),
    "slot order": (
        scales_in_slot_order,
        "is not what its rows were quantised with|do not line up|slot order",
    ),
    "routing weights": (routing_weights_as_scales, "is not what its rows were quantised with"),
    "no row scales": (no_scales_of_rows, "is never multiplied by its rows' scales"),
    "no row scales at the end": (no_scales_of_rows_at_the_end, "is never multiplied by its rows' scales"),
    "no weight scales": (no_scales_of_weights, "is never multiplied by its weight's scale"),
    "twice": (scales_twice, "multiplied by the scales of its rows twice"),
    "weight scales twice": (weight_scales_twice, "a scale per channel that is no product of integers"),
    "no groups": (integer(lambda c: None, lambda s: s[:1]), "one scale serves the rows of all experts"),
    "running groups": (integer(lambda c: c.cumsum(0), lambda s: s), "are not those of the experts' rows"),
    "other groups": (integer(lambda c: c.flip(0), lambda s: s), "are not those of the experts' rows"),
    "smooth tokens": (smooth_tokens, "multiplied by smooth scales before they are quantised"),
    "smooth activations": (smooth_activations, "multiplied by smooth scales before they are quantised"),
    "anywhere": (rows_of_integers_from_anywhere, "are integers, and no rule says of what"),
    "half": (one_product_of_floats, "quantised as none, w8a8: not all alike"),
    "integer bias": (integer_bias, "an integer bias, which is added before the scales"),
    "part": (part_of_the_rows, "multiplies a part of its quantised rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_sequence_that_means_something_else(case: str) -> None:
    layer, reasons = REFUSED[case]
    found = why(capture_graph(layer, operands()).graph_module)
    assert any(reason in found for reason in reasons.split("|")), found


# --- arguments that no kernel here has, set in a captured graph ---------------------------------------------

DROPPED = object()
"""An argument that is left out: its default in the schema holds."""

ARGUMENTS: tuple[tuple[str, str, str, Any, str], ...] = (
    ("w8a8_dequant_swiglu_quant", "npu_moe_init_routing_v2", "quant_mode", 0, "with quant_mode=0"),
    ("w8a8_dequant_swiglu_quant", "npu_moe_init_routing_v2", "quant_mode", 8, "with quant_mode=8"),
    (
        "w8a8_dequant_swiglu_quant",
        "npu_moe_init_routing_v2",
        "offset",
        "w",
        "rows are quantised with an offset",
    ),
    (
        "w8a8_dequant_swiglu_quant",
        "npu_dequant_swiglu_quant",
        "quant_mode",
        0,
        "static scales (quant_mode=0)",
    ),
    (
        "w8a8_dequant_swiglu_quant",
        "npu_dequant_swiglu_quant",
        "quant_offset",
        "w",
        "quantised with an offset",
    ),
    ("w8a8_dequant_swiglu_quant", "npu_dequant_swiglu_quant", "quant_scale", "w", "smooth scales"),
    ("w8a8_dequant_swiglu_quant", "npu_dequant_swiglu_quant", "swiglu_mode", 2, "swiglu_mode=2"),
    ("w8a8_dequant_swiglu_quant", "npu_dequant_swiglu_quant", "dst_type", 24, "another type than int8"),
    ("w8a8_dequant_swiglu_quant", "npu_dequant_swiglu_quant", "round_mode", 4, "rounded in another way"),
    (
        "w8a8_dequant_swiglu_quant",
        "npu_dequant_swiglu_quant",
        "activate_dim",
        0,
        "a gated activation over rows",
    ),
    (
        "w8a8_integer_product",
        "npu_dequant_swiglu_quant",
        "bias",
        "w",
        "a bias is added to an integer product",
    ),
    ("w8a8_swiglu_dynamic_quant", "npu_dynamic_quant", "quant_mode", "pertensor", "quantised pertensor"),
    ("w8a8_swiglu_dynamic_quant", "npu_dynamic_quant", "dst_type", 24, "to dtype number 24"),
    (
        "w8a8_swiglu_dynamic_quant",
        "npu_grouped_matmul",
        "scale_dtype",
        293,
        "a grouped GEMM with scale_dtype",
    ),
    (
        "w8a8_swiglu_dynamic_quant",
        "npu_grouped_matmul",
        "per_token_scale_dtype",
        293,
        "a grouped GEMM with per_token_scale_dtype",
    ),
    ("w8a8_swiglu_dynamic_quant", "npu_grouped_matmul", "offset", ["w"], "a grouped GEMM with offset"),
    ("w8a8_swiglu_dynamic_quant", "npu_grouped_matmul", "antiquant_scale", ["w"], "with antiquant_scale"),
    (
        "w8a8_fused_first_product",
        "npu_grouped_matmul_swiglu_quant_v2",
        "dequant_mode",
        2,
        "(dequant_mode=2,",
    ),
    ("w8a8_fused_first_product", "npu_grouped_matmul_swiglu_quant_v2", "quant_mode", 2, ", quant_mode=2,"),
    (
        "w8a8_fused_first_product",
        "npu_grouped_matmul_swiglu_quant_v2",
        "smooth_scale",
        "w",
        "and smooth_scale",
    ),
    (
        "w8a8_fused_last_product",
        "npu_grouped_matmul_finalize_routing",
        "shared_input",
        "w",
        "a shared expert's",
    ),
    ("w8a8_fused_last_product", "npu_grouped_matmul_finalize_routing", "row_index", None, "or row_index"),
    ("w8a8_swiglu_dynamic_quant", "npu_grouped_matmul", "group_type", None, "with group_type=None"),
    ("w8a8_swiglu_dynamic_quant", "npu_grouped_matmul", "group_type", DROPPED, "with group_type=None"),
    ("w8a8_swiglu_dynamic_quant", "npu_grouped_matmul", "split_item", DROPPED, "with split_item=0"),
    ("w4a8", "npu_grouped_matmul", "bias", None, "without the bias that makes up for its 8"),
    ("w8a16", "npu_grouped_matmul", "antiquant_scale", None, "without antiquant_scale"),
    ("w8a16", "npu_grouped_matmul", "scale", ["w"], "of torch.bfloat16 rows and integer weights with scale"),
)


@pytest.mark.parametrize(("name", "operator", "argument", "value", "reason"), ARGUMENTS)
def test_an_argument_that_has_no_rule(
    name: str, operator: str, argument: str, value: Any, reason: str
) -> None:
    case = CASES[name]
    graph_module = capture_graph(case.layer, operands(case.scheme)).graph_module
    node = next(n for n in graph_module.graph.nodes if str(n.target) == f"npu.{operator}.default")
    tensor = next(n for n in graph_module.graph.nodes if n.op == "placeholder")
    given: Any = [tensor] if value == ["w"] else tensor if value == "w" else value
    node.kwargs = {
        name: each for name, each in {**node.kwargs, argument: given}.items() if each is not DROPPED
    }
    assert reason in why(graph_module)


def test_int4_rows_of_an_int8_product() -> None:
    """The rows are packed, the weights aren't: the sizes of both would have to fit."""

    def layer(x: Tensor, logits: Tensor, *tensors: Tensor) -> Tensor:
        w, (routing, ids) = Weights(*tensors), route(logits)
        rows, row_idx, counts, _ = dispatch(x, ids, quant_mode=-1)
        rows, scales = npu.npu_dynamic_quant(rows)
        (h,) = npu.npu_grouped_matmul(
            [rows],
            [w.w13],
            scale=[encoded(w.s13)],
            per_token_scale=[scales],
            group_list=counts,
            group_list_type=1,
            group_type=0,
            split_item=2,
            output_dtype=BFLOAT16,
        )
        a, a_scales = npu.npu_dynamic_quant(npu.npu_swiglu(h))
        return finalize(gmm(a, w.w2, counts, scale=[w.s2], per_token_scale=[a_scales]), routing, row_idx)

    graph_module = capture_graph(layer, operands()).graph_module
    quant: Node = next(n for n in graph_module.graph.nodes if "dynamic_quant" in str(n.target))
    quant.kwargs = {"dst_type": 16}
    assert "int4 rows and int8 weights" in why(graph_module)
