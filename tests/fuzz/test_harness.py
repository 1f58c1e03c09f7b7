"""The fuzzers themselves: the generator's spellings agree, mutants are found, a wrong rewrite is caught."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from torch.fx import GraphModule

from moefuse.report.model import GraphReport, LayerReport, Report
from moefuse.testing.capture import capture_graph
from moefuse.testing.compare import compare, relative_error, rewrite_and_compare
from moefuse.testing.judge import judge, redraw
from moefuse.testing.mutations import mutants
from moefuse.testing.oracle import SafeRun
from moefuse.testing.programs import COMBINES, SIZES, Program, random_program

PLAIN = Program(
    sizes=SIZES[0],
    dtype=torch.float32,
    router="given",
    dispatch="sorted",
    combine="inverse_put",
    counts="histc",
    token_index="floor_divide",
    cut="slices",
    gate_up="concat",
    halves="chunk",
    activation="silu",
    out_features_first=True,
    bias=False,
    factors="weight",
    position="output",
    weight_dtype="native",
    late_weight=False,
    int32_ids=False,
    rank3=False,
    extra_users=False,
    noise=0,
    trap="",
    seed=3,
)


@dataclass(frozen=True)
class Rewritten:
    """What a rewrite returns."""

    graph_module: GraphModule
    report: Report


CLAIMS_FUSED = Report((GraphReport(0, (LayerReport("", True, "mega_moe"),)),))


def by_hand(program: Program, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The layer of `PLAIN`-like programs, slot by slot, without the generator's code."""
    x, ids, weights = (t.double() if t.is_floating_point() else t for t in inputs)
    w1, w2 = module.w1.double(), module.w2.double()
    y = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e, r = int(ids[t, k]), weights[t, k]
            h = w1[e] @ (x[t] * r if program.position == "input" else x[t])
            a = torch.nn.functional.silu(h[: program.sizes.inter]) * h[program.sizes.inter :]
            o = w2[e] @ (a * r if program.position == "mid" else a)
            y[t] += o * r if program.position == "output" else o
    return y


@pytest.mark.parametrize("position", ["output", "input", "mid"])
@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[7], SIZES[10]])
def test_every_spelling_is_the_layer_that_it_claims_to_be(position: str, sizes: object) -> None:
    base = replace(PLAIN, position=position, sizes=sizes)
    for dispatch, combines in COMBINES.items():
        if dispatch == "every" and position != "output":
            continue  # an expert that runs on every token is weighed where it is added
        for combine in combines:
            for late in (False, True):
                program = replace(base, dispatch=dispatch, combine=combine, late_weight=late, noise=2)
                module, inputs = program.build()
                want = by_hand(program, module, inputs)
                # fp32 against float64: rounding of sums of a few dozen products
                assert relative_error(module(*inputs)[0], want) < 1e-6, program.describe()


@pytest.mark.parametrize("seed", range(12))
def test_a_captured_graph_is_its_module(seed: int) -> None:
    program = random_program(seed, traps=seed % 3 == 0)
    module, inputs = program.build()
    captured = capture_graph(module, inputs, dynamic=dynamic_tokens(program) if seed % 2 else None)
    want, got = module(*inputs), SafeRun(captured.graph_module).run(*captured.inputs)
    assert len(want) == len(got)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def dynamic_tokens(program: Program) -> dict[int, list[int]]:
    """The token dimension of every input of `program`, as `capture_graph` takes it."""
    count = 3 if program.router.startswith("given") else 1
    return {i: [1] if program.rank3 and i == 0 else [0] for i in range(count)}


def test_mutants_of_every_kind_are_found_and_most_are_wrong() -> None:
    module, inputs = replace(PLAIN, sizes=SIZES[10], bias=True).build()
    captured = capture_graph(module, inputs)

    def stubborn(_: GraphModule) -> Rewritten:
        """Fuses whatever looks a little like the original, as the original."""
        return Rewritten(captured.graph_module, CLAIMS_FUSED)

    kinds: Counter[str] = Counter()
    verdicts: Counter[str] = Counter()
    for mutant in mutants(captured.graph_module, limit=160):
        kinds[mutant.kind] += 1
        if mutant.kind != "escape":  # its rewrite has another number of outputs here, which is wrong as well
            verdicts[judge(mutant.graph_module, [captured.inputs], stubborn).kind] += 1
    expected = "swap_float swap_int perturb_int perturb_float transpose_square constant swap_constants drop"
    assert set(kinds) >= {*expected.split(), "operation", "partial_sum", "swap_siblings", "escape", "reorder"}
    assert verdicts["wrong"] > 80
    assert verdicts["equal"] >= 3  # the reordered ones
    assert not verdicts["refused"]


def test_unwritten_memory_is_undefined() -> None:
    def reads_it(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x) + x

    captured = capture_graph(reads_it, [torch.randn(3)])
    assert (
        judge(captured.graph_module, [captured.inputs], lambda gm: Rewritten(gm, Report())).kind
        == "undefined"
    )


def test_falling_offsets_are_undefined_not_read_out_of_bounds() -> None:
    def falls(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, w, offs=offs)

    x, w = torch.randn(4, 8).bfloat16(), torch.randn(2, 8, 8).bfloat16()
    captured = capture_graph(falls, [x, w, torch.tensor([2, 4], dtype=torch.int32)])
    bad = (x, w, torch.tensor([2, 9], dtype=torch.int32))
    with pytest.raises(ValueError, match="must rise, to the row count at most"):
        SafeRun(captured.graph_module).run(*bad)


def test_a_rewrite_that_raises_is_wrong() -> None:
    def broken(_: GraphModule) -> Rewritten:
        raise KeyError("boom")

    captured = capture_graph(torch.relu, [torch.randn(3)])
    verdict = judge(captured.graph_module, [captured.inputs], broken)
    assert (verdict.kind, "KeyError" in verdict.reason) == ("wrong", True)


def test_rewrite_and_compare_tells_what_is_wrong() -> None:
    captured = capture_graph(torch.relu, [torch.randn(64)])
    other = capture_graph(torch.abs, [torch.randn(64)])
    with pytest.raises(AssertionError, match="output 0: norm-wise"):
        rewrite_and_compare(
            captured.graph_module,
            captured.inputs,
            rewrite=lambda gm: Rewritten(other.graph_module, CLAIMS_FUSED),
        )
    with pytest.raises(AssertionError, match="expected 1 fused, got 0"):
        rewrite_and_compare(
            captured.graph_module, captured.inputs, expect_fused=1, rewrite=lambda gm: Rewritten(gm, Report())
        )
    with pytest.raises(ValueError, match="expected 1 values"):
        rewrite_and_compare(captured.graph_module, [], rewrite=lambda gm: Rewritten(gm, Report()))


def test_low_precision_is_measured_against_float64() -> None:
    """A graph that rounds twice and its rewrite that rounds once agree; rounding more is wrong."""
    x = torch.randn(4096).bfloat16()

    def graph(v: torch.Tensor) -> torch.Tensor:
        return v * 1.1 * 1.1

    def coarse(v: torch.Tensor) -> torch.Tensor:
        return (v.float() * 1.21 * 16).to(torch.float8_e4m3fn).to(torch.bfloat16) / 16

    before = capture_graph(graph, [x])
    once = capture_graph(lambda v: (v.float() * 1.21).bfloat16(), [x])
    more = capture_graph(coarse, [x])
    fine = rewrite_and_compare(
        before.graph_module, [x], rewrite=lambda gm: Rewritten(once.graph_module, CLAIMS_FUSED)
    )
    assert fine.error > 0
    with pytest.raises(AssertionError, match="to float64"):
        rewrite_and_compare(
            before.graph_module, [x], rewrite=lambda gm: Rewritten(more.graph_module, CLAIMS_FUSED)
        )


def test_of_few_elements_the_graphs_own_error_is_one_draw() -> None:
    """A unit in the last place is noise in one element; in four, or twice as much in one, it is wrong."""

    def judged(count: int, units: int) -> str:
        x = torch.full((count,), 1.0, dtype=torch.bfloat16)
        same = capture_graph(lambda v: v * 1.0, [x])
        off = capture_graph(lambda v: v * (1.0 + units * 2.0**-7), [x])
        before, after = same.graph_module, off.graph_module
        return compare(before, after, (x,), Report()).difference

    # allowed: 2e-3 and a unit, 2^-7, over the root of the number of elements
    assert judged(1, 1) == ""
    assert "to float64" in judged(1, 2)
    assert "to float64" in judged(4, 1)


def test_redrawn_inputs_keep_shape_kind_and_range() -> None:
    values = (torch.randn(64) * 3, torch.tensor([1, 4, 2]), torch.rand(8), 5)
    other = redraw(values, 1)
    assert other[0].shape == (64,)
    assert not torch.equal(other[0], values[0])
    assert 1 <= int(other[1].min()) <= int(other[1].max()) <= 4
    assert bool((other[2] >= 0).all())
    assert other[3] == 5
