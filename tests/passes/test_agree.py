"""What ranks tell each other about a frame, in one process: a group of one rank, or none at all."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch.fx import Graph, GraphModule

import moefuse
from moefuse import backend
from moefuse.comm import BusyError, OutOfStepError
from moefuse.graph.desugar import Desugared
from moefuse.graph.groups import Place, place_in
from moefuse.graph.interpret import CaptureError
from moefuse.options import Options
from moefuse.passes import agree, plan_comm
from moefuse.passes.agree import Wish
from moefuse.testing import fake_ep_group
from tests.comm.spread_models import Block, ByExpert, E, Gathered, tokens
from tests.passes.test_plan_comm import planned


@pytest.fixture
def yes_from_all(monkeypatch) -> Iterator[None]:
    """Rank 1 of two, of which the other says the same as this one. Graphs are compiled; nobody is there to run them."""
    torch._dynamo.reset()
    monkeypatch.setattr(plan_comm, "place_in", lambda name: place_in(name)._replace(live=True))
    monkeypatch.setattr(agree, "what_all_want", lambda group, wish, timeout, then: then([wish, wish]))
    monkeypatch.setattr(agree, "tell_all", lambda group, wish: None)
    monkeypatch.setattr(agree, "_opened", lambda group, wish: None)
    monkeypatch.setattr(plan_comm, "contexts_of", lambda wishes: [])
    flags = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with fake_ep_group(2, 1), torch._dynamo.config.patch(flags), torch.no_grad():
        yield


def compiled(
    k: int = 2, dynamic: bool = True, layer: ByExpert | None = None, **more: Any
) -> Callable[[int], None]:
    """Compiles a layer for a number of tokens; what running it says doesn't matter here."""
    options = {"inner": "eager", "ep_max_tokens": 64, **more}
    run = torch.compile(layer or ByExpert(1, 2, k=k), backend="moefuse", dynamic=dynamic, options=options)

    def call(count: int) -> None:
        try:
            run(tokens(count, 0))
        except Exception as error:
            if isinstance(inner := getattr(error, "inner_exception", None), agree.AgreementError):
                raise inner from error

    return call


def verdicts() -> list[tuple[bool, str]]:
    return [(site.fused, site.check) for site in moefuse.reports()[-1].sites]


@pytest.mark.usefixtures("yes_from_all")
def test_a_frame_that_dynamo_would_run_eagerly_next_is_an_error() -> None:
    """Other ranks would wait in the fused layers for a rank that runs the model's own collectives."""
    run = compiled(dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=3):
        run(4)
        run(5)
        with pytest.raises(
            agree.AgreementError, match=r"recompile_limit = 3: Dynamo would run .*mark_dynamic"
        ):
            run(6)
    assert verdicts() == [(True, "")] * 2


@pytest.mark.usefixtures("yes_from_all")
def test_a_frame_that_cannot_be_captured_any_more_is_an_error(monkeypatch) -> None:
    """Other ranks would wait for a rank that is left as it is; a frame that never was fused is just left."""

    def refused(*_: Any) -> None:
        raise CaptureError("not this time")

    run = compiled(dynamic=False)
    run(4)
    monkeypatch.setattr(backend, "capture", refused)
    with pytest.raises(agree.AgreementError, match=r"can't be fused \(not this time\).*mark_dynamic"):
        run(5)
    compiled(k=1, dynamic=False)(4)
    assert moefuse.reports()[-1].graphs[-1].note == "left as it is: not this time"


@pytest.mark.usefixtures("yes_from_all")
def test_a_frame_that_is_compiled_only_once_is_not_fused() -> None:
    run = compiled(dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        run(4)
        run(5)
    assert verdicts() == [(False, "ep_agreement")]


@pytest.mark.usefixtures("yes_from_all")
@pytest.mark.parametrize("name", ["recompile_limit", "accumulated_recompile_limit"])
def test_layers_of_one_class_share_a_limit(name) -> None:
    with torch._dynamo.config.patch({name: 3}):
        layers = [compiled(k) for k in (1, 2, 3)]
        layers[0](4)
        layers[1](4)
        with pytest.raises(agree.AgreementError, match=f"[.]{name} = 3"):
            layers[2](4)


@pytest.mark.usefixtures("yes_from_all")
@pytest.mark.parametrize("training_first", [False, True])
def test_with_and_without_gradients_is_agreed_on_apart(training_first) -> None:
    run = compiled()
    for training in (training_first, not training_first):
        with torch.set_grad_enabled(training):
            run(5)
    assert verdicts() == [(True, ""), (True, "")]


@pytest.mark.usefixtures("yes_from_all")
@pytest.mark.parametrize("training", [False, True])
def test_gradients_on_one_rank_only_leave_the_frame_unfused_both_ways(training, monkeypatch) -> None:
    """Nobody would come where the other way is asked about later."""
    asked: list[float] = []

    def other(group: Any, wish: Any, timeout: float, then: Callable[[list[Any]], str]) -> str:
        asked.append(timeout)
        return then([wish | {"gradients": not wish["gradients"]}, wish])

    monkeypatch.setattr(agree, "what_all_want", other)
    run = compiled(ep_timeout=7)
    for grad in (training, not training):
        with torch.set_grad_enabled(grad):
            run(5)
    assert verdicts() == [(False, "ep_agreement")] * 2
    assert asked == [7.0]
    reason = moefuse.reports()[-1].sites[0].reason
    here, there = ("", "no ") if training else ("no ", "")
    assert reason == f"{here}gradients are wanted on rank 1, and {there}gradients on 0"


@pytest.mark.usefixtures("yes_from_all")
def test_a_rank_that_is_busy_with_another_layer_is_an_error(monkeypatch) -> None:
    """Going on unfused would leave it waiting."""

    def busy(*_: Any) -> list[Any]:
        raise BusyError("rank 0 gave up: it waits in a layer")

    monkeypatch.setattr(agree, "what_all_want", busy)
    with pytest.raises(agree.AgreementError, match="rank 0 gave up: it waits in a layer"):
        compiled()(5)


@pytest.mark.usefixtures("yes_from_all")
def test_weights_in_buffers_are_told_apart() -> None:
    """Layers of one class share a frame, whether their weights are parameters or not."""
    for k in (1, 2):
        layer = ByExpert(1, 2, k=k)
        for name, weight in list(layer.named_parameters()):
            delattr(layer, name)
            layer.register_buffer(name, weight.detach())
        compiled(layer=layer)(4)
    assert verdicts() == [(True, "")] * 2


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """What ranks hear that wait for a word about a graph, which is looked at where its meta says so."""
    said: list[str] = []
    monkeypatch.setattr(agree, "give_up", lambda group, reason: said.append(reason))
    place = place_in(torch.distributed.group.WORLD.group_name)
    assert place is not None
    live = place._replace(live=True)
    monkeypatch.setattr(agree, "senders", lambda gm: [live] if gm.meta.get("sends") else [])
    return said


def sending() -> GraphModule:
    gm = GraphModule({}, Graph())
    gm.meta["sends"] = True
    return gm


@pytest.mark.usefixtures("yes_from_all")
@pytest.mark.parametrize(
    ("error", "heard"),
    [(SkipFrame("skipped"), True), (RestartAnalysis(), False)],
)
def test_only_a_frame_that_is_compiled_once_more_says_nothing(error, heard, told) -> None:
    with pytest.raises(type(error)), agree.speaking(sending(), []):
        raise error
    assert bool(told) == heard


@pytest.mark.usefixtures("yes_from_all")
def test_a_rank_that_is_switched_off_says_so_of_its_dtensors(told, monkeypatch) -> None:
    """The groups of their meshes are known only when they are taken apart."""
    monkeypatch.setattr(backend, "desugared", lambda gm, inputs: Desugared(sending(), inputs))
    compiled(mode="off")(4)
    assert told == ["it doesn't fuse this graph: mode='off': nothing is fused"]


class _Broken:
    """A target that communicates itself, and can't."""

    communicates = True

    def open_context(self, *_: Any) -> None:
        raise OSError("no device")


def test_contexts_of_a_target_that_may_be_there_on_some_ranks_are_the_last(monkeypatch) -> None:
    """Others of the ranks have theirs, and would not come where this one makes it once more."""
    monkeypatch.setattr(agree.targets, "get", lambda name: _Broken())
    wish = Wish(0, "0", Place("a", 2, 0, True))
    chosen: Any = SimpleNamespace(target="npu")
    with pytest.raises(OutOfStepError, match="OSError: no device"):
        agree._opened(None, replace(wish, decision=chosen, capacity=chosen, spec=chosen))


class _Group:
    """A group that is told and asked."""


def test_refusals_are_told_first_and_groups_asked_in_one_order(monkeypatch) -> None:
    """A rank that waits in one group, before it tells another one, may wait for a rank that waits there."""
    said: list[str] = []
    groups = {name: _Group() for name in "abc"}
    names = {group: name for name, group in groups.items()}
    monkeypatch.setattr(agree, "group_of", groups.get)
    monkeypatch.setattr(agree, "tell_all", lambda group, wish: said.append(f"told {names[group]}"))
    monkeypatch.setattr(
        agree,
        "what_all_want",
        lambda group, wish, timeout, then: then([said.append(f"asked {names[group]}") or wish]),
    )
    monkeypatch.setattr(agree, "_opened", lambda group, wish: None)
    monkeypatch.setattr(Wish, "context", property(lambda wish: wish.layer))
    places = {name: Place(name, 2, 0, True) for name in groups}
    wishes = [Wish(0, "0", places["b"], digest="x"), Wish(1, "1", places["a"], digest="x")]
    refused = Wish(2, "2", places["c"], check="lift", reason="unproved")
    answers = agree.settled([*wishes, refused], Options(), False)
    assert said == ["told c", "asked a", "asked b"]
    assert answers == {places["c"]: ("ep_agreement", "rank 0 doesn't fuse 2: unproved")}


# --- collectives that stay -------------------------------------------------------------------------------


class Logged(ByExpert):
    """Keeps how many rows come here: that collective stays beside the fused layer. By rank 0 only, or by all."""

    ranks = (0,)

    def exchange(self, rows: torch.Tensor, received: Any, sent: Any) -> torch.Tensor:
        here = super().exchange(rows, received, sent)
        if received is None and self.rank in self.ranks:
            self.load = here * 2
        return here


class LoggedByAll(Logged):
    ranks = (0, 1)


class LoggedIds(Gathered):
    """Keeps how often each expert was chosen by tokens of any rank."""

    def mask(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rank == 0:
            self.load = torch.nn.functional.one_hot(ids.flatten(), E).sum(0)
        return super().mask(ids, weights)


def digests(form: type[Block], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ranks 0 and 1 say of the one layer of a model."""
    asked: list[str] = []

    def settled(wishes: list[Wish], options: Options, training: bool) -> dict[Place, tuple[str, str]]:
        asked.extend(wish.digest for wish in wishes)
        return {}

    monkeypatch.setattr(plan_comm, "settled", settled)
    for rank in (0, 1):
        with fake_ep_group(2, rank):
            planned(form(rank, 2), "ask")
    return asked


@pytest.mark.parametrize(
    ("form", "agreed"),
    [(ByExpert, True), (Gathered, True), (LoggedByAll, True), (Logged, False), (LoggedIds, False)],
)
def test_ranks_say_which_collectives_stay(form, agreed, monkeypatch) -> None:
    """One that only one rank still ran would wait for the others."""
    first, second = digests(form, monkeypatch)
    assert first
    assert second
    assert (first == second) is agreed
