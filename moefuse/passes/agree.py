"""What the ranks of a group agree on about the layers of a frame, and the contexts of those that all of them fuse.

In: this rank's wishes. Out: for each group the reason why none of its layers is fused, nothing where all ranks fuse
all of them. A rank that fused alone would wait for ever, so the ranks tell each other, once per frame, with and without
gradients, what they would do; one "no" is everybody's, and for both ways, as long as the other one isn't agreed on: so
all ranks count alike how often they were asked. Each rank says one word about each frame that may have such layers,
whatever becomes of it (`speaking`). Contexts are made here, before the first forward, one for all layers of the same
sizes: on all ranks, or nothing is fused. A frame that is compiled anew asks nobody: what was agreed on holds.
"""

import json
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._guards import CompileContext
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from moefuse import targets
from moefuse.comm import BusyError, Capacity, CommError, ConcludedError, OutOfStepError, context_for
from moefuse.comm.context import fail_contexts
from moefuse.comm.errors import reason_of
from moefuse.comm.plans import give_up, tell_all, what_all_want
from moefuse.comm.presence import announce
from moefuse.comm.rendezvous import TIMEOUT
from moefuse.graph.groups import Place, group_of, senders
from moefuse.ops.ep_context import provide
from moefuse.ops.spec import MoeSpec
from moefuse.options import Options
from moefuse.patterns.markers import UnprovedError
from moefuse.policy import Decision
from moefuse.report.model import ContextReport
from moefuse.targets.base import Opened

log = logging.getLogger("moefuse")

DYNAMIC = "Mark the number of tokens as dynamic (torch._dynamo.mark_dynamic, dynamic=True)"


class AgreementError(RuntimeError):
    """A frame compiled anew isn't what the ranks agreed on: going on would leave the other ranks waiting."""


@dataclass(frozen=True)
class Wish:
    """What this rank would do with one candidate. digest: of what the layer computes, "" where it isn't to be fused.

    timeout: seconds that its context waits for other ranks.
    """

    candidate: int
    layer: str
    place: Place
    decision: Decision | None = None
    digest: str = ""
    capacity: Capacity | None = None
    check: str = ""
    reason: str = ""
    spec: MoeSpec | None = None
    timeout: float = TIMEOUT

    @property
    def context(self) -> str:
        """The name of its context, equal in all processes: a compiled graph may come from a cache."""
        assert self.capacity is not None
        own = {"group": self.place.name, "timeout": self.timeout, **self.capacity.to_dict()}
        if self.spec is not None and self.spec.quant != "none":  # other rows travel
            own["quant"] = self.spec.quant
        return json.dumps(own, separators=(",", ":"))


# --- compilations ----------------------------------------------------------------------------------------


class _NoWeight:
    """Stands for the first weight of a graph without any."""


_NO_WEIGHT = _NoWeight()
_first_weight: ContextVar[Any] = ContextVar("_first_weight", default=_NO_WEIGHT)


@contextmanager
def weights_of(inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, a graph with these inputs is compiled: layers of one class share a frame, but no weights.

    They are parameters, or buffers where there are none: these may also be tables that layers share.
    """
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    weights = [x for x in tensors if isinstance(x, torch.nn.Parameter)]
    buffers = [x for x in tensors if hasattr(x, "_dynamo_static_input_type")]
    token = _first_weight.set(next(iter([*weights, *buffers]), _NO_WEIGHT))
    try:
        yield
    finally:
        _first_weight.reset(token)


def _frame() -> tuple[int, int]:
    """(the number of the frame that is compiled, how often it was before)."""
    compiled = CompileContext.current_compile_id()
    if compiled is None or compiled.frame_id is None:
        return -1, 0
    return compiled.frame_id, compiled.frame_compile_id or 0


def _spent() -> str:
    """Why Dynamo won't compile this frame again, for whichever layer, but run it as it is; "" where it will."""
    frame, earlier = _frame()
    names = ("recompile_limit", "accumulated_recompile_limit")
    limit, name = min((getattr(torch._dynamo.config, name), name) for name in names)
    if frame < 0 or earlier + 1 < limit:
        return ""
    return f"torch._dynamo.config.{name} = {limit}: Dynamo would run its frame eagerly, unfused, next"


# --- a word about each graph -----------------------------------------------------------------------------


@dataclass
class _Owed:
    """What this rank owes other ranks about the graph that it compiles. training: gradients are wanted.

    silent: places in groups that may wait for its word. promised: groups that count on it.
    """

    training: bool
    silent: set[Place] = field(default_factory=set)
    promised: list[Any] = field(default_factory=list)


_owed: ContextVar[_Owed | None] = ContextVar("_owed", default=None)


@contextmanager
def speaking(gm: GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, a graph is compiled, and whatever is raised, the other ranks of its groups hear of it.

    But for what makes Dynamo, or the front end, compile it once more.
    """
    announce()
    tensors = (x for x in (*inputs, *gm.parameters(), *gm.buffers()) if isinstance(x, torch.Tensor))
    owed = _Owed(torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    token = _owed.set(owed)
    try:
        expect(gm)
        yield
    except BaseException as error:
        from torch._dynamo.exc import RestartAnalysis  # importing moefuse doesn't start Dynamo

        if not isinstance(error, UnprovedError | RestartAnalysis):
            leave(reason_of(error))
            for group in _promised() if isinstance(error, AgreementError) else owed.promised:
                fail_contexts(group, error)
        raise
    finally:
        _owed.reset(token)


def expect(gm: GraphModule) -> None:
    """Layers whose rows travel may be in this graph, or what becomes of it: its groups wait for a word."""
    if (owed := _owed.get()) is not None:
        owed.silent.update(senders(gm))


def leave(reason: str) -> None:
    """None of the graph's layers is fused here: nobody needs to wait for this rank's word about them."""
    if (owed := _owed.get()) is None:
        return
    for place in sorted(owed.silent):
        group = group_of(place.name)
        known = _known(group)
        if (_frame()[0], owed.training) not in known:
            _unfused(known)
            give_up(group, f"it doesn't fuse this graph: {reason}")


def _unfused(known: dict[Any, Any]) -> list[Any]:
    """A no: with gradients and without, as ranks may differ in that. The keys of which nothing was known."""
    new = [key for key in _both_ways() if key not in known]
    known.update(dict.fromkeys(new))
    return new


def _both_ways() -> list[tuple[int, bool]]:
    return [(_frame()[0], grad) for grad in (False, True)]


def _promised() -> list[Any]:
    """The groups whose ranks fuse layers of this frame."""
    return [
        group
        for group, models in _agreed.items()
        if any(frames.get(key) for frames in models.values() for key in _both_ways())
    ]


# --- agreement -------------------------------------------------------------------------------------------

_agreed: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
"""By group, by the model's first weight, by frame and whether gradients are wanted: the digests of the layers that all
ranks fuse, None for no layer."""


def settled(wishes: Sequence[Wish], options: Options, training: bool) -> dict[Place, tuple[str, str]]:
    """For each group of which not all ranks fuse all of these layers: the check and the reason why none does.

    Raises AgreementError, see there.
    """
    spent = _spent()
    by_group: dict[Place, list[Wish]] = {}
    for wish in wishes:
        if wish.place.live:
            refused = wish.reason or not spent
            own = wish if refused else replace(wish, digest="", check="ep_agreement", reason=spent)
            by_group.setdefault(wish.place, []).append(own)
    owed = _owed.get()
    for place in owed.silent if owed is not None else ():
        by_group.setdefault(place, [])
    # What is told waits for nobody; then the groups are asked, in one order on all ranks.
    order = sorted(by_group, key=lambda place: (_asks(by_group[place]), place.name))
    answers = {place: _agree(place, by_group[place], options, training) for place in order}
    return {place: refusal for place, refusal in answers.items() if refusal is not None}


def _asks(wishes: Sequence[Wish]) -> bool:
    """A rank that says no, or nothing, needn't hear what the others say."""
    return bool(wishes) and not any(wish.reason for wish in wishes)


def demand_unpromised(reason: str) -> None:
    """For a graph that can't be looked at: AgreementError where the ranks fuse layers of its frame for other sizes."""
    promised = (models.get(_first_weight.get(), {}) for models in _agreed.values())
    if _frame()[0] >= 0 and any(frames.get(key) for frames in promised for key in _both_ways()):
        raise AgreementError(
            f"the other ranks would wait for expert-parallel layers of this one, but compiled anew for other sizes "
            f"their frame can't be fused ({reason}). {DYNAMIC}"
        )


def _agree(place: Place, wishes: list[Wish], options: Options, training: bool) -> tuple[str, str] | None:
    group = group_of(place.name)
    if (owed := _owed.get()) is not None:
        owed.silent.discard(place)
    digests = [wish.digest for wish in wishes]
    known, key = _known(group), (_frame()[0], training)
    if not wishes:
        if key not in known:
            _unfused(known)
            tell_all(group, _said(wishes, options, training))
        return None
    if (spent := _spent()) and group in _promised():
        raise AgreementError(
            f"the other ranks would wait for expert-parallel layers of this one: {spent}. {DYNAMIC}"
        )
    if key in known:
        before = known[key]
        if before is None:
            return "ep_agreement", "the ranks agreed not to fuse when this frame was compiled first"
        if before != digests:
            odd = next((wish.reason for wish in wishes if wish.reason), "another layer")
            raise AgreementError(
                f"compiled anew for other sizes, the expert-parallel layers of a frame aren't those that all ranks "
                f"fused before ({odd}). {DYNAMIC}"
            )
        _promise(group)
        return None
    new = _unfused(known)

    def fused() -> None:
        for each in new:
            del known[each]
        known[key] = digests

    refusal = _asked(group, place, wishes, options, training, fused)
    if refusal is None:
        _promise(group)
    return refusal


def _asked(
    group: Any,
    place: Place,
    wishes: list[Wish],
    options: Options,
    training: bool,
    fused: Callable[[], None],
) -> tuple[str, str] | None:
    """Ask the other ranks; where all say yes, make the contexts. fused: called where all ranks have them."""
    said = _said(wishes, options, training)
    if (own := next((wish for wish in wishes if wish.reason), None)) is not None:
        tell_all(group, said)
        return "ep_agreement", f"rank {place.rank} doesn't fuse {own.layer or '(root)'}: {own.reason}"

    def decided(everyone: list[Any]) -> str:
        if not (refusal := _refusal(everyone, place.rank, training)):
            for wish in {wish.context: wish for wish in wishes}.values():
                _opened(group, wish)
            agreed.append(True)
        return refusal

    agreed: list[bool] = []
    try:
        refusal = what_all_want(group, said, options.ep_timeout, decided)
    except ConcludedError as error:
        if agreed:  # so the others fuse these layers
            fused()
        raise AgreementError(str(error)) from error
    except BusyError as error:
        raise AgreementError(str(error)) from error
    except CommError as error:
        log.warning("no expert-parallel layer of this graph is fused: %s", error)
        return "ep_context", str(error)
    if refusal:
        return "ep_agreement", refusal
    fused()
    return None


def _promise(group: Any) -> None:
    if (owed := _owed.get()) is not None:
        owed.promised.append(group)


def _known(group: Any) -> dict[Any, Any]:
    """What was decided about this model's frames."""
    models = _agreed.setdefault(group, WeakIdKeyDictionary())
    frame, earlier = _frame()
    if not earlier:  # its first compilation: what was before is another program's
        for frames in list(models.values()):
            frames.pop((frame, False), None)
            frames.pop((frame, True), None)
    known: dict[Any, Any] = models.setdefault(_first_weight.get(), {})
    return known


def _said(wishes: Sequence[Wish], options: Options, training: bool) -> dict[str, Any]:
    layers = [[wish.layer, wish.digest, wish.reason] for wish in wishes]
    return {"layers": layers, "mode": options.mode, "gradients": training}


def _refusal(everyone: list[Any], own: int, training: bool) -> str:
    """Why none of the layers is fused, from what every rank said; "" where all say yes."""
    if odd := [rank for rank, theirs in enumerate(everyone) if theirs["gradients"] != training]:
        here, there = ("", "no ") if training else ("no ", "")
        ranks = ", ".join(map(str, odd))
        return f"{here}gradients are wanted on rank {own}, and {there}gradients on {ranks}"
    for rank, theirs in enumerate(everyone):
        for layer, digest, reason in theirs["layers"]:
            if not digest:
                return f"rank {rank} doesn't fuse {layer or '(root)'}: {reason}"
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            return f"rank {rank} has other layers in this graph than rank 0, or other readers of their collectives"
    return ""


# --- contexts --------------------------------------------------------------------------------------------


def contexts_of(wishes: Sequence[Wish]) -> list[ContextReport]:
    """Provide the contexts of the layers that are fused, and report them."""
    layers = Counter(wish.context for wish in wishes)
    reports: dict[str, ContextReport] = {}
    for wish in wishes:
        if wish.context in reports or not wish.place.live or wish.capacity is None:
            continue
        context = _opened(group_of(wish.place.name), wish)
        provide(wish.context, context.tensor)
        reports[wish.context] = ContextReport(
            wish.place.name,
            wish.place.world,
            context.transport,
            context.bytes,
            wish.capacity.max_tokens_per_rank,
            layers[wish.context],
        )
    return list(reports.values())


def _opened(group: Any, wish: Wish) -> Opened:
    """A layer's context, made or found: of the target, where that communicates itself."""
    assert wish.capacity is not None
    assert wish.spec is not None
    assert wish.decision is not None
    target = targets.get(wish.decision.target)
    if target.communicates:
        try:
            return target.open_context(group, wish.capacity, wish.spec)
        except Exception as error:  # others may have theirs, and wouldn't make it once more with this rank
            raise OutOfStepError(f"{type(error).__name__}: {error}") from error
    context = context_for(group, wish.capacity, timeout=wish.timeout)
    return Opened(context.tensor, context.transport, context.bytes)
