"""One MoE layer on the CPU: moefuse against the expert implementations of transformers.

In: command line flags. Out: a table of medians (ms) and ratios. The peers run interleaved, one call each per
round, so that a slow moment of the machine hits all of them. Needs transformers.

    python benchmarks/layer.py --shape qwen3 --dtype bfloat16 --tokens 1,16,256 --threads 2
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import moefuse.ops  # noqa: F401  (registers the operator)

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer; `module` is the transformers experts class that has them."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    module: str


SHAPES = {
    "qwen3": Shape(2048, 768, 128, 8, "qwen3"),
    "gpt_oss": Shape(2880, 2880, 32, 4, "gpt_oss"),
    "small": Shape(256, 128, 16, 4, "qwen3"),
}


def experts_module(shape: Shape, implementation: str, dtype: torch.dtype) -> torch.nn.Module:
    """A transformers experts module with random weights."""
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    if shape.module == "gpt_oss":
        config = GptOssConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_local_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
        )
        cls = GptOssExperts
    else:
        config = Qwen3MoeConfig(
            hidden_size=shape.hidden,
            moe_intermediate_size=shape.intermediate,
            num_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
        )
        cls = Qwen3MoeExperts
    config._experts_implementation = implementation
    with torch.device("meta"):
        module: torch.nn.Module = cls(config)
    module.to(dtype).to_empty(device="cpu").requires_grad_(False)
    return module


def peers(shape: Shape, dtype: torch.dtype, compiled: bool) -> dict[str, Layer]:
    """The contestants, all on the same weights."""
    eager = experts_module(shape, "eager", dtype)
    for parameter in eager.parameters():
        parameter.normal_(std=0.02)
    grouped = experts_module(shape, "grouped_mm", dtype)
    for name, parameter in eager.named_parameters():
        setattr(grouped, name, parameter)
    layers: dict[str, Layer] = {
        "eager": eager,
        "grouped_mm": grouped,
        "moefuse": mega_moe_layer(eager, shape),
    }
    if compiled:
        layers["grouped_mm+inductor"] = torch.compile(grouped, dynamic=False)
    return layers


def mega_moe_layer(module: torch.nn.Module, shape: Shape) -> Layer:
    """The operator with the weights of a transformers experts module."""
    op = torch.ops.moefuse.mega_moe.default
    w1, w2 = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
    if shape.module == "gpt_oss":
        b1, b2 = module.get_parameter("gate_up_proj_bias"), module.get_parameter("down_proj_bias")

        def gpt_oss(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            y: Tensor = op(
                None, x, ids, weights, [w1], [w2], [b1], [b2], num_experts=shape.experts, target="cpu",
                transpose_weight1=False, transpose_weight2=False, gate_up="interleaved",
                activation="swigluoai", activation_params=[7.0, 1.702, 1.0],
            )[0]  # fmt: skip
            return y

        return gpt_oss

    def qwen3(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = op(None, x, ids, weights, [w1], [w2], [], [], num_experts=shape.experts, target="cpu")[0]
        return y

    return qwen3


def measure(
    layers: dict[str, Layer], inputs: tuple[Tensor, ...], seconds: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Median milliseconds per call of each layer, rounds interleaved for about `seconds`, at least 3 rounds."""
    times: dict[str, list[float]] = {name: [] for name in layers}
    for layer in layers.values():
        layer(*inputs)
        layer(*inputs)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["eager"]) < 3:
        for name, layer in layers.items():
            start = clock()
            layer(*inputs)
            times[name].append((clock() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def cpu_name() -> str:
    """The CPU's name and the instruction set that torch uses on it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({torch.backends.cpu.get_cpu_capability()})"


def main() -> None:
    """Parse the flags, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--router-dtype", choices=("same", "float32"), default="same")
    parser.add_argument("--tokens", default="1,4,16,64,256,1024")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="time per row, all peers together")
    parser.add_argument("--compiled", action="store_true", help="also torch.compile(grouped_mm)")
    parser.add_argument(
        "--cpu-time", action="store_true", help="process CPU time: for a busy machine, one thread"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape, dtype = SHAPES[args.shape], getattr(torch, args.dtype)
    layers = peers(shape, dtype, args.compiled)
    print(
        f"{cpu_name()}, {args.threads} threads, torch {torch.__version__}, {args.shape} {shape} {args.dtype}"
    )
    print("tokens" + "".join(f"{name:>22}" for name in layers) + "   moefuse is faster than")
    with torch.no_grad():
        for tokens in map(int, args.tokens.split(",")):
            x = torch.randn(tokens, shape.hidden).to(dtype)
            weights, ids = torch.rand(tokens, shape.experts).softmax(-1).topk(shape.top_k)
            weights = weights if args.router_dtype == "float32" else weights.to(dtype)
            clock = time.process_time if args.cpu_time else time.perf_counter
            ms = measure(layers, (x, ids, weights), args.seconds, clock)
            ratios = ", ".join(
                f"{name} {ms[name] / ms['moefuse']:.2f}x" for name in layers if name != "moefuse"
            )
            print(
                f"{tokens:6d}" + "".join(f"{ms[name]:19.2f} ms" for name in layers) + f"   {ratios}",
                flush=True,
            )


if __name__ == "__main__":
    main()
