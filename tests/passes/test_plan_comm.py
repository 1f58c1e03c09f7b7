"""What is decided about layers whose rows travel, in one process: policy, options, the graph, the report."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch.utils.checkpoint import CheckpointPolicy

import moefuse
from moefuse import policy
from moefuse.graph.capture import capture
from moefuse.options import OptionError, Options
from moefuse.passes import pipeline
from moefuse.passes.pipeline import FuseResult
from moefuse.patterns.rules import op_name
from moefuse.policy.spread import SpreadLayer, Terms
from moefuse.testing import fake_ep_group
from tests.comm.spread_models import Block, ByExpert, E, Gathered, H, Summed, tokens


class _Enough(Exception):
    """The graph is there; the program needn't run."""


def planned(model: Any, contact: Any = "draw", *, grad: bool = False, **options: Any) -> FuseResult:
    """What the passes make of the one graph of a model."""
    found: list[FuseResult] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        captured = capture(gm, inputs)
        parsed = Options.parse(options)
        found.append(
            pipeline.run(
                captured.graph_module,
                captured.parameters,
                parsed,
                training=captured.training,
                contact=contact,
            )
        )
        raise _Enough

    flags = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    torch._dynamo.reset()
    with (
        torch.set_grad_enabled(grad),
        torch._dynamo.config.patch(flags),
        pytest.raises(Exception, match="_Enough"),
    ):
        torch.compile(model, backend=backend, fullgraph=True, dynamic=True)(tokens(7, 0))
    return found[0]


def collectives(result: FuseResult) -> list[str]:
    names = [str(node.target) for node in result.graph_module.graph.nodes if "_c10d" in str(node.target)]
    return [name.split(".")[1] for name in names if "wait" not in name]


WAYS = [(ByExpert, "4 all_to_all_single"), (Gathered, "3 all_gather_into_tensor")]


class Twice(torch.nn.Module):
    def __init__(self, form: type[Block]) -> None:
        super().__init__()
        self.a, self.b = form(1, 2), form(1, 2, seed=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize(("form", "absorbed"), WAYS)
def test_no_collective_is_left_and_one_context_serves_all_layers(form, absorbed) -> None:
    with fake_ep_group(2, 1):
        result = planned(Twice(form))
    assert [layer.fused for layer in result.layers] == [True, True]
    assert collectives(result) == []
    assert all(absorbed in layer.comm for layer in result.layers)
    graph = result.graph_module.graph
    (context,) = graph.find_nodes(op="call_function", target=torch.ops.moefuse.ep_context.default)
    nodes = graph.find_nodes(op="call_function", target=torch.ops.moefuse.mega_moe.ep)
    assert [node.args[0] for node in nodes] == [context, context]
    assert [node.kwargs["num_experts"] for node in nodes] == [E, E]


def test_a_sum_of_all_ranks_parts_stays_once() -> None:
    with fake_ep_group(2, 1):
        result = planned(Twice(Summed))
    assert [layer.fused for layer in result.layers] == [True, True]
    assert collectives(result) == ["all_reduce", "all_reduce"]
    assert all("it stays, once" in layer.comm for layer in result.layers)


class NotLeftOut(Gathered):
    """Slots of other experts count for expert 0, with their weights."""

    def mask(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.rank * self.local
        return torch.where((ids >= first) & (ids < first + self.local), ids - first, 0), weights * 1.0


class OneTooMany(Gathered):
    def mask(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.rank * self.local
        mine = (ids >= first - 1) & (ids < first + self.local)
        return torch.where(mine, (ids - first).clamp(min=0), 0), torch.where(mine, weights, 0.0)


class WeightsChanged(Gathered):
    def mask(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = super().mask(ids, weights)
        return ids, weights.clamp(max=0.5)


class NoZeros(Gathered):
    """Weights that no sample shows: a weight of zero counts as one."""

    def mask(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().mask(ids, torch.where(weights == 0, 1.0, weights))


class NoNaN(Gathered):
    def mask(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = super().mask(ids, weights)
        return ids, torch.nan_to_num(weights)


class Unweighted(Gathered):
    """Rows of chosen experts are added up as they are."""

    def mask(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = super().mask(ids, weights)
        return ids, weights != 0


class WholeNumbers(Gathered):
    def mask(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = super().mask(ids, weights * 3)
        return ids, weights.int()


class Squared(Gathered):
    def mask(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, masked = super().mask(ids, weights)
        return ids, masked * weights


class ByProduct(Gathered):
    """The same layer as `Gathered`, its mask a factor, in float64 on the way."""

    def mask(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.rank * self.local
        mine = (ids >= first) & (ids < first + self.local)
        weights = (weights.double() * 2 * mine / 2).float().masked_fill(ids < 0, 0.0)
        return torch.where(mine, ids - first, 0), weights


class OnTheInput(Gathered):
    """Routing weights multiply the rows that experts read: silu(0) is 0, so 0 leaves a slot out here, too."""

    def routed(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.route(x)
        x, ids, weights = (funcol.all_gather_tensor(each, 0, self.group) for each in (x, ids, weights))
        local, masked = self.mask(ids, weights)
        rows = self.gathered((x.unsqueeze(1) * masked.unsqueeze(-1)).view(-1, H), local.flatten())
        return funcol.reduce_scatter_tensor(rows.view(-1, self.k, H).sum(1), "sum", 0, self.group)


class BiasedOnTheInput(OnTheInput):
    """Of a row of zeros an expert gives its bias."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias = torch.nn.Parameter(torch.randn(self.local, H))

    def gathered(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return super().gathered(rows, ids) + self.bias[ids]


class SomethingOfNothing(OnTheInput):
    """Of a row of zeros the activation gives exp(0)."""

    def gathered(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        gate, up = torch.bmm(rows.unsqueeze(1), self.w1[ids]).squeeze(1).chunk(2, -1)
        return torch.bmm((gate + up).exp().unsqueeze(1), self.w2[ids]).squeeze(1)


@pytest.mark.parametrize("form", [ByProduct, OnTheInput])
def test_a_mask_may_be_a_factor(form) -> None:
    with fake_ep_group(2, 1):
        (layer,) = planned(form(1, 2)).layers
    assert layer.spec is not None
    assert layer.spec.ep_world_size == 2, layer.comm


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (NotLeftOut, "slots of other ranks' experts are not left out"),
        (OneTooMany, "slots of other ranks' experts are not left out"),
        (BiasedOnTheInput, "slots of other ranks' experts are not left out"),
        (SomethingOfNothing, "slots of other ranks' experts are not left out"),
        *((form, "isn't the gathered routing weight") for form in (WeightsChanged, NoZeros, NoNaN, Squared)),
    ],
)
def test_gathered_tokens_that_are_not_masked_right_stay_gathered(form, reason) -> None:
    """This rank's experts are still one node; the collectives around it run as they did."""
    with fake_ep_group(2, 1):
        result = planned(form(1, 2))
    (layer,) = result.layers
    assert reason in layer.comm
    assert layer.spec is not None
    assert (layer.fused, layer.spec.ep_world_size) == (True, 1)
    assert sorted(set(collectives(result))) == ["all_gather_into_tensor", "reduce_scatter_tensor"]


@pytest.mark.parametrize("form", [Unweighted, WholeNumbers])
def test_weights_that_are_no_floats_any_more_are_not_those_that_were_gathered(form) -> None:
    with fake_ep_group(2, 1):
        result = planned(form(1, 2))
    (layer,) = result.layers
    assert "isn't the gathered routing weight" in layer.comm
    assert layer.spec is not None
    assert layer.spec.ep_world_size == 1
    assert len(collectives(result)) == 4


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"contact": "refuse"}, "ep_context", "makes no contexts"),
    ({"ep_max_tokens": 2**30}, "ep_capacity", "max_tokens_per_rank"),
    ({"exclude": ["*"]}, "exclude", "exclude='*'"),
    ({"verify": True}, "ep_verify", "would wait for it"),
]


@pytest.mark.parametrize(("how", "check", "reason"), REFUSED, ids=[check for _, check, _ in REFUSED])
def test_a_refused_layer_keeps_its_collectives(how, check, reason) -> None:
    with fake_ep_group(2, 1):
        result = planned(ByExpert(1, 2), **how)
    (layer,) = result.layers
    assert (layer.fused, layer.check) == (False, check)
    assert reason in layer.reason
    assert collectives(result) == ["all_to_all_single"] * 4


class Cut(ByExpert):
    """Stops the gradient on its way, in one place."""

    def __init__(self, rank: int, world: int, where: str) -> None:
        super().__init__(rank, world)
        self.where = where

    def exchange(self, rows: torch.Tensor, received: Any, sent: Any) -> torch.Tensor:
        floating = rows.is_floating_point()
        if floating and self.where == "sent":
            rows = rows.detach()
        with torch.set_grad_enabled(not (floating and self.where == "no_grad")):
            rows = super().exchange(rows, received, sent)
        return rows.detach() if floating and self.where == "received" else rows

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = super().route(x)
        return (weights.detach() if self.where == "weights" else weights), ids


@pytest.mark.parametrize("where", ["sent", "received", "no_grad", "weights", "nowhere"])
def test_a_gradient_stops_where_the_model_stops_it(where) -> None:
    """Inside of the layer: it is left. Before it: the node takes what has none."""
    with fake_ep_group(2, 1):
        result = planned(Cut(1, 2, where), grad=True)
    (layer,) = result.layers
    assert layer.fused is (where in ("weights", "nowhere"))
    if layer.fused:
        (call,) = result.calls
        assert op_name(call.args[3]) == ("aten::detach" if where == "weights" else "aten::div")
        assert call.meta["recompute"] == CheckpointPolicy.MUST_SAVE


def test_the_group_may_be_given() -> None:
    with fake_ep_group(2, 1) as name:
        other = torch.distributed.new_group([0, 1])
        own = planned(ByExpert(1, 2), ep_group=name)
        result = planned(ByExpert(1, 2), ep_group=other)
        for wrong in ("no such group", 3):
            with pytest.raises(
                OptionError, match="expected a process group that this rank is in, or its name, got"
            ):
                Options.parse({"ep_group": wrong})
    assert own.layers[0].fused
    assert result.layers[0].check == "ep_group"
    assert f"travel over group {name!r}, the option ep_group is" in result.layers[0].reason


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "8"])
def test_a_number_of_tokens_is_positive(wrong) -> None:
    with pytest.raises(OptionError, match="expected a positive integer, got"):
        Options.parse({"ep_max_tokens": wrong})


def test_policy_asks_only_what_is_equal_on_all_ranks() -> None:
    with fake_ep_group(2, 1):
        spec = planned(ByExpert(1, 2)).layers[0].spec
    assert spec is not None
    assert policy.decide_spread(spec, Terms("g", "", 16)).ok
    for rows_dtype in (None, spec.x_dtype, torch.float64):
        layer = SpreadLayer.of(replace(spec, rows_dtype=rows_dtype), "reference", Terms("g", "", 16))
        alike = rows_dtype in (None, spec.x_dtype)
        assert layer.capacity().rows_dtype == (None if alike else rows_dtype)  # alike layers share a context
    refused = {
        "ep_capacity": replace(spec, ep_world_size=3),
        "training": replace(
            spec, training=True, activation="custom", activation_program="mul.Tensor(gt.Scalar(g, 0), u)"
        ),
        "expert_dtype": replace(spec, expert_dtype=torch.int8),
        "target": replace(spec, device="cuda:0"),
    }
    for check, changed in refused.items():
        decision = policy.decide_spread(changed, Terms("g", "", 16))
        assert (decision.ok, decision.verdict.check) == (False, check)


def test_the_node_says_where_its_context_comes_from() -> None:
    with pytest.raises(RuntimeError, match="it is made when backend='moefuse' compiles the model"):
        torch.ops.moefuse.ep_context("nothing")


def test_explain_draws_the_node_and_asks_nobody() -> None:
    with fake_ep_group(2, 1), torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        report = moefuse.explain(Gathered(1, 2), tokens(6, 0))
    assert report.fused == 1
    assert report.graphs[0].contexts == ()
    assert "rows travel inside the node" in str(report)


class Fixed(ByExpert):
    """Each rank gets as many of the sorted rows, whichever experts they are for."""

    def routed(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.route(x)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        here = self.exchange(flat[order], None, None)
        rows = self.gathered(self.exchange(x[order // self.k], None, None), here % self.local)
        rows = self.exchange(rows, None, None) * weights.flatten()[order, None]
        return rows[order.argsort()].view(x.shape[0], self.k, -1).sum(1)


def test_experts_of_rows_that_are_not_understood_say_which_exchange_stays() -> None:
    with fake_ep_group(2, 1), torch.no_grad():
        (site,) = moefuse.explain(Fixed(1, 2), tokens(8, 1)).sites
    assert (site.fused, site.spec.num_experts, site.spec.ep_world_size) == (True, E // 2, 1)
    assert site.comm.startswith(
        "its collectives stay: `all_to_all_single`: rows are sent to other ranks in pieces"
    )
