"""Does the rewritten graph compute what the graph computes?

In: a functional ATen graph with inputs, or a model with arguments. Out: `Comparison`, or an
AssertionError that prints the report. These are the helpers for authors of rules; `rewrite` can be any
pass, default `moefuse.fuse`.

Rounding. A fused layer may round elsewhere than its graph does, so it is never compared bit by bit. fp32
outputs must agree norm-wise within 1e-5. Lower precisions are compared with a float64 run of the same
routing: the fused error may be at most 1.5 times the graph's own error, plus a sliver for graphs that
happen to be exact. Of few elements the graph's own error is one lucky or unlucky draw, so the sliver grows by
a unit in the last place over the root of their number.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from moefuse.report.model import Report
from moefuse.testing.capture import Captured, capture_model
from moefuse.testing.oracle import Float64Run, SafeRun

RELATIVE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Norm-wise difference that reordering the sums of a few hundred products can explain."""

SLIVER = {torch.bfloat16: 2e-3, torch.float16: 3e-4}
"""Half a unit in the last place, norm-wise: the error that a graph has with exact sums."""


@dataclass(frozen=True)
class Comparison:
    """Outcome of one rewrite: the report, the new graph and the worst norm-wise difference of its outputs.

    difference: "" when the outputs agree, otherwise what differs, in words.
    """

    report: Report
    graph_module: GraphModule
    error: float
    difference: str = ""

    @property
    def fused(self) -> int:
        """How many sites were fused."""
        return self.report.fused


def rewrite_and_compare(
    graph_module: GraphModule,
    inputs: Sequence[Any],
    *,
    expect_fused: int | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    rewrite: Callable[[GraphModule], Any] | None = None,
) -> Comparison:
    """Fuse `graph_module`, run both graphs on `inputs` and assert that they agree.

    Args:
        inputs: one value for each placeholder.
        expect_fused: how many sites must be fused; None takes any number.
        rtol: norm-wise tolerance that replaces the one of the module text.
        atol: its absolute part.
        rewrite: the pass; its result has `graph_module` and `report`.

    Raises:
        AssertionError: another number of fused sites, or outputs that differ. The text holds the report.
        ValueError: `inputs` doesn't fit the placeholders.
    """
    placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    if len(placeholders) != len(inputs):
        raise ValueError(
            f"inputs: expected {len(placeholders)} values, one for each placeholder, got {len(inputs)}"
        )
    result = (rewrite or default_rewrite)(graph_module)
    outcome = compare(graph_module, result.graph_module, inputs, result.report, rtol=rtol, atol=atol)
    if outcome.difference:
        raise AssertionError(f"the rewritten graph differs: {outcome.difference}\n{describe(outcome.report)}")
    if expect_fused is not None and outcome.fused != expect_fused:
        raise AssertionError(
            f"expected {expect_fused} fused, got {outcome.fused}\n{describe(outcome.report)}"
        )
    return outcome


def compare(
    before: GraphModule,
    after: GraphModule,
    inputs: Sequence[Any],
    report: Report,
    *,
    rtol: float | None = None,
    atol: float = 0.0,
) -> Comparison:
    """Run both graphs on `inputs`; differences are told, not raised."""
    with torch.no_grad():
        run = SafeRun(before)
        expected = pytree.tree_leaves(run.run(*inputs))
        actual = pytree.tree_leaves(SafeRun(after).run(*inputs))
        if len(expected) != len(actual):
            return Comparison(report, after, float("inf"), f"{len(expected)} outputs became {len(actual)}")
        exact: list[Any] | None = None
        worst = 0.0
        for position, (want, got) in enumerate(zip(expected, actual, strict=True)):
            told = _same_kind(want, got)
            if told:
                return Comparison(report, after, float("inf"), f"output {position}: {told}")
            if not isinstance(want, torch.Tensor) or not want.is_floating_point() or want.numel() == 0:
                continue
            error = relative_error(got, want)
            worst = max(worst, error)
            bound = RELATIVE.get(want.dtype, 0.0) if rtol is None else rtol
            if error <= bound or (atol and float((got - want).abs().max()) <= atol):
                continue
            if exact is None:
                exact = pytree.tree_leaves(Float64Run(before, run.env).run(*inputs))
            mine, theirs = relative_error(got, exact[position]), relative_error(want, exact[position])
            allowed = 1.5 * theirs + _sliver(want)
            if rtol is not None or not mine <= allowed:
                told = f"norm-wise {error:.3g}; to float64 {mine:.3g}, the graph's own {theirs:.3g}"
                return Comparison(report, after, error, f"output {position}: {told}")
    return Comparison(report, after, worst)


def _sliver(want: torch.Tensor) -> float:
    if want.dtype not in SLIVER:
        return RELATIVE.get(want.dtype, 0.0)
    return SLIVER[want.dtype] + torch.finfo(want.dtype).eps / math.sqrt(want.numel())


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| over the finite values; infinite where only one has a NaN or an infinity."""
    a, b = got.double(), want.double()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        return float("inf")
    a, b = a[finite], b[finite]
    size = float(b.norm())
    difference = float((a - b).norm())
    return difference / size if size else (0.0 if difference == 0 else float("inf"))


def assert_fuses(model: Callable[..., Any], *args: Any, layers: int | None = None, **kwargs: Any) -> Report:
    """Assert that every MoE layer of `model(*args, **kwargs)` fuses and its graphs keep their results.

    `layers`: the exact number of fused layers; default: at least one, and none refused.
    """
    outcomes = [_checked(captured) for captured in capture_model(model, *args, **kwargs)]
    report = Report(tuple(graph for outcome in outcomes for graph in outcome.report.graphs))
    refused = [site for site in report.sites if not site.fused]
    if layers is None and (refused or not report.fused):
        raise AssertionError(
            f"expected every layer fused: {report.fused} were, {len(refused)} not\n{describe(report)}"
        )
    if layers is not None and report.fused != layers:
        raise AssertionError(f"expected {layers} fused layers, got {report.fused}\n{describe(report)}")
    return report


def assert_not_fused(
    model: Callable[..., Any], *args: Any, reason: str | None = None, **kwargs: Any
) -> Report:
    """Assert that nothing in `model(*args, **kwargs)` fuses, and that some refusal says `reason`."""
    outcomes = [_checked(captured) for captured in capture_model(model, *args, **kwargs)]
    report = Report(tuple(graph for outcome in outcomes for graph in outcome.report.graphs))
    if report.fused:
        raise AssertionError(f"expected nothing fused, got {report.fused}\n{describe(report)}")
    if reason is not None and not any(reason in site.reason for site in report.sites):
        raise AssertionError(f"expected a refusal that says {reason!r}\n{describe(report)}")
    return report


def default_rewrite(graph_module: GraphModule) -> Any:
    """`moefuse.fuse`, imported late: this package is below it."""
    import moefuse

    return moefuse.fuse(graph_module)


def describe(report: Report) -> str:
    """The report in a few lines of plain text, for assertion messages."""
    lines = [f"  {len(report.sites)} site(s), {report.fused} fused"]
    for site in report.sites:
        verdict = "fused" if site.fused else f"not fused: {site.reason}"
        what = f" [{site.spec.describe()}]" if site.spec is not None else ""
        lines.append(f"  {site.layer or '-'} at {site.node} {site.source}: {verdict}{what}")
    lines += [f"  error: {graph.error}" for graph in report.graphs if graph.error]
    return "\n".join(lines)


def _checked(captured: Captured) -> Comparison:
    return rewrite_and_compare(captured.graph_module, captured.inputs)


def _same_kind(want: Any, got: Any) -> str:
    """What differs apart from floating point values, "" for nothing."""
    if not isinstance(want, torch.Tensor) or not isinstance(got, torch.Tensor):
        return "" if want == got else f"{want!r} became {got!r}"
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"{want.dtype} {tuple(want.shape)} became {got.dtype} {tuple(got.shape)}"
    if not want.is_floating_point() and not torch.equal(want, got):
        return f"{int((want != got).sum())} of {want.numel()} integers differ"
    return ""
