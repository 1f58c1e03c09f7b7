"""One expert-parallel layer over several processes of this machine: time and bytes.

In: ranks, shape, dtype, tokens per rank. Out: milliseconds per step (best and median of interleaved rounds) of the node
over shared memory, of the node over the group's collectives, of the layer as models write it (gloo all_to_all of every
slot's row), and of transformers' all-reduce form (every rank has all tokens already, computes its own experts' part,
one all_reduce), all with the same expert kernel; then the bytes that crossed between ranks beside the least that could.

    python benchmarks/expert_parallel.py --ranks 2 --tokens 1,4,16,64,256
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import moefuse.ops  # noqa: F401  (registers the operators)
from moefuse.comm import Capacity, context_for

STEPS = 8
WAYS = {
    "shared": "shared memory",
    "collectives": "collectives",
    "plain": "gloo all_to_all",
    "reduced": "all_reduce",
}
SHAPES = {"small": (256, 128, 32, 4), "qwen3": (2048, 768, 128, 8)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--shape", choices=SHAPES, default="small", help="hidden, intermediate, experts, top-k"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--tokens", default="1,4,16,64,256", help="per rank")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "figures.json"
        mp.spawn(rank_main, (args, Path(directory) / "store", out), nprocs=args.ranks)
        figures = json.loads(out.read_text())
    if args.json:
        args.json.write_text(
            json.dumps({"schema": "moefuse.bench.expert_parallel/1", "figures": figures}, indent=2)
        )
    show(args, figures)


def show(args: argparse.Namespace, figures: list[dict[str, Any]]) -> None:
    hidden, inner, experts, top_k = SHAPES[args.shape]
    print(
        f"{args.ranks} ranks, {experts} experts, top-{top_k}, {hidden}, {inner}, {args.dtype}, 1 thread each; "
        f"milliseconds, best (median) of {args.rounds} rounds of {STEPS} steps"
    )
    print("tokens" + "".join(f"{name:>20}" for name in WAYS.values()) + "   a2a/shared  all-reduce/shared")
    for row in figures:
        cells = [f"{row[name]['best']:.3f} ({row[name]['median']:.3f})" for name in WAYS]
        print(f"{row['tokens']:>6}" + "".join(f"{cell:>20}" for cell in cells), end="")
        for other, width in (("plain", 13), ("reduced", 19)):
            best, median = (row[other][kind] / row["shared"][kind] for kind in ("best", "median"))
            print(f"{f'{best:.2f} ({median:.2f})':>{width}}", end="")
        print()
    print(
        "\nbytes between ranks per step, rank 0 (rows in, results out, routing); least; what plain sends and receives"
    )
    for row in figures:
        print(f"{row['tokens']:>6}   {row['bytes']}   {row['least']}   {row['plain_bytes']}")


def rank_main(rank: int, args: argparse.Namespace, store: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), args.ranks), rank=rank, world_size=args.ranks
    )
    figures = [measure(rank, args, int(tokens)) for tokens in args.tokens.split(",")]
    if rank == 0:
        out.write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def measure(rank: int, args: argparse.Namespace, tokens: int) -> dict[str, Any]:
    hidden, inner, experts, top_k = SHAPES[args.shape]
    world, dtype = args.ranks, getattr(torch, args.dtype)
    local = experts // world
    capacity = Capacity(world, experts, top_k, hidden, hidden, tokens, dtype)
    shared = context_for(None, capacity, transport="shared memory")
    collectives = context_for(None, capacity, transport="collectives")
    generator = torch.Generator().manual_seed(rank)
    w1 = (torch.randn(local, 2 * inner, hidden, generator=generator) / hidden**0.5).to(dtype)
    w2 = (torch.randn(local, hidden, inner, generator=generator) / inner**0.5).to(dtype)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].contiguous()
    weights = torch.rand(tokens, top_k, generator=generator)

    def node(context: Tensor) -> Tensor:
        return torch.ops.moefuse.mega_moe.ep(
            context,
            x,
            ids,
            weights,
            [w1],
            [w2],
            [],
            [],
            num_experts=experts,
            ep_world_size=world,
            target="cpu",
        )[0]

    def plain() -> Tensor:
        order = ids.flatten().argsort(stable=True)
        flat = ids.flatten()[order]
        send = torch.bincount(flat // local, minlength=world)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send)
        s, r = send.tolist(), receive.tolist()
        got_ids = torch.empty(sum(r), dtype=flat.dtype)
        dist.all_to_all_single(got_ids, flat, r, s)
        got = x.new_empty(sum(r), hidden)
        dist.all_to_all_single(got, x[order // top_k], r, s)
        ones = torch.ones(sum(r), 1)
        y = torch.ops.moefuse.mega_moe(
            None,
            got,
            (got_ids - rank * local).unsqueeze(1),
            ones,
            [w1],
            [w2],
            [],
            [],
            num_experts=local,
            target="cpu",
        )[0]
        back = x.new_empty(sum(s), hidden)
        dist.all_to_all_single(back, y, s, r)
        rows = torch.empty_like(back)
        rows[order] = back
        return (rows.view(tokens, top_k, hidden).float() * weights.unsqueeze(-1)).sum(1).to(dtype)

    all_x, all_ids, all_weights = (gathered(tensor, world) for tensor in (x, ids, weights))

    def reduced() -> Tensor:
        y = torch.ops.moefuse.mega_moe(
            None,
            all_x,
            all_ids - rank * local,
            all_weights,
            [w1],
            [w2],
            [],
            [],
            num_experts=local,
            target="cpu",
        )[0]
        dist.all_reduce(y)
        return y[rank * tokens : (rank + 1) * tokens]

    ways = {
        "shared": lambda: node(shared.tensor),
        "collectives": lambda: node(collectives.tensor),
        "plain": plain,
        "reduced": reduced,
    }
    want = ways["plain"]()
    for name, way in ways.items():
        torch.testing.assert_close(way(), want, rtol=2e-2, atol=2e-2, msg=lambda m, n=name: f"{n}: {m}")
    before = shared.traffic
    ways["shared"]()
    moved = [b - a for a, b in zip(before, shared.traffic, strict=True)]
    return {
        "tokens": tokens,
        "bytes": moved,
        **least(rank, world, local, ids, hidden * x.itemsize),
        **timed(ways, args.rounds),
    }


def gathered(own: Tensor, world: int) -> Tensor:
    """The tensors of all ranks, one after another."""
    everyone = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(everyone, own)
    return torch.cat(everyone)


def timed(ways: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, dict[str, float]]:
    """In turn, so that a busy moment hits all of them; STEPS in a row, as the layers of a model come."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                way()
            seconds[name].append((time.perf_counter() - start) / STEPS)
    return {
        name: {"best": min(values) * 1e3, "median": statistics.median(values) * 1e3}
        for name, values in seconds.items()
    }


def least(rank: int, world: int, local: int, ids: Tensor, row_bytes: int) -> dict[str, list[int]]:
    """Counted from the ids of all ranks: each token row once per rank that wants it, each result row once."""
    rows = results = 0
    for source, theirs in enumerate(gathered(ids, world).chunk(world)):
        if source != rank:
            mine = theirs // local == rank
            rows += int(mine.any(1).sum())
            results += int(mine.sum())
    sent = int((ids // local != rank).sum())
    return {
        "least": [rows * row_bytes, results * row_bytes],
        "plain_bytes": [results * row_bytes, sent * row_bytes],
    }


if __name__ == "__main__":
    main()
