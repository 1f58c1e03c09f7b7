"""Init routing: sorts, their inverses, tokens of slots, gathers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moefuse.patterns import init_routing
from tests.patterns.spelling import E, H, K, S, T, operands, study

X, IDS, W, W1, _ = operands()


def perm(ids: Tensor) -> Tensor:
    """The slots in expert order."""
    return ids.reshape(-1).argsort()


# --- sort ------------------------------------------------------------------------------------------------

SORTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "values": (lambda ids: ids.view(-1).sort()[0], "ids[t k] over P(t k)"),
    "indices": (lambda ids: ids.view(-1).sort()[1], "pos(t k) over P(t k)"),
    "stable": (lambda ids: ids.view(-1).sort(stable=True)[1], "pos(t k) over P(t k)"),
    "argsort": (perm, "pos(t k) over P(t k)"),
    "k-major": (lambda ids: ids.t().reshape(-1).argsort(), "pos(k t) over P(k t)"),
    "through an exact cast": (lambda ids: ids.int().view(-1).argsort(), "pos(t k) over P(t k)"),
    "inverse": (lambda ids: perm(ids).argsort(), "pos(P(t k)) over t k"),
    "inverse of the inverse": (lambda ids: perm(ids).argsort().argsort(), "?"),
    "ids as floats": (lambda ids: ids.view(-1).float().argsort(), "pos(t k) over P(t k)"),
    "values of floats": (lambda ids: ids.view(-1).float().sort()[0], "ids[t k] over P(t k)"),
    "inverse by floats": (lambda ids: perm(ids).float().argsort(), "pos(P(t k)) over t k"),
    "inverse by doubles": (lambda ids: perm(ids).double().argsort(), "pos(P(t k)) over t k"),
    "inverse by halves": (lambda ids: perm(ids).bfloat16().argsort(), "?"),
    "floats": (lambda ids: ids.view(-1).float().sin().argsort(), "?"),
    "descending": (lambda ids: ids.view(-1).argsort(descending=True), "?"),
    "along a dimension": (lambda ids: ids.argsort(-1), "?"),
}


@pytest.mark.parametrize("name", SORTS)
def test_sort(name: str) -> None:
    function, meaning = SORTS[name]
    assert study(function, IDS).meaning == meaning


def test_more_indices_than_floats_hold_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_routing, "FLOAT32_HOLDS", S - 1)
    result = study(SORTS["inverse by floats"][0], IDS)
    assert (result.meaning, f"{S} indices are sorted as float32" in result.why) == ("?", True)
    assert study(SORTS["inverse by doubles"][0], IDS).meaning == "pos(P(t k)) over t k"


def test_inverse_written_by_index_put() -> None:
    def inverse(ids: Tensor) -> Tensor:
        order = perm(ids)
        return torch.empty_like(order).index_put((order,), torch.arange(S))

    assert study(inverse, IDS).meaning == "pos(P(t k)) over t k"


def test_inverse_written_by_assignment() -> None:
    def inverse(ids: Tensor) -> Tensor:
        order = perm(ids)
        result = torch.empty_like(order)
        result[order] = torch.arange(S)
        return result

    assert study(inverse, IDS).meaning == "pos(P(t k)) over t k"


@pytest.mark.parametrize("start", [1, 2])
def test_another_range_written_is_no_inverse(start: int) -> None:
    def shifted(ids: Tensor) -> Tensor:
        order = perm(ids)
        return torch.empty_like(order).index_put((order,), torch.arange(start, S + start))

    assert study(shifted, IDS).meaning == "?"


def test_tokens_written_by_the_permutation_are_no_inverse() -> None:
    def wrong(ids: Tensor) -> Tensor:
        order = perm(ids)
        return torch.empty_like(order).index_put((order // K,), torch.arange(S))

    result = study(wrong, IDS)
    assert result.meaning == "?"
    assert "no complete permutation of the slots" in result.why


def test_sorting_tokens_is_no_inverse() -> None:
    result = study(lambda ids: (perm(ids) // K).argsort(), IDS)
    assert result.meaning == "?"
    assert "no complete permutation of the slots" in result.why


# --- slot -> token ---------------------------------------------------------------------------------------

TOKENS: dict[str, Callable[[Tensor], Tensor]] = {
    "//": lambda ids: perm(ids) // K,
    "div floor": lambda ids: torch.div(perm(ids), K, rounding_mode="floor"),
    "div trunc": lambda ids: torch.div(perm(ids), K, rounding_mode="trunc"),
    "arange[perm]": lambda ids: torch.arange(T).unsqueeze(1).expand(T, K).reshape(-1)[perm(ids)],
    "repeat_interleave[perm]": lambda ids: torch.arange(T).repeat_interleave(K)[perm(ids)],
}


@pytest.mark.parametrize("name", TOKENS)
def test_token_of_each_slot(name: str) -> None:
    assert study(TOKENS[name], IDS).meaning == "pos(t) over P(t k)"


@pytest.mark.parametrize("remainder", [lambda p: p % K, lambda p: torch.fmod(p, K)])
def test_place_among_the_tokens_slots(remainder: Callable[[Tensor], Tensor]) -> None:
    assert study(lambda ids: remainder(perm(ids)), IDS).meaning == "pos(k) over P(t k)"


@pytest.mark.parametrize("divisor", [K + 1, 5, 2 * S])
def test_a_divisor_that_splits_no_axis_is_named(divisor: int) -> None:
    for function in (lambda ids: perm(ids) // divisor, lambda ids: perm(ids) % divisor):
        result = study(function, IDS)
        assert result.meaning == "?"
        assert f"divided by {divisor}, which is not the number of slots per token" in result.why


def test_a_divisor_that_cuts_tokens_is_another_index_than_the_token() -> None:
    """Two times K divides the slots too, but what comes out runs over pairs of tokens."""
    assert study(lambda ids: perm(ids) // (2 * K), IDS).meaning == "pos(3) over P(3 k k')"


def test_true_division_is_no_index() -> None:
    assert study(lambda ids: perm(ids) / K, IDS).meaning == "?"


def test_as_many_tokens_as_slots_per_token() -> None:
    """T = K: `//` gives the outer axis, `%` the inner one, though both have the same size."""
    x, ids, *_ = operands(tokens=K)
    token = study(lambda x, ids: x[perm(ids) // K], x, ids)
    place = study(lambda x, ids: x[perm(ids) % K], x, ids)
    assert token.meaning == "x[k h] over P(k k'), h"
    assert place.meaning == "x[k' h] over P(k k'), h"


def test_symbolic_tokens() -> None:
    result = study(lambda ids: perm(ids) // K, IDS, dynamic={0: [0]})
    (order,) = result.lifted.facts[result.outputs[0]].dims  # type: ignore[union-attr]
    token, slot = order[0].over  # type: ignore[union-attr]
    assert isinstance(token.size, torch.SymInt)
    assert slot.size == K


# --- rows by an index ------------------------------------------------------------------------------------

BY_TOKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(0, i),
    "index_select, last dim": lambda x, i: x.t().index_select(1, i).t(),
    "embedding": lambda x, i: functional.embedding(i, x),
    "gather": lambda x, i: x.gather(0, i.unsqueeze(1).expand(-1, H)),
    "gather, last dim": lambda x, i: x.t().gather(1, i.unsqueeze(0).expand(H, -1)).t(),
}


@pytest.mark.parametrize("name", BY_TOKEN)
def test_token_rows_in_expert_order(name: str) -> None:
    function = BY_TOKEN[name]
    assert study(lambda x, ids: function(x, perm(ids) // K), X, IDS).meaning == "x[t h] over P(t k), h"


def test_repeated_rows_in_expert_order() -> None:
    repeated = study(lambda x, ids: x.repeat_interleave(K, 0)[perm(ids)], X, IDS)
    assert repeated.meaning == "x[t h] over P(t k), h"


def test_tiled_rows_are_not_the_rows_of_their_tokens() -> None:
    tiled = study(lambda x, ids: x.repeat(K, 1)[perm(ids)], X, IDS)
    assert tiled.meaning == "x[3 k' h] over P(k 3 k'), h"


def test_weights_in_expert_order() -> None:
    assert study(lambda w, ids: w.reshape(-1)[perm(ids)], W, IDS).meaning == "w[t k] over P(t k)"


def test_expert_weights_and_biases_selected_by_ids() -> None:
    assert study(lambda w1, ids: w1[ids], W1, IDS).meaning == "w1[<ids[t k]> n h] over t, k, n, h"
    bias = study(lambda b, ids: b[ids.view(-1).sort()[0]], W1[:, 0], IDS)
    assert bias.meaning == "b[<ids[t k]> h] over P(t k), h"


def test_rows_brought_back_to_slot_order() -> None:
    def back(x: Tensor, ids: Tensor) -> Tensor:
        order = perm(ids)
        return x[order // K][order.argsort()]

    assert study(back, X, IDS).meaning == "x[t h] over t k, h"


def taken(by: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Rows in the order of the ids' sort, taken by an index made of (perm of ids, perm of other)."""
    return lambda x, ids, other: x[perm(ids) // K][by(perm(ids), perm(other))]


WRONG_INDEX: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "the permutation": (lambda p, q: p, "taken by the permutation itself, not by its inverse"),
    "another sort's inverse": (lambda p, q: q.argsort(), "meet rows in the order of `sort"),
}


@pytest.mark.parametrize("name", WRONG_INDEX)
def test_rows_in_expert_order_go_back_by_their_own_inverse_only(name: str) -> None:
    by, words = WRONG_INDEX[name]
    result = study(taken(by), X, IDS, IDS.flip(0))
    assert result.meaning == "?"
    assert words in result.why


def test_rows_in_slot_order_are_not_taken_by_the_inverse() -> None:
    result = study(lambda w, ids: w.reshape(-1)[perm(ids).argsort()], W, IDS)
    assert result.meaning == "?"
    assert "rows in slot order are taken by the inverse permutation" in result.why


def test_two_sorts_of_the_same_ids_are_two_orders() -> None:
    """An unstable sort may break ties otherwise the second time."""

    def mixed(x: Tensor, ids: Tensor) -> Tensor:
        first, second = ids.view(-1).argsort(), ids.view(-1).clone().argsort()
        return x[first // K][second.argsort()]

    result = study(mixed, X, IDS)
    assert result.meaning == "?"
    assert "meet rows in the order of" in result.why


def test_an_index_over_more_slots_than_rows_is_named() -> None:
    result = study(lambda x, ids: x[perm(ids)], torch.randn(S + 1, H), IDS)
    assert result.meaning == "?"
    assert f"an index over {S} slots is used on {S + 1} rows" in result.why


OPAQUE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a mask": (lambda x, m: x[m], (X, torch.ones(T, dtype=torch.bool))),
    "two indices": (lambda x, i: x[i, i], (X, torch.arange(T))),
    "an index that differs between features": (lambda x, i: x.gather(0, i), (X, torch.zeros(S, H).long())),
    "a shorter gather": (
        lambda x, ids: x.gather(0, (perm(ids) // K).unsqueeze(1).expand(-1, H // 2)),
        (X, IDS),
    ),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_other_gathers_have_no_meaning(name: str) -> None:
    function, inputs = OPAQUE[name]
    assert study(function, *inputs).meaning == "?"


def test_the_experts_of_a_select_keep_their_number() -> None:
    """`weight[ids]` remembers how many experts there are, and that negative ids count from the end."""
    result = study(lambda w1, ids: w1[ids], W1, IDS)
    (selector,) = result.lifted.facts[result.outputs[0]].expr.selectors  # type: ignore[union-attr]
    assert (selector.size, selector.wraps) == (E, True)
