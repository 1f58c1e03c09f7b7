"""Distributed inputs that a graph reads locally only: to the graph they are plain tensors.

In: a Dynamo graph and its inputs. transformers and FSDP keep sharded weights as DTensors, and the model calls
`to_local()` on them. Out: the graph with the local tensors as its inputs, and what turns a call's arguments into them.
An input that is also used as a whole stays as it is.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

Run = Callable[..., Any]


def read_locally(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[list[Any], Callable[[Run], Run]]:
    """Change `gm` in place; returns its new inputs, and a wrapper for whatever is compiled from it.

    inputs: one per placeholder. The wrapped callable takes what the unchanged graph took.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    changed = [
        i for i, (node, x) in enumerate(zip(placeholders, inputs, strict=True)) if _only_local(node, x)
    ]
    if not changed:
        return list(inputs), lambda run: run
    for i in changed:
        placeholder = placeholders[i]
        for call in list(placeholder.users):
            placeholder.meta["example_value"] = call.meta["example_value"]
            call.replace_all_uses_with(placeholder)
            gm.graph.erase_node(call)
    gm.recompile()

    def local(args: Sequence[Any]) -> list[Any]:
        return [arg.to_local() if i in changed else arg for i, arg in enumerate(args)]

    news = local(inputs)
    for i in changed:
        if isinstance(inputs[i], torch.nn.Parameter) and news[i].is_leaf:
            # it is a weight all the same
            news[i] = torch.nn.Parameter(news[i], requires_grad=news[i].requires_grad)
    return news, lambda run: lambda *args: run(*local(args))


def _only_local(node: fx.Node, value: Any) -> bool:
    """True for a DTensor whose every use is `to_local()`."""
    # heavy, and there if somebody has such a tensor
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(value, distributed.DTensor) or not node.users:
        return False
    return all(
        user.op == "call_method"
        and user.target == "to_local"
        and user.args == (node,)
        and not user.kwargs
        and isinstance(user.meta.get("example_value"), torch.Tensor)
        for user in node.users
    )
