"""The torch.compile backend.

In: a graph from Dynamo and the user's options. Out: a callable, compiled by the inner compiler, in which every
MoE layer that could be fused is one `mega_moe` node. Called in every process, also when caches are warm; so the
report is made here and nowhere else.

A graph that can't be fused for whatever reason is compiled as if moefuse weren't there, and the report says why;
only mode="on" turns a rejection into an error.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch._dynamo.callback import on_compile_start
from torch._guards import CompileContext
from torch.fx import Graph, GraphModule, Node

from moefuse.comm.presence import announce
from moefuse.frontend.lifter import hooked, refusals
from moefuse.graph.capture import CaptureError, capture, is_control_flow
from moefuse.graph.desugar import Desugared, desugared
from moefuse.graph.dump import show
from moefuse.graph.local import read_locally
from moefuse.graph.source import example_of
from moefuse.inner import choose, compile_inner
from moefuse.ops import loop_markers
from moefuse.options import OptionError, Options
from moefuse.passes import pipeline
from moefuse.passes.agree import AgreementError, demand_unpromised, expect, leave, speaking, weights_of
from moefuse.passes.lift import nothing_found
from moefuse.passes.pipeline import FuseResult, RejectedError
from moefuse.passes.plan_comm import Contact
from moefuse.passes.verify import Checker, VerifyError, tolerance
from moefuse.patterns.markers import UnprovedError
from moefuse.report.journal import JOURNAL
from moefuse.report.model import NOTHING_WANTED, GraphReport, LayerReport

log = logging.getLogger("moefuse")
on_compile_start(announce)

ROUTING = (
    "topk",
    "sort",
    "argmax",
    "nonzero",
    "grouped_mm",
    "grouped_matmul",
    "bincount",
    "scatter",
    "one_hot",
    "where",
    "select",
)
"""Part of the name of some operation in every MoE layer: without one, or an index, a graph needs no look."""


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
Watcher = Callable[[GraphModule, FuseResult], Wrap]
WATCHERS: list[Watcher] = []
"""Each gets a graph before the passes and what they made of it, and may wrap what is compiled of it then."""


def moefuse(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="moefuse", mode=..., options={...})`.

    mode: torch.compile's own mode; it is handed to Inductor ("reduce-overhead", "max-autotune", ...).
    options: see `moefuse.options.Options`. Raises OptionError for unknown names and impossible values.
    """
    parsed = Options.parse(options)
    from_mode = _mode_options(mode, choose(parsed.inner, example_inputs))
    inputs, taking_the_whole = read_locally(gm, example_inputs)
    with refusals(inputs), weights_of(example_inputs), speaking(gm, inputs):
        compiled = compile_graph(gm, inputs, parsed, from_mode, contact="ask")
    JOURNAL.record(compiled.report, CompileContext.current_compile_id())
    run = compiled.run if compiled.checker is None else _verified(compiled, gm, parsed.mode)
    return taking_the_whole(run)


@dataclass(frozen=True)
class Compiled:
    """A compiled graph, what happened to it, and with the option verify what compares its fused layers."""

    run: Callable[..., Any]
    report: GraphReport
    checker: Checker | None = None


def _mode_options(mode: str | None, inner: str) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    if inner != "inductor":
        raise OptionError(f"mode={mode!r}: only the inner compiler inductor has modes, got inner={inner!r}")
    return dict(torch._inductor.list_mode_options(mode))


def _verified(compiled: Compiled, gm: GraphModule, mode: str) -> Callable[..., Any]:
    """Compare on the first inputs that have tokens; from then on run what was compiled, or `gm` where it differs."""
    lock = threading.Lock()
    chosen: list[Callable[..., Any]] = []

    def run(*args: Any) -> Any:
        with lock:
            if not chosen and (report := verify(compiled, args)) is not None:
                JOURNAL.amend(report)
                if not report.fused and mode == "on":
                    raise VerifyError(
                        "\n".join(site.reason for site in report.sites if site.check == "verify")
                    )
                chosen.append(compiled.run if report.fused else gm.forward)
        return (chosen[0] if chosen else compiled.run)(*args)

    return run


def verify(compiled: Compiled, args: Sequence[Any]) -> GraphReport | None:
    """The graph's report after its fused layers ran beside their regions; None where nothing could be compared.

    A graph in which one layer differs too much has no fused layer: it runs as it came.
    """
    differences = compiled.checker.differences(args) if compiled.checker else None
    if differences is None:
        return None
    rest = iter(differences)
    sites = [replace(site, verified=next(rest)) if site.fused else site for site in compiled.report.sites]
    wrong = [site.layer or "(root)" for site in sites if not _within(site)]
    if not wrong:
        return replace(compiled.report, sites=tuple(sites))
    return replace(
        compiled.report, sites=tuple(_unfused(site, wrong) if site.fused else site for site in sites)
    )


def _within(site: LayerReport) -> bool:
    return site.verified is None or site.spec is None or site.verified <= tolerance(site.spec)


def _unfused(site: LayerReport, wrong: Sequence[str]) -> LayerReport:
    if _within(site) or site.spec is None:
        reason = f"the graph runs as it came: verify=True found a difference in {', '.join(wrong)}"
    else:
        reason = (
            f"{site.layer or '(root)'}: the node differs from its region by {site.verified:.2g} of a token's size on "
            f"the first inputs, where rounding explains {tolerance(site.spec):.2g}"
        )
    return replace(site, fused=False, check="verify", reason=reason)


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    inner_options: Mapping[str, Any],
    *,
    record: bool = False,
    contact: Contact = "draw",
) -> Compiled:
    """The compiled callable, and what happened. See the module text. record, contact: as for `pipeline.run`.

    inner_options: for the inner compiler, beside those of the user's options, over which they win.

    Raises UnprovedError where the graph holds a loop that the front end has rewritten, and that isn't proved or isn't
    fused: such a graph must not run. From a graph that may run, the front end's markers are removed.
    """
    index, nodes = JOURNAL.next_index(), len(gm.graph.nodes)
    inner_options = {**options.inner_options, **inner_options}
    loops = [number for graph in _graphs(gm) for number in loop_markers.marked(graph)]
    if stale := {number: reason for number in loops if (reason := hooked(number))}:
        raise UnprovedError(stale)

    def plain(report: GraphReport) -> Compiled:
        leave(_why_plain(report))
        inner = choose(options.inner, example_inputs)
        return Compiled(compile_inner(gm, example_inputs, inner, inner_options=inner_options), report)

    looked = _look(gm, example_inputs, options, index, record or bool(options.dump), contact)
    if isinstance(looked, GraphReport):
        if loops:
            raise UnprovedError(dict.fromkeys(loops, _why_plain(looked)))
        return plain(looked)
    for graph in _graphs(gm):
        loop_markers.strip(graph)
    gm.recompile()
    if not looked.result.calls:
        return plain(looked.report)
    try:
        return Compiled(_compile_fused(looked, options, inner_options), looked.report, looked.result.checker)
    except Exception as error:
        # where there are contexts, the other ranks count on this one
        if is_control_flow(error) or options.mode == "on" or looked.report.contexts:
            raise
        log.warning("the inner compiler failed on the fused graph; compiling it unfused", exc_info=True)
        return plain(_failed(index, nodes, error))


def _why_plain(report: GraphReport) -> str:
    """Why nothing of a graph is fused, in a line."""
    return report.note or (report.error.splitlines() or ["nothing is fused"])[-1]


@dataclass(frozen=True)
class _Looked:
    """What the passes made of a graph. local: what they took for it. watched: wrappers for what is compiled of it."""

    local: Desugared
    result: FuseResult
    report: GraphReport
    watched: list[Wrap]


def _look(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    index: int,
    record: bool,
    contact: Contact,
) -> _Looked | GraphReport:
    """Run the passes; just a report where they have nothing to do, can't have the graph, or failed."""
    nodes = len(gm.graph.nodes)
    if options.mode == "off":
        _expect_local(gm, example_inputs)
        return GraphReport(index, (), nodes, nodes, note=NOTHING_WANTED)
    if not worth_a_look(gm):
        return GraphReport(index, (), nodes, nodes, note="no routing operation in this graph")
    try:
        local = _local_form(gm, example_inputs, options)
        result, watched = _fuse(local.gm, local.inputs, options, index, record, contact)
    except Exception as error:
        final = isinstance(error, RejectedError | UnprovedError | AgreementError)
        if final or is_control_flow(error) or options.mode == "on":
            raise
        demand_unpromised(str(error))
        return _failed(index, nodes, error)
    return _Looked(local, result, result.report(index, note=_note(options, result)), watched)


def _expect_local(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Of a graph that isn't looked at: other ranks may look, and wait for a word about what becomes of its DTensors."""
    if worth_a_look(gm):
        with suppress(CaptureError):
            expect(desugared(gm, example_inputs).gm)


def _local_form(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Desugared:
    local = desugared(gm, example_inputs)
    if local.gm is not gm:
        expect(local.gm)
    if local.wrap is not None and options.verify:
        raise CaptureError("verify=True compares graphs of plain tensors, this one has DTensors")
    return local


def _compile_fused(looked: _Looked, options: Options, inner_options: Mapping[str, Any]) -> Callable[..., Any]:
    local = looked.local
    inner = choose(options.inner, local.inputs)
    rounding = {"emulate_precision_casts": True} if options.round_as_eager and inner == "inductor" else {}
    run = compile_inner(
        looked.result.graph_module,
        local.inputs,
        inner,
        inner_options={**rounding, **inner_options},
        original=local.gm,
    )
    return local.taking_the_whole(reduce(lambda run, wrap: wrap(run), looked.watched, run))


def _graphs(gm: GraphModule) -> list[Graph]:
    return [module.graph for module in gm.modules() if isinstance(module, GraphModule)]


def worth_a_look(gm: GraphModule) -> bool:
    """False for a graph in which nothing routes: the functional trace is saved."""
    return any(_routes(node) for graph in _graphs(gm) for node in graph.nodes)


def _routes(node: Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if name in ("getitem", "index", "gather", "index_select", "embedding"):
        return any(_is_index(arg) for arg in node.all_input_nodes[1:])
    if name == "eq":
        return any(_is_index(arg) for arg in node.all_input_nodes)
    if name in ("bmm", "matmul", "einsum") and any(_is_stack(arg) for arg in node.all_input_nodes[1:]):
        return True  # whatever chooses them, if anything does: a product with stacked weights is reported
    return any(word in name for word in ROUTING)


def _is_stack(node: Node) -> bool:
    val = example_of(node)
    return node.op == "placeholder" and isinstance(val, torch.nn.Parameter) and val.dim() == 3


def _is_index(node: Node) -> bool:
    val = example_of(node)
    return isinstance(val, torch.Tensor) and not val.is_floating_point()


def _fuse(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    index: int,
    record: bool,
    contact: Contact,
) -> tuple[FuseResult, list[Wrap]]:
    start = time.process_time()
    captured = capture(gm, example_inputs)
    seconds = {"capture": time.process_time() - start}
    show(captured.graph_module, index, "before", options.dump)
    before = deepcopy(captured.graph_module) if WATCHERS else captured.graph_module
    result = pipeline.run(
        captured.graph_module,
        captured.parameters,
        options,
        training=captured.training,
        record=record,
        contact=contact,
    )
    show(captured.graph_module, index, "after", options.dump)
    result.seconds = seconds | result.seconds
    return result, [watcher(before, result) for watcher in WATCHERS]


def _failed(index: int, nodes: int, error: Exception) -> GraphReport:
    if isinstance(error, CaptureError):
        return GraphReport(index, (), nodes, nodes, note=f"left as it is: {error}")
    log.warning("an internal error; the graph is compiled unfused", exc_info=True)
    return GraphReport(index, (), nodes, nodes, error="".join(traceback.format_exception(error)))


def _note(options: Options, result: FuseResult) -> str:
    found = "" if result.layers else nothing_found(result.graph_module.graph)
    return "; ".join(filter(None, (_unused_excludes(options, result), found)))


def _unused_excludes(options: Options, result: FuseResult) -> str:
    paths = [path for one in result.layers for path in (one.layer, *(expert.layer for expert in one.shared))]
    unused = [p for p in options.exclude if not any(Options(exclude=(p,)).excluded(path) for path in paths)]
    if not unused:
        return ""
    known = ", ".join(path or "(root)" for path in paths) or "none"
    note = f"exclude patterns that match no MoE layer of this graph: {', '.join(unused)} (layers: {known})"
    log.warning(note)
    return note
