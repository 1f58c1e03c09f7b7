"""Shared experts become nodes of their own beside the node of their layer, where the policy says yes.

In: a layer that is being rewritten and what stands beside it. Out: a verdict on each shared expert, the rewrite where
it is yes. The sum with the layer's output stays where it is, and so do its roundings.
"""

from dataclasses import replace

from torch.fx import Graph

from moefuse import policy
from moefuse.graph.source import common_layer
from moefuse.options import Options
from moefuse.passes.fuse import fuse_site
from moefuse.passes.region import obstacle
from moefuse.passes.verify import Pair
from moefuse.patterns.axes import group_size
from moefuse.patterns.facts import Conflict
from moefuse.patterns.site import Site, Strange
from moefuse.report.model import SharedReport

Outcome = tuple[SharedReport, Pair | None]


def absorb(graph: Graph, site: Site, options: Options, target: str) -> list[Outcome]:
    """Rewrite the shared experts of a layer that runs on `target`; one that can't be stays as it was."""
    return [_absorb(graph, site, expert, options, target) for expert in site.shared]


def _absorb(graph: Graph, site: Site, expert: Site | Strange, options: Options, target: str) -> Outcome:
    report = SharedReport(common_layer(expert.gemms), False, expert.node.name)
    if excluded := options.excluded(report.layer):
        return replace(report, check="exclude", reason=excluded), None
    if isinstance(expert, Strange):
        return replace(report, check="lift", reason=expert.reason), None
    spec = replace(expert.spec, training=site.spec.training, device=site.spec.device)
    report = replace(report, spec=spec, bytes=spec.weight_bytes)
    size = group_size(expert.layer.tokens)
    tokens = size if isinstance(size, int) else None
    verdict = policy.decide_shared(spec, target=target, spread=site.layer.ranks is not None, tokens=tokens)
    if not verdict.ok:
        return replace(report, check=verdict.check, reason=verdict.reason), None
    check, reason = obstacle(expert)
    if reason:
        return replace(report, check=check, reason=reason), None
    try:
        _, output = fuse_site(graph, expert, target)
    except Conflict as conflict:
        return replace(report, check="emit", reason=conflict.reason), None
    return replace(report, fused=True), (expert.node, output)
