"""What two ranks do in one expert-parallel step, from the kernel's own timestamps, as a picture.

In: tokens per rank, threads per rank. Out: how much of the time in which token rows were pulled lay under a GEMM of
another thread of the same rank, over all steps; and an SVG of the step in which most of it did, with a lane per rank
and thread. Where there are fewer cores than threads, threads of a rank run side by side in some steps only.

    python benchmarks/expert_parallel_timeline.py --svg docs/expert-parallel-timeline.svg
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

from moefuse.comm import Event
from moefuse.simulate.measure import run_ranks
from moefuse.simulate.svg import Bar, timeline
from moefuse.simulate.ways import Ways
from moefuse.simulate.workload import Workload

GEMMS = ("first gemm", "second gemm")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="per rank")
    parser.add_argument("--steps", type=int, default=200, help="of which one is drawn")
    parser.add_argument("--svg", type=Path, help="where the picture goes")
    args = parser.parse_args()
    layer = Workload(tokens=args.tokens, experts=16, top_k=2, hidden=1024, intermediate=128)
    steps = run_ranks(args.ranks, recorded, layer, args.threads, args.steps)
    steps = [[[Event(*event) for event in events] for events in step] for step in steps]
    shares = [[share_of_pulls_under_gemms(events) for events in step] for step in steps]
    best = max(range(args.steps), key=lambda i: sum(shares[i]))
    every = sorted(share for step in shares for share in step)
    print(
        f"time of a rank's pulls under a GEMM of another thread: {every[len(every) // 2]:.0%} in the median of "
        f"{args.steps} steps, {every[len(every) * 9 // 10]:.0%} in a tenth of them, {every[-1]:.0%} at most"
    )
    for rank, events in enumerate(steps[best]):
        print(f"the step drawn, rank {rank}: {shares[best][rank]:.0%}; {described(events)}")
    if args.svg:
        each = f"{args.threads} threads and {args.tokens} tokens each"
        title = f"One step of {args.ranks} ranks, {each}; numbers are experts"
        args.svg.write_text(timeline(bars(steps[best]), title), encoding="utf-8")


def recorded(layer: Workload, threads: int, steps: int) -> list[list[list[Event]]]:
    """All steps' events of all ranks."""
    torch.set_num_threads(threads)
    ways = Ways(layer)
    ways.fused()
    found = []
    for _ in range(steps):
        dist.barrier()
        with ways.shared.recording() as times:
            ways.fused()
        everyone: list[list[Event]] = [[]] * ways.world
        dist.all_gather_object(everyone, [tuple(event) for event in times.events()])
        found.append(everyone)
    return found


def share_of_pulls_under_gemms(events: list[Event]) -> float:
    pulls = [event for event in events if event.kind == "pull"]
    gemms = [event for event in events if event.kind in GEMMS]
    under = sum(covered(pull, [gemm for gemm in gemms if gemm.thread != pull.thread]) for pull in pulls)
    return under / max(1, sum(pull.end - pull.begin for pull in pulls))


def described(events: list[Event]) -> str:
    seconds = {
        kind: sum(e.end - e.begin for e in events if e.kind == kind) / 1e3 for kind in ("pull", *GEMMS)
    }
    times = ", ".join(f"{kind}s {time:.0f} us" for kind, time in seconds.items())
    return f"{(max(e.end for e in events) - events[0].begin) / 1e3:.0f} us; {times}"


def covered(pull: Event, gemms: list[Event]) -> int:
    """Nanoseconds of a pull in which some of the GEMMs ran."""
    done, end = 0, pull.begin
    for gemm in sorted(gemms, key=lambda event: event.begin):
        begin, until = max(gemm.begin, end), min(gemm.end, pull.end)
        if until > begin:
            done, end = done + until - begin, until
    return done


def bars(ranks: list[list[Event]]) -> list[Bar]:
    start = min(event.begin for events in ranks for event in events)
    return [
        Bar(
            f"rank {rank}, thread {event.thread}",
            str(event.expert) if event.expert >= 0 else event.kind,
            (event.begin - start) / 1e9,
            (event.end - start) / 1e9,
            event.kind,
        )
        for rank, events in enumerate(ranks)
        for event in sorted(events, key=lambda event: event.thread)
    ]


if __name__ == "__main__":
    main()
