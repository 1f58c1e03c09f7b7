"""What rewritten loops call.

In: the values that the loop met. Out: outside of a trace the very thing that the original code would have had, so
that rewritten code run by Python means what was written; while Dynamo traces, a straight line with markers
(`moefuse.ops.loop_markers`).

Dynamo may also meet these functions alone, where it has left a loop to Python: there is no token then, and no markers.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

import moefuse.ops.loop_markers  # noqa: F401  registers the operators

RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


CONSTANTS = (torch.Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)


class NeverError(Exception):
    """Raised in a traced iteration that no run can reach: there are no weights for its expert."""


class Row:
    """One element of a list whose length depends on data, as a number that is known while tracing.

    dims: how many dimensions (of one element each) the tensor has that it stands for. It knows what code does with
    an expert's number and nothing else: any other use fails, and the loop stays as it was written.
    """

    def __init__(self, number: int, dims: int) -> None:
        self.number = number
        self.dims = dims

    def __getitem__(self, index: int) -> "Row":
        if index != 0 or not self.dims:
            raise IndexError(index)
        return Row(self.number, self.dims - 1)

    def item(self) -> int:
        """The number."""
        return self.number

    def squeeze(self, *dims: int) -> "Row":
        """Without dimensions."""
        return Row(self.number, 0)

    def __eq__(self, other: object) -> bool:
        return self.number == other

    def __ne__(self, other: object) -> bool:
        return self.number != other

    def __lt__(self, other: int) -> bool:
        return self.number < other

    def __le__(self, other: int) -> bool:
        return self.number <= other

    def __gt__(self, other: int) -> bool:
        return self.number > other

    def __ge__(self, other: int) -> bool:
        return self.number >= other

    __hash__ = None  # type: ignore[assignment]


def loop(number: int) -> Any:
    """The token of a loop that begins."""
    return torch.ops.moefuse.loop(number) if torch.compiler.is_compiling() else None


def step(token: Any) -> None:
    """The next iteration begins."""
    if token is not None and torch.compiler.is_compiling():
        torch.ops.moefuse.step(token)


def end(token: Any) -> None:
    """The loop is over."""
    if token is not None and torch.compiler.is_compiling():
        torch.ops.moefuse.end(token)


def result(token: Any, value: Any) -> Any:
    """What leaves the loop by this name."""
    if token is None or not torch.compiler.is_compiling():
        return value
    if isinstance(value, torch.Tensor):
        return torch.ops.moefuse.result(token, value)
    torch.ops.moefuse.never(token)  # behind the loop there is no iteration: this is never proved
    return value


def seen(token: Any, changed: tuple[Any, ...], read: tuple[Any, ...]) -> None:
    """What iterations find: tensors and constants, or lists of them; what they change in place is no list."""
    if token is None or not torch.compiler.is_compiling():
        return
    known = all(isinstance(value, CONSTANTS) for value in changed)
    for value in read:
        parts = value if isinstance(value, list | tuple) else (value,)
        for part in parts:
            known = known and isinstance(part, (*CONSTANTS, tuple, range))
    if not known:
        torch.ops.moefuse.never(token)  # in front of the loop there is no iteration: this is never proved


def filled(token: Any, values: list[Any], test: Any, instead: Any = None) -> Any:
    """What a test says of a list that the loop appends to, where the data decide whether anything is in it.

    instead: what the program has where the `cat` of the list would be, if it is empty.
    """
    if token is not None and torch.compiler.is_compiling() and values:
        torch.ops.moefuse.filled(token, instead)
    return test


def rows(token: Any, values: Any) -> Any:
    """What `for row in values` runs over."""
    if token is None or not torch.compiler.is_compiling() or not _depends_on_data(values):
        return values
    return [Row(i, values.dim() - 1) for i in range(torch.ops.moefuse.every(token, values).shape[0])]


def numbers(token: Any, values: Any) -> Any:
    """What `for number in values.tolist()` runs over."""
    if token is None or not torch.compiler.is_compiling() or not _depends_on_data(values):
        return values.tolist()
    if values.dim() != 1:
        raise TypeError("a loop over nested lists")
    return list(range(torch.ops.moefuse.every(token, values).shape[0]))


def _depends_on_data(values: Any) -> bool:
    if not isinstance(values, torch.Tensor) or not values.dim():
        return False
    # Undecided in both ways: no guard can tell, so the length is known only when the graph runs.
    return guard_or_true(values.shape[0] == 0) != guard_or_false(values.shape[0] == 0)


def take(base: Any, index: Any) -> Any:
    """`base[index]`, where the index is an expert's number."""
    if not isinstance(index, Row):
        if torch.compiler.is_compiling() and isinstance(index, int) and index >= len(base):
            raise NeverError
        return base[index]
    if len(base) <= index.number:
        raise NeverError
    if isinstance(base, torch.Tensor) and index.dims == 1:
        return base[index.number : index.number + 1]
    return base[index.number]


def never(token: Any) -> None:
    """This iteration can't happen."""
    torch.ops.moefuse.never(token)


def bincount(number: int, ids: Any, length: Any) -> Any:
    """torch.bincount(ids, minlength=length), which is longer only for ids beyond."""
    if not torch.compiler.is_compiling() or not isinstance(length, int):
        return torch.bincount(ids, minlength=length)
    torch.ops.moefuse.within(number, ids, length)
    return (ids.unsqueeze(-1) == torch.arange(length, device=ids.device)).sum(0)


def integer(value: Any) -> Any:
    """`int(value)`."""
    return value.item() if isinstance(value, Row) else int(value)


def formatted(value: Any) -> Any:
    """`{value}` in an f-string: a tensor without dimensions is written as its number."""
    return value.number if isinstance(value, Row) and not value.dims else value


def plain(values: Any) -> Iterable[Any]:
    """values.cpu().numpy(), iterated over: a list of numbers while Dynamo traces."""
    listed = torch.compiler.is_compiling() and values.dim() == 1
    return values.tolist() if listed else values.cpu().numpy()  # type: ignore[no-any-return]


def skips(token: Any, left: Any, relation: str, right: Any) -> Any:
    """`left relation right`, on which an iteration is left; False where only the data can tell."""
    if token is None or not torch.compiler.is_compiling():
        return RELATIONS[relation](left, right)
    if isinstance(left, torch.Tensor) and isinstance(right, int):
        torch.ops.moefuse.assume(token, left, relation, right)
        return False
    test = RELATIONS[relation](left, right)
    if not isinstance(left, int) or guard_or_true(test) == guard_or_false(test):
        return test
    torch.ops.moefuse.assume_size(token, left, relation, right)
    return False
