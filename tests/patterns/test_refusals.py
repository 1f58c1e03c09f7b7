"""Each refusal as a user sees it: the reason, the node and the line of the model at which the meaning was lost.

Every function below is a layer with one thing wrong. The comment `# lost: ...` stands on the line to blame and
holds the words of the reason.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import moefuse
from tests.patterns.spelling import (
    E,
    H,
    K,
    S,
    T,
    ffn,
    gathered,
    nodes_named,
    offsets,
    operands,
    slot_rows,
    sorted_rows,
    swiglu,
)

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

CASES: list[Layer] = []


def case(function: Layer) -> Layer:
    CASES.append(function)
    return function


@case
def mean_of_the_slots(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    rows = slot_rows(x, ids, w1, w2) * w.unsqueeze(-1)
    return rows.mean(1)  # lost: expert rows are reduced by mean, not by a sum


@case
def maximum_of_the_slots(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    rows = slot_rows(x, ids, w1, w2) * w.unsqueeze(-1)
    return rows.amax(1)  # lost: expert rows are reduced by amax, not by a sum


@case
def some_of_the_slots(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    rows = slot_rows(x, ids, w1, w2) * w.unsqueeze(-1)
    return rows[:, :1].sum(1)  # lost: only a part of the ids


@case
def permutation_for_its_inverse(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    rows, perm = sorted_rows(x, ids, w1, w2)
    back = rows[perm]  # lost: rows in sorted order are taken by the permutation itself, not by its inverse
    return (back.view(T, K, H) * w.unsqueeze(-1)).sum(1)


@case
def inverse_of_another_sort(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    rows, _ = sorted_rows(x, ids, w1, w2)
    other = ids.flip(0).reshape(-1).argsort().argsort()
    back = rows[other]  # lost: meet rows in the order of
    return (back.view(T, K, H) * w.unsqueeze(-1)).sum(1)


@case
def slots_per_token_off_by_one(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    perm = ids.reshape(-1).argsort()
    token = perm // (K + 1)  # lost: divided by 3, which is not the number of slots per token
    rows = ffn(x[token], offsets(ids.reshape(-1)), w1, w2)
    return (rows[perm.argsort()].view(T, K, H) * w.unsqueeze(-1)).sum(1)


@case
def offsets_of_other_ids(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    perm = ids.reshape(-1).argsort()
    offs = offsets(ids.reshape(-1) % 3)
    h1 = torch._grouped_mm(x[perm // K], w1.transpose(1, 2), offs)  # lost: not the same ids
    rows = torch._grouped_mm(swiglu(h1), w2.transpose(1, 2), offs)
    return (rows[perm.argsort()].view(T, K, H) * w.unsqueeze(-1)).sum(1)


@case
def bins_that_are_not_the_ids(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    flat = ids.reshape(-1)
    counts = torch.histc(flat.float(), E, 0, 5)  # lost: histc with 4 bins over 0..5 doesn't count
    perm = flat.argsort()
    rows = ffn(x[perm // K], counts.cumsum(0, dtype=torch.int32), w1, w2)
    return (rows[perm.argsort()].view(T, K, H) * w.unsqueeze(-1)).sum(1)


@case
def rows_in_slot_order(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    offs = offsets(ids.reshape(-1))
    rows = x.repeat_interleave(K, 0)
    h1 = torch._grouped_mm(rows, w1.transpose(1, 2), offs)  # lost: not in the order of a sort by expert
    return (torch._grouped_mm(swiglu(h1), w2.transpose(1, 2), offs).view(T, K, H) * w.unsqueeze(-1)).sum(1)


@case
def expert_choice(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Each expert takes the three tokens that suit it best."""
    values, token = torch.einsum("th,eh->te", x, w1[:, 0]).topk(3, dim=0)
    h1 = torch.bmm(x[token.t()], w1.transpose(1, 2))
    rows = torch.bmm(swiglu(h1), w2.transpose(1, 2)) * values.t().unsqueeze(-1)
    token, rows = token.t().reshape(-1), rows.view(-1, H)
    return torch.zeros_like(x).index_add(0, token, rows)  # lost: expert-choice routing


@case
def expert_choice_slot_by_slot(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    values, token = torch.einsum("th,eh->te", x, w1[:, 0]).topk(3, dim=0)
    chosen = (token * 0 + torch.arange(E)).reshape(-1)
    h1 = torch.bmm(w1[chosen], x[token.reshape(-1)].unsqueeze(-1)).squeeze(-1)
    rows = torch.bmm(w2[chosen], swiglu(h1).unsqueeze(-1)).squeeze(-1) * values.reshape(-1, 1)
    return torch.zeros_like(x).index_add(0, token.reshape(-1), rows)  # lost: expert-choice routing


@case
def overwriting_tokens(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    rows, perm = sorted_rows(x, ids, w1, w2)
    return torch.zeros_like(x).index_put((perm // K,), rows)  # lost: no complete permutation of the slots


@case
def scattered_by_maximum(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    rows, perm = sorted_rows(x, ids, w1, w2)
    index = (perm // K).unsqueeze(1).expand(-1, H)
    return torch.zeros_like(x).scatter_reduce(0, index, rows, "amax")  # lost: scatter_reduce('amax')


@case
def capacity_of_the_experts(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Rows of the first slots only."""
    rows, perm = sorted_rows(x, ids, w1, w2)
    kept = rows[: S - 2]  # lost: rows in sorted order are sliced
    return torch.zeros_like(x).index_add(0, perm[: S - 2] // K, kept)


@case
def a_norm_before_the_sum(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    rows = slot_rows(x, ids, w1, w2)
    rows = functional.softmax(rows, -1)  # lost: no rule says what aten::_softmax of expert outputs
    return (rows * w.unsqueeze(-1)).sum(1)


@case
def gemms_of_different_dtypes(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    chosen = w1[ids].float()
    h1 = torch.einsum("th,tkoh->tko", x.float(), chosen).bfloat16()
    rows = torch.einsum("tki,tkoi->tko", swiglu(h1), w2[ids])
    return (rows * w.unsqueeze(-1)).sum(1)  # lost: the expert GEMMs run in different dtypes


@case
def two_routings(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h1 = torch.einsum("th,tkoh->tko", x, w1[ids])
    rows = torch.einsum("tki,tkoi->tko", swiglu(h1), w2[ids.flip(0)])
    return (rows * w.unsqueeze(-1)).sum(1)  # lost: is selected by other ids than the rest of the layer


@case
def weights_at_two_places(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h1 = torch.einsum("th,tkoh->tko", x, w1[ids])
    rows = torch.einsum("tki,tkoi->tko", swiglu(h1) * w.unsqueeze(-1), w2[ids])
    return (rows * w.unsqueeze(-1)).sum(1)  # lost: routing weights at several places of the layer


@case
def a_tensor_besides_in_the_activation(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h1 = torch.einsum("th,tkoh->tko", x, w1[ids])
    rows = torch.einsum("tki,tkoi->tko", swiglu(h1 + w1[0, :, 0]), w2[ids])
    return (rows * w.unsqueeze(-1)).sum(1)  # lost: a tensor besides the first GEMM's output


@case
def ids_that_may_repeat(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    scores = torch.zeros(T, E, dtype=x.dtype).scatter(1, ids, w).t().unsqueeze(-1)
    h1 = torch.bmm(x.expand(E, T, H) * scores, w1.transpose(1, 2))
    return torch.bmm(swiglu(h1), w2.transpose(1, 2)).sum(0)  # lost: ids may repeat within a token


@case
def unchosen_experts_count(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    chosen = torch.einsum("th,eh->te", x, w1[:, 0]).topk(K)[1]
    scores = torch.full((T, E), 0.1, dtype=x.dtype).scatter(1, chosen, w).t().unsqueeze(-1)
    h1 = torch.bmm(x.expand(E, T, H) * scores, w1.transpose(1, 2))
    return torch.bmm(swiglu(h1), w2.transpose(1, 2)).sum(0)  # lost: were not chosen add something


@case
def all_experts_summed_over_the_tokens(x: Tensor, ids: Tensor, w: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    chosen = torch.einsum("th,eh->te", x, w1[:, 0]).topk(K)[1]
    scores = torch.zeros(T, E, dtype=x.dtype).scatter(1, chosen, w).t().unsqueeze(-1)
    rows = torch.bmm(swiglu(torch.bmm(x.expand(E, T, H), w1.transpose(1, 2))), w2.transpose(1, 2)) * scores
    return rows.sum(1)  # lost: rows of all experts are not summed over exactly the experts


def to_blame(function: Layer) -> tuple[int, str]:
    """(the line with the comment, its words)."""
    lines, start = inspect.getsourcelines(function)
    found = [
        (start + i, match[1]) for i, line in enumerate(lines) if (match := re.search("# lost: (.*)", line))
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_refusal_names_reason_node_and_line(function: Layer) -> None:
    line, words = to_blame(function)
    captured: list[set[str]] = []
    report = _explain(function, captured)
    assert report.fused == 0
    assert report.graphs[0].error == ""
    first, *rest = report.sites
    assert words in first.reason
    assert first.check == "lift"
    assert (Path(first.source.rpartition(":")[0]).name, first.source.rpartition(":")[2]) == (
        Path(__file__).name,
        str(line),
    )
    (names,) = captured
    assert {first.node, *nodes_named(first.reason)} <= names
    assert not rest, [site.reason for site in rest]


def test_the_layer_without_a_fault_fuses() -> None:
    """What the cases have in common is no reason for a refusal."""
    report = _explain(gathered, [])
    assert [site.fused for site in report.sites] == [True]


def _explain(function: Callable[..., Tensor], captured: list[set[str]]) -> moefuse.Report:
    """What the backend says, and the names of the nodes that it looked at."""
    from moefuse.passes import pipeline

    run = pipeline.run

    def look(gm: torch.fx.GraphModule, *args: object, **kwargs: object) -> object:
        captured.append({node.name for node in gm.graph.nodes})
        return run(gm, *args, **kwargs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "run", look)
        x, ids, w, *weights = operands()
        parameters = [torch.nn.Parameter(weight, requires_grad=False) for weight in weights]
        return moefuse.explain(function, x, ids, w, *parameters)
