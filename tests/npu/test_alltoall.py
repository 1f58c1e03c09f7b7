"""Rows that travel by all_to_all_single around Ascend's operators: one layer over ranks, or refused by its name."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

import moefuse
import tests.npu.ready  # noqa: F401  (before the operators: a spawned process begins here)
from moefuse.patterns.axes import Ranks
from moefuse.patterns.engine import lift
from moefuse.testing import npu_reference_kernels
from tests.comm.ranks import run_ranks, values
from tests.npu import shells
from tests.npu.quant_sequences import FLOAT32, INT32, Weights, gmm
from tests.npu.sequences import E, K, npu, route
from tests.npu.shells import LOCAL, MLPS, RANK, WORLD, exchange, histogram, lengths
from tests.npu.test_shells import LOOP, T, by_slots, captured, off, operands, why


@pytest.fixture
def group() -> Iterator[None]:
    with shells.grouped():
        yield


SPELLINGS = [name for name in shells.SHELLS if name.startswith("ALLTOALL")]


@pytest.mark.parametrize("scheme", MLPS)
@pytest.mark.parametrize("shell", SPELLINGS)
def test_it_is_one_layer_over_ranks(shell: str, scheme: str, group: None) -> None:
    (site,) = lift(captured(shells.SHELLS[shell], scheme).graph).sites
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    assert site.layer.ranks == Ranks(name, WORLD, RANK, LOCAL)
    assert (site.spec.num_experts, site.spec.top_k, site.spec.ids_checked) == (E, K, True)
    assert site.spec.quant == ("none" if scheme == "bf16" else scheme)


def in_float32(rows: Tensor, scales: Tensor | None, counts: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    """w8a8 whose second product is float32, and so are the rows that go back."""
    w = Weights(*tensors)
    h = gmm(rows, w.w13, counts, output_dtype=INT32)
    a, a_scales = npu.npu_dequant_swiglu_quant(
        h, weight_scale=w.s13, activation_scale=scales, group_index=counts, activate_left=True, quant_mode=1
    )
    return gmm(a, w.w2, counts, scale=[w.s2], per_token_scale=[a_scales], output_dtype=FLOAT32)


TOGETHER = (
    ("ALLTOALL", "bf16"),
    ("ALLTOALL, quantised rows travel", "w8a8"),
    ("ALLTOALL of vllm-ascend", "w4a8"),
)


def two_ranks(rank: int, world: int) -> list[tuple[int, float, float]]:
    """How many layers of each compiled program are fused, how far off the operators' own result and a loop it is."""
    npu_reference_kernels.install()
    shells.RANK, shells.FIRST = rank, rank * LOCAL
    own = slice(shells.FIRST, shells.FIRST + LOCAL)
    options = {"inner": "eager", "target": "reference", "ep_max_tokens": T}
    found = []
    for shell, scheme in (*TOGETHER, ("ALLTOALL, quantised rows travel", "w8a8")):
        layer = partial(shells.SHELLS[shell], scheme=scheme)
        if len(found) == len(TOGETHER):
            MLPS["w8a8"] = in_float32  # in this process, which ends here
        x, logits, *tensors = operands(scheme, E)
        arguments = (x + rank, logits.roll(rank, 1), *(tensor[own] for tensor in tensors))
        torch._dynamo.reset()
        with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
            want = layer(*arguments)
            got = torch.compile(layer, backend="moefuse", options=options, fullgraph=True)(*arguments)
        loop = by_slots(scheme, *arguments[:2], *tensors)
        found.append((moefuse.reports()[-1].fused, off(got, want), off(got, loop)))
    return found


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="the ranks have no emulated runtime")
def test_two_ranks_fuse_it() -> None:
    for *found, wide in values(run_ranks(2, two_ranks)):
        assert wide[0] == 1
        assert wide[1] < 1e-6  # float32 all the way; in bfloat16 it's off by 1e-3
        for (shell, scheme), (fused, unfused, loop) in zip(TOGETHER, found, strict=True):
            assert fused == 1, (shell, scheme)
            assert unfused < 1e-2, (shell, scheme)  # bfloat16, rounded in other places
            assert loop < LOOP, (shell, scheme)


# --- what isn't that layer -----------------------------------------------------------------------------------


def changed(what: str) -> Any:
    """The layer in bf16 with one thing done otherwise."""

    def layer(x: Tensor, logits: Tensor, *tensors: Tensor, scheme: str = "bf16") -> Tensor:
        def counted(ids: Tensor) -> tuple[Tensor, Tensor]:
            counts = histogram(ids)
            return counts.view(WORLD, LOCAL), exchange(counts, [LOCAL] * WORLD, [LOCAL] * WORLD).view(
                WORLD, LOCAL
            )

        routing, ids = route(logits)
        others = route(-logits)[1]
        rows, row_idx = npu.npu_moe_token_permute(x, ids // LOCAL if what == "by rank" else ids)
        runs, arrived = counted(ids)
        sent, received = lengths(runs.sum(1)), lengths(arrived.sum(1))
        rows = exchange(rows, received, sent)
        if what == "other counts":
            arrived = counted(others)[1]
        if what == "turned counts":
            arrived = arrived.t().reshape(WORLD, LOCAL)
        if what == "moved before":
            rows = rows.flip(0)
        rows, _, order, counts = npu.npu_moe_re_routing(rows, arrived)
        y = MLPS["bf16"](rows, None, counted(others)[1].sum(0) if what == "other groups" else counts, tensors)
        back = y if what == "left as it is" else y[order] if what == "twice" else y[order.argsort()]
        if what == "sorted as floats":
            back = y[order.to(torch.float32).argsort().to(torch.int32)]
        if what == "sorted as halves":
            back = y[order.to(torch.bfloat16).argsort().to(torch.int32)]
        return npu.npu_moe_token_unpermute(exchange(back, sent, received), row_idx, routing.to(x.dtype))

    return layer


OTHERWISE = {
    "by rank": "by counts that aren't those of their own ranks and experts",
    "other counts": "by counts that aren't those of their own ranks and experts",
    "turned counts": "by counts that aren't those of their own ranks and experts",
    "moved before": "how they came isn't proved",
    "other groups": "not the same ids",
    "left as it is": "neither in the order of a sort by expert nor in that of arrival",
    "twice": "",
    "sorted as halves": "rows in sorted order are taken by",
}


@pytest.mark.parametrize("what", ["nothing", "sorted as floats"])
def test_the_layer_that_is_changed_below(what: str, group: None) -> None:
    assert len(lift(captured(changed(what)).graph).sites) == 1


@pytest.mark.parametrize("what", OTHERWISE)
def test_what_is_done_otherwise_is_refused(what: str, group: None) -> None:
    assert OTHERWISE[what] in why(captured(changed(what)))


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("expert_token_num_type", 0, "with running counts"),
        ("idx_type", 1, "with the new place of each row"),
        ("tokens_dtype", 1, "with rows of another dtype"),
    ],
)
def test_an_argument_without_a_rule(argument: str, value: int, words: str, group: None) -> None:
    graph_module: GraphModule = captured(shells.alltoall)
    (node,) = graph_module.graph.find_nodes(op="call_function", target=npu.npu_moe_re_routing.default)
    node.kwargs = {**node.kwargs, argument: value}
    assert words in why(graph_module)


# --- integers and their scales that don't belong together ----------------------------------------------------


def sent_apart(what: str) -> Any:
    """Rows that travel as int8, in the spelling of vllm-ascend, with one thing done otherwise."""

    def layer(x: Tensor, logits: Tensor, *tensors: Tensor, scheme: str = "w8a8") -> Tensor:
        routing, ids = route(logits)
        others = route(-logits)[1]

        def everywhere(ids: Tensor) -> Tensor:
            name = dist.group.WORLD.group_name  # type: ignore[union-attr]
            gathered = torch.ops._c10d_functional.all_gather_into_tensor(histogram(ids), WORLD, name)
            waited: Tensor = torch.ops._c10d_functional.wait_tensor(gathered)
            return waited.view(WORLD, E)

        first = 0 if what == "counts of another rank's experts" else shells.FIRST
        arrived = everywhere(others if what == "counts of other ids" else ids)[:, first : first + LOCAL]
        if what == "counts rank by rank in a table":
            arrived = everywhere(ids).view(WORLD, WORLD, LOCAL)[:, RANK]
        sent, received = lengths(histogram(ids).view(WORLD, LOCAL).sum(-1)), lengths(arrived.sum(-1))
        rows, row_idx = npu.npu_moe_token_permute(x, ids)
        other_scales = npu.npu_dynamic_quant(rows * 2)[1]
        rows, scales = npu.npu_dynamic_quant(rows)
        if what == "scales of other rows":
            scales = other_scales
        if what == "scales in another order":
            scales = scales.flip(0)
        early = torch.repeat_interleave(arrived.reshape(-1))
        if what == "scales sent by other ids":
            sent_too = lengths(histogram(others).view(WORLD, LOCAL).sum(-1))
            scales = exchange(scales, received, sent_too)
        elif what != "scales that stay":
            scales = exchange(scales, received, sent)
        rows = exchange(rows, received, sent)
        runs = early if what == "numbers before their rows" else torch.repeat_interleave(arrived.reshape(-1))
        experts = (torch.arange(E) % LOCAL)[runs].to(torch.int32)
        rows, order, counts, scales = npu.npu_moe_init_routing_v2(
            rows,
            experts.unsqueeze(-1),
            scale=scales,
            expert_num=LOCAL + 1 if what == "one expert more" else LOCAL,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[0, LOCAL - 1] if what == "one expert less" else [0, LOCAL],
            row_idx_type=1 if what == "indices of the other kind" else 0,
        )
        if what == "the absolute value of indices":
            order = order.abs()
        y = npu.npu_moe_token_unpermute(MLPS[scheme](rows, scales, counts, tensors), order)
        return npu.npu_moe_token_unpermute(exchange(y, sent, received), row_idx, routing.to(x.dtype))

    return layer


APART = {
    "scales of other rows": "multiplied by the scales of other rows",
    "scales in another order": "is this rank's own, the other operand came from all ranks",
    "scales sent by other ids": "their pieces count",
    "scales that stay": "elements do not line up",
    "numbers before their rows": "came here in 0 orders so far, not in one",
    "counts of other ids": "count other ids than they are sorted by",
    "counts of another rank's experts": "isn't proved to be what each rank said it sends",
    "one expert less": "are sorted by the experts 0..2 of this one, which has 4",
    "indices of the other kind": "are taken by the permutation itself, not by its inverse",
}


@pytest.mark.parametrize(
    "what", ["nothing", "counts rank by rank in a table", "the absolute value of indices", "one expert more"]
)
def test_integers_and_their_scales_travel(what: str, group: None) -> None:
    (site,) = lift(captured(sent_apart(what), "w8a8").graph).sites
    assert (site.spec.quant, site.spec.ep_world_size) == ("w8a8", WORLD)


@pytest.mark.parametrize("what", APART)
def test_integers_and_scales_that_parted_are_refused(what: str, group: None) -> None:
    assert APART[what] in why(captured(sent_apart(what), "w8a8"))
