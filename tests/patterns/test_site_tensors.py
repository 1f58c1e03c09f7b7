"""A whole layer: which tensors it reads, how gate and up lie in them, and their dtypes and sizes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.patterns.site_spelling import IDS, W1, W2, Layer, W, X, first, layer, second, wide
from tests.patterns.spelling import E, H, I, K, T, ffn, gathered, offsets, operands, study, swiglu

# --- layouts ---------------------------------------------------------------------------------------------


def halves(gate: Callable[[Tensor], Tensor], up: Callable[[Tensor], Tensor]) -> Layer:
    silu = torch.nn.functional.silu
    return lambda x, ids, w, w1, w2: gathered(x, ids, w, w1, w2, act=lambda h: silu(gate(h)) * up(h))


GATE_UP: dict[str, tuple[Layer, str]] = {
    "concat": (halves(lambda h: h[..., :I], lambda h: h[..., I:]), "concat"),
    "concat_swapped": (halves(lambda h: h[..., I:], lambda h: h[..., :I]), "concat_swapped"),
    "interleaved": (halves(lambda h: h[..., ::2], lambda h: h[..., 1::2]), "interleaved"),
    "interleaved_swapped": (halves(lambda h: h[..., 1::2], lambda h: h[..., ::2]), "interleaved_swapped"),
    "pairs": (
        halves(lambda h: h.view(T, K, I, 2)[..., 0], lambda h: h.view(T, K, I, 2)[..., 1]),
        "interleaved",
    ),
    "blocks": (
        halves(lambda h: h.view(T, K, 2, I)[..., 0, :], lambda h: h.view(T, K, 2, I).select(-2, 1)),
        "concat",
    ),
}


@pytest.mark.parametrize("name", GATE_UP)
def test_where_gate_and_up_lie(name: str) -> None:
    function, gate_up = GATE_UP[name]
    result = layer(function)
    assert result.site.spec.gate_up == gate_up
    assert result.site.spec.intermediate == I
    assert len(result.site.layer.weight1) == 1
    result.fused()


def separate(x: Tensor, ids: Tensor, w: Tensor, wg: Tensor, wu: Tensor, w2: Tensor) -> Tensor:
    act = torch.nn.functional.silu(first(x, ids, wg)) * first(x, ids, wu)
    return (second(act, ids, w2) * wide(w)).sum(1)


def test_gate_and_up_of_their_own() -> None:
    result = study(separate, X, IDS, W, W1[:, :I].clone(), W1[:, I:].clone(), W2)
    assert result.site.spec.gate_up == "separate"
    assert [leaf.node.name for leaf in result.site.layer.weight1] == ["wg", "wu"]
    result.fused()


def test_weights_of_either_orientation() -> None:
    def turned(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        act = swiglu(torch.einsum("th,tkho->tko", x, w1[ids]))
        return (torch.einsum("tki,tkio->tko", act, w2[ids]) * wide(w)).sum(1)

    spec = layer(gathered).site.spec
    assert (spec.transpose_weight1, spec.transpose_weight2) == (True, True)
    result = study(turned, X, IDS, W, W1.transpose(1, 2).contiguous(), W2.transpose(1, 2).contiguous())
    assert (result.site.spec.transpose_weight1, result.site.spec.transpose_weight2) == (False, False)
    result.fused()


def test_square_weights_keep_their_orientation() -> None:
    """E = H = I: sizes say nothing."""
    size = E
    x, w1, w2 = torch.randn(T, size), torch.randn(E, 2 * size, size), torch.randn(E, size, size)

    def one_turned(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        act = swiglu(first(x, ids, w1))
        return (torch.einsum("tki,tkio->tko", act, w2[ids]) * wide(w)).sum(1)

    assert study(gathered, x, IDS, W, w1, w2).site.spec.transpose_weight2
    result = study(one_turned, x, IDS, W, w1, w2)
    assert not result.site.spec.transpose_weight2
    result.fused()


def test_the_output_may_be_wider_than_the_input() -> None:
    result = study(gathered, X, IDS, W, W1, torch.randn(E, 2 * H, I))
    assert (result.site.spec.hidden, result.site.spec.out_features) == (H, 2 * H)
    result.fused()


BIASES: dict[str, tuple[bool, bool]] = {"both": (True, True), "first": (True, False), "second": (False, True)}


@pytest.mark.parametrize("name", BIASES)
def test_biases(name: str) -> None:
    one, two = BIASES[name]

    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
        h1 = first(x, ids, w1)
        h2 = second(swiglu(h1 + b1[ids] if one else h1), ids, w2)
        return (wide(w) * (b2[ids] + h2 if two else h2)).sum(1)

    result = study(forward, X, IDS, W, W1, W2, torch.randn(E, 2 * I), torch.randn(E, H))
    assert (result.site.spec.has_bias1, result.site.spec.has_bias2) == (one, two)
    result.fused()


# --- dtypes and sizes ------------------------------------------------------------------------------------


def test_what_the_spec_says() -> None:
    spec = layer(gathered).site.spec
    assert (spec.num_experts, spec.top_k, spec.hidden, spec.intermediate, spec.out_features) == (
        E,
        K,
        H,
        I,
        H,
    )
    assert (spec.x_dtype, spec.expert_dtype, spec.router_dtype, spec.output_dtype) == (torch.float32,) * 4
    assert not spec.ids_checked, "ids are an input: nobody knows their range"


def test_ids_of_a_top_k_over_all_experts_are_checked() -> None:
    def routed(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        w, ids = logits.topk(K)
        return gathered(x, ids, w, w1, w2)

    logits = torch.randn(T, E)
    assert study(routed, X, logits, W1, W2).site.spec.ids_checked
    few = study(routed, X, logits, torch.cat([W1, W1]), torch.cat([W2, W2]))
    assert not few.site.spec.ids_checked, "a top-k over fewer than the experts"


def test_dtypes_are_read_from_the_graph() -> None:
    def mixed(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        rows = second(swiglu(first(x.bfloat16(), ids, w1)), ids, w2)
        return (rows * wide(w)).sum(1)

    x, ids, w, w1, w2 = operands()
    spec = study(mixed, x.float(), ids, w.float(), w1, w2).site.spec
    assert (spec.x_dtype, spec.expert_dtype, spec.router_dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    assert spec.output_dtype == torch.float32


CASTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "selected, then cast": lambda weight, ids: weight[ids].bfloat16(),
    "cast, then selected": lambda weight, ids: weight.bfloat16()[ids],
    "by way of a wider dtype": lambda weight, ids: weight.double()[ids].bfloat16(),
}


@pytest.mark.parametrize("name", CASTS)
def test_weights_are_read_as_they_are_stored(name: str) -> None:
    """As under autocast: the node casts an expert's weights as it uses them."""
    cast = CASTS[name]

    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h = torch.einsum("th,tkoh->tko", x, cast(w1, ids))
        return (torch.einsum("tki,tkoi->tko", swiglu(h), cast(w2, ids)) * wide(w)).sum(1)

    result = study(forward, X.bfloat16(), IDS, W, W1, W2)
    spec = result.site.spec
    assert (spec.x_dtype, spec.expert_dtype) == (torch.bfloat16, torch.float32)
    assert "float32, computed in bfloat16" in spec.describe()
    assert [leaf.node.name for leaf in (*result.site.layer.weight1, *result.site.layer.weight2)] == [
        "w1",
        "w2",
    ]
    after = result.fused().graph_module
    assert not [node for node in after.graph.nodes if node.target is torch.ops.aten._to_copy.default]


def test_narrow_weights_in_a_wide_layer() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return gathered(x, ids, w, w1.float(), w2.float())

    result = study(forward, X, IDS, W, W1.bfloat16(), W2.bfloat16())
    assert (result.site.spec.x_dtype, result.site.spec.expert_dtype) == (torch.float32, torch.bfloat16)
    result.fused()


@pytest.mark.parametrize("late", [True, False])
def test_weights_that_are_rounded_on_the_way_are_others(late: bool) -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        chosen = w1[ids].bfloat16().float() if late else w1.bfloat16().float()[ids]
        h = torch.einsum("th,tkoh->tko", x, chosen)
        return (torch.einsum("tki,tkoi->tko", swiglu(h), w2[ids]) * wide(w)).sum(1)

    layer(forward).refused("`w1` are rounded to torch.bfloat16 on the way to torch.float32")


ROUNDED: dict[str, Layer] = {
    "after the first GEMM": lambda x, ids, w, w1, w2: gathered(
        x, ids, w, w1, w2, act=lambda h: swiglu(h.bfloat16().float())
    ),
    "activation": lambda x, ids, w, w1, w2: gathered(
        x, ids, w, w1, w2, act=lambda h: swiglu(h).half().float()
    ),
    "after the second GEMM": lambda x, ids, w, w1, w2: (
        second(swiglu(first(x, ids, w1)), ids, w2).bfloat16().float() * wide(w)
    ).sum(1),
    "weighted rows": lambda x, ids, w, w1, w2: (
        (second(swiglu(first(x, ids, w1)), ids, w2) * wide(w)).half().float()
    ).sum(1),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rows_that_are_rounded_on_purpose_are_others(name: str) -> None:
    """A float32 layer that emulates half precision, or means the infinities that it makes."""
    layer(ROUNDED[name]).refused("rounds expert rows, or their weights, to torch.")


def test_weighted_inputs_that_are_rounded_on_purpose_are_others() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        perm = ids.reshape(-1).argsort()
        rows = (x[perm // K] * w.reshape(-1)[perm].unsqueeze(-1)).half().to(x.dtype)
        return ffn(rows, offsets(ids.reshape(-1)), w1, w2)[perm.argsort()].view(T, K, H).sum(1)

    study(forward, *operands(torch.bfloat16)).refused(
        "rounds expert rows, or their weights, to torch.float16"
    )


def test_rows_may_be_rounded_to_a_dtype_that_the_layer_has() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h = first(x, ids, w1).float()
        a = swiglu(h).to(x.dtype)
        return ((second(a, ids, w2).float() * wide(w).float()).to(x.dtype)).sum(1)

    study(forward, *operands(torch.bfloat16)).fused()


FACTORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a large number": lambda rows, w: rows * 1e5 * w,
    "two small weights": lambda rows, w: rows * 1e4 * (w * 1e-4) * (w * 1e-4),
    "divided by a small weight": lambda rows, w: rows / (w * 1e-5 + 1e-6),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_rows_keep_their_range_in_one_weight(name: str) -> None:
    """float16 holds 6e-8 to 65504: each factor does here, and what it makes of a row; their product need not."""
    x, ids, w, w1, w2 = operands(torch.float16)

    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return FACTORS[name](second(swiglu(first(x, ids, w1)), ids, w2), wide(w)).sum(1)

    result = study(forward, x * 1e-3, ids, w, w1, w2)
    assert result.site.spec.router_dtype == torch.float32
    result.fused()


def test_a_loop_reads_its_weights_as_they_are_stored() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            rows = swiglu(x[token] @ w1[e].bfloat16().t()) @ w2[e].bfloat16().t()
            y = y.index_add(0, token, rows * w[token, slot, None])
        return y

    result = study(forward, X.bfloat16(), IDS, W.bfloat16(), W1, W2)
    assert result.site.spec.expert_dtype == torch.float32
    result.fused()


def test_symbolic_tokens_fuse_for_any_number() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        perm = flat.argsort()
        rows = ffn(x[perm // K], offsets(flat), w1, w2)[perm.argsort()]
        return (rows.view(-1, K, H) * w.unsqueeze(-1)).sum(1)

    result = study(forward, *operands(), dynamic={0: [0], 1: [0], 2: [0]})
    assert result.site.spec.top_k == K
    fused = result.fused().graph_module
    for tokens in (1, 2, 9):
        values = operands(tokens=tokens)
        (expected,), (got,) = result.graph_module(*values), fused(*values)
        # Sums of K bfloat16 products in another order.
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.02)


def test_more_than_one_token_dimension() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        act = swiglu(torch.einsum("bth,btkoh->btko", x, w1[ids]))
        return (torch.einsum("btki,btkoi->btko", act, w2[ids]) * wide(w)).sum(2)

    result = study(forward, X.view(2, 3, H), IDS.view(2, 3, K), W.view(2, 3, K), W1, W2)
    assert len(result.site.layer.tokens) == 2
    result.fused()
