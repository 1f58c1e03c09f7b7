"""Expert GEMMs: grouped, batched over gathered weights, batched over all experts."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.patterns.spelling import E, H, I, K, T, gathered, offsets, operands, study

X, IDS, _, W1, W2 = operands()
WIDE = W1.transpose(1, 2).contiguous()
"""The first weight with in-features first, [E, H, 2 I]."""

OTHER = IDS.flip(0).clone()


def gmm(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return torch._grouped_mm(rows, weight, offs)


def in_expert_order(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids.view(-1).argsort() // K]


# --- grouped ---------------------------------------------------------------------------------------------


def test_the_layout_of_the_weight_shows_in_its_index() -> None:
    first = study(lambda x, ids, w: gmm(in_expert_order(x, ids), w, offsets(ids.view(-1))), X, IDS, WIDE)
    assert first.meaning == "dot(x[t h], w[<ids[t k]> h n]; h) over P(t k), n"
    turned = study(
        lambda x, ids, w: gmm(in_expert_order(x, ids), w.transpose(1, 2), offsets(ids.view(-1))), X, IDS, W1
    )
    assert turned.meaning == "dot(x[t h], w[<ids[t k]> n h]; h) over P(t k), n"


def test_the_fallback_of_transformers_means_the_same() -> None:
    pytest.importorskip("transformers.integrations.moe")

    def fallback(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return torch.ops.transformers.grouped_mm_fallback(in_expert_order(x, ids), w, offsets(ids.view(-1)))

    assert study(fallback, X.float(), IDS, WIDE.float()).meaning == (
        "dot(x[t h], w[<ids[t k]> h n]; h) over P(t k), n"
    )


def test_a_grouped_gemm_never_counts_ids_from_the_end() -> None:
    result = study(lambda x, ids, w: gmm(in_expert_order(x, ids), w, offsets(ids.view(-1))), X, IDS, WIDE)
    dot = result.lifted.facts[result.outputs[0]].expr  # type: ignore[union-attr]
    assert not dot.b.selectors[0].wraps  # type: ignore[attr-defined]


def counts(ids: Tensor) -> Tensor:
    return torch.histc(ids.view(-1).float(), bins=E, min=0, max=E - 1).int()


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "rows in slot order": (
        lambda x, ids, other, w: gmm(x.repeat_interleave(K, 0), w, offsets(ids.view(-1))),
        "rows of the grouped GEMM are not in the order of a sort by expert",
    ),
    "offsets of other ids": (
        lambda x, ids, other, w: gmm(in_expert_order(x, ids), w, offsets(other.view(-1))),
        "rows are sorted by `ids`, offsets count `other`: not the same ids",
    ),
    "counts instead of offsets": (
        lambda x, ids, other, w: gmm(in_expert_order(x, ids), w, counts(ids)),
        "offsets of the grouped GEMM are not the running counts of the ids",
    ),
    "offsets of other arithmetic": (
        lambda x, ids, other, w: gmm(
            in_expert_order(x, ids), w, counts(ids).cumsum(0, dtype=torch.int32) * 1 // 1
        ),
        "offsets of the grouped GEMM are not the running counts of the ids",
    ),
    "rows sorted by descending expert": (
        lambda x, ids, other, w: gmm(x[ids.view(-1).argsort(descending=True) // K], w, offsets(ids.view(-1))),
        "rows of the grouped GEMM are not in the order of a sort by expert",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_grouped_gemm_refused(name: str) -> None:
    function, words = REFUSED[name]
    result = study(function, X, IDS, OTHER, WIDE)
    assert result.meaning == "?"
    result.refused(words)


def test_offsets_for_fewer_experts_than_weights() -> None:
    """No operator accepts it when it runs; a graph can say it all the same."""

    def layer(x: Tensor, ids: Tensor, w: Tensor, more: Tensor) -> Tensor:
        return gmm(in_expert_order(x, ids), w, offsets(ids.view(-1)))

    result = study(layer, X, IDS, WIDE, torch.cat([WIDE, WIDE]))
    (gemm,) = result.outputs
    more = result.graph_module.graph.find_nodes(op="placeholder")[-1]
    gemm.args = (gemm.args[0], more, gemm.args[2])
    result.refused(f"offsets for {E} experts, weights for {2 * E}")


# --- batched over gathered weights -----------------------------------------------------------------------

GATHERED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Tensor, str]] = {
    "weight on the left": (
        lambda x, ids, w: torch.bmm(w[ids.view(-1)], x.repeat_interleave(K, 0).unsqueeze(-1)),
        W1,
        "dot(w[<ids[t k]> n h], x[t h]; h) over t k, n, 1",
    ),
    "weight on the right": (
        lambda x, ids, w: torch.bmm(x.repeat_interleave(K, 0).unsqueeze(1), w[ids.view(-1)]),
        WIDE,
        "dot(x[t h], w[<ids[t k]> h n]; h) over t k, 1, n",
    ),
    "einsum over tokens and slots": (
        lambda x, ids, w: torch.einsum("th,tkoh->tko", x, w[ids]),
        W1,
        "dot(x[t h], w[<ids[t k]> n h]; h) over t, k, n",
    ),
    "weight in expert order": (
        lambda x, ids, w: torch.bmm(x[ids.view(-1).argsort() // K].unsqueeze(1), w[ids.view(-1).sort()[0]]),
        WIDE,
        "?",
    ),
}


@pytest.mark.parametrize("name", GATHERED)
def test_batched_gemm_with_gathered_weights(name: str) -> None:
    function, weight, meaning = GATHERED[name]
    assert study(function, X, IDS, weight).meaning == meaning


def test_one_sort_serves_rows_and_gathered_weights() -> None:
    def layer(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        chosen, perm = ids.view(-1).sort()
        return torch.bmm(x[perm // K].unsqueeze(1), w[chosen])

    assert study(layer, X, IDS, WIDE).meaning == "dot(x[t h], w[<ids[t k]> h n]; h) over P(t k), 1, n"


# --- batched over all experts ----------------------------------------------------------------------------


def scores(logits: Tensor) -> Tensor:
    """Top-k scores, [E, T], zero where an expert wasn't chosen."""
    values, ids = logits.topk(K)
    return torch.zeros_like(logits).scatter(1, ids, values).t()


LOGITS = torch.randn(T, E, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_every_expert_on_scored_rows() -> None:
    def layer(x: Tensor, logits: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(x.expand(E, T, H) * scores(logits).unsqueeze(-1), w)

    assert study(layer, X, LOGITS, WIDE).meaning == (
        "dot(mul(x[t h], dense(getitem[t k] where getitem_1[t k] == e else 0)), w[e h n]; h) over e, t, n"
    )


def test_products_without_routing_stay_opaque() -> None:
    for result in (
        study(lambda x, w: torch.bmm(x.expand(E, T, H), w), X, WIDE),
        study(lambda x, w: x @ w[0], X, WIDE),
        study(lambda x, w: x.view(2, 3, H) @ w[:2], X, WIDE),
    ):
        assert "dot" not in result.meaning
        assert not result.lifted.losses


def dense_layer_behind(x: Tensor, ids: Tensor, w: Tensor, w2: Tensor, bias: Tensor) -> Tensor:
    rows = torch.bmm(x.repeat_interleave(K, 0).unsqueeze(1), w[ids.view(-1)]).squeeze(1)
    rows = torch.bmm(rows[:, :I].unsqueeze(1), w2[ids.view(-1)].transpose(1, 2)).squeeze(1)
    return torch.addmm(bias, rows, w[0, :, :H]).view(T, K, H).sum(1)


def test_a_dense_layer_over_expert_rows_is_no_part_of_the_layer() -> None:
    result = study(dense_layer_behind, X, IDS, WIDE, W2, W1[0, 0])
    result.refused("stands between the second expert GEMM and the combine")


def test_sizes_that_collide_are_told_apart() -> None:
    """E = H = 2 I: the selected dimension is the expert, whatever its size."""
    square = torch.randn(E, E, E)
    result = study(lambda x, ids, w: torch.einsum("th,tkoh->tko", x, w[ids]), torch.randn(T, E), IDS, square)
    assert result.meaning == "dot(x[t e'], w[<ids[t k]> e e']; e') over t, k, e"


def test_a_weight_whose_inputs_lie_over_two_dimensions_is_one_weight() -> None:
    """Groups of 8 inputs with a scale each: the product is made as [E, N, H / 8, 8] and viewed as [E, N, H]."""

    def layer(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, scale: Tensor) -> Tensor:
        scaled = (w1.view(*w1.shape[:2], -1, 8) * scale.unsqueeze(-1)).flatten(-2)
        return gathered(x, ids, weights, scaled, w2)

    x, ids, weights, w1, w2 = operands(torch.float32)
    study(layer, x, ids, weights, w1, w2, torch.rand(*w1.shape[:2], H // 8) + 0.5).fused()
