"""Shared experts beside a fused layer: a node of their own, or left exactly as they were, and the report says why."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import moefuse
from moefuse.options import Options
from moefuse.passes import pipeline
from moefuse.patterns.rules import op_name
from moefuse.report.model import SharedReport
from moefuse.testing import compare
from moefuse.testing.capture import Captured, capture_graph
from tests.patterns.spelling import E, H, I, K, gathered

J = 40
IDS = torch.tensor([[0, 1]] * 6)
ONES = torch.ones(6, K)
FLOATS = (torch.bfloat16, torch.float32)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(H, J, bias=False), nn.Linear(H, J, bias=False)
        self.down = nn.Linear(J, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(E, 2 * I, H) / H**0.5)
        self.w2 = nn.Parameter(torch.randn(E, H, I) / I**0.5)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return gathered(x, ids, weights, self.w1, self.w2)


class Block(nn.Module):
    """As in Qwen2-MoE: a router, experts, a shared expert weighted by a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.score = nn.Linear(H, E, bias=False), nn.Linear(H, 1, bias=False)
        self.experts, self.shared_expert = Experts(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).float().softmax(-1).topk(K)
        shared = torch.sigmoid(self.score(x)) * self.shared_expert(x)
        return self.experts(x, ids, weights.to(x.dtype)) + shared


def rows(tokens: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(tokens, H, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def captured(tokens: int, dynamic: Mapping[int, Any] | None = None) -> Captured:
    model = Block().bfloat16().requires_grad_(False)
    return capture_graph(model, (rows(tokens),), dynamic=dynamic)


def treated(tokens: int, training: bool = False, **options: Any) -> tuple[pipeline.FuseResult, SharedReport]:
    result = pipeline.run(
        captured(tokens).graph_module, frozenset(), Options.parse(options), training=training
    )
    ((verdict,),) = (layer.shared for layer in result.layers)
    return result, verdict


def test_the_sum_stays_and_the_products_go() -> None:
    result, verdict = treated(6)
    assert verdict.fused
    assert (verdict.reason, verdict.check, verdict.bytes) == ("", "", 3 * H * J * 2)
    names = [op_name(node) for node in result.graph_module.graph.nodes]
    assert names.count("moefuse::mega_moe") == 2
    assert names.count("aten::mm") == 2  # the router's and the sigmoid's
    assert names.count("aten::add") == 1
    assert len(result.calls) == 1
    (pairs,) = result.replaced
    assert [old.name for old, _ in pairs][1] == verdict.node


@pytest.mark.parametrize(
    ("tokens", "training", "check"), [(65, False, "shared_tokens"), (6, True, "shared_training")]
)
def test_what_the_policy_leaves_stays_as_it_was(tokens: int, training: bool, check: str) -> None:
    result, verdict = treated(tokens, training)
    assert (verdict.fused, verdict.check) == (False, check)
    assert result.layers[0].fused
    assert sum(op_name(node) == "aten::mm" for node in result.graph_module.graph.nodes) == 5


@pytest.mark.parametrize(
    ("exclude", "wanted"),
    [("shared_expert", [(True, "exclude")]), ("experts", []), ("*", []), ("nothing", [(True, "")])],
)
def test_the_option_exclude(exclude: str, wanted: list[tuple[bool, str]]) -> None:
    """Of a shared expert alone, too; where its layer isn't fused, nothing is said of it."""
    report = moefuse.explain(
        Block().requires_grad_(False), rows(6, torch.float32), moefuse_options={"exclude": [exclude]}
    )
    (site,) = report.sites
    assert [(site.fused, expert.check) for expert in site.shared] == wanted
    assert ("match no MoE layer" in str(report)) == (exclude == "nothing")


def test_any_number_of_tokens_where_it_is_symbolic() -> None:
    graph = captured(6, dynamic={0: [0]})
    outcome = compare.rewrite_and_compare(graph.graph_module, graph.inputs, expect_fused=1)
    assert [expert.fused for expert in outcome.report.sites[0].shared] == [True]
    for tokens in (2, 100):
        compare.rewrite_and_compare(graph.graph_module, (*graph.inputs[:-1], rows(tokens)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_compiled_with_inductor(dtype: torch.dtype) -> None:
    """Also with the option verify, which compares the shared expert with its region, too."""
    model, x = Block().to(dtype).requires_grad_(False), rows(1, dtype)
    wanted = model(x)
    got = torch.compile(model, backend="moefuse", options={"mode": "on", "verify": True})(x)
    # one rounding, where a product of the sums of 16 and 40 terms lies between two values
    torch.testing.assert_close(got, wanted, rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    (site,) = moefuse.reports()[-1].sites
    assert site.verified is not None
    assert [(expert.layer, expert.fused) for expert in site.shared] == [("shared_expert", True)]


def test_gradients_are_the_models_own() -> None:
    model = Block()
    x = rows(6, torch.float32).requires_grad_()
    model(x).square().sum().backward()
    wanted = [x.grad, *(parameter.grad for parameter in model.parameters())]
    x.grad = None
    model.zero_grad()
    torch.compile(model, backend="moefuse", options={"mode": "on", "inner": "eager"})(
        x
    ).square().sum().backward()
    for a, b in zip([x.grad, *(p.grad for p in model.parameters())], wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert moefuse.reports()[-1].sites[0].shared[0].check == "shared_training"


def test_several_symbolic_sizes() -> None:
    """A batch and a length: as many ids as rows."""

    class Batched(Block):
        def forward(self, x: Tensor) -> Tensor:
            weights, ids = self.router(x.view(-1, H)).float().softmax(-1).topk(K)
            return self.experts(x.view(-1, H), ids, weights.to(x.dtype)).view(x.shape) + self.shared_expert(x)

    model = Batched().bfloat16().requires_grad_(False)
    graph = capture_graph(model, (rows(6).view(2, 3, H),), dynamic={0: [0, 1]})
    outcome = compare.rewrite_and_compare(graph.graph_module, graph.inputs, expect_fused=1)
    assert [expert.fused for expert in outcome.report.sites[0].shared] == [True]
    compare.rewrite_and_compare(graph.graph_module, (*graph.inputs[:-1], rows(20).view(4, 5, H)))


class Two(nn.Module):
    """Two layers of the same rows, and a function of both and a dense FFN of these rows."""

    def __init__(self, add: Callable[["Two", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Block(), Block()
        self.dense = Mlp()
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        return self.add(self, x)


def crossed(m: Two, x: Tensor) -> Tensor:
    """The dense rows are read by an earlier layer than the one beside which they are added."""
    dense = m.dense(x)
    return m.first.experts(dense, IDS, ONES) + m.second(x) + dense


ORDERS: dict[str, Callable[[Two, Tensor], Tensor]] = {
    "a shared expert's": crossed,
    "a layer's": lambda m, x: m.second(m.first(x)),
}


@pytest.mark.parametrize("order", ORDERS)
def test_what_another_rewrite_replaced_is_read_in_its_new_form(order: str) -> None:
    model, x = Two(ORDERS[order]).requires_grad_(False), rows(6, torch.float32)
    got = torch.compile(model, backend="moefuse", options={"mode": "on", "inner": "eager"})(x)
    torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5)  # sums in another order
    fused = [expert.fused for site in moefuse.reports()[-1].sites for expert in site.shared]
    assert fused.count(True) == 2


def test_stacked_weights_of_one_expert_are_no_layer_of_their_own() -> None:
    """A product of a batch of one looks like a MoE layer's, which mode "on" would demand to be fused."""

    class Stacked(Block):
        def forward(self, x: Tensor) -> Tensor:
            weights, ids = self.router(x).softmax(-1).topk(K)
            hidden = functional.silu(torch.bmm(x[None], self.gate)) * torch.bmm(x[None], self.up)
            return self.experts(x, ids, weights) + torch.bmm(hidden, self.down)[0]

    model, x = Stacked(), rows(6, torch.float32)
    model.gate, model.up = (nn.Parameter(torch.randn(1, H, J) / H**0.5) for _ in range(2))
    model.down = nn.Parameter(torch.randn(1, J, H) / J**0.5)
    model.requires_grad_(False)
    got = torch.compile(model, backend="moefuse", options={"mode": "on", "inner": "eager"})(x)
    torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5)  # sums in another order
    assert [[expert.fused for expert in site.shared] for site in moefuse.reports()[-1].sites] == [[True]]


def test_a_constant_weight_is_not_rounded() -> None:
    """1.0039 is 1.0 or 1.0078 in bfloat16; a product by it is one of float32."""

    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            weights, ids = self.router(x).float().softmax(-1).topk(K)
            return self.experts(x, ids, weights.to(x.dtype)) + 1.0039 * self.shared_expert(x)

    graph = capture_graph(Scaled().bfloat16().requires_grad_(False), (rows(50),))
    outcome = compare.rewrite_and_compare(graph.graph_module, graph.inputs, expect_fused=1)
    (expert,) = outcome.report.sites[0].shared
    assert expert.fused
    assert expert.spec is not None
    assert expert.spec.router_dtype == torch.float32
