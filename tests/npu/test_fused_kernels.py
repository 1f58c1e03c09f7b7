"""The reference kernels that do two steps at once, against loops over Python numbers."""

import math

import pytest
import torch

from moefuse.testing import npu_reference_kernels

npu_reference_kernels.install()
npu = torch.ops.npu

GROUPS, OF_ROW = [3, 0, 2], [0, 0, 0, 2, 2]
C, N = 6, 8


def silu(v: float) -> float:
    return v / (1 + math.exp(-v))


def int8(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_swiglu_quant(left: bool, counts: bool) -> None:
    x, smooth = torch.randn(5, N), torch.rand(3, N // 2) + 0.5
    y, scales = npu.npu_swiglu_quant(
        x,
        smooth_scales=smooth,
        group_index=torch.tensor(GROUPS if counts else [3, 3, 5], dtype=torch.int32),
        group_list_type=1 if counts else 0,
        activate_left=left,
        quant_mode=1,
    )
    for i, e in enumerate(OF_ROW):
        h = [float(v) for v in x[i]]
        pairs = zip(h[: N // 2], h[N // 2 :], strict=True)
        a = [silu(g) * u if left else g * silu(u) for g, u in pairs]
        a = [v * float(s) for v, s in zip(a, smooth[e], strict=True)]
        top = max(abs(v) for v in a) / 127
        assert float(scales[i]) == pytest.approx(top, rel=1e-4)
        assert y[i].tolist() == pytest.approx([v / top for v in a], abs=0.51)


@pytest.mark.parametrize("counts", [False, True])
def test_grouped_matmul_swiglu_quant(counts: bool) -> None:
    x, w, w_scale, x_scale = int8(6, C), int8(3, C, N), torch.rand(3, N) / 1000, torch.rand(6)
    y, scales = npu.npu_grouped_matmul_swiglu_quant_v2(
        x,
        [w],
        [w_scale],
        x_scale,
        torch.tensor(GROUPS if counts else [3, 3, 5]),
        group_list_type=1 if counts else 0,
    )
    for i, e in enumerate(OF_ROW):
        h = [
            sum(int(x[i, c]) * int(w[e, c, n]) for c in range(C)) * float(w_scale[e, n]) * float(x_scale[i])
            for n in range(N)
        ]
        a = [silu(g) * u for g, u in zip(h[: N // 2], h[N // 2 :], strict=True)]
        top = max(abs(v) for v in a) / 127
        assert float(scales[i]) == pytest.approx(top, rel=1e-4)
        assert y[i].tolist() == pytest.approx([v / top for v in a], abs=0.51)
    assert scales[5:].isnan().all()


@pytest.mark.parametrize("everything", [False, True])
def test_grouped_matmul_finalize_routing(everything: bool) -> None:
    x, w, scale = int8(5, C), int8(3, C, N), torch.rand(3, N) / 1000
    index, per_token, logit = torch.tensor([1, 0, 3, 1, 0]), torch.rand(5), torch.rand(5)
    shared = torch.randn(2, N).bfloat16()
    extra = {"logit": logit, "shared_input": shared, "shared_input_weight": 0.5, "shared_input_offset": 1}
    y = npu.npu_grouped_matmul_finalize_routing(
        x,
        w,
        torch.tensor(GROUPS),
        scale=scale,
        pertoken_scale=per_token,
        row_index=index,
        output_bs=4,
        **(extra if everything else {}),
    )
    want = torch.zeros(4, N, dtype=torch.float64)
    for i, e in enumerate(OF_ROW):
        for n in range(N):
            value = sum(int(x[i, c]) * int(w[e, c, n]) for c in range(C)) * float(scale[e, n] * per_token[i])
            want[index[i], n] += value * (float(logit[i]) if everything else 1.0)
    if everything:
        want[1:3] += 0.5 * shared.double()
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)  # float32 sums of a few terms


def test_re_routing() -> None:
    sizes = [[2, 1, 0], [1, 3, 2]]  # [rank][expert]
    labels = [(e, r) for r, row in enumerate(sizes) for e, size in enumerate(row) for _ in range(size)]
    tokens, scales = torch.arange(9.0).unsqueeze(1).expand(9, C).contiguous(), torch.rand(9)
    rows, row_scales, index, counts = npu.npu_moe_re_routing(
        tokens, torch.tensor(sizes, dtype=torch.int32), per_token_scales=scales
    )
    order = sorted(range(9), key=lambda i: labels[i])  # by expert, then rank, then as they lay
    assert rows[:, 0].tolist() == order
    assert index.tolist() == order
    assert row_scales.tolist() == [float(scales[i]) for i in order]
    assert counts.tolist() == [3, 4, 2]
    assert npu.npu_moe_re_routing(tokens, torch.tensor(sizes))[1].isnan().all()
