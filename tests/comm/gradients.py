"""What ranks do in the tests of gradients: those of a layer over several ranks against those of one process.

In: a layer, and tokens per rank. Out: nothing; `check` fails where a gradient of this rank's tokens or of its own
experts isn't what one process gets from all tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.comm import context_for
from tests.comm.layers import Spread

MAX_TOKENS = 16


def probe(layer: Spread, rank: int, count: int) -> Tensor:
    """The gradient that y of one rank gets."""
    generator = torch.Generator().manual_seed(77 * layer.seed + rank)
    rows = torch.randn(count, layer.layer.down.shape[1], generator=generator, dtype=torch.float64)
    return rows.to(layer.layer.kwargs.get("output_dtype") or layer.layer.x.dtype)


def leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def weights_of(layer: Spread) -> tuple[list[Tensor], list[int]]:
    """The experts' tensors, flat, and how many of them are of each kind; a row scale is the last."""
    parts = [*layer.layer.args[4:8], [t for t in layer.layer.args[8:] if t is not None]]
    return [t for part in parts for t in part], [len(part) for part in parts]


def cut(flat: Sequence[Tensor], lengths: list[int]) -> list[list[Tensor]]:
    items = iter(flat)
    return [[next(items) for _ in range(length)] for length in lengths]


def own(flat: Sequence[Tensor], lengths: list[int], layer: Spread, rank: int, world: int) -> list[Tensor]:
    """This rank's part of tensors of all experts; a row scale that all experts share is everybody's."""
    *parts, scale = cut(flat, lengths)
    mine = [t for part in parts for t in layer.local(part, rank, world)]
    return mine + (layer.local(scale, rank, world) if scale and scale[0].dim() == 2 else scale)


def together(
    layer: Spread, context: Tensor, rank: int, world: int, count: int, target: str, ids: Tensor | None
) -> list[Tensor]:
    """y, and the gradients of x, of the routing weights and of this rank's experts."""
    x, chosen, weights = layer.tokens(rank, count, ids)
    flat, lengths = weights_of(layer)
    lengths = [n // world if n >= 8 else n for n in lengths]
    inputs = leaves([x, weights, *own(flat, weights_of(layer)[1], layer, rank, world)])
    *lists, scale = cut(inputs[2:], lengths)
    kwargs = layer.layer.kwargs | {"ep_world_size": world, "target": target}
    y, _ = torch.ops.moefuse.mega_moe.ep(context, inputs[0], chosen, inputs[1], *lists, *scale, **kwargs)
    return [y, *torch.autograd.grad(y, inputs, probe(layer, rank, count))]


def alone(layer: Spread, rank: int, counts: tuple[int, ...], ids: Tensor | None) -> list[Tensor]:
    """The same from one process, in which all tokens are."""
    world = len(counts)
    everyone = [layer.tokens(r, n, None if ids is None else ids.expand(n, -1)) for r, n in enumerate(counts)]
    x, chosen, weights = map(torch.cat, zip(*everyone, strict=True))
    flat, lengths = weights_of(layer)
    inputs = leaves([x, weights, *flat])
    *lists, scale = cut(inputs[2:], lengths)
    y, _ = torch.ops.moefuse.mega_moe(
        None, inputs[0], chosen, inputs[1], *lists, *scale, **layer.layer.kwargs, target="reference"
    )
    grads = torch.autograd.grad(y, inputs, torch.cat([probe(layer, r, n) for r, n in enumerate(counts)]))
    mine = [part.split(counts)[rank] for part in (y, *grads[:2])]
    return [*mine, *own(grads[2:], lengths, layer, rank, world)]


def check(
    layer: Spread,
    rank: int,
    counts: tuple[int, ...],
    transport: str = "shared memory",
    ids: Tensor | None = None,
    target: str = "reference",
) -> None:
    """See the module text. A row scale that all experts share is left out: each rank has its own part of the sum."""
    world = len(counts)
    context = context_for(None, layer.capacity(world, MAX_TOKENS), transport=transport, timeout=30)
    given = None if ids is None else ids.expand(counts[rank], -1)
    got = together(layer, context.tensor, rank, world, counts[rank], target, given)
    want = alone(layer, rank, counts, ids)
    # The same products of the same rows, added in another order: an ulp of each of some tens of terms of size 4.
    eps = max(torch.finfo(t.dtype).eps for t in want)
    scale = layer.layer.scale
    pairs = list(zip(got, want, strict=True))
    for name, (a, b) in enumerate(pairs[:-1] if scale is not None and scale.dim() == 1 else pairs):
        assert a.dtype == b.dtype
        torch.testing.assert_close(
            a, b, rtol=64 * eps, atol=64 * eps, msg=lambda m, n=name: f"gradient {n}: {m}"
        )
