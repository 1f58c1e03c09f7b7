"""What the passes saw of one layer, as plain text and numbers: its nodes before and after, and where meaning was lost.

In: filled by `passes.record` while a report is made for a person. Out: `Region`, which the HTML report draws.
Nothing in here refers to a graph: a report outlives the graphs that it tells about.
"""

from dataclasses import dataclass
from typing import Literal

Role = Literal["input", "weight", "router", "dispatch", "gemm", "activation", "combine", "fused", "other"]
"""What a node does for the layer. input: read from outside; fused: the mega_moe node; other: stands beside it."""


@dataclass(frozen=True)
class NodeView:
    """One node. inputs: names of the nodes that it reads, as far as they are in the region.

    value: dtype and sizes as in dumps. fact: what the lifter knows about it, in words, "" for nothing. loss: why it
    knows nothing, "" where it does or where nothing was asked. gone: True where the rewrite removed it.
    """

    name: str
    op: str
    args: str
    value: str
    role: Role
    inputs: tuple[str, ...] = ()
    source: str = ""
    code: str = ""
    fact: str = ""
    loss: str = ""
    gone: bool = False


@dataclass(frozen=True)
class Loss:
    """One link of the chain of losses: the reason at a node, the outermost first, the root last."""

    node: str
    reason: str
    source: str = ""
    code: str = ""


@dataclass(frozen=True)
class Region:
    """The nodes of one layer in graph order.

    after: empty where nothing was rewritten. losses: empty where the meaning is known. left_out: nodes in the middle of
    `before` that were too many to record.
    """

    before: tuple[NodeView, ...]
    after: tuple[NodeView, ...] = ()
    losses: tuple[Loss, ...] = ()
    left_out: int = 0
