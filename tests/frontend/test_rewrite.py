"""Rewritten functions: run by Python they mean what was written; what isn't understood is refused with the reason."""

import inspect
import linecache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moefuse.frontend.lifter import Loops
from moefuse.frontend.source import RefusedError, build, parse, read
from tests.frontend import models, test_loops

EVERY = [*test_loops.RIGHT, *test_loops.WRONG]


@pytest.mark.parametrize("style", EVERY)
def test_run_by_python_it_is_the_original(style: type[nn.Module]) -> None:
    """Where Dynamo leaves a frame to Python, the rewritten code runs as it is."""
    model = test_loops.lonely(style())
    x = test_loops.tokens()
    with torch.no_grad():
        torch.manual_seed(1)
        want = model(x)
        loops = Loops(model)
        with loops.in_place():
            rewritten = [
                name
                for module in model.modules()
                for name in ("forward", "moe_infer")
                if name in vars(module)
            ]
            assert rewritten or loops.take_refused()
            torch.manual_seed(1)
            assert torch.equal(model(x), want)
    assert not any("forward" in vars(module) for module in model.modules())


def test_errors_name_the_user_s_lines() -> None:
    model = models.Empty()
    with Loops(model).in_place():
        code = vars(model)["forward"].__func__.__code__
    original = models.Empty.forward.__code__
    assert (code.co_filename, code.co_firstlineno) == (original.co_filename, original.co_firstlineno)
    lines = {line for *_, line in code.co_lines() if line is not None}
    written, start = inspect.getsourcelines(models.Empty.forward)
    assert lines <= set(range(start, start + len(written)))


def test_nested_use_takes_the_code_out_at_the_end_only() -> None:
    model = models.Empty()
    loops = Loops(model)
    with loops.in_place():
        with loops.in_place():
            pass
        assert "forward" in vars(model)
    assert "forward" not in vars(model)


def outer(number: int) -> tuple[Any, Any]:
    def function(x: int, y: int = 3, *, z: int = 4) -> int:
        return x + y + z + number

    def change(other: int) -> None:
        nonlocal number
        number = other

    return function, change


def test_cells_and_defaults_are_the_original_s() -> None:
    function, change = outer(10)
    made = build(read(function), read(function).definition, None)
    assert made(1) == function(1) == 18
    change(20)
    assert made(1, z=0) == function(1, z=0) == 24


def wrapped(function: Any) -> Any:
    def inner(*args: Any) -> Any:
        return function(*args)

    inner.__wrapped__ = function  # type: ignore[attr-defined]
    return inner


class Wrapped(models.Empty):
    forward = wrapped(models.Empty.forward)


class Private(models.Base):
    __secret = 1

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            y.index_add_(0, token, expert(x[token]) * weights[token, slot, None] * self.__secret)
        return y


@pytest.mark.parametrize(
    ("style", "words"),
    [(Wrapped, "wrapped by a decorator that may do anything"), (Private, "private to its class")],
)
def test_what_is_more_than_its_source_is_refused(style: type[nn.Module], words: str) -> None:
    loops = Loops(style())
    with loops.in_place():
        pass
    assert words in loops.take_refused()[0].reason


def test_without_source_it_is_refused_by_name() -> None:
    space: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "Base": models.Base, "__name__": "nowhere"}
    source = inspect.getsource(models.Empty)
    exec(compile(source, "<nowhere>", "exec"), space)
    linecache.clearcache()
    loops = Loops(space["Empty"]())
    with loops.in_place():
        pass
    (refused,) = loops.take_refused()
    assert "its source can't be read" in refused.reason
    with pytest.raises(RefusedError, match="no Python function"):
        parse(len)
