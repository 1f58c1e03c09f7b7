"""The decision table: every check of every target from both sides, and the choice of the target."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

import moefuse.policy
from moefuse.ops.spec import MoeSpec
from moefuse.policy import Check, checks_of, decide, decide_shared, judge, shared

GOOD = MoeSpec(
    num_experts=8,
    top_k=2,
    hidden=16,
    intermediate=8,
    out_features=16,
    device="cpu",
    x_dtype=torch.bfloat16,
    expert_dtype=torch.bfloat16,
    router_dtype=torch.float32,
    output_dtype=torch.bfloat16,
)
CUSTOM = {"activation": "custom", "activation_program": "mul.Tensor(silu.default(g), u)"}
NO_GRADIENT = {
    "activation": "custom",
    "activation_program": "_to_copy.default(gt.Tensor(g, u), dtype=torch.float32)",
}

# check -> (changes that it still passes, changes that it refuses, words of the reason)
TABLE = {
    "device": [({"device": "cpu:0"}, {"device": "cuda:0"}, "the layer is on cuda:0")],
    "sizes": [({"top_k": 1}, {"top_k": 0}, "top-0"), ({"hidden": 1}, {"hidden": 0}, "0 -> 8")],
    "dtypes": [
        (
            {"x_dtype": torch.float64, "expert_dtype": torch.float64},
            {"x_dtype": torch.int8},
            "x is torch.int8",
        ),
        ({"output_dtype": torch.float32}, {"output_dtype": torch.float8_e4m3fn}, "output torch.float8"),
    ],
    "expert_dtype": [
        (
            {"expert_dtype": torch.float32},
            {"expert_dtype": torch.int8},
            "the experts are torch.int8, quantised as none",
        )
    ],
    "quant": [({}, {"quant": "w2a8"}, "the experts are quantised as")],
    "router_dtype": [({"router_dtype": torch.float64}, {"router_dtype": torch.int64}, "torch.int64")],
    "layout": [
        ({"gate_up": "interleaved_swapped"}, {"gate_up": "gateless"}, "gateless"),
        ({"weight_position": "input"}, {"weight_position": "nowhere"}, "nowhere"),
        ({"row_norm": "rms"}, {"row_norm": "layer"}, "row_norm='layer'"),
    ],
    "activation": [
        ({"activation": "geglu"}, {"activation": "swish"}, "unknown"),
        ({"gate_up": "none", "activation": "relu2"}, {"activation": "relu2"}, "plain expert"),
        ({"activation_params": (7.0,)}, {"activation_params": (7.0, 1.0)}, "0 to 1 activation_params"),
        (CUSTOM, CUSTOM | {"gate_up": "none"}, "no up part"),
        (CUSTOM, CUSTOM | {"activation_program": "sum.default(g)"}, "not a pure pointwise"),
        (CUSTOM, CUSTOM | {"activation_params": (1.0,)}, "takes no activation_params"),
        ({}, {"activation_program": "g"}, "only read by activation='custom'"),
    ],
    "top_k": [
        ({"top_k": 9}, {"top_k": 9, "ids_checked": True}, "top-9 of 8 experts"),
        (
            {"top_k": 9, "num_identity_experts": 1, "ids_checked": True},
            {"top_k": 10, "num_identity_experts": 1, "ids_checked": True},
            "top-10",
        ),
    ],
    "identity": [
        (
            {"num_identity_experts": 2},
            {"num_identity_experts": 2, "out_features": 8},
            "2 identity experts return x of 16 features, the output has 8",
        )
    ],
    "ep_world_size": [({}, {"ep_world_size": 2}, "2 ranks")],
    "training": [
        (CUSTOM | {"training": True}, NO_GRADIENT | {"training": True}, "doesn't give"),
        (NO_GRADIENT, NO_GRADIENT | {"training": True}, "needs a gradient"),
        ({"training": True}, NO_GRADIENT | {"training": True}, "training"),
    ],
}
ROWS = [(check, *row) for check, rows in TABLE.items() for row in rows]


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize(("check", "passes", "fails", "words"), ROWS)
def test_decision_table(target, check, passes, fails, words) -> None:
    names = [c.name for c in checks_of(target)]
    good = dataclasses.replace(GOOD, **passes)
    assert decide(good, target=target).ok
    verdict = decide(dataclasses.replace(GOOD, **fails), target=target).verdict
    if check not in names:
        assert verdict.ok
        return
    assert not verdict.ok
    assert verdict.check == check
    assert words in verdict.reason
    reads = next(c for c in checks_of(target) if c.name == check).reads
    assert tuple(verdict.facts) == reads
    assert [c.name for c in verdict.checks] == names


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_the_table_is_complete(target) -> None:
    assert {check.name for check in checks_of(target)} <= set(TABLE)


def test_a_check_reads_no_fact_that_it_does_not_name() -> None:
    """Changing any other field leaves each check's answer as it was."""
    others = {
        name: dataclasses.replace(GOOD, **fails)
        for rows in TABLE.values()
        for _, fails, _ in rows
        for name in [str(fails)]
    }
    for check in checks_of("cpu"):
        for spec in others.values():
            read = {name: getattr(spec, name) for name in check.reads}
            assert check(dataclasses.replace(GOOD, **read)).ok == check(spec).ok, (check.name, spec)


def test_auto_takes_the_target_of_the_device() -> None:
    assert decide(GOOD).target == "cpu"
    nowhere = decide(dataclasses.replace(GOOD, device="xpu:1"))
    assert not nowhere.ok
    assert nowhere.target == ""
    assert nowhere.verdict.check == "target"
    assert "'xpu'" in nowhere.verdict.reason
    assert 'target="reference"' in nowhere.verdict.reason
    assert decide(dataclasses.replace(GOOD, device="xpu:1"), target="reference").ok


def test_an_unknown_target_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"expected one of \['auto', 'cpu', .*'reference'.*got 'tpu'"):
        decide(GOOD, target="tpu")


def test_quantised_experts_have_no_gradient() -> None:
    spec = dataclasses.replace(GOOD, quant="w8a8", expert_dtype=torch.int8)
    assert decide(spec, target="reference").ok
    verdict = decide(dataclasses.replace(spec, training=True), target="reference").verdict
    assert verdict.check == "training"
    assert "experts quantised as w8a8 have none" in verdict.reason


def test_the_first_failing_check_speaks_and_all_are_kept() -> None:
    bad = dataclasses.replace(GOOD, ids_checked=True, top_k=9, ep_world_size=2)
    verdict = decide(bad).verdict
    assert verdict.check == "top_k"
    assert [c.name for c in verdict.checks if not c.ok] == ["top_k", "ep_world_size"]


def test_registering_a_target(monkeypatch) -> None:
    monkeypatch.setattr(moefuse.policy, "_CHECKS", dict(moefuse.policy._CHECKS))
    monkeypatch.setattr(moefuse.policy, "_DEVICE_TARGETS", dict(moefuse.policy._DEVICE_TARGETS))
    never = Check("never", ("top_k",), lambda spec: False, "top-{top_k} is never right")
    moefuse.policy.register("toy", [never], device_type="xpu")
    decision = decide(dataclasses.replace(GOOD, device="xpu"))
    assert decision.target == "toy"
    assert decision.verdict.reason == "top-2 is never right"


def test_a_check_of_an_unknown_fact_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"reads: expected fields of MoeSpec, got \['tokens'\]"):
        Check("tokens", ("tokens",), lambda spec: True)


def test_judge_without_checks_says_yes() -> None:
    assert judge(GOOD, ()).ok


def test_policy_depends_downward_only() -> None:
    for path in Path(moefuse.policy.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[:2][-1] not in {"report", "targets", "passes", "patterns"}, path


SHARED = {
    "shared_target": ({"target": "reference"}, {"target": "npu"}, "the target 'npu' has no kernel"),
    "shared_spread": ({}, {"spread": True}, "travel between ranks"),
    "shared_training": ({}, {"training": True}, "gradients are wanted"),
    "shared_dtype": (
        {"x_dtype": torch.float16, "expert_dtype": torch.float16},
        {"expert_dtype": torch.float32},
        "rows are torch.bfloat16 and weights torch.float32",
    ),
    "shared_tokens": ({"tokens": 64}, {"tokens": 65}, "65 tokens in bfloat16 are more than 64"),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_experts(name: str) -> None:
    good = shared.SharedExpert.of(GOOD, "cpu", spread=False, tokens=None)
    allowed, refused, words = SHARED[name]
    assert judge(good, shared.CHECKS).ok
    assert judge(dataclasses.replace(good, **allowed), shared.CHECKS).ok
    verdict = judge(dataclasses.replace(good, **refused), shared.CHECKS)
    assert verdict.check == name
    assert words in verdict.reason
    assert set(SHARED) == {check.name for check in shared.CHECKS}


def test_a_shared_expert_is_judged_by_its_target_first() -> None:
    assert decide_shared(GOOD, target="cpu", spread=False, tokens=1).ok
    wrong = dataclasses.replace(GOOD, device="cuda:0")
    assert decide_shared(wrong, target="cpu", spread=True, tokens=1).check == "device"
    wide = dataclasses.replace(GOOD, x_dtype=torch.float32, expert_dtype=torch.float32)
    assert decide_shared(wide, target="cpu", spread=False, tokens=4096).ok
