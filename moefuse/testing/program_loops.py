"""Spellings of a `Program` that run the experts one by one in Python.

In: the rows, ids and row factors that `ProgramModule` made. Out: y [T, H] and the interior rows (the outputs of the
experts, of the last one where there is no tensor with all of them).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from moefuse.testing.programs import Program

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""The expert GEMM of a dispatch: (rows, weight [E, ., .], bias [E, .] or None) -> rows."""

Experts = Callable[[Tensor, Tensor | None, Linear], Tensor]
"""Both GEMMs and the activation: (rows, row factor or None, the GEMM) -> rows."""


def own_linear(program: "Program", expert: int) -> Linear:
    """One expert's GEMM, with its own slice of the stacked weights."""

    def linear(value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        own = weight[expert] if program.out_features_first else weight[expert].t()
        return functional.linear(value, own, None if bias is None else bias[expert])

    return linear


def by_pieces(
    program: "Program", rows: Tensor, factor: Tensor | None, counts: Tensor, experts: Experts
) -> Tensor:
    """Sorted rows [S, H] cut into one piece per expert, each computed, and put together again."""
    numbers = cast("list[int]", [count.item() for count in counts.long().unbind()])
    cut = _slices if program.cut == "slices" else _ends if program.cut == "ends" else torch.split
    if program.trap == "shifted_cut":
        numbers = [*numbers[1:], numbers[0]]
    pieces = cut(rows, numbers)
    factors = [None] * len(numbers) if factor is None else cut(factor, numbers)
    order = list(range(len(numbers)))
    if program.trap == "swapped_weights":
        order[0], order[-1] = order[-1], order[0]
    outs = [
        experts(piece, own, own_linear(program, expert))
        for piece, own, expert in zip(pieces, factors, order, strict=True)
    ]
    if program.trap == "swapped_pieces":
        outs[0], outs[-1] = outs[-1], outs[0]
    return torch.cat(outs)


def _slices(rows: Tensor, numbers: list[int]) -> list[Tensor]:
    """Running start and end."""
    start, pieces = 0, []
    for number in numbers:
        pieces.append(rows[start : start + number])
        start = start + number
    return pieces


def _ends(rows: Tensor, numbers: list[int]) -> list[Tensor]:
    """All bounds first."""
    bounds = [sum(numbers[:i]) for i in range(len(numbers) + 1)]
    return [rows[bounds[i] : bounds[i + 1]] for i in range(len(numbers))]


def by_where(
    program: "Program", x: Tensor, ids: Tensor, factor: Tensor | None, experts: Experts
) -> tuple[Tensor, Tensor]:
    """For each expert: the slots that chose it, added to their tokens."""
    y = torch.zeros(x.shape, dtype=x.dtype)
    rows = x
    for e in range(program.sizes.experts):
        if program.trap == "skipped_expert" and e == 1:
            continue
        slot, token = _where(program, ids, e)
        own = None if factor is None else factor[token, slot]
        rows = experts(x[token], own, own_linear(program, e)).to(y.dtype)
        if program.combine == "index_add":
            y = y.index_add(0, token, rows)
        elif program.combine == "put_accumulate":
            y = y.index_put((token,), rows, accumulate=True)
        else:
            y[token] += rows
        if program.trap == "twice" and e == 0:
            y = y.index_add(0, token, rows)
    return y, rows


def _where(program: "Program", ids: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """(slot, token) of what chose the expert."""
    if program.token_index == "floor_divide":
        token, slot = torch.where(ids == expert)
        return slot, token
    if program.token_index == "arange":
        masks = (ids.unsqueeze(-1) == torch.arange(program.sizes.experts)).permute(2, 0, 1)
        token, slot = torch.where(masks[expert])
        return slot, token
    masks = functional.one_hot(ids.long(), program.sizes.experts).permute(2, 1, 0)
    slot, token = torch.where(masks[expert])
    return slot, token


def on_every_token(
    program: "Program", x: Tensor, ids: Tensor, factor: Tensor | None, experts: Experts
) -> tuple[Tensor, Tensor]:
    """Each expert runs on every token; its output is multiplied by the token's score for it."""
    values = torch.ones(ids.shape, dtype=program.dtype) if factor is None else factor
    total: Tensor | None = None
    rows = x
    for e in range(program.sizes.experts):
        score = (values * (ids == e)).sum(-1, keepdim=True)
        rows = experts(x, None, own_linear(program, e))
        if program.trap != "skipped_expert" or e != 1:
            own = rows * score.to(rows.dtype)
            total = own if total is None else total + own
    assert total is not None
    return total, rows


def by_map(
    program: "Program", x: Tensor, ids: Tensor, factor: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Megatron's permutation: each row's token [S] and factor [S], expert by expert; the counts [E]."""
    tokens, count = x.shape[0], program.sizes.experts
    zeros = torch.zeros(tokens, count, dtype=x.dtype if factor is None else factor.dtype)
    chosen = torch.zeros_like(zeros).int().scatter(1, ids.long(), 1).bool()
    mask = chosen.t().contiguous()
    token = torch.arange(tokens).unsqueeze(0).expand(count, -1).masked_select(mask)
    own: Tensor | None = None
    if factor is not None:
        scores = zeros.scatter(1, ids.long(), factor)
        by_expert = scores.t().contiguous().masked_select(mask)
        own = scores.masked_select(chosen) if program.trap == "other_order" else by_expert
    return token, own, chosen.sum(0)
