"""One rank of an expert-parallel layer, over the fake vendor library that computes; for processes that compile it."""

import importlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import moefuse.ops  # noqa: F401  registers the operator
from moefuse import targets
from moefuse.ops.ep_context import provide
from moefuse.targets.npu import NpuContext, Sizes, adopt, close_npu_contexts
from moefuse.targets.npu.target import NpuTarget
from moefuse.targets.npu.weights import encoded_scales
from tests.npu.emulator.kernels import NZ, tiled
from tests.targets.npu.computing import Fake, fake, table

W, E, K, H, I = 2, 4, 2, 1024, 1024  # noqa: E741


@contextmanager
def vendor(revision: str = "R6", on_streams: bool = False) -> Iterator[Fake]:
    """The npu target of this process calls the fake library; on_streams: on those of the emulated device."""
    with tempfile.TemporaryDirectory() as folder:
        made, before = fake(Path(folder), revision), targets.get("npu")
        targets.register(NpuTarget(lambda: made.machine, None if on_streams else lambda _: 0))
        try:
            yield made
        finally:
            targets.register(before)
            close_npu_contexts()


class Layers(nn.Module):
    """Residual MoE layers whose experts are spread over two ranks; this is rank 0.

    listed: weights per expert. named: the graph knows the context by name, as the matcher makes it.
    """

    def __init__(
        self,
        layers: int,
        uniform_tokens: bool,
        listed: bool = False,
        device: str = "cpu",
        named: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.named = named
        self.gates = nn.ParameterList(torch.randn(H, E).to(device) for _ in range(layers))
        w1, w2 = torch.randn(E, H, 2 * I) / H**0.5, torch.randn(E, I, H) / I**0.5
        self.w1, self.w2 = w1.bfloat16(), w2.bfloat16()
        half = [w[: E // W].clone().to(device) for w in (self.w1, self.w2)]
        self.own1 = nn.ParameterList(half[0].unbind() if listed else [half[0]])
        self.own2 = nn.ParameterList(half[1].unbind() if listed else [half[1]])
        mine = [
            [w for stack in own for w in (stack if not listed else [stack])] for own in (self.own1, self.own2)
        ]
        others = [list(w[E // W :]) for w in (self.w1, self.w2)]
        context: NpuContext = adopt(
            table(0, mine[0] + others[0], mine[1] + others[1]).to(device),
            Sizes(W, E, K, H, 16),
            ccl_buffer_size=200 << 20,
            uniform_tokens=uniform_tokens,
        )
        self.register_buffer("context", context.tensor, persistent=False)
        provide("layers", context.tensor)

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            weights, ids = (x.float() @ gate).softmax(-1).topk(K)
            own: list[Any] = [list(self.own1), list(self.own2), [], []]
            y, _ = torch.ops.moefuse.mega_moe.ep(
                torch.ops.moefuse.ep_context("layers") if self.named else self.context,
                x,
                ids,
                weights,
                *own,
                num_experts=E,
                ep_world_size=W,
                transpose_weight1=False,
                transpose_weight2=False,
                target="npu",
            )
            x = x + y
        return x


class QuantisedLayers(nn.Module):
    """The same with experts of int8, their scales as float32; this is rank 0. On an NPU the weights lie in tiles."""

    def __init__(self, layers: int, device: str = "cpu") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.gates = nn.ParameterList(
            torch.randn(H, E, generator=generator).to(device) for _ in range(layers)
        )
        integers, scales = [], []
        for inputs, outputs in ((H, 2 * I), (I, H)):
            integers.append(
                torch.randint(-127, 128, (E, inputs, outputs), generator=generator, dtype=torch.int8)
            )
            scales.append((torch.rand(E, outputs, generator=generator) + 0.5) / 127 / inputs**0.5)
        self.integers, self.scales = integers, scales
        mine = [t[: E // W].clone().to(device) for t in (*integers, *scales)]
        if device == "npu":
            mine[:2] = [importlib.import_module("torch_npu").npu_format_cast(t, NZ) for t in mine[:2]]
        self.own = nn.ParameterList(nn.Parameter(t, requires_grad=False) for t in mine)
        self.others = [tiled(t[E // W :]) for t in integers]
        self.encoded = [encoded_scales([t], keep=False) for t in scales]
        matrices = [[*m, *o] for m, o in zip(mine[:2], self.others, strict=True)]
        self.context = adopt(
            table(0, *matrices, *self.encoded).to(device),
            Sizes(W, E, K, H, 16, scheme="w8a8"),
            ccl_buffer_size=200 << 20,
            uniform_tokens=True,
        ).tensor

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            weights, ids = (x.float() @ gate).softmax(-1).topk(K)
            w1, w2, s1, s2 = ([t] for t in self.own)
            y, _ = torch.ops.moefuse.mega_moe.quant_ep(
                self.context,
                *(x, ids, weights, w1, w2, [], [], s1, s2, [], []),
                quant="w8a8",
                num_experts=E,
                ep_world_size=W,
                transpose_weight1=False,
                transpose_weight2=False,
                target="npu",
            )
            x = x + y
        return x

    def whole(self, x: Tensor) -> Tensor:
        """On the reference target, with all experts on one rank."""
        for gate in self.gates:
            weights, ids = (x.float() @ gate.cpu()).softmax(-1).topk(K)
            lists = [[t] for t in (*self.integers, *self.scales)]
            y, _ = torch.ops.moefuse.mega_moe.quant(
                None,
                *(x, ids, weights, lists[0], lists[1], [], [], lists[2], lists[3], [], []),
                quant="w8a8",
                num_experts=E,
                transpose_weight1=False,
                transpose_weight2=False,
            )
            x = x + y
        return x
