"""Rows that travel by all_to_all_single around Ascend's operators: one layer over ranks, or refused by its name."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

import moefuse
import tests.npu.ready  # noqa: F401  (before the operators: a spawned process begins here)
from moefuse.patterns.engine import lift
from moefuse.patterns.facts import Ranks
from moefuse.testing import npu_reference_kernels
from tests.comm.ranks import run_ranks, values
from tests.npu import shells
from tests.npu.sequences import E, K, npu, route
from tests.npu.shells import LOCAL, MLPS, RANK, WORLD, lengths
from tests.npu.test_shells import T, captured, operands, why


@pytest.fixture
def group() -> Iterator[None]:
    with shells.grouped():
        yield


@pytest.mark.parametrize("scheme", MLPS)
def test_it_is_one_layer_over_ranks(scheme: str, group: None) -> None:
    (site,) = lift(captured(shells.alltoall, scheme).graph).sites
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    assert site.layer.ranks == Ranks(name, WORLD, RANK, LOCAL)
    assert (site.spec.num_experts, site.spec.top_k, site.spec.ids_checked) == (E, K, True)
    assert site.spec.quant == ("none" if scheme == "bf16" else scheme)


def two_ranks(rank: int, world: int) -> tuple[int, float]:
    """How many layers of the compiled program are fused, and how far it is from the operators' own result."""
    npu_reference_kernels.install()
    x, logits, w13, w2 = operands("bf16", E)
    own = slice(rank * E // world, (rank + 1) * E // world)
    arguments = (x + rank, logits.roll(rank, 1), w13[own], w2[own])
    options = {"inner": "eager", "target": "reference", "ep_max_tokens": T}
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        want = shells.alltoall(*arguments)
        got = torch.compile(shells.alltoall, backend="moefuse", options=options, fullgraph=True)(*arguments)
    return moefuse.reports()[-1].fused, float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="the ranks have no emulated runtime")
def test_two_ranks_fuse_it() -> None:
    for fused, off in values(run_ranks(2, two_ranks)):
        assert fused == 1
        assert off < 1e-2  # bfloat16, rounded in other places


# --- what isn't that layer -----------------------------------------------------------------------------------


def changed(what: str) -> Any:
    """The layer in bf16 with one thing done otherwise."""

    def layer(x: Tensor, logits: Tensor, *tensors: Tensor, scheme: str = "bf16") -> Tensor:
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]

        def exchange(rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
            moved = torch.ops._c10d_functional.all_to_all_single(rows, received, sent, name)
            result: Tensor = torch.ops._c10d_functional.wait_tensor(moved)
            return result

        def counted(ids: Tensor) -> tuple[Tensor, Tensor]:
            counts = torch.histc(ids.float(), bins=E, min=0, max=E).to(torch.int64)
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
}


def test_the_layer_that_is_changed_below(group: None) -> None:
    assert len(lift(captured(changed("nothing")).graph).sites) == 1


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
