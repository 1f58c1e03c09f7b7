"""The reference kernels against loops over Python numbers, written from the operator text and nothing else."""

import math
from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from moefuse.testing import npu_reference_kernels

npu_reference_kernels.install()
npu = torch.ops.npu

H = 4
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(4, 6))
"""Tokens, slots per token, experts: small, so that they are often equal."""


def routed(tokens: int, k: int, experts: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(tokens, experts).argsort(-1)[:, :k].contiguous().int()
    return torch.randn(tokens, H), ids


def by_expert(ids: Tensor) -> list[tuple[int, int, int]]:
    """(expert, token, slot) in expert order, ties in slot order."""
    tokens, k = ids.shape
    return sorted((int(ids[t, j]), t, j) for t in range(tokens) for j in range(k))


@hypothesis.given(SIZES)
def test_gating_top_k_softmax(sizes: tuple[int, int, int]) -> None:
    tokens, k, experts = sizes
    logits = torch.randn(tokens, experts)
    weights, ids, row_idx = npu.npu_moe_gating_top_k_softmax(logits, None, k)
    for t in range(tokens):
        raised = [math.exp(float(v)) for v in logits[t]]
        best = sorted(range(experts), key=lambda e: -raised[e])[:k]
        assert ids[t].tolist() == best
        assert weights[t].tolist() == pytest.approx([raised[e] / sum(raised) for e in best], rel=1e-5)
        assert row_idx[t].tolist() == [j * tokens + t for j in range(k)]


def test_a_finished_row_goes_to_no_expert() -> None:
    finished = torch.tensor([False, True])
    _, ids, _ = npu.npu_moe_gating_top_k_softmax(torch.randn(2, 5), finished, 2)
    assert ids[1].tolist() == [5, 5]
    assert max(ids[0].tolist()) < 5


@pytest.mark.parametrize(("norm_type", "mode"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_gating_top_k_with_groups(norm_type: int, mode: int) -> None:
    logits, bias = torch.randn(7, 8), torch.randn(8)
    weights, ids, scores = npu.npu_moe_gating_top_k(
        logits,
        3,
        bias=bias,
        k_group=2,
        group_count=4,
        group_select_mode=mode,
        norm_type=norm_type,
        routed_scaling_factor=2.5,
        out_flag=True,
    )
    for t in range(7):
        row = [float(v) for v in logits[t]]
        total = sum(math.exp(v) for v in row)
        score = [math.exp(v) / total if norm_type == 0 else 1 / (1 + math.exp(-v)) for v in row]
        choice = [s + float(b) for s, b in zip(score, bias, strict=True)]
        rank = [
            max(choice[2 * g : 2 * g + 2]) if mode == 0 else sum(choice[2 * g : 2 * g + 2]) for g in range(4)
        ]
        kept = sorted(range(4), key=lambda g: -rank[g])[:2]
        best = sorted((e for e in range(8) if e // 2 in kept), key=lambda e: -choice[e])[:3]
        norm = sum(score[e] for e in best) if norm_type == 1 else 1.0
        assert ids[t].tolist() == best
        assert weights[t].tolist() == pytest.approx([2.5 * score[e] / norm for e in best], rel=1e-5)
        assert scores[t].tolist() == pytest.approx(score, rel=1e-5)


@hypothesis.given(SIZES)
def test_init_routing_takes_and_gives_k_major_row_ids(sizes: tuple[int, int, int]) -> None:
    tokens, k, experts = sizes
    x, ids = routed(*sizes)
    row_idx = torch.arange(tokens * k, dtype=torch.int32).view(k, tokens).t().contiguous()
    rows, positions, sorted_ids = npu.npu_moe_init_routing(x, row_idx, ids, tokens)
    for i, (expert, t, j) in enumerate(by_expert(ids)):
        assert rows[i].equal(x[t])
        assert int(sorted_ids[i]) == expert
        assert int(positions[j * tokens + t]) == i
    ends = npu.npu_moe_compute_expert_tokens(sorted_ids, experts)
    assert ends.tolist() == [sum(int(v) <= e for v in ids.flatten()) for e in range(experts)]


def test_init_routing_leaves_rows_out_after_active_num() -> None:
    x, ids = routed(5, 2, 4)
    row_idx = torch.arange(10, dtype=torch.int32).view(2, 5).t().contiguous()
    assert npu.npu_moe_init_routing(x, row_idx, ids, 3)[0].shape == (6, H)


@hypothesis.given(SIZES, st.booleans(), st.booleans())
def test_init_routing_v2(sizes: tuple[int, int, int], cumulative: bool, of_row: bool) -> None:
    _, k, experts = sizes
    x, ids = routed(*sizes)
    rows, row_idx, counts, _ = npu.npu_moe_init_routing_v2(
        x,
        ids,
        expert_num=experts,
        expert_tokens_num_type=0 if cumulative else 1,
        expert_tokens_num_flag=True,
        row_idx_type=1 if of_row else 0,
    )
    for i, (_, t, j) in enumerate(by_expert(ids)):
        assert rows[i].equal(x[t])
        assert int(row_idx[i if of_row else t * k + j]) == (t * k + j if of_row else i)
    for e in range(experts):
        counted = sum((int(v) <= e if cumulative else int(v) == e) for v in ids.flatten())
        assert int(counts[e]) == counted


def test_init_routing_v2_of_a_range_marks_the_others() -> None:
    x, ids = routed(6, 3, 5)
    rows, row_idx, counts, _ = npu.npu_moe_init_routing_v2(
        x,
        ids,
        expert_num=5,
        active_expert_range=[1, 3],
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
    )
    local = [(e, t, j) for e, t, j in by_expert(ids) if 1 <= e < 3]
    for i, (_, t, j) in enumerate(local):
        assert rows[i].equal(x[t])
        assert int(row_idx[t * 3 + j]) == i
    assert int((row_idx == -1).sum()) == 18 - len(local)
    assert rows[len(local) :].isnan().all()
    assert counts.tolist() == [sum(e == own for e, _, _ in local) for own in (1, 2)]


def test_init_routing_v2_quantises_each_row() -> None:
    x, ids = routed(4, 2, 4)
    x[1] = 0
    rows, _, _, scales = npu.npu_moe_init_routing_v2(x, ids, expert_num=4, quant_mode=1)
    for i, (_, t, _) in enumerate(by_expert(ids)):
        top = max(abs(float(v)) for v in x[t]) / 127
        assert float(scales[i]) == pytest.approx(top, rel=1e-6)
        assert rows[i].tolist() == [round(float(v) / top) if top else 0 for v in x[t]]


@hypothesis.given(SIZES)
def test_token_permute_and_unpermute(sizes: tuple[int, int, int]) -> None:
    tokens, k, _ = sizes
    x, ids = routed(*sizes)
    rows, positions = npu.npu_moe_token_permute(x, ids)
    for i, (_, t, j) in enumerate(by_expert(ids)):
        assert rows[i].equal(x[t])
        assert int(positions[t * k + j]) == i
    probs, values = torch.rand(tokens, k), torch.randn(tokens * k, H)
    y = npu.npu_moe_token_unpermute(values, positions, probs)
    for t in range(tokens):
        slots = [(float(probs[t, j]), values[int(positions[t * k + j])]) for j in range(k)]
        for h in range(H):
            assert float(y[t, h]) == pytest.approx(sum(p * float(v[h]) for p, v in slots), rel=1e-5, abs=1e-5)
    assert npu.npu_moe_token_unpermute(values, positions).equal(values[positions])
    assert npu.npu_moe_token_permute(x, ids, 1)[0].shape == (1, H)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("everything", [False, True])
def test_finalize_routing(mode: int, everything: bool) -> None:
    tokens, k, experts = 5, 3, 4
    rows, scales = torch.randn(tokens * k, H), torch.rand(tokens, k)
    position = torch.randperm(tokens * k, dtype=torch.int32)
    _, ids = routed(tokens, k, experts)
    skips = [torch.randn(tokens, H) if everything else None for _ in range(2)]
    bias = torch.randn(experts, H) if everything else None
    if mode in (1, 3):
        position[4] = -1
    y = npu.npu_moe_finalize_routing(
        rows.view(1, -1, H) if mode in (1, 3) else rows, *skips, bias, scales, position, ids, mode
    )
    for t in range(tokens):
        for h in range(H):
            total = sum(float(skip[t, h]) for skip in skips if skip is not None)
            for j in range(k):
                at = int(position[j * tokens + t if mode in (0, 1) else t * k + j])
                value = float(rows[at, h]) if at >= 0 else 0.0
                value += float(bias[ids[t, j], h]) if bias is not None else 0.0
                total += float(scales[t, j]) * value
            assert float(y[t, h]) == pytest.approx(total, rel=1e-5, abs=1e-5)


def test_finalize_routing_without_scales_needs_k() -> None:
    rows, position = torch.randn(6, H), torch.arange(6, dtype=torch.int32)
    y = npu.npu_moe_finalize_routing(rows, None, None, None, None, position, None, 2, 3)
    torch.testing.assert_close(y, rows.view(2, 3, H).sum(1))


def test_finalize_routing_does_not_define_dropped_rows_without_padding() -> None:
    rows, position = torch.randn(2, H), torch.tensor([0, -1], dtype=torch.int32)
    assert (
        npu.npu_moe_finalize_routing(rows, None, None, None, torch.ones(1, 2), position, None, 2)
        .isnan()
        .all()
    )


GROUPS = [3, 0, 2]


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_grouped_matmul(listed: bool, counts: bool) -> None:
    rows, weights, bias = torch.randn(7, H), torch.randn(3, H, 2), torch.randn(3, 2)
    group_list = torch.tensor(GROUPS if counts else [3, 3, 5])
    (y,) = npu.npu_grouped_matmul(
        [rows],
        list(weights.unbind()) if listed else [weights],
        bias=list(bias.unbind()) if listed else [bias],
        group_list=group_list,
        group_list_type=1 if counts else 0,
        split_item=2,
        group_type=0,
    )
    of_row = [e for e, size in enumerate(GROUPS) for _ in range(size)]
    for i, e in enumerate(of_row):
        for n in range(2):
            want = sum(float(rows[i, c]) * float(weights[e, c, n]) for c in range(H)) + float(bias[e, n])
            assert float(y[i, n]) == pytest.approx(want, rel=1e-5, abs=1e-5)
    assert y[5:].isnan().all()


def test_grouped_matmul_by_the_older_overload() -> None:
    rows, weights = torch.randn(5, H), torch.randn(3, H, 2)
    old = npu.npu_grouped_matmul.List([rows], [weights], group_list=[3, 3, 5], split_item=3, group_type=0)
    new = npu.npu_grouped_matmul(
        [rows], [weights], group_list=torch.tensor([3, 3, 5]), split_item=3, group_type=0
    )
    assert old[0].equal(new[0])


@pytest.mark.parametrize("encoded", [False, True])
def test_grouped_matmul_of_int8(encoded: bool) -> None:
    rows = torch.randint(-127, 128, (5, H), dtype=torch.int8)
    weights = torch.randint(-127, 128, (3, H, 2), dtype=torch.int8)
    scale, per_token = torch.rand(3, 2), torch.rand(5)
    given = scale.view(torch.int32).to(torch.int64) if encoded else scale
    (y,) = npu.npu_grouped_matmul(
        [rows],
        [weights],
        scale=[given],
        per_token_scale=[per_token],
        group_list=torch.tensor([3, 3, 5]),
        split_item=2,
        group_type=0,
        output_dtype=6,
    )
    for i, e in enumerate([0, 0, 0, 2, 2]):
        for n in range(2):
            product = sum(int(rows[i, c]) * int(weights[e, c, n]) for c in range(H))
            assert float(y[i, n]) == pytest.approx(
                product * float(scale[e, n]) * float(per_token[i]), rel=1e-5
            )


def test_grouped_matmul_of_weights_alone_quantised() -> None:
    rows, weights = torch.randn(5, H), torch.randint(-8, 8, (3, H, 2), dtype=torch.int8)
    scale, offset = torch.rand(3, 2), torch.rand(3, 2)
    (y,) = npu.npu_grouped_matmul(
        [rows],
        [weights],
        antiquant_scale=[scale],
        antiquant_offset=[offset],
        group_list=torch.tensor([3, 3, 5]),
        split_item=2,
        group_type=0,
    )
    for i, e in enumerate([0, 0, 0, 2, 2]):
        for n in range(2):
            want = sum(
                float(rows[i, c]) * (int(weights[e, c, n]) + float(offset[e, n])) * float(scale[e, n])
                for c in range(H)
            )
            assert float(y[i, n]) == pytest.approx(want, rel=1e-4, abs=1e-4)


def silu(v: float) -> float:
    return v / (1 + math.exp(-v))


def test_swiglu_activates_the_first_half() -> None:
    h = torch.randn(3, 8)
    y = npu.npu_swiglu(h)
    for i in range(3):
        for n in range(4):
            assert float(y[i, n]) == pytest.approx(silu(float(h[i, n])) * float(h[i, n + 4]), rel=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_clipped_swiglu(interleaved: bool) -> None:
    h = torch.randn(3, 8) * 5
    y = npu.npu_clipped_swiglu(
        h, group_index=torch.tensor([1, 1]), alpha=1.5, limit=6.0, bias=0.5, interleaved=interleaved
    )
    for i in range(2):
        for n in range(4):
            g, u = (float(v) for v in (h[i, 2 * n : 2 * n + 2] if interleaved else h[i, n::4]))
            gate, up = min(g, 6.0), max(-6.0, min(u, 6.0))
            assert float(y[i, n]) == pytest.approx(gate / (1 + math.exp(-1.5 * gate)) * (up + 0.5), rel=1e-5)
    assert y[2].isnan().all()


@pytest.mark.parametrize("left", [False, True])
def test_dequant_swiglu_quant(left: bool) -> None:
    x = torch.randint(-1000, 1000, (5, 8), dtype=torch.int32)
    weight_scale, activation_scale, smooth = torch.rand(3, 8) / 100, torch.rand(5), torch.rand(3, 4) + 0.5
    y, scales = npu.npu_dequant_swiglu_quant(
        x,
        weight_scale=weight_scale,
        activation_scale=activation_scale,
        quant_scale=smooth,
        group_index=torch.tensor(GROUPS),
        activate_left=left,
        quant_mode=1,
    )
    for i, e in enumerate([0, 0, 0, 2, 2]):
        h = [int(x[i, n]) * float(weight_scale[e, n]) * float(activation_scale[i]) for n in range(8)]
        a = [silu(h[n]) * h[n + 4] if left else h[n] * silu(h[n + 4]) for n in range(4)]
        a = [v * float(s) for v, s in zip(a, smooth[e], strict=True)]
        top = max(abs(v) for v in a) / 127
        assert float(scales[i]) == pytest.approx(top, rel=1e-4)
        # Both sides round: half a step apart from each other at most one.
        assert y[i].tolist() == pytest.approx([v / top for v in a], abs=0.51)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a drop mode": (
        lambda: npu.npu_moe_init_routing_v2(*routed(2, 2, 4), expert_num=4, drop_pad_mode=1),
        "npu_moe_init_routing_v2: drop_pad_mode: the reference kernel handles",
    ),
    "a group type": (
        lambda: npu.npu_grouped_matmul([torch.ones(2, 2)], [torch.ones(1, 2, 2)], group_type=2, split_item=2),
        "npu_grouped_matmul: group_type: the reference kernel handles",
    ),
    "no groups": (
        lambda: npu.npu_grouped_matmul([torch.ones(2, 2)], [torch.ones(1, 2, 2)], group_type=0, split_item=2),
        "npu_grouped_matmul: group_list: expected a tensor",
    ),
    "a static scale": (
        lambda: npu.npu_dequant_swiglu_quant(torch.ones(2, 4), quant_offset=torch.ones(2), quant_mode=1),
        "npu_dequant_swiglu_quant: quant_offset: the reference kernel handles None only",
    ),
    "another integer type": (
        lambda: npu.npu_dynamic_quant(torch.ones(2, 8), dst_type=3),
        "npu_dynamic_quant: dst_type: the reference kernel handles",
    ),
    "biases without ids": (
        lambda: npu.npu_moe_finalize_routing(
            torch.ones(2, H), None, None, torch.ones(3, H), None, torch.arange(2), None, 2, 1
        ),
        "export_for_source_row: expected with bias, got None",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_kernel_does_not_do_is_an_error(case: str) -> None:
    call, reason = REFUSED[case]
    with pytest.raises((NotImplementedError, ValueError), match=reason):
        call()
