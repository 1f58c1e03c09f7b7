"""One expert-parallel layer over several processes of this machine: time and bytes.

In: ranks, shape, dtype, tokens per rank. Out: milliseconds per step (best and median of interleaved rounds) of the node
over shared memory, of the node over the group's collectives, of the layer as models write it (gloo all_to_all of every
slot's row), of all_gather with reduce_scatter, and of transformers' all-reduce form (every rank has all tokens already,
computes its own experts' part, one all_reduce), all with the same expert kernel; then the bytes that crossed between
ranks beside the least that could.

    python benchmarks/expert_parallel.py --ranks 2 --tokens 1,4,16,64,256
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moefuse.simulate.measure import STEPS, run_ranks, timed
from moefuse.simulate.ways import Ways
from moefuse.simulate.workload import Workload

WAYS = {
    "fused": "shared memory",
    "over_collectives": "collectives",
    "all_to_all": "gloo all_to_all",
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
}
SHAPES = {"small": (32, 4, 256, 128), "qwen3": (128, 8, 2048, 768)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--shape", choices=SHAPES, default="small", help="experts, top-k, hidden, intermediate"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--tokens", default="1,4,16,64,256", help="per rank")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    layers = [Workload(int(tokens), *SHAPES[args.shape], args.dtype) for tokens in args.tokens.split(",")]
    figures = run_ranks(args.ranks, measured, layers, args.rounds)
    if args.json:
        args.json.write_text(
            json.dumps({"schema": "moefuse.bench.expert_parallel/2", "figures": figures}, indent=2)
        )
    show(args, figures)


def show(args: argparse.Namespace, figures: list[dict[str, Any]]) -> None:
    experts, top_k, hidden, inner = SHAPES[args.shape]
    print(
        f"{args.ranks} ranks, {experts} experts, top-{top_k}, {hidden} -> {inner}, {args.dtype}, 1 thread each; "
        f"milliseconds, best (median) of {args.rounds} rounds of {STEPS} steps"
    )
    print("tokens" + "".join(f"{name:>18}" for name in WAYS.values()) + "   all_to_all / shared memory")
    for row in figures:
        times = row["times"]
        cells = [f"{best * 1e3:.3f} ({median * 1e3:.3f})" for best, median in times.values()]
        best, median = (b / a for a, b in zip(times["fused"], times["all_to_all"], strict=True))
        print(
            f"{row['tokens']:>6}" + "".join(f"{cell:>18}" for cell in cells) + f"   {best:.2f} ({median:.2f})"
        )
    print("\nbytes between ranks per step, rank 0: (rows in, results out, routing); least of the first two")
    for row in figures:
        print(f"{row['tokens']:>6}   {row['bytes']}   {row['least']}")


def measured(layers: list[Workload], rounds: int) -> list[dict[str, Any]]:
    return [figures(Ways(layer), rounds) for layer in layers]


def figures(ways: Ways, rounds: int) -> dict[str, Any]:
    calls = {name: getattr(ways, name) for name in WAYS}
    want = ways.all_to_all()
    for name, call in calls.items():
        # bfloat16 roundings, of the parts too where parts are summed, of values of size 1
        torch.testing.assert_close(call(), want, rtol=2e-2, atol=2e-2, msg=f"{name}: {{}}".format)
    before = ways.shared.traffic
    ways.fused()
    moved = [b - a for a, b in zip(before, ways.shared.traffic, strict=True)]
    return {
        "tokens": ways.workload.tokens,
        "bytes": moved,
        "least": least(ways),
        "times": timed(calls, rounds),
    }


def least(ways: Ways) -> list[int]:
    """Counted from the ids of all ranks: each token row once per rank that wants it, each result row once."""
    rows = results = 0
    for source, theirs in enumerate(ways.all_ids.chunk(dist.get_world_size())):
        if source != ways.rank:
            mine = theirs // ways.local == ways.rank
            rows += int(mine.any(1).sum())
            results += int(mine.sum())
    return [rows * ways.workload.row_bytes, results * ways.workload.row_bytes]


if __name__ == "__main__":
    main()
