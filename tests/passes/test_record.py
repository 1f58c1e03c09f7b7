"""What is recorded of each layer: roles, facts, what goes and what comes; and the same rewrite with and without it."""

from moefuse.report.region import Region
from tests.report.models import report


def region_of(kind: str) -> Region:
    (site,) = report(kind).sites
    assert site.region is not None
    return site.region


def roles(region: Region) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for node in region.before:
        found.setdefault(node.role, set()).add(node.op)
    return found


def test_roles_of_a_fused_layer():
    found = roles(region_of("sum"))
    assert found["gemm"] == {"aten.bmm.default"}
    assert {"aten._softmax.default", "aten.topk.default", "aten.mm.default"} <= found["router"]
    assert "aten.silu.default" in found["activation"]
    assert "aten.sum.dim_IntList" in found["combine"]
    assert "aten.index.Tensor" in found["dispatch"]
    assert len(found["weight"]) == 1
    assert "other" not in found


def test_what_goes_and_what_comes():
    (site,) = report("sum").sites
    region = site.region
    gone = {node.role for node in region.before if node.gone}
    stays = {node.role for node in region.before if not node.gone}
    assert gone == {"dispatch", "gemm", "activation", "combine"}
    assert {"router", "input", "weight"} <= stays
    fused = [node for node in region.after if node.role == "fused"]
    assert [node.op for node in fused] == ["moefuse.mega_moe.default"]
    # index x2, bmm x2, silu, mul x2, sum: eight that compute; one comes.
    assert site.launches_saved == 7


def test_a_loss_has_its_chain_and_the_facts_that_reached_it():
    region = region_of("mean")
    (loss,) = region.losses
    assert loss.node == "mean"
    assert loss.code == "return x + rows.mean(1)"
    lost = next(node for node in region.before if node.name == "mean")
    assert lost.loss == loss.reason
    operand = next(node for node in region.before if node.name == lost.inputs[0])
    assert operand.fact.count("Σ") == 3
    assert region.after == ()
    assert not any(node.gone for node in region.before)


def test_a_refused_layer_keeps_its_nodes():
    (site,) = report("escape").sites
    assert site.check == "escape"
    assert site.launches_saved is None
    assert site.region.after == ()
    assert site.region.losses == ()
    assert not any(node.gone for node in site.region.before)


def test_layers_follow_each_other():
    first, second = report("sum", "sum").sites
    assert {n.name for n in first.region.before if n.gone}.isdisjoint(
        n.name for n in second.region.before if n.gone
    )
    assert first.launches_saved == second.launches_saved == 7
