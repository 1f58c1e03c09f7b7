"""`torch.ops.moefuse.ep_context`: the tensor of a communication context, by the name under which a graph knows it.

In: a name, made of what is equal on all ranks and in all processes, so that a compiled graph may come from a cache.
Out: the first argument of `mega_moe.ep`: int64 [4], or what a target has instead. Whoever plans the graph provides the
context before it runs.
"""

import torch
from torch import Tensor

from moefuse.ops.library import LIBRARY, TAGS

_CONTEXTS: dict[str, Tensor] = {}


def provide(name: str, tensor: Tensor) -> None:
    """Make `tensor` answer ep_context(name). The last one holds."""
    _CONTEXTS[name] = tensor


def provided(name: str) -> Tensor:
    """The tensor itself. Raises RuntimeError where there is none."""
    if name not in _CONTEXTS:
        raise RuntimeError(
            f"ep_context: no context {name!r} in this process: it is made when backend='moefuse' compiles the model"
        )
    return _CONTEXTS[name]


def _run(name: str) -> Tensor:
    return provided(name).clone()  # an operator's output is its own


def _fake(name: str) -> Tensor:
    """As the context is; int64 [4] on the CPU where there is none yet, as in a graph that is only drawn."""
    known = _CONTEXTS.get(name)
    if known is None:
        return torch.empty(4, dtype=torch.int64)
    return torch.empty(known.shape, dtype=known.dtype, device=known.device)


LIBRARY.define("ep_context(str name) -> Tensor", tags=TAGS)
LIBRARY.impl("ep_context", _run, "CompositeExplicitAutograd")
torch.library.register_fake("moefuse::ep_context", _fake, lib=LIBRARY)
