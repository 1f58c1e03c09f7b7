"""Facts in words: every kind of expression has some, and they name the right nodes and axes."""

import pytest
import torch
from torch import fx

from moefuse.patterns import facts, quantised, rank_facts
from moefuse.patterns.axes import At, Axis, Part, Perm, Pick
from moefuse.patterns.facts import Const, Dot, Expr, Fact, Leaf, Op, Pos, Table
from moefuse.patterns.words import _SAY, words

GRAPH = fx.Graph()
X, W, IDS, SORT = (GRAPH.placeholder(name) for name in ("x", "w", "ids", "sort"))
T, K, H, E = Axis(10), Axis(2), Axis(64), Axis(8)
SLOT = Leaf(IDS, ((T,), (K,)))


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        (Fact(Leaf(X, ((T,), (H,))), ((T,), (H,))), "[i, j] = `x`[i, j]"),
        (Fact(Leaf(X, ((T,), (H,))), ((H,), (T,))), "[i, j] = `x`[j, i]"),
        (Fact(SLOT, ((T, K), ())), "[i·j, 0] = `ids`[i, j]"),
        (
            Fact(SLOT, ((Perm(SORT, (T, K), SLOT),),)),
            "[p] = `ids`[i, j]; p runs over i·j in the order of `sort`",
        ),
        (
            Fact(Pos((T,)), ((Pick(SORT, (T, K), SLOT, 3, 5),),)),
            "[p] = position(i); p runs over the i·j of expert 3, as `sort` lists them",
        ),
        (Fact(Leaf(X, ((Part((T,), 4, 2, 40),),)), ((T,),)), "[i] = `x`[4 + 2*i]"),
        (
            Fact(
                Dot(Leaf(X, ((T,), (H,))), Leaf(W, ((At(SLOT, 8),), (E,), (H,))), (H,), expert=True, node=X),
                ((T,), (K,), (E,)),
            ),
            "[i, j, k] = (Σl `x`[i, l] * `w`[`ids`[i, j], k, l])",
        ),
        (
            Fact(Table((X, W), ((At(SLOT, 2),), (H,))), ((T, K), (H,))),
            "[i·j, k] = (`x` ... `w`)[`ids`[i, j], k]",
        ),
        (
            Fact(Op(torch.ops.aten.mul.Tensor, (Leaf(X, ((T,),)), Const(2.0))), ((T,),)),
            "[i] = (`x`[i] * 2)",
        ),
    ],
)
def test_words(fact, said):
    assert words(fact) == said


def test_every_kind_of_expression_has_words():
    every = [kind for module in (facts, rank_facts, quantised) for kind in vars(module).values()]
    kinds = {
        kind
        for kind in every
        if isinstance(kind, type) and issubclass(kind, Expr) and kind.__name__[0] != "_"
    }
    assert kinds - {Expr, quantised.QuantDot} == set(_SAY)  # a QuantDot is said as the Dot that it is
