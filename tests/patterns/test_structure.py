"""Views and copies move elements and change no meaning; what they can't follow is opaque or named."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.patterns.spelling import E, H, I, K, S, T, operands, study

X, IDS, W, W1, _ = operands()


def slots(ids: Tensor) -> Tensor:
    """A tensor whose meaning is worth following: token of each slot in expert order."""
    return ids.reshape(-1).argsort() // K


MOVES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "view": (lambda x, ids: x[slots(ids)].view(S, 4, 4), "x[t e e'] over P(t k), e, e'"),
    "flatten": (lambda x, ids: x[slots(ids)].view(S, 4, 4).flatten(1), "x[t e e'] over P(t k), e e'"),
    "unsqueeze": (lambda x, ids: x[slots(ids)].unsqueeze(1), "x[t h] over P(t k), 1, h"),
    "squeeze": (lambda x, ids: x[slots(ids)].unsqueeze(1).squeeze(1), "x[t h] over P(t k), h"),
    "transpose": (lambda x, ids: x[slots(ids)].transpose(0, 1), "x[t h] over h, P(t k)"),
    "t": (lambda x, ids: x[slots(ids)].t(), "x[t h] over h, P(t k)"),
    "permute": (lambda x, ids: x[slots(ids)].view(S, 4, 4).permute(2, 0, 1), "x[t e' e] over e, P(t k), e'"),
    "negative dims": (lambda x, ids: x[slots(ids)].transpose(-1, -2), "x[t h] over h, P(t k)"),
    "clone": (lambda x, ids: x[slots(ids)].clone(), "x[t h] over P(t k), h"),
    "contiguous": (lambda x, ids: x[slots(ids)].t().contiguous().t(), "x[t h] over P(t k), h"),
    "expand": (lambda x, ids: x[slots(ids)].unsqueeze(0).expand(3, S, H), "x[t h] over 3, P(t k), h"),
    "expand by -1": (lambda x, ids: x[slots(ids)].unsqueeze(0).expand(3, -1, -1), "x[t h] over 3, P(t k), h"),
    "repeat": (lambda x, ids: x[slots(ids)].repeat(1, 3), "x[t h] over P(t k), 3 h"),
    "whole slice": (lambda x, ids: x[slots(ids)][0:S], "x[t h] over P(t k), h"),
    "slice of features": (lambda x, ids: x[slots(ids)][:, 3:8], "x[t 3:1(5)] over P(t k), 5"),
    "slice from the end": (lambda x, ids: x[slots(ids)][:, -5:], "x[t 11:1(5)] over P(t k), 5"),
    "every other": (lambda x, ids: x[slots(ids)][:, 1::2], "x[t 1:2(8)] over P(t k), 8"),
    "select": (lambda x, ids: x[slots(ids)][:, 3], "x[t 3:1()] over P(t k)"),
    "select from the end": (lambda x, ids: x[slots(ids)].select(1, -1), "x[t 15:1()] over P(t k)"),
    "chunk": (lambda x, ids: x[slots(ids)].chunk(2, 1)[1], "x[t 8:1(8)] over P(t k), 8"),
    "uneven split": (lambda x, ids: x[slots(ids)].split([3, 13], 1)[1], "x[t 3:1(13)] over P(t k), 13"),
    "unbind": (lambda x, ids: x[slots(ids)].view(S, 4, 4).unbind(1)[2], "x[t 2:1() e] over P(t k), e"),
    "slice of whole blocks": (
        lambda x, ids: x[slots(ids)].view(S, 2, 8).flatten(1)[:, 8:],
        "x[t 1:1() 8] over P(t k), 8",
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_a_view_means(name: str) -> None:
    function, meaning = MOVES[name]
    assert study(function, X, IDS).meaning == meaning


LOST: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "sorted rows regrouped": (
        lambda x, ids: x[slots(ids)].view(T, K, H),
        "a view to [6, 2, 16] cuts through an index of 12 elements",
    ),
    "some of the sorted rows": (lambda x, ids: x[slots(ids)][:T], "rows in sorted order are sliced"),
    "one of the sorted rows": (lambda x, ids: x[slots(ids)][3], "rows in sorted order are sliced"),
    "half a block": (
        lambda x, ids: x[slots(ids)].view(S, 2, 8).flatten(1)[:, 4:],
        "a slice of 12 from 4 cuts through an index of 8 elements",
    ),
    "a strided slice of blocks": (
        lambda x, ids: x[slots(ids)].view(S, 2, 8).flatten(1)[:, ::2],
        "a strided slice of a dimension with several indices",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_what_a_view_loses(name: str) -> None:
    function, words = LOST[name]
    result = study(function, X, IDS)
    assert result.meaning == "?"
    assert words in result.why


OPAQUE: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda w: w[:, 2:5],
    "select": lambda w: w[0],
    "chunk": lambda w: w.chunk(2, 1)[0],
    "a view that cuts": lambda w: w.transpose(0, 1).reshape(3, 64, E * H // 4),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_pieces_of_opaque_tensors_are_opaque(name: str) -> None:
    """A chunk of a fused router projection is a tensor like any other, not a loss."""
    result = study(OPAQUE[name], W1)
    assert not result.lifted.losses
    assert result.meaning == "?" or result.meaning.startswith("w[")


def test_a_size_is_no_tensor() -> None:
    result = study(lambda ids: ids.new_zeros(ids.shape[0]), IDS, dynamic={0: [0]})
    assert not result.lifted.losses


def test_halves_of_the_first_gemm() -> None:
    """chunk, split, slices and a view pick the same rows of the weight."""
    spellings: list[Callable[[Tensor], Tensor]] = [
        lambda h: h.chunk(2, -1)[1],
        lambda h: h.split(I, -1)[1],
        lambda h: h[..., I:],
        lambda h: h.view(T, K, 2, I)[:, :, 1],
        lambda h: h.view(T, K, 2, I).unbind(2)[1],
    ]
    for half in spellings:
        result = study(lambda x, ids, w: half(torch.einsum("th,tkoh->tko", x, w[ids])), X, IDS, W1)  # noqa: B023
        expected = ("24:1(i)", "1:1() i")
        assert any(
            result.meaning == f"dot(x[t h], w[<ids[t k]> {part} h]; h) over t, k, i" for part in expected
        )
