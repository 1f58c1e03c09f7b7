"""The pass over the graph: losses and their causes, leaves opened on demand, linear time."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from moefuse.patterns.engine import Lifter, leaf_fact, lift
from moefuse.patterns.facts import Leaf
from moefuse.patterns.rules import argument, op_name, rule, rule_for
from tests.patterns.spelling import (
    E,
    H,
    K,
    T,
    gathered,
    grouped,
    operands,
    slot_rows,
    sorted_rows,
    study,
    swiglu,
)


def test_every_call_gets_fresh_axes() -> None:
    result = study(lambda x, ids: x[ids.reshape(-1).argsort() // K] * 1, *operands()[:2])
    lifter = Lifter()
    lifter.run(result.graph_module.graph)
    node = next(node for node in result.graph_module.graph.nodes if node.name == "index")
    one, two = lifter.fact(node), lifter.fact(node)
    assert one.expr.axes.isdisjoint(two.expr.axes)


def test_a_node_without_a_fact_is_a_leaf() -> None:
    (x,) = study(lambda x: x.exp(), torch.randn(T, 1, H)).graph_module.graph.find_nodes(op="placeholder")
    fact = leaf_fact(x)
    assert isinstance(fact.expr, Leaf)
    assert fact.dims[1] == (), "a dimension of size one has no axis"
    assert [group[0].size for group in (fact.dims[0], fact.dims[2])] == [T, H]  # type: ignore[union-attr]


def test_nodes_without_values_are_left_alone() -> None:
    graph = Graph()
    graph.output(graph.call_function(torch.ops.aten.exp.default, (graph.placeholder("x"),)))
    assert not lift(graph).facts


def test_the_first_loss_is_the_root_of_those_that_follow() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        rows, perm = sorted_rows(x, ids, w1, w2)
        return (rows[perm].view(T, K, H) * w.unsqueeze(-1)).sum(1)

    result = study(forward, *operands())
    losses = list(result.lifted.losses.values())
    assert len({loss.root for loss in losses}) == 1
    assert losses[0].root.node.name == "index_1"
    result.refused("taken by the permutation itself")


def test_no_loss_where_only_a_shape_is_read() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        rows = slot_rows(x, ids, w1, w2)
        return (rows * w.unsqueeze(-1)).sum(1) + torch.empty_like(rows).fill_(0).sum(1)

    result = study(forward, *operands())
    assert not result.lifted.losses
    assert result.site


def test_a_rule_unknown_to_the_book_loses_expert_rows_by_name() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return slot_rows(x, ids, w1, w2).flip(1).sum(1)

    study(forward, *operands()).refused("no rule says what aten::flip of expert outputs (`view_1`) means")


def test_the_same_leaf_opens_into_the_same_expression() -> None:
    """Gate and up read one row expression, though its node is opened twice."""

    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        scaled = x.unsqueeze(1) * w.unsqueeze(-1)
        half = w1.shape[1] // 2
        gate = torch.einsum("tkh,tkoh->tko", scaled, w1[:, :half][ids])
        up = torch.einsum("tkh,tkoh->tko", scaled, w1[:, half:][ids])
        return torch.einsum("tki,tkoi->tko", torch.nn.functional.silu(gate) * up, w2[ids]).sum(1)

    result = study(forward, *operands(torch.float32))
    assert result.site.spec.weight_position == "input"
    result.fused()


def test_sites_come_in_graph_order() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        for _ in range(3):
            x = gathered(x, ids, w, w1, w2)
        return x

    nodes = [site.node for site in study(forward, *operands(torch.float32)).lifted.sites]
    assert len(nodes) == 3
    assert nodes == sorted(nodes)


def test_time_grows_with_the_nodes() -> None:
    """Twice the layers, about twice the time (four times would be quadratic; timing noise: best of three)."""

    def deep(layers: int) -> float:
        def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
            for _ in range(layers):
                x = grouped(x, ids, w, w1, w2)
            return x

        graph = study(forward, *operands()).graph_module.graph
        times = []
        for _ in range(3):
            start = time.process_time()
            assert len(lift(graph).sites) == layers
            times.append(time.process_time() - start)
        return min(times)

    deep(2)  # classify's cache and imports
    assert deep(32) < 3 * deep(16)


# --- the rule book ---------------------------------------------------------------------------------------


def test_two_rules_for_one_operator_are_an_error() -> None:
    with pytest.raises(ValueError, match="two rules for aten::sort: sort and again"):

        @rule("aten::sort")
        def again(lifting: object, node: object) -> None:
            """Never called."""


def test_names_of_operators() -> None:
    graph = study(lambda x: x.sort()[0] + 1, torch.randn(E)).graph_module.graph
    names = [op_name(node) for node in graph.nodes]
    assert names == ["", "aten::sort", "getitem", "aten::add", ""]


def test_pointwise_operators_share_a_rule() -> None:
    graph = study(lambda x: x.exp().cumprod(0).sin(), torch.randn(E)).graph_module.graph
    rules = {op_name(node): rule_for(node) for node in graph.nodes}
    assert rules["aten::exp"] is rules["aten::sin"] is not None
    assert rules["aten::cumprod"] is None


def test_arguments_by_position_and_by_name() -> None:
    graph = study(lambda x: x.sum(0, keepdim=True), torch.randn(E)).graph_module.graph
    node = next(node for node in graph.nodes if op_name(node) == "aten::sum")
    assert argument(node, 1, "dim") == [0]
    assert argument(node, 2, "keepdim", False) is True
    assert argument(node, 9, "nothing", 5) == 5


# --- one slot per token: where such a layer ends -----------------------------------------------------------

READERS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "the layer and a copy": lambda y: (y, y.clone()),
    "two views": lambda y: (y.view(-1), y.view(2, 3, H)),
    "the layer and a cast": lambda y: (y.bfloat16(), y),
    "a sum of all, and the layer": lambda y: (y, y * 2, y.sum()),
    "a residual and a copy of a view": lambda y: (y.view(2, 3, H) + 1, y.view(2, 3, H).clone()),
}


@pytest.mark.parametrize("name", READERS)
def test_a_layer_of_one_slot_may_have_several_readers(name: str) -> None:
    """What follows could still belong to it, as a factor does; but from where several read it, it is complete."""

    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, ...]:
        own = ids[:, 0]
        h = torch.einsum("th,toh->to", x, w1[own])
        return READERS[name](torch.einsum("ti,toi->to", swiglu(h), w2[own]) * w)

    result = study(forward, *operands(torch.float32, k=1))
    assert result.site.node.name.startswith("mul"), "with its routing weight"
    assert result.site.spec.has_router_weight
    result.fused()


def test_rows_of_one_slot_that_others_read_end_the_layer_before_the_weight() -> None:
    def forward(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, ...]:
        own = ids[:, 0]
        h = torch.einsum("th,toh->to", x, w1[own])
        rows = torch.einsum("ti,toi->to", swiglu(h), w2[own])
        return rows * w, rows.norm(dim=-1)

    result = study(forward, *operands(torch.float32, k=1))
    assert not result.site.spec.has_router_weight
    result.fused()
