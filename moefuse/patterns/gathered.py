"""Tokens of all ranks gathered, this rank's experts run on them, and the parts of the sum scattered back.

In: a layer of one rank's experts, proved from the graph. Out: the same layer as the group of ranks computes it: x, ids
and routing weights are a rank's own, before the all_gather, and the output is what reduce_scatter gives back. What the
model makes of the gathered ids and weights between the two is run on every id there is: it has to leave out exactly the
slots of other ranks' experts.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.graph.groups import Place, place_in
from moefuse.ops import activations
from moefuse.patterns.axes import Axis, Dims, Group, Ranks
from moefuse.patterns.facts import Conflict, Const, Expr, Leaf
from moefuse.patterns.layer import Layer
from moefuse.patterns.ranks import MOST_EXPERTS
from moefuse.patterns.router import chosen_from
from moefuse.patterns.rules import argument, op_name, value
from moefuse.patterns.site import Site

_GATHER, _SCATTER = "_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor"
_WAIT = "_c10d_functional::wait_tensor"
_DRAWS = (1.0, 0.5, -0.75, 3.0, 1e-30, 1e30, 0.1, -1e-3)
"""Routing weights on which a program over them is run."""


@dataclass(frozen=True)
class Gathered:
    """A layer between an all_gather and a reduce_scatter. site: the group's layer; None with the reason why not."""

    place: Place
    site: Site | None
    reason: str = ""


def gathered(site: Site) -> Gathered | None:
    """The layer of the whole group, if the site's output goes into a reduce_scatter and nowhere else."""
    scatter, output = _scattered(site.node)
    if scatter is None or output is None or site.layer.ranks is not None:
        return None
    place = place_in(argument(scatter, 3, "group_name"))
    if place is None:
        return None
    try:
        return Gathered(place, _whole(site, scatter, output, place))
    except Conflict as conflict:
        return Gathered(place, None, f"`{scatter.name}`: {conflict.reason}")


def _scattered(node: Node) -> tuple[Node | None, Node | None]:
    """(the reduce_scatter that a node goes into, what is waited for)."""
    while len(node.users) == 1:
        (node,) = node.users
        if op_name(node) == _SCATTER:
            (waited,) = node.users if len(node.users) == 1 else (None,)
            return node, waited if waited is not None and op_name(waited) == _WAIT else None
        if op_name(node) not in ("aten::clone", "aten::_to_copy"):
            break
    return None, None


def _whole(site: Site, scatter: Node, output: Node, place: Place) -> Site:
    layer, chosen = site.layer, site.layer.ids
    assert isinstance(chosen, Leaf)  # a routed layer
    if argument(scatter, 1) != "sum" or argument(scatter, 2) != place.world:
        raise Conflict(
            f"the ranks' parts are combined by {argument(scatter, 1)!r}, not by a sum over all ranks"
        )
    if site.base is not None:
        raise Conflict(
            f"`{site.base.name}`, added to the layer's output on every rank, is summed over the ranks"
        )
    if site.dims != (layer.tokens, tuple(layer.features)) or len(layer.tokens) != 1:
        raise Conflict("the output that is scattered isn't one row per token")
    if layer.row_scale or layer.identities:
        raise Conflict("experts without GEMMs or with norms of their rows are not looked for here")
    tokens = (Axis(value(output).shape[0]),)
    x = _own_rows(layer, tokens, place)
    weights, weight_node = _routing_weights(layer)
    ids = _source(chosen.node, place)
    if ids is None or ids.node is None:
        raise Conflict(
            f"the ids `{chosen.node.name}` are not made from ids that were gathered over the same group"
        )
    count = chosen_from(Leaf(ids.node, chosen.index))
    local = _local_experts(layer)
    if count is None or count != local * place.world or count > MOST_EXPERTS:
        raise Conflict(
            f"{place.world} ranks with {local} experts each, a router that chooses from {count or 'unknown'}"
        )
    ranks = Ranks(place.name, place.world, place.rank, local)
    factor, weight = _demand_mask(layer, ids, weight_node, ranks, place)
    own: dict[Axis, Group] = {layer.tokens[0]: tokens}
    routing: list[Expr] = [*weights]
    if weight is not None and weight_node is not None:
        routing.append(Leaf(weight, _moved(weight_node.index, own)))
    if factor != 1.0:
        routing.append(Const(factor))
    whole = replace(
        layer,
        tokens=tokens,
        x=x,
        ids=Leaf(ids.node, _moved(chosen.index, own)),
        weights=tuple(routing),
        ranks=ranks,
    )
    return Site(output, (tokens, tuple(layer.features)), whole, terms=site.terms, counts=site.counts)


def _moved(index: Dims, own: dict[Axis, Group]) -> Dims:
    return tuple(
        tuple(
            new
            for digit in group
            for new in (own.get(digit, (digit,)) if isinstance(digit, Axis) else (digit,))
        )
        for group in index
    )


def _local_experts(layer: Layer) -> int:
    count = layer.weight2[0].selectors[0].size if layer.stacked else None
    if not isinstance(count, int):
        raise Conflict("this rank's experts are not one stacked tensor per weight")
    return count


# --- where tensors come from -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """A rank's own tensor before it was gathered, and the operators that work on the gathered one, in order."""

    node: Node
    gathered: Node


def _gathered_from(node: Node, place: Place) -> Node | None:
    """The tensor of which a node holds those of all ranks, one after the other."""
    if op_name(node) != _WAIT or op_name(gather := argument(node, 0)) != _GATHER:
        return None
    if argument(gather, 1) != place.world or argument(gather, 2, "group_name") != place.name:
        return None
    source = argument(gather, 0)
    return source if isinstance(source, Node) else None


def _source(node: Node, place: Place) -> _Source | None:
    """The integer tensor that was gathered, of all from which `node` is made element by element; None for several."""
    found: dict[Node, Node] = {}
    stack = [node]
    while stack:
        here = stack.pop()
        if (source := _gathered_from(here, place)) is not None:
            if not value(source).dtype.is_floating_point:
                found[here] = source
        elif _elementwise(here):
            stack.extend(here.all_input_nodes)
        else:
            return None
    ((gathered, source),) = found.items() if len(found) == 1 else ((None, None),)
    return _Source(source, gathered) if source is not None and gathered is not None else None


def _elementwise(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or op_name(node) in _ELEMENTWISE


_ELEMENTWISE = ("aten::_to_copy", "aten::floor_divide", "aten::scalar_tensor", "aten::clone")


def _own_rows(layer: Layer, tokens: tuple[Axis, ...], place: Place) -> Leaf:
    """The token rows before they were gathered."""
    if not isinstance(layer.x, Leaf) or (own := _gathered_from(layer.x.node, place)) is None:
        raise Conflict("the token rows are not those of all ranks as they were gathered")
    if layer.x.index[0] != layer.tokens or not sizes.same(value(own).shape[0], tokens[0].size):
        raise Conflict("the token rows are not gathered along their first dimension")
    return Leaf(own, _moved(layer.x.index, {layer.tokens[0]: tokens}))


def _routing_weights(layer: Layer) -> tuple[list[Expr], Leaf | None]:
    """(constants, the one tensor of routing weights)."""
    leaves = [weight for weight in layer.weights if isinstance(weight, Leaf) and not weight.selectors]
    constants = [weight for weight in layer.weights if isinstance(weight, Const)]
    if len(leaves) > 1 or len(leaves) + len(constants) != len(layer.weights):
        raise Conflict("the routing weights are not one tensor that was gathered")
    return list(constants), leaves[0] if leaves else None


# --- what is left out ------------------------------------------------------------------------------------


def _demand_mask(
    layer: Layer, ids: _Source, weight: Leaf | None, ranks: Ranks, place: Place
) -> tuple[float, Node | None]:
    """(a factor on the routing weights, the weights before they were gathered).

    Demands that the rank's own experts get their slots with their weights, and that all other slots get none.
    """
    every = torch.arange(ranks.world * ranks.experts)
    mine = (every >= ranks.first) & (every < ranks.first + ranks.experts)
    chosen = layer.ids
    assert isinstance(chosen, Leaf)
    local = _run(chosen.node, {ids.gathered: every})
    if not torch.equal(local[mine], every[mine] - ranks.first):
        raise Conflict(f"the ids of this rank's experts, {ranks.first} and on, don't become 0 and on")
    wraps = any(at.wraps for leaf in layer.weight2 for at in leaf.selectors)
    nobody = (local >= ranks.experts) | (local < (-ranks.experts if wraps else 0))
    factor, own = 1.0, None
    silent = nobody
    if weight is not None:
        float_source = _scaled_source(weight, chosen, ids, place)
        numbers = every.repeat_interleave(len(_DRAWS))
        double = value(float_source.node).dtype == torch.float64
        draws = torch.tensor(_DRAWS, dtype=torch.float64 if double else torch.float32).repeat(len(every))
        results = _run(weight.node, {float_source.gathered: draws, ids.gathered: numbers}).reshape(
            len(every), -1
        )
        factor = float(results[mine][0, 0])
        expected = (draws[: len(_DRAWS)] * factor).to(results.dtype)
        if not all(torch.equal(row, expected) for row in results[mine]):
            raise Conflict(f"`{weight.node.name}` isn't the gathered routing weight for this rank's experts")
        if _gives_nothing_for_zero(layer):
            silent = nobody | (results == 0).all(1)
        own = float_source.node
    if not bool(silent[~mine].all()):
        raise Conflict("slots of other ranks' experts are not left out, by their ids or by weights of zero")
    return factor, own


def _gives_nothing_for_zero(layer: Layer) -> bool:
    """True where a slot whose routing weight is 0 adds nothing, wherever in its expert that multiplies."""
    if layer.weight_position == "output":
        return True
    if layer.bias2 or layer.weight_position == "mid":
        return not layer.bias2
    zero, found = torch.zeros(1, dtype=torch.float64), layer.activation
    up = None if layer.gate_up == "none" else zero
    return (
        not layer.bias1
        and not activations.apply(found.activation, found.params, found.program, zero, up).any()
    )


def _scaled_source(weight: Leaf, ids: Leaf, id_source: _Source, place: Place) -> _Source:
    """The gathered weights from which those of a layer are made: cast, scaled, or left out as a slot's id says.

    That no more is made of a weight is read off the operators: no set of samples shows it (0, NaN, one value of many).
    """
    steps, stack, sources = set[Node](), [weight.node], dict[Node, Node]()
    while stack:
        here = stack.pop()
        if (source := _gathered_from(here, place)) is not None:
            if value(source).dtype.is_floating_point:
                sources[here] = source
        elif not _elementwise(here):
            raise Conflict(f"the routing weights are made by `{here.name}`, which isn't run here")
        elif here not in steps:
            steps.add(here)
            stack.extend(here.all_input_nodes)
    if len(sources) != 1:
        raise Conflict("the routing weights are not made from weights that were gathered over the same group")
    ((gathered, source),) = sources.items()
    scaled = {gathered}
    for step in sorted(steps):  # fx nodes order by their place in the graph
        if scaled.isdisjoint(step.all_input_nodes):
            continue
        if not _scales(step, scaled):
            raise Conflict(
                f"`{step.name}` isn't the gathered routing weight for this rank's experts: more is made of it than a "
                "cast to another float dtype, a product, or zero where the id is another rank's"
            )
        scaled.add(step)
    masked = any(id_source.gathered in step.all_input_nodes for step in steps)
    if masked and (weight.index != ids.index or not _same_shape(weight.node, id_source.gathered)):
        raise Conflict(f"`{weight.node.name}` isn't indexed as the ids by which slots are left out")
    if not _same_shape(weight.node, gathered):
        raise Conflict(f"`{weight.node.name}` isn't one routing weight for each one that was gathered")
    return _Source(source, gathered)


_SCALED_BY: dict[str, tuple[int, ...]] = {
    "aten::_to_copy": (0,),
    "aten::clone": (0,),
    "aten::mul": (0, 1),
    "aten::div": (0,),
    "aten::where": (1, 2),
    "aten::masked_fill": (0,),
}
"""Operators that keep, scale or replace a routing weight, with the arguments that it may be."""


def _scales(step: Node, scaled: set[Node]) -> bool:
    """True where a step gives each weight times a factor, or a number instead of it, by the slot's id alone."""
    name, places = op_name(step), [i for i, arg in enumerate(step.args) if arg in scaled]
    if not value(step).dtype.is_floating_point or not set(places) <= set(_SCALED_BY.get(name, ())):
        return False
    if step.kwargs.get("rounding_mode") or not scaled.isdisjoint(step.kwargs.values()):
        return False
    return len(places) == 1 or name == "aten::where"


def _same_shape(a: Node, b: Node) -> bool:
    pair = value(a).shape, value(b).shape
    return len(pair[0]) == len(pair[1]) and all(map(sizes.same, *pair))


def _run(node: Node, known: dict[Node, Tensor]) -> Tensor:
    """What elementwise operators make of some tensors."""
    if node in known:
        return known[node]
    if not _elementwise(node):
        raise Conflict(f"`{node.name}` takes part in leaving slots out: its values aren't known")
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda arg: _run(arg, known))
    result = node.target(*args, **{k: v for k, v in kwargs.items() if k != "device"})  # type: ignore[operator]
    assert isinstance(result, Tensor)
    return result
