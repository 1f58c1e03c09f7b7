"""The passes in order: canonicalize, lift, decide, fuse. One verdict per layer.

In: a functional ATen graph with fake values (`graph.capture`). Out: the graph, rewritten where layers were
accepted, and a `LayerReport` for every MoE layer and everything that looks like one.
"""

import gc
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch.fx import Graph, GraphModule, Node

from moefuse import policy, targets
from moefuse.graph.source import source_of
from moefuse.options import Options
from moefuse.passes import plan_comm
from moefuse.passes.agree import AgreementError
from moefuse.passes.canonicalize import canonicalize
from moefuse.passes.fuse import fuse_site
from moefuse.passes.halves import join, split
from moefuse.passes.lift import Candidate, find
from moefuse.passes.plan_comm import Agreed, Contact
from moefuse.passes.record import Recorder, Recording
from moefuse.passes.region import obstacle, travels
from moefuse.passes.shared import absorb
from moefuse.passes.unmark import clear, demand_fused, prove
from moefuse.passes.verify import Checker, Pair, checker
from moefuse.patterns.engine import lift
from moefuse.patterns.facts import Conflict
from moefuse.patterns.loop_regions import collect
from moefuse.patterns.markers import UnprovedError
from moefuse.patterns.rules import op_name
from moefuse.patterns.site import Site
from moefuse.report.model import ContextReport, GraphReport, LayerReport


class RejectedError(RuntimeError):
    """mode="on": a MoE layer can't be fused. The message names the layers and their reasons."""


@dataclass
class FuseResult:
    """What `run` did.

    graph_module: rewritten in place. layers: a verdict each. calls: the mega_moe nodes. seconds: CPU time per pass.
    checker: compares the fused layers, in their order, with their regions; with the option verify only. contexts: those
    of the layers whose experts are spread over ranks. replaced: each fused layer's output, as it was and as it is, then
    those of the shared experts beside it that became nodes too.
    """

    graph_module: GraphModule
    layers: list[LayerReport] = field(default_factory=list)
    calls: list[Node] = field(default_factory=list)
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    checker: Checker | None = None
    contexts: list[ContextReport] = field(default_factory=list)
    replaced: list[list[Pair]] = field(default_factory=list)

    def report(self, index: int, note: str = "") -> GraphReport:
        """The same for people. index: the graph's number in this process."""
        return GraphReport(
            index,
            tuple(self.layers),
            self.nodes_before,
            self.nodes_after,
            self.seconds,
            note=note,
            contexts=tuple(self.contexts),
        )


def run(
    gm: GraphModule,
    parameters: frozenset[str],
    options: Options,
    *,
    training: bool,
    record: bool = False,
    contact: Contact = "draw",
) -> FuseResult:
    """Rewrite `gm` in place. record: give each layer its `region` and `launches_saved`, for people to look at.

    contact: what may be done about other ranks, see `plan_comm`.

    Raises RejectedError in mode "on" when a found layer isn't fused, UnprovedError where a rewritten loop
    (`moefuse.frontend`) isn't proved to mean what was written, or isn't fused.
    """
    graph = gm.graph
    result = FuseResult(gm, nodes_before=len(graph.nodes), nodes_after=len(graph.nodes))
    if options.mode == "off":
        return result
    with _no_garbage_collection():
        _run(gm, parameters, options, training, record, contact, result)
    result.nodes_after = len(graph.nodes)
    return result


def _run(
    gm: GraphModule,
    parameters: frozenset[str],
    options: Options,
    training: bool,
    record: bool,
    contact: Contact,
    result: FuseResult,
) -> None:
    graph = gm.graph
    loops = collect(graph)
    recordings: list[Recording] = []
    with _timed(result.seconds, "canonicalize"):
        canonicalize(graph, training)
        halves = split(graph)
    with _timed(result.seconds, "lift"):
        lifted = lift(graph)
        forms = plan_comm.forms(graph, find(graph, parameters, lifted), lifted.losses)
        candidates = [form.candidate for form in forms]
        proofs = prove(loops, lifted)
    if record:
        with _timed(result.seconds, "record"):
            recorder = Recorder(lifted)
            recordings = [recorder.note(candidate) for candidate in candidates]
    with _timed(result.seconds, "plan_comm"):
        for candidate in candidates:
            _complete(candidate, options, training)
        comm = plan_comm.plan(graph, forms, options, contact, training)
        result.contexts = comm.contexts
    with _timed(result.seconds, "fuse"), _kept_promise(comm.contexts):
        _rewrite(graph, candidates, options, comm.agreed, result)
        join(graph, halves)
        if options.mode == "on":
            _demand(result.layers)
        if loops:
            demand_fused(proofs, candidates, result.layers)
            clear(graph, loops)
        if result.calls:
            if options.verify:
                result.checker = checker(gm, result.replaced)
            _remove_regions(graph, candidates, result.layers)
        gm.recompile()
    if record:
        with _timed(result.seconds, "record"):
            outputs = iter([pairs[0][1] for pairs in result.replaced])
            for i, (recording, layer) in enumerate(zip(recordings, result.layers, strict=True)):
                output = next(outputs) if layer.fused else None
                region, saved = recorder.finish(graph, recording, output)
                result.layers[i] = replace(layer, region=region, launches_saved=saved)


def _rewrite(
    graph: Graph,
    candidates: Sequence[Candidate],
    options: Options,
    agreed: Mapping[int, Agreed],
    result: FuseResult,
) -> None:
    """A verdict for each candidate, and the rewrite of those that may be fused; their regions stay, as dead code."""
    # From the last to the first: what a later layer reads may be the very node that an earlier one replaces.
    for number, candidate in reversed(list(enumerate(candidates))):
        result.layers.insert(0, _treat(graph, candidate, options, agreed[number], result))
    result.replaced.reverse()
    plan_comm.share(graph)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Facts are many small objects that all live: a collection walks over them, and over the model, for nothing.

    It took more than half of the passes' time on a model of 94 layers.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _kept_promise(contexts: Sequence[ContextReport]) -> Iterator[None]:
    """Where other ranks count on this one, it can't compile a graph unfused: an internal error is everybody's."""
    try:
        yield
    except (RejectedError, UnprovedError):
        raise
    except Exception as error:
        if contexts:
            raise AgreementError(
                f"all ranks fuse this graph's layers, but here it failed: {error}"
            ) from error
        raise


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.process_time()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.process_time() - start


def _complete(candidate: Candidate, options: Options, training: bool) -> None:
    """What the graph alone doesn't say of a layer."""
    if (site := candidate.site) is not None:
        device = options.meta_device if site.spec.device.startswith("meta") else site.spec.device
        site.spec = replace(site.spec, training=training, device=device)


def _treat(
    graph: Graph, candidate: Candidate, options: Options, comm: Agreed, result: FuseResult
) -> LayerReport:
    """The verdict on one candidate, and the rewrite if it is yes: noted in `result`."""
    report = LayerReport(
        candidate.layer, False, candidate.node.name, source_of(candidate.node), comm=comm.words
    )
    if excluded := options.excluded(candidate.layer):
        spec = candidate.site.spec if candidate.site else None
        return replace(report, spec=spec, check="exclude", reason=excluded)
    if candidate.site is None:
        return replace(report, check="lift", reason=candidate.reason)
    site = candidate.site
    decision = comm.decision or policy.decide(site.spec, target=options.target)
    report = replace(
        report,
        spec=site.spec,
        bytes=site.spec.weight_bytes,
        target=decision.target,
        checks=tuple(decision.verdict.checks),
    )
    if not decision.ok:
        return replace(report, check=decision.verdict.check, reason=decision.verdict.reason)
    check, reason = obstacle(site)
    if reason:
        return replace(report, check=check, reason=reason)
    if comm.reason:
        return replace(report, check=comm.check, reason=comm.reason)
    try:
        call, output = fuse_site(graph, site, decision.target, comm.context)
    except Conflict as conflict:
        if comm.context:
            raise
        return replace(report, check="emit", reason=conflict.reason)
    beside = absorb(graph, site, options, decision.target)
    result.calls.append(call)
    result.replaced.append([(site.node, output), *(pair for _, pair in beside if pair is not None)])
    return replace(
        report,
        fused=True,
        comm=_communication(site) or comm.words,
        copied=targets.get(decision.target).copied_bytes(site.spec),
        shared=tuple(verdict for verdict, _ in beside),
    )


def _communication(site: Site) -> str:
    """What was absorbed of a layer whose rows travel."""
    ranks = site.layer.ranks
    if ranks is None:
        return ""
    names = Counter(op_name(node).removeprefix("_c10d_functional::") for node in travels(site))
    absorbed = ", ".join(f"{n} {name}" for name, n in sorted(names.items()) if name != "wait_tensor")
    return f"rows travel inside the node, over the {ranks.world} ranks of group {ranks.group}; absorbed: {absorbed}"


def _remove_regions(graph: Graph, candidates: Sequence[Candidate], layers: Sequence[LayerReport]) -> None:
    """What fused layers were made of goes, and the collectives that their rows travelled by.

    The graph is well-formed then, and no GEMM of a fused layer is left to run a second time.
    """
    fused = [c.site for c, layer in zip(candidates, layers, strict=True) if c.site and layer.fused]
    travelled = set().union(*map(travels, fused))
    graph.eliminate_dead_code(lambda node: node.is_impure() and node not in travelled)
    graph.lint()
    left = set(graph.nodes)
    for candidate, layer in zip(candidates, layers, strict=True):
        if not layer.fused or candidate.site is None:
            continue
        beside = [e for e, verdict in zip(candidate.site.shared, layer.shared, strict=True) if verdict.fused]
        if any(site.gemms & left for site in (candidate.site, *beside)):
            raise RuntimeError(f"{layer.layer}: its own GEMMs are still in the graph after the rewrite")


def _demand(layers: list[LayerReport]) -> None:
    rejected = [layer for layer in layers if not layer.fused and layer.check != "exclude"]
    if rejected:
        lines = [
            f"  {layer.layer or '(root)'}: {layer.reason} [{layer.source or layer.node}]"
            for layer in rejected
        ]
        raise RejectedError("\n".join([f'mode="on": {len(rejected)} MoE layer(s) not fused', *lines]))
