"""Candidates: complete layers, and what looks like one, with the first reason."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

import moefuse
from moefuse.passes.lift import Candidate, explain, find
from moefuse.patterns.facts import Lost
from tests.patterns.spelling import E, H, K, T, gathered, grouped, operands, slot_rows, study, swiglu

NOTHING: frozenset[str] = frozenset()


def candidates(
    function: Callable[..., object], *inputs: Tensor, parameters: frozenset[str] = NOTHING
) -> list[Candidate]:
    return find(study(function, *inputs).graph_module.graph, parameters)


def test_a_layer() -> None:
    (found,) = candidates(grouped, *operands())
    assert found.site is not None
    assert (found.node, found.reason, found.layer) == (found.site.node, "", "")


def test_no_layer_no_candidate() -> None:
    def dense(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return swiglu(x @ w1[0].t()) @ w2[0].t()

    x, _, _, w1, w2 = operands()
    assert not candidates(dense, x, w1, w2)
    assert not candidates(lambda q, k: torch.bmm(q, k) * 2, torch.randn(2, 3, 4), torch.randn(2, 4, 5))


def test_a_loss_behind_the_gemms_is_the_reason() -> None:
    (found,) = candidates(lambda x, ids, w1, w2: slot_rows(x, ids, w1, w2).mean(1), *without_weights())
    assert found.site is None
    assert found.node.name == "mean"
    assert found.reason == "`mean`: expert rows are reduced by mean, not by a sum"


def without_weights() -> tuple[Tensor, ...]:
    x, ids, _, w1, w2 = operands()
    return x, ids, w1, w2


def test_stacked_parameters_without_a_routing_are_a_candidate() -> None:
    """Something like a layer of experts, in which no ids were found: said aloud, and not silence."""

    def every_expert(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h1 = torch.bmm(x.expand(E, T, H), w1.transpose(1, 2))
        return torch.bmm(swiglu(h1), w2.transpose(1, 2)).sum(0)

    x, _, _, w1, w2 = operands()
    assert not candidates(every_expert, x, w1, w2), "no parameters: attention is spelled like this too"
    (found,) = candidates(every_expert, x, w1, w2, parameters=frozenset({"w1", "w2"}))
    assert "no rule connects its weights to a routing" in found.reason
    assert found.node.name == "bmm"


def test_a_layer_and_a_refused_one() -> None:
    def both(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return grouped(x, ids, w, w1, w2) + slot_rows(x, ids, w1, w2).amax(1)

    one, two = candidates(both, *operands())
    assert one.site is not None
    assert two.site is None
    assert "reduced by amax" in two.reason
    assert one.node < two.node


def test_reasons_hold_the_chain_of_causes() -> None:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    assert explain(Lost("second", b, Lost("first", a))) == "`b`: second, because `a`: first"


class Block(torch.nn.Module):
    """A layer in a module of its own, with a shared expert beside it."""

    def __init__(self) -> None:
        super().__init__()
        _, _, _, w1, w2 = operands(torch.float32)
        self.w1, self.w2 = torch.nn.Parameter(w1), torch.nn.Parameter(w2)
        self.router = torch.nn.Linear(H, E)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        shared = torch.bmm(x.unsqueeze(0), self.w1[:1].transpose(1, 2)).squeeze(0)
        return gathered(x, ids, weights, self.w1, self.w2) + swiglu(shared) @ self.w2[0].t()


def test_a_loop_whose_choices_are_lost_is_a_candidate() -> None:
    from tests.patterns.test_capacity import LOGITS, by_mask

    x, _, _, w1, w2 = operands(torch.float32)
    (found,) = candidates(by_mask, x, LOGITS, w1, w2)
    assert found.site is None
    assert found.node.name == "nonzero"
    assert "those beyond it are dropped" in found.reason


@pytest.mark.parametrize(("experts", "layers"), [(E, 1), (1, 0)])
def test_a_masked_loop_of_single_products(experts: int, layers: int) -> None:
    """ViTPose: a linear layer per image's expert. With one expert it is a mask, and no layer."""

    def forward(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        y = torch.zeros(T, w.shape[1])
        for e in range(experts):
            y = y + torch.nn.functional.linear(x, w[e]) * (ids == e).unsqueeze(-1)
        return y

    x, ids, _, w1, _ = operands(torch.float32)
    found = candidates(forward, x, ids[:, 0], w1)
    assert len(found) == layers
    assert all("each expert is one product" in one.reason for one in found)


@pytest.mark.parametrize("routed", [True, False])
def test_experts_of_rank_one(routed: bool) -> None:
    """Rows of two tables for each slot; the same products with rows that no top-k chose are no MoE layer."""

    def forward(x: Tensor, scores: Tensor, ids: Tensor, down: Tensor, up: Tensor) -> Tensor:
        weights, chosen = scores.topk(K)
        chosen = chosen * 2 % E if routed else ids
        h = torch.nn.functional.silu(torch.bmm(down[chosen], x.unsqueeze(-1)).squeeze(-1)) * weights
        return torch.bmm(h.unsqueeze(1), up[chosen]).squeeze(1)

    tables = torch.randn(E, H), torch.randn(E, H)
    found = candidates(forward, torch.randn(T, H), torch.randn(T, E), torch.zeros(T, K).long(), *tables)
    assert len(found) == routed
    assert all("each slot takes one row of `down`, not a matrix" in one.reason for one in found)


class SharedExperts(torch.nn.Module):
    """Two experts for every token, weighed by its router; `apart` gives each rows of its own."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        _, _, _, w1, w2 = operands(torch.float32)
        self.w1, self.w2 = torch.nn.Parameter(w1[:2]), torch.nn.Parameter(w2[:2])
        self.router, self.apart = torch.nn.Linear(H, 2), apart

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.stack([x, x.flip(0)]) if self.apart else x.expand(2, T, H)
        gammas = self.router(x).sigmoid().t().unsqueeze(-1)
        h = swiglu(torch.bmm(rows, self.w1.transpose(1, 2))) * gammas
        return torch.bmm(h, self.w2.transpose(1, 2)).sum(0)


class TwoModules(torch.nn.Module):
    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.experts = Block()
        self.shared = SharedExperts(apart)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x) + self.shared(x)


@pytest.mark.parametrize(("apart", "unfused"), [(False, []), (True, ["shared"])])
def test_shared_experts_in_a_module_beside_a_layer(apart: bool, unfused: list[str]) -> None:
    """No layer of their own; but what nothing explains is said aloud."""
    model = TwoModules(apart).requires_grad_(False)
    report = moefuse.explain(model, operands(torch.float32)[0])
    assert [site.layer for site in report.sites if not site.fused] == unfused
    assert report.fused == 1


def test_a_shared_expert_beside_a_layer_is_no_candidate() -> None:

    model = torch.nn.Sequential(Block(), Block()).requires_grad_(False)
    report = moefuse.explain(model, operands(torch.float32)[0])
    assert [(site.layer, site.fused) for site in report.sites] == [("0", True), ("1", True)]
