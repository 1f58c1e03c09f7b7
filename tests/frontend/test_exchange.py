"""transformers' exchange of rows as a straight line: for one call, and only where its branch is the known one."""

import ast
from typing import Any

import pytest
import torch

import moefuse
from moefuse.frontend import exchange
from moefuse.frontend.source import RefusedError
from moefuse.testing import fake_ep_group
from moefuse.testing.programs import Sizes
from tests.comm.spread_models import ByBins, tokens
from tests.support import qwen3_block

SIZES = Sizes(tokens=6, top_k=2, experts=8, hidden=16, inter=8)


def spread(implementation: str, experts: str = "grouped_mm") -> tuple[torch.nn.Module, torch.Tensor]:
    """A block whose experts are on the two ranks of a group, each with a batch of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    block, (x,) = qwen3_block(SIZES, experts=experts)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    plan = {f"experts.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")}
    plan["experts"] = "ep_dispatch_experts"
    apply_expert_parallelism(block, mesh["ep"], mesh["tp"], plan, implementation)
    return block, x


@pytest.mark.parametrize(
    ("implementation", "experts"),
    [("all_to_all", "grouped_mm"), ("auto", "batched_mm"), ("all_to_all", "eager")],
)
def test_the_exchange_is_one_node(implementation: str, experts: str) -> None:
    with fake_ep_group(2, 1), torch.no_grad():
        report = moefuse.explain(*spread(implementation, experts))
    (site,) = report.sites
    assert site.fused
    assert (site.spec.num_experts, site.spec.top_k, site.spec.ep_world_size) == (8, 2, 2)
    assert "absorbed: 3 all_to_all_single" in site.comm


def test_exchanges_are_changed_for_a_call_and_changed_back() -> None:
    from transformers.distributed.expert_parallel import AllToAllEP

    with fake_ep_group(2, 1):
        block, _ = spread("all_to_all")
        found = exchange.Exchanges(block)
        (one,) = found._found
        with found.straight(), found.straight():
            assert type(one) is not AllToAllEP
            assert isinstance(one, AllToAllEP)
            assert type(one) is exchange._straightened(AllToAllEP)  # always the same: Dynamo guards on it
    assert type(one) is AllToAllEP


def test_of_experts_that_loop_with_gradients_and_without_a_trace_it_is_the_original() -> None:
    """A straight line would leave the experts' weights without a gradient on a rank to which no row comes."""

    class Known:
        def __call__(self, rows: torch.Tensor) -> str:
            if rows.shape[0] == 0:  # noqa: SIM108
                result = "none"[:0]
            else:
                result = "some"
            return result

    call = exchange._straightened(Known)()
    assert call(torch.ones(0)) == ""
    with torch.no_grad():
        assert call(torch.ones(0)) == ""
        run = torch.compile(lambda x: (call(x), x + 1)[0], backend="eager", fullgraph=True)
        assert run(torch.ones(0)) == "some"
    torch._dynamo.reset()
    assert run(torch.ones(0)) == ""


def test_models_that_are_left_alone() -> None:
    with fake_ep_group(2, 1):
        assert exchange.Exchanges(spread("auto")[0])._found
        block, _ = spread("all_to_all")
        block.experts.config._experts_implementation_internal = "of somebody"
        assert not exchange.Exchanges(block)._found
    assert not exchange.Exchanges(torch.nn.Linear(2, 2))._found


UNKNOWN: dict[str, str] = {
    "another test": "if x.shape[1] == 0:\n  y = f(x)[:0]\nelse:\n  y = f(x)",
    "two tests": "if x.shape[0] == 0 == z:\n  y = f(x)[:0]\nelse:\n  y = f(x)",
    "a result": "if x.shape[0] == 0:\n  y = f(x)\nelse:\n  y = f(x)",
    "other names": "if x.shape[0] == 0:\n  z = f(x)[:0]\nelse:\n  y = f(x)",
    "more": "if x.shape[0] == 0:\n  y = f(x)[:0]\nelse:\n  y = f(x)\n  g(y)",
    "nothing else": "if x.shape[0] == 0:\n  y = f(x)[:0]",
    "two branches": "if x.shape[0] == 0:\n  y = f(x)[:0]\nelse:\n  y = f(x)\n" * 2,
    "none": "y = f(x)",
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_only_the_known_branch_goes(case: str) -> None:
    text = "def call(x):\n" + "\n".join(f"  {line}" for line in UNKNOWN[case].splitlines())
    definition: Any = ast.parse(text).body[0]
    with pytest.raises(RefusedError):
        exchange._without_branch(definition)


@pytest.mark.parametrize(
    ("fewer", "reason"), [(0, ""), (1, "bincount may give more than its minlength of 1")]
)
def test_counts_by_bincount_are_as_many_as_there_are_ranks(fewer: int, reason: str) -> None:
    """Of the owners of a top-k's experts no more; Dynamo would not know how many there are."""
    with fake_ep_group(2, 1), torch.no_grad():
        block = ByBins(1, 2)
        block.fewer = fewer
        sites = moefuse.explain(block, tokens(7, 1)).sites
    assert any("absorbed: 4" in site.comm for site in sites) is not bool(fewer)
    assert reason in " ".join(site.reason for site in sites)


class Raises(ByBins):
    """Dynamo leaves such a function to Python, with what it calls."""

    def routed(self, x: torch.Tensor) -> torch.Tensor:
        ids = self.route(x)[1]
        counts = torch.bincount(ids.flatten(), minlength=self.experts).tolist()
        if torch.compiler.is_compiling():
            raise RuntimeError("not under torch.compile")
        return x * sum(counts)


def test_a_count_in_a_function_that_isnt_traced_is_a_count() -> None:
    block = Raises(0, 1, group=0)
    x = tokens(7, 1)
    with torch.no_grad():
        assert torch.equal(moefuse.compile(block, inner="eager")(x), x * 14)
