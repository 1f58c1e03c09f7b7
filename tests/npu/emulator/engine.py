"""A pretended graph engine: torchair's "max-autotune" works up to its graph, which it can dump.

In: nothing. Out: `pretended_engine()`. GE compiles and runs nothing: torchair must be told to run the FX graph
(`debug.run_eagerly`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def pretended_engine() -> Iterator[None]:
    """GE accepts every operator."""
    import torchair

    compat = torchair._ge_concrete_graph.compat_ir
    with mock.patch.object(compat, "is_cann_compat", return_value=""):
        yield
