"""Rows in expert order, cut into pieces and put together: right only for cuts between experts, pieces in order."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moefuse.passes.counts import Counts
from tests.patterns.spelling import E, H, K, S, Study, T, operands, study, swiglu

Cut = Callable[[Tensor, list[Any]], Any]


def slices(rows: Tensor, numbers: list[Any]) -> list[Tensor]:
    """Running start and end."""
    start: Any = 0
    pieces = []
    for number in numbers:
        pieces.append(rows[start : start + number])
        start = start + number
    return pieces


def ends(rows: Tensor, numbers: list[Any]) -> list[Tensor]:
    """Start is the end without the expert's own count."""
    until = [sum(numbers[: e + 1]) for e in range(len(numbers))]
    return [rows[end - number : end] for end, number in zip(until, numbers, strict=True)]


def last_open(rows: Tensor, numbers: list[Any]) -> list[Tensor]:
    """The last piece is what is left."""
    return [*slices(rows, numbers)[:-1], rows[sum(numbers[:-1]) :]]


def off_by_one(rows: Tensor, numbers: list[Any]) -> list[Tensor]:
    """The first cut is one row late."""
    return slices(rows, [numbers[0] + 1, numbers[1] - 1, *numbers[2:]])


def rotated(rows: Tensor, numbers: list[Any]) -> list[Tensor]:
    """As long as the next expert's count."""
    return slices(rows, [*numbers[1:], numbers[0]])


def counts(ids: Tensor) -> Tensor:
    return torch.histc(ids.float(), bins=E, min=0, max=E - 1).long()


def layer(
    x: Tensor,
    scores: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    cut: Cut = torch.split,
    count: Callable[[Tensor], Tensor] = counts,
    read: Callable[[int], int] = lambda e: e,
    order: tuple[int, ...] = tuple(range(E)),
    act: Callable[[int, Tensor], Tensor] = lambda e, h: swiglu(h),
    combine: str = "put",
) -> Tensor:
    """Sort, cut, every expert, cat, combine."""
    ids = scores.topk(weights.shape[1], dim=-1)[1]
    perm = ids.view(-1).argsort()
    pieces = cut(x[perm // weights.shape[1]], [number.item() for number in count(ids.view(-1)).unbind()])
    outs = [
        functional.linear(act(e, functional.linear(pieces[e], w1[read(e)])), w2[read(e)]) for e in range(E)
    ]
    rows = torch.cat([outs[e] for e in order])
    if combine == "put":
        slots = torch.empty_like(rows).index_put((perm,), rows)
        return (slots.view(*ids.shape, H) * weights.unsqueeze(-1)).sum(1)
    rows = rows * weights.view(-1)[perm].unsqueeze(-1)
    token = perm // weights.shape[1]
    if combine == "index_add":
        return torch.zeros_like(x).index_add(0, token, rows)
    return torch.zeros_like(x).scatter_add(0, token[:, None].expand(-1, H), rows)


def spelled(**changes: Any) -> Study:
    """The layer with some of its steps changed, lifted."""
    x, _, weights, w1, w2 = operands(torch.float32)
    function = lambda x, scores, weights, w1, w2: layer(x, scores, weights, w1, w2, **changes)  # noqa: E731
    return study(function, x, torch.randn(T, E), weights, w1, w2)


RIGHT: dict[str, dict[str, Any]] = {
    "split by counts": {},
    "slices": {"cut": slices},
    "slices by ends": {"cut": ends},
    "an open last slice": {"cut": last_open},
    "counts by bincount": {"count": lambda ids: torch.bincount(ids, minlength=E)[:E]},
    "counts from running counts": {
        "count": lambda ids: counts(ids).cumsum(0),
        "cut": lambda rows, until: [rows[(0 if e == 0 else until[e - 1]) : until[e]] for e in range(E)],
    },
    "index_add": {"combine": "index_add"},
    "scatter_add": {"combine": "scatter_add"},
    "weights of another expert": {"read": lambda e: E - 1 - e},
}


@pytest.mark.parametrize("name", RIGHT)
def test_pieces_of_every_expert_in_order_are_a_layer(name: str) -> None:
    found = spelled(**RIGHT[name])
    assert found.site.spec.num_experts == E
    found.fused()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "one row late": ({"cut": off_by_one}, "cut at other places than between two experts"),
    "as long as another's count": ({"cut": rotated}, "cut at other places than between two experts"),
    "split by other lengths": (
        {"cut": lambda rows, numbers: rows.split([*numbers[1:], numbers[0]])},
        "isn't as long as expert 0's count",
    ),
    "counts of other ids": ({"count": lambda ids: counts(E - 1 - ids)}, "isn't as long as expert 0's count"),
    "counts of some slots": (
        {"count": lambda ids: counts(ids[: S - K]) + counts(ids[S - K :])},
        "isn't as long as expert 0's count",
    ),
    "two pieces swapped": (
        {"order": (1, 0, *range(2, E))},
        "piece 0 of the rows that are put together isn't",
    ),
    "a piece twice": ({"order": (0, 0, *range(2, E))}, "piece 1 of the rows that are put together isn't"),
    "another activation": (
        {"act": lambda e, h: swiglu(-h if e == 1 else h)},
        "expert 1 of the loop has other activation",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_layer(name: str) -> None:
    changes, words = WRONG[name]
    spelled(**changes).refused(words)


def test_a_layer_without_its_last_expert_is_refused() -> None:
    x, _, weights, w1, w2 = operands(torch.float32)

    def short(x: Tensor, scores: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        ids = scores.topk(K, dim=-1)[1]
        perm = ids.view(-1).argsort()
        rows = x[perm // K]
        numbers = [number.item() for number in counts(ids.view(-1)).unbind()]
        pieces = slices(rows, numbers)[:-1]
        outs = [functional.linear(swiglu(functional.linear(p, w1[e])), w2[e]) for e, p in enumerate(pieces)]
        missing = rows[sum(numbers[:-1]) :] * 0
        return torch.zeros_like(x).index_add(0, perm // K, torch.cat([*outs, missing]))

    study(short, x, torch.randn(T, E), weights, w1, w2).refused("piece 3 of the rows that are put together")


@pytest.mark.parametrize("given", [False, True], ids=["ids of a top-k", "ids given"])
def test_sizes_that_only_the_counts_tell_are_found_out(given: bool) -> None:
    """The rows that are put back have `sum of all counts` elements by H: known to be T K H, also for symbolic T."""
    x, ids, weights, w1, w2 = operands(torch.float32)
    choice = ids if given else torch.randn(T, E)
    found = study(partial(viewed, given=given), x, choice, weights, w1, w2, dynamic={0: [0], 1: [0], 2: [0]})
    graph = found.fused().graph_module.graph
    aten = torch.ops.aten
    assert not {node.target for node in graph.nodes} & {aten._local_scalar_dense.default, aten.sort.default}


def viewed(
    x: Tensor,
    choice: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    given: bool,
) -> Tensor:
    """A layer whose rows are put back under a view with -1, and whose output is viewed by its own size."""
    ids = choice if given else choice.topk(K, dim=-1)[1]
    perm = ids.view(-1).argsort()
    numbers = [number.item() for number in counts(ids.view(-1)).unbind()]
    pieces = slices(x[perm // K], numbers)
    outs = [functional.linear(swiglu(functional.linear(p, w1[e])), w2[e]) for e, p in enumerate(pieces)]
    rows = torch.cat(outs)
    slots = torch.empty_like(rows).index_put((perm,), rows).view(*ids.shape, -1)
    y = (slots * weights.unsqueeze(-1)).sum(1)
    return y.reshape(1, *y.shape).reshape(y.shape)


def test_that_pieces_are_all_slots_proves_no_assertion() -> None:
    """With given ids the model fails where they don't add up; a user's own check of that must stay."""
    x, ids, weights, w1, w2 = operands(torch.float32)
    found = study(partial(viewed, given=True), x, ids, weights, w1, w2)
    reads = found.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten._local_scalar_dense.default
    )
    total = sum(node.meta["val"] for node in reads)
    assert Counts(found.site).size(total) == S
    assert Counts(found.site).settled(total) != S


def test_each_piece_may_be_added_at_once() -> None:
    """No `cat`: y[token of the piece] += the piece's rows."""
    x, _, weights, w1, w2 = operands(torch.float32)

    def at_once(x: Tensor, scores: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        ids = scores.topk(K, dim=-1)[1]
        perm = ids.view(-1).argsort()
        y = torch.zeros_like(x)
        numbers = [number.item() for number in counts(ids.view(-1)).unbind()]
        for e, own in enumerate(slices(perm, numbers)):
            rows = functional.linear(swiglu(functional.linear(x[own // K], w1[e])), w2[e])
            y = y.index_add(0, own // K, rows * weights.view(-1)[own].unsqueeze(-1))
        return y

    study(at_once, x, torch.randn(T, E), weights, w1, w2).fused()


# --- masks -----------------------------------------------------------------------------------------------


def mapped(
    x: Tensor,
    scores: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    chosen: Callable[[Tensor, Tensor], Tensor] = lambda ids, mask: mask,
    values: Callable[[Tensor, Tensor], Tensor] = lambda probs, mask: probs.t().masked_select(mask.t()),
    on_input: bool = False,
) -> Tensor:
    """Megatron: slots listed expert by expert by a mask, grouped GEMMs, scatter_add."""
    tokens, top_k = weights.shape
    ids = scores.topk(top_k, dim=-1)[1]
    mask = torch.zeros(tokens, E, dtype=torch.int32).scatter(1, ids, 1).bool()
    probs = torch.zeros(tokens, E, dtype=weights.dtype).scatter(1, ids, weights)
    token = torch.arange(tokens).unsqueeze(0).expand(E, -1).masked_select(chosen(ids, mask).t())
    offs = mask.sum(0).cumsum(0).to(torch.int32)
    weight = values(probs, mask).unsqueeze(-1)
    rows = x.index_select(0, token)
    rows = torch._grouped_mm(rows * weight if on_input else rows, w1.transpose(1, 2), offs)
    rows = torch._grouped_mm(swiglu(rows), w2.transpose(1, 2), offs)
    rows = rows if on_input else rows * weight
    return torch.zeros_like(x).index_add(0, token, rows)


def by_mask(**changes: Any) -> Study:
    x, _, weights, w1, w2 = operands()
    function = lambda x, scores, weights, w1, w2: mapped(x, scores, weights, w1, w2, **changes)  # noqa: E731
    return study(function, x, torch.randn(T, E), weights, w1, w2)


def test_a_mask_of_choices_lists_slots_as_a_sort_does() -> None:
    by_mask().fused()


@pytest.mark.parametrize("on_input", [True, False])
def test_one_slot_is_one_row_though_its_size_is_not_known(on_input: bool) -> None:
    x, _, weights, w1, w2 = operands()
    study(partial(mapped, on_input=on_input), x[:1], torch.randn(1, E), weights[:1, :1], w1, w2).fused()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chosen": lambda ids, mask: mask.roll(1, 0)}, "isn't proved to be the choices of a top-k"),
        ({"chosen": lambda ids, mask: mask & (ids[:, :1] > 0)}, "isn't proved to be the choices of a top-k"),
        ({"values": lambda probs, mask: probs.masked_select(mask)}, "choices, but not expert by expert"),
        (
            {"values": lambda probs, mask: probs.roll(1, 0).t().masked_select(mask.t())},
            "neither routing weights nor tokens",
        ),
    ],
    ids=["another mask", "fewer choices", "token by token", "other values"],
)
def test_other_masks_list_other_rows(changes: dict[str, Any], words: str) -> None:
    by_mask(**changes).refused(words)


def test_ids_that_may_repeat_make_no_mask_of_slots() -> None:
    """A token that chooses an expert twice is in the mask once."""

    def given(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        mask = torch.zeros(T, E, dtype=torch.int32).scatter(1, ids, 1).bool().t()
        token = torch.arange(T).unsqueeze(0).expand(E, -1).masked_select(mask)
        offs = mask.sum(1).cumsum(0).to(torch.int32)
        rows = torch._grouped_mm(x.index_select(0, token), w1.transpose(1, 2), offs)
        rows = torch._grouped_mm(swiglu(rows), w2.transpose(1, 2), offs)
        return torch.zeros_like(x).index_add(0, token, rows)

    study(given, *operands()).refused("ids may repeat within a token")


# --- assertions about sizes ------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [slices, torch.split])
def test_only_assertions_that_hold_by_construction_go(cut: Cut) -> None:
    """Counts are at least 0 and add up to all slots; a user's own limit on a count stays."""

    def limited(x: Tensor, scores: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        def checked(rows: Tensor, numbers: list[Any]) -> Any:
            torch._check(numbers[0] < S - 1)
            return cut(rows, numbers)

        return layer(x, scores, weights, w1, w2, cut=checked)

    x, _, weights, w1, w2 = operands(torch.float32)
    found = study(limited, x, torch.randn(T, E), weights, w1, w2)
    known = Counts(found.site)
    assertions = found.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten._assert_scalar.default
    )
    kept = [str(node.args[0].meta["val"]) for node in assertions if not known.holds(node)]
    assert all("<" in words and ">=" not in words for words in kept), kept
    assert len(kept) <= 1
