"""Axes, groups, unification and substitution: what the soundness of every rule rests on."""

import pytest
import torch
from torch.fx import Graph, Node

from moefuse.graph import sizes
from moefuse.patterns.axes import At, Axis, Digit, Part, Perm, group_size
from moefuse.patterns.facts import Conflict, Const, Dot, Fact, Leaf, Lost, Pos, Sum, group_axes
from moefuse.patterns.structure import regroup
from moefuse.patterns.unify import Unifier, bind, bind_fact, fresh
from tests.patterns.spelling import E, K, T, operands, study


def node(name: str = "a") -> Node:
    return Graph().placeholder(name)


def perm(*over: Axis, sort: Node | None = None) -> Perm:
    return Perm(sort or node("sort"), over, Const(0.0))


# --- identity --------------------------------------------------------------------------------------------


def test_axes_of_one_size_are_different() -> None:
    assert Axis(4) != Axis(4)
    assert Leaf(a := node(), ((Axis(4),),)) != Leaf(a, ((Axis(4),),))
    t = Axis(4)
    assert Leaf(a, ((t,),)) == Leaf(a, ((t,),))


def test_sorts_are_told_apart_by_their_node() -> None:
    t, one, two = Axis(4), node("one"), node("two")
    assert perm(t, sort=one) == perm(t, sort=one)
    assert perm(t, sort=one) != perm(t, sort=two)


def test_the_blame_of_a_product_or_sum_is_no_part_of_its_value() -> None:
    t, a = Axis(4), Leaf(node(), ())
    assert Dot(a, a, (t,), True, node("x")) == Dot(a, a, (t,), True, node("y"))
    assert Sum(a, (t,), node("x")) == Sum(a, (t,), node("y"))
    assert Sum(a, (t,), node("x")) != Sum(a, (t,), node("x"), base=node("b"))


def test_sizes_of_groups() -> None:
    t, k = Axis(6), Axis(2)
    assert group_size((t, k)) == group_size((perm(t, k),)) == 12
    assert group_size(()) == 1
    assert group_axes((perm(t), Part((k,), 0, 1, 4), At(Leaf(node(), ((t,),)), 3))) == {t, k}


def test_free_and_summed_axes() -> None:
    t, h = Axis(6), Axis(16)
    row = Leaf(node(), ((t,), (h,)))
    assert row.axes == {t, h}
    assert Dot(row, row, (h,), True, node()).axes == {t}
    assert Sum(row, (t,), node()).axes == {h}


def test_expert_products_are_hard_wherever_they_stand() -> None:
    leaf = Leaf(node(), ())
    dot = Dot(leaf, leaf, (), True, node())
    assert not leaf.hard
    assert not Dot(leaf, leaf, (), False, node()).hard
    assert dot.hard
    assert Sum(dot, (), node()).hard
    assert Dot(dot, leaf, (), False, node()).hard


# --- unify -----------------------------------------------------------------------------------------------


def test_unify_binds_equal_axes() -> None:
    a, b, unifier = Axis(6), Axis(6), Unifier()
    (digit,) = unifier.unify((a,), (b,))
    assert unifier.resolve((a,)) == unifier.resolve((b,)) == (digit,)


def test_unify_splits_the_longer_axis() -> None:
    s, t, k = Axis(12), Axis(6), Axis(2)
    unifier = Unifier()
    assert unifier.unify((s,), (t, k)) == unifier.resolve((s,)) == unifier.resolve((t, k))
    assert [digit.size for digit in unifier.resolve((s,))] == [6, 2]


def test_unify_splits_either_side_more_than_once() -> None:
    abc, a, b, c, bc = Axis(24), Axis(2), Axis(3), Axis(4), Axis(12)
    unifier = Unifier()
    unifier.unify((abc,), (a, bc))
    assert unifier.unify((bc,), (b, c)) == unifier.resolve((b, c))
    assert unifier.resolve((abc,)) == unifier.resolve((a, b, c))
    assert len(set(unifier.resolve((abc,)))) == 3


def test_size_one_broadcasts() -> None:
    t = Axis(6)
    assert Unifier().unify((), (t,)) == (t,)
    assert Unifier().unify((t,), ()) == (t,)
    assert Unifier().unify((), ()) == ()


@pytest.mark.parametrize(("left", "right"), [((6,), (4,)), ((12,), (8, 2)), ((3, 4), (4, 3)), ((6, 2), (6,))])
def test_unify_refuses_what_does_not_line_up(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    with pytest.raises(Conflict, match="do not line up"):
        Unifier().unify(tuple(map(Axis, left)), tuple(map(Axis, right)))


def test_unify_takes_a_permutation_for_a_plain_axis_of_its_size() -> None:
    t, k, s = Axis(6), Axis(2), Axis(12)
    order = perm(t, k)
    unifier = Unifier()
    assert unifier.unify((s,), (order,)) == (order,)
    assert unifier.resolve((s,)) == (order,)


def test_permutations_meet_by_identity_only() -> None:
    t, other, sort = Axis(12), Axis(12), node("sort")
    unifier = Unifier()
    unifier.unify((perm(t, sort=sort),), (perm(other, sort=sort),))
    assert unifier.resolve((t,)) == unifier.resolve((other,)), "what they run over is unified with them"
    with pytest.raises(Conflict, match="rows in the order of `first` meet rows in the order of `second`"):
        Unifier().unify((perm(t, sort=node("first")),), (perm(t, sort=node("second")),))


@pytest.mark.parametrize("size", [2, 6])
def test_a_permutation_is_never_split(size: int) -> None:
    with pytest.raises(Conflict):
        Unifier().unify((perm(Axis(12)),), (Axis(size), Axis(12 // size)))


def test_a_part_is_not_the_whole() -> None:
    half = Part((Axis(3),), 0, 1, 6)
    with pytest.raises(Conflict):
        Unifier().unify((half,), (Part((Axis(3),), 3, 1, 6),))


def test_symbolic_sizes_unify_without_a_guard() -> None:
    """[T, K] with symbolic T, flattened and split again: proved by algebra, never asked of the ShapeEnv."""
    x, ids, *_ = operands()
    result = study(lambda x, ids: x[ids.view(-1).argsort() // K] * 1.5, x, ids, dynamic={0: [0], 1: [0]})
    tokens = result.graph_module.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
    shape_env = tokens.node.shape_env
    guards = len(shape_env.guards)
    (rows,) = (value for name, value in result.lifted.facts.items() if name.name == "index")
    assert isinstance(rows, Fact)
    assert len(shape_env.guards) == guards
    s, t, k = Axis(tokens * K), Axis(tokens), Axis(K)
    unifier = Unifier()
    assert unifier.unify((s,), (t, k)) == unifier.resolve((t, k))
    with pytest.raises(Conflict):
        Unifier().unify((Axis(tokens + 1),), (Axis(tokens),))
    with pytest.raises(Conflict):
        Unifier().unify((Axis(tokens),), (Axis(T),))  # the hint is T; nothing proves it
    assert len(shape_env.guards) == guards


# --- regroup ---------------------------------------------------------------------------------------------


def test_regroup_merges_and_splits() -> None:
    t, k, h = Axis(6), Axis(2), Axis(16)
    dims, binding = regroup(((t,), (k,), (h,)), [12, 16])
    assert (dims, dict(binding)) == (((t, k), (h,)), {})
    dims, binding = regroup(((t, k), (h,)), [6, 2, 4, 4])
    assert [group_size(group) for group in dims] == [6, 2, 4, 4]
    assert [axis.size for axis in group_axes(binding[h])] == [4, 4]
    assert dims[:2] == ((t,), (k,))


def test_regroup_drops_and_makes_dimensions_of_one() -> None:
    t = Axis(6)
    assert regroup(((), (t,), ()), [6])[0] == ((t,),)
    assert regroup(((t,),), [1, 6, 1])[0] == ((), (t,), ())


@pytest.mark.parametrize(("have", "want"), [([6, 4], [8, 3]), ([6], [4, 2]), ([6], [3]), ([2], [6])])
def test_regroup_refuses_sizes_that_cut_through_an_axis(have: list[int], want: list[int]) -> None:
    with pytest.raises(Conflict, match="a view to"):
        regroup(tuple((Axis(size),) for size in have), want)


def test_regroup_keeps_permutations_whole() -> None:
    order = perm(Axis(6), Axis(2))
    assert regroup(((order,),), [12, 1])[0] == ((order,), ())
    with pytest.raises(Conflict, match="cuts through an index of 12 elements"):
        regroup(((order,),), [6, 2])


def test_regroup_symbolic() -> None:
    (x,) = study(lambda x: x * 1, torch.randn(T, E), dynamic={0: [0]}).graph_module.graph.find_nodes(
        op="placeholder"
    )
    tokens = x.meta["val"].shape[0]
    guards = len(tokens.node.shape_env.guards)
    s = Axis(tokens * K)
    (first, second), binding = regroup(((s,),), [tokens, K])
    assert sizes.same(group_size(first), tokens)
    assert group_size(second) == K
    assert binding[s] == first + second
    with pytest.raises(Conflict):
        regroup(((s,),), [K + 1, tokens])
    assert len(tokens.node.shape_env.guards) == guards


# --- bind ------------------------------------------------------------------------------------------------


def test_bind_refuses_a_leaf_in_sorted_order() -> None:
    """A tensor can't be indexed by a position in sorted order: two sorts would be mixed up."""
    s = Axis(12)
    leaf = Leaf(node("weights"), ((s,),))
    with pytest.raises(Conflict, match="`weights` is in slot order, the other operand in"):
        bind(leaf, {s: (perm(Axis(12)),)})
    assert bind(Pos((s,)), {s: (order := perm(Axis(12)),)}) == Pos((order,))


def test_bind_reaches_into_permutations_parts_and_selectors() -> None:
    old, new = Axis(4), Axis(4)
    ids = Leaf(node("ids"), ((old,),))
    digits: tuple[Digit, ...] = (perm(old), Part((old,), 1, 2, 9), At(ids, 7))
    for digit in digits:
        assert group_axes(bind(Pos((digit,)), {old: (new,)}).group) == {new}  # type: ignore[attr-defined]


def test_bind_leaves_other_axes_alone() -> None:
    t, h = Axis(6), Axis(16)
    leaf = Leaf(node(), ((t,), (h,)))
    assert bind(leaf, {Axis(6): (Axis(6),)}) is leaf


def test_fresh_facts_share_no_axis() -> None:
    t, h = Axis(6), Axis(16)
    fact = Fact(Leaf(node(), ((t,), (h,))), ((t,), (h,)))
    one, two = fresh(fact), fresh(fact)
    assert one.expr.axes.isdisjoint(two.expr.axes | fact.expr.axes)
    assert one.expr.axes == group_axes(one.dims[0] + one.dims[1])


def test_one_fact_used_twice_is_not_captured() -> None:
    """x[t] * x[t'] summed over t' only: both uses of x have axes of their own."""
    result = study(
        lambda w, ids: w[ids] @ w[ids].transpose(-1, -2), torch.randn(E, 3, 5), torch.zeros(T, K).long()
    )
    assert result.meaning == "dot(w[<ids[t k]> 3 5], w[<ids[t k]> 3' 5]; 5) over t, k, 3, 3'"


def test_bind_fact_changes_dims_and_value_together() -> None:
    s, t, k = Axis(12), Axis(6), Axis(2)
    fact = bind_fact(Fact(Leaf(node(), ((s,),)), ((s,),)), {s: (t, k)})
    assert fact.dims == ((t, k),)
    assert fact.expr.axes == {t, k}


def test_the_root_of_a_loss_is_the_first_thing_in_the_way() -> None:
    first = Lost("first", node("one"))
    assert Lost("third", node("three"), Lost("second", node("two"), first)).root is first
    assert first.root is first
