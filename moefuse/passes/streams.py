"""Does a layer stay on one stream?

In: a site. Out: the node that switches, records or waits for a stream in between, or that runs on another one; None
where the layer is on one stream from its first GEMM to its output. One node in its place would take the whole layer to
one stream, past what the model made wait; where ranks communicate beside it, they can then wait for each other for
good.
"""

from typing import Any

from torch.fx import Node

from moefuse.patterns.rules import op_name
from moefuse.patterns.site import Site

NAMESPACES = ("streams", "npugraph_ex", "air")
"""Operators by which PyTorch, npugraph_ex and torchair write streams, events and scopes into a graph."""


def crossing(site: Site) -> Node | None:
    """See the module text."""
    stream = _stream(site.node)
    node = min(site.gemms)
    while node is not site.node:
        on_another = node in site.gemms and _stream(node) != stream
        if on_another or op_name(node).partition("::")[0] in NAMESPACES:
            return node
        node = node.next
    return None


def _stream(node: Node) -> Any:
    """What Dynamo noted of the user's `with torch.Stream(...)`; None outside of any."""
    return (node.meta.get("custom") or {}).get("stream")
