"""Wrong (and strange) versions of a graph, to test that nothing is fused which isn't understood.

In: a functional ATen graph with `meta["val"]` on its nodes. Out: `Mutant`s: copies with one small edit
and correct metadata. Edits are found by structure, never by names or order of nodes, so that they work on
any MoE spelling. Most mutants compute something else than the original; some don't. `judge.py` decides by
running them.

An edit is enumerated on the original graph and applied to a copy: `Edit(kind, detail, apply)` with
`apply(copy_of)`, where `copy_of` maps nodes of the original to those of the copy.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from moefuse.testing.edits import (
    Call,
    Change,
    insert_before,
    operands,
    output_shapes,
    partial_sum,
    propagate,
    repeat_order,
    replace_all,
    return_too,
    set_leaf,
    set_node,
    set_target,
    shuffle,
    swap_leaves,
    swap_uses,
    tensor_of,
    type_of,
    without,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Edit:
    """One change of a graph. kind: the mutator; detail: where and what, in words."""

    kind: str
    detail: str
    apply: Change


@dataclass(frozen=True)
class Mutant:
    """A changed copy of a graph, with the edit that made it."""

    kind: str
    detail: str
    graph_module: GraphModule


def mutants(graph_module: GraphModule, *, limit: int, seed: int = 0, depth: int = 1) -> Iterator[Mutant]:
    """Up to `limit` mutants, drawn evenly over the kinds of edits; those that fit no shapes are skipped.

    depth: how many edits on top of each other make one mutant.
    """
    rng = random.Random(seed)
    for edit in islice(_drawn(graph_module, rng), limit * 10):
        mutant = apply(graph_module, edit)
        if mutant is None:
            continue
        for _ in range(depth - 1):
            again = next(mutants(mutant.graph_module, limit=1, seed=rng.randrange(2**31)), None)
            if again is not None:
                words = (f"{mutant.kind}+{again.kind}", f"{mutant.detail}; {again.detail}")
                mutant = Mutant(*words, again.graph_module)
        yield mutant
        limit -= 1
        if not limit:
            return


def edits(graph_module: GraphModule) -> Iterator[Edit]:
    """Every single edit of the graph."""
    for mutator in MUTATORS:
        yield from mutator(graph_module.graph)


def apply(graph_module: GraphModule, edit: Edit) -> Mutant | None:
    """The mutant of one edit; None where the edited graph has no valid shapes or another output shape."""
    graph = Graph()
    copy_of: dict[Node, Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, copy_of))
    before = output_shapes(graph)
    edit.apply(copy_of)
    try:
        graph.eliminate_dead_code()
    except RuntimeError:  # its lint: the edit made a cycle
        return None
    copy = GraphModule(graph_module, graph)
    if not propagate(copy) or output_shapes(graph)[: len(before)] != before:
        return None
    return Mutant(edit.kind, edit.detail, copy)


def swap_operands(graph: Graph) -> Iterator[Edit]:
    """Every operand replaced by each earlier tensor of the same shape and dtype."""
    alike: dict[Any, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for position, operand in operands(node):
            for other in alike[type_of(operand)]:
                if other is not operand:
                    kind = "swap_float" if tensor_of(operand).is_floating_point() else "swap_int"
                    yield Edit(
                        kind, f"{node}[{position}]: {operand} -> {other}", set_node(node, position, other)
                    )
        if tensor_of(node) is not None:
            alike[type_of(node)].append(node)


def perturb_operands(graph: Graph) -> Iterator[Edit]:
    """One use of a tensor sees a changed version of it: rolled, flipped, sorted, transposed, shifted ..."""
    for node in graph.nodes:
        for position, operand in operands(node):
            value = tensor_of(operand)
            for name, calls in _perturbations(value):
                kind = "perturb_float" if value.is_floating_point() else "perturb_int"
                kind = "transpose_square" if name.startswith("transpose") else kind
                detail = f"{node}[{position}]: {name}({operand})"
                yield Edit(kind, detail, insert_before(node, position, calls))


def change_constants(graph: Graph) -> Iterator[Edit]:
    """Every number, flag and word among the arguments changed a little; neighbouring numbers swapped."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        leaves, _ = pytree.tree_flatten((node.args, node.kwargs))
        for position, leaf in enumerate(leaves):
            for new in _other_constants(leaf):
                yield Edit("constant", f"{node}[{position}]: {leaf} -> {new}", set_leaf(node, position, new))
            if (
                position
                and _plain_int(leaf)
                and _plain_int(leaves[position - 1])
                and leaf != leaves[position - 1]
            ):
                yield Edit("swap_constants", f"{node}[{position}]", swap_leaves(node, position))


def leave_out(graph: Graph) -> Iterator[Edit]:
    """An optional operand left out: a scale, a bias, a list of groups ..."""
    for node in graph.nodes:
        for name, given in node.kwargs.items():
            if any(isinstance(leaf, Node) for leaf in pytree.tree_leaves(given)):
                yield Edit("leave_out", f"{node}: {name}", without(node, name))


def drop_operations(graph: Graph) -> Iterator[Edit]:
    """An operation replaced by one of its operands: no weight, no bias, no activation, no permutation ..."""
    for node in graph.nodes:
        if tensor_of(node) is None or node.op != "call_function":
            continue
        for _, operand in operands(node):
            if type_of(operand) == type_of(node):
                yield Edit("drop", f"{node} -> {operand}", replace_all(node, operand))


def change_operations(graph: Graph) -> Iterator[Edit]:
    """An operation replaced by one with the same arguments and another meaning."""
    for node in graph.nodes:
        for target in OTHER_OPERATIONS.get(node.target, ()):
            yield Edit("operation", f"{node} -> {target}", set_target(node, target))
        if node.target is aten.sum.dim_IntList and len(node.args[1]) == 1:
            yield Edit("partial_sum", f"{node}", partial_sum(node))
        if node.target is aten.repeat_interleave.self_int and len(node.args) > 2:
            yield Edit("repeat_order", f"{node}", repeat_order(node))


def swap_siblings(graph: Graph) -> Iterator[Edit]:
    """Two results of the same source trade places: gate and up, sorted values and indices, both halves ..."""
    families: dict[Any, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if tensor_of(node) is not None and node.op == "call_function" and node.args:
            families[(node.args[0] if isinstance(node.args[0], Node) else None, type_of(node))].append(node)
    for (source, _), family in families.items():
        for first, second in pairwise(family):
            if source is not None:
                yield Edit("swap_siblings", f"{first} <-> {second}", swap_uses(first, second))


def escape(graph: Graph) -> Iterator[Edit]:
    """An inner value is returned as well."""
    for node in graph.nodes:
        if tensor_of(node) is not None and node.op == "call_function" and tensor_of(node).is_floating_point():
            yield Edit("escape", f"{node}", return_too(node))


def reorder(graph: Graph) -> Iterator[Edit]:
    """Another order of the same statements: no change at all."""
    for seed in range(3):
        yield Edit("reorder", f"seed {seed}", shuffle(graph, seed))


Mutator = Callable[[Graph], Iterator[Edit]]
MUTATORS: tuple[Mutator, ...] = (
    swap_operands,
    perturb_operands,
    change_constants,
    drop_operations,
    leave_out,
    change_operations,
    swap_siblings,
    escape,
    reorder,
)

OTHER_OPERATIONS: Mapping[Any, Sequence[Any]] = {
    aten.silu.default: (aten.relu.default, aten.sigmoid.default, aten.gelu.default),
    aten.gelu.default: (aten.silu.default, aten.relu.default),
    aten.relu.default: (aten.silu.default, aten.abs.default),
    aten.sigmoid.default: (aten.tanh.default, aten.silu.default),
    aten.mul.Tensor: (aten.add.Tensor, aten.sub.Tensor, aten.maximum.default, aten.div.Tensor),
    aten.add.Tensor: (aten.mul.Tensor, aten.sub.Tensor, aten.maximum.default),
    aten.sum.dim_IntList: (aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default),
    aten.index_add.default: (aten.index_copy.default,),
    aten.scatter_add.default: (aten.scatter.src,),
    aten.scatter.src: (aten.scatter_add.default,),
    aten.floor_divide.default: (aten.remainder.Scalar, aten.mul.Scalar),
    aten.remainder.Scalar: (aten.floor_divide.default,),
    aten.cumsum.default: (aten.cumprod.default,),
    aten.eq.Tensor: (aten.ne.Tensor, aten.ge.Tensor, aten.le.Tensor),
    aten.clamp_max.default: (aten.clamp_min.default,),
    aten.clamp_min.default: (aten.clamp_max.default,),
    aten.bmm.default: (),
}


SHARE = {"swap_int": 3, "swap_float": 3, "perturb_int": 2, "perturb_float": 2, "constant": 2}
"""How many edits of a kind come before each kind has its turn again; one where not given."""


def _drawn(graph_module: GraphModule, rng: random.Random) -> Iterator[Edit]:
    """All edits in random order, the kinds mixed evenly."""
    kinds: dict[str, list[Edit]] = defaultdict(list)
    for edit in edits(graph_module):
        kinds[edit.kind].append(edit)
    for found in kinds.values():
        rng.shuffle(found)
    while any(kinds.values()):
        for name, found in kinds.items():
            for _ in range(min(SHARE.get(name, 1), len(found))):
                yield found.pop()


def _cast(dtype: torch.dtype) -> Call:
    return aten._to_copy.default, (), {"dtype": dtype}


def _perturbations(value: torch.Tensor) -> Iterator[tuple[str, list[Call]]]:
    """Name and calls that keep shape and dtype of `value`."""
    for dim in range(value.dim()):
        if str(value.shape[dim]) != "1":
            yield f"roll{dim}", [(aten.roll.default, ([1], [dim]), {})]
            yield f"flip{dim}", [(aten.flip.default, ([dim],), {})]
        if dim and str(value.shape[dim]) == str(value.shape[dim - 1]) != "1":
            yield f"transpose{dim}", [(aten.transpose.int, (dim - 1, dim), {}), (aten.clone.default, (), {})]
    if value.dtype in (torch.int32, torch.int64):
        if value.dim() == 1 and value.dtype == torch.int64:
            yield "argsort", [(aten.argsort.default, (), {})]
        yield "remainder", [(aten.remainder.Scalar, (2,), {})]
        yield "half", [(aten.floor_divide.default, (2,), {})]
        yield "zero", [(aten.mul.Scalar, (0,), {})]
        yield "previous", [(aten.sub.Scalar, (1,), {}), (aten.clamp_min.default, (0,), {})]
        yield "negative", [(aten.sub.Scalar, (1,), {})]
    elif value.is_floating_point():
        yield "double", [(aten.mul.Scalar, (2,), {})]
        yield "plus", [(aten.add.Scalar, (1,), {})]
        yield "relu", [(aten.relu.default, (), {})]
        yield "truncate", [(aten.mul.Scalar, (2,), {}), _cast(torch.int32), _cast(value.dtype)]
        if value.dim():
            yield "cumsum", [(aten.cumsum.default, (0,), {})]
            yield "softmax", [(aten.softmax.int, (-1,), {})]


def _other_constants(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, bool):
        return (not leaf,)
    if _plain_int(leaf):
        return (leaf + 1, leaf - 1)
    if isinstance(leaf, float):
        return (0.0,) if leaf in (float("inf"), float("-inf")) else (leaf * 1.5, leaf + 0.25, -leaf)
    if isinstance(leaf, str):
        return {"none": ("tanh",), "tanh": ("none",)}.get(leaf, ())
    return ()


def _plain_int(leaf: Any) -> bool:
    return isinstance(leaf, int) and not isinstance(leaf, bool)
