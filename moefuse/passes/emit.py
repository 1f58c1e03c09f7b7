"""From expressions back to nodes: the operands of a `mega_moe` call, made from the leaves of a site.

In: expressions over axes, and the order in which dimensions are wanted. Out: graph nodes. What the model already
has is used as it is; views, permutes and products are added only where the layout differs. Weights are only
ever viewed, never copied.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Graph, Node

from moefuse.graph import sizes
from moefuse.graph.sizes import Size
from moefuse.patterns.axes import Axis, Dims, Group, group_size
from moefuse.patterns.facts import Conflict, Const, Expr, Leaf, OneHot, Op, group_axes
from moefuse.patterns.loops import constant
from moefuse.patterns.rules import value
from moefuse.patterns.weights import weight_units

aten = torch.ops.aten

INHERITED_META = (
    "stack_trace",
    "nn_module_stack",
    "source_fn_stack",
    "from_node",
    "seq_nr",
    "custom",
    "recompute",
    "ac_graph_id",
)
"""What a new node takes over from the node that it stands for."""

STAND_IN = "moefuse_stand_in"
"""Under this name a replaced node's meta has the node that replaced it: facts made before still name the old one."""


class Emitter:
    """Adds nodes before `anchor`. Every new node carries a fake value and the anchor's place in the model."""

    def __init__(self, graph: Graph, anchor: Node, size_sources: Iterable[Node]) -> None:
        self.graph = graph
        self.anchor = anchor
        self.made: list[Node] = []
        self.size_sources = [node for node in size_sources if isinstance(value(node), torch.Tensor)]

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> Node:
        """One call node, with its fake value."""
        args, kwargs = torch.fx.map_arg((args, kwargs), lambda node: node.meta.get(STAND_IN, node))
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args, kwargs)
        self.made.append(node)
        node.meta.update({key: self.anchor.meta[key] for key in INHERITED_META if key in self.anchor.meta})
        fake_args, fake_kwargs = torch.fx.map_arg((args, kwargs), value)
        # a call without tensors needs the mode
        with getattr(value(self.anchor), "fake_mode", None) or nullcontext():
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def discard(self) -> None:
        """Take the new nodes away again: an unused one would run all the same where nothing else is fused."""
        while self.made:
            self.graph.erase_node(self.made.pop())

    # --- shapes ------------------------------------------------------------------------------------------

    def shape(self, wanted: list[Size], infer: bool = True) -> list[Any]:
        """Sizes as node arguments: integers, at most one -1, and sym_size nodes for other symbols."""
        symbolic = [i for i, size in enumerate(wanted) if not isinstance(size, int)]
        empty = any(isinstance(size, int) and size == 0 for size in wanted)  # `in` would ask a symbol
        if infer and len(symbolic) == 1 and not empty:
            return [-1 if i in symbolic else size for i, size in enumerate(wanted)]
        return [size if isinstance(size, int) else self.size_node(size) for size in wanted]

    def size_node(self, size: Size) -> Node:
        """A node that holds a symbolic size, read off one of the size sources. Conflict where none has it."""
        for source in self.size_sources:
            for dim, candidate in enumerate(value(source).shape):
                if sizes.same(candidate, size):
                    return self.call(aten.sym_size.int, source, dim)
        raise Conflict(f"no operand of the layer has a dimension of {size}")

    def reshape(self, node: Node, wanted: list[Size]) -> Node:
        """`node` under another shape; itself where it has that shape already."""
        have = value(node).shape
        if len(have) == len(wanted) and all(sizes.same(a, b) for a, b in zip(have, wanted, strict=True)):
            return node
        return self.call(aten.reshape.default, node, self.shape(wanted))

    def permute(self, node: Node, order: list[int]) -> Node:
        """`node` with dimensions in another order; itself where the order is the same."""
        return node if order == sorted(order) else self.call(aten.permute.default, node, order)

    # --- expressions -------------------------------------------------------------------------------------

    def tensor(self, expr: Expr, layout: Dims) -> Any:
        """The expression as a node of len(layout) dimensions, each of the layout's size or 1; or a number."""
        if isinstance(expr, Const):
            return expr.value
        if isinstance(expr, Op):
            args = [self.tensor(arg, layout) if isinstance(arg, Expr) else arg for arg in expr.args]
            return self.call(expr.target, *args, **dict(expr.kwargs))
        if isinstance(expr, OneHot) and (number := constant(expr.at)) is not None:
            return self.call(aten.eq.Scalar, self.tensor(expr.ids, layout), number)
        if not isinstance(expr, Leaf):
            raise Conflict(f"a {type(expr).__name__.lower()} can't be computed outside of the layer")
        return self._select(expr, layout) if expr.selectors else self._leaf(expr, layout)

    def _select(self, leaf: Leaf, layout: Dims) -> Node:
        """table[ids] for a table with one number per expert."""
        if len(leaf.selectors) != 1 or sum(len(group) for group in leaf.index) != 1:
            raise Conflict(f"`{leaf.node.name}` is no table with one number per expert")
        table = self.reshape(leaf.node, [leaf.selectors[0].size])
        return self.call(aten.index.Tensor, table, [self.tensor(leaf.selectors[0].expr, layout)])

    def _leaf(self, leaf: Leaf, layout: Dims) -> Node:
        have = [digit for group in leaf.index for digit in group]
        wanted = [axis for group in layout for axis in group if axis in have]
        if len(have) != len(wanted):
            raise Conflict(f"`{leaf.node.name}` runs over indices that the operand doesn't have")
        node, order = leaf.node, [have.index(axis) for axis in wanted]
        if order != sorted(order):
            node = self.permute(self.reshape(node, [digit.size for digit in have]), order)
        return self.reshape(node, [self._extent(group, have) for group in layout])

    @staticmethod
    def _extent(group: Group, have: list[Any]) -> Size:
        present = [axis for axis in group if axis in have]
        if present and len(present) != len(group):
            raise Conflict("an operand runs over a part of the token or slot index")
        return group_size(tuple(present))

    # --- operands ----------------------------------------------------------------------------------------

    def weight(self, leaf: Leaf, contracted: frozenset[Axis]) -> Node:
        """An expert weight as [E, ., .], or one expert's as [., .]: the tensor as it lies, or a view of it."""
        found = weight_units(leaf, contracted)
        node = leaf.node
        if [dim for _, _, dim in found] != list(range(value(node).dim())):
            node = self.call(aten.view.default, node, self.shape([size for _, size, _ in found]))
        order = sorted(range(len(found)), key=lambda i: found[i][0] != "E")
        return self.permute(node, order)

    def bias(self, leaf: Leaf) -> Node:
        """A bias as [E, N], or one expert's as [N]."""
        if not leaf.selectors:
            return self.reshape(leaf.node, [sizes.product(value(leaf.node).shape)])
        if not leaf.index[0] or leaf.index[0][0] not in leaf.selectors or len(leaf.index[0]) != 1:
            raise Conflict(f"`{leaf.node.name}` is no bias with the experts first")
        rest = leaf.node
        return self.reshape(rest, [value(rest).shape[0], sizes.product(value(rest).shape[1:])])

    def scale(self, leaf: Leaf, group: tuple[Axis, ...]) -> Node:
        """A scale or offset of a weight as [E, N] or [E, G, N], or one expert's as [N] or [G, N]."""
        index = leaf.index[1:] if leaf.selectors else leaf.index
        groups = [part for part in index if group_axes(part) and group_axes(part) <= set(group)]
        channels = index[len(groups) :]
        if (leaf.selectors and leaf.index[0] != leaf.selectors) or list(index[: len(groups)]) != groups:
            raise Conflict(f"`{leaf.node.name}` is no scale with the experts first and the channels last")
        wanted: list[Size] = [at.size for at in leaf.selectors]
        wanted += [sizes.product(axis.size for axis in group)] if group else []
        wanted.append(sizes.product(group_size(part) for part in channels))
        return self.reshape(leaf.node, wanted)

    def block_scale(self, leaf: Leaf, group: tuple[Axis, ...], transposed: bool) -> Node:
        """The scales of a weight's MX blocks as [E, N, pairs, 2], or [E, pairs, N, 2], or one expert's without the E.

        group: the axes of the pairs, then that of the two of a pair.
        """
        have = [digit for part in leaf.index for digit in part]
        channels = [digit for digit in have if digit not in group and digit not in leaf.selectors]
        *pairs, half = group
        middle = ([*channels], [*pairs]) if transposed else ([*pairs], [*channels])
        order: list[Any] = [*leaf.selectors, *middle[0], *middle[1], half]
        if len(order) != len(have) or set(order) != set(have):
            raise Conflict(f"`{leaf.node.name}` holds no scales of blocks")
        node = leaf.node
        if order != have:
            node = self.permute(self.reshape(node, [d.size for d in have]), [have.index(d) for d in order])
        sizes_of = [sizes.product(digit.size for digit in part) for part in middle]
        return self.reshape(node, [*(at.size for at in leaf.selectors), *sizes_of, half.size])

    def one_tensor(self, nodes: list[Node]) -> Node | None:
        """A row scale, [O] or [E, O]: the one tensor, or small per-expert ones stacked; None for none."""
        if not nodes:
            return None
        return self.call(aten.stack.default, nodes) if len(nodes) > 1 else nodes[0]

    def weights(self, factors: Sequence[Expr], ids: Node, layout: Dims, dtype: torch.dtype) -> Node:
        """The product of all routing weights as [T, K] in `dtype`; ones where the model has none."""
        nodes = [self.tensor(factor, layout) for factor in factors]
        factor = 1.0
        result: Node | None = None
        for node in nodes:
            if not isinstance(node, Node):
                factor *= node
            elif result is not None:
                result = self.call(aten.mul.Tensor, result, node)
            else:
                wide = value(node).dtype == dtype
                result = node if wide else self.call(aten._to_copy.default, node, dtype=dtype)
        full = [group_size(group) for group in layout]
        if result is None:
            return self.call(aten.full_like.default, ids, factor, dtype=dtype)
        if not all(sizes.same(a, b) for a, b in zip(value(result).shape, full, strict=True)):
            result = self.call(aten.mul.Tensor, result, self.call(aten.ones_like.default, ids, dtype=dtype))
        return result if factor == 1.0 else self.call(aten.mul.Scalar, result, factor)
