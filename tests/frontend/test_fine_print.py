"""Loops that nearly are what is fused: what they do besides has to stay as it was written."""

import copy
import functools
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moefuse
from tests.frontend import models, near_misses
from tests.frontend.models import E, H, K
from tests.frontend.test_loops import FP32, lonely, reports_of, tokens


def stays(model: nn.Module, *inputs: Any) -> str:
    """Why nothing is fused; the outputs are the original's."""
    reports, outputs = reports_of(model, *inputs)
    assert sum(report.fused for report in reports) == 0
    for x, got in zip(inputs, outputs, strict=True):
        with torch.no_grad():
            assert torch.equal(got, model(x))
    return " ".join(site.reason for report in reports for site in report.sites)


def doubling(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args) * 2

    return inner


class NoGrad(models.Base):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            y.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return y


class WrappedLater(NoGrad):
    forward = doubling(NoGrad.forward)


class ReadLater(models.Base):
    """A function made before the loop reads what the loop assigns."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        last = 0

        def scale() -> int:
            return last

        for e in range(E):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            last = e
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y * scale()


class Annotated(models.Base):
    """`place: int` assigns nothing."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        place = 0
        for e in range(E):
            place: int
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            y.index_add_(0, token, self.experts[place](x[token]) * weights[token, slot, None])
            place = place + 1
        return y


class InOrder(models.Base):
    """Rows sorted by expert; what is different in the loop, and behind it, are methods."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.ids(x)
        order = ids.view(-1).argsort(stable=True)
        rows = x[order // K]
        counts = (ids.view(-1, 1) == torch.arange(E)).sum(0).tolist()
        outputs = []
        start = 0
        for e, n in enumerate(counts):
            end = start + n
            if n == 0:
                continue
            outputs.append(self.experts[e](rows[start:end]))
            start = end
        if not outputs:
            return x
        outs = torch.cat(outputs)
        new = torch.empty_like(outs)
        new[order] = outs
        return (new.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)

    def ids(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.route(x)


class Unrouted(InOrder):
    """The ids are -1 where x is: nobody may be routed."""

    def ids(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :K], x[:, :K].long()


class NoRows(models.Base):
    """Of ids that nothing is known of; where all experts are skipped, no rows go on."""

    none, width = 0, H

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)[0], x[:, 2 : 2 + K].long().abs() % E
        order = ids.view(-1).argsort(stable=True)
        rows = x[order // K]
        counts = (ids.view(-1, 1) == torch.arange(E)).sum(0).tolist()
        outputs = []
        start = 0
        for e, n in enumerate(counts):
            end = start + n
            if n == 0:
                continue
            outputs.append(self.experts[e](rows[start:end]))
            start = end
        outs = torch.cat(outputs, dim=0) if len(outputs) > 0 else rows.new_zeros(self.none, self.width)
        return (outs[order.argsort()].view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)


class OtherNoRows(NoRows):
    """An expert without tokens would be one of other features."""

    width = H + 1


class SomeRows(NoRows):
    """Where no expert has tokens there would be a row all the same."""

    none = 1


class AsksInside(models.Base):
    """The first expert that works isn't its own."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        order = ids.view(-1).argsort(stable=True)
        rows = x[order // K]
        counts = torch.bincount(ids.view(-1), minlength=E).tolist()
        outputs = []
        start = 0
        for e, n in enumerate(counts):
            end = start + n
            if n == 0:
                continue
            expert = self.experts[e]
            if not outputs:
                expert = self.experts[0]
            outputs.append(expert(rows[start:end]))
            start = end
        outs = torch.cat(outputs)
        new = torch.empty_like(outs)
        new[order] = outs
        return (new.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)


class LastOne(models.Base):
    """What the last expert that worked has computed, where it is asked for."""

    wanted = False

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            out = expert(x[token])
            y.index_add_(0, token, out * weights[token, slot, None])
        if self.wanted:
            return y + out.sum()
        return y


class Matrix(models.Base):
    """Counts as a matrix: its rows are no numbers."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        table = F.one_hot(ids, E).sum(1).T.cpu().numpy()
        for e in range(E):
            if table[e].sum() == 0:
                continue
            token, slot = torch.where(ids == e)
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


@pytest.mark.parametrize(
    ("style", "words"),
    [
        (WrappedLater, "wrapped by a decorator"),
        (ReadLater, "`last` is read by a function that may run later"),
        (Annotated, "leaves something behind that is no tensor"),
        (AsksInside, "used for more than a torch.cat"),
        (near_misses.Asserting, "claims what isn't so for an expert without tokens"),
        (LastOne, "may be assigned nowhere but in it"),
        (Matrix, "no routing operation in this graph"),
        (Unrouted, "whether its list is empty"),
        (OtherNoRows, "whether its list is empty"),
        (SomeRows, "whether its list is empty"),
    ],
)
def test_it_stays_as_it_is(style: type[nn.Module], words: str) -> None:
    assert words in stays(lonely(style()), tokens(), torch.full((6, H), -1.0))


@pytest.mark.parametrize("style", [InOrder, NoRows])
def test_whether_a_list_is_empty_is_known_or_the_same(style: type[nn.Module]) -> None:
    """Each token chooses; or where none does the program goes on with what the list would give."""
    model = lonely(style())
    x = tokens()
    reports, (got,) = reports_of(model, x)
    assert [site.fused for report in reports for site in report.sites] == [True]
    torch.testing.assert_close(got, model(x), atol=FP32, rtol=FP32)


def test_a_file_that_was_edited_is_not_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "import torch\nfrom tests.frontend.models import Base\n\n\nclass Edited(Base):\n"
        "    def forward(self, x):\n        weights, ids = self.route(x)\n        y = torch.zeros_like(x)\n"
        "        for e, expert in enumerate(self.experts):\n            token, slot = torch.where(ids == e)\n"
        "            if token.numel() == 0:\n                continue\n"
        "            y.index_add_(0, token, expert(x[token]) * weights[token, slot, None] * 1.0)\n"
        "        return y\n"
    )
    path = tmp_path / "edited.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("edited", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "edited", module)
    spec.loader.exec_module(module)
    path.write_text(text.replace("* 1.0", "* 3.0"))
    assert "its source isn't what runs" in stays(lonely(module.Edited()), tokens())


class Empty(models.Empty):
    """Of its own, for a test to change."""

    forward = models.Empty.forward

    def later(self, x: Tensor) -> Tensor:
        return x * 7


def test_a_class_that_is_changed_later_counts() -> None:
    model, x = lonely(Empty()), tokens()
    fused = moefuse.compile(model, inner="eager")
    with torch.no_grad():
        fused(x)
        Empty.forward = doubling(models.Empty.forward)  # type: ignore[method-assign]
        try:
            assert torch.equal(fused(x), model(x))
        finally:
            Empty.forward = models.Empty.forward  # type: ignore[method-assign]


class Patching(models.Base):
    """It replaces itself while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            y.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        self.forward = types.MethodType(Empty.later, self)  # type: ignore[method-assign]
        return y


def test_what_the_model_sets_stays_set() -> None:
    model, x = lonely(Patching()), tokens()
    fused = moefuse.compile(model, inner="eager")
    with torch.no_grad():
        fused(x)
        assert torch.equal(fused(x), x * 7)
        assert torch.equal(model(x), x * 7)


def test_no_tokens_after_some() -> None:
    model = lonely(InOrder())
    fused = moefuse.compile(model, inner="eager")
    with torch.no_grad():
        for x in (tokens(), tokens(5)[:0], tokens(5)):
            torch.testing.assert_close(fused(x), model(x), atol=FP32, rtol=FP32)


def test_what_is_compiled_already_is_compiled_anew() -> None:
    model, x = lonely(models.Empty()), tokens()
    twice = moefuse.compile(moefuse.compile(model, inner="eager"), inner="eager")
    function = moefuse.compile(moefuse.compile(model.forward, inner="eager"), inner="eager")
    with torch.no_grad():
        torch.testing.assert_close(twice(x), model(x), atol=FP32, rtol=FP32)
        assert moefuse.reports()[-1].fused
        torch.testing.assert_close(function(x), model(x), atol=FP32, rtol=FP32)


def with_experts(kind: type[nn.Module]) -> nn.Module:
    model = models.Empty()
    model.experts = nn.ModuleList(kind() for _ in range(E))
    return lonely(model)


class Holder(models.Expert):
    """What the experts below change: none of it is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []
        self.stats = {"calls": 0}

    def work(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Aliased(Holder):
    def forward(self, x: Tensor) -> Tensor:
        stats = self.stats
        stats["calls"] = stats["calls"] + 1
        return self.work(x)


class Extended(Holder):
    def forward(self, x: Tensor) -> Tensor:
        log = self.log
        log += [1]
        return self.work(x)


class Passing(Holder):
    def note(self, log: list[int]) -> None:
        log.append(1)

    def forward(self, x: Tensor) -> Tensor:
        self.note(self.log)
        return self.work(x)


class Default(Holder):
    def forward(self, x: Tensor, log: list[int] = []) -> Tensor:  # noqa: B006
        log.append(1)
        return self.work(x)


class Called(Holder):
    def __call__(self, x: Tensor) -> Tensor:
        self.log.append(1)
        return self.work(x)


class Property(Holder):
    @property
    def width(self) -> float:
        self.log.append(1)
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) * self.width


@pytest.mark.parametrize("kind", [Aliased, Extended, Passing, Default, Called, Property])
def test_what_experts_do_besides_happens_as_often_as_written(kind: type[nn.Module]) -> None:
    model = with_experts(kind)
    original = copy.deepcopy(model)
    reports, _ = reports_of(model, tokens())
    assert sum(report.fused for report in reports) == 0
    original(tokens())
    for got, want in zip(model.experts, original.experts, strict=True):  # type: ignore[arg-type]
        assert (got.log, got.stats) == (want.log, want.stats)


class Meter:
    """No tensor, though its methods are called so."""

    calls = 0

    def log(self, number: float) -> float:
        self.calls += 1
        return number


class Given(models.Base):
    """It uses what it is given."""

    def forward(self, x: Tensor, meter: Any, post: Any = None) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            y.index_add_(0, token, expert(x[token]) * weights[token, slot, None] * meter.log(1.0))
        return y


def test_an_argument_that_is_no_tensor_is_seen_when_it_is_there() -> None:
    model, meter, x = lonely(Given()), Meter(), tokens()
    with torch.no_grad():
        moefuse.compile(model, inner="eager")(x, meter)
    assert meter.calls == 3, "one expert has no tokens"


def test_other_experts_later_are_looked_at_too() -> None:
    model, x = lonely(models.Empty()), tokens()
    fused = moefuse.compile(model, inner="eager")
    with torch.no_grad():
        fused(x)
        model.experts = nn.ModuleList(near_misses.Remembering() for _ in range(E))
        fused(x)
    assert [expert.calls for expert in model.experts] == [0, 1, 1, 1]  # type: ignore[union-attr]


class Data(nn.Module):
    """No gradient goes through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = models.Empty()

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x).data + self.moe.router(x).sum(-1, keepdim=True)


def test_no_gradient_goes_through_data() -> None:
    model = Data()
    lonely(model.moe)
    original = copy.deepcopy(model)
    moefuse.compile(model, inner="eager")(tokens()).sum().backward()
    original(tokens()).sum().backward()
    assert moefuse.reports()[-1].fused
    for (name, got), want in zip(model.named_parameters(), original.parameters(), strict=True):
        assert (got.grad is None or not got.grad.any()) == (want.grad is None), name
