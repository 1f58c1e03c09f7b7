"""The norm of each expert's row before it is weighted: spellings of it, and what looks like it and isn't."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moefuse.testing import assert_fuses
from tests.patterns.spelling import E, H, K, Study, T, ffn, offsets, operands, slot_rows, study, swiglu

X, IDS, W, W1, W2 = operands(torch.float32)
_RNG = torch.Generator().manual_seed(3)
SCALE = torch.rand(H, generator=_RNG) + 0.5
OWN = torch.rand(E, H, generator=_RNG) + 0.5
EPS = 0.25  # of the size of the rows' mean squares, so that its place shows in the numbers


def expert_rows(x: Tensor, ids: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """[T, K, H]."""
    h = swiglu(torch.einsum("th,tkoh->tko", x, w1[ids]))
    return torch.einsum("tki,tkoi->tko", h, w2[ids])


def normed(norm: Callable[[Tensor, Tensor], Tensor]) -> Study:
    """A layer whose rows go through norm(rows, scale) before they are weighted."""

    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor, s: Tensor) -> Tensor:
        return (norm(expert_rows(x, ids, w1, w2), s) * w.unsqueeze(-1)).sum(1)

    return study(forward, X, IDS, W, W1, W2, SCALE)


def mean2(h: Tensor) -> Tensor:
    return h.pow(2).mean(-1, keepdim=True)


def unit(h: Tensor) -> Tensor:
    return h * torch.rsqrt(mean2(h) + EPS)


RIGHT: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, bool]] = {
    "rsqrt": (lambda h, s: h * torch.rsqrt(mean2(h) + EPS) * s, "rms", True),
    "scale first": (lambda h, s: s * (h * torch.rsqrt(mean2(h) + EPS)), "rms", True),
    "no scale": (lambda h, s: h * torch.rsqrt(mean2(h) + EPS), "rms", False),
    "one plus scale": (lambda h, s: h * torch.rsqrt(mean2(h) + EPS) * (1.0 + s), "rms", True),
    "power": (lambda h, s: h * torch.pow(mean2(h) + EPS, -0.5) * s, "rms", True),
    "divided by the root": (lambda h, s: h / torch.sqrt(mean2(h) + EPS) * s, "rms", True),
    "product with itself": (lambda h, s: h * torch.rsqrt((h * h).mean(-1)[..., None] + EPS) * s, "rms", True),
    "sum over size": (
        lambda h, s: h * torch.rsqrt(h.square().sum(-1, keepdim=True) / H + EPS) * s,
        "rms",
        True,
    ),
    "in float64": (lambda h, s: (h.double() * torch.rsqrt(mean2(h.double()) + EPS)).float() * s, "rms", True),
    "scaled row": (lambda h, s: unit(h * s), "scaled_rms", True),
    "without eps": (lambda h, s: h * torch.rsqrt(mean2(h)), "rms", False),
}


@pytest.mark.parametrize("name", RIGHT)
def test_norms_are_named_by_what_they_compute(name: str) -> None:
    norm, kind, scaled = RIGHT[name]
    result = normed(norm)
    spec = result.site.spec
    assert (spec.row_norm, spec.has_row_scale) == (kind, scaled)
    assert spec.row_norm_eps == pytest.approx(0.0 if name == "without eps" else EPS)
    assert "RMS norm" in spec.describe()
    result.fused()


WRONG: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "eps outside of the root": (
        lambda h, s: h / (torch.sqrt(mean2(h)) + EPS) * s,
        "something else than rsqrt(mean of squares + eps)",
    ),
    "eps added to the row's factor": (
        lambda h, s: h * (torch.rsqrt(mean2(h)) + EPS) * s,
        "something else than rsqrt(mean of squares + eps)",
    ),
    "mean of the values": (lambda h, s: h * torch.rsqrt(h.mean(-1, keepdim=True) + EPS), "of their squares"),
    "mean of the absolute values": (
        lambda h, s: h * torch.rsqrt(h.abs().mean(-1, keepdim=True) + EPS),
        "isn't made of smooth operators only",
    ),
    "sum of squares": (
        lambda h, s: h * torch.rsqrt(h.square().sum(-1, keepdim=True) + EPS),
        "something else than rsqrt(mean of squares + eps)",
    ),
    "over the slots": (
        lambda h, s: h * torch.rsqrt(h.pow(2).mean(1, keepdim=True) + EPS),
        "expert rows are reduced by mean, not by a sum",
    ),
    "over a part of the features": (
        lambda h, s: h * torch.rsqrt(h[..., :4].pow(2).mean(-1, keepdim=True) + EPS),
        "the mean of something else than the row",
    ),
    "over groups of features": (
        lambda h, s: unit(h.unflatten(-1, (4, 4))).flatten(-2),
        "a part of their features",
    ),
    "scaled by a value per slot": (
        lambda h, s: h * torch.rsqrt(mean2(h) + EPS) * (s + torch.rand(T, K, 1)),
        "scaled by more than one value per feature",
    ),
    "scaled twice": (
        lambda h, s: h * torch.rsqrt(mean2(h) + EPS) * s * s,
        "scaled by more than one value per feature",
    ),
    "scaled only inside the mean": (
        lambda h, s: h * torch.rsqrt(mean2(h * s) + EPS),
        "the norm of expert rows reads `s`",
    ),
    "normed twice": (
        lambda h, s: unit(unit(h)),
        "something else than an RMS norm of the row itself",
    ),
    "centred": (
        lambda h, s: unit(h - h.mean(-1, keepdim=True)),
        "something else than an RMS norm of the row itself",
    ),
    # A clamp against overflow acts where no small sample falls, an eps under the mean where no large one does.
    "values clamped in the mean": (
        lambda h, s: h * torch.rsqrt(mean2(h.clamp(-50, 50)) + EPS),
        "isn't made of smooth operators only",
    ),
    "squares clamped": (
        lambda h, s: h * torch.rsqrt(h.pow(2).clamp(max=1e3).mean(-1, keepdim=True) + EPS),
        "isn't made of smooth operators only",
    ),
    "mean clamped": (
        lambda h, s: h * torch.rsqrt(mean2(h).clamp(max=1e10) + EPS),
        "isn't made of smooth operators only",
    ),
    "eps under the mean": (
        lambda h, s: h * torch.rsqrt((h.pow(2) + 1e-12).mean(-1, keepdim=True)),
        "of their squares",
    ),
    "layer norm": (lambda h, s: functional.layer_norm(h, (H,), s), "native_layer_norm of expert outputs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_rms_norm_of_the_row_is_refused(name: str) -> None:
    norm, words = WRONG[name]
    normed(norm).refused(words)


def test_the_librarys_norm() -> None:
    """Its decomposition adds eps in place."""

    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor, s: Tensor) -> Tensor:
        rows = functional.rms_norm(expert_rows(x, ids, w1, w2), (H,), s, EPS)
        return (rows * w.unsqueeze(-1)).sum(1)

    (layer,) = assert_fuses(forward, X, IDS, W, W1, W2, SCALE).sites
    assert layer.spec is not None
    assert layer.spec.row_norm == "rms"


@pytest.mark.parametrize(
    "root",
    [lambda h: h.pow(2).mean((1, 2), keepdim=True), lambda h: mean2(h.roll(1, 1))],
    ids=["over slots and features", "of another slot's row"],
)
def test_a_factor_made_from_the_rows_is_no_routing_weight(root: Callable[[Tensor], Tensor]) -> None:
    normed(lambda h, s: h * torch.rsqrt(root(h) + EPS)).fused(layers=0)


def test_a_norm_of_weighted_rows_is_another_function() -> None:
    """eps makes it so; without one the weight would cancel, and it still isn't the node's formula."""

    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        rows = expert_rows(x, ids, w1, w2) * w.unsqueeze(-1)
        return (rows * torch.rsqrt(mean2(rows) + EPS)).sum(1)

    study(forward, X, IDS, W, W1, W2).refused("the norm of expert rows reads")


@pytest.mark.parametrize("eps", [EPS, 0.0])
def test_a_weight_of_zero_before_a_norm_without_eps(eps: float) -> None:
    """A dense layer gives experts that weren't chosen rows of zeros, of which such a norm makes NaN."""

    def forward(x: Tensor, scores: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        matrix = torch.zeros(T, E).scatter(1, scores.topk(K, -1)[1], w)
        weighted = x.unsqueeze(1) * matrix.unsqueeze(-1)
        rows = torch.einsum("tei,eoi->teo", swiglu(torch.einsum("teh,eoh->teo", weighted, w1)), w2)
        return (rows * torch.rsqrt(mean2(rows) + eps)).sum(1)

    result = study(forward, X, torch.randn(T, E, generator=torch.Generator().manual_seed(4)), W, W1, W2)
    if eps:
        result.fused()
    else:
        result.refused("a norm without an eps, which makes NaN of a row of zeros")


def test_a_norm_of_the_sum_stays_behind_the_layer() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor, s: Tensor) -> Tensor:
        y = (expert_rows(x, ids, w1, w2) * w.unsqueeze(-1)).sum(1)
        return y * torch.rsqrt(mean2(y) + EPS) * s

    result = study(forward, X, IDS, W, W1, W2, SCALE)
    assert result.site.spec.row_norm == "none"
    result.fused()


def test_a_norm_between_the_gemms_is_no_activation() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h = swiglu(torch.einsum("th,tkoh->tko", x, w1[ids]))
        h = h * torch.rsqrt(mean2(h) + EPS)
        return (torch.einsum("tki,tkoi->tko", h, w2[ids]) * w.unsqueeze(-1)).sum(1)

    study(forward, X, IDS, W, W1, W2).refused(
        "a mean over the features of a row stands between the expert GEMMs"
    )


@pytest.mark.parametrize("order", ["slots", "experts"])
def test_a_scale_per_expert(order: str) -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor, s: Tensor) -> Tensor:
        if order == "slots":
            h = slot_rows(x, ids, w1, w2)
            return (h * torch.rsqrt(mean2(h) + EPS) * s[ids] * w.unsqueeze(-1)).sum(1)
        chosen, perm = ids.reshape(-1).sort()
        h = ffn(x[perm // K], offsets(chosen), w1, w2)
        h = h * torch.rsqrt(mean2(h) + EPS) * s[chosen] * w.reshape(-1)[perm].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, perm // K, h)

    x, ids, w, w1, w2 = operands()
    result = study(forward, x, ids, w, w1, w2, OWN.bfloat16())
    assert result.site.spec.has_row_scale
    result.fused()


def test_a_scale_of_other_ids_is_refused() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor, s: Tensor) -> Tensor:
        h = expert_rows(x, ids, w1, w2)
        return (h * torch.rsqrt(mean2(h) + EPS) * s[ids.flip(0)] * w.unsqueeze(-1)).sum(1)

    study(forward, X, IDS, W, W1, W2, OWN).refused("is selected by other ids than the rest of the layer")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("odd", [False, True])
def test_a_loop_over_experts(shared: bool, odd: bool) -> None:
    """Odd: one expert's eps differs."""

    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor, scale: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            h = swiglu(x[token] @ w1[e].t()) @ w2[e].t()
            h = (
                h
                * torch.rsqrt(mean2(h) + (2 * EPS if odd and e == 1 else EPS))
                * (scale if shared else scale[e])
            )
            y = y.index_add(0, token, h * w[token, slot, None])
        return y

    result = study(forward, X, IDS, W, W1, W2, SCALE if shared else OWN)
    if odd:
        result.refused("expert 1 of the loop has other norm than expert 0")
        return
    assert result.site.spec.has_row_scale
    assert len(result.site.layer.row_scale) == (1 if shared else E)
    result.fused()


def dense(x: Tensor, scores: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Every expert on every token, weighed by a matrix of scores."""
    matrix = torch.zeros(T, E).scatter(1, scores.topk(K, -1)[1], w).t()
    rows = torch.bmm(swiglu(torch.bmm(x.expand(E, T, H), w1.transpose(1, 2))), w2.transpose(1, 2))
    return (unit(rows) * matrix.unsqueeze(-1)).sum(0)


def masked(x: Tensor, scores: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """One expert after the other on every token."""
    ids, y = scores.topk(K, -1)[1], torch.zeros_like(x)
    for e in range(E):
        rows = functional.linear(swiglu(functional.linear(x, w1[e])), w2[e])
        y = y + unit(rows) * (w * (ids == e)).sum(-1, keepdim=True)
    return y


@pytest.mark.parametrize("function", [dense, masked])
def test_a_norm_of_the_rows_of_every_token_is_named(function: Callable[..., Tensor]) -> None:
    """Its factor is no routing weight."""
    refused = study(function, X, torch.randn(T, E), W, W1, W2)
    refused.refused("weighed by a factor made from themselves")
