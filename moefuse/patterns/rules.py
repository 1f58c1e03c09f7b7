"""The rule book: which function tells the meaning of which operator's output.

In: rule functions from the component files (router, init_routing, grouped_matmul, ...). Out: `rule_for(node)`.
A rule gets the lifter and the node and returns the output's `Fact`, a tuple of facts for an operator with
several outputs, or None: "nothing to say", which makes the output an opaque leaf. It raises `Conflict` with a
reason where a meaning is lost.
"""

from collections.abc import Callable
from typing import Any, Protocol

import sympy
import torch
from torch.fx import Node

from moefuse.patterns.axes import Arrived, Perm, Pick
from moefuse.patterns.facts import Expr, Fact, Leaf, Tally
from moefuse.patterns.rank_facts import Inflow

READS_NO_ELEMENT = frozenset(
    f"aten::{name}"
    for name in (
        *("sym_size", "sym_numel", "sym_stride", "_assert_tensor_metadata"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full"),
    )
)
"""Operators that look at a tensor's shape, dtype or device only: no meaning is lost in them."""

Outcome = Fact | tuple[Fact | None, ...] | None


Counted = Perm | Pick | Tally | Inflow | Arrived
"""What a size that depends on the data may count: slots, all or of some experts, or rows that come here."""


class Lifting(Protocol):
    """What a rule may ask for."""

    forced: bool
    """True while an opaque leaf is being opened: rules then answer for plain leaves too."""

    counts: dict[sympy.Symbol, Counted]
    """What the graph's data-dependent sizes count, as far as that is known."""

    def fact(self, arg: Any) -> Fact:
        """The fact of an operand over fresh axes; an opaque leaf where nothing is known; a constant."""

    def expand(self, expr: Expr, opaque: Callable[[Leaf], bool]) -> Expr:
        """The expression with the leaves that `opaque` names opened into what their nodes compute."""


Rule = Callable[[Lifting, Node], Outcome]

_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators by qualified name without overload (`aten::sort`).

    Names and not operator objects: an operator that isn't installed costs nothing. A second rule for the
    same name is an error.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                raise ValueError(f"two rules for {name}: {_RULES[name].__name__} and {function.__name__}")
            _RULES[name] = function
        return function

    return register


def op_name(node: Node) -> str:
    """`aten::sort` for a call of an operator, `getitem` for tuple access, "" for anything else."""
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name)
    return getattr(node.target, "__name__", "")


def rule_for(node: Node) -> Rule | None:
    """The rule of the node's operator; pointwise operators share one."""
    if (found := _RULES.get(op_name(node))) is not None:
        return found
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return None  # what is written in place has two meanings
    if torch.Tag.pointwise in node.target.tags:
        return _RULES["pointwise"]
    return None


def argument(node: Node, position: int, name: str = "", default: Any = None) -> Any:
    """An argument of a node, given by position or by keyword; the default where it is left out."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def value(node: Any) -> Any:
    """The fake value of a node (`meta["val"]`), or the thing itself if it is no node."""
    return node.meta.get("val") if isinstance(node, Node) else node


def is_float(node: Any) -> bool:
    """True for a node that holds a floating point tensor."""
    val = value(node)
    return isinstance(val, torch.Tensor) and val.is_floating_point()
