"""The rewrite: all or nothing, once for each layer, everything around it left as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.testing import FileCheck

import moefuse
from moefuse.graph.dump import to_text
from moefuse.options import Options
from moefuse.passes import fuse, pipeline
from moefuse.passes.emit import Emitter
from moefuse.patterns.facts import Conflict
from moefuse.patterns.rules import op_name
from moefuse.patterns.site import Site
from moefuse.report.model import LayerReport
from tests.patterns.spelling import (
    E,
    H,
    K,
    S,
    Study,
    T,
    ffn,
    gathered,
    grouped,
    offsets,
    operands,
    slot_rows,
    sorted_rows,
    study,
)


def rewritten(result: Study, **options: Any) -> tuple[GraphModule, list[LayerReport]]:
    found = pipeline.run(result.graph_module, frozenset(), Options(**options), training=False)
    return found.graph_module, found.layers


def calls(gm: GraphModule) -> list[str]:
    return [op_name(node) for node in gm.graph.nodes if node.op == "call_function"]


def mega(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if op_name(node) == "moefuse::mega_moe"]


# --- before and after ------------------------------------------------------------------------------------


def test_a_whole_layer_becomes_one_node() -> None:
    result = study(grouped, *operands())
    before = to_text(result.graph_module)
    (
        FileCheck()
        .check("%x : bfloat16[6, 16] = placeholder")
        .check("aten.sort.default(")
        .check("aten.floor_divide.default(")
        .check("aten.index.Tensor(%x")
        .check_count("aten._grouped_mm.default(", 2, exactly=True)
        .check("aten.sum.dim_IntList(")
        .check_not("moefuse.mega_moe")
        .run(before)
    )
    gm, _ = rewritten(result)
    (
        FileCheck()
        .check("%w2 : bfloat16[4, 16, 24] = placeholder")
        .check_next("%mega_moe_default : (bfloat16[6, 16], int32[4]) = moefuse.mega_moe.default(")
        .check_same("None, %x, %ids, %weights, [%w1], [%w2], [], []")
        .check_same("num_experts=4")
        .check_same("transpose_weight1=True, transpose_weight2=True, gate_up='concat', activation='swiglu'")
        .check_same("weight_position='output'")
        .check_same("target='cpu'")
        .check_next("%getitem_6 : bfloat16[6, 16] = _operator.getitem(%mega_moe_default, 0)")
        .check_next("return [%getitem_6]")
        .run(to_text(gm))
    )


def test_what_surrounds_a_layer_stays_to_the_letter() -> None:
    def model(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        x = torch.nn.functional.layer_norm(x, (H,))
        return (grouped(x, ids, w, w1, w2).float() + x).view(2, 3, H)

    result = study(model, *operands())
    before = to_text(result.graph_module).splitlines()
    gm, _ = rewritten(result)
    after = to_text(gm)
    head = before.index(next(line for line in before if "aten.reshape" in line or "aten.view" in line))
    for line in (*before[:head], *before[-3:-1]):
        operation = line.partition(" = ")[2].partition("(")[0]
        assert operation in after
    assert calls(gm)[-3:] == ["aten::_to_copy", "aten::add", "aten::view"]


# --- all or nothing --------------------------------------------------------------------------------------

UNTOUCHED: dict[str, tuple[Callable[..., object], dict[str, Any], str]] = {
    "a lost meaning": (lambda x, ids, w, w1, w2: slot_rows(x, ids, w1, w2).mean(1), {}, "lift"),
    "an excluded layer": (grouped, {"exclude": ("*",)}, "exclude"),
    "an escaping row": (
        lambda x, ids, w, w1, w2: (rows := slot_rows(x, ids, w1, w2), (rows * w.unsqueeze(-1)).sum(1)),
        {},
        "escape",
    ),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_a_refused_layer_is_left_exactly_as_it_was(name: str) -> None:
    function, options, check = UNTOUCHED[name]
    result = study(function, *operands())
    before = to_text(result.graph_module)
    gm, (layer,) = rewritten(result, **options)
    assert to_text(gm) == before
    assert (layer.fused, layer.check) == (False, check)


def test_rows_that_the_output_is_added_to_escape() -> None:
    """The base of the sum is an expert row: it stays, and the first GEMM would run twice."""

    def layer(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        order = ids.reshape(-1).argsort()
        token = order // K
        gate, up = torch._grouped_mm(x[token], w1.transpose(1, 2), offsets(ids.reshape(-1))).chunk(2, -1)
        rows = torch._grouped_mm(
            torch.nn.functional.silu(gate) * up, w2.transpose(1, 2), offsets(ids.reshape(-1))
        )
        rows = rows * w.reshape(-1)[order].unsqueeze(-1)
        return gate[:T, :H].clone().index_add(0, token, rows)

    (report,) = study(layer, *operands()).fused(0).report.sites
    assert report.check == "escape"


def test_a_refused_policy_leaves_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse import policy

    never = policy.Check("never", (), lambda spec: "not today")
    monkeypatch.setitem(policy._CHECKS, "cpu", (never,))
    result = study(grouped, *operands())
    before = to_text(result.graph_module)
    gm, (layer,) = rewritten(result)
    assert to_text(gm) == before
    assert (layer.check, layer.reason) == ("never", "not today")
    assert layer.spec is not None


def test_mode_on_raises_with_every_reason_and_leaves_the_graph() -> None:
    def two(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return grouped(x, ids, w, w1, w2) + slot_rows(x, ids, w1, w2).mean(1)

    result = study(two, *operands())
    with pytest.raises(moefuse.RejectedError, match=r"(?s)1 MoE layer.*reduced by mean"):
        rewritten(result, mode="on")


def test_an_excluded_layer_is_no_error_in_mode_on() -> None:
    _, (layer,) = rewritten(study(grouped, *operands()), mode="on", exclude=("*",))
    assert layer.reason == "excluded by the option exclude='*'"


def test_two_layers_one_of_them_refused() -> None:
    def two(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return grouped(x, ids, w, w1, w2) + slot_rows(x, ids, w1, w2).amax(1)

    result = study(two, *operands())
    comparison = result.fused(1)
    assert len(mega(comparison.graph_module)) == 1
    assert calls(comparison.graph_module).count("aten::_grouped_mm") == 2


# --- escape ----------------------------------------------------------------------------------------------

ESCAPES: dict[str, tuple[Callable[..., Any], bool]] = {
    "rows of the second GEMM": (
        lambda x, ids, w, w1, w2: (rows := slot_rows(x, ids, w1, w2), (rows * w.unsqueeze(-1)).sum(1)),
        True,
    ),
    "a norm of the rows": (
        lambda x, ids, w, w1, w2: (
            (rows := slot_rows(x, ids, w1, w2)).norm(),
            (rows * w.unsqueeze(-1)).sum(1),
        ),
        True,
    ),
    "counts": (lambda x, ids, w, w1, w2: (grouped(x, ids, w, w1, w2), offsets(ids.view(-1))), False),
    "ids and weights": (lambda x, ids, w, w1, w2: (grouped(x, ids, w, w1, w2), ids + 1, w * 2), False),
    "the number of rows": (
        lambda x, ids, w, w1, w2: (
            grouped(x, ids, w, w1, w2),
            x.new_ones(slot_rows(x, ids, w1, w2).shape[0]),
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_what_may_leave_the_region(name: str) -> None:
    function, escapes = ESCAPES[name]
    result = study(function, *operands())
    if not escapes:
        assert result.fused().fused
        return
    report = result.fused(0).report
    (layer,) = report.sites
    assert layer.check == "escape"
    assert "are also read by" in layer.reason
    assert "outside of the layer" in layer.reason


def test_the_permutation_may_be_used_elsewhere() -> None:
    def model(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        rows, perm = sorted_rows(x, ids, w1, w2)
        y = torch.zeros_like(x).index_add(0, perm // K, rows * w.view(-1)[perm].unsqueeze(-1))
        return y, perm

    gm = study(model, *operands()).fused().graph_module
    assert "aten::sort" in calls(gm)
    assert "aten::index" not in calls(gm), "the gathered rows are gone"


def test_sizes_of_rows_are_read_off_the_operands() -> None:
    def model(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        perm = flat.argsort()
        rows = ffn(x[perm // K], offsets(flat), w1, w2)[perm.argsort()]
        rows = rows.view(rows.shape[0] // K, K, H)
        return (rows * w.unsqueeze(-1)).sum(1) + rows.shape[0]

    result = study(model, *operands(), dynamic={0: [0], 1: [0], 2: [0]})
    gm = result.fused().graph_module
    sizes = [node for node in gm.graph.nodes if op_name(node) == "aten::sym_size"]
    assert sizes, "the size is added to the output"
    assert {node.args[0].op for node in sizes} == {"placeholder"}  # type: ignore[union-attr]


# --- the new node ----------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        _, _, _, w1, w2 = operands(torch.float32)
        self.w1, self.w2 = torch.nn.Parameter(w1), torch.nn.Parameter(w2)

    def forward(self, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        return gathered(x, ids, w, self.w1, self.w2)


def test_the_new_node_takes_over_where_it_comes_from() -> None:
    from moefuse.graph.capture import capture
    from moefuse.graph.source import layer_of, source_of

    seen: list[tuple[Node, Node]] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        captured = capture(gm, example_inputs)
        (old,) = [node for node in captured.graph_module.graph.nodes if op_name(node) == "aten::sum"]
        result = pipeline.run(captured.graph_module, captured.parameters, Options(), training=False)
        seen.append((old, *result.calls))
        return gm.forward

    model = torch.nn.ModuleDict({"experts": Layer()}).requires_grad_(False)
    x, ids, w, *_ = operands(torch.float32)
    torch.compile(lambda x: model["experts"](x, ids, w), backend=backend)(x)
    ((old, new),) = seen
    assert layer_of(new).endswith("experts")
    assert source_of(new) == source_of(old) != ""
    assert new.meta["stack_trace"] == old.meta["stack_trace"]
    assert [tuple(value.shape) for value in new.meta["val"]] == [(T, H), (E,)]


def test_dead_nodes_are_gone_and_the_graph_is_sound() -> None:
    gm = study(grouped, *operands()).fused().graph_module
    gm.graph.lint()
    assert all(node.users for node in gm.graph.nodes if node.op == "call_function")
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")


def test_values_of_the_new_nodes_are_what_they_compute() -> None:
    result = study(grouped, *operands())
    gm = result.fused().graph_module
    interpreter = torch.fx.Interpreter(gm)
    interpreter.garbage_collect_values = False
    interpreter.run(*result.inputs)
    for node, value in interpreter.env.items():
        if isinstance(value, Tensor) and "val" in node.meta:
            assert (value.shape, value.dtype) == (node.meta["val"].shape, node.meta["val"].dtype)
    assert S == T * K


def test_fusing_again_finds_nothing() -> None:
    gm, _ = rewritten(study(grouped, *operands()))
    again = pipeline.run(gm, frozenset(), Options(), training=False)
    assert not again.layers
    assert len(mega(gm)) == 1


@pytest.mark.parametrize("error", [Conflict("no way"), TypeError("row_scale: got torch.int32")])
def test_a_layer_that_cannot_be_expressed_leaves_no_node_behind(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without anything else to fuse nothing removes unused nodes, and an unused mega_moe would run."""

    def fail(emitter: Emitter, site: Site, target: str) -> Node:
        emitter.call(torch.ops.aten.relu.default, site.layer.weight2[0].node)
        raise error

    monkeypatch.setattr(fuse, "_call", fail)
    result = study(grouped, *operands())
    before = calls(result.graph_module)
    gm, (layer,) = rewritten(result)
    assert calls(gm) == before
    assert (layer.fused, layer.check) == (False, "emit")
