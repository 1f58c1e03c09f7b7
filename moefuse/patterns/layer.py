"""What one MoE layer, or one expert of a loop, computes.

In: the expression of an expert's weighted rows, and the axes over which they are summed. Out: `Layer`, or `Conflict`
with the first thing that is missing or strange. What is demanded here is what makes a rewrite right: the same ids
select every weight, the token row is indexed by the token and nothing else, routing weights by the slot, each weight
is read whole, and no slot is left out.
"""

import functools
from dataclasses import dataclass

import torch
from torch.fx import Node

from moefuse.graph import sizes
from moefuse.ops.spec import GateUp, RowNorm, WeightPosition
from moefuse.patterns.activation import Classified, classify, to_program, upcast
from moefuse.patterns.axes import Axis, Digit, Dims, Group, Part, Ranks
from moefuse.patterns.facts import Conflict, Const, Expr, Leaf, Op
from moefuse.patterns.layer_quant import LayerQuant, quantisation
from moefuse.patterns.pointwise import dtype_of, strip_casts, walk
from moefuse.patterns.products import (
    Integers,
    Linear,
    demand_kept,
    factors,
    first_gemms,
    linear,
    means,
    split_factors,
    times,
)
from moefuse.patterns.quantised import Quantised, RowScale
from moefuse.patterns.rank_facts import Among, Local, Spread
from moefuse.patterns.row_norm import demand_given, take_norm
from moefuse.patterns.rules import Lifting, value
from moefuse.patterns.unify import bind
from moefuse.patterns.weights import Span, demand_whole, in_order, layout, span


@dataclass(frozen=True)
class Layer:
    """What one MoE layer, or one expert of a loop, computes; operands as expressions.

    tokens, slots: the axes of T (as the token row is indexed) and of K. hidden, inner, features: those of H, I, O.
    weight1: one weight per expert tensor (gate and up together, or a plain expert), or gates, then ups. Stacked
    weights are selected by `ids`; a loop has one tensor per expert. row_scale: as weight2, or one shared by all.
    identities: how many experts behind the last one return the token's row. quant: None for experts of floats.
    ranks: how the experts are spread over a process group, None where all are here; the weights are those of this rank.
    first: the id of the first expert; slots with ids below it, or past the last one, go nowhere. ids: one number where
    every token goes to that expert.
    """

    tokens: tuple[Axis, ...]
    slots: tuple[Axis, ...]
    hidden: tuple[Axis, ...]
    inner: tuple[Axis, ...]
    features: tuple[Axis, ...]
    x: Expr
    ids: Leaf | Const
    weights: tuple[Expr, ...]
    weight1: tuple[Leaf, ...]
    weight2: tuple[Leaf, ...]
    bias1: tuple[Leaf, ...]
    bias2: tuple[Leaf, ...]
    gate_up: GateUp
    activation: Classified
    activation_dtype: torch.dtype | None
    weight_position: WeightPosition
    row_norm: RowNorm
    row_norm_eps: float
    row_scale: tuple[Leaf, ...]
    gemms: frozenset[Node]
    identities: int = 0
    quant: LayerQuant | None = None
    ranks: Ranks | None = None
    first: int = 0

    @property
    def stacked(self) -> bool:
        """True when one tensor holds all experts."""
        return bool(self.weight2[0].selectors)

    def contracted(self, leaf: Leaf) -> frozenset[Axis]:
        """The input features of a first weight; a separate up GEMM has axes of its own."""
        selected = {axis for at in leaf.selectors for axis in at.expr.axes}
        return leaf.axes - set(self.inner) - selected


def describe(
    lift: Lifting, body: Expr, slots: tuple[Axis, ...], dims: Dims, case_ids: Expr | None = None
) -> Layer:
    """The layer that sums `body` over `slots`.

    case_ids: where weights aren't selected by ids, the ids of a loop, or the number of the one expert.
    """
    every, norm = take_norm(factors(body))
    core, outputs = split_factors(every)
    second, firsts, program, mids = _gemms(core)
    x, inputs = _token_rows(lift, firsts, slots)
    result = value(getattr(body, "node", None))
    summed = (result.dtype,) if isinstance(result, torch.Tensor) else ()
    demand_kept(body, (second.dtype, second.row_dtype, firsts[0].dtype, *summed))
    scale = (norm.scale,) if norm is not None and norm.scale is not None else ()
    chosen = _same_ids([second, *firsts], case_ids, scale)
    ids = chosen if isinstance(chosen, Leaf | Const) else chosen.ids
    hidden = firsts[0].over
    tokens = _token_axes(x, hidden, ids, slots)
    if not isinstance(chosen, Leaf | Const | Among):
        _demand_no_scales([*outputs, *mids, *inputs])
    position = _position(outputs, mids, inputs)
    gemms = frozenset([second.node, *(f.node for f in firsts)])
    _check_weights([*outputs, *mids, *inputs], {*tokens, *slots})
    demand_given([*outputs, *mids, *inputs], gemms)
    own = _output_features(dims, tokens)
    features = in_order(second.weight, own)
    if set(features) != set(own):
        raise Conflict("the output has dimensions besides the token's and the features")
    if norm is not None and norm.features != set(features):
        raise Conflict("expert rows are normalised over a part of their features")
    if norm is not None and not norm.eps and position != "output":
        # In a dense layer the weights of experts that weren't chosen are zeros, and NaN times zero is NaN.
        raise Conflict(
            "routing weights stand before a norm without an eps, which makes NaN of a row of zeros"
        )
    whole = [(leaf, features) for leaf in scale]
    for leaf, axes in (
        *whole,
        (second.weight, second.over),
        (second.weight, features),
        (second.bias, features),
    ):
        if leaf is not None:
            demand_whole(leaf, axes)
    for leaf in (*second.leaves, *scale, *(t for f in firsts for t in f.leaves)):
        if {*tokens, *slots} & {digit for group in leaf.index for digit in group}:
            raise Conflict(f"`{leaf.node.name}`, an expert's own tensor, differs from token to token")
    gate_up, ordered, activation, activation_dtype = _gate_up(program, firsts, second.over)
    quant = quantisation(ordered, second, second.over, features, gate_up != "separate")
    if quant is not None and (position != "output" or norm is not None):
        raise Conflict(
            "quantised experts with a norm, or with routing weights elsewhere than on their output"
        )
    return Layer(
        tokens=tokens,
        slots=slots,
        hidden=hidden,
        inner=second.over,
        features=features,
        x=x,
        ids=ids,
        weights=(*outputs, *mids, *inputs),
        weight1=_one_per_tensor([f.weight for f in ordered], gate_up),
        weight2=(second.weight,),
        bias1=_one_per_tensor([f.bias for f in ordered if f.bias is not None], gate_up),
        bias2=(second.bias,) if second.bias is not None else (),
        gate_up=gate_up,
        activation=activation,
        activation_dtype=activation_dtype,
        weight_position=position,
        row_norm=norm.kind if norm is not None else "none",
        row_norm_eps=norm.eps if norm is not None else 0.0,
        row_scale=scale,
        gemms=gemms,
        quant=quant,
        ranks=chosen.ranks if isinstance(chosen, Local | Spread) else None,
        first=chosen.first if isinstance(chosen, Among) else 0,
    )


def _gemms(core: Expr) -> tuple[Linear, list[Linear], Expr, list[Expr]]:
    """(the second GEMM, the first ones, the activation between them, routing weights that stand there)."""
    second = linear(core)
    if second is None:
        raise Conflict(_unexpected(core, "between the second expert GEMM and the combine"))
    if not second.rows.hard:
        text = "each expert is one product: a layer has two, with an activation between them"
        raise Conflict(f"{text} (`{second.node.name}`)")
    program, mids = _split_activation(second.rows)
    if means(program):
        raise Conflict("a mean over the features of a row stands between the expert GEMMs")
    firsts = first_gemms(program)
    if not firsts:
        raise Conflict("no first expert GEMM feeds the second one")
    plain = [one.dtype for one in (second, *firsts) if one.integers is None]
    if len(dtypes := set(plain)) > 1:
        raise Conflict(f"the expert GEMMs run in different dtypes: {', '.join(sorted(map(str, dtypes)))}")
    return second, firsts, program, mids


def _position(outputs: list[Expr], mids: list[Expr], inputs: list[Expr]) -> WeightPosition:
    """Where the routing weight multiplies. Factors at several places are refused: they don't commute with biases."""
    places: dict[WeightPosition, list[Expr]] = {"output": outputs, "mid": mids, "input": inputs}
    used = [place for place, found in places.items() if found]
    if len(used) > 1:
        raise Conflict(f"routing weights at several places of the layer: {', '.join(used)}")
    return used[0] if used else "output"


def _unexpected(expr: Expr, where: str) -> str:
    inner = strip_casts(expr)
    if isinstance(inner, Op):
        at = f" (`{inner.node.name}`)" if inner.node is not None else ""
        return f"{inner.target}{at} stands {where}"
    return f"a {type(inner).__name__.lower()} stands {where}"


def _split_activation(rows: Expr) -> tuple[Expr, list[Expr]]:
    """The activation's value without soft factors that hold a value per slot ("mid" routing weights)."""
    every = factors(rows)
    soft = [f for f in every if not f.hard and not isinstance(f, Const)]
    if not soft:
        return rows, []
    return times([f for f in every if f.hard or isinstance(f, Const)]), soft


def _token_rows(lift: Lifting, firsts: list[Linear], slots: tuple[Axis, ...]) -> tuple[Expr, list[Expr]]:
    """(the expression of the token row, routing weights multiplied into it); equal for every first GEMM."""
    rows: Expr | None = None
    weights: list[Expr] = []
    for first in firsts:
        if len(first.over) != len(firsts[0].over):
            raise Conflict("gate and up GEMM contract different dimensions")
        renamed: dict[Axis, Group] = {
            old: (new,) for old, new in zip(first.over, firsts[0].over, strict=True)
        }
        opened = lift.expand(first.rows, functools.partial(_per_slot, over=first.over, slots=slots))
        demand_kept(opened, (first.row_dtype,))
        every = factors(bind(opened, renamed))
        routing = [f for f in every if _is_routing_weight(f, firsts[0].over, slots)]
        row = times([f for f in every if f not in routing])
        if rows is None:
            rows, weights = row, routing
        elif rows != row or weights != routing:
            raise Conflict("gate and up GEMM read different rows")
    assert rows is not None
    if rows.hard:
        raise Conflict("the token rows are the outputs of other experts")
    if any(isinstance(e, Quantised | RowScale) for e in walk(rows)):
        raise Conflict("the experts read the integers of quantised rows as numbers of their own")
    dtype = firsts[0].row_dtype
    if dtype_of(rows) != dtype:  # a cast of the whole product, the routing weight included
        rows = Op(torch.ops.aten._to_copy.default, (rows,), (("dtype", dtype),))
    return rows, weights


def _is_routing_weight(factor: Expr, features: tuple[Axis, ...], slots: tuple[Axis, ...]) -> bool:
    """A factor of the input row that depends on the slot; all else belongs to the token row itself."""
    if factor.axes & set(features):
        return False
    return bool(factor.axes & set(slots)) or any(isinstance(e, Leaf) and e.selectors for e in walk(factor))


def _per_slot(leaf: Leaf, over: tuple[Axis, ...], slots: tuple[Axis, ...]) -> bool:
    """A leaf over slots and features: open it, a routing weight may have been multiplied in."""
    return not leaf.axes.isdisjoint(over) and not leaf.axes.isdisjoint(slots) and not leaf.selectors


def _same_ids(
    linears: list[Linear], case_ids: Expr | None, scale: tuple[Leaf, ...]
) -> Leaf | Const | Local | Spread | Among:
    """The ids that select every weight, bias and row scale (unless all experts share it).

    In a loop: those that were compared with the expert's number. Of an expert that every token goes to: its number.
    """
    if case_ids is not None:
        selected = any(leaf.selectors for leaf in (*(one.weight for one in linears), *scale))
        if not isinstance(case_ids, Leaf | Const | Local | Spread | Among) or selected:
            raise Conflict("a loop over experts whose weights are selected by ids once more")
        return case_ids
    leaves = [leaf for one in linears for leaf in one.leaves]
    leaves += [leaf for leaf in scale if leaf.selectors]
    chosen = [leaf.selectors[0].expr if len(leaf.selectors) == 1 else None for leaf in leaves]
    first = chosen[0]
    if not isinstance(first, Leaf | Local | Spread | Among):
        raise Conflict("expert weights are selected by something other than a tensor of ids")
    for leaf, other in zip(leaves, chosen, strict=True):
        if other != first:
            raise Conflict(f"`{leaf.node.name}` is selected by other ids than the rest of the layer")
    return first


def _token_axes(
    rows: Expr, hidden: tuple[Axis, ...], ids: Leaf | Const, slots: tuple[Axis, ...]
) -> tuple[Axis, ...]:
    """The token axes, in the order in which the token row is indexed."""
    leaves = [e for e in walk(rows) if isinstance(e, Leaf)]
    main = next((leaf for leaf in leaves if leaf.axes >= set(hidden) and not leaf.selectors), None)
    if main is None:
        raise Conflict("the input rows of the experts are no plain tensor indexed by token")
    tokens = tuple(d for g in main.index for d in g if isinstance(d, Axis) and d not in hidden)
    if any(not isinstance(d, Axis) for g in main.index for d in g):
        raise Conflict(f"`{main.node.name}` is not read whole as the token rows")
    index: list[Digit] = [*tokens, *slots] if isinstance(ids, Const) else [d for g in ids.index for d in g]
    if isinstance(ids, Leaf) and any(not isinstance(d, Axis) for d in index):
        raise Conflict(f"only a part of the ids `{ids.node.name}` is used")
    if not set(slots) <= set(index):
        raise Conflict("the combine sums over something other than the slots of a token")
    expected = [axis for axis in index if axis not in slots]
    if set(tokens) != set(expected) or len(tokens) != len(expected) or not rows.axes <= {*tokens, *hidden}:
        raise Conflict(f"`{main.node.name}` is not indexed by the token of each slot")
    return tokens


def _check_weights(weights: list[Expr], allowed: set[Axis]) -> None:
    """Routing weights depend on the slot alone, and are read whole."""
    for weight in weights:
        if not weight.axes <= allowed:
            raise Conflict(f"{_name(weight)} weighs expert outputs by more than the slot")
        for leaf in (e for e in walk(weight) if isinstance(e, Leaf)):
            if any(isinstance(d, Part) for g in leaf.index for d in g):
                raise Conflict(f"only a part of the routing weights `{leaf.node.name}` is used")


def _demand_no_scales(weights: list[Expr]) -> None:
    """Experts on other ranks have weights and biases; a routing weight is a number of the slot's own rank."""
    for leaf in (e for weight in weights for e in walk(weight) if isinstance(e, Leaf)):
        if leaf.selectors:
            raise Conflict(
                f"`{leaf.node.name}` scales the rows of each expert, and experts are on other ranks"
            )


def _name(expr: Expr) -> str:
    node = getattr(expr, "node", None)
    return f"`{node.name}`" if node is not None else "a factor"


def _output_features(dims: Dims, tokens: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """The feature dimension of the output: what remains beside the token axes, in one piece."""
    every = [d for group in dims for d in group]
    rest = tuple(d for d in every if isinstance(d, Axis) and d not in tokens)
    if not all(isinstance(d, Axis) for d in every):
        raise Conflict("the output is in an order by expert")
    if len(rest) + len(tokens) != len(every):
        raise Conflict("the output does not have one row per token")
    if not set(tokens) <= set(every):
        raise Conflict("the output sums over tokens")
    return rest


def _gate_up(
    program: Expr, firsts: list[Linear], inner: tuple[Axis, ...]
) -> tuple[GateUp, list[Linear], Classified, torch.dtype | None]:
    """(layout, GEMMs in order gate, up; activation, its dtype), read off the weight rows that each leaf takes."""
    if len(firsts) > 2:
        raise Conflict(f"the activation reads {len(firsts)} different GEMM outputs")
    names = dict(zip(map(_key, firsts), ("g", "u"), strict=False))

    def leaf(expr: Expr) -> str | None:
        found = linear(expr)
        return names[_key(found)] if found is not None else None

    activation = classify(to_program(program, leaf), len(firsts) == 2)
    ordered = firsts[::-1] if activation.swapped else firsts
    spans = [span(one.weight, inner) for one in ordered]
    for one, rows in zip(ordered, spans, strict=True):
        demand_whole(one.weight, one.over)
        if one.bias is not None and not _same_span(span(one.bias, inner), rows):
            raise Conflict(f"`{one.bias.node.name}` is not laid out as the weight it belongs to")
    biases = {one.bias.node if one.bias is not None else None for one in ordered}
    if len(biases) > 1 and (None in biases or ordered[0].weight.node is ordered[1].weight.node):
        raise Conflict("gate and up have different biases but share a weight, or only one of them has a bias")
    found = layout(ordered, spans, sizes.product(axis.size for axis in inner))
    return found, ordered, activation, upcast(program, leaf)


def _same_span(a: Span, b: Span) -> bool:
    return a[:2] == b[:2] and sizes.same(a[2], b[2])


def _key(one: Linear) -> tuple[Leaf, Leaf | None, Integers | None]:
    return one.weight, one.bias, one.integers


def _one_per_tensor(leaves: list[Leaf], gate_up: GateUp) -> tuple[Leaf, ...]:
    """Two leaves where gate and up are separate tensors, otherwise one: both halves are in it."""
    return tuple(leaves if gate_up == "separate" else leaves[:1])
