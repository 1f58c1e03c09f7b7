"""Fuse a real transformers Qwen3-MoE model with one line, check it, and time it. `make demo` runs this.

The model is built from a configuration with random weights, so nothing is downloaded. The exit code is 0
only if every MoE layer was fused and the logits are as good as eager's.
"""

import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

LAYERS = 4
PREFILL = 256
ROUNDS = 7
TOKENS = 32  # single tokens whose errors are compared
DUMPS = Path("out/demo")
# bfloat16 results differ by rounding alone, so eager's own distance from a float64 run is the yardstick.
ALLOWED = 1.5

Logits = Callable[[torch.Tensor], torch.Tensor]


def main() -> int:
    """Build, compile, check, report, time. Returns the exit code."""
    # transformers caches version checks with lru_cache, and Dynamo says that it looks through the cache.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    model = build_model()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"Qwen3-MoE from configuration: {LAYERS} layers, {parameters / 1e6:.0f} M parameters, bfloat16")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")

    prompt = torch.randint(model.config.vocab_size, (1, PREFILL))
    inputs = {f"prefill, {PREFILL} tokens": prompt, "decode, 1 token": prompt[:, :1]}

    # The one line. Everything else here checks and measures it.
    fused = torch.compile(model, backend="moefuse", options={"dump": str(DUMPS)})
    plain = torch.compile(model, backend="inductor")
    variants = {
        name: logits_of(module)
        for name, module in (("eager", model), ("inductor", plain), ("moefuse", fused))
    }

    print("first call, compiling (inductor comes second and finds the kernels that both use):")
    for name, ids in inputs.items():
        seconds = {variant: once(variants[variant], ids) for variant in ("moefuse", "inductor")}
        print(f"  {name:<20} moefuse {seconds['moefuse']:5.1f} s   inductor {seconds['inductor']:5.1f} s")

    right = check(model, variants, inputs)
    complete = show_report(graphs=len(inputs))
    show_times(variants, inputs)
    print(f"\ngraphs before and after, and the verdicts: {DUMPS}/")
    return 0 if right and complete else 1


def build_model() -> Qwen3MoeForCausalLM:
    """A small Qwen3-MoE of realistic width. The weights' spread lets the router tell the experts apart."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        moe_intermediate_size=512,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        initializer_range=0.03,
        use_cache=False,
    )
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()


def logits_of(module: Callable[..., Any]) -> Logits:
    """The module as a plain function from token ids to logits."""

    def call(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = module(input_ids=ids).logits
            return logits

    return call


def check(
    model: Qwen3MoeForCausalLM, variants: Mapping[str, Logits], inputs: Mapping[str, torch.Tensor]
) -> bool:
    """Compare the logits' errors against a float64 run of the same weights; print them and the verdict.

    The median over tokens: where two experts' scores are all but equal, rounding alone sends a token to the other
    one, in every bfloat16 run to others.
    """
    exact_model = copy.deepcopy(model).double()
    # torch's grouped matrix product has no float64; transformers' loop over the experts does.
    exact_model.set_experts_implementation("eager")
    exact = logits_of(exact_model)
    right = True
    print(f"\nrelative error of the logits against float64 (moefuse must stay within {ALLOWED} x eager):")
    prompt = next(iter(inputs.values()))
    for name, ids in inputs.items():
        calls = [ids] if ids.shape[1] > 1 else list(prompt[:, :TOKENS].split(1, dim=1))
        truth = [exact(own) for own in calls]
        errors = {
            variant: median_error([call(own) for own in calls], truth) for variant, call in variants.items()
        }
        ok = errors["moefuse"] <= ALLOWED * errors["eager"]
        right = right and ok
        cells = "   ".join(f"{variant} {error:.2e}" for variant, error in errors.items())
        print(f"  {name:<20} {cells}   {'ok' if ok else 'WRONG'}")
    return right


def median_error(got: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """The relative error of a token's logits, median over all tokens of all calls."""
    pairs = zip(got, truth, strict=True)
    errors = [(a.double() - b).norm(dim=-1) / b.norm(dim=-1) for a, b in pairs]
    return float(torch.cat([error.flatten() for error in errors]).median())


def show_report(graphs: int) -> bool:
    """Print what moefuse did; True if each graph has all its layers fused."""
    import moefuse

    report = moefuse.reports()[-1]  # the prompt's length and one token are two graphs of one frame
    print(f"\n{report}")
    return len(report.graphs) == graphs and report.fused == len(report.sites) == graphs * LAYERS


def show_times(variants: Mapping[str, Logits], inputs: Mapping[str, torch.Tensor]) -> None:
    """Medians over interleaved rounds, so that a busy moment of the machine hits all variants alike."""
    print(f"\nmedian of {ROUNDS} interleaved calls (in brackets: as a multiple of moefuse's):")
    for name, ids in inputs.items():
        seconds: dict[str, list[float]] = {variant: [] for variant in variants}
        for _ in range(ROUNDS):
            for variant, call in variants.items():
                seconds[variant].append(once(call, ids))
        medians = {variant: statistics.median(values) for variant, values in seconds.items()}
        cells = "   ".join(
            f"{variant} {1e3 * median:7.1f} ms ({median / medians['moefuse']:.2f} x)"
            for variant, median in medians.items()
        )
        print(f"  {name:<20} {cells}")


def once(call: Logits, ids: torch.Tensor) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    call(ids)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
