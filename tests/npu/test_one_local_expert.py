"""Ranks that hold one expert each: its tensors have a dimension of size one for it, and so no axis."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse
import tests.npu.ready  # noqa: F401  (before the operators: a spawned process begins here)
from moefuse.patterns.engine import lift
from moefuse.testing import capture_graph, npu_reference_kernels
from tests.comm.ranks import run_ranks, values
from tests.npu import shells
from tests.npu.sequences import K
from tests.npu.shells import MLPS, RANK, WORLD
from tests.npu.test_shells import LOOP, T, by_slots, off, operands

E = WORLD
"""Each rank has one, and K is 2: every token goes to both."""


def arranged(patch: pytest.MonkeyPatch, rank: int) -> None:
    """The shells as rank `rank` of two with an expert each runs them."""
    for name, what in {"E": E, "LOCAL": 1, "RANK": rank, "FIRST": rank}.items():
        patch.setattr(shells, name, what)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    arranged(monkeypatch, RANK)
    with shells.grouped():
        yield


def of_two(scheme: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """x, logits and both experts."""
    x, logits, *tensors = operands(scheme, E)
    return x, logits[:, :E].clone(), tensors


def captured(layer: Any, scheme: str, held: slice = slice(RANK, RANK + 1)) -> Any:
    x, logits, tensors = of_two(scheme)
    arguments = (x, logits, *(tensor[held].clone() for tensor in tensors))
    return capture_graph(partial(layer, scheme=scheme), arguments)


@pytest.mark.parametrize("scheme", MLPS)
@pytest.mark.parametrize(
    "shell", ["MC2", "ALLTOALL, quantised rows travel", "ALLTOALL of vllm-ascend"], ids=str
)
def test_it_is_one_layer_over_ranks(shell: str, scheme: str, group: None) -> None:
    (site,) = lift(captured(shells.SHELLS[shell], scheme).graph_module.graph).sites
    assert site.layer.ranks is not None
    assert (site.layer.ranks.world, site.layer.ranks.rank, site.layer.ranks.experts) == (WORLD, RANK, 1)
    assert (site.spec.num_experts, site.spec.top_k) == (E, K)
    assert site.spec.quant == ("none" if scheme == "bf16" else scheme)


@pytest.mark.parametrize("scheme", MLPS)
def test_a_part_of_all_tokens_slots(scheme: str, group: None) -> None:
    """Of all experts the operator takes the one that is here; the others' slots add nothing."""
    graph = captured(shells.allgather, scheme)
    want = graph.graph_module(*graph.inputs)[0]
    fused = moefuse.fuse(graph.graph_module, options={"target": "reference"})
    assert fused.report.fused == 1
    got = fused.graph_module(*graph.inputs)[0]
    assert off(got, want) < 1e-2  # bfloat16, rounded in other places


@pytest.mark.parametrize("scheme", MLPS)
def test_a_dimension_that_memory_does_not_have_first(scheme: str, group: None) -> None:
    """One expert's tensors [K, N], a dimension before them: the node takes those of experts as they lie."""

    def layer(x: Tensor, logits: Tensor, *tensors: Tensor, scheme: str) -> Tensor:
        return shells.mc2(x, logits, *(tensor[RANK].unsqueeze(0) for tensor in tensors), scheme=scheme)

    lifted = lift(captured(layer, scheme, slice(None)).graph_module.graph)
    assert not lifted.sites
    assert any("offsets for 1 experts, weights for 1" in loss.reason for loss in lifted.losses.values())


TOGETHER = (
    ("MC2", "bf16"),
    ("MC2", "w4a8"),
    ("ALLTOALL, quantised rows travel", "w8a8"),
    ("MC2", "mxfp8"),
)


def two_ranks(rank: int, world: int) -> list[tuple[int, float, float]]:
    """How many layers of each compiled program are fused, how far off the operators' own result and a loop it is."""
    npu_reference_kernels.install()
    found = []
    with pytest.MonkeyPatch.context() as patch:
        arranged(patch, rank)
        patch.setattr(shells, "GROUP", shells.group_name())
        for shell, scheme in TOGETHER:
            layer = partial(shells.SHELLS[shell], scheme=scheme)
            x, logits, tensors = of_two(scheme)
            mine = (x + rank, logits.roll(rank, 1))
            arguments = (*mine, *(tensor[rank : rank + 1].clone() for tensor in tensors))
            torch._dynamo.reset()
            options = {"inner": "eager", "target": "reference", "ep_max_tokens": T}
            with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
                want = layer(*arguments)
                got = torch.compile(layer, backend="moefuse", options=options, fullgraph=True)(*arguments)
            loop = by_slots(scheme, *mine, *tensors)
            found.append((moefuse.reports()[-1].fused, off(got, want), off(got, loop)))
    return found


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="the ranks have no emulated runtime")
def test_two_ranks_fuse_it() -> None:
    for found in values(run_ranks(2, two_ranks)):
        for (shell, scheme), (fused, unfused, loop) in zip(TOGETHER, found, strict=True):
            assert fused == 1, (shell, scheme)
            assert unfused < 1e-2, (shell, scheme)  # bfloat16, rounded in other places
            # float8 is rounded to four bits, of bfloat16 rounded before
            assert loop < 1.5 * LOOP, (shell, scheme)
