"""Is a rewrite of an arbitrary graph right?

In: a graph (usually a mutant), inputs, the rewrite. Out: a `Verdict`. Equal: something was fused and
every output agrees with the graph's own eager result. Refused: nothing was fused (and the outputs still
agree). Wrong: anything else, a crash of the rewrite included. Undefined: the graph itself crashes or
reads memory that nobody wrote, so that nothing can be said.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from moefuse.graph.interpret import CaptureError
from moefuse.testing.compare import compare, default_rewrite, describe
from moefuse.testing.oracle import SafeRun


@dataclass(frozen=True)
class Verdict:
    """kind: see the module text; reason: the difference for `wrong`, the refusals for `refused`.

    fused: how many sites were fused, for graphs that hold several.
    """

    kind: Literal["equal", "refused", "wrong", "undefined"]
    reason: str = ""
    fused: int = 0


def judge(
    graph_module: GraphModule,
    inputs: Sequence[Sequence[Any]],
    rewrite: Callable[[GraphModule], Any] | None = None,
    rtol: float | None = None,
) -> Verdict:
    """Rewrite the graph, compare on every set of inputs for which the graph itself is defined; rtol: see `compare`."""
    usable = [values for values in inputs if _defined(graph_module, values)]
    if not usable:
        return Verdict("undefined")
    try:
        result = (rewrite or default_rewrite)(graph_module)
    except CaptureError as error:  # an edit may make sizes that torch can't trace again: left as it is
        return Verdict("refused", str(error))
    except Exception as error:  # a crash of the rewrite is a finding, not an end of the run
        return Verdict("wrong", f"the rewrite raised {type(error).__name__}: {error}")
    for values in usable:
        try:
            outcome = compare(graph_module, result.graph_module, values, result.report, rtol=rtol)
        except Exception as error:
            return Verdict("wrong", f"the rewritten graph raised {type(error).__name__}: {error}")
        if outcome.difference:
            return Verdict("wrong", f"{outcome.difference}\n{describe(result.report)}")
    if result.report.fused:
        return Verdict("equal", fused=result.report.fused)
    return Verdict("refused", "; ".join(site.reason for site in result.report.sites))


def redraw(inputs: Sequence[Any], seed: int) -> tuple[Any, ...]:
    """Other values of the same shapes: floats of the same size, integers of the same range."""
    generator = torch.Generator().manual_seed(seed)

    def other(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.numel() == 0 or value.dtype == torch.bool:
            return value
        if value.is_floating_point():
            drawn = torch.randn(value.shape, generator=generator)
            drawn = drawn.abs() if bool((value >= 0).all()) else drawn
            return (drawn * value.float().std(correction=0)).to(value)
        low, high = int(value.min()), int(value.max())
        return torch.randint(low, high + 1, value.shape, generator=generator).to(value)

    return tuple(other(value) for value in inputs)


def _defined(graph_module: GraphModule, inputs: Sequence[Any]) -> bool:
    """True when the graph runs and no output depends on the contents of fresh memory."""
    try:
        with torch.no_grad():
            first = pytree.tree_leaves(SafeRun(graph_module, 0).run(*inputs))
            second = pytree.tree_leaves(SafeRun(graph_module, 1).run(*inputs))
    except Exception:  # an edit may well make the graph index out of bounds
        return False
    return all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True) if _tensor(a)
    )


def _tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
