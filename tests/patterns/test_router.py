"""Router arithmetic: exact casts, one-hots, counts and offsets of ids, scores per (token, expert)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moefuse.patterns.facts import Conflict, Const, Op
from moefuse.patterns.pointwise import evaluate_scalar
from tests.patterns.spelling import E, K, T, grouped, operands, study

_, IDS, W, *_ = operands(torch.float32)
LOGITS = torch.randn(T, E, generator=torch.Generator().manual_seed(1))

COUNTED = "count(ids[t k] == e) over e"
ENDS = "count(ids[t k] <= e) over e"


def histc(ids: Tensor, bins: int = E, low: float = 0, high: float = E - 1) -> Tensor:
    return torch.histc(ids.float(), bins=bins, min=low, max=high)


# --- counts ----------------------------------------------------------------------------------------------

COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "histc up to the last id": histc,
    "histc of sorted ids": lambda ids: histc(ids.view(-1).sort()[0]),
    "histc of int32": lambda ids: torch.histc(ids.int().float(), bins=E, min=0, max=E - 1),
    "bincount": lambda ids: torch.bincount(ids.view(-1), minlength=E),
    "bincount, cut": lambda ids: torch.bincount(ids.view(-1), minlength=E)[:E],
    "one_hot over tokens and slots": lambda ids: functional.one_hot(ids, E).sum((0, 1)),
    "one_hot over flat slots": lambda ids: functional.one_hot(ids.view(-1), E).sum(0),
    "comparison": lambda ids: (ids.view(-1, 1) == torch.arange(E)).sum(0),
    "comparison, ids on the right": lambda ids: (torch.arange(E).view(-1, 1) == ids.view(1, -1)).sum(1),
    "comparison as int": lambda ids: (ids.view(-1, 1) == torch.arange(E)).int().sum(0),
    "cast": lambda ids: histc(ids).to(torch.int32),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_the_ids(name: str) -> None:
    assert study(COUNTS[name], IDS).meaning == COUNTED


def test_a_histogram_whose_last_bin_holds_one_more() -> None:
    """Up to E included, the id E is counted as E - 1: right for ids of which none is E."""
    assert study(lambda x: histc(x.topk(K)[1], high=E), LOGITS).meaning == "count(getitem_1[t k] == e) over e"
    halves = study(lambda x: histc(x.topk(K)[1].view(-1) // 2, E // 2, 0, E // 2), LOGITS)
    assert halves.meaning.startswith("count(floor_divide")
    for ids in (lambda x: x.topk(K)[1] + 1, lambda x: x[:, :K].long()):
        result = study(lambda x, ids=ids: histc(ids(x), high=E), LOGITS)
        assert result.meaning == "?"
        assert f"counts an id {E} as one of {E - 1}" in result.why


def test_counts_of_chosen_experts() -> None:
    """Ones scattered by ids that a top-k chose: none of them twice in a token."""

    def counts(logits: Tensor) -> Tensor:
        return torch.zeros(T, E).scatter(1, logits.topk(K)[1], 1.0).sum(0)

    assert study(counts, LOGITS).meaning == "count(getitem_1[t k] == e) over e"


NO_COUNTS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "of floats": (lambda x: torch.histc(x, bins=E, min=0, max=E - 1), (W,)),
    "with weights": (lambda i, w: torch.bincount(i.view(-1), w.view(-1), minlength=E), (IDS, W)),
    "without minlength": (lambda i: torch.bincount(i.view(-1), minlength=0)[:E], (IDS,)),
    "cut too short": (lambda i: torch.bincount(i.view(-1), minlength=E)[: E - 1], (IDS,)),
    "cut at the front": (lambda i: torch.bincount(i.view(-1), minlength=E)[1:], (IDS,)),
    "over the slots of a token only": (lambda i: functional.one_hot(i, E).sum(1), (IDS,)),
    "over the experts": (lambda i: functional.one_hot(i, E).sum(-1), (IDS,)),
    "scattered by ids that may repeat": (lambda i: torch.zeros(T, E).scatter(1, i, 1.0).sum(0), (IDS,)),
    "plus one": (lambda i: histc(i) + 1, (IDS,)),
    "cast to a type too small": (lambda i: histc(i).to(torch.int8), (IDS,)),
    "of ids cast to a type too small": (
        lambda i: torch.histc(i.to(torch.bfloat16).float(), bins=E, min=0, max=E - 1),
        (IDS,),
    ),
}


@pytest.mark.parametrize("name", NO_COUNTS)
def test_what_counts_no_ids(name: str) -> None:
    function, inputs = NO_COUNTS[name]
    assert study(function, *inputs).meaning == "?"


@pytest.mark.parametrize(("bins", "low", "high"), [(E, 0, E + 1), (E, 1, E), (E, 0, 2), (E + 1, 0, E - 1)])
def test_histc_whose_bins_are_not_the_ids_is_named(bins: int, low: int, high: int) -> None:
    result = study(lambda ids: histc(ids, bins, low, high), IDS)
    assert result.meaning == "?"
    assert f"histc with {bins} bins over {low}..{high} doesn't count the ids" in result.why


def test_counts_of_a_part_of_the_ids_are_not_counts_of_the_ids() -> None:
    """They count what they count: the slice, which is another tensor than the one that was sorted."""
    assert study(lambda ids: histc(ids[:3]), IDS).meaning == "count(slice_1[3 k] == e) over e"


OFFSETS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda ids: histc(ids).cumsum(0),
    "int32": lambda ids: histc(ids).cumsum(0, dtype=torch.int32),
    "cast after": lambda ids: histc(ids).cumsum(0).to(torch.int32),
    "cast before": lambda ids: histc(ids).int().cumsum(0),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_running_counts_end_each_experts_rows(name: str) -> None:
    assert study(OFFSETS[name], IDS).meaning == ENDS


NO_OFFSETS: dict[str, Callable[[Tensor], Tensor]] = {
    "in bfloat16": lambda ids: histc(ids).cumsum(0, dtype=torch.bfloat16),
    "exclusive": lambda ids: histc(ids).cumsum(0) - histc(ids),
    "of ids": lambda ids: ids.view(-1).cumsum(0),
    "reversed": lambda ids: histc(ids).flip(0).cumsum(0),
}


@pytest.mark.parametrize("name", NO_OFFSETS)
def test_other_running_sums_are_no_offsets(name: str) -> None:
    assert study(NO_OFFSETS[name], IDS).meaning == "?"


# --- one-hot ---------------------------------------------------------------------------------------------


def test_one_hot() -> None:
    assert study(lambda ids: functional.one_hot(ids, E), IDS).meaning == "(ids[t k] == e) over t, k, e"
    assert study(lambda ids: ids.view(-1, 1) == torch.arange(E), IDS).meaning == "(ids[t k] == e) over t k, e"


@pytest.mark.parametrize("range_", [torch.arange(1, E + 1), torch.arange(0, 2 * E, 2)])
def test_other_ranges_are_no_one_hot(range_: Tensor) -> None:
    start, step = int(range_[0]), int(range_[1] - range_[0])

    def compare(ids: Tensor) -> Tensor:
        return ids.view(-1, 1) == torch.arange(start, start + step * E, step)

    assert study(compare, IDS).meaning == "?"


def test_a_constant_and_a_range() -> None:
    assert study(lambda x: torch.full((T, 2), 2.5), W).meaning == "2.5 over t, k"
    assert study(lambda x: torch.zeros_like(x, dtype=torch.float64), W).meaning == "0 over t, k"
    assert study(lambda x: torch.ones(T, 1), W).meaning == "1 over t, 1"
    assert study(lambda x: torch.arange(T), W).meaning == "pos(t) over t"
    assert study(lambda x: torch.arange(1.0 * T), W).meaning == "?"


# --- scores per (token, expert) --------------------------------------------------------------------------

SCORES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "weights": (
        lambda ids, w: torch.zeros(T, E).scatter(1, ids, w),
        "dense(w[t k] where ids[t k] == e else 0) over t, e",
    ),
    "transposed": (
        lambda ids, w: torch.zeros(T, E).scatter(-1, ids, w).t(),
        "dense(w[t k] where ids[t k] == e else 0) over e, t",
    ),
    "squashed infinity": (
        lambda ids, w: torch.full((T, E), -torch.inf).scatter(1, ids, w).sigmoid(),
        "dense(sigmoid(w[t k]) where ids[t k] == e else 0) over t, e",
    ),
    "fill that stays": (
        lambda ids, w: torch.zeros(T, E).scatter(1, ids, w).exp(),
        "dense(exp(w[t k]) where ids[t k] == e else 1) over t, e",
    ),
    "added to something": (lambda ids, w: w.new_ones(T, E).cumsum(1).scatter(1, ids, w), "?"),
}


@pytest.mark.parametrize("name", SCORES)
def test_scattered_scores(name: str) -> None:
    function, meaning = SCORES[name]
    assert study(function, IDS, W).meaning == meaning


def test_a_mask_of_choices_is_no_score() -> None:
    assert study(lambda ids, w: torch.zeros(T, E).scatter(1, ids, w) > 0, IDS, W).meaning == "?"


# --- numbers ---------------------------------------------------------------------------------------------


def test_numbers_of_constant_expressions() -> None:
    aten = torch.ops.aten
    minus_infinity = Const(float("-inf"))
    assert evaluate_scalar(Op(aten.sigmoid.default, (minus_infinity,)), {}) == 0
    assert evaluate_scalar(Op(aten.add.Tensor, (Const(1.0), Const(2.0)), (("alpha", 3),)), {}) == 7
    with pytest.raises(Conflict, match="can't be evaluated on numbers"):
        evaluate_scalar(Op(aten.add.Tensor, (Const(1.0), "x")), {})


ANY: dict[str, Any] = {
    "router arithmetic": lambda ids, w: (w / w.sum(-1, keepdim=True)) * 2.5,
    "sum of slots": lambda ids, w: w.sum(-1),
    "mean": lambda ids, w: w.mean(0),
}


@pytest.mark.parametrize("name", ANY)
def test_the_router_stays_opaque(name: str) -> None:
    result = study(ANY[name], IDS, W)
    assert result.meaning == "?"
    assert not result.lifted.losses


def test_one_expert_and_one_slot_have_no_axis() -> None:
    assert study(lambda ids: torch.bincount(ids.view(-1), minlength=1), IDS[:1, :1]).meaning.endswith(
        "over 1"
    )


def test_ids_made_from_ids_are_ids_like_any_other() -> None:
    """A router may mask an expert that means "skip": what it does to the ids is its own business."""

    def layer(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        skipped = ids == E - 1
        return grouped(x, ids.masked_fill(skipped, 0), weights.masked_fill(skipped, 0.0), w1, w2)

    study(layer, *operands()).fused()
