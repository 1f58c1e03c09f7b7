"""Loops over experts: a layer is every expert once, with the same body and its own weights; all else is refused."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moefuse.patterns.facts import Fact
from tests.patterns.spelling import E, H, K, Study, T, operands, study, swiglu


def loop(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    experts: tuple[int, ...] = tuple(range(E)),
    read: Callable[[int], int] = lambda e: e,
    act: Callable[[int, Tensor], Tensor] = lambda e, h: swiglu(h),
    write: str = "index_add",
    odd_ids: bool = False,
) -> Tensor:
    """y[token] += weight * expert(x[token]), expert by expert."""
    y = torch.zeros(T, H, dtype=x.dtype)
    for e in experts:
        token, slot = torch.where((ids.roll(1, 0) if odd_ids and e == 1 else ids) == e)
        rows = functional.linear(act(e, functional.linear(x[token], w1[read(e)])), w2[read(e)])
        rows = rows * weights[token, slot, None]
        if write == "index_add":
            y = y.index_add(0, token, rows)
        elif write == "add":
            y = y.index_put((token,), y[token] + rows)
        else:
            y = y.index_put((token,), rows)
    return y


def spelled(**changes: object) -> Study:
    """The loop with some of its steps changed, lifted. Ids come from a top-k inside: no expert twice in a token."""
    x, _, weights, w1, w2 = operands(torch.float32)

    def layer(x: Tensor, scores: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        ids = scores.topk(weights.shape[1], dim=-1)[1]
        return loop(x, ids, weights, w1, w2, **changes)  # type: ignore[arg-type]

    return study(layer, x, torch.randn(T, E), weights, w1, w2)


@pytest.mark.parametrize("write", ["index_add", "add"])
def test_every_expert_once_is_a_layer(write: str) -> None:
    layer = spelled(write=write)
    assert layer.site.spec.num_experts == E
    layer.fused()


def test_the_order_of_the_experts_is_free() -> None:
    spelled(experts=tuple(reversed(range(E)))).fused()


def test_weights_follow_the_expert_s_number_not_their_place() -> None:
    """Expert e computes with the matrices of E - 1 - e: the node must too."""
    spelled(read=lambda e: E - 1 - e).fused()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": (0, *range(2, E))}, "adds expert 1 0 times"),
        ({"experts": (*range(E), 1)}, "adds expert 1 2 times"),
        ({"experts": tuple(range(E - 1))}, f"has {E - 1} of the {E} experts that the router chooses from"),
        ({"act": lambda e, h: swiglu(-h if e == 1 else h)}, "expert 1 of the loop has other activation"),
        ({"act": lambda e, h: swiglu(h.flip(-1) if e == 1 else h)}, "flip"),
        ({"odd_ids": True}, "expert 1 of the loop has other ids"),
        ({"write": "overwrite"}, "overwrite what earlier experts have added"),
    ],
    ids=[
        "left out",
        "twice",
        "the last left out",
        "another activation",
        "a flip",
        "other ids",
        "overwritten",
    ],
)
def test_what_is_no_layer(changes: dict[str, object], words: str) -> None:
    spelled(**changes).refused(words)


def test_an_unknown_id_may_come_twice_so_writing_back_is_refused() -> None:
    """Without a top-k, a token may choose an expert in two slots: y[t] = y[t] + row keeps one of them."""

    def layer(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return loop(x, ids, weights, w1, w2, write="add")

    study(layer, *operands(torch.float32)).refused("may choose an expert twice")


def test_an_expression_does_not_repeat_the_cases_before() -> None:
    """Otherwise work would grow with the square of the experts."""
    assert _largest(spelled()) == _largest(spelled(experts=(0,)))


def _largest(layer: Study) -> int:
    return max(fact.expr.weight for fact in layer.lifted.facts.values() if isinstance(fact, Fact))


def test_a_loop_that_adds_up_two_layers() -> None:
    """The same slots and experts, other weights: two layers, each whole."""
    x, _, weights, w1, w2 = operands(torch.float32)

    def two(x: Tensor, scores: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        ids = scores.topk(weights.shape[1], dim=-1)[1]
        y, z = torch.zeros_like(x), torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            h = swiglu(functional.linear(x[token], w1[e])) * weights[token, slot, None]
            y = y.index_add(0, token, functional.linear(h, w2[e]))
            h = swiglu(functional.linear(x[token], -w1[e])) * weights[token, slot, None]
            z = z.index_add(0, token, functional.linear(h, w2[E - 1 - e]))
        return y, z

    def shared(x: Tensor, scores: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        ids = scores.topk(weights.shape[1], dim=-1)[1]
        return loop(x, ids, weights, w1, w2), loop(x, ids, weights, w1, w2.flip(0))

    for layers in (two, shared):
        study(layers, x, torch.randn(T, E), weights, w1, w2).fused(2)


def masked(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    experts: tuple[int, ...] = tuple(range(E)),
    act: Callable[[int, Tensor], Tensor] = lambda e, h: swiglu(h),
    score: str = "mask",
) -> Tensor:
    """Every expert on every token, times the token's score for it: zero where it wasn't chosen."""
    y = torch.zeros(T, H, dtype=x.dtype)
    scores = torch.zeros(T, E, dtype=x.dtype).scatter(1, ids, weights)
    for e in experts:
        own = ((ids == e) * weights).sum(-1, keepdim=True) if score == "mask" else scores[:, e : e + 1]
        y = y + functional.linear(act(e, functional.linear(x, w1[e])), w2[e]) * own
    return y


def every_token(**changes: object) -> Study:
    """The masked loop, lifted; ids come from a top-k inside."""
    x, _, weights, w1, w2 = operands(torch.float32)

    def layer(x: Tensor, scores: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        ids = scores.topk(weights.shape[1], dim=-1)[1]
        return masked(x, ids, weights, w1, w2, **changes)  # type: ignore[arg-type]

    return study(layer, x, torch.randn(T, E), weights, w1, w2)


def test_rows_of_several_dimensions_are_one_row_per_token() -> None:
    """x [2, 3, H] and ids of its flat rows: the token is one index, whatever x's own dimensions are."""
    x, _, weights, w1, w2 = operands(torch.float32)

    def layer(x: Tensor, scores: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        ids = scores.topk(weights.shape[1], dim=-1)[1]
        return masked(x.view(-1, H), ids, weights, w1, w2).view(x.shape)

    study(layer, x.view(2, T // 2, H), torch.randn(T, E), weights, w1, w2).fused()


def test_a_first_term_without_zeros_and_a_rounded_score() -> None:
    """vLLM's iteration: no zeros to start from; one token, whose dimension has no index."""

    def layer(x: Tensor, scores: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        ids = scores.topk(weights.shape[1], dim=-1)[1]
        total: Tensor | None = None
        for e in range(E):
            score = (weights * (ids == e)).sum(-1, keepdim=True).to(x.dtype)
            own = functional.linear(swiglu(functional.linear(x, w1[e])), w2[e]) * score
            total = own if total is None else total + own
        assert total is not None
        return total

    x, _, weights, w1, w2 = operands(torch.bfloat16)
    for tokens in (T, 1):
        study(layer, x[:tokens], torch.randn(tokens, E), weights[:tokens].float(), w1, w2).fused()


@pytest.mark.parametrize("tokens", [T, 1])
def test_weights_that_the_graph_makes_and_one_token(tokens: int) -> None:
    """One token has no index, so nothing but its expert tells a weight from what the graph makes of the token."""

    def layer(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        y, whole1, whole2 = torch.zeros_like(x), w1 * 2, w2 * 2
        for e in range(E):
            score = (weights * (ids == e)).sum(-1, keepdim=True)
            y = y + functional.linear(swiglu(functional.linear(x, whole1[e])), whole2[e]) * score
        return y

    x, ids, weights, w1, w2 = operands(torch.float32)
    study(layer, x[:tokens], ids[:tokens], weights[:tokens], w1, w2).fused()


@pytest.mark.parametrize("weighted", [True, False])
def test_one_slot_per_token_needs_no_sum_of_its_mask(weighted: bool) -> None:
    def layer(x: Tensor, scores: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        best, ids = scores.max(-1)
        y = torch.zeros_like(x)
        for e in range(E):
            own = (ids == e) * best if weighted else ids == e
            y = y + functional.linear(swiglu(functional.linear(x, w1[e])), w2[e]) * own.unsqueeze(-1)
        return y

    x, _, _, w1, w2 = operands(torch.float32)
    found = study(layer, x, torch.randn(T, E), w1, w2)
    assert found.site.spec.top_k == 1
    assert found.site.spec.has_router_weight is weighted
    found.fused()


@pytest.mark.parametrize("score", ["mask", "column"])
def test_every_expert_on_every_token_masked_is_a_layer(score: str) -> None:
    layer = every_token(score=score)
    assert layer.site.spec.num_experts == E
    layer.fused()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": (0, *range(2, E))}, "adds expert 1 0 times"),
        ({"experts": (*range(E), 1)}, "adds expert 1 2 times"),
        ({"act": lambda e, h: swiglu(-h if e == 1 else h)}, "expert 1 of the loop has other activation"),
    ],
    ids=["left out", "twice", "another activation"],
)
def test_what_is_no_masked_layer(changes: dict[str, object], words: str) -> None:
    every_token(**changes).refused(words)


@pytest.mark.parametrize("again", [True, False])
def test_a_sum_over_some_of_the_experts_that_is_read_otherwise_too(again: bool) -> None:
    """It stands in for the last expert, or it leaves the loop: named, never raised."""

    def layer(x: Tensor, scores: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> object:
        ids = scores.topk(weights.shape[1], dim=-1)[1]
        first = masked(x, ids, weights, w1, w2, experts=(0, 1))
        y = first
        for e in range(2, E - 1 if again else E):
            own = ((ids == e) * weights).sum(-1, keepdim=True)
            y = y + functional.linear(swiglu(functional.linear(x, w1[e])), w2[e]) * own
            first = first if again or e > 2 else first.relu()
        return y + first if again else (y, first)

    x, _, weights, w1, w2 = operands(torch.float32)
    study(layer, x, torch.randn(T, E), weights, w1, w2).refused("is also read by")


# --- experts that return their tokens --------------------------------------------------------------------

Z = 2


def _identity_loop(
    last: int = E + Z,
    row: Callable[[Tensor], Tensor] = lambda row: row,
    weight: Callable[[Tensor], Tensor] = lambda w: w,
    order: Sequence[int] | None = None,
    first: int = E,
) -> Callable[..., Tensor]:
    """A top-k over E experts and Z that return the token's row. last, first: where these end and begin."""

    def forward(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        w, ids = logits.softmax(-1).topk(K)
        y = torch.zeros_like(x)
        for e in order or range(last):
            token, slot = torch.where(ids == e)
            if e >= first:
                rows = row(x[token]) * weight(w)[token, slot, None]
            else:
                rows = swiglu(x[token] @ w1[e].t()) @ w2[e].t() * w[token, slot, None]
            y = y.index_add(0, token, rows.to(y.dtype))
        return y

    return forward


def _identity_study(forward: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> Study:
    x, _, _, w1, w2 = operands(dtype)
    logits = torch.randn(T, E + Z, generator=torch.Generator().manual_seed(1))
    return study(forward, x, logits, torch.cat([w1, w1[:Z]]), w2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identity_experts(dtype: torch.dtype) -> None:
    result = _identity_study(_identity_loop(), dtype)
    spec = result.site.spec
    assert (spec.num_experts, spec.num_identity_experts, spec.ids_checked) == (E, Z, True)
    assert f"{E} experts" in spec.describe()
    assert f"{Z} identity experts" in spec.describe()
    result.fused()


def test_identity_experts_in_any_order() -> None:
    result = _identity_study(_identity_loop(order=[2, 0, 5, 1, 4, 3]))
    assert result.site.spec.num_identity_experts == Z
    result.fused()


WRONG_IDENTITIES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "one missing at the end": (
        _identity_loop(last=E + Z - 1),
        f"the loop has {E + Z - 1} of the {E + Z} experts that the router chooses from",
    ),
    "one missing between": (_identity_loop(order=[0, 1, 2, 3, 5]), "the loop adds expert 4 0 times"),
    "one twice": (_identity_loop(order=[0, 1, 2, 3, 4, 5, 5]), "the loop adds expert 5 2 times"),
    "an identity before the experts": (
        _identity_loop(order=[0, 1, 2, 3, 4, 5], first=-1),
        "no expert of the loop has a GEMM",
    ),
    "another row": (
        _identity_loop(row=lambda row: row.flip(1)),
        f"the loop has {E} of the {E + Z} experts that the router chooses from",
    ),
    "a function of the row": (_identity_loop(row=lambda row: row.relu()), "doesn't return the token's row"),
    "twice the row": (_identity_loop(row=lambda row: 2 * row), "has other routing weights than expert 0"),
    "other weights": (_identity_loop(weight=lambda w: w + 1), "has other routing weights than expert 0"),
    "the slots in another order": (
        _identity_loop(weight=lambda w: w.flip(1)),
        "has other routing weights than expert 0",
    ),
}


@pytest.mark.parametrize("name", WRONG_IDENTITIES)
def test_what_is_no_identity_expert(name: str) -> None:
    forward, words = WRONG_IDENTITIES[name]
    _identity_study(forward).refused(words)


def test_identity_rows_keep_the_dtype_that_the_experts_read() -> None:
    def forward(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        w, ids = logits.softmax(-1).topk(K)
        y = torch.zeros_like(x)
        for e in range(E + Z):
            token, slot = torch.where(ids == e)
            row = x[token]
            rows = (swiglu(row.bfloat16() @ w1[e].t()) @ w2[e].t()).float() if e < E else row
            y = y.index_add(0, token, rows * w[token, slot, None])
        return y

    x, _, _, w1, w2 = operands()
    logits = torch.randn(T, E + Z)
    study(forward, x.float(), logits, w1, w2).refused("returns rows of another dtype than experts read")


@pytest.mark.parametrize("what", ["weight", "bias"])
def test_an_expert_s_tensor_that_differs_from_token_to_token_is_none(what: str) -> None:
    x, _, weights, w1, w2 = operands(torch.float32)
    own = torch.randn(E, w2.shape[2], T, H) if what == "weight" else torch.randn(T, H)

    def layer(x: Tensor, scores: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, own: Tensor) -> Tensor:
        ids, y = scores.topk(K, dim=-1)[1], torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            a = swiglu(functional.linear(x[token], w1[e]))
            if what == "weight":
                rows = torch.einsum("ni,ino->no", a, own[e][:, token])
            else:
                rows = functional.linear(a, w2[e]) + own[token]
            y = y.index_add(0, token, rows * weights[token, slot, None])
        return y

    study(layer, x, torch.randn(T, E), weights, w1, w2, own).refused("differs from token to token")
