"""One MoE layer on the CPU: moefuse against the expert implementations of transformers.

In: command line flags. Out: a table of medians (ms), ratios, and the share of the roofline that moefuse reaches: the
larger of distinct expert bytes / memory speed and arithmetic / multiplication speed, both measured in the same run.
The peers run interleaved, one call each per round, so that a slow moment of the machine hits all of them. `torch ops`
is the cpu target without its C++ kernel. Needs transformers.

    python benchmarks/layer.py --shape qwen3,gpt_oss --dtype bfloat16 --tokens 1,16,256 --threads 2
"""

import argparse
import ctypes
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import moefuse.ops  # noqa: F401  (registers the operator)
from moefuse.targets.cpu import build, isa, kernel

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
    "qwen35": Shape(2048, 512, 256, 8, "qwen3"),
    "deepseek_v2_lite": Shape(2048, 1408, 64, 6, "qwen3"),
    "mixtral_half": Shape(4096, 14336, 4, 2, "qwen3"),  # 4 of its 8 experts: memory
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
        "torch ops": torch_operators(mega_moe_layer(eager, shape)),
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


def torch_operators(layer: Layer) -> Layer:
    """The same call without the C++ kernel."""

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        found, kernel.load = kernel.load, lambda: "left out"
        try:
            return layer(x, ids, weights)
        finally:
            kernel.load = found

    return call


def limits(shape: Shape, dtype: torch.dtype, threads: int, memory: Tensor) -> tuple[float, float]:
    """Bytes and floating point operations per second of this machine: the best of a few tries."""
    chosen, compiler = isa.chosen(), build.find_compiler()
    if chosen is None or compiler is None:
        raise SystemExit("layer.py: the limits need a C++ compiler and MOEFUSE_CPU_ISA unset or not 'none'")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            compiler,
            *build.FLAGS,
            *chosen.flags,
            "-shared",
            str(Path(__file__).with_name("probe.cpp")),
        ]
        subprocess.run([*command, "-o", f"{folder}/probe.so"], check=True)
        probe = ctypes.CDLL(f"{folder}/probe.so")
    probe.probe_read.restype = probe.probe_peak.restype = ctypes.c_double
    probe.probe_read.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    size = min(memory.nbytes, 1 << 30)
    read = max(probe.probe_read(memory.data_ptr(), size, threads) for _ in range(5))
    return read, max(probe.probe_peak(int(dtype == torch.bfloat16), threads) for _ in range(5))


def roof(shape: Shape, dtype: torch.dtype, ids: Tensor, speeds: tuple[float, float]) -> float:
    """The milliseconds that memory or arithmetic need at least."""
    per_expert = 3 * shape.hidden * shape.intermediate
    read = ids.unique().numel() * per_expert * dtype.itemsize / speeds[0]
    return max(read, 2 * ids.numel() * per_expert / speeds[1]) * 1e3


def routing(tokens: int, shape: Shape, how: str) -> tuple[Tensor, Tensor]:
    """Weights and ids [T, K]: uniform over the experts, or with Zipf's law."""
    logits = torch.rand(tokens, shape.experts)
    if how == "zipf":
        gumbel = -(-logits.clamp(1e-6, 1 - 1e-6).log()).log()
        logits = gumbel - torch.arange(1, shape.experts + 1).log()
    return logits.softmax(-1).topk(shape.top_k)


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
    parser.add_argument("--shape", default="qwen3", help=f"some of {', '.join(SHAPES)}, separated by commas")
    parser.add_argument("--routing", choices=("uniform", "zipf"), default="uniform")
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
    for name in args.shape.split(","):
        if name not in SHAPES:
            parser.error(f"--shape: expected some of {', '.join(SHAPES)}, got {name!r}")
        report(name, args)


def report(name: str, args: argparse.Namespace) -> None:
    """One shape's rows."""
    shape, dtype = SHAPES[name], getattr(torch, args.dtype)
    layers = peers(shape, dtype, args.compiled)
    clock = time.process_time if args.cpu_time else time.perf_counter
    with torch.no_grad():
        x = torch.randn(1, shape.hidden).to(dtype)
        weights, ids = routing(1, shape, args.routing)
        layers["moefuse"](
            x, ids, weights.to(dtype)
        )  # huge pages, where they are used, before memory is probed
        memory = layers["eager"].get_parameter("gate_up_proj")  # type: ignore[attr-defined]
        speeds = limits(shape, dtype, args.threads, memory)
        print(
            f"{cpu_name()}, {args.threads} threads, torch {torch.__version__}, {name} {shape} {args.dtype}, "
            f"{args.routing} routing, reads {speeds[0] / 1e9:.1f} GB/s, multiplies {speeds[1] / 1e9:.0f} GFLOP/s"
        )
        print(
            "tokens"
            + "".join(f"{peer:>16}" for peer in layers)
            + "   of the roofline   moefuse is faster than"
        )
        for tokens in map(int, args.tokens.split(",")):
            x = torch.randn(tokens, shape.hidden).to(dtype)
            weights, ids = routing(tokens, shape, args.routing)
            weights = weights if args.router_dtype == "float32" else weights.to(dtype)
            ms = measure(layers, (x, ids, weights), args.seconds, clock)
            ratios = ", ".join(
                f"{peer} {ms[peer] / ms['moefuse']:.2f}x" for peer in layers if peer != "moefuse"
            )
            share = roof(shape, dtype, ids, speeds) / ms["moefuse"]
            print(
                f"{tokens:6d}"
                + "".join(f"{ms[peer]:13.2f} ms" for peer in layers)
                + f"{share:18.0%}   {ratios}",
                flush=True,
            )
        print(f"workspace kept: {kernel.workspace_bytes() / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
