"""Layers whose experts are spread over ranks: which become nodes that communicate, decided by all ranks alike.

In: the candidates of a graph, each judged by the policy on facts that are equal on all ranks. Out: a `Plan`: the name
of a context for each layer that all ranks fuse (`agree`), a reason for every other one.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch.fx import Graph, Node

from moefuse import policy
from moefuse.graph.groups import Place, place_in
from moefuse.options import Options
from moefuse.passes.agree import Wish, contexts_of, settled
from moefuse.passes.fuse import why_not
from moefuse.passes.lift import MOVES, Candidate, explain
from moefuse.passes.region import obstacle, operand_leaves, outliving, travels
from moefuse.patterns.facts import Const, Lost, Op
from moefuse.patterns.gathered import gathered
from moefuse.patterns.mc2 import DISPATCH
from moefuse.patterns.pointwise import walk
from moefuse.patterns.rules import argument, op_name
from moefuse.patterns.site import Site
from moefuse.policy import Decision
from moefuse.policy.spread import SpreadLayer, Terms
from moefuse.report.model import ContextReport

MC2 = (DISPATCH, f"{DISPATCH}_v2")
"""Ascend's operators that send rows to other ranks."""

Contact = Literal["ask", "draw", "refuse"]
"""What a pass may do about other ranks: ask them; only draw nodes, for people to look at; leave such layers alone."""

DISPATCHES = (torch.ops._c10d_functional.all_to_all_single.default,)
"""Collectives that send rows to the ranks of their experts."""

SUMS = (torch.ops._c10d_functional.all_reduce.default,)
"""Collectives that add up what the experts of all ranks give for the same tokens."""


class Agreed(NamedTuple):
    """What was decided about one candidate; nothing, where no rows travel.

    decision: the policy's. context: the name of the context of a layer that all ranks fuse. check, reason: why it is
    left. words: what happens to collectives beside a layer that doesn't communicate.
    """

    decision: Decision | None = None
    context: str = ""
    check: str = ""
    reason: str = ""
    words: str = ""


@dataclass
class Plan:
    """agreed: by candidate. contexts: what was made or found, for the report."""

    agreed: dict[int, Agreed]
    contexts: list[ContextReport] = field(default_factory=list)


@dataclass(frozen=True)
class Form:
    """How a candidate's rows may travel. candidate: with the layer of the whole group, where it is one.

    places: the groups that have to hear of it, with the reason, if it isn't proved. words: for the report.
    """

    candidate: Candidate
    places: tuple[Place, ...] = ()
    reason: str = ""
    words: str = ""


def forms(graph: Graph, candidates: Sequence[Candidate], losses: Mapping[Node, Lost]) -> list[Form]:
    """The candidates as the collectives around them make them. losses: why a collective's rows mean nothing."""
    sends = sorted(
        node for target in DISPATCHES for node in graph.find_nodes(op="call_function", target=target)
    )
    names = [str(node.args[-1]) for node in sends]
    names += [str(argument(node, 2, "group_ep")) for node in graph.nodes if op_name(node) in MC2]
    places = [place_in(group) for group in dict.fromkeys(names)]
    senders = tuple(place for place in places if place is not None)
    return [_form(candidate, senders, losses) for candidate in candidates]


def _form(candidate: Candidate, senders: tuple[Place, ...], losses: Mapping[Node, Lost]) -> Form:
    site = candidate.site
    if site is None:
        return Form(candidate, senders, candidate.reason)
    if site.layer.ranks is not None:
        return Form(candidate)
    if (found := gathered(site)) is not None:
        if found.site is None:
            return Form(candidate, (found.place,), found.reason, f"its collectives stay: {found.reason}")
        return Form(replace(candidate, node=found.site.node, site=found.site))
    if senders and _reaches(site.node, DISPATCHES) is not None:
        why = "its rows are sent on, and aren't proved to have come from all ranks"
        cause = _lost_on_the_way(site, losses)
        return Form(candidate, senders, why, "its collectives stay: " + (explain(cause) if cause else why))
    if (total := _reaches(site.node, SUMS)) is not None and argument(total, 1) == "sum":
        group = argument(total, 2, "group_name")
        words = f"`{total.name}` adds up what the experts of all ranks of group {group} give: it stays, once"
        return Form(candidate, words=words)
    return Form(candidate)


def _lost_on_the_way(site: Site, losses: Mapping[Node, Lost]) -> Lost | None:
    """Why nothing is known of the rows that came to the layer, or of their ids: the first such reason in the graph."""
    seen, stack = set[Node](), [leaf.node for leaf in operand_leaves(site)]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    lost = sorted(node for node in seen if node.target in DISPATCHES and node in losses)
    return losses[lost[0]] if lost else None


def _reaches(node: Node, targets: Sequence[Any]) -> Node | None:
    """The first of some collectives that a layer's output goes into, moved, cast or scaled, and nowhere else."""
    while len(node.users) == 1:
        (node,) = node.users
        if node.target in targets:
            return node
        if op_name(node) not in (*MOVES, "aten::mul", "aten::add", "getitem"):
            return None
    return None


def plan(
    graph: Graph, forms: Sequence[Form], options: Options, contact: Contact, training: bool = False
) -> Plan:
    """Decide on all candidates whose rows travel. Collective where contact is "ask" and there are such candidates.

    Raises AgreementError, see there.
    """
    wishes = [
        _wish(graph, number, form.candidate, options)
        for number, form in enumerate(forms)
        if form.candidate.site is not None and form.candidate.site.layer.ranks is not None
    ]
    refusals: dict[Place, tuple[str, str]] = {}
    if contact == "ask":
        refusals = settled([*wishes, *_unproved(forms, options)], options, training)
    elif contact == "refuse":
        why = "a pass alone makes no contexts: torch.compile(model, backend='moefuse') does"
        refusals = {wish.place: ("ep_context", why) for wish in wishes}
    result = Plan({number: Agreed(words=form.words) for number, form in enumerate(forms)})
    for wish in wishes:
        check, reason = (wish.check, wish.reason) if wish.reason else refusals.get(wish.place, ("", ""))
        result.agreed[wish.candidate] = Agreed(wish.decision, "" if reason else wish.context, check, reason)
    if contact == "ask":
        result.contexts = contexts_of([wish for wish in wishes if result.agreed[wish.candidate].context])
    return result


def _wish(graph: Graph, number: int, candidate: Candidate, options: Options) -> Wish:
    """Yes, where policy, region and operator allow it."""
    site = candidate.site
    assert site is not None
    assert site.layer.ranks is not None
    ranks = site.layer.ranks
    place = place_in(ranks.group)
    if place is None or (place.world, place.rank) != (ranks.world, ranks.rank):
        reason = (
            f"its rows travel over group {ranks.group!r}, which is no process group of torch of {ranks.world} ranks "
            f"with this one as rank {ranks.rank}"
        )
        nowhere = Place(ranks.group, ranks.world, ranks.rank, False)
        return Wish(number, candidate.layer, nowhere, check="ep_context", reason=reason)
    terms = Terms(place.name, options.ep_group, options.ep_max_tokens)
    decision = policy.decide_spread(site.spec, terms, target=options.target)
    check, reason = decision.verdict.check, decision.verdict.reason
    if excluded := options.excluded(candidate.layer):
        check, reason = "exclude", excluded
    elif options.verify:
        why = "verify=True compares on a rank's own inputs, the others would wait for it"
        check, reason = "ep_verify", why
    elif decision.ok:
        check, reason = obstacle(site)
        if not reason and (why := why_not(graph, site, decision.target)):
            check, reason = "emit", why
    if reason:
        return Wish(number, candidate.layer, place, decision, check=check, reason=reason)
    capacity = SpreadLayer.of(site.spec, decision.target, terms).capacity()
    return Wish(
        number,
        candidate.layer,
        place,
        decision,
        _digest(site),
        capacity,
        spec=site.spec,
        timeout=options.ep_timeout,
    )


def _digest(site: Site) -> str:
    """Equal for layers that compute the same, but for the values of tensors. Numbers in the graph are part of it.

    So is which of its collectives stay: all ranks have to run them.
    """
    layer, staying = site.layer, outliving(site)
    sent = [node for node in sorted(travels(site)) if op_name(node) != "_c10d_functional::wait_tensor"]
    parts: list[object] = [site.spec, [(op_name(n), i) for i, n in enumerate(sent) if n in staying]]
    for expr in (layer.x, *layer.weights):
        for part in walk(expr):
            if isinstance(part, Const):
                parts.append(part.value)
            elif isinstance(part, Op):
                parts.append(
                    (str(part.target), [a for a in part.args if isinstance(a, int | float)], part.kwargs)
                )
    return f"{zlib.crc32(repr(parts).encode()):08x}"


def _unproved(forms: Sequence[Form], options: Options) -> list[Wish]:
    """What looks like a layer whose rows travel, and isn't proved to be one: the other ranks have to hear of it."""
    return [
        Wish(number, form.candidate.layer, place, check="lift", reason=form.reason)
        for number, form in enumerate(forms)
        for place in form.places
        if form.reason and options.ep_group in ("", place.name)
    ]


def share(graph: Graph) -> None:
    """One node for each context, before everything that could use it."""
    first: dict[str, Node] = {}
    start = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for node in graph.find_nodes(op="call_function", target=torch.ops.moefuse.ep_context.default):
        name = str(node.args[0])
        if name not in first:
            first[name] = node
            start.prepend(node)
        else:
            node.replace_all_uses_with(first[name])
            graph.erase_node(node)
