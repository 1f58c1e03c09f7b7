"""aclnnMegaMoe's decision table: every limit of every row from both sides, and the three modes."""

import dataclasses
from typing import Any

import pytest
import torch

from moefuse.ops.quantised import SCHEMES
from moefuse.ops.spec import MoeSpec
from moefuse.policy.check import judge
from moefuse.policy.npu import (
    IDENTITY,
    Conditions,
    NotAllowedError,
    NpuLayer,
    checks_of_row,
    decide_npu,
    resolve,
)
from moefuse.policy.npu_buffer import MIB, Traffic, required_bytes
from moefuse.policy.npu_limits import Limits, Range, Values, family_of, limits, rows, schemes

EVERY_CHECK = [check.name for check in (*IDENTITY, *checks_of_row(rows()[0]))]
SPEC = MoeSpec(
    num_experts=64,
    top_k=8,
    hidden=2048,
    intermediate=1024,
    out_features=2048,
    device="npu:0",
    x_dtype=torch.bfloat16,
    expert_dtype=torch.bfloat16,
    router_dtype=torch.float32,
    output_dtype=torch.bfloat16,
    ids_checked=True,
    ep_world_size=8,
    transpose_weight1=False,
    transpose_weight2=False,
)
CONDITIONS = Conditions("Ascend910_9382", "R6", 512, hccl_buffer_bytes=4096 * MIB)
SOCS = {"A2": "Ascend910B2", "A3": "Ascend910_9382", "A5": "Ascend950PR"}


def verdict(conditions: dict[str, Any] | None = None, **spec: Any) -> Any:
    return decide_npu(
        dataclasses.replace(SPEC, **spec), dataclasses.replace(CONDITIONS, **(conditions or {}))
    )


def test_a_layer_within_all_limits_is_allowed() -> None:
    found = verdict()
    assert found.ok
    assert [check.name for check in found.checks] == EVERY_CHECK


# --- the limits of every row ------------------------------------------------------------------------------


def fitting(row: Limits, family: str) -> tuple[MoeSpec, Conditions]:
    """A layer that the row allows, with the smallest sizes."""
    ep = row.ep_world_size.values[0] if isinstance(row.ep_world_size, Values) else row.ep_world_size.low
    scheme = schemes()[row.schemes[0]]
    dtype = getattr(torch, scheme.weight_dtypes[0])
    hidden, inner = row.hidden.low, row.intermediate.low  # type: ignore[union-attr]
    spec = dataclasses.replace(
        SPEC,
        ep_world_size=ep,
        num_experts=2 * ep,
        top_k=1,
        hidden=hidden,
        out_features=hidden,
        intermediate=inner,
        expert_dtype=dtype,
        quant=row.schemes[0] if row.schemes[0] in SCHEMES else "none",
        transpose_weight1=row.transposed_weights,
        transpose_weight2=row.transposed_weights,
    )
    conditions = Conditions(
        SOCS[family],
        row.revision,
        1,
        scheme=row.schemes[0],
        weight_format=scheme.weight_format,
        hccl_buffer_bytes=1 << 60,
    )
    return spec, conditions


ROWS = [(row, family) for row in rows() for family in row.families]
NAMES = [f"{row.revision}-{family}" for row, family in ROWS]


def changed(spec: MoeSpec, conditions: Conditions, name: str, value: int) -> tuple[MoeSpec, Conditions]:
    """The layer with one limited quantity at `value`, everything else kept legal where it can be."""
    if name == "tokens_per_rank":
        return spec, dataclasses.replace(conditions, num_max_tokens_per_rank=value)
    if name == "experts_per_rank":
        return dataclasses.replace(spec, num_experts=value * spec.ep_world_size), conditions
    if name == "ep_world_size":
        return dataclasses.replace(spec, ep_world_size=value, num_experts=value), conditions
    if name == "num_experts":
        return dataclasses.replace(spec, num_experts=value), conditions
    if name == "hidden":
        return dataclasses.replace(spec, hidden=value, out_features=value), conditions
    return dataclasses.replace(spec, **{name: value}), conditions


def sides(limit: Range | Values) -> tuple[list[int], list[int]]:
    """(values that pass, values that don't): the ends and their neighbours, and values between the steps."""
    if isinstance(limit, Values):
        return list(limit.values), [v + 1 for v in limit.values if v + 1 not in limit.values]
    good = [limit.low, limit.low + limit.step]
    bad = [limit.low - limit.step, limit.low - 1]
    if limit.high is not None:
        good += [limit.high, limit.high - limit.step]
        bad += [limit.high + limit.step, limit.high + 1]
    if limit.step > 1:
        bad += [limit.low + 1, limit.low + limit.step // 2]
    return good, bad


LIMITED = [
    field.name
    for field in dataclasses.fields(Limits)
    if isinstance(getattr(rows()[0], field.name), Range | Values)
]


@pytest.mark.parametrize(("row", "family"), ROWS, ids=NAMES)
@pytest.mark.parametrize("name", LIMITED)
def test_a_limit_from_both_sides(row: Limits, family: str, name: str) -> None:
    spec, conditions = fitting(row, family)
    assert decide_npu(spec, conditions).ok
    good, bad = sides(getattr(row, name))
    for value in good:
        layer = NpuLayer.of(*changed(spec, conditions, name, value))
        result = {check.name: check(layer) for check in checks_of_row(row)}[name]
        assert result.ok, result.reason
    for value in bad:
        layer = NpuLayer.of(*changed(spec, conditions, name, value))
        result = {check.name: check(layer) for check in checks_of_row(row)}[name]
        assert not result.ok, f"{name} = {value}"
        assert str(value) in result.reason
        assert str(getattr(row, name)) in result.reason


def test_the_reason_is_that_of_the_first_check_that_fails() -> None:
    found = verdict(ep_world_size=3, hidden=100)
    assert (found.ok, found.check) == (False, "ep_world_size")
    assert [check.name for check in found.checks if not check.ok][:3] == [
        "ep_world_size",
        "experts_divide",
        "hidden",
    ]


# --- everything else --------------------------------------------------------------------------------------

W8A8 = {"scheme": "w8a8", "weight_format": "FRACTAL_NZ"}
W4A8 = W8A8 | {"scheme": "w4a8"}
INT4 = {"expert_dtype": torch.int32, "has_bias1": True, "has_bias2": True}
COMBINE_W8A8 = W8A8 | {"revision": "dispatch_ffn_combine"}
# of 512 tokens to 8 experts each: a byte of each feature out, two back; and 10 MB
COMBINE_NEED = 512 * 8 * 2048 * 3 + 10 * MIB
MXFP8 = {"scheme": "mxfp8", "revision": "R6", "soc": SOCS["A5"]}
FP8 = {"expert_dtype": torch.float8_e4m3fn, "transpose_weight1": True, "transpose_weight2": True}
NEED = required_bytes("A3", NpuLayer.of(SPEC, CONDITIONS).traffic)
SHARE = SPEC.weight_bytes // 8

# check -> (conditions and spec that pass, conditions and spec that don't, words of the reason)
TABLE: dict[
    str, list[tuple[tuple[dict[str, Any], dict[str, Any]], tuple[dict[str, Any], dict[str, Any]], str]]
] = {
    "soc": [(({"soc": "Ascend910_93"}, {}), ({"soc": "Ascend310P3"}, {}), "none of the known")],
    "revision": [
        (({"revision": "R9"}, {}), ({"revision": ""}, {}), "could not be identified"),
        (({"revision": "R6"}, {}), ({"revision": "R4"}, {}), "R4 on A3 are not known; known are R1, R6, R9"),
    ],
    "experts_divide": [(({}, {"num_experts": 64}), ({}, {"num_experts": 65}), "65 experts can't be spread")],
    "out_features": [(({}, {}), ({}, {"out_features": 1024}), "2048 features into 1024")],
    "activation": [
        (({}, {"activation": "swigluoai"}), ({}, {"activation": "geglu"}), "activation geglu"),
        (
            ({"revision": "R1"}, {}),
            ({"revision": "R1"}, {"activation": "swigluoai"}),
            "aclnnMegaMoe R1 takes swiglu",
        ),
        (
            (COMBINE_W8A8, {"expert_dtype": torch.int8}),
            (COMBINE_W8A8, {"expert_dtype": torch.int8, "activation_params": (7.0,)}),
            "activation swiglu with 7: dispatch_ffn_combine takes none of its numbers",
        ),
    ],
    "layout": [
        (({}, {}), ({}, {"gate_up": "interleaved"}), "gate in the first half"),
        (({}, {}), ({}, {"weight_position": "input"}), "multiplies at the input"),
    ],
    "row_norm": [(({}, {}), ({}, {"row_norm": "rms"}), "rows are normalised")],
    "identity": [(({}, {}), ({}, {"num_identity_experts": 2}), "2 identity experts")],
    "scheme": [
        (
            (COMBINE_W8A8, {"expert_dtype": torch.int8}),
            ({"revision": "dispatch_ffn_combine"}, {}),
            "takes w8a8, w4a8 here",
        ),
        ((W8A8, {"expert_dtype": torch.int8}), ({"scheme": "mxfp8"}, {}), "quantisation mxfp8"),
    ],
    "weight_dtype": [
        ((W8A8, {"expert_dtype": torch.int8}), (W8A8, {}), "weights are bfloat16"),
        (({}, {}), ({}, {"expert_dtype": torch.float16}), "takes bfloat16"),
    ],
    "weight_format": [
        (({}, {}), ({"weight_format": "FRACTAL_NZ"}, {}), "takes ND here"),
        (
            (W8A8, {"expert_dtype": torch.int8}),
            ({"scheme": "w8a8"}, {"expert_dtype": torch.int8}),
            "takes FRACTAL_NZ here: cast them, or allow copies of up to 48 MB per rank",
        ),
        (
            ({"scheme": "w8a8", "copy_weights": True}, {"expert_dtype": torch.int8}),
            ({"scheme": "w8a8", "copy_weights": False}, {"expert_dtype": torch.int8}),
            "weights lie in ND format",
        ),
    ],
    "weight_layout": [
        (({}, {}), ({}, {"transpose_weight1": True}), "allow copies of up to 96 MB per rank"),
        (
            ({"copy_weights": True}, {"transpose_weight2": True}),
            ({}, {"transpose_weight2": True}),
            "[E, K, N]",
        ),
        (
            (MXFP8, FP8),
            (MXFP8, FP8 | {"transpose_weight1": False}),
            "reads weights as [E, N, K]",
        ),
    ],
    "weight_scales": [
        (
            (W8A8, {"expert_dtype": torch.int8}),
            (W8A8, {"expert_dtype": torch.int8, "weight_scale_groups": (16, 1)}),
            "scales for 16 and 1 groups of inputs; aclnnMegaMoe takes one per output channel",
        ),
    ],
    "bias": [
        (({}, {}), ({}, {"has_bias2": True}), "takes no bias"),
        ((W4A8, INT4), (W4A8, INT4 | {"has_bias1": False}), "takes a bias on both GEMMs"),
    ],
    "dtypes": [
        (({}, {}), ({}, {"x_dtype": torch.float16}), "x is torch.float16"),
        (({}, {}), ({}, {"output_dtype": torch.float32}), "output torch.float32"),
        (
            ({}, {"router_dtype": torch.bfloat16}),
            ({}, {"router_dtype": torch.float16}),
            "routing weights are torch.float16",
        ),
    ],
    "ids": [(({}, {}), ({}, {"ids_checked": False}), "not known to lie in")],
    "training": [(({}, {}), ({}, {"training": True}), "no gradient")],
    "capacity": [
        (
            ({"max_recv_token_num": 8 * 512 * 8}, {}),
            ({"max_recv_token_num": 8 * 512 * 8 - 1}, {}),
            "would drop tokens: a rank may receive 32768 rows",
        ),
        # No more rows arrive per token than the rank has experts.
        (
            ({"max_recv_token_num": 8 * 512}, {"num_experts": 8}),
            ({"max_recv_token_num": 8 * 512 - 1}, {"num_experts": 8}),
            "a rank may receive 4096 rows",
        ),
    ],
    "buffer": [
        (({"hccl_buffer_bytes": NEED}, {}), ({"hccl_buffer_bytes": NEED - 1}, {}), "HCCL_BUFFSIZE gives"),
        (
            (COMBINE_W8A8 | {"hccl_buffer_bytes": COMBINE_NEED}, {"expert_dtype": torch.int8}),
            (COMBINE_W8A8 | {"hccl_buffer_bytes": COMBINE_NEED - 1}, {"expert_dtype": torch.int8}),
            "HCCL_BUFFSIZE gives",
        ),
    ],
    "tensor_parallel": [(({}, {}), ({"tensor_parallel": 2}, {}), "sharded over 2 ranks")],
    "lora": [(({}, {}), ({"lora": True}, {}), "LoRA")],
    "eplb": [(({}, {}), ({"dynamic_eplb": True}, {}), "EPLB")],
    "streams": [(({}, {}), ({"streams": 2}, {}), "2 streams")],
    "worth_it": [
        (
            ({"min_weight_bytes": SHARE}, {}),
            ({"min_weight_bytes": SHARE + 1}, {}),
            "below min_weight_bytes",
        ),
        (
            (W4A8 | {"min_weight_bytes": SHARE // 4}, INT4),
            (W4A8 | {"min_weight_bytes": SHARE // 4 + 1}, INT4),
            "below min_weight_bytes",
        ),
    ],
}
CASES = [(name, *case) for name, cases in TABLE.items() for case in cases]


@pytest.mark.parametrize(("name", "good", "bad", "words"), CASES, ids=[case[0] for case in CASES])
def test_a_check_from_both_sides(name: str, good: Any, bad: Any, words: str) -> None:
    passed = verdict(good[0], **good[1])
    assert passed.ok, f"{passed.check}: {passed.reason}"
    refused = verdict(bad[0], **bad[1])
    assert (refused.ok, refused.check) == (False, name)
    assert words in refused.reason


def test_every_check_has_its_row_here() -> None:
    assert {*TABLE, *LIMITED} == set(EVERY_CHECK)


def test_a_quantised_layer_within_the_limits_is_allowed() -> None:
    assert verdict(W8A8, expert_dtype=torch.int8).ok
    assert verdict(W4A8, **INT4).ok


# --- rank-uniform by type ---------------------------------------------------------------------------------


class Watched(NpuLayer):
    """Notes which fields are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in FIELDS:
            SEEN.add(name)
        return super().__getattribute__(name)


FIELDS = {field.name for field in dataclasses.fields(NpuLayer)}
SEEN: set[str] = set()


@pytest.mark.parametrize("check", [*IDENTITY, *checks_of_row(rows()[0])], ids=lambda check: check.name)
def test_a_check_reads_what_it_says(check: Any) -> None:
    own = {field.name: getattr(SPEC, field.name) for field in dataclasses.fields(MoeSpec)}
    layer = Watched(**own, conditions=CONDITIONS)
    SEEN.clear()
    check.test(layer)
    assert set(check.reads) >= SEEN


def test_no_condition_is_known_to_one_rank_only() -> None:
    # A new field must be equal on all ranks: think, then add it here.
    assert {field.name for field in dataclasses.fields(Conditions)} == {
        "soc",
        "revision",
        "num_max_tokens_per_rank",
        "max_recv_token_num",
        "hccl_buffer_bytes",
        "scheme",
        "weight_format",
        "tensor_parallel",
        "lora",
        "dynamic_eplb",
        "streams",
        "min_weight_bytes",
        "copy_weights",
    }
    assert {field.name for field in dataclasses.fields(MoeSpec)} | {"conditions"} == FIELDS


ANY_VALUE = {
    "device": "the SoC is asked for instead",
    "weight_form": "stacked weights are handed over as views, one per expert",
    "activation_program": "belongs to the activation `custom`, which no row has",
    "product_dtype": "rounding inside the operator",
    "activation_dtype": "rounding inside the operator",
    "hidden_dtype": "rounding inside the operator",
    "rows_dtype": "rounding inside the operator",
    "row_norm_eps": "belongs to row_norm",
    "has_row_scale": "belongs to row_norm",
    "has_router_weight": "ones are handed over",
}


def test_every_field_of_a_spec_is_judged_or_knowingly_not() -> None:
    read = {name for check in checks_of_row(rows()[0]) for name in check.reads}
    assert read.isdisjoint(ANY_VALUE)
    assert read | set(ANY_VALUE) == FIELDS


# --- modes ------------------------------------------------------------------------------------------------


def test_the_modes() -> None:
    yes, no = verdict(), verdict({"lora": True})
    assert resolve("auto", yes)
    assert resolve("on", yes)
    assert not resolve("off", yes)
    assert not resolve("off", no)
    assert not resolve("auto", no)
    with pytest.raises(NotAllowedError, match=r'mode="on".*lora: LoRA'):
        resolve("on", no)
    with pytest.raises(NotAllowedError, match=r"too late to fall back.*lora: LoRA"):
        resolve("auto", no, collectives_started=True)
    assert resolve("auto", yes, collectives_started=True)
    with pytest.raises(ValueError, match="mode: expected off, auto or on, got 'maybe'"):
        resolve("maybe", yes)  # type: ignore[arg-type]


# --- the data ---------------------------------------------------------------------------------------------


def test_families() -> None:
    assert [
        family_of(name) for name in ("Ascend910B3", "Ascend910_9392", "Ascend950PR_9599", "Ascend910A", "")
    ] == [
        "A2",
        "A3",
        "A5",
        "",
        "",
    ]


def test_each_revision_and_family_has_one_row() -> None:
    keys = [(row.revision, family) for row, family in ROWS]
    assert len(set(keys)) == len(keys)
    assert limits("R0", "A3") is None
    assert limits("R1", "A5") is None
    assert {name for row in rows() for name in row.schemes} == set(schemes())


def test_the_buffer_by_hand() -> None:
    traffic = Traffic(ep_world_size=8, num_experts=64, top_k=8, hidden=2048, tokens=512, quantised=False)
    # 8 * align(8 * 128 + 1, 128) * 4 counts, 4096 rows out and back of 2 * 2048 bytes, flags, 10 MB; two halves
    assert required_bytes("A3", traffic) == 2 * (8 * 1152 * 4 + 4096 * 8192 + 524288 + 10 * MIB)
    quantised = dataclasses.replace(traffic, quantised=True)
    assert required_bytes("A3", quantised) == 2 * (
        8 * 1152 * 4 + 4096 * (2560 + 4096) + 4096 * 4 + 524288 + 10 * MIB
    )
    received = 8 * 512 * 8
    flags = 8 * 512 + 8 * 128 * 64 + 8 * 64
    assert required_bytes("A2", traffic) == 2 * (
        8 * 1152 * 4 + received * 4096 + 4096 * 4096 + flags + 10 * MIB
    )
    assert required_bytes("A2", traffic, 100) == 2 * (
        8 * 1152 * 4 + 4096 * 4096 + 100 * 4096 + flags + 10 * MIB
    )
    assert required_bytes("A5", traffic) == 0
    with pytest.raises(ValueError, match="family: expected A2, A3 or A5, got 'A7'"):
        required_bytes("A7", traffic)


def test_an_unknown_device_or_revision_ends_the_questions() -> None:
    found = verdict({"soc": "Ascend310P3"})
    assert [check.name for check in found.checks] == ["soc", "revision"]
    assert judge(NpuLayer.of(SPEC, CONDITIONS), IDENTITY).ok
