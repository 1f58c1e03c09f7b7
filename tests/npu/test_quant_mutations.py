"""Changed quantised sequences: refused, or fused with the numbers that they then have. Sizes collide on purpose."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

import moefuse
from moefuse.testing import capture_graph
from moefuse.testing.judge import judge, redraw
from moefuse.testing.mutations import mutants
from tests.npu.quant_sequences import CASES, ROUNDED, weights
from tests.npu.sequences import E, K

T = I = E  # noqa: E741  (as many tokens and inner features as experts)
H = 2 * I  # as many features as gate and up have, and as there are slots
assert T * K == H

CHANGED = (
    *("w8a8_swiglu_dynamic_quant", "w8a8_integer_product", "w8a8_fused_first_product", "w8a8_legacy_prefill"),
    *("w8a8_tokens_quantised_first", "w8a8_fused_last_product", "w4a8", "w4a4", "w8a16", "w4a16"),
    *ROUNDED,
)

WRITTEN_OUT = 2e-2
"""Norm-wise, fused against unfused, where the activation is written out: its steps in bfloat16 are off by up to 2^-9
each, which moves integers by one of 127 steps, in sums of only eight. 1.01e-2 is the worst of 1188 mutants."""


def changed(name: str, limit: int, seed: int) -> Counter[str]:
    """How the mutants of a sequence fared. AssertionError for a wrong one."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    x, logits = torch.randn(T, H, generator=generator), torch.randn(T, E, generator=generator)
    captured = capture_graph(case.layer, (x.bfloat16(), logits, *weights(case.scheme, 1, seed, H, I)))
    inputs = [captured.inputs, redraw(captured.inputs, 1)]
    rewrite = partial(moefuse.fuse, options={"target": "reference"})
    kinds: Counter[str] = Counter()
    for mutant in mutants(captured.graph_module, limit=limit, seed=seed):
        if all(written(mutant.graph_module, values) for values in inputs):
            verdict = judge(
                mutant.graph_module, inputs, rewrite, rtol=WRITTEN_OUT if name in ROUNDED else None
            )
            assert verdict.kind != "wrong", f"{mutant.kind}: {mutant.detail}\n{verdict.reason}"
            kinds[verdict.kind] += 1
    return kinds


def written(graph_module: torch.fx.GraphModule, values: Sequence[Any]) -> bool:
    """True unless the graph itself reads rows that an operator leaves unwritten (NaN), or crashes."""
    try:
        results = graph_module(*values)
    except Exception:  # an edit may well make the graph index out of bounds
        return False
    return all(bool(result.isfinite().all()) for result in results)


@pytest.mark.parametrize("name", CHANGED)
def test_changed_sequences_are_refused_or_right(name: str) -> None:
    assert changed(name, limit=12, seed=5)["refused"] > 0
