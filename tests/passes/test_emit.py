"""Operands of the new node: tensors as they lie; views, permutes and products only where the layout differs."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefuse.passes.emit import Emitter
from moefuse.patterns.axes import Axis
from moefuse.patterns.facts import Conflict, Const, Count, Leaf
from moefuse.patterns.rules import op_name
from moefuse.testing.capture import capture_graph
from tests.patterns.spelling import E, H, I, K, T, ffn, gathered, grouped, offsets, operands, study, swiglu


def call_of(gm: GraphModule) -> Node:
    (node,) = [node for node in gm.graph.nodes if op_name(node) == "moefuse::mega_moe"]
    return node


def fused(function: Any, *inputs: Tensor, **options: Any) -> tuple[GraphModule, dict[str, Any]]:
    """The rewritten graph (checked) and the call's operands by name."""
    gm = study(function, *inputs, **options).fused().graph_module
    names = [argument.name for argument in torch.ops.moefuse.mega_moe.default._schema.arguments]
    return gm, dict(zip(names, call_of(gm).args, strict=False))


def helpers(gm: GraphModule) -> list[str]:
    """The operators besides the node itself."""
    every = [op_name(node) for node in gm.graph.nodes if node.op == "call_function"]
    return [name for name in every if name not in ("moefuse::mega_moe", "getitem")]


# --- whole layers ----------------------------------------------------------------------------------------


def test_what_fits_is_used_as_it_is() -> None:
    gm, found = fused(grouped, *operands())
    assert [found[name].name for name in ("x", "topk_ids", "topk_weights")] == ["x", "ids", "weights"]
    assert [node.name for node in (*found["weight1"], *found["weight2"])] == ["w1", "w2"]
    assert helpers(gm) == []


def test_weights_are_never_copied() -> None:
    """Whatever the layout of the stored weight, the operand is it or a view of it."""

    def odd(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return gathered(x, ids, w, w1.permute(1, 0, 2), w2.view(E, H, I))

    x, ids, w, w1, w2 = operands(torch.float32)
    gm, found = fused(odd, x, ids, w, w1.transpose(0, 1).contiguous(), w2.reshape(E * H, I))
    sources = [*found["weight1"], *found["weight2"]]
    while views := [node for node in sources if node.op == "call_function"]:
        assert {op_name(node) for node in views} <= {"aten::view", "aten::permute", "aten::transpose"}
        sources = [source for node in views for source in node.all_input_nodes]
        assert {node.op for node in sources} <= {"placeholder", "call_function"}
    assert "aten::clone" not in helpers(gm)


def test_flat_ids_and_weights_are_viewed() -> None:
    def flat(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        perm = ids.argsort()
        rows = ffn(x[perm // K], offsets(ids), w1, w2) * w[perm].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, perm // K, rows)

    x, ids, w, w1, w2 = operands()
    gm, found = fused(flat, x, ids.view(-1), w.view(-1), w1, w2)
    assert tuple(found["topk_ids"].meta["val"].shape) == (T, K)
    assert tuple(found["topk_weights"].meta["val"].shape) == (T, K)
    assert set(helpers(gm)) == {"aten::reshape"} or set(helpers(gm)) == {"aten::view"}


def test_slot_major_ids_are_turned() -> None:
    """[K, T] ids: the node wants [T, K]."""

    def turned(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h1 = torch.einsum("th,ktoh->kto", x, w1[ids])
        return (torch.einsum("kti,ktoi->kto", swiglu(h1), w2[ids]) * w.unsqueeze(-1)).sum(0)

    x, ids, w, w1, w2 = operands(torch.float32)
    gm, found = fused(turned, x, ids.t().contiguous(), w.t().contiguous(), w1, w2)
    assert tuple(found["topk_ids"].meta["val"].shape) == (T, K)
    assert "aten::permute" in helpers(gm)


def test_no_weights_are_ones() -> None:
    def bare(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h1 = torch.einsum("th,tkoh->tko", x, w1[ids])
        return torch.einsum("tki,tkoi->tko", swiglu(h1), w2[ids]).sum(1) * 1.0

    _, found = fused(bare, *operands(torch.float32))
    assert op_name(found["topk_weights"]) == "aten::full_like"
    assert found["topk_weights"].args[1] == 1.0


def test_negative_ids_of_a_plain_index_wrap_around() -> None:
    """weight[-1] is the last expert; the node skips ids out of range, so they are mapped first."""
    x, ids, w, w1, w2 = operands(torch.float32)
    result = study(gathered, x, ids - E, w, w1, w2)
    gm = result.fused().graph_module
    assert "aten::where" in helpers(gm)


def test_ids_of_a_top_k_are_not_mapped() -> None:
    def routed(x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        w, ids = logits.topk(K)
        return gathered(x, ids, w, w1, w2)

    x, _, _, w1, w2 = operands(torch.float32)
    gm, _ = fused(routed, x, torch.randn(T, E), w1, w2)
    assert helpers(gm) == ["aten::topk"]


def test_output_in_another_shape() -> None:
    """Tokens as [B, T], and the features in front."""

    def turned(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h1 = torch.einsum("bth,btkoh->btko", x, w1[ids])
        rows = torch.einsum("btki,btkoi->btko", swiglu(h1), w2[ids]) * w.unsqueeze(-1)
        return rows.permute(3, 0, 1, 2).sum(-1)

    x, ids, w, w1, w2 = operands(torch.float32)
    fused(turned, x.view(2, 3, H), ids.view(2, 3, K), w.view(2, 3, K), w1, w2)


# --- the emitter itself ----------------------------------------------------------------------------------


@pytest.fixture
def emitter() -> Emitter:
    captured = capture_graph(lambda x, ids, w: (x + 1, ids + 1, w + 1), operands()[:3])
    graph = captured.graph_module.graph
    return Emitter(graph, graph.output_node(), graph.find_nodes(op="placeholder"))


def test_a_node_in_the_wanted_form_is_returned_itself(emitter: Emitter) -> None:
    (x, *_) = emitter.size_sources
    before = len(emitter.graph.nodes)
    assert emitter.reshape(x, [T, H]) is x
    assert emitter.permute(x, [0, 1]) is x
    assert len(emitter.graph.nodes) == before


def test_new_nodes_carry_values(emitter: Emitter) -> None:
    (x, *_) = emitter.size_sources
    assert emitter.reshape(x, [2, 3, H]).meta["val"].shape == (2, 3, H)
    assert emitter.permute(x, [1, 0]).meta["val"].shape == (H, T)


def test_numbers_stay_numbers(emitter: Emitter) -> None:
    assert emitter.tensor(Const(2.5), ()) == 2.5


def test_what_has_no_place_in_the_layout_is_a_conflict(emitter: Emitter) -> None:
    x, ids, *_ = emitter.size_sources
    t, h, k = Axis(T), Axis(H), Axis(K)
    with pytest.raises(Conflict, match="runs over indices that the operand doesn't have"):
        emitter.tensor(Leaf(x, ((t,), (h,))), ((t,), (k,)))
    with pytest.raises(Conflict, match="a count can't be computed outside of the layer"):
        emitter.tensor(Count(Leaf(ids, ((t,), (k,))), (Axis(E),)), ((t,),))
    with pytest.raises(Conflict, match="a part of the token or slot index"):
        emitter.tensor(Leaf(x, ((t,), (h,))), ((t, k), (h,)))


def test_symbolic_sizes_are_read_off_an_operand() -> None:
    captured = capture_graph(lambda x: x + 1, (torch.randn(T, H),), dynamic={0: [0]})
    graph = captured.graph_module.graph
    (x,) = graph.find_nodes(op="placeholder")
    emitter = Emitter(graph, graph.output_node(), [x])
    tokens = x.meta["val"].shape[0]
    assert emitter.shape([tokens, 4, 4]) == [-1, 4, 4]
    size = emitter.size_node(tokens)
    assert (op_name(size), size.args) == ("aten::sym_size", (x, 0))
    with pytest.raises(Conflict, match="no operand of the layer has a dimension of"):
        emitter.size_node(tokens * 2)
