"""Finalize routing: every way to sum expert rows over the slots of their token, and what is no such sum."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.patterns.spelling import (
    E,
    H,
    K,
    S,
    Study,
    T,
    ffn,
    gathered,
    offsets,
    operands,
    slot_rows,
    sorted_rows,
    study,
    swiglu,
)

Combine = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [T, H], weighed rows in expert order [S, H], permutation [S]) -> the layer's output."""


def layer(combine: Combine) -> Study:
    """A layer that weighs rows in expert order and ends with `combine`."""

    def forward(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        rows, perm = sorted_rows(x, ids, w1, w2)
        return combine(x, rows * weights.view(-1)[perm].unsqueeze(-1), perm)

    return study(forward, *operands())


def back(rows: Tensor, perm: Tensor) -> Tensor:
    """Expert order -> [T, K, H]."""
    return rows[perm.argsort()].view(T, K, H)


def nothing(rows: int = T) -> Tensor:
    return torch.zeros(rows, H, dtype=torch.bfloat16)


def wide(token: Tensor) -> Tensor:
    return token.unsqueeze(1).expand(-1, H)


COMBINES: dict[str, Combine] = {
    "sum": lambda x, rows, perm: back(rows, perm).sum(1),
    "sum, keepdim": lambda x, rows, perm: back(rows, perm).sum(1, keepdim=True),
    "sum over the middle of [T, H, K]": lambda x, rows, perm: back(rows, perm).transpose(1, 2).sum(-1),
    "permutation undone by writing": lambda x, rows, perm: (
        torch.empty_like(rows).index_put((perm,), rows).view(T, K, H).sum(1)
    ),
    "index_add": lambda x, rows, perm: nothing().index_add(0, perm // K, rows),
    "scatter_add": lambda x, rows, perm: nothing().scatter_add(0, wide(perm // K), rows),
    "index_put": lambda x, rows, perm: nothing().index_put((perm // K,), rows, accumulate=True),
    "gather": lambda x, rows, perm: rows.gather(0, wide(perm.argsort())).view(T, K, H).sum(1),
    "bmm with ones": lambda x, rows, perm: torch.bmm(
        torch.ones(T, 1, K, dtype=rows.dtype), back(rows, perm)
    ).squeeze(1),
}


@pytest.mark.parametrize("name", COMBINES)
def test_combine(name: str) -> None:
    result = layer(COMBINES[name])
    assert result.site.base is None
    assert result.site.spec.weight_position == "output"
    result.fused()


def test_what_follows_the_sum_stays() -> None:
    """The node at which the sum is complete is the layer; a residual behind it isn't part of it."""
    result = layer(lambda x, rows, perm: (back(rows, perm).sum(1).float() + x).relu())
    assert result.site.node.name == "sum_1"
    result.fused()


@pytest.mark.parametrize("name", ["index_add", "scatter_add", "index_put"])
def test_a_base_is_kept(name: str) -> None:
    """Rows accumulated onto a shared expert's output."""
    bases: dict[str, Combine] = {
        "index_add": lambda x, rows, perm: (x * 2).index_add(0, perm // K, rows),
        "scatter_add": lambda x, rows, perm: (x * 2).scatter_add(0, wide(perm // K), rows),
        "index_put": lambda x, rows, perm: (x * 2).index_put((perm // K,), rows, accumulate=True),
    }
    result = layer(bases[name])
    assert result.site.base is not None
    assert result.site.base.name.startswith("mul")
    result.fused()


NO_SUM: dict[str, tuple[Combine, str]] = {
    "mean": (lambda x, r, p: back(r, p).mean(1), "reduced by mean, not by a sum"),
    "amax": (lambda x, r, p: back(r, p).amax(1), "reduced by amax, not by a sum"),
    "amin": (lambda x, r, p: back(r, p).amin(1), "reduced by amin, not by a sum"),
    "max": (lambda x, r, p: back(r, p).max(1)[0], "reduced by max, not by a sum"),
    "prod": (lambda x, r, p: back(r, p).prod(1), "reduced by prod, not by a sum"),
    "logsumexp": (lambda x, r, p: back(r, p).logsumexp(1), "reduced by logsumexp, not by a sum"),
    "part of the slots": (lambda x, r, p: back(r, p)[:, :1].sum(1), "only a part of the ids"),
    "one slot": (lambda x, r, p: back(r, p)[:, 1] * 1, "?"),
    "sum over tokens": (lambda x, r, p: back(r, p).sum(0), "is not indexed by the token of each slot"),
    "sum over features too": (lambda x, r, p: back(r, p).sum((1, 2)), "something other than the slots"),
    "sum in expert order": (lambda x, r, p: r.sum(0), "summed in sorted order"),
    "slots and tokens trade places": (
        lambda x, r, p: r[p.argsort()].view(K, T, H).sum(0),
        "is not indexed by the token of each slot",
    ),
    "running sum": (lambda x, r, p: back(r, p).cumsum(1)[:, -1], "what aten::cumsum of expert outputs"),
    "a factor": (lambda x, r, p: nothing().index_add(0, p // K, r, alpha=2), "with a factor alpha"),
    "scatter_reduce": (
        lambda x, r, p: nothing().scatter_reduce(0, wide(p // K), r, "amax"),
        "combined by scatter_reduce('amax')",
    ),
    "overwriting": (
        lambda x, r, p: nothing().index_put((p // K,), r),
        "written by an index that is no complete permutation of the slots",
    ),
    "overwriting by ids": (
        lambda x, r, p: nothing().index_put((torch.zeros(S, dtype=torch.int64),), r),
        "overwrite the output",
    ),
    "several indices": (
        lambda x, r, p: nothing().index_put((p // K, p // K), r[:, 0], accumulate=True),
        "written by several indices at once",
    ),
    "more rows than tokens": (
        lambda x, r, p: nothing(T + 1).index_add(0, p // K, r),
        "an output with other rows than the tokens",
    ),
    "written among other rows": (
        lambda x, r, p: nothing(S + 1).index_put((p,), r)[:S].view(T, K, H).sum(1),
        "written into a tensor with other rows besides",
    ),
    "by the slot": (
        lambda x, r, p: nothing(S).index_add(0, p, r),
        "is not indexed by the token of each slot",
    ),
    "by the place in the token": (
        lambda x, r, p: nothing(K).index_add(0, p % K, r),
        "is not indexed by the token of each slot",
    ),
    "by something else": (
        lambda x, r, p: nothing().index_add(0, torch.zeros(S, dtype=torch.int64), r),
        "not by the token of each slot",
    ),
    "another dimension": (
        lambda x, r, p: nothing().t().index_add(1, p // K, r.t()),
        "along a dimension that is not the first",
    ),
    "an index that differs between features": (
        lambda x, r, p: nothing().scatter_add(0, (p // K).unsqueeze(1) + torch.arange(H), r),
        "by an index that differs between features",
    ),
    "softmax": (lambda x, r, p: back(r, p).softmax(-1), "no rule says what aten::_softmax"),
    "a function before the sum": (
        lambda x, r, p: back(r, p).relu().sum(1),
        "aten.relu.default (`relu`) stands between the second expert GEMM and the combine",
    ),
}


@pytest.mark.parametrize("name", [name for name, (_, words) in NO_SUM.items() if words != "?"])
def test_what_is_no_sum_over_the_slots(name: str) -> None:
    combine, words = NO_SUM[name]
    layer(combine).refused(words)


def test_one_of_two_slots_is_no_layer() -> None:
    """Nothing is lost here and nothing proved: rows of half the slots are simply rows."""
    assert not layer(NO_SUM["one slot"][0]).lifted.sites


# --- over the experts ------------------------------------------------------------------------------------


LOGITS = torch.randn(T, E, generator=torch.Generator().manual_seed(1)).bfloat16()


def dense(
    position: str,
    *,
    total: Callable[[Tensor], Tensor] = lambda rows: rows.sum(0),
    fill: float = 0.0,
    again: bool = False,
    bias: float = 0.0,
) -> Study:
    """llama 4's way: every expert on every token, weighed by scores that are zero where it wasn't chosen."""

    def forward(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        values, ids = logits.topk(K)
        scores = torch.full_like(logits, fill).scatter(1, ids, values)
        every = scores.t().unsqueeze(-1)
        rows = x.expand(E, T, H)
        h1 = torch.bmm(rows * every if position == "input" else rows, w1.transpose(1, 2))
        h2 = torch.bmm(swiglu(h1 + bias if bias else h1), w2.transpose(1, 2))
        if position == "einsum":
            return torch.einsum("te,eth->th", scores, h2)
        h2 = h2 * every if position == "output" else h2
        if again:
            other = torch.zeros_like(logits).scatter(1, (-logits).topk(K)[1], values)
            h2 = h2 * other.t().unsqueeze(-1)
        return total(h2)

    x, _, _, w1, w2 = operands()
    return study(forward, x, LOGITS, w1, w2)


@pytest.mark.parametrize("position", ["input", "output", "einsum"])
def test_scored_experts_become_chosen_slots(position: str) -> None:
    result = dense(position)
    assert result.site.spec.top_k == K
    assert result.site.spec.weight_position == ("input" if position == "input" else "output")
    assert result.site.spec.ids_checked
    result.fused()


DENSE_REFUSED: dict[str, tuple[Callable[[], Study], str]] = {
    "unchosen experts count a little": (lambda: dense("output", fill=0.5), "were not chosen add something"),
    "an expert of zero is not zero": (lambda: dense("input", bias=1.0), "were not chosen add something"),
    "mean over the experts": (lambda: dense("input", total=lambda r: r.mean(0)), "reduced by mean"),
    "half of the experts": (
        lambda: dense("output", total=lambda r: r[:2].sum(0)),
        "only a part of the scores is summed",
    ),
    "sum over the tokens": (
        lambda: dense("input", total=lambda r: r.sum(1)),
        "not summed over exactly the experts",
    ),
    "two routings": (lambda: dense("output", again=True), "scores of two different routings"),
}


@pytest.mark.parametrize("name", DENSE_REFUSED)
def test_scored_experts_refused(name: str) -> None:
    make, words = DENSE_REFUSED[name]
    make().refused(words)


def test_ids_that_may_repeat_are_no_scores() -> None:
    """A scatter keeps one of two equal ids, the slots both: only a top-k proves that there are none."""

    def forward(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        every = torch.zeros(T, E, dtype=x.dtype).scatter(1, ids, weights).t().unsqueeze(-1)
        h1 = torch.bmm(x.expand(E, T, H) * every, w1.transpose(1, 2))
        return torch.bmm(swiglu(h1), w2.transpose(1, 2)).sum(0)

    study(forward, *operands()).refused("ids may repeat within a token")


# --- one slot per token ----------------------------------------------------------------------------------


def test_one_slot_needs_no_sum() -> None:
    def forward(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        flat = ids.view(-1)
        perm = flat.argsort()
        rows = ffn(x[perm], offsets(flat), w1, w2)[perm.argsort()]
        return (rows * weights).float()

    result = study(forward, *operands(k=1))
    assert result.site.spec.top_k == 1
    assert result.site.spec.has_router_weight
    assert result.site.node.name == "_to_copy_1", "the last node that is still the layer"
    result.fused()


def test_one_slot_with_a_sum_over_it() -> None:
    result = study(gathered, *operands(torch.float32, k=1))
    assert result.site.spec.top_k == 1
    result.fused()


def test_one_slot_without_a_weight() -> None:
    def forward(x: Tensor, ids: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        chosen = ids.view(-1)
        h1 = torch.bmm(w1[chosen], x.unsqueeze(-1)).squeeze(-1)
        return torch.bmm(w2[chosen], swiglu(h1).unsqueeze(-1)).squeeze(-1)

    x, ids, _, w1, w2 = operands(torch.float32, k=1)
    result = study(forward, x, ids, w1, w2)
    assert not result.site.spec.has_router_weight
    result.fused()


def test_two_slots_never_close_without_a_sum() -> None:
    x, ids, _, w1, w2 = operands()
    assert not study(slot_rows, x, ids, w1, w2).lifted.sites


def test_rows_in_expert_order_are_no_output_of_one_slot() -> None:
    def forward(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        flat = ids.view(-1)
        perm = flat.argsort()
        return ffn(x[perm], offsets(flat), w1, w2) * weights[perm]

    assert not study(forward, *operands(k=1)).lifted.sites
