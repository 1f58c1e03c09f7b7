"""A whole layer: where its routing weights multiply, and what it must not be."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.patterns.site_spelling import IDS, SCALE, W1, W2, Layer, W, X, first, layer, second, wide
from tests.patterns.spelling import H, I, K, T, ffn, gathered, grouped, offsets, operands, study, swiglu

# --- routing weights -------------------------------------------------------------------------------------


def output(factor: Callable[[Tensor], Tensor]) -> Layer:
    return lambda x, ids, w, w1, w2: (second(swiglu(first(x, ids, w1)), ids, w2) * factor(w)).sum(1)


def middle(factor: Callable[[Tensor], Tensor]) -> Layer:
    return lambda x, ids, w, w1, w2: second(swiglu(first(x, ids, w1)) * factor(w), ids, w2).sum(1)


def inputs(factor: Callable[[Tensor], Tensor]) -> Layer:
    return lambda x, ids, w, w1, w2: second(swiglu(first(x.unsqueeze(1) * factor(w), ids, w1)), ids, w2).sum(
        1
    )


POSITIONS: dict[str, tuple[Layer, str]] = {
    "output": (output(wide), "output"),
    "output, factor first": (
        lambda x, ids, w, w1, w2: (wide(w) * second(swiglu(first(x, ids, w1)), ids, w2)).sum(1),
        "output",
    ),
    "output, contracted": (
        lambda x, ids, w, w1, w2: torch.einsum("tkh,tk->th", second(swiglu(first(x, ids, w1)), ids, w2), w),
        "output",
    ),
    "output, through float64": (output(lambda w: wide(w.double()).float()), "output"),
    "output, divided": (
        lambda x, ids, w, w1, w2: (second(swiglu(first(x, ids, w1)), ids, w2) / wide(w + 1)).sum(1),
        "output",
    ),
    "output and a constant": (output(lambda w: wide(w) * 2.5), "output"),
    "two factors": (
        lambda x, ids, w, w1, w2: (second(swiglu(first(x, ids, w1)), ids, w2) * wide(w) * wide(w + 1)).sum(1),
        "output",
    ),
    "two constants besides": (
        lambda x, ids, w, w1, w2: (second(swiglu(first(x, ids, w1)), ids, w2) * 0.5 * wide(w) * 3.0).sum(1),
        "output",
    ),
    "middle": (middle(wide), "mid"),
    "input": (inputs(wide), "input"),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_weight_position(name: str) -> None:
    function, position = POSITIONS[name]
    result = layer(function)
    assert result.site.spec.weight_position == position
    assert result.site.spec.has_router_weight
    result.fused()


def test_no_weight_and_a_constant() -> None:
    bare = layer(lambda x, ids, w, w1, w2: second(swiglu(first(x, ids, w1)), ids, w2).sum(1))
    assert not bare.site.spec.has_router_weight
    bare.fused()
    scaled = layer(lambda x, ids, w, w1, w2: (second(swiglu(first(x, ids, w1)), ids, w2) * 2.0).sum(1))
    assert not scaled.site.spec.has_router_weight
    scaled.fused()


@pytest.mark.parametrize("place", ["output", "mid"])
def test_a_scale_per_expert_joins_the_routing_weight(place: str) -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor, scale: Tensor) -> Tensor:
        act = swiglu(first(x, ids, w1))
        if place == "mid":
            return second(act * wide(w) * wide(scale[ids]), ids, w2).sum(1)
        return (second(act, ids, w2) * wide(w) * wide(scale[ids])).sum(1)

    result = study(forward, X, IDS, W, W1, W2, SCALE)
    assert result.site.spec.weight_position == place
    assert len(result.site.layer.weights) == 2
    result.fused()


def test_weights_in_expert_order() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor, scale: Tensor) -> Tensor:
        chosen, perm = ids.reshape(-1).sort()
        rows = ffn(x[perm // K], offsets(ids.reshape(-1)), w1, w2)
        rows = rows * w.reshape(-1)[perm].unsqueeze(-1) * scale[chosen].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, perm // K, rows)

    x, ids, w, w1, w2 = operands()
    result = study(forward, x, ids, w, w1, w2, SCALE.bfloat16())
    assert len(result.site.layer.weights) == 2
    result.fused()


def test_constants_stay_where_they_are() -> None:
    """A constant on the input or inside does not commute with the activation."""
    for function in (
        lambda x, ids, w, w1, w2: gathered(x * 2, ids, w, w1, w2),
        lambda x, ids, w, w1, w2: (second(swiglu(first(x, ids, w1)) * 2, ids, w2) * wide(w)).sum(1),
        lambda x, ids, w, w1, w2: (second(swiglu(first(x, ids, w1) * 2), ids, w2) * wide(w)).sum(1),
    ):
        result = layer(function)
        assert result.site.spec.weight_position == "output"
        result.fused()


WRONG_WEIGHTS: dict[str, tuple[Layer, str]] = {
    "at two places": (
        lambda x, ids, w, w1, w2: (second(swiglu(first(x, ids, w1)) * wide(w), ids, w2) * wide(w)).sum(1),
        "routing weights at several places of the layer: output, mid",
    ),
    "a value per feature": (
        lambda x, ids, w, w1, w2: (second(swiglu(first(x, ids, w1)), ids, w2) * x.unsqueeze(1)).sum(1),
        "`x` weighs expert outputs by more than the slot",
    ),
    "a product of two outputs": (
        lambda x, ids, w, w1, w2: (second(swiglu(first(x, ids, w1)), ids, w2) ** 2).sum(1),
        "aten.pow.Tensor_Scalar (`pow_1`) stands between the second expert GEMM and the combine",
    ),
    "a square": (
        lambda x, ids, w, w1, w2: (
            second(swiglu(first(x, ids, w1)), ids, w2) * second(swiglu(first(x, ids, w1)), ids, w2)
        ).sum(1),
        "a product of 2 expert outputs where one is expected",
    ),
}


@pytest.mark.parametrize("name", WRONG_WEIGHTS)
def test_weights_refused(name: str) -> None:
    function, words = WRONG_WEIGHTS[name]
    layer(function).refused(words)


def test_a_router_may_make_its_weights_from_anything() -> None:
    """Rolled, softmaxed, whatever: the weight is the tensor that is multiplied in."""
    layer(output(lambda w: wide(w.roll(1, 0)))).fused()
    layer(output(lambda w: wide(w.flip(1)))).fused()


def test_weights_of_another_slot_order_are_no_weights_of_the_slots() -> None:
    """[K, T] weights viewed as [T, K]: the view cuts both axes and becomes a tensor of its own."""
    result = layer(output(lambda w: wide(w.t().reshape(T, K))))
    result.fused()
    (weight,) = result.site.layer.weights
    assert weight.node.name != "weights"  # type: ignore[attr-defined]


# --- what it must not be ---------------------------------------------------------------------------------

NO_LAYER: dict[str, tuple[Layer, str]] = {
    "second weight by other ids": (
        lambda x, ids, w, w1, w2: (second(swiglu(first(x, ids, w1)), ids.flip(0), w2) * wide(w)).sum(1),
        "is selected by other ids than the rest of the layer",
    ),
    "GEMMs in different dtypes": (
        lambda x, ids, w, w1, w2: (
            second(swiglu(torch.einsum("th,tkoh->tko", x.double(), w1[ids].double())).float(), ids, w2)
            * wide(w)
        ).sum(1),
        "the expert GEMMs run in different dtypes: torch.float32, torch.float64",
    ),
    "no first GEMM": (
        lambda x, ids, w, w1, w2: (
            torch.einsum("ti,tkoi->tko", x[:, :H].repeat(1, 2)[:, :I], w2[ids]) * wide(w)
        ).sum(1),
        "each expert is one product",
    ),
    "rows of the neighbour token for gate": (
        lambda x, ids, w, w1, w2: (
            second(
                torch.nn.functional.silu(first(x.roll(1, 0), ids, w1[:, :I])) * first(x, ids, w1[:, I:]),
                ids,
                w2,
            )
            * wide(w)
        ).sum(1),
        "gate and up GEMM read different rows",
    ),
    "two layers in one sum": (
        lambda x, ids, w, w1, w2: (
            second(swiglu(first(x, ids, w1)), ids, w2) + second(swiglu(first(x, ids, w1)), ids, w2)
        ).sum(1),
        "aten.add.Tensor (`add`) stands between the second expert GEMM and the combine",
    ),
    "a residual inside the sum": (
        lambda x, ids, w, w1, w2: (
            (second(swiglu(first(x, ids, w1)), ids, w2) + x.unsqueeze(1)) * wide(w)
        ).sum(1),
        "aten.add.Tensor (`add`) stands between the second expert GEMM and the combine",
    ),
}


@pytest.mark.parametrize("name", NO_LAYER)
def test_no_layer(name: str) -> None:
    function, words = NO_LAYER[name]
    layer(function).refused(words)


def test_rows_that_differ_between_the_slots_are_tokens_of_their_own() -> None:
    """One slot for each of T K rows; the sum over the slots stays behind the node."""
    result = layer(
        lambda x, ids, w, w1, w2: second(swiglu(first(x.unsqueeze(1) + wide(w), ids, w1)), ids, w2).sum(1)
    )
    assert result.site.spec.top_k == 1
    assert result.fused().graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.sum.dim_IntList
    )


def test_as_many_tokens_as_slots_per_token() -> None:
    """T = K: rows by `perm % K` have the right shape and are the wrong rows."""
    x, ids, w, w1, w2 = operands(tokens=K)

    def wrong(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        perm = ids.reshape(-1).argsort()
        rows = ffn(x[perm % K], offsets(ids.reshape(-1)), w1, w2)[perm.argsort()]
        return (rows.view(K, K, H) * w.unsqueeze(-1)).sum(1)

    study(wrong, x, ids, w, w1, w2).refused("`x` is not indexed by the token of each slot")


def test_sum_over_tokens_where_tokens_and_slots_are_as_many() -> None:
    x, ids, w, w1, w2 = operands(torch.float32, tokens=K)
    wrong = study(
        lambda x, ids, w, w1, w2: (second(swiglu(first(x, ids, w1)), ids, w2) * wide(w)).sum(0),
        x,
        ids,
        w,
        w1,
        w2,
    )
    wrong.refused("is not indexed by the token of each slot")


def test_two_layers_are_two_sites() -> None:
    result = study(
        lambda x, ids, w, w1, w2: gathered(gathered(x, ids, w, w1, w2), ids, w, w1, w2), X, IDS, W, W1, W2
    )
    assert len(result.lifted.sites) == 2
    one, two = result.lifted.sites
    assert one.node < two.node
    assert one.gemms.isdisjoint(two.gemms)
    result.fused(2)


def test_a_faithful_reading_of_a_strange_layer() -> None:
    """Nothing says that gate comes first or that weights are routing weights: the node computes the graph."""
    result = study(grouped, *operands())
    assert result.site.spec.describe() == "4 experts, top-2, 16 -> 24 (swiglu) -> 16, bfloat16"
