"""Is a compiled model still the model? The checks of the zoo's tests.

In: a model name, experts implementation, dtype, `dynamic`, inner compiler. Out: one `Cell` per input length, with
everything measured and `failures` in words.

float32 is compared with eager, norm-wise. bfloat16 is compared with float64, and there routing flips would spoil a
plain comparison: a near tie of two experts that rounds the other way changes a whole token. So routing is pinned:

* `block`: each MoE layer alone. Eager's graph runs in bfloat16; the operands of each layer (rows, ids, routing
  weights, expert weights) are taken from that run; from them the layer is computed as eager does, as mega_moe does,
  and in float64 by eager's own nodes. Norm-wise over all inputs. No routing happens inside, so nothing can flip.
* `logits`: the whole compiled model. The float64 run of eager's graph takes its integers (the routing) from eager's
  bfloat16 run. The compiled model can't be pinned: the error is taken per token, and the median over all tokens of all
  inputs doesn't see the few that flipped.
"""

from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule

from moefuse import hf
from moefuse.zoo.rounding import Fused, block_errors, exact_logits, per_token, watch
from tests.zoo import styles

LAYERS = 2
BATCH = 2
MODELS = (
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
    "nemotron_h",
    "gemma4",
    "llama4",
    "olmoe",
    "granitemoe",
    "minimax_m3_vl",
)
GATHER_EINSUM = "gather_einsum"
IMPLEMENTATIONS = ("grouped_mm", "batched_mm")

RELATIVE = 1e-5
"""float32: sums of a few hundred products in another order, through two layers."""
RATIO = 1.5
"""bfloat16: how many times eager's own error to float64 is allowed."""


def implementations(model: str) -> tuple[str, ...]:
    """The experts implementations that a model has; llama4 and plain torch have just their own code."""
    return ("own",) if model in ("llama4", GATHER_EINSUM) else IMPLEMENTATIONS


def build(
    model: str, implementation: str, dtype: torch.dtype, layers: int = LAYERS
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A tiny model with so many MoE layers in eval mode, and keyword arguments for a call."""
    if model == GATHER_EINSUM:
        return styles.gather_einsum(dtype, layers), {"input_ids": token_ids(16, 0)}
    own = None if implementation == "own" else implementation
    return hf.build(model, dtype=dtype, experts_implementation=own, layers=layers, batch=BATCH)


def token_ids(tokens: int, seed: int) -> Tensor:
    """int64 [BATCH, tokens], the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, hf.VOCAB, (BATCH, tokens), generator=generator)


@dataclass
class Cell:
    """One cell of the matrix. graphs: compiled for this length, by moefuse and without it (None: not counted)."""

    model: str
    implementation: str
    dtype: str
    dynamic: bool
    tokens: int
    inner: str
    graphs: int = 0
    unfused_graphs: int | None = None
    nodes: int = 0
    relative: float | None = None
    block: list[float] = field(default_factory=list)
    logits: float | None = None
    failures: list[str] = field(default_factory=list)


def run_cells(
    model: str,
    implementation: str,
    dtype: torch.dtype,
    *,
    dynamic: bool | None,
    inner: str,
    lengths: tuple[int, ...],
    layers: int = LAYERS,
    seeds: int = 2,
    count: bool = True,
) -> list[Cell]:
    """Compile once and call with one length after the other; one cell each.

    dynamic: as for torch.compile. seeds: inputs per length. count: compare the graphs with an unfused compile's.
    """
    module, kwargs = build(model, implementation, dtype, layers)
    counts = unfused_graphs(model, implementation, dynamic, lengths) if count else [None] * len(lengths)
    torch._dynamo.reset()
    compiled = torch.compile(
        module, backend="moefuse", fullgraph=True, dynamic=dynamic, options={"inner": inner}
    )
    cells = []
    with torch.no_grad(), watch() as seen:
        for tokens, unfused in zip(lengths, counts, strict=True):
            cell = Cell(model, implementation, str(dtype)[6:], bool(dynamic), tokens, inner)
            cell.unfused_graphs = unfused
            try:
                _measure(cell, module, compiled, kwargs, seen, layers, seeds)
            except Exception as error:  # the other lengths may well work
                cell.failures.append(f"{type(error).__name__}: {error}".splitlines()[0])
            cells.append(cell)
    torch._dynamo.reset()
    return cells


@cache
def unfused_graphs(
    model: str, implementation: str, dynamic: bool | None, lengths: tuple[int, ...]
) -> list[int]:
    """How many graphs an unfused compile makes at each of the lengths in turn; the dtype makes no difference."""
    module, kwargs = build(model, implementation, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=_traced, fullgraph=True, dynamic=dynamic)
    counts = []
    with torch.no_grad():
        for tokens in lengths:
            before = _graphs()
            compiled(**kwargs | {"input_ids": token_ids(tokens, 0)})
            counts.append(_graphs() - before)
    return counts


def _traced(gm: GraphModule, inputs: list[Any]) -> Any:
    """aot_eager, for the guards of its trace; its graph isn't run: that of nemotron_h in bfloat16 can't."""
    lookup_backend("aot_eager")(gm, inputs)
    return gm.forward


def _graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _measure(
    cell: Cell,
    module: torch.nn.Module,
    compiled: Any,
    kwargs: dict[str, Any],
    seen: list[Fused],
    layers: int,
    seeds: int,
) -> None:
    """Call the compiled and the eager model and fill the cell."""
    graphs = _graphs()
    pairs: list[tuple[Tensor, Tensor]] = []
    inputs: list[tuple[Any, ...]] = []
    used: Fused | None = None
    for seed in range(seeds):
        call = kwargs | {"input_ids": token_ids(cell.tokens, seed)}
        for record in seen:
            record.inputs = ()
        got = compiled(**call).logits
        used = next((record for record in seen if record.inputs), None)
        if used is None:
            cell.failures.append("no fused graph ran")
            return
        pairs.append((got, module(**call).logits))
        inputs.append(used.inputs)
    assert used is not None
    cell.graphs = _graphs() - graphs
    # a shared expert is a node of one
    cell.nodes = sum(call.kwargs["num_experts"] > 1 for call in used.calls)
    if cell.nodes != layers:
        cell.failures.append(f"{cell.nodes} mega_moe nodes for {layers} layers")
    if cell.unfused_graphs is not None and cell.graphs != cell.unfused_graphs:
        cell.failures.append(f"{cell.graphs} graphs, {cell.unfused_graphs} without moefuse")
    if cell.dtype == "float32":
        cell.relative = max(float((got - eager).norm() / eager.norm()) for got, eager in pairs)
        if not cell.relative < RELATIVE:
            cell.failures.append(f"logits differ by {cell.relative:.2g}")
        return
    cell.block = [error.ratio for error in block_errors(used, inputs)]
    if not all(ratio <= RATIO for ratio in cell.block):  # a NaN is no pass
        cell.failures.append(f"MoE layers at {', '.join(f'{r:.2f}' for r in cell.block)} x eager's error")
    mine: list[float] = []
    theirs: list[float] = []
    for (got, eager), values in zip(pairs, inputs, strict=True):
        exact = exact_logits(used, values, eager)
        mine += per_token(got, exact)
        theirs += per_token(eager, exact)
    cell.logits = median(mine) / median(theirs)
    if not cell.logits <= RATIO:
        cell.failures.append(f"logits at {cell.logits:.2f} x eager's error")
