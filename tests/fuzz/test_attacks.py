"""Layers made to fool the lifter: what random edits hardly ever hit. Each is refused or computed as it stands."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moefuse.testing.capture import capture_graph
from moefuse.testing.judge import judge

T, K, E, H, I = 6, 2, 4, 16, 24  # noqa: E741
Activation = Callable[[Tensor, Tensor], Tensor]


def swiglu(g: Tensor, u: Tensor) -> Tensor:
    return functional.silu(g) * u


def layer(
    activation: Activation = swiglu, before: Callable[[Tensor], Tensor] = lambda rows: rows
) -> Callable[..., Tensor]:
    """A batched layer with one thing to change: the activation, or what happens to the token rows."""

    def forward(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        slots = ids.reshape(-1)
        rows = before(x.repeat_interleave(K, 0))
        g, u = torch.bmm(w1[slots], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        y = torch.bmm(w2[slots], activation(g, u).unsqueeze(-1)).squeeze(-1)
        return (y * weights.reshape(-1, 1)).view(T, K, H).sum(1)

    return forward


def regrouped(rows: Tensor, outer: int) -> Tensor:
    """The features as [outer, inner], read inner first: a permutation that no size tells."""
    return rows.view(rows.shape[0], outer, -1).transpose(1, 2).reshape(rows.shape)


def inputs(scale: float = 1.0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, H, generator=generator) * scale
    ids = torch.rand(T, E, generator=generator).argsort(-1)[:, :K].contiguous()
    weights = torch.rand(T, K, generator=generator)
    w1 = torch.randn(E, 2 * I, H, generator=generator) / 4
    return x, ids, weights, w1, torch.randn(E, H, I, generator=generator) / 5


ATTACKS = {
    "plain": (layer(), 1.0),
    "a knee far out": (layer(lambda g, u: functional.silu(g.clamp(max=2e4)) * u), 1e6),
    "a step far out": (layer(lambda g, u: torch.where(g > 3e4, 0.0 * g, functional.silu(g)) * u), 1e6),
    "a knee close to zero": (layer(lambda g, u: g.clamp(max=1e-5) * u), 1e-4),
    "a tiny epsilon": (layer(lambda g, u: g * torch.rsqrt(g * g + 1e-12) * u), 1e-6),
    "the sign of small values": (layer(lambda g, u: torch.sign(g) * u), 1e-6),
    "truncated gate": (layer(lambda g, u: functional.silu((g * 4).to(torch.int32).float()) * u), 1.0),
    "saturated to int8": (layer(lambda g, u: (swiglu(g, u) * 50).to(torch.int8).float()), 1.0),
    "gate as a mask": (layer(lambda g, u: g.to(torch.bool).float() * u), 1.0),
    "truncated rows": (layer(before=lambda rows: (rows * 3).to(torch.int32).float()), 1.0),
    "a constant on the rows": (layer(before=lambda rows: rows * 2.0), 1.0),
    "a constant under the activation": (layer(lambda g, u: functional.silu(g * 0.5) * u), 1.0),
    "gate of the neighbour": (layer(lambda g, u: functional.silu(g.roll(1, -1)) * u), 1.0),
    "up of another slot": (layer(lambda g, u: functional.silu(g) * u.roll(1, 0)), 1.0),
    "features of both halves in another order": (
        layer(lambda g, u: functional.silu(regrouped(g, 4)) * regrouped(u, 4)),
        1.0,
    ),
    "features of the gate in another order": (layer(lambda g, u: functional.silu(regrouped(g, 4)) * u), 1.0),
    "features between the GEMMs in another order": (layer(lambda g, u: regrouped(swiglu(g, u), 6)), 1.0),
    "features of the rows in another order": (layer(before=lambda rows: regrouped(rows, 2)), 1.0),
    "the bits of the activation": (layer(lambda g, u: swiglu(g, u).view(torch.int32).float() * 1e-9), 1.0),
    "an activation divided by a number": (layer(lambda g, u: swiglu(g, u) / 3), 1.0),
    "rows divided by a number": (layer(before=lambda rows: rows / 3), 1.0),
    "normed rows": (layer(lambda g, u: functional.silu(g) / (g.sum(-1, keepdim=True).abs() + 1) * u), 1.0),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_strange_layers_are_refused_or_right(name: str) -> None:
    forward, scale = ATTACKS[name]
    captured = capture_graph(forward, inputs(scale))
    verdict = judge(captured.graph_module, [captured.inputs])
    assert verdict.kind in ("equal", "refused"), verdict.reason
    if name == "plain":
        assert verdict.fused == 1, verdict.reason
