"""Sizes are compared and divided as expressions; what isn't proved is False or None."""

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from moefuse.graph import sizes


@pytest.fixture
def tokens() -> torch.SymInt:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    env = ShapeEnv()
    symbol = env.create_symbol(12, ConstantSource("tokens"), DimDynamic.DYNAMIC)
    made = env.create_symintnode(symbol, hint=12)
    assert isinstance(made, torch.SymInt)
    return made


def test_a_sum_divides_its_multiples(tokens: torch.SymInt) -> None:
    """As the slots of one rank's share of the tokens: the tokens less the first half, rounded up, times K."""
    share = tokens - (tokens + 1) // 2
    assert sizes.quotient(2 * tokens - 2 * ((tokens + 1) // 2), share) == 2
    assert sizes.quotient(share, 2 * share) is None
    assert sizes.quotient(2 * share, 2 * share + 1) is None
    half = sizes.quotient(6 * share, 3)
    assert half is not None
    assert sizes.same(half, 2 * share)


def test_no_guard_is_added(tokens: torch.SymInt) -> None:
    sizes.quotient(tokens * 2, tokens + 1)
    sizes.same(tokens, 12)
    assert not tokens.node.shape_env.guards
