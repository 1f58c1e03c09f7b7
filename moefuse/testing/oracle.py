"""Careful ways to run a functional ATen graph.

In: a graph module and real inputs. Out: its outputs. `SafeRun` is eager with guard rails: undefined
memory gets a known fill, so that two runs with different fills tell whether a graph reads memory that
nobody wrote, and a grouped GEMM with bad offsets raises instead of reading beyond its operands.
`Float64Run` computes the same graph in float64, with the integers (routing decisions) of the low-
precision run: the yardstick for rounding.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

_EMPTY = (
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::new_empty_strided",
)
_GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")


class SafeRun(Interpreter):
    """Runs a graph in eager with uninitialised memory filled by `fill` and checked grouped GEMM offsets.

    Raises:
        ValueError: a grouped GEMM whose offsets fall or leave the rows.
    """

    def __init__(self, graph_module: GraphModule, fill: int = 0) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self.extra_traceback = False
        self.fill = fill

    def run_node(self, n: Node) -> Any:
        """Run one node, with the guard rails of the class."""
        name = op_name(n)
        written = None
        if name in _GROUPED:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            written = _written(args[0], args[2] if len(args) > 2 else kwargs.get("offs"))
        value = super().run_node(n)
        if written is not None:
            value[written:].fill_(self.fill)
        return value.fill_(self.fill) if name in _EMPTY else value


class Float64Run(Interpreter):
    """Runs a graph in float64; its integers and booleans are those of `pinned`, a finished `SafeRun.env`."""

    def __init__(self, graph_module: GraphModule, pinned: Mapping[Node, Any]) -> None:
        super().__init__(graph_module)
        self.extra_traceback = False
        self.pinned = pinned

    def run_node(self, n: Node) -> Any:
        """Run one node in float64."""
        if n.op == "placeholder":
            return _widen(super().run_node(n))
        low = self.pinned.get(n)
        if isinstance(low, torch.Tensor) and not low.is_floating_point():
            return low
        name = op_name(n)
        if name in ("aten::topk", "aten::sort") and isinstance(low, Sequence):
            return self._selected(n, low)
        if name in _GROUPED:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return _grouped(args[0], args[1], args[2] if len(args) > 2 else kwargs["offs"])
        if n.op == "call_function":
            args, kwargs = pytree.tree_map(_widen, self.fetch_args_kwargs_from_env(n))
            return pytree.tree_map(_widen, n.target(*args, **kwargs))  # type: ignore[operator]
        return pytree.tree_map(_widen, super().run_node(n))

    def _selected(self, n: Node, low: Sequence[Any]) -> tuple[Any, Any]:
        """Topk or sort with the order of the low-precision run."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        position = 2 if op_name(n) == "aten::topk" else 1
        dim = args[position] if len(args) > position else kwargs.get("dim", -1)
        value: torch.Tensor = args[0]
        return (value.gather(dim, low[1]) if value.is_floating_point() else low[0]), low[1]


def op_name(n: Node) -> str:
    """`aten::mul` for a call of `torch.ops.aten.mul.Tensor`, "" for everything that isn't an operator."""
    return n.target._schema.name if isinstance(n.target, torch._ops.OpOverload) else ""


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _written(rows: torch.Tensor, offs: torch.Tensor | None) -> int | None:
    """How many rows a grouped GEMM writes; None for other forms of it."""
    if offs is None or rows.dim() != 2:
        return None
    ends: list[int] = [0, *offs.tolist()]
    if any(a > b for a, b in pairwise(ends)) or ends[-1] > rows.shape[0]:
        raise ValueError(
            f"grouped GEMM over {rows.shape[0]} rows: offsets {ends[1:]} must rise, to the row count at most"
        )
    return ends[-1]


def _grouped(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Rows [S, I], weight [E, I, O], offs [E] -> [S, O], in the dtype of rows.

    The operator leaves rows after the last expert's unwritten: zeros, as `SafeRun` fills them by default.
    """
    ends = [0, *offs.tolist()]
    pieces = [rows[a:b] @ weight[e] for e, (a, b) in enumerate(pairwise(ends))]
    unwritten = rows.new_zeros(rows.shape[0] - ends[-1], weight.shape[2])
    return torch.cat([*pieces, unwritten])
