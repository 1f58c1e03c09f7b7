"""What `test_ranks.py` looks at: one rank of an expert-parallel model on emulated devices, over HCCL's process group.

In: the rank, the number of ranks and a file for their store. Out: a line of JSON, the results by name.
"""

# ruff: noqa: E402  (the emulated libraries are loaded before torch_npu)

import json
import sys
from typing import Any

from tests.npu.emulator import install

install()

import torch
import torch.distributed as dist
from torch import Tensor, nn

import moefuse
from moefuse import targets
from moefuse.testing import npu_reference_kernels
from tests.npu.emulated_vendor import combine_installed, installed
from tests.npu.emulator.kernels import NZ
from tests.npu.sequences import npu
from tests.targets.npu.test_spread import E, H, I, K, Layer, W

MOST = 8
UNEVEN = ((5, 2), (3, 4), (5, 3))
EMPTY = ((5, 2), (0, 3), (1, 1), (8, 0))
"""Tokens of both ranks, one step after the other."""


def tokens(count: int, rank: int, step: int) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()


class Exchange(Layer):
    """The rows travel by all_to_all in plain torch. torch_npu's one_hot doesn't trace with sizes that are symbols."""

    def counted(self, ranks: Tensor) -> Tensor:
        return torch.zeros(W, dtype=torch.int64, device=ranks.device).scatter_add(
            0, ranks, torch.ones_like(ranks)
        )


class Mc2(nn.Module):
    """The rows travel by MC2's dispatch and combine; experts of int8, quantised with a scale of each row."""

    def __init__(self, group: str, world: int, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.place = (group, world, rank, E)
        self.gate = nn.Parameter(torch.randn(H, E, generator=generator))
        self.integers, self.scales = [], []
        for inputs, outputs in ((H, 2 * I), (I, H)):
            self.integers.append(
                torch.randint(-127, 128, (E, inputs, outputs), generator=generator, dtype=torch.int8)
            )
            self.scales.append((torch.rand(E, outputs, generator=generator) + 0.5) / 127 / inputs**0.5)
        own = slice(rank * E // world, (rank + 1) * E // world)
        for name, (q, s) in zip(("1", "2"), zip(self.integers, self.scales, strict=True), strict=True):
            self.register_buffer(f"w{name}", q[own].clone())
            self.register_buffer(f"s{name}", s[own].clone())

    def cast(self) -> "Mc2":
        """On the device, in tiles: as engines do it before they compile."""
        import torch_npu

        self.npu()
        self.w1, self.w2 = (torch_npu.npu_format_cast(w, NZ) for w in (self.w1, self.w2))
        return self

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (x.float() @ self.gate).softmax(-1).topk(K)
        ids = ids.int()
        rows, scales, where, counts, received, _, _ = npu.npu_moe_distribute_dispatch_v2(
            x, ids, *self.place, quant_mode=2
        )
        groups = {
            "group_list": counts,
            "group_list_type": 1,
            "group_type": 0,
            "split_item": 2,
            "output_dtype": 15,
        }
        h = npu.npu_grouped_matmul([rows], [self.w1], scale=[self.s1], per_token_scale=[scales], **groups)[0]
        a, own = npu.npu_dynamic_quant(npu.npu_swiglu(h))
        y = npu.npu_grouped_matmul([a], [self.w2], scale=[self.s2], per_token_scale=[own], **groups)[0]
        return npu.npu_moe_distribute_combine_v2(y, ids, where, received, weights, *self.place)


def by_loop(x: Tensor, gate: Tensor, expert: Any) -> Tensor:
    """In float64: sum over the chosen experts of weight * expert(row)."""
    weights, ids = (x.float() @ gate).softmax(-1).topk(K)
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, k in ((t, k) for t in range(len(x)) for k in range(K)):
        y[t] += float(weights[t, k]) * expert(x[t].double(), int(ids[t, k]))
    return y


def activated(h: Tensor) -> Tensor:
    gate, up = h.chunk(2)
    return torch.nn.functional.silu(gate) * up


def steps(model: nn.Module, gate: Tensor, expert: Any, rank: int, inner: str) -> Any:
    """For each step how far the fused model is from a loop; then how many layers are fused, and what was absorbed.

    inner: npugraph_ex captures a graph for each number of tokens. It doesn't take sizes that may be 0, 1 or more: no
    tokens and one token are graphs of their own there, which a rank compiles when it needs them.
    """
    torch._dynamo.reset()
    cases = EMPTY if inner == "eager" else UNEVEN + EMPTY
    options = {"ep_max_tokens": MOST, "mode": "on", "inner": inner}
    run = torch.compile(model, backend="moefuse", options=options, fullgraph=True)
    errors = []
    for step, counts in enumerate(cases):
        x = tokens(counts[rank], rank, step)
        given = x.npu()
        if inner == "eager":
            torch._dynamo.decorators.mark_unbacked(given, 0)
        elif len(x) > 1:
            torch._dynamo.mark_dynamic(given, 0)
        got, want = run(given).cpu().double(), by_loop(x, gate, expert)
        assert got.shape == want.shape
        errors.append(float((got - want).norm() / want.norm()) if len(x) else 0.0)
    report = moefuse.reports()[-1]
    return [errors, [graph.fused for graph in report.graphs], report.sites[0].comm.partition(";")[0]]


def floats(rank: int, world: int) -> Any:
    generator = torch.Generator().manual_seed(4)
    w1 = (torch.randn(E, H, 2 * I, generator=generator) / H**0.5).bfloat16()
    w2 = (torch.randn(E, I, H, generator=generator) / I**0.5).bfloat16()
    model = Exchange()
    own = slice(rank * E // world, (rank + 1) * E // world)
    model.gate.data.copy_(torch.randn(H, E, generator=generator))
    model.w1.data.copy_(w1[own])
    model.w2.data.copy_(w2[own])
    gate = model.gate.detach().clone()

    def expert(row: Tensor, e: int) -> Tensor:
        return activated(row @ w1[e].double()) @ w2[e].double()

    return steps(model.npu(), gate, expert, rank, "eager")


def quantised(rank: int, world: int) -> Any:
    torch.npu.config.allow_internal_format = True
    npu_target: Any = targets.get("npu")
    npu_target.tell(weights_cast=True)
    backend: Any = dist.group.WORLD._get_backend(torch.device("npu"))  # type: ignore[union-attr]
    model = Mc2(backend.get_hccl_comm_name(rank), world, rank)
    gate = model.gate.detach().clone()

    def product(row: Tensor, which: int, e: int) -> Tensor:
        own = row.abs().max() / 127
        return (
            ((row / own).round() @ model.integers[which][e].double()) * model.scales[which][e].double() * own
        )

    return steps(
        model.cast(), gate, lambda row, e: product(activated(product(row, 0, e)), 1, e), rank, "npugraph_ex"
    )


def main(rank: int, world: int, store: str) -> None:
    npu_reference_kernels.install()
    dist.init_process_group("hccl", store=dist.FileStore(store, world), rank=rank, world_size=world)
    total = torch.tensor([float(rank + 1)]).npu()
    dist.all_reduce(total)
    result: dict[str, Any] = {"sum": float(total.cpu())}
    with torch.no_grad(), installed():
        result["floats"] = floats(rank, world)
        result["quantised"] = quantised(rank, world)
    with torch.no_grad(), combine_installed():
        result["combine"] = quantised(rank, world)
    print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
