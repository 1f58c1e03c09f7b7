"""Random MoE layers with a known truth.

In: a function that picks one of several values (`random.Random(seed).choice` or a hypothesis draw). Out:
`Program`, a frozen description of one layer as people write it: sizes, router, dispatch, weight layout,
activation, weighting, combine, noise. `Program.build()` gives the plain torch module and inputs.

`fusable` says whether moefuse must find the layer; it follows from how the program was made, never from
its graph. A program that isn't fusable may still be fused where its result stays right.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Choose = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Sizes:
    """tokens T, slots per token K, experts E, hidden H, intermediate I."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    inter: int


SIZES = (
    Sizes(6, 2, 4, 16, 24),
    Sizes(5, 3, 8, 24, 16),
    Sizes(12, 2, 8, 8, 16),  # E == H
    Sizes(2, 2, 4, 16, 8),  # T == K, S == E, H == 2 I
    Sizes(3, 3, 5, 16, 24),  # T == K
    Sizes(4, 2, 4, 16, 24),  # T == E
    Sizes(5, 3, 3, 16, 24),  # E == K
    Sizes(3, 3, 3, 8, 16),  # T == K == E
    Sizes(6, 2, 4, 16, 16),  # H == I
    Sizes(8, 2, 4, 16, 16),  # S == H == I
    Sizes(8, 4, 8, 8, 8),  # T == E == H == I
    Sizes(8, 8, 8, 8, 8),  # everything
    Sizes(6, 1, 4, 16, 24),  # K == 1
    Sizes(4, 1, 4, 16, 16),  # K == 1, T == E
    Sizes(1, 2, 4, 16, 24),  # T == 1
    Sizes(1, 1, 4, 8, 8),  # T == K == 1
    Sizes(5, 1, 1, 16, 24),  # E == 1
)
"""Ordinary sizes first, then the ones that collide."""

ROUTERS = ("softmax_topk_renorm", "topk_softmax", "sigmoid_bias", "group_limited", "given", "given_repeated")
DISPATCHES = ("sorted", "gather", "einsum", "dense", "pieces", "where", "every", "map", "map_pieces")
COUNTS = ("histc", "histc_sorted", "one_hot", "compare", "bincount")
TOKEN_INDEX = ("floor_divide", "arange", "repeat")
GATE_UP = ("concat", "concat_swapped", "interleaved", "interleaved_swapped", "separate", "none")
CUTS = ("slices", "split", "ends")
HALVES = ("chunk", "split", "slice", "view")
GATED_ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "swiglu_oai",
    "clamped_silu",
    "clamp_after",
    "softcap",
)
PLAIN_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
COMBINES: dict[str, tuple[str, ...]] = {
    "sorted": ("inverse_put", "inverse_argsort", "put_back", "index_add", "scatter_add", "put_accumulate"),
    "gather": ("sum", "index_add", "bmm", "einsum"),
    "einsum": ("sum", "bmm", "einsum"),
    "dense": ("sum", "einsum"),
    "pieces": ("inverse_put", "inverse_argsort", "put_back", "index_add", "scatter_add", "put_accumulate"),
    "where": ("index_add", "put_accumulate", "write_back"),
    "every": ("add",),
    "map": ("index_add", "scatter_add", "put_accumulate"),
    "map_pieces": ("index_add", "scatter_add", "put_accumulate"),
}
FACTORS = ("weight", "weight_constant", "weight_scale", "weight_scale_constant", "none")
SHARED = ("none", "none", "first", "last", "weighted")
"""Where a shared expert is added: before the layer's output or after it; weighted by a sigmoid, or not."""
NORMS = ("none", "none", "none", "rms", "scaled_rms")
TRAPS = (
    *("mean", "amax", "partial", "twice", "residual_base", "escape", "wrong_token"),
    *("shifted_cut", "swapped_weights", "swapped_pieces", "skipped_expert", "other_order"),
)


@dataclass(frozen=True)
class Program:
    """One MoE layer in one spelling. See the module text."""

    sizes: Sizes
    dtype: torch.dtype
    router: str
    dispatch: str
    combine: str
    counts: str
    token_index: str
    cut: str
    gate_up: str
    halves: str
    activation: str
    out_features_first: bool
    bias: bool
    factors: str
    position: str
    weight_dtype: str
    late_weight: bool
    int32_ids: bool
    rank3: bool
    extra_users: bool
    noise: int
    trap: str
    seed: int
    norm: str = "none"
    shared: str = "none"

    @property
    def gated(self) -> bool:
        """True when the first GEMM has a gate and an up half."""
        return self.gate_up != "none"

    @property
    def fusable(self) -> bool:
        """True when moefuse must find this layer."""
        if self.trap or self.sizes.experts == 1:
            return False  # one expert is a plain feed-forward network: no routing is left in its graph
        if self.norm != "none" and self.dispatch in ("dense", "every"):
            return False  # every expert on every token, then a norm: no rule opens that
        if self.dispatch in ("pieces", "map_pieces") and self.sizes.tokens * self.sizes.top_k == 1:
            return False  # a single slot has no order that could be cut
        if self.dispatch == "where":
            return self.combine != "write_back" or not self.router.startswith("given")
        if self.dispatch in ("map", "map_pieces"):
            return not self.router.startswith("given")
        if self.dispatch != "dense":
            return True
        if self.router.startswith("given"):
            return False  # a scatter keeps one of two equal ids, and only a top-k proves that there are none
        # An expert that wasn't chosen must contribute zero: expert(0) == 0 has to hold for the input form.
        return self.position == "output" or (not self.bias and self.position == "input")

    def describe(self) -> str:
        """The fields, one a line, as a constructor call that can be pasted into a test."""
        lines = [f"    {f.name}={getattr(self, f.name)!r}," for f in fields(self)]
        return "\n".join(("Program(", *lines, ")"))

    def build(self) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        """The module and its inputs: x [T, H] (or [1, T, H]), with given routing also ids, weights [T, K]."""
        from moefuse.testing.program_module import ProgramModule

        module = ProgramModule(self).eval()
        return module, self.inputs(self.seed + 1)

    def inputs(self, seed: int, tokens: int | None = None) -> tuple[torch.Tensor, ...]:
        """Other inputs of the same layer, optionally with another number of tokens."""
        generator = torch.Generator().manual_seed(seed)
        size, count = self.sizes, self.sizes.tokens if tokens is None else tokens
        x = torch.randn(count, size.hidden, generator=generator).to(self.dtype)
        x = x[None] if self.rank3 else x
        if not self.router.startswith("given"):
            return (x,)
        ids = torch.rand(count, size.experts, generator=generator).argsort(-1)[:, : size.top_k]
        if self.router == "given_repeated":
            ids = torch.randint(0, size.experts, (count, size.top_k), generator=generator)
        weights = torch.rand(count, size.top_k, generator=generator) + 0.1
        kind = torch.float32 if self.weight_dtype == "float32" else self.dtype
        return x, ids.contiguous().to(torch.int32 if self.int32_ids else torch.int64), weights.to(kind)


def draw_program(choose: Choose, *, traps: bool = False) -> Program:
    """Draw one program; `choose` picks from a sequence, whose first entry is the simplest.

    With `traps` every program has one change that makes it something else than a weighted sum over slots.
    """
    sizes: Sizes = choose(SIZES)
    dispatch = choose(DISPATCHES)
    gate_up = choose(GATE_UP)
    position = choose(("output", "input", "mid"))
    routers = [r for r in ROUTERS if r != "group_limited" or _groups_fit(sizes)]
    router = choose(routers)
    combine = choose(COMBINES[dispatch])
    return Program(
        sizes=sizes,
        dtype=choose((torch.float32, torch.bfloat16)),
        router=router,
        dispatch=dispatch,
        combine=combine,
        counts=choose(COUNTS),
        token_index=choose(TOKEN_INDEX),
        cut=choose(CUTS),
        gate_up=gate_up,
        halves=choose(HALVES),
        activation=choose(PLAIN_ACTIVATIONS if gate_up == "none" else GATED_ACTIVATIONS),
        out_features_first=choose((True, False)),
        bias=choose((False, True)),
        factors=choose(FACTORS),
        position="output" if dispatch == "every" else position,
        weight_dtype=choose(("native", "float32")),
        late_weight=choose((False, True)),
        int32_ids=choose((False, True)),
        rank3=choose((False, True)),
        extra_users=choose((False, True)),
        noise=choose((0, 1, 2, 3)),
        trap=choose([t for t in TRAPS if _trap_fits(t, dispatch, combine)]) if traps else "",
        seed=choose(range(1000)),
        norm=choose(NORMS),
        shared=choose(SHARED),
    )


def random_program(seed: int, *, traps: bool = False) -> Program:
    """The program of a seed: the same one on every machine."""
    return draw_program(random.Random(seed).choice, traps=traps)


def programs(*, traps: bool = False) -> Any:
    """A hypothesis strategy over programs (needs hypothesis)."""
    from hypothesis import strategies as st

    @st.composite
    def strategy(draw: Callable[[Any], Any]) -> Program:
        return draw_program(lambda values: draw(st.sampled_from(values)), traps=traps)

    return strategy()


def _groups_fit(sizes: Sizes) -> bool:
    return sizes.experts % 2 == 0 and sizes.top_k <= sizes.experts // 2


def _trap_fits(trap: str, dispatch: str, combine: str) -> bool:
    if trap in ("mean", "amax", "partial"):
        back = ("sum", "inverse_put", "inverse_argsort", "put_back")
        return combine in back and dispatch != "dense"
    if trap == "residual_base":
        return combine in ("index_add", "scatter_add", "put_accumulate") and dispatch != "where"
    dispatches = {
        "wrong_token": ("sorted", "pieces"),
        "shifted_cut": ("pieces", "map_pieces"),
        "swapped_weights": ("pieces", "map_pieces"),
        "swapped_pieces": ("pieces", "map_pieces"),
        "skipped_expert": ("where", "every"),
        "other_order": ("map", "map_pieces"),
    }
    return dispatch in dispatches.get(trap, (dispatch,))
