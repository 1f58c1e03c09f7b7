"""Ways to spread tokens and slots over processes, for compiled models: outputs and gradients are those of one process.

In: functions for `run_ranks`. `python -m tests.comm.matrix` runs all of it on 2, 4 and 8 processes: each K from 1 to 8,
with and without a shared expert, one group for all and a group for each data-parallel part, slots anywhere, on one rank
and on one expert, tokens on some ranks only, with and without gradients. The tests run parts of it.
"""

import argparse
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import moefuse
from tests.comm.ranks import run_ranks, values
from tests.comm.spread_models import (
    Block,
    ByBlocks,
    ByExpert,
    ByLoop,
    ByPieces,
    ByPiecesOfEach,
    ByRank,
    ByRuns,
    E,
    Gathered,
    InPlace,
    alone,
    tokens,
)

BFLOAT16 = {form: {"rtol": 0.05, "atol": 0.05} for form in (ByBlocks, ByRuns)}
"""Their experts run in bfloat16; the others differ from one process by the order of float32 additions."""


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    options = {"inner": "eager", "ep_max_tokens": 64, **options}
    return torch.compile(model, backend="moefuse", fullgraph=True, dynamic=True, options=options)


class Case(NamedTuple):
    """A model, and how it is run. parts: groups of ranks, each with all experts and tokens of its own."""

    form: type[Block]
    k: int = 2
    shared: bool = False
    train: bool = False
    parts: int = 1
    inner: str = "eager"


def patterns(form: type[Block], world: int) -> list[tuple[int, ...]]:
    """Tokens of each rank of a group: some everywhere, then on one rank or on none; alike where the form wants that."""
    if form is Gathered:
        return [(5,) * world, (0,) * world]
    rest = [0] * (world - 1)
    return [tuple(3 + 5 * rank % 7 for rank in range(world)), (*rest, 6), (6, *rest), (0, *rest), (1, *rest)]


def _routings(k: int, world: int) -> list[int | None]:
    """Where the experts begin that all tokens choose: anywhere, on the last rank, the last expert alone."""
    local = E // world
    return list(dict.fromkeys([None, *([E - local] if k <= local else []), *([E - 1] if k == 1 else [])]))


def all_cases(world: int) -> list[Case]:
    """What the command runs on so many processes."""
    forms = (ByExpert, ByRank, InPlace, ByBlocks, ByRuns, Gathered, ByLoop, ByPieces)
    found = [Case(forms[k % 8], k, shared=k % 2 == 0) for k in range(1, 9)]
    found += [Case((ByExpert, ByRank)[k % 2], k, shared=k % 2 == 1, train=True) for k in range(1, 9)]
    if world > 2:
        found += [Case(ByExpert, 2, True, parts=2), Case(ByRank, 3, train=True, parts=2)]
    found += [Case(ByPiecesOfEach, 2, train=True)]
    return [*found, Case(ByRank, 2, True, True, inner="inductor")]


def one_case(rank: int, world: int, case: Case, most: int = 100) -> bool:
    """Whether all layers were fused; fails where something differs. most: how many patterns are run."""
    torch._dynamo.reset()
    size, earlier = world // case.parts, len(moefuse.reports())
    groups = [dist.new_group(range(first, first + size)) for first in range(0, world, size)]
    place, group = rank % size, groups[rank // size] if case.parts > 1 else None
    changes: dict[str, Any] = {"k": case.k, "shared": case.shared}
    model, whole = case.form(place, size, group=group, **changes), alone(**changes)
    run = compiled(model, inner=case.inner)
    for first in _routings(case.k, size):
        if first is not None:
            _steer(model, first)
            _steer(whole, first)
        for step, counts in enumerate(patterns(case.form, size)[:most]):
            everyone = [tokens(n, rank - place + r, step) for r, n in enumerate(counts)]
            if first is not None:
                everyone = [x.abs() for x in everyone]
            with torch.set_grad_enabled(case.train):
                (check_gradients if case.train else check)(run, model, whole, everyone, place)
    for one in groups:
        dist.destroy_process_group(one)
    sites = [site for report in moefuse.reports()[earlier:] for site in report.sites]
    return bool(sites) and all(site.fused for site in sites)


def cases_in_turn(rank: int, world: int, cases: list[Case]) -> list[bool]:
    """Whether all layers of each case were fused; the first rank says so as they come."""
    fused = []
    for case in cases:
        start = time.monotonic()
        fused.append(one_case(rank, world, case))
        if rank == 0:
            words = [case.form.__name__, f"K={case.k}", f"{case.parts} group(s)", case.inner]
            words += ["shared expert"] * case.shared + ["trained"] * case.train
            said = f"{', '.join(words)}: {'right' if fused[-1] else 'not fused'}"
            print(f"{world} processes: {said}, {time.monotonic() - start:.0f} s", flush=True)
    return fused


def _steer(block: Block, first: int) -> None:
    """Tokens without negative values choose the k experts from `first` on."""
    with torch.no_grad():
        block.gate.zero_()[:, first : first + block.k] = torch.linspace(0.1, 0.2, block.k)


def check(run: Any, model: Block, whole: Block, everyone: list[Tensor], rank: int) -> None:
    """The outputs of this rank's tokens."""
    tolerance = BFLOAT16.get(type(model), {"rtol": 1e-5, "atol": 1e-5})
    with torch.no_grad():
        torch.testing.assert_close(run(everyone[rank]), whole(everyone[rank]), **tolerance)


def trained(run: Any, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of x and of all parameters after one step."""
    x = x.clone().requires_grad_()
    for parameter in model.parameters():
        parameter.grad = None
    y = run(x)
    y.square().sum().backward()
    found = {"x": x, **dict(model.named_parameters())}
    return {"y": y.detach()} | {
        name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in found.items()
    }


def check_gradients(run: Any, model: Block, whole: Block, everyone: list[Tensor], rank: int) -> None:
    """Against one process: x and the router get theirs from this rank's tokens, the experts from those of all ranks.

    And against the model as it is written, but for collectives in place: these have none there.
    """
    got = trained(run, model, everyone[rank])
    want = trained(whole, whole, everyone[rank])
    of_all = trained(whole, whole, torch.cat(everyone))
    own = slice(rank * model.local, (rank + 1) * model.local)
    want |= {name: of_all[name][own] for name in ("w1", "w2")}
    written = {} if isinstance(model, InPlace) else trained(model, model, everyone[rank])
    for name, grad in got.items():
        for other in (want, written):
            # float32 sums of some tens of products of size 1, in another order
            close = {"rtol": 1e-4, "atol": 5e-5}
            if name in other:
                torch.testing.assert_close(grad, other[name], **close, msg=lambda m, n=name: f"{n}: {m}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", default="2,4,8", help="numbers of processes")
    unfused: list[str] = []
    for world in map(int, parser.parse_args().worlds.split(",")):
        cases = all_cases(world)
        outcomes = values(run_ranks(world, cases_in_turn, cases, timeout=7200))
        unfused += [
            f"{world}: {case}"
            for case, fused in zip(cases, zip(*outcomes, strict=True), strict=True)
            if not all(fused)
        ]
    if unfused:
        parser.exit(1, "\n".join(["right, but not fused on all ranks:", *unfused, ""]))


if __name__ == "__main__":
    main()
