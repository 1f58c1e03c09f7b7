"""What users call besides torch.compile: `explain` and `fuse`.

In: a model and its inputs, or a graph. Out: a `Report`, or a rewritten graph with its report.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from moefuse.frontend.breaks import SWITCHED, breaks_noted, condition_of
from moefuse.frontend.lifter import refusals
from moefuse.graph.capture import capture
from moefuse.graph.local import read_locally
from moefuse.graph.source import example_of
from moefuse.onegraph import FrontEnd, uncompiled
from moefuse.options import Options
from moefuse.passes import pipeline
from moefuse.passes.lift import nothing_found
from moefuse.report.journal import JOURNAL
from moefuse.report.model import NO_GRAPH, NOTHING_WANTED, GraphReport, LayerReport, Report


@dataclass(frozen=True)
class Fused:
    """What `fuse` returns: the rewritten graph, with a tuple as output, and a report with a verdict per layer."""

    graph_module: GraphModule
    report: Report


def explain(
    model: Callable[..., Any] | torch.export.ExportedProgram,
    *args: Any,
    moefuse_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Report:
    """Tell what `moefuse.compile` would do to a model, layer by layer, with reasons.

    A graph whose layers torch.compile alone can't get at has a note that says so, and each place at which the graph
    breaks has one.

    model is run once on the given inputs (also on the meta device), captured graph by captured graph, in eager
    mode: nothing is compiled, the model isn't changed beyond what one run of it does. An ExportedProgram takes no
    inputs and isn't run. moefuse_options: the options of the backend; keyword arguments are the model's. Raises
    OptionError for unknown options, TypeError for what can't be called and for an ExportedProgram with inputs.
    """
    from moefuse.backend import compile_graph, verify

    options = replace(Options.parse(moefuse_options), inner="eager", inner_options={})
    if isinstance(model, torch.export.ExportedProgram):
        if args or kwargs:
            raise TypeError("inputs: an ExportedProgram has its own, expected none")
        gm = model.module()
        assert isinstance(gm, GraphModule)
        return _written(
            Report((compile_graph(gm, _recorded_inputs(gm), options, {}, record=True).report,)), options
        )
    if not callable(model):
        raise TypeError(
            f"model: expected a module, a function or an ExportedProgram, got {type(model).__name__} {model!r:.60}"
        )
    graphs: list[GraphReport] = []

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        condition = condition_of(gm.graph) or (SWITCHED if front_end.switched else "")
        local_inputs, taking_the_whole = read_locally(gm, example_inputs)
        with refusals(local_inputs):
            compiled = compile_graph(gm, local_inputs, options, {}, record=True)
        if condition and compiled.report.fused and not compiled.report.note:
            compiled = replace(compiled, report=replace(compiled.report, note=condition))
        position = len(graphs)
        graphs.append(compiled.report)

        def run(*inputs: Any) -> Any:
            if compiled.checker is not None and graphs[position] is compiled.report:
                graphs[position] = verify(compiled, inputs) or compiled.report
            return gm.forward(*inputs)  # what was captured, not what was rewritten: numbers mustn't change

        return taking_the_whole(run)

    def tell(refused: tuple[LayerReport, ...]) -> None:
        graphs.append(GraphReport(JOURNAL.next_index(), refused, note=NO_GRAPH))

    front_end = FrontEnd(
        uncompiled(model), lambda frame: torch.compile(frame, backend=backend), options, tell
    )
    with breaks_noted() as breaks:
        front_end(*args, **kwargs)
    return _written(Report(tuple(graphs), tuple(breaks)), options)


def _written(report: Report, options: Options) -> Report:
    """The report, which the option dump also wants as files."""
    if options.dump:
        from moefuse.report.files import write_report

        write_report(options.dump, report)
    return report


def fuse(
    graph: GraphModule | torch.export.ExportedProgram,
    example_inputs: Sequence[Any] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
) -> Fused:
    """The passes alone, on a graph of your own; the graph that is given isn't changed.

    graph: an ExportedProgram, or any fx GraphModule. A GraphModule whose placeholders have no
        `meta["val"]` (or `meta["example_value"]`) needs example_inputs, one per placeholder.
    options: as for the backend, but those that say how a graph is compiled and run: inner, inner_options,
        round_as_eager and verify are an OptionError here.
    Raises TypeError for anything else than a graph, ValueError where inputs are missing, CaptureError where the graph
    can't be made functional, RejectedError in mode "on".
    """
    parsed = Options.parse_for_pass(options, "the caller of moefuse.fuse")
    gm = graph.module() if isinstance(graph, torch.export.ExportedProgram) else graph
    if not isinstance(gm, GraphModule):
        raise TypeError(f"graph: expected an ExportedProgram or a GraphModule, got {type(gm).__name__}")
    captured = capture(gm, example_inputs if example_inputs is not None else _recorded_inputs(gm))
    _dumped(captured.graph_module, "before", parsed)
    result = pipeline.run(
        captured.graph_module,
        captured.parameters,
        parsed,
        training=captured.training,
        record=bool(parsed.dump),
    )
    _dumped(captured.graph_module, "after", parsed)
    note = "" if result.layers else nothing_found(result.graph_module.graph)
    if parsed.mode == "off":
        note = NOTHING_WANTED
    return Fused(result.graph_module, _written(Report((result.report(0, note=note),)), parsed))


def _dumped(gm: GraphModule, stage: str, options: Options) -> None:
    if options.dump:
        from moefuse.graph.dump import write_dump

        write_dump(options.dump, 0, stage, gm)


def _recorded_inputs(gm: GraphModule) -> list[Any]:
    inputs = []
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.meta.keys().isdisjoint(("val", "example_value")):
            raise ValueError(
                f"example_inputs: placeholder {node.name!r} has no recorded value; give one per placeholder"
            )
        inputs.append(example_of(node))
    return inputs
