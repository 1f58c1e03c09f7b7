"""Changed MoE graphs: each one is refused, or fused with the result that the changed graph has itself.

`--fuzz-examples N` tries N new mutants of each base, half of them with two edits; the default is always
the same.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moefuse.testing.capture import Captured, capture_graph, capture_model
from moefuse.testing.compare import rewrite_and_compare
from moefuse.testing.judge import judge, redraw
from moefuse.testing.mutations import mutants
from moefuse.testing.oracle import SafeRun
from moefuse.testing.programs import Program, Sizes
from tests.fuzz.test_harness import PLAIN, dynamic_tokens
from tests.support import Block, deepseek_block, gpt_oss_block, llama4_block, qwen3_block

MUTANTS = 40

ORDINARY = Sizes(6, 2, 4, 16, 24)
T_IS_K = Sizes(2, 2, 4, 16, 24)
T_IS_E = Sizes(4, 2, 4, 16, 24)
E_IS_H = Sizes(5, 2, 8, 8, 16)
SQUARE = Sizes(6, 2, 4, 16, 16)
ALL_SAME = Sizes(8, 8, 8, 8, 8)

GPT_FAST = replace(
    PLAIN, router="softmax_topk_renorm", dispatch="einsum", combine="einsum", gate_up="separate"
)
INDEX_ADD = replace(
    PLAIN, router="sigmoid_bias", combine="index_add", gate_up="interleaved_swapped", bias=True
)
INVERSE = replace(PLAIN, combine="inverse_argsort", late_weight=True, token_index="arange", counts="one_hot")
INPUT = replace(PLAIN, position="input", combine="put_back", router="topk_softmax", activation="clamped_silu")
DENSE = replace(
    PLAIN, dispatch="dense", combine="einsum", router="topk_softmax", gate_up="none", activation="relu2"
)


PIECES = replace(PLAIN, dispatch="pieces", router="topk_softmax", combine="put_back", bias=True)
MAP = replace(PLAIN, dispatch="map", router="softmax_topk_renorm", combine="scatter_add", position="mid")

Base = tuple[Captured, list[tuple[Any, ...]]]
"""A graph, and more inputs for it."""


class TwoLayers(torch.nn.Module):
    """Two layers of the same sizes: what belongs to one fits into the other."""

    def __init__(self, first: Program, second: Program) -> None:
        super().__init__()
        self.first, self.second = first.build()[0], second.build()[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)[0]
        return x + self.second(x)[0]


def program(base: Program, sizes: Sizes, dynamic: bool = False) -> Callable[[], Base]:
    def make() -> Base:
        chosen = replace(base, sizes=sizes)
        module, inputs = chosen.build()
        captured = capture_graph(module, inputs, dynamic=dynamic_tokens(chosen) if dynamic else None)
        if not dynamic:
            return captured, []
        fresh = chosen.inputs(9, sizes.tokens + 3)
        return captured, [(*captured.inputs[: len(captured.inputs) - len(fresh)], *fresh)]

    return make


def two_layers(first: Program, second: Program) -> Callable[[], Base]:
    def make() -> Base:
        return capture_graph(TwoLayers(first, replace(second, seed=9)), first.build()[1][:1]), []

    return make


def block(build: Callable[..., Block], sizes: Sizes, experts: str = "grouped_mm") -> Callable[[], Base]:
    def make() -> Base:
        module, args = build(sizes, experts=experts)
        (captured,) = capture_model(module, *args)
        return captured, []

    return make


BASES: dict[str, Callable[[], Base]] = {
    "qwen3": block(qwen3_block, ORDINARY),
    "qwen3, T = K": block(qwen3_block, T_IS_K),
    "qwen3 batched, H = I": block(qwen3_block, SQUARE, "batched_mm"),
    "gpt_oss": block(gpt_oss_block, ORDINARY),
    "gpt_oss, H = I": block(gpt_oss_block, SQUARE),
    "gpt_oss batched, E = H": block(gpt_oss_block, E_IS_H, "batched_mm"),
    "llama4, T = E": block(llama4_block, T_IS_E),
    "llama4, H = I": block(llama4_block, replace(SQUARE, top_k=1)),
    "deepseek_v3, E = H": block(deepseek_block, E_IS_H),
    "gpt-fast": program(GPT_FAST, ORDINARY, dynamic=True),
    "gpt-fast, T = K": program(GPT_FAST, T_IS_K),
    "gpt-fast, all the same": program(GPT_FAST, ALL_SAME),
    "index_add, T = E": program(INDEX_ADD, T_IS_E),
    "index_add, dynamic": program(INDEX_ADD, ORDINARY, dynamic=True),
    "index_add, all the same": program(INDEX_ADD, ALL_SAME),
    "inverse, T = K": program(INVERSE, T_IS_K),
    "weighted input, H = I": program(INPUT, SQUARE),
    "dense, T = E": program(DENSE, T_IS_E),
    "dense, all the same": program(DENSE, ALL_SAME),
    "normed rows, H = I": program(replace(INVERSE, norm="scaled_rms"), SQUARE),
    "normed rows, T = K": program(replace(GPT_FAST, norm="rms"), T_IS_K),
    "pieces, T = K": program(PIECES, T_IS_K),
    "map, T = E": program(MAP, T_IS_E),
    "two layers": two_layers(
        replace(INVERSE, router="topk_softmax"), replace(INVERSE, router="topk_softmax")
    ),
    "two layers, T = E": two_layers(replace(INDEX_ADD, sizes=T_IS_E), replace(GPT_FAST, sizes=T_IS_E)),
}


@pytest.mark.parametrize("name", BASES)
def test_no_mutant_gives_a_wrong_answer(name: str, fuzz_examples: int | None) -> None:
    count = MUTANTS if fuzz_examples is None else fuzz_examples
    seed = 0 if fuzz_examples is None else random.SystemRandom().randrange(2**31)
    base, more = BASES[name]()
    sites = 2 if name.startswith("two") else 1
    rewrite_and_compare(base.graph_module, base.inputs, expect_fused=sites)
    inputs = (base.inputs, redraw(base.inputs, 1), *more)
    verdicts: Counter[str] = Counter()
    wrong: list[str] = []
    fewer = 0
    for limit, depth in [(count, 1)] if fuzz_examples is None else [(count // 2, 1), (count // 2, 2)]:
        for mutant in mutants(base.graph_module, limit=limit, seed=seed, depth=depth):
            verdict = judge(mutant.graph_module, inputs)
            verdicts[verdict.kind] += 1
            fewer += verdict.kind in ("equal", "refused") and verdict.fused < sites
            if verdict.kind == "wrong":
                wrong.append(f"{mutant.kind}: {mutant.detail}\n  {verdict.reason}")
    print(f"{name}: {dict(verdicts)}")
    assert not wrong, f"{len(wrong)} wrong answers in {name}, seed {seed}\n" + "\n".join(wrong[:5])
    assert verdicts["equal"] + verdicts["refused"] >= 0.6 * count, f"most weren't judged: {dict(verdicts)}"
    assert verdicts["equal"] >= 3, f"not even the reordered graphs fuse: {dict(verdicts)}"
    assert fewer >= 0.1 * count, f"hardly anything was refused: {fewer} of {dict(verdicts)}"


def test_a_mutant_keeps_the_metadata_of_its_own_shapes() -> None:
    """Rules read shapes from the metadata: a mutant with those of the original would be judged unfairly."""
    base, _ = program(INDEX_ADD, ORDINARY)()
    for mutant in mutants(base.graph_module, limit=60, seed=5):
        run = SafeRun(mutant.graph_module)
        try:
            run.run(*base.inputs)
        except (RuntimeError, ValueError, IndexError):
            continue
        for node, value in run.env.items():
            if isinstance(value, torch.Tensor) and node.op == "call_function":
                known = node.meta["val"]
                assert (known.shape, known.dtype) == (value.shape, value.dtype), f"{mutant.detail}: {node}"
