"""Measures a whole model: tokens per second of a Qwen3-MoE of a few layers at real widths.

In: layers, threads, tokens of the prompt. Out: a `ModelRow` per phase: prefill of the prompt, and decoding one token
with a static cache. The model's weights are random; eager, Inductor and moefuse run on the same ones, in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moefuse.bench.contestants import OURS

PREFILL, DECODE = "prefill", "decode"
SIZES = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32768,
    "norm_topk_prob": True,
    "initializer_range": 0.03,
}
"""Of Qwen3-30B-A3B, but for the vocabulary: a real one would cost more memory than a layer and has nothing to do with
the experts."""
TINY = SIZES | {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
}
_ROUNDS = 3


@dataclass(frozen=True)
class WantedModel:
    """What to measure. prompt: tokens; seconds: per phase, all contestants together."""

    layers: int
    dtypes: tuple[torch.dtype, ...]
    threads: tuple[int, ...]
    prompt: int
    contestants: tuple[str, ...]
    seconds: float
    tiny: bool = False

    @property
    def count(self) -> int:
        """How many rows there will be."""
        return 2 * len(self.dtypes) * len(self.threads)


@dataclass
class ModelRow:
    """One phase at one number of threads: tokens per second of each contestant (the median of the rounds)."""

    phase: str
    layers: int
    dtype: str
    threads: int
    tokens: int
    rounds: int
    tokens_per_second: dict[str, float] = field(default_factory=dict)

    def ratio(self, name: str) -> float | None:
        """How many times faster than this contestant moefuse is."""
        speeds = self.tokens_per_second
        return speeds[OURS] / speeds[name] if OURS in speeds and name in speeds else None


Call = Callable[..., Any]

MODEL_CONTESTANTS: dict[str, Callable[[Any], Call]] = {
    "eager": lambda model: model,
    "inductor": torch.compile,
    OURS: lambda model: torch.compile(model, backend="moefuse", options={"mode": "on"}),
}


def model_rows(wanted: WantedModel, starts: Callable[[str], None] = lambda _: None) -> Iterator[ModelRow]:
    """Measure prefill and decode for each number of threads, which is put back at the end."""
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            for dtype in wanted.dtypes:
                starts(f"making a model of {wanted.layers} layers")
                model = build(wanted, dtype)
                for threads in wanted.threads:
                    torch.set_num_threads(threads)
                    yield from _at(wanted, model, dtype, threads, starts)
                del model
    finally:
        torch.set_num_threads(before)


def build(wanted: WantedModel, dtype: torch.dtype) -> Any:
    """The model with random weights. Raises ImportError without transformers."""
    try:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    except ImportError as error:
        raise ImportError("moefuse bench needs transformers: pip install 'moefuse[transformers]'") from error
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**(TINY if wanted.tiny else SIZES), num_hidden_layers=wanted.layers)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a float32 model first would need twice the memory
    try:
        return Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def _at(
    wanted: WantedModel,
    model: Any,
    dtype: torch.dtype,
    threads: int,
    starts: Callable[[str], None],
) -> Iterator[ModelRow]:
    torch._dynamo.reset()
    runs = {name: MODEL_CONTESTANTS[name](model) for name in wanted.contestants}
    caches = {name: _cache(model, dtype, wanted.prompt) for name in runs}
    prompt = torch.randint(model.config.vocab_size, (1, wanted.prompt))
    # the prompt fills the cache, decoding writes the same place after it again and again
    for phase, ids, start in ((PREFILL, prompt, 0), (DECODE, prompt[:, :1], wanted.prompt)):
        starts(f"{phase}, {threads} threads: compiling and measuring")
        position = torch.arange(start, start + ids.shape[1]).unsqueeze(0)

        def step(name: str, ids: Tensor = ids, position: Tensor = position, start: int = start) -> float:
            for cached in caches[name].layers:
                cached.cumulative_length.fill_(start)
            begin = time.perf_counter()
            runs[name](input_ids=ids, position_ids=position, cache=caches[name], use_cache=True)
            return time.perf_counter() - begin

        times = _rounds(step, tuple(runs), wanted.seconds)
        row = ModelRow(
            phase,
            wanted.layers,
            str(dtype).removeprefix("torch."),
            threads,
            ids.shape[1],
            max(map(len, times.values())),
        )
        row.tokens_per_second = {
            name: ids.shape[1] / statistics.median(values) for name, values in times.items()
        }
        yield row


def _cache(model: Any, dtype: torch.dtype, prompt: int) -> Any:
    from transformers import StaticCache

    config = model.config
    cache = StaticCache(config=config, max_cache_len=prompt + 16)
    cache.early_initialization(1, config.num_key_value_heads, config.head_dim, dtype, torch.device("cpu"))
    return cache


def _rounds(step: Callable[[str], float], names: Sequence[str], seconds: float) -> dict[str, list[float]]:
    """Seconds of each call, after two to compile and to warm up."""
    for name in names:
        step(name)
        step(name)
    times: dict[str, list[float]] = {name: [] for name in names}
    end, done = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or done < _ROUNDS:
        for i in range(len(names)):
            name = names[(i + done) % len(names)]
            times[name].append(step(name))
        done += 1
    return times
