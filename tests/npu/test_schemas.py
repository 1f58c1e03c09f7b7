"""moefuse's own schemas and shapes against those of the real torch_npu. Runs where the wheel is installed."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from moefuse.testing.npu_reference_kernels import KERNELS, install
from moefuse.testing.npu_reference_kernels.schemas import SCHEMAS

install()
npu = torch.ops.npu


def test_every_kernel_has_a_schema() -> None:
    assert {schema.partition("(")[0] for schema in SCHEMAS} == set(KERNELS)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.partition("(")[0])
def test_a_schema_is_the_real_one(schema: str) -> None:
    own = torch._C.parse_schema(f"npu::{schema}")
    real = torch._C._get_schema(own.name, own.overload_name)
    assert str(own) == str(real)


X, IDS = torch.randn(6, 16, dtype=torch.bfloat16), torch.randint(0, 8, (6, 2), dtype=torch.int32)
ROWS = torch.randn(12, 16, dtype=torch.bfloat16)
POSITION, GROUPS = torch.arange(12, dtype=torch.int32), torch.full((8,), 1, dtype=torch.int64)
WIDE = torch.randn(6, 128, dtype=torch.bfloat16)
MX = {
    "8": (torch.zeros(12, 128).to(torch.float8_e4m3fn), torch.zeros(8, 256, 128).to(torch.float8_e4m3fn).mT),
    "4": (torch.zeros(12, 64, dtype=torch.uint8), torch.zeros(8, 256, 64, dtype=torch.uint8).mT),
    "84": (torch.zeros(12, 128).to(torch.float8_e4m3fn), torch.zeros(8, 256, 64, dtype=torch.uint8).mT),
}
"""Rows and weights in float8, in float4 and in both."""
MX_SCALES = torch.zeros(12, 2, 2, dtype=torch.uint8), torch.zeros(8, 2, 256, 2, dtype=torch.uint8)
CALLS: dict[str, Callable[..., Any]] = {
    "gating softmax": lambda: npu.npu_moe_gating_top_k_softmax(X, None, 2),
    "gating": lambda: npu.npu_moe_gating_top_k(X, 2, out_flag=True),
    "init v1": lambda: npu.npu_moe_init_routing(X, IDS, IDS, 4),
    "init v2": lambda: npu.npu_moe_init_routing_v2(X, IDS, expert_num=8, expert_tokens_num_flag=True),
    "init v2 active": lambda: npu.npu_moe_init_routing_v2(X, IDS, expert_num=8, active_num=5),
    "init v2 range": lambda: npu.npu_moe_init_routing_v2(X, IDS, expert_num=8, active_expert_range=[2, 5]),
    "init v2 quant": lambda: npu.npu_moe_init_routing_v2(X, IDS, expert_num=8, quant_mode=1),
    "tokens": lambda: npu.npu_moe_compute_expert_tokens(POSITION, 8),
    "permute": lambda: npu.npu_moe_token_permute(X, IDS),
    "permute cut": lambda: npu.npu_moe_token_permute(X, IDS, 5),
    "gmm": lambda: npu.npu_grouped_matmul(
        [ROWS], [torch.ones(8, 16, 4).bfloat16()], group_list=GROUPS, split_item=2, group_type=0
    ),
    "gmm int8": lambda: npu.npu_grouped_matmul(
        [ROWS.to(torch.int8)],
        [torch.ones(8, 16, 4, dtype=torch.int8)],
        scale=[torch.ones(8, 4)],
        group_list=GROUPS,
        split_item=2,
        group_type=0,
        output_dtype=15,
    ),
    "swiglu": lambda: npu.npu_swiglu(ROWS),
    "dynamic quant": lambda: npu.npu_dynamic_quant(ROWS),
    "dequant swiglu quant": lambda: npu.npu_dequant_swiglu_quant(ROWS, quant_mode=1),
    "swiglu quant": lambda: npu.npu_swiglu_quant(ROWS, quant_mode=1, dst_type=torch.int8),
    "gmm swiglu quant": lambda: npu.npu_grouped_matmul_swiglu_quant_v2(
        ROWS.to(torch.int8),
        [torch.ones(8, 16, 4, dtype=torch.int8)],
        [torch.ones(8, 4)],
        torch.ones(12),
        GROUPS,
        group_list_type=1,
    ),
    "gmm finalize": lambda: npu.npu_grouped_matmul_finalize_routing(
        ROWS.to(torch.int8),
        torch.ones(8, 16, 4, dtype=torch.int8),
        GROUPS,
        scale=torch.ones(8, 4),
        pertoken_scale=torch.ones(12),
        logit=torch.ones(12),
        row_index=(POSITION // 2).long(),
        output_bs=6,
    ),
    "gmm swiglu quant v1": lambda: npu.npu_grouped_matmul_swiglu_quant(
        ROWS.to(torch.int8), torch.ones(8, 16, 4, dtype=torch.int8), GROUPS, torch.ones(8, 4), torch.ones(12)
    ),
    "dynamic quant int4": lambda: npu.npu_dynamic_quant(ROWS, dst_type=16),
    **{
        f"mx quant {number}": lambda number=number: npu.npu_dynamic_mx_quant(WIDE, dst_type=number)
        for number in (23, 24, 292, 296)
    },
    **{
        f"init v2 mx {mode}": lambda mode=mode: npu.npu_moe_init_routing_v2(
            WIDE, IDS, expert_num=8, expert_tokens_num_flag=True, expert_tokens_num_type=1, quant_mode=mode
        )
        for mode in (2, 3, 9)
    },
    **{
        f"dispatch mx {number}": lambda number=number: npu.npu_moe_distribute_dispatch_v2(
            WIDE, IDS, "g", 1, 0, 8, quant_mode=4, y_dtype=number
        )
        for number in (23, 24, 296)
    },
    **{
        f"gmm mx {case}": lambda case=case: npu.npu_grouped_matmul(
            [MX[case][0]],
            [MX[case][1]],
            per_token_scale=[MX_SCALES[0]],
            group_list=GROUPS,
            split_item=2,
            group_type=0,
            output_dtype=15,
            per_token_scale_dtype=293,
            x_dtype=296 if case == "4" else None,
            weight_dtype=296 if case != "8" else None,
            **(
                {"antiquant_scale": [MX_SCALES[1]]}
                if case == "84"
                else {"scale": [MX_SCALES[1]], "scale_dtype": 293}
            ),
        )
        for case in ("8", "4", "84")
    },
    **{
        f"gmm swiglu quant mx {case} {number}": lambda case=case, number=number: (
            npu.npu_grouped_matmul_swiglu_quant_v2(
                MX[case][0],
                [MX[case][1]],
                [MX_SCALES[1]],
                MX_SCALES[0],
                GROUPS,
                dequant_mode=2,
                quant_mode=2,
                quant_dtype=number,
                weight_scale_dtype=293,
                x_scale_dtype=293,
                x_dtype=296 if case == "4" else None,
                weight_dtype=296 if case != "8" else None,
            )
        )
        for case, number in (("8", 23), ("8", 24), ("4", 24), ("84", 24))
    },
    "dispatch": lambda: npu.npu_moe_distribute_dispatch(X, IDS, "g", 1, 0, 8, quant_mode=2),
    "dispatch v2": lambda: npu.npu_moe_distribute_dispatch_v2(X, IDS, "g", 1, 0, 8),
    "combine": lambda: npu.npu_moe_distribute_combine(
        ROWS, IDS, POSITION, POSITION, torch.ones(6, 2), "g", 1, 0, 8
    ),
    "combine v2": lambda: npu.npu_moe_distribute_combine_v2(
        ROWS, IDS, POSITION, POSITION, torch.ones(6, 2), "g", 1, 0, 8
    ),
    "combine and norm": lambda: npu.npu_moe_distribute_combine_add_rms_norm(
        *(ROWS, IDS, POSITION, POSITION, torch.ones(6, 2), torch.ones(6, 1, 16).bfloat16()),
        *(torch.ones(16).bfloat16(), "g", 1, 0, 8),
    ),
    "add and norm": lambda: npu.npu_add_rms_norm(ROWS, ROWS, torch.ones(16).bfloat16()),
    "re routing": lambda: npu.npu_moe_re_routing(ROWS, torch.full((3, 2), 2, dtype=torch.int32)),
    "finalize": lambda: npu.npu_moe_finalize_routing(
        ROWS, None, None, None, torch.ones(6, 2).bfloat16(), POSITION, None, 2
    ),
    "finalize pad": lambda: npu.npu_moe_finalize_routing(
        ROWS.view(3, 4, 16), None, None, None, None, POSITION, None, 3, 2
    ),
    "unpermute": lambda: npu.npu_moe_token_unpermute(ROWS, POSITION, torch.ones(6, 2).bfloat16()),
    "unpermute alone": lambda: npu.npu_moe_token_unpermute(ROWS, POSITION),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_kernel_gives_the_real_shapes_and_dtypes(case: str) -> None:
    real = CALLS[case]()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = CALLS[case]()
    described = [[(t.shape, t.dtype) for t in pytree.tree_leaves(result)] for result in (real, fake)]
    assert described[0] == described[1]


def test_installing_before_torch_npu_is_an_error() -> None:
    code = "from moefuse.testing import npu_reference_kernels as k; k.install()"
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert "import torch_npu before install()" in run.stderr
