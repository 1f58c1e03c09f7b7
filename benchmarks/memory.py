"""Peak memory of compile and first call on a model that is nearly all expert weights: moefuse against eager.

In: weight bytes, dtype, layout, inner compiler. Out: a table of peak resident memory above the model itself, and the
difference to eager as a share of the expert weights. Every cell is a process of its own (`ru_maxrss`). A copy of the
weights anywhere, even of one layer, shows as a large share. Linux only.

    python benchmarks/memory.py                       1 GiB of weights in two layers
    python benchmarks/memory.py --mib 256 --layouts qwen3_moe --dtypes bfloat16
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 2
TOKENS = 32
EXPERTS = 16
TOP_K = 2
COMPILERS = ("eager", "inductor alone", "moefuse, inner eager", "moefuse, inner inductor")


def build(layout: str, dtype: torch.dtype, mib: int) -> nn.Module:
    """Two MoE blocks of transformers with `mib` MiB of expert weights: qwen3_moe [E, N, K], gpt_oss [E, K, N]."""
    width = sized(dtype, mib)
    if layout == "qwen3_moe":
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

        config: Any = Qwen3MoeConfig(
            hidden_size=width, moe_intermediate_size=width, num_experts=EXPERTS, num_experts_per_tok=TOP_K
        )
    else:
        from transformers import GptOssConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP as Block

        config = GptOssConfig(
            hidden_size=width, intermediate_size=width, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
        )
    config._experts_implementation = "grouped_mm"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = Stack([Block(config) for _ in range(LAYERS)])
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for tensor in model.parameters():  # every page is written: untouched ones are in no resident set
            tensor.fill_(0.01)
    return model.eval().requires_grad_(False)


def sized(dtype: torch.dtype, mib: int) -> int:
    """The width H = I for which 3 * H * I per expert makes `mib` MiB, a multiple of 64."""
    elements = mib * 2**20 / dtype.itemsize / LAYERS / EXPERTS / 3
    return round(math.sqrt(elements) / 64) * 64


class Stack(nn.Module):
    """Blocks with residuals; a block may return its router's scores besides."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            x = x + (y[0] if isinstance(y, tuple) else y)
        return x


def compiled(model: nn.Module, compiler: str) -> Callable[[Tensor], Tensor]:
    if compiler == "eager":
        return model
    if compiler == "inductor alone":
        return torch.compile(model, fullgraph=True)
    options: dict[str, Any] = {"mode": "on", "inner": compiler.rsplit(" ", 1)[-1]}
    return torch.compile(model, backend="moefuse", fullgraph=True, options=options)


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def one(compiler: str, layout: str, dtype: torch.dtype, mib: int, warm: bool) -> dict[str, float]:
    """Peak MiB above the model after compile, first and second call, in this process.

    warm: compile a small model before, since what loading a compiler takes is no cost of a model.
    """
    if warm:
        small = compiled(build(layout, dtype, 4), compiler)
        with torch.no_grad():
            small(torch.zeros(1, TOKENS, sized(dtype, 4), dtype=dtype))
        torch._dynamo.reset()
    model = build(layout, dtype, mib)
    weights = sum(p.numel() * p.element_size() for p in model.parameters() if p.dim() == 3) / 2**20
    run, x = compiled(model, compiler), torch.zeros(1, TOKENS, sized(dtype, mib), dtype=dtype)
    before = peak_kib()
    with torch.no_grad():
        y = run(x)
        run(x)
    assert bool(y.isfinite().all())
    return {"weights": weights, "above": (peak_kib() - before) / 1024}


def in_process(*arguments: str, warm: bool = True) -> dict[str, float]:
    """Run `one` in a process of its own. `ru_maxrss` outlives exec, so the child must start from a small parent."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", __file__, "--one", *arguments]
        command += [] if warm else ["--cold"]
        out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, float] = json.loads(out.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="expert weights in MiB")
    parser.add_argument("--layouts", default="qwen3_moe,gpt_oss")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--compilers", default=";".join(COMPILERS), help=f"of {'; '.join(COMPILERS)}")
    parser.add_argument(
        "--one", nargs=4, metavar=("COMPILER", "LAYOUT", "DTYPE", "MIB"), help=argparse.SUPPRESS
    )
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.one:
        compiler, layout, dtype, mib = arguments.one
        print(json.dumps(one(compiler, layout, getattr(torch, dtype), int(mib), not arguments.cold)))
        return
    print(f"{LAYERS} layers, {EXPERTS} experts, {TOKENS} tokens; MiB of peak resident memory above the model")
    print(f"{'layout':10} {'dtype':9} {'compiler':24} {'weights':>8} {'above':>7}  above eager / weights")
    for layout in arguments.layouts.split(","):
        for dtype in arguments.dtypes.split(","):
            eager = in_process("eager", layout, dtype, str(arguments.mib))
            for compiler in arguments.compilers.split(";"):
                row = (
                    eager if compiler == "eager" else in_process(compiler, layout, dtype, str(arguments.mib))
                )
                share = (row["above"] - eager["above"]) / row["weights"]
                print(f"{layout:10} {dtype:9} {compiler:24} {row['weights']:8.0f} {row['above']:7.1f}  {share:6.1%}",
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
