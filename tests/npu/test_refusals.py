"""NPU sequences that aren't what they seem: refused with the reason, also where sizes collide (T = K, E = H)."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.passes.lift import explain
from moefuse.patterns.engine import lift
from moefuse.testing import capture_graph, rewrite_and_compare
from moefuse.testing.judge import judge, redraw
from moefuse.testing.mutations import mutants
from tests.npu.sequences import SEQUENCES, E, K, Layer, dispatch, finalize, gmm, k_major, mlp, npu, route

H = E  # as many features as experts
T = K  # as many tokens as slots


def operands() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, logits = torch.randn(T, H, generator=generator), torch.randn(T, E, generator=generator)
    return x, logits, torch.randn(E, H, 2 * H, generator=generator), torch.randn(E, H, H, generator=generator)


def token_major_by_mode_0(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    return finalize(mlp(rows, counts, w13, w2), weights, row_idx, drop_pad_mode=0)


def k_major_by_mode_2(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, sorted_ids = npu.npu_moe_init_routing(x, k_major(T), ids, T)
    ends = npu.npu_moe_compute_expert_tokens(sorted_ids, E).to(torch.int64)
    return finalize(mlp(rows, ends, w13, w2, 0), weights, row_idx, drop_pad_mode=2)


def token_major_row_ids(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    row_ids = torch.arange(T * K, dtype=torch.int32).view(-1, K)
    rows, row_idx, sorted_ids = npu.npu_moe_init_routing(x, row_ids, ids, T)
    ends = npu.npu_moe_compute_expert_tokens(sorted_ids, E).to(torch.int64)
    return finalize(mlp(rows, ends, w13, w2, 0), weights, row_idx, drop_pad_mode=0)


def row_ids_of_something_else(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, sorted_ids = npu.npu_moe_init_routing(x, ids, ids, T)
    ends = npu.npu_moe_compute_expert_tokens(sorted_ids, E).to(torch.int64)
    return finalize(mlp(rows, ends, w13, w2, 0), weights, row_idx, drop_pad_mode=0)


def slots_as_rows(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids, row_idx_type=1)
    return finalize(mlp(rows, counts, w13, w2), weights, row_idx)


def counts_as_ends(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    return finalize(mlp(rows, counts, w13, w2, 0), weights, row_idx)


def ends_as_counts(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, ends = dispatch(x, ids, expert_tokens_num_type=0)
    return finalize(mlp(rows, ends, w13, w2, 1), weights, row_idx)


def counts_that_nobody_asked_for(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, _ = dispatch(x, ids, expert_tokens_num_flag=False)
    return finalize(mlp(rows, torch.zeros(E, dtype=torch.int64), w13, w2), weights, row_idx)


def counts_of_all_but_the_first(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, ends = dispatch(x, ids, expert_tokens_num_type=0)
    counts = torch.cat([ends[:1] * 0, ends[1:] - ends[:-1]])
    return finalize(mlp(rows, counts, w13, w2), weights, row_idx)


def counts_over_two_experts(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, ends = dispatch(x, ids, expert_tokens_num_type=0)
    counts = torch.cat([ends[:2], ends[2:] - ends[:-2]])
    return finalize(mlp(rows, counts, w13, w2), weights, row_idx)


def ends_minus_themselves(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, ends = dispatch(x, ids, expert_tokens_num_type=0)
    counts = torch.cat([ends[:1], ends[1:] - ends[1:]])
    return finalize(mlp(rows, counts, w13, w2), weights, row_idx)


def counts_turned(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, ends = dispatch(x, ids, expert_tokens_num_type=0)
    counts = torch.cat([torch.diff(ends), ends[:1]])
    return finalize(mlp(rows, counts, w13, w2), weights, row_idx)


def groups_of_other_ids(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, _ = dispatch(x, ids)
    _, _, counts = dispatch(x, route(-logits)[1])
    return finalize(mlp(rows, counts, w13, w2), weights, row_idx)


def rows_of_another_dispatch(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, _, counts = dispatch(x, ids)
    _, row_idx, _ = dispatch(x, route(-logits)[1])
    return finalize(mlp(rows, counts, w13, w2), weights, row_idx)


def some_rows_only(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, sorted_ids = npu.npu_moe_init_routing(x, k_major(T), ids, T - 1)
    ends = npu.npu_moe_compute_expert_tokens(sorted_ids, E).to(torch.int64)
    rows = torch.cat([mlp(rows, ends, w13, w2, 0), torch.zeros(K, H)])
    return finalize(rows, weights, row_idx, drop_pad_mode=0)


def some_slots_only(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx = npu.npu_moe_token_permute(x, ids, T * K - 1)
    counts = torch.bincount(ids.view(-1), minlength=E)[:E]
    y = torch.cat([mlp(rows, counts, w13, w2), torch.zeros(1, H)])
    return npu.npu_moe_token_unpermute(y, row_idx, weights)


def some_experts(weigh: Callable[[Tensor, Tensor], Tensor], mode: int = 0, **options: Any) -> Layer:
    """The experts 4..7 only, combined by absolute rows (mode 0) or by a finalize routing."""

    def layer(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        weights, ids = route(logits)
        rows, row_idx, counts = dispatch(x, ids, active_expert_range=[E // 2, E], **options)
        y = mlp(rows, counts, w13[: E // 2], w2[: E // 2]).nan_to_num()
        weights = weigh(weights, ids)
        if mode:
            return finalize(y.unsqueeze(0) if mode == 3 else y, weights, row_idx, ids, drop_pad_mode=mode)
        return npu.npu_moe_token_unpermute(y, row_idx.abs(), weights)

    return layer


some_experts_weighed_alike = some_experts(lambda w, ids: w)
some_experts_by_the_others_mask = some_experts(lambda w, ids: w * (ids < E // 2))
some_experts_by_half_a_mask = some_experts(lambda w, ids: w * (ids >= E // 4))
some_experts_by_another_mask = some_experts(lambda w, ids: w * (w > 0.5))
some_experts_by_a_mask_that_adds = some_experts(lambda w, ids: w + (ids >= E // 2))
some_experts_by_mode_2 = some_experts(lambda w, ids: w * (ids >= E // 2), 2)
some_experts_slots = some_experts(lambda w, ids: w * (ids >= E // 2), row_idx_type=1)
for _name, _layer in list(globals().items()):
    if _name.startswith("some_experts_"):
        _layer.__name__ = _name


def tokens_of_any_ids(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """A slot with the id -1 goes to expert 0 here."""
    weights, ids = route(logits)
    rows, row_idx, sorted_ids = npu.npu_moe_init_routing(x, k_major(T), ids - 1, T)
    ends = npu.npu_moe_compute_expert_tokens(sorted_ids, E).to(torch.int64)
    return finalize(mlp(rows, ends, w13, w2, 0), weights, row_idx, drop_pad_mode=0)


def absolute_rows_of_any_ids(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids + logits.long().int()[:, :K] * 0)
    return npu.npu_moe_token_unpermute(mlp(rows, counts, w13, w2), row_idx.abs(), weights)


def absolute_rows_of_finished_tokens(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids, _ = npu.npu_moe_gating_top_k_softmax(logits, logits[:, 0] > 100, K)
    rows, row_idx, counts = dispatch(x, ids)
    return npu.npu_moe_token_unpermute(mlp(rows, counts, w13, w2), row_idx.abs(), weights)


def two_skips(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    y = mlp(rows, counts, w13, w2)
    return npu.npu_moe_finalize_routing(y, x, x + 1, None, weights, row_idx, ids, drop_pad_mode=2)


def rows_of_a_capacity(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """drop_pad_mode 3 on a block per expert."""
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    return finalize(mlp(rows, counts, w13, w2).view(2, -1, H), weights, row_idx, drop_pad_mode=3)


def some_lists_only(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Seven tensors for eight experts."""
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    h = npu.npu_swiglu(gmm(rows, [w.clone() for w in w13[1:]], counts))
    return finalize(gmm(h, [w2], counts), weights, row_idx)


def one_list_and_one_stack(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    h = npu.npu_swiglu(gmm(rows, [w.clone() for w in w13], counts))
    return finalize(gmm(h, [w2], counts), weights, row_idx)


def quantised_rows(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids, quant_mode=1)
    return finalize(mlp(rows.to(x.dtype), counts, w13, w2), weights, row_idx)


def an_activation_in_the_product(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    h = npu.npu_swiglu(gmm(rows, [w13], counts, act_type=1))
    return finalize(gmm(h, [w2], counts), weights, row_idx)


def a_scaled_product(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    h = npu.npu_swiglu(gmm(rows, [w13], counts, scale=[torch.ones(E, 2 * H)]))
    return finalize(gmm(h, [w2], counts), weights, row_idx)


def swiglu_over_rows(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    h = npu.npu_swiglu(gmm(rows, [w13], counts), 0).view(T * K, H)
    return finalize(gmm(h, [w2], counts), weights, row_idx)


REFUSED: dict[Layer, str] = {
    token_major_by_mode_0: "is not indexed by the token of each slot",
    k_major_by_mode_2: "is not indexed by the token of each slot",
    token_major_row_ids: "don't number the slots k-major",
    row_ids_of_something_else: "are not the numbers of the slots",
    slots_as_rows: "rows in sorted order are taken by the permutation itself",
    counts_as_ends: "the group list of the grouped GEMM is not the running counts of the ids",
    ends_as_counts: "the group list of the grouped GEMM is not the counts of the ids",
    counts_that_nobody_asked_for: "the group list of the grouped GEMM is not the counts of the ids",
    counts_of_all_but_the_first: "the group list of the grouped GEMM is not the counts of the ids",
    counts_over_two_experts: "the group list of the grouped GEMM is not the counts of the ids",
    ends_minus_themselves: "the group list of the grouped GEMM is not the counts of the ids",
    counts_turned: "the group list of the grouped GEMM is not the counts of the ids",
    groups_of_other_ids: "not the same ids",
    rows_of_another_dispatch: "meet rows in the order of",
    some_rows_only: "only the rows of the first 1 of 2 tokens are kept",
    some_slots_only: "only the rows of the first 3 of 4 slots are kept",
    some_experts_weighed_alike: "only slots of the experts 4..7 have a row",
    some_experts_by_the_others_mask: "only slots of the experts 4..7 have a row",
    some_experts_by_half_a_mask: "only slots of the experts 4..7 have a row",
    some_experts_by_another_mask: "only slots of the experts 4..7 have a row",
    some_experts_by_a_mask_that_adds: "only slots of the experts 4..7 have a row",
    some_experts_by_mode_2: "only slots of the experts 4..7 have a row",
    some_experts_slots: "the init routing takes the experts 4..7 only, and lists the slots of its rows",
    tokens_of_any_ids: "may be negative: a count of those that are at most e",
    absolute_rows_of_any_ids: "the absolute value of row indices",
    absolute_rows_of_finished_tokens: "the absolute value of row indices",
    two_skips: "adds two tensors",
    rows_of_a_capacity: "cuts through an index of",
    some_lists_only: "offsets for 8 experts, weights for 7",
    one_list_and_one_stack: "whose weights are selected by ids once more",
    quantised_rows: "read the integers of quantised rows as numbers of their own",
    an_activation_in_the_product: "a grouped GEMM with act_type=1",
    a_scaled_product: "a grouped GEMM of torch.float32 weights with scale",
    swiglu_over_rows: "a gated activation over rows",
}


@pytest.mark.parametrize("layer", REFUSED, ids=lambda layer: layer.__name__)
def test_a_sequence_that_means_something_else(layer: Layer) -> None:
    captured = capture_graph(layer, operands())
    lifted = lift(captured.graph_module.graph)
    why = "\n".join(explain(loss) for loss in lifted.losses.values())
    assert not lifted.sites, lifted.sites[0].spec.describe()
    assert REFUSED[layer] in why, why


# --- biases -----------------------------------------------------------------------------------------------


def biased(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, b13: Tensor, b2: Tensor) -> Tensor:
    """The first bias in the grouped GEMM, the second one in the finalize routing."""
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    h = npu.npu_swiglu(gmm(rows, [w13], counts, bias=[b13]))
    y = gmm(h, [w2], counts)
    return npu.npu_moe_finalize_routing(y, None, None, b2, weights, row_idx, ids, drop_pad_mode=2)


def biased_by_other_ids(
    x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, b13: Tensor, b2: Tensor
) -> Tensor:
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    y = mlp(rows, counts, w13, w2) + 0 * b13.sum()
    return npu.npu_moe_finalize_routing(
        y, None, None, b2, weights, row_idx, route(-logits)[1], drop_pad_mode=2
    )


def too_many_biases(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, b13: Tensor, b2: Tensor) -> Tensor:
    """Nine tensors of biases for eight experts."""
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    biases = [b.clone() for b in (*b13, b13[0])]
    h = npu.npu_swiglu(gmm(rows, [w.clone() for w in w13], counts, bias=biases))
    return finalize(gmm(h, [w.clone() for w in w2], counts), weights, row_idx) + 0 * b2.sum()


def test_biases() -> None:
    inputs = (*operands(), torch.randn(E, 2 * H), torch.randn(E, H))
    captured = capture_graph(biased, inputs)
    outcome = rewrite_and_compare(captured.graph_module, captured.inputs, expect_fused=1)
    spec = outcome.report.sites[0].spec
    assert (spec.has_bias1, spec.has_bias2) == (True, True)
    for wrong in (biased_by_other_ids, too_many_biases):
        captured = capture_graph(wrong, inputs)
        rewrite_and_compare(captured.graph_module, captured.inputs, expect_fused=0)


def in_another_order(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, b13: Tensor, b2: Tensor) -> Tensor:
    """Expert e works with the tensors of expert 7 - e; the biases are lists too."""
    weights, ids = route(logits)
    rows, row_idx, counts = dispatch(x, ids)
    h = npu.npu_swiglu(gmm(rows, w13.unbind(0)[::-1], counts, bias=b13.unbind(0)[::-1]))
    y = gmm(h, w2.unbind(0)[::-1], counts, bias=b2.unbind(0)[::-1])
    return finalize(y, weights, row_idx)


def test_lists_in_another_order_keep_it() -> None:
    inputs = (*operands(), torch.randn(E, 2 * H), torch.randn(E, H))
    captured = capture_graph(in_another_order, inputs)
    outcome = rewrite_and_compare(captured.graph_module, captured.inputs, expect_fused=1)
    spec = outcome.report.sites[0].spec
    assert (spec.weight_form, spec.has_bias1, spec.has_bias2) == ("list", True, True)


# --- what others read -------------------------------------------------------------------------------------


def test_counts_may_be_read_by_others_and_rows_may_not() -> None:
    def returns(what: int) -> Callable[..., Any]:
        def layer(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Any:
            weights, ids = route(logits)
            rows, row_idx, counts = dispatch(x, ids)
            y = mlp(rows, counts, w13, w2)
            return finalize(y, weights, row_idx), (counts, y)[what]

        return layer

    captured = capture_graph(returns(0), operands())
    rewrite_and_compare(captured.graph_module, captured.inputs, expect_fused=1)
    captured = capture_graph(returns(1), operands())
    outcome = rewrite_and_compare(captured.graph_module, captured.inputs, expect_fused=0)
    assert "are also read by" in outcome.report.sites[0].reason


# --- changed at random ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sglang_bf16", "sglang_legacy", "vllm_allgather", "token_permute"])
def test_changed_sequences_are_refused_or_right(name: str) -> None:
    captured = capture_graph(SEQUENCES[name], operands())
    inputs = [captured.inputs, redraw(captured.inputs, 1)]
    kinds = []
    for mutant in mutants(captured.graph_module, limit=15, seed=3):
        if not all(written(mutant.graph_module, values) for values in inputs):
            continue
        verdict = judge(mutant.graph_module, inputs)
        assert verdict.kind != "wrong", f"{mutant.kind}: {mutant.detail}\n{verdict.reason}"
        kinds.append(verdict.kind)
    assert {"equal", "refused"} <= set(kinds)


def written(graph_module: torch.fx.GraphModule, values: Sequence[Any]) -> bool:
    """True unless the graph itself reads rows that an operator leaves unwritten (NaN), or crashes."""
    try:
        results = graph_module(*values)
    except Exception:  # an edit may well make the graph index out of bounds
        return False
    return all(bool(result.isfinite().all()) for result in results)
