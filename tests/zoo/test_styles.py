"""Every plain style: one graph with one node, equal to eager; or the reason why it isn't one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import moefuse
from moefuse.report.model import Report
from moefuse.testing.compare import relative_error
from tests.zoo.styles import STYLES
from tests.zoo.styles_common import BATCH, HIDDEN, Style

F32, BF16 = torch.float32, torch.bfloat16

BOUNDS = {F32: 1e-5, BF16: 2e-2}
"""Norm-wise: sums of some 50 products in another order; a few roundings to bfloat16, whose unit is 2^-8."""

INNER_BFLOAT16 = ("torchtitan_grouped_before", "torchtune_grouped")
"""Also the float32 model multiplies in bfloat16, behind a weighting of the rows that the node rounds elsewhere."""

FUSED = [name for name, style in STYLES.items() if style.fusable]
REFUSED = [name for name, style in STYLES.items() if not style.fusable]


def run(
    style: Style, dtype: torch.dtype, lengths: tuple[int, ...], compile_: Callable[..., Any], **options: Any
) -> tuple[float, list[Report]]:
    """(the largest difference from eager, the reports of all graphs)."""
    module, _ = style.build()
    module = module.to(dtype)
    torch._dynamo.reset()
    before = len(moefuse.reports())
    compiled = compile_(module, **options)
    worst = 0.0
    with torch.no_grad():
        for length in lengths:
            generator = torch.Generator().manual_seed(length)
            x = torch.randn(BATCH, length, HIDDEN, generator=generator).to(dtype)
            worst = max(worst, relative_error(compiled(x), module(x)))
    return worst, moefuse.reports()[before:]


def one_line(module: torch.nn.Module) -> Callable[..., Any]:
    """The line of a user who has no loop over experts."""
    return torch.compile(module, backend="moefuse", fullgraph=True, options={"inner": "eager", "mode": "on"})


@pytest.mark.parametrize("name", FUSED)
def test_a_style_is_one_node(name: str) -> None:
    style = STYLES[name]
    if style.captured_by == "torch.compile":
        error, reports = run(style, F32, (9,), one_line)
    else:
        error, reports = run(style, F32, (9,), moefuse.compile, inner="eager", mode="on")
    assert [len(report.graphs) for report in reports] == [1]
    assert [site.fused for site in reports[0].sites] == [True]
    assert error <= BOUNDS[BF16 if name in INNER_BFLOAT16 else F32]


@pytest.mark.parametrize("name", FUSED)
def test_a_style_in_bfloat16_is_one_node_for_all_lengths(name: str) -> None:
    error, reports = run(STYLES[name], BF16, (9, 12), moefuse.compile, dynamic=True, inner="eager")
    assert [(len(report.graphs), report.fused) for report in reports] == [(1, 1)]
    assert error <= BOUNDS[BF16]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_such_layer_is_refused_with_the_reason(name: str) -> None:
    style = STYLES[name]
    error, reports = run(style, F32, (9,), moefuse.compile, inner="eager")
    sites = [site for report in reports for site in report.sites]
    assert not [site for site in sites if site.fused]
    assert any(style.reason in site.reason for site in sites), [site.reason for site in sites]
    assert error == 0


def test_counts_on_the_host_are_not_waited_for() -> None:
    """What a fused loop needed the counts for is gone, and so are the assertions about them."""
    graphs = []
    module, args = STYLES["torchtune_loop"].build()

    def backend(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(moefuse.fuse(graph_module, inputs).graph_module.graph)
        return graph_module

    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True)(*args)
    (graph,) = graphs
    aten = torch.ops.aten
    left = {node.target for node in graph.nodes}
    assert torch.ops.moefuse.mega_moe.default in left
    assert not left & {aten._local_scalar_dense.default, aten._assert_scalar.default, aten.sort.stable}
