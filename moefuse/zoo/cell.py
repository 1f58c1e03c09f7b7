"""One cell of the zoo: one tiny model under one setting, measured.

In: a row, an implementation, a dtype, a kind of shapes, an inner compiler. Out: a `Cell` with everything that the table
shows. How many MoE layers there must be is counted while the model runs in eager: a layer that moefuse doesn't find
makes a difference here. How many were fused is counted while the compiled model runs, call by call of the kernel.

float32 is compared with eager, norm-wise over every output. In lower precisions each fused layer alone is compared
with float64, see `moefuse.zoo.rounding`; the whole model with its float32 self where a layer can't run alone or where
another compiler runs the graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

import moefuse
from moefuse import targets
from moefuse.ops import kernels
from moefuse.ops.options import Options
from moefuse.report.journal import JOURNAL
from moefuse.report.model import GraphReport, LayerReport
from moefuse.testing.compare import relative_error
from moefuse.zoo.rounding import Fused, block_errors, per_token, watch
from moefuse.zoo.rows import EAGER, GROUPED, Call, Case, Row, build

STATIC, DYNAMIC, GENERATE = "static", "dynamic", "generate"
SHAPES = (STATIC, DYNAMIC)
TOKENS = (16, 24)
GENERATED = 20

RELATIVE = 1e-5
"""float32: sums of a few hundred products in another order, through two layers."""
RATIO = 1.5
"""Lower precision: how many times eager's own error to float64 a layer may have."""
COARSE = 0.05
"""What is more than this is no rounding of any precision."""

_LONGEST = 400
"""Characters of a reason: a table's cell."""

NO_GENERATION = "the tiny model doesn't generate token by token in eager"


@dataclass
class Cell:
    """The result of one cell.

    layers: MoE layers that run in eager. found: MoE layers that moefuse saw, fused: calls of the fused node in one
    run. graphs, breaks: Dynamo's; plain_graphs: the graphs when nothing is fused, counted where there are several.
    error: largest relative error; ratio: the same as a multiple of eager's own (lower precisions).
    capture, passes: CPU seconds of moefuse's functional trace and of its passes. wrong: the result differs. refused:
    nothing was fused, as it must be. reason: "" when every layer is fused and the result is right; else the first
    thing that stands in the way.
    """

    row: str
    implementation: str
    dtype: str
    shapes: str
    inner: str
    layers: int = 0
    found: int = 0
    fused: int = 0
    graphs: int = 0
    breaks: int = 0
    plain_graphs: int | None = None
    error: float | None = None
    ratio: float | None = None
    capture: float = 0.0
    passes: float = 0.0
    seconds: float = 0.0
    wrong: bool = False
    refused: bool = False
    reason: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """What tells this cell from all others of a sweep."""
        return "|".join((self.row, self.implementation, self.dtype, self.shapes, self.inner))

    @property
    def ok(self) -> bool:
        """Every layer is fused and the result is right, or the layers were refused as they must be."""
        return not self.reason or self.refused


def measure(row: Row, cell: Cell) -> Cell:
    """Fill a cell. Whatever the model or moefuse raises becomes the cell's reason."""
    start = time.process_time()
    torch._dynamo.reset()
    try:
        case = build(row, cell.implementation, getattr(torch, cell.dtype))
        if cell.shapes == GENERATE:
            _generate(cell, case)
        else:
            _call(cell, case)
        if not row.fusable:
            _expect_refusal(cell, row)
    except Exception as error:
        cell.reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    cell.seconds = round(time.process_time() - start, 2)
    torch._dynamo.reset()
    return cell


def _expect_refusal(cell: Cell, row: Row) -> None:
    if cell.fused:
        cell.wrong, cell.reason = True, f"WRONG: {cell.fused} layers fused that must be refused"
    cell.refused = bool(cell.layers) and not cell.wrong and row.reason in cell.reason


def _call(cell: Cell, case: Case) -> None:
    lengths = TOKENS if cell.shapes == DYNAMIC else TOKENS[:1]
    calls = [case.inputs(tokens, seed) for seed, tokens in enumerate(lengths)]
    with torch.no_grad():
        with _running(case) as ran:
            want = [case.module(*args, **kwargs) for args, kwargs in calls]
        cell.layers = len(ran) if case.count is None else case.count
        compiled = _compiled(cell, case.module)
        first = JOURNAL.next_index()
        counters.clear()
        with watch() as seen, _kernel_calls() as fused:
            got = []
            for args, kwargs in calls:
                fused.clear()
                got.append(compiled(*args, **kwargs))
                cell.graphs = cell.graphs or counters["stats"]["unique_graphs"]
        cell.breaks = sum(counters["graph_break"].values())
        broken = [_first_words(str(text)) for text in counters["graph_break"]]
        _read(cell, case, [graph for graph in _graphs() if graph.index > first], len(fused))
        _judge(cell, case, calls, seen, got, want)
        if cell.graphs > 1 and cell.fused:
            cell.plain_graphs = _plain_graphs(cell, case, calls[0])
    cell.reason = _reason(cell, broken)


def _compiled(cell: Cell, module: nn.Module, mode: str = "auto") -> Callable[..., Any]:
    dynamic = True if cell.shapes == DYNAMIC else None
    options: dict[str, Any] = {"inner": cell.inner, "mode": mode}
    if cell.implementation == EAGER:
        return moefuse.compile(module, dynamic=dynamic, **options)
    return torch.compile(module, backend="moefuse", dynamic=dynamic, options=options)


@contextmanager
def _running(case: Case) -> Iterator[set[str]]:
    """The paths of the case's MoE layers whose experts are called inside."""
    ran: set[str] = set()
    handles = [m.register_forward_pre_hook(_note(ran, path)) for path, m in case.layers.items()]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


def _note(ran: set[str], path: str) -> Callable[..., None]:
    return lambda *_: ran.add(path)


@contextmanager
def _kernel_calls() -> Iterator[list[str]]:
    """One entry for each call of a fused layer's node inside, whatever its target: shared experts are nodes of one."""
    calls: list[str] = []
    table = {name: kernels.kernel(name) for name in targets.names()}

    def counted(name: str, kernel: kernels.Kernel) -> Callable[..., Any]:
        def run(context: Any, operands: Any, options: Options) -> Any:
            if options.num_experts > 1:
                calls.append(name)
            return kernel(context, operands, options)

        return run

    for name, kernel in table.items():
        kernels.register_kernel(name, counted(name, kernel))
    try:
        yield calls
    finally:
        for name, kernel in table.items():
            kernels.register_kernel(name, kernel)


def _graphs() -> list[GraphReport]:
    return [graph for report in moefuse.reports() for graph in report.graphs]


def _read(cell: Cell, case: Case, graphs: list[GraphReport], calls: int) -> None:
    """What the reports say about the row's own layers."""
    sites = [site for graph in graphs for site in graph.sites]
    foreign = [site for site in sites if any(_below(site, path) for path in case.others)]
    mine = [site for site in sites if site not in foreign]
    cell.found = len(mine)
    cell.fused = calls - sum(site.fused for site in foreign)
    cell.capture = sum(graph.seconds.get("capture", 0.0) for graph in graphs)
    cell.passes = sum(sum(graph.seconds.values()) for graph in graphs) - cell.capture
    refused = [
        f"{site.reason} ({_place(site.source)})" if site.source else site.reason
        for site in mine
        if site.reason
    ]
    failed = [graph.error.strip().splitlines()[-1] for graph in graphs if graph.error]
    noted = [graph.note for graph in graphs if graph.note.startswith("left as it is")]
    cell.notes = list(dict.fromkeys(failed + refused + noted))


def _place(source: str) -> str:
    """The file below the folder of installed packages or below the current one: the same text on every machine."""
    return source.rpartition("site-packages/")[2].removeprefix(f"{Path.cwd()}/")


def _below(site: LayerReport, path: str) -> bool:
    return site.layer == path or site.layer.startswith(f"{path}.")


def _judge(
    cell: Cell, case: Case, calls: list[Call], seen: list[Fused], got: list[Any], want: list[Any]
) -> None:
    full = cell.dtype == "float32"
    if full:
        cell.error = max(_difference(a, b) for a, b in zip(got, want, strict=True))
        cell.wrong = not cell.error <= RELATIVE
    if full and not (cell.wrong and cell.error is not None and cell.error < COARSE and _narrow(seen)):
        return
    ran = [fused for fused in seen if fused.calls and fused.inputs]
    alone = [fused for fused in ran if fused.runs_unfused]
    layers = [layer for fused in alone for layer in block_errors(fused, [fused.inputs])]
    ratios = [layer.ratio for layer in layers]
    errors = [(layer.mine / layer.size) ** 0.5 if layer.size else 0.0 for layer in layers]
    # The graphs that the passes made say nothing about what another compiler makes of them.
    if ran and not full and (len(alone) < len(ran) or cell.inner != "eager"):
        mine, eager = _whole(case, calls, got), _whole(case, calls, want)
        errors.append(mine)
        ratios.append(mine / eager)
    if ratios:
        cell.error, cell.ratio = max(errors), max(ratios)
        cell.wrong = not all(ratio <= RATIO for ratio in ratios)  # a NaN is no pass


def _whole(case: Case, calls: list[Call], results: list[Any]) -> float:
    """The whole model's error: the median over tokens, which doesn't see the few whose routing flipped."""
    exact = deepcopy(case.module).float()
    errors: list[float] = []
    for (args, kwargs), result in zip(calls, results, strict=True):
        wide = pytree.tree_map_only(torch.Tensor, _widened, (args, kwargs))
        errors += per_token(_main(result), _main(exact(*wide[0], **wide[1])))
    return median(errors)


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() else value


def _main(result: Any) -> torch.Tensor:
    """The first output with a row per token: logits, or hidden states."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return next(leaf for leaf in leaves if leaf.dim() > 1)


def _narrow(seen: list[Fused]) -> bool:
    """Whether a fused layer of a float32 model computes in a lower precision: float32's bound isn't for that."""
    operands = [node for fused in seen for call in fused.calls for node in call.all_input_nodes]
    dtypes = {node.meta["val"].dtype for node in operands if isinstance(node.meta.get("val"), torch.Tensor)}
    return bool(dtypes & {torch.bfloat16, torch.float16})


def _difference(got: Any, want: Any) -> float:
    """Largest relative error of any floating point tensor of a result."""
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)
    errors = [
        relative_error(a, b)
        for a, b in pairs
        if isinstance(b, torch.Tensor) and b.is_floating_point() and b.numel()
    ]
    return max(errors, default=float("inf"))


def _plain_graphs(cell: Cell, case: Case, call: Call) -> int:
    """The graphs of the same call when nothing is fused: those that break for reasons of the model."""
    torch._dynamo.reset()
    counters.clear()
    args, kwargs = call
    _compiled(cell, case.module, mode="off")(*args, **kwargs)
    return int(counters["stats"]["unique_graphs"])


def _reason(cell: Cell, broken: list[str]) -> str:
    if cell.wrong:
        times = "" if cell.ratio is None else f", {cell.ratio:.2f} times eager's own"
        return f"WRONG: relative error {cell.error:.2g}{times}"
    if cell.layers and cell.fused == cell.layers:
        more = cell.plain_graphs is not None and cell.graphs > cell.plain_graphs
        return f"{cell.graphs} graphs, {cell.plain_graphs} when nothing is fused" if more else ""
    if not cell.layers:
        return "no MoE layer runs in eager"
    missing = f"{cell.fused} of {cell.layers} layers fused"
    why = cell.notes or broken
    return f"{missing}: {why[0] if why else f'no MoE layer found in {_count(cell.graphs)}'}"[:_LONGEST]


def _count(graphs: int) -> str:
    return "1 graph" if graphs == 1 else f"{graphs} graphs"


def _first_words(text: str) -> str:
    """What broke and Dynamo's explanation, without its hints."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    told = [line.removeprefix("Explanation: ") for line in lines[:2]]
    return ": ".join(told)


def _generate(cell: Cell, case: Case) -> None:
    """Greedy tokens with a KV cache must be eager's."""
    if not case.generates:
        cell.reason = NO_GENERATION
        return
    model: Any = case.module
    with _running(case) as ran:
        (), kwargs = case.inputs(TOKENS[0], 0)
        options = {
            "max_new_tokens": GENERATED,
            "min_new_tokens": GENERATED,
            "do_sample": False,
            "use_cache": True,
        }
        given = {name: value for name, value in kwargs.items() if name in ("input_ids",)}
        try:
            want = _tokens(model.generate(**given, **options))
        except IndexError:  # its head has more tokens than its table of embeddings
            cell.reason = NO_GENERATION
            return
    if want.shape[-1] != given["input_ids"].shape[-1] + GENERATED:
        # It denoises blocks, of which any rounding makes others.
        cell.reason = NO_GENERATION
        return
    cell.layers = len(ran)
    first = JOURNAL.next_index()
    counters.clear()
    model.forward = torch.compile(model.forward, backend="moefuse", options={"inner": cell.inner})
    # A cache that grows by one row per step is another graph at each.
    with _kernel_calls() as fused, dynamo_config.patch(recompile_limit=2 * GENERATED):
        got = _tokens(model.generate(**given, **options))
    cell.graphs = counters["stats"]["unique_graphs"]
    cell.breaks = sum(counters["graph_break"].values())
    _read(cell, case, [graph for graph in _graphs() if graph.index > first], 0)
    same = bool(torch.equal(got, want))
    cell.wrong = not same
    cell.fused = len(fused) // GENERATED
    if not same:
        agree = (got == want).all(0).long().cumprod(0).sum() - kwargs["input_ids"].shape[-1]
        cell.reason = f"WRONG: tokens differ from eager's after {int(agree)} steps"
    elif cell.fused < cell.layers:
        why = next(iter(cell.notes), "no MoE layer found")
        cell.reason = f"{cell.fused} of {cell.layers} layers fused: {why}"[:_LONGEST]


def _tokens(generated: Any) -> torch.Tensor:
    """The ids, which some models hand out with more."""
    found: torch.Tensor = getattr(generated, "sequences", generated)
    return found


GENERATING = (GROUPED, "batched_mm")
"""Implementations for which generation is checked."""
