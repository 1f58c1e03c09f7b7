"""From one expression per expert to one layer: every expert exactly once, all with the same body.

In: the cases of a loop, rows cut by expert, or lists of one tensor per expert. Out: the `Layer` that they are together,
or `Conflict` with the expert that is missing or different.
"""

from collections import Counter
from dataclasses import replace

from moefuse.patterns.axes import At, Axis, Dims, Group
from moefuse.patterns.facts import Case, Conflict, Expr, Leaf, Pieces, Table
from moefuse.patterns.layer import Layer, describe
from moefuse.patterns.layer_quant import merged
from moefuse.patterns.pieces import piece_at
from moefuse.patterns.pointwise import dtype_of, strip_casts, walk
from moefuse.patterns.products import factors
from moefuse.patterns.router import chosen_from
from moefuse.patterns.rules import Lifting
from moefuse.patterns.unify import bind


def layer_of(lift: Lifting, body: Expr, slots: tuple[Axis, ...], dims: Dims) -> Layer:
    """The layer that sums `body` over `slots`: rows in one piece, cut by expert, or a list of tensors per weight."""
    layer = _layer_of(lift, body, slots, dims)
    if layer.ranks is not None:
        _demand_theirs(layer, body)
    return layer


def _demand_theirs(layer: Layer, body: Expr) -> None:
    """Demand that what the experts of other ranks have is theirs: rows that came back meet this rank's own tensors.

    Those that ids select, and those inside of pieces and tables, were demanded to be the others' as rows went back.
    """
    experts = [*layer.weight1, *layer.weight2, *layer.bias1, *layer.bias2, *layer.row_scale]
    experts += layer.quant.leaves if layer.quant is not None else ()
    here = {e.node for e in walk(body) if isinstance(e, Leaf)}
    for leaf in experts:
        if not leaf.selectors and leaf.node in here:
            raise Conflict(
                f"`{leaf.node.name}`, which each rank has for itself, takes part in expert rows that came back to it"
            )


def _layer_of(lift: Lifting, body: Expr, slots: tuple[Axis, ...], dims: Dims) -> Layer:
    if tables := [e for e in walk(body) if isinstance(e, Table)]:
        return merge(lift, _by_expert(body, tables, slots), dims)
    wholes = {e for e in walk(body) if isinstance(e, Pieces)}
    if not wholes:
        return describe(lift, body, slots, dims)
    if len(wholes) > 1:
        raise Conflict("the outputs of several loops over experts are multiplied")
    (whole,) = wholes
    bodies = enumerate(each_expert(lift, body, whole))
    return merge(lift, [Case(whole.node, expert, whole.ids, own, slots) for expert, own in bodies], dims)


def each_expert(lift: Lifting, body: Expr, whole: Pieces) -> list[Expr]:
    """The body for the slots of each expert of `whole`, which stands in it."""
    return [_at_expert(lift, body, expert, whole.ids) for expert in range(whole.experts)]


def _at_expert(lift: Lifting, body: Expr, expert: int, ids: Expr) -> Expr:
    """The body for the slots of one expert: its own pieces, and theirs where they were put together before."""
    while wholes := {e for e in walk(body) if isinstance(e, Pieces)}:
        for whole in wholes:
            if whole.ids != ids or expert >= whole.experts:
                raise Conflict("the loops over experts of one layer are cut by different ids")
            body = _replaced(body, whole, piece_at(lift, whole, expert))
    return body


def _by_expert(body: Expr, tables: list[Table], slots: tuple[Axis, ...]) -> list[Case]:
    """One case per expert, each with its own tensors of the lists that the same ids select from."""
    first, count = tables[0].nodes[0], len(tables[0].nodes)
    if any(table.index[0] != tables[0].index[0] or len(table.nodes) != count for table in tables):
        raise Conflict(
            f"`{tables[0].nodes[0].name}` and other tensors per expert are selected by different ids"
        )
    (selector,) = tables[0].index[0] if len(tables[0].index[0]) == 1 else (None,)
    if not isinstance(selector, At):
        raise Conflict(
            f"`{tables[0].nodes[0].name}` and the other experts' tensors are not selected by the routing"
        )

    def own(expr: Expr, expert: int) -> Expr:
        if isinstance(expr, Table):
            return Leaf(expr.nodes[expert], expr.index[1:])
        return expr.rebuilt(lambda part: own(part, expert))

    return [Case(first, expert, selector.expr, own(body, expert), slots) for expert in range(count)]


def _replaced(expr: Expr, old: Expr, new: Expr) -> Expr:
    return new if expr == old else expr.rebuilt(lambda part: _replaced(part, old, new))


def merge(lift: Lifting, cases: list[Case], dims: Dims) -> Layer:
    """The layer that a loop over experts computes: every expert exactly once, all with the same body."""
    numbers = Counter(case.expert for case in cases)
    for expert in range(max(numbers) + 1):
        if numbers[expert] != 1:
            raise Conflict(f"the loop adds expert {expert} {numbers[expert]} times: a layer has each once")
    if (routed := chosen_from(cases[0].ids)) is not None and routed > len(numbers):
        raise Conflict(f"the loop has {len(numbers)} of the {routed} experts that the router chooses from")
    cases = sorted(cases, key=lambda case: case.expert)
    own = next((i for i, case in enumerate(cases) if not case.rows.hard), len(cases))
    cases, identities = cases[:own], cases[own:]
    if not cases:
        raise Conflict("no expert of the loop has a GEMM")
    layers = [describe(lift, case.rows, case.slots, dims, case.ids) for case in cases]
    first = layers[0]
    for case in identities:
        _demand_identity(case, first)
    layers = [first, *(_renamed(layer, first, expert) for expert, layer in enumerate(layers[1:], 1))]
    parts = range(len(first.weight1))
    return replace(
        first,
        weight1=tuple(layer.weight1[part] for part in parts for layer in layers),
        weight2=tuple(layer.weight2[0] for layer in layers),
        bias1=tuple(layer.bias1[part] for part in range(len(first.bias1)) for layer in layers),
        bias2=tuple(layer.bias2[0] for layer in layers if layer.bias2),
        row_scale=_one_if_shared([layer.row_scale[0] for layer in layers if layer.row_scale]),
        gemms=frozenset().union(*(layer.gemms for layer in layers)),
        identities=len(identities),
        quant=merged([layer.quant for layer in layers if layer.quant is not None]),
    )


def _demand_identity(case: Case, first: Layer) -> None:
    """Demand that an expert without a GEMM returns the row that the others read, weighted as theirs."""
    if case.rows.hard:
        raise Conflict(f"expert {case.expert} of the loop has GEMMs, an expert before it has none")
    if len(case.slots) != len(first.slots) or len(first.hidden) != len(first.features):
        raise Conflict(f"expert {case.expert} of the loop runs over other indices than expert 0")
    slots: dict[Axis, Group] = {a: (b,) for a, b in zip(case.slots, first.slots, strict=True)}
    if bind(case.ids, slots) != first.ids:
        raise Conflict(f"expert {case.expert} of the loop has other ids than expert 0")
    every = factors(bind(case.rows, slots))
    rows = [f for f in every if f.axes & set(first.features)]
    as_output: dict[Axis, Group] = {a: (b,) for a, b in zip(first.hidden, first.features, strict=True)}
    if len(rows) != 1 or strip_casts(rows[0]) != strip_casts(bind(first.x, as_output)):
        raise Conflict(f"expert {case.expert} of the loop has no GEMM, and doesn't return the token's row")
    if dtype_of(rows[0]) != dtype_of(first.x):
        raise Conflict(f"expert {case.expert} of the loop returns rows of another dtype than experts read")
    if tuple(f for f in every if f is not rows[0]) != first.weights:
        raise Conflict(f"expert {case.expert} of the loop has other routing weights than expert 0")


def _one_if_shared(leaves: list[Leaf]) -> tuple[Leaf, ...]:
    return tuple(leaves[:1] if len({leaf.node for leaf in leaves}) == 1 else leaves)


def _renamed(other: Layer, first: Layer, expert: int) -> Layer:
    """An expert in the first one's axes. Demands that it differs from the first one in its weights only."""
    renamed: dict[Axis, Group] = {}
    for role in ("hidden", "inner", "slots", "tokens"):
        old, new = getattr(other, role), getattr(first, role)
        if len(old) != len(new):
            raise Conflict(f"expert {expert} of the loop runs over other indices than expert 0")
        renamed.update({a: (b,) for a, b in zip(old, new, strict=True)})
    same = {
        "rows": bind(other.x, renamed) == first.x,
        "ids": bind(other.ids, renamed) == first.ids,
        "routing weights": tuple(bind(w, renamed) for w in other.weights) == first.weights,
        "activation": (other.activation, other.activation_dtype)
        == (first.activation, first.activation_dtype),
        "weight layout": other.gate_up == first.gate_up and len(other.weight1) == len(first.weight1),
        "weight position": other.weight_position == first.weight_position,
        "norm": (other.row_norm, other.row_norm_eps, len(other.row_scale))
        == (first.row_norm, first.row_norm_eps, len(first.row_scale)),
        "biases": (len(other.bias1), len(other.bias2)) == (len(first.bias1), len(first.bias2)),
        "quantisation": first.quant is None
        if other.quant is None
        else first.quant is not None and other.quant.alike(first.quant),
    }
    for what, equal in same.items():
        if not equal:
            raise Conflict(f"expert {expert} of the loop has other {what} than expert 0")

    def leaves(own: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in (bind(leaf, renamed) for leaf in own) if isinstance(leaf, Leaf))

    return replace(
        other,
        weight1=leaves(other.weight1),
        weight2=leaves(other.weight2),
        bias1=leaves(other.bias1),
        bias2=leaves(other.bias2),
        row_scale=leaves(other.row_scale),
        quant=None if other.quant is None else other.quant.renamed(leaves),
    )
