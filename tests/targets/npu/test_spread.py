"""Layers whose rows travel between ranks, on the npu target: judged whole, with contexts of the target's own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn import functional

from moefuse import policy, targets
from moefuse.comm import Capacity, ContextError
from moefuse.graph.capture import capture
from moefuse.ops.ep_context import provide
from moefuse.ops.spec import MoeSpec
from moefuse.options import Options
from moefuse.passes import pipeline
from moefuse.passes.pipeline import FuseResult
from moefuse.policy.spread import Terms
from moefuse.report.model import GraphReport, Report
from moefuse.targets.base import Opened
from moefuse.targets.cpu import CpuTarget
from moefuse.targets.npu import Sizes
from moefuse.targets.npu import target as module
from moefuse.targets.npu.target import NpuTarget
from tests.targets.npu.computing import fake

W, E, K, H, I = 2, 4, 2, 1024, 1024  # noqa: E741
BF16 = torch.bfloat16
SPEC = MoeSpec(
    E, K, H, I, H, "npu:0", BF16, BF16, torch.float32, BF16, ep_world_size=W, ids_checked=True,
    transpose_weight1=False, transpose_weight2=False,
)  # fmt: skip


@pytest.fixture
def target(tmp_path: Path) -> Iterator[NpuTarget]:
    machine, before = fake(tmp_path, "R6").machine, targets.get("npu")
    made = NpuTarget(lambda: machine, lambda _: 0)
    targets.register(made)
    yield made
    targets.register(before)


@pytest.fixture
def group() -> Iterator[None]:
    """Two ranks, of which this process is the first; the other is one of torch's fake ones."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=W)
    yield
    dist.destroy_process_group()


class Layer(nn.Module):
    """Slots sorted by expert and sent to the ranks that hold the experts, as an engine writes it in plain torch."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(H, E))
        self.w1 = nn.Parameter(torch.zeros(E // W, H, 2 * I, dtype=BF16))
        self.w2 = nn.Parameter(torch.zeros(E // W, *((H, I) if transposed else (I, H)), dtype=BF16))
        self.transposed = transposed

    def exchange(self, rows: Tensor, received: Any, sent: Any) -> Tensor:
        return funcol.all_to_all_single(rows, received, sent, torch.distributed.group.WORLD)

    def counted(self, ranks: Tensor) -> Tensor:
        return functional.one_hot(ranks, W).sum(0)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (x.float() @ self.gate).softmax(-1).topk(K, -1)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        experts = flat[order]
        counts = self.counted(experts // (E // W))
        sent, received = counts.tolist(), self.exchange(counts, None, None).tolist()
        here = self.exchange(experts, received, sent) % (E // W)
        rows = self.exchange(x[order // K], received, sent)
        w2 = self.w2.mT if self.transposed else self.w2
        gate, up = torch.bmm(rows.unsqueeze(1), self.w1[here]).squeeze(1).chunk(2, -1)
        rows = torch.bmm((functional.silu(gate) * up).unsqueeze(1), w2[here]).squeeze(1)
        rows = self.exchange(rows, sent, received) * weights.to(x.dtype).flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // K, rows)


class _Enough(Exception):
    """The graph is there; the program needn't run."""


def planned(model: nn.Module, **options: Any) -> FuseResult:
    found: list[FuseResult] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        captured = capture(gm, inputs)
        parsed = Options.parse({"target": "npu"} | options)
        found.append(pipeline.run(captured.graph_module, captured.parameters, parsed, training=False))
        raise _Enough

    flags = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(flags), pytest.raises(Exception, match="_Enough"):
        torch.compile(model, backend=backend, fullgraph=True, dynamic=True)(torch.randn(7, H).bfloat16())
    return found[0]


def test_rows_that_travel_become_one_node_of_the_target(target: NpuTarget, group: None) -> None:
    result = planned(Layer())
    (layer,) = result.layers
    assert layer.fused, layer.reason
    names = [str(node.target) for node in result.graph_module.graph.nodes]
    assert (names.count("moefuse.mega_moe.ep"), sum("_c10d" in name for name in names)) == (1, 0)
    assert result.calls[0].kwargs["target"] == "npu"


def test_the_target_judges_the_whole_layer(target: NpuTarget, group: None) -> None:
    (layer,) = planned(Layer(transposed=True)).layers
    assert (layer.fused, layer.check) == (False, "weight_layout")
    terms = Terms("0", "", 512)
    decision = policy.decide_spread(SPEC, terms)
    assert (decision.target, decision.ok) == ("npu", True)
    assert policy.decide_spread(replace(SPEC, ep_world_size=4), terms).ok
    refused = policy.decide_spread(replace(SPEC, ep_world_size=1), terms)
    assert refused.verdict.check == "ep_world_size"
    crowded = policy.decide_spread(SPEC, Terms("0", "", 8192))
    assert (crowded.verdict.check, crowded.verdict.facts["conditions"].num_max_tokens_per_rank) == (
        "tokens_per_rank",
        8192,
    )


def test_the_report_names_the_memory_of_copies(target: NpuTarget, group: None) -> None:
    target.tell(copy_weights=True)
    result = planned(Layer(transposed=True))
    (layer,) = result.layers
    # the second weight of this rank's experts
    assert (layer.fused, layer.copied) == (True, E // W * H * I * 2)
    report = Report((GraphReport(0, (layer,)),))
    assert "copies of its weights, made once: up to 4.0 MiB" in str(report)
    quantised = replace(SPEC, quant="w4a8", expert_dtype=torch.int32, has_bias1=True, has_bias2=True)
    channels = E // W * (2 * I + H)
    values = E // W * 3 * H * I
    assert target.copied_bytes(quantised) == values // 2 + channels * (8 + 4)
    target.tell(copy_weights=True, weights_cast=True)
    assert target.copied_bytes(quantised) == channels * (8 + 4)
    target.tell()
    assert target.copied_bytes(quantised) == 0
    assert CpuTarget().copied_bytes(quantised) == 0


def test_its_contexts_are_the_vendors(target: NpuTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def opened(group: Any, sizes: Sizes, *, intermediate: int) -> Any:
        asked.append((group, sizes, intermediate))
        return type("Made", (), {"tensor": torch.arange(8), "ccl_buffer_size": 300 << 20})

    monkeypatch.setattr(module, "npu_context_for", opened)
    capacity = Capacity(W, E, K, H, H, 512, BF16)
    made = target.open_context("group", capacity, SPEC)
    assert made[1:] == ("aclnnMegaMoe", 300 << 20)
    assert asked == [("group", Sizes(W, E, K, H, 512), I)]
    provide("of the target", made.tensor)
    assert torch.ops.moefuse.ep_context("of the target").equal(made.tensor)
    with pytest.raises(ContextError, match="target 'cpu' has no contexts of its own"):
        CpuTarget().open_context("group", capacity, SPEC)
    assert isinstance(made, Opened)
