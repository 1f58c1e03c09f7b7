"""Random MoE layers by the thousand: is every one found that can be found, and is no result ever wrong?

    python benchmarks/fuzz.py --programs 20000                     # the nightly run
    python benchmarks/fuzz.py --programs 20000 --shard 0/2         # half of it; the other half is --shard 1/2

Program i of a run follows from the run's seed and i alone. Every fourth one has a change that makes it something else
than a weighted sum over slots; every second one has symbolic tokens; of every sixth one, one mutated graph is judged
too. Prints what was missed and what was wrong as it goes, then one line of figures; exits 1 where a result was wrong.
"""

import argparse
import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._dynamo import config as dynamo
from torch.fx import Graph, GraphModule

from moefuse.api import Fused
from moefuse.options import Options
from moefuse.passes import pipeline
from moefuse.report.model import Report
from moefuse.testing.capture import Captured, capture_graph
from moefuse.testing.compare import compare, default_rewrite, describe
from moefuse.testing.judge import judge
from moefuse.testing.mutations import mutants
from moefuse.testing.programs import Program, random_program

STRIDE = 1_000_000
"""Seeds of two runs with different --seed don't meet."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one shard; the exit status is 1 where a result was wrong."""
    options = _options(arguments)
    logging.disable(logging.CRITICAL)  # fake kernels that refuse a mutant's arguments log a stack trace each
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dynamo.fake_tensor_cache_enabled = (
        False  # no two programs share enough: filling it takes a fifth of the time
    )
    index, shards = (int(part) for part in options.shard.split("/"))
    tally: Counter[str] = Counter()
    start = time.perf_counter()
    for i in range(index, options.programs, shards):
        _try(options.seed * STRIDE + i, i, tally)
        if options.every and i // shards % options.every == options.every - 1:
            print(_figures(tally, start), flush=True)
    print(_figures(tally, start))
    if options.json:
        options.json.write_text(json.dumps({"seed": options.seed, "shard": options.shard, **tally}, indent=1))
    return 1 if tally["wrong"] or tally["wrong mutants"] else 0


def _try(seed: int, i: int, tally: Counter[str]) -> None:
    """One program: counted as hit, missed, wrong, refused or fused (of those that need not be found)."""
    program = random_program(seed, traps=i % 4 == 3)
    dynamic = i % 2 == 1 and program.sizes.tokens > 1
    module, inputs = program.build()
    tally["programs"] += 1
    try:
        captured = capture_graph(module, inputs, dynamic=dynamic_tokens(program) if dynamic else None)
        # Capturing once more takes most of the time: what it does is the same for all programs.
        result = default_rewrite(captured.graph_module) if i % 8 == 0 else passes(captured.graph_module)
        differences = [
            compare(captured.graph_module, result.graph_module, values, result.report).difference
            for values in _values(captured, program, dynamic)
        ]
    except Exception as error:
        differences = [f"{type(error).__name__}: {error}"]
    said = f"seed {seed} dynamic={dynamic}, {program.describe()}"
    if wrong := next((difference for difference in differences if difference), ""):
        tally["wrong"] += 1
        print(f"WRONG {said}\n{wrong}", flush=True)
        return
    fused = result.report.fused == 1
    if program.fusable:
        tally["fusable"] += 1
        tally["hits"] += fused
        if not fused:
            tally[f"missed {program.dispatch}"] += 1
            print(f"MISSED {said}\n{describe(result.report)}", flush=True)
    else:
        tally["fused though not demanded" if fused else "refused"] += 1
    if i % 6 == 0:
        _mutate(captured, seed, said, tally)


def passes(graph_module: GraphModule) -> Fused:
    """`moefuse.fuse` of a copy without capturing it: the graph is functional already."""
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    result = pipeline.run(GraphModule(graph_module, graph), frozenset(), Options.parse({}), training=False)
    return Fused(result.graph_module, Report((result.report(0),)))


def _mutate(captured: Captured, seed: int, said: str, tally: Counter[str]) -> None:
    for mutant in mutants(captured.graph_module, limit=1, seed=seed, depth=1 + seed % 2):
        verdict = judge(mutant.graph_module, (captured.inputs,))
        tally["mutants"] += 1
        if verdict.kind == "wrong":
            tally["wrong mutants"] += 1
            print(f"WRONG MUTANT {mutant.kind}: {mutant.detail}\n{said}\n{verdict.reason}", flush=True)


def _values(captured: Captured, program: Program, dynamic: bool) -> list[tuple[object, ...]]:
    """The captured inputs, and others; of other lengths where the tokens are symbolic."""
    counts = [program.sizes.tokens, *([program.sizes.tokens + 5, 2] if dynamic else [])]
    found: list[tuple[object, ...]] = [captured.inputs]
    for tokens in counts:
        other = program.inputs(program.seed + 2, tokens)
        found.append((*captured.inputs[: len(captured.inputs) - len(other)], *other))
    return found


def dynamic_tokens(program: Program) -> dict[int, list[int]]:
    """The token dimension of every input of a program, as `capture_graph` takes it."""
    count = 3 if program.router.startswith("given") else 1
    return {i: [1] if program.rank3 and i == 0 else [0] for i in range(count)}


def _figures(tally: Counter[str], start: float) -> str:
    rate = tally["hits"] / max(tally["fusable"], 1)
    rest = {
        name: count for name, count in sorted(tally.items()) if name not in ("programs", "fusable", "hits")
    }
    return (
        f"{tally['programs']} programs, {tally['hits']} of {tally['fusable']} fusable ones found ({rate:.2%}), "
        f"{tally['wrong']} wrong, {tally['wrong mutants']} of {tally['mutants']} mutants wrong; {rest}; "
        f"{time.perf_counter() - start:.0f} s"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=20_000, help="how many in all shards together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="0/1", help="index/count of this process")
    parser.add_argument(
        "--every", type=int, default=500, help="print figures after so many programs (0: never)"
    )
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
