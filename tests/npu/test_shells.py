"""Layers whose rows travel between ranks: what is proved of them, and what is refused by its name."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import moefuse
import tests.npu.ready  # noqa: F401  (before the operators: a spawned process begins here)
from moefuse import policy
from moefuse.ops.spec import MoeSpec
from moefuse.passes.fuse import fuse_site
from moefuse.passes.lift import explain, find
from moefuse.patterns.axes import Ranks
from moefuse.patterns.engine import lift
from moefuse.policy.npu import Conditions, decide_npu
from moefuse.policy.spread import Terms
from moefuse.testing import capture_graph, npu_reference_kernels
from tests.comm.ranks import run_ranks, values
from tests.npu import mx_loops, mx_sequences, shells
from tests.npu.loops import of_scheme
from tests.npu.quant_sequences import H, I, weights
from tests.npu.sequences import E, K, npu, route
from tests.npu.shells import GROUP, LOCAL, MLPS, RANK, WORLD, Mlp
from tests.support import off

T = 8
LOOP = 2e-2
"""Norm-wise, against float64: rows are rounded to bfloat16's eight bits several times, and int4 has seven steps."""


def by_slots(scheme: str, *arguments: Tensor, own: range | None = None) -> Tensor:
    """The layer in float64."""
    if scheme == "mxfp8":
        return mx_loops.layer(mx_loops.E4M3, mx_loops.E4M3, *arguments, own=own)
    return of_scheme(scheme, *arguments, own=own)


def operands(scheme: str, experts: int = LOCAL) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, logits = draw(T, H).bfloat16(), draw(T, E)
    if scheme == "bf16":
        w13, w2 = draw(experts, H, 2 * I) / H**0.5, draw(experts, I, H) / I**0.5
        return x, logits, w13.bfloat16(), w2.bfloat16()
    if scheme == "mxfp8":
        wide = draw(T, mx_sequences.H).bfloat16()
        return (wide, logits, *(tensor[:experts] for tensor in mx_sequences.weights(mx_sequences.E4M3)))
    return (x, logits, *(tensor[:experts] for tensor in weights(scheme)))


def captured(layer: Any, scheme: str = "bf16") -> GraphModule:
    return capture_graph(partial(layer, scheme=scheme), operands(scheme)).graph_module


@pytest.mark.parametrize("layer", [shells.mc2, shells.mc2_older])
@pytest.mark.parametrize("scheme", MLPS)
def test_a_dispatch_and_its_combine_are_one_layer_over_ranks(layer: Any, scheme: str) -> None:
    graph_module = captured(layer, scheme)
    (site,) = lift(graph_module.graph).sites
    assert site.layer.ranks == Ranks(GROUP, WORLD, RANK, LOCAL)
    spec: MoeSpec = site.spec
    assert (spec.num_experts, spec.ep_world_size, spec.top_k, spec.ids_checked) == (E, WORLD, K, True)
    assert spec.quant == ("none" if scheme == "bf16" else scheme)
    report = moefuse.fuse(graph_module, options={"target": "reference"}).report
    assert "the experts are spread over 2 ranks" in report.sites[0].reason  # no group is called 'ep' here


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens_are_no_other_layer(tokens: int) -> None:
    """A token axis of size one is none: what came with a row is known all the same."""
    x, logits, *tensors = operands("w8a8")
    arguments = (x[:tokens], logits[:tokens], *tensors)
    graph_module = capture_graph(partial(shells.mc2, scheme="w8a8"), arguments).graph_module
    (site,) = lift(graph_module.graph).sites
    assert (site.spec.top_k, site.spec.ep_world_size, site.spec.quant) == (K, WORLD, "w8a8")


def test_quantised_experts_over_ranks_are_no_work_for_the_cpu_target() -> None:
    graph_module = captured(shells.mc2, "w8a8")
    (site,) = lift(graph_module.graph).sites
    terms = Terms(GROUP)
    assert policy.decide_spread(site.spec, terms, target="reference").ok
    refused = policy.decide_spread(site.spec, terms, target="cpu")
    reasons = {check.name: check.reason for check in refused.verdict.checks}
    assert reasons["ep_quant"] == (
        "the experts are quantised as w8a8 and spread over ranks; of the targets only npu and reference have a kernel "
        "for that"
    )
    call, _ = fuse_site(graph_module.graph, site, "npu", "a context")
    assert call.target is torch.ops.moefuse.mega_moe.quant_ep
    assert [len(call.args[i]) for i in range(4, 12)] == [1, 1, 0, 0, 1, 1, 0, 0]
    assert (call.kwargs["quant"], call.kwargs["ep_world_size"], call.kwargs["num_experts"]) == (
        "w8a8",
        WORLD,
        E,
    )
    assert call.is_impure()  # the other ranks wait for it


def two_ranks(rank: int, world: int) -> list[tuple[int, float, float]]:
    """How many layers of a compiled MC2 layer are fused, how far off the operators' own result and a loop it is."""
    npu_reference_kernels.install()
    shells.RANK, shells.FIRST = rank, rank * LOCAL
    shells.GROUP = torch.distributed.group.WORLD.group_name
    own = slice(shells.FIRST, shells.FIRST + LOCAL)
    options = {"inner": "eager", "target": "reference", "ep_max_tokens": T}
    found = []
    both = [(shells.mc2, scheme) for scheme in ("bf16", "w8a8", "mxfp8")]
    for shell, scheme in (*both, (shells.mc2_and_norm, "bf16")):
        layer = partial(shell, scheme=scheme)
        x, logits, *tensors = operands(scheme, E)
        mine = (x + rank, logits.roll(rank, 1))
        torch._dynamo.reset()
        with torch.no_grad():
            want = layer(*mine, *(tensor[own] for tensor in tensors))
            run = torch.compile(layer, backend="moefuse", options=options)
            got = run(*mine, *(tensor[own] for tensor in tensors))
        fused, loop = moefuse.reports()[-1].fused, by_slots(scheme, *mine, *tensors)
        # without the residual
        y = got[:, 1].double() - mine[0].double() if shell is shells.mc2_and_norm else got
        found.append((fused, off(got, want), off(y, loop)))
    return found


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="the ranks have no emulated runtime")
def test_two_ranks_of_a_torch_group_fuse_it() -> None:
    for found in values(run_ranks(2, two_ranks)):
        for fused, unfused, loop in found:
            assert fused == 1
            assert unfused < 1e-2  # bfloat16, rounded in other places
            assert loop < LOOP


def test_the_ascend_policy_judges_it() -> None:
    (site,) = lift(captured(shells.mc2).graph).sites
    verdict = decide_npu(site.spec, Conditions("Ascend910_9382", "R6", 64))
    assert verdict.check == "hidden"  # everything else of the layer fits


@pytest.mark.parametrize("scheme", MLPS)
def test_on_one_rank_it_is_a_plain_layer(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD", 1), ("RANK", 0), ("LOCAL", E)):
        monkeypatch.setattr(shells, name, value)
    arguments = operands(scheme, E)
    graph = capture_graph(partial(shells.mc2, scheme=scheme), arguments)
    fused = moefuse.fuse(graph.graph_module, options={"target": "reference"})
    assert fused.report.fused == 1, fused.report
    got, want = fused.graph_module(*graph.inputs)[0], shells.mc2(*arguments, scheme=scheme)
    assert off(got, want) < 1e-2  # bfloat16, whose sums the combine may round in another place
    assert off(got, by_slots(scheme, *arguments)) < LOOP


def why(graph_module: GraphModule) -> str:
    lifted = lift(graph_module.graph)
    assert not lifted.sites, lifted.sites[0].spec.describe()
    assert find(graph_module.graph, frozenset(), lifted), "the layer isn't even reported"
    return "\n".join(explain(loss) for loss in lifted.losses.values())


# --- every rank has all tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [shells.allgather, shells.without_shell])
@pytest.mark.parametrize("scheme", MLPS)
def test_this_ranks_experts_of_all_tokens(layer: Any, scheme: str) -> None:
    arguments = operands(scheme)
    graph = capture_graph(partial(layer, scheme=scheme), arguments)
    fused = moefuse.fuse(graph.graph_module, options={"target": "reference"})
    assert fused.report.fused == 1, fused.report
    spec = fused.report.sites[0].spec
    assert (spec.num_experts, spec.ep_world_size, spec.ids_checked) == (LOCAL, 1, False)
    got, want = fused.graph_module(*graph.inputs)[0], layer(*arguments, scheme=scheme)
    assert off(got, want) < 1e-2  # as on one rank
    own = range(shells.FIRST, shells.FIRST + LOCAL)
    assert off(got, by_slots(scheme, *arguments, own=own)) < LOOP


# --- pairs that aren't one ----------------------------------------------------------------------------------


def sent_and_brought_back(change: dict[str, Any]) -> Any:
    """MC2 in bf16 with another operand of the combine, or an effect in between."""

    def layer(x: Tensor, logits: Tensor, *tensors: Tensor, scheme: str = "bf16") -> Tensor:
        routing, ids = route(logits)
        mlp: Mlp = MLPS[scheme]
        sent = npu.npu_moe_distribute_dispatch_v2(x, ids, GROUP, WORLD, RANK, E)
        other = npu.npu_moe_distribute_dispatch_v2(x * 2, route(-logits)[1], GROUP, WORLD, RANK, E)
        y = mlp(sent[0], None, other[3] if "counts" in change else sent[3], tensors)
        if "scale" in change:
            y = y * logits.abs().amax().to(y.dtype)
        if "bias" in change:
            y = y + tensors[1][0, 0]
        return npu.npu_moe_distribute_combine_v2(
            y,
            route(-logits)[1] if "ids" in change else ids,
            other[2] if "way" in change else sent[2],
            other[4] if "received" in change else sent[4],
            routing,
            *(change.get("place", (GROUP, WORLD, RANK, E))),
        )

    return layer


PAIRS: dict[str, tuple[dict[str, Any], str]] = {
    "other counts": ({"counts": 1}, "not the same ids"),
    "other ids": ({"ids": 1}, "are brought back by other ids"),
    "another way back": ({"way": 1}, "isn't what `npu_moe_distribute_dispatch_v2` says of its way"),
    "other receive counts": ({"received": 1}, "isn't what `npu_moe_distribute_dispatch_v2` says of its way"),
    "another group": ({"place": ("tp", WORLD, RANK, E)}, "by another operator, or other ranks"),
    "another rank": ({"place": (GROUP, WORLD, 0, E)}, "by another operator, or other ranks"),
    "a number of this rank's": ({"scale": 1}, "which each rank has for itself"),
    "a bias of this rank's": ({"bias": 1}, "which each rank has for itself"),
}


@pytest.mark.parametrize("case", PAIRS)
def test_a_pair_that_is_none(case: str) -> None:
    change, reason = PAIRS[case]
    assert reason in why(captured(sent_and_brought_back(change)))


ARGUMENTS: Sequence[tuple[str, str, Any, str]] = (
    ("dispatch_v2", "x_active_mask", "x", "tokens are left out by a mask"),
    ("dispatch_v2", "expert_scales", "x", "the dispatch takes the routing weights"),
    ("dispatch_v2", "scales", "x", "smooth scales"),
    ("dispatch_v2", "quant_mode", 4, "quantises with quant_mode=4"),
    ("dispatch_v2", "y_dtype", 24, "with quant_mode=0 and y_dtype=24"),
    ("dispatch_v2", "shared_expert_rank_num", 1, "with shared_expert_rank_num=1"),
    ("dispatch_v2", "zero_expert_num", 1, "with zero_expert_num=1"),
    ("combine_v2", "shared_expert_x", "x", "adds a shared expert's rows"),
    ("combine_v2", "comm_quant_mode", 2, "with comm_quant_mode=2"),
    ("combine_v2", "expand_scales", "x", "weights in the order of the rows"),
)


@pytest.mark.parametrize(("operator", "argument", "value", "reason"), ARGUMENTS)
def test_an_argument_that_has_no_rule(operator: str, argument: str, value: Any, reason: str) -> None:
    graph_module = captured(shells.mc2)
    nodes = list(graph_module.graph.nodes)
    node: Node = next(n for n in nodes if str(n.target) == f"npu.npu_moe_distribute_{operator}.default")
    node.kwargs = {**node.kwargs, argument: nodes[0] if value == "x" else value}
    assert reason in why(graph_module)


def test_a5_takes_a_layer_in_mx_blocks() -> None:
    """All but its sizes, which are those of a test."""
    (site,) = lift(captured(shells.mc2, "mxfp8").graph).sites
    large = {"hidden": 1024, "out_features": 1024, "intermediate": 256, "weight_scale_groups": (32, 8)}
    spec = dataclasses.replace(site.spec, **large)
    machine = Conditions("Ascend950PR_9599", "R6", 64, scheme="mxfp8")
    assert decide_npu(site.spec, machine).check == "hidden"
    assert decide_npu(spec, machine).ok
    refused = decide_npu(spec, dataclasses.replace(machine, soc="Ascend910_9382")).checks
    assert "scheme" in {check.name for check in refused if not check.ok}
