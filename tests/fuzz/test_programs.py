"""Random MoE layers: each one that can be found is found, and no result changes.

`--fuzz-examples N` tries N new programs for each test; by default the same ones are tried in every run.
"""

import pytest
from hypothesis import given

from moefuse.testing.capture import Captured, capture_graph
from moefuse.testing.compare import rewrite_and_compare
from moefuse.testing.programs import Program, programs, random_program
from tests.fuzz.test_harness import dynamic_tokens


def check(program: Program, dynamic: bool) -> None:
    """Fuse and compare on two sets of inputs; when dynamic also with other token counts."""
    module, inputs = program.build()
    captured = capture_graph(module, inputs, dynamic=dynamic_tokens(program) if dynamic else None)
    expected = 1 if program.fusable else None
    try:
        report = rewrite_and_compare(captured.graph_module, captured.inputs, expect_fused=expected).report
        # one slot's norm may stay outside
        if expected and program.shared != "none" and program.norm == "none":
            assert [[expert.fused for expert in site.shared] for site in report.sites] == [[True]], str(
                report
            )
        counts = [program.sizes.tokens, *([program.sizes.tokens + 5, 2] if dynamic else [])]
        for tokens in counts:
            rewrite_and_compare(captured.graph_module, other_inputs(captured, program, tokens))
    except Exception as error:
        raise AssertionError(f"{error}\ndynamic={dynamic}, {program.describe()}") from error


def other_inputs(captured: Captured, program: Program, tokens: int) -> tuple[object, ...]:
    fresh = program.inputs(program.seed + 2, tokens)
    return (*captured.inputs[: len(captured.inputs) - len(fresh)], *fresh)


@given(program=programs())
def test_programs_are_fused_and_right(program: Program) -> None:
    check(program, dynamic=False)


@given(program=programs())
def test_programs_with_symbolic_tokens_are_fused_and_right(program: Program) -> None:
    if program.sizes.tokens > 1:  # a size of one never becomes a symbol
        check(program, dynamic=True)


@given(program=programs(traps=True))
def test_layers_that_are_something_else_keep_their_results(program: Program) -> None:
    check(program, dynamic=program.seed % 2 == 1 and program.sizes.tokens > 1)


@pytest.mark.parametrize(
    "seed", [7000329], ids=["a large expression: clamps, biases, a norm, and what was there"]
)
def test_programs_that_were_missed(seed: int) -> None:
    """Of runs of benchmarks/fuzz.py."""
    check(random_program(seed), dynamic=True)
