"""The table of docs/ascend-sequences.md: every operator sequence of the engines, fused or refused with the reason.

In: the sequences of this folder. Out: `rendered()`, made by capturing and lifting each; `python -m tests.npu.table`
writes it into the page, and a test compares.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from moefuse.passes.halves import split
from moefuse.passes.lift import find
from moefuse.patterns.engine import lift
from moefuse.testing import capture_graph
from tests.npu import mx_sequences, shells
from tests.npu.quant_sequences import CASES, weights
from tests.npu.sequences import SEQUENCES, E

PAGE = Path(__file__).parents[2] / "docs" / "ascend-sequences.md"
BEGIN, END = "<!-- table -->", "<!-- /table -->"
T, H, I = 8, 16, 32  # noqa: E741
Graph = Callable[[], GraphModule]


def operands(scheme: str, experts: int = E) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x, logits = draw(T, H).bfloat16(), draw(T, E)
    if scheme == "bf16":
        return x, logits, draw(experts, H, 2 * I).bfloat16(), draw(experts, I, H).bfloat16()
    if scheme.startswith("mx"):
        wide = draw(T, mx_sequences.H).bfloat16()
        return (wide, logits, *(tensor[:experts] for tensor in mx_sequences.weights(mx_sequences.E4M3)))
    return (x, logits, *(tensor[:experts] for tensor in weights(scheme, 1, 0, H, I)))


def plain(name: str) -> GraphModule:
    return capture_graph(SEQUENCES[name], operands("bf16")).graph_module


def quantised(name: str) -> GraphModule:
    case: Any = CASES.get(name) or mx_sequences.CASES.get(name) or mx_sequences.REFUSED[name][0]
    scheme = "w8a8" if name in CASES else "mx"
    return capture_graph(case.layer, (*operands(scheme)[:2], *case.tensors)).graph_module


def shell(name: str, scheme: str) -> GraphModule:
    layer = partial(shells.SHELLS[name], scheme=scheme)
    return capture_graph(layer, operands(scheme, shells.LOCAL)).graph_module


def verdict(graph_module: GraphModule) -> str:
    """`one node`, over how many ranks, or the first thing that stood in the way."""
    split(graph_module.graph)
    lifted = lift(graph_module.graph)
    if lifted.sites:
        ranks = lifted.sites[0].layer.ranks
        spec = lifted.sites[0].spec
        words = "one node" if spec.quant == "none" else f"one node, `{spec.quant}`"
        if lifted.sites[0].layer.first:
            return f"{words}, of this rank's experts"
        return words if ranks is None else f"{words}, over {ranks.world} ranks"
    loss = find(graph_module.graph, frozenset(), lifted)[0].loss
    assert loss is not None
    return f"refused: {loss.root.reason}"


def _of(*names: str) -> tuple[tuple[str, Graph], ...]:
    return tuple((f"`{name}`", partial(plain if name in SEQUENCES else quantised, name)) for name in names)


ROWS: tuple[tuple[str, str, tuple[tuple[str, Graph], ...]], ...] = (
    ("SGLang", "bf16", _of("sglang_bf16", "unbound_weights", "listed_weights", "transposed_weights")),
    ("SGLang", "W8A8", _of("w8a8_dequant_swiglu_quant", "w8a8_swiglu_dynamic_quant")),
    ("SGLang", "W8A8, fused gmm1", _of("w8a8_fused_first_product", "w8a8_older_fused_first_product")),
    ("SGLang", "W4A4", _of("w4a4")),
    ("SGLang", "W4A8", _of("w4a8", "w4a8_groups")),
    ("SGLang", "W4A16, WNA16", _of("w4a16", "w4a16_groups", "w8a16")),
    ("SGLang", "MXFP8", _of("mxfp8_by_steps", "mxfp8_e5m2", "mxfp8_listed", "mxfp8_as_stored")),
    ("SGLang", "MXFP4", _of("mxfp4_by_steps")),
    (
        "SGLang",
        "activation variants",
        _of(
            *("w8a8_integer_product", "w8a8_tokens_quantised_first", "w8a8_right_half", "w8a8_swigluoai"),
            *(
                "clipped_swiglu",
                "w8a8_swiglustep",
                "written_out_activation",
                "w8a8_gelu_and_mul",
                "w8a8_situ",
            ),
        ),
    ),
    ("SGLang", "legacy `fused_moe_npu`", _of("sglang_legacy", "gated_legacy")),
    ("SGLang", "legacy W8A8 prefill", _of("w8a8_legacy_prefill")),
    ("SGLang", "legacy W8A8 decode", _of("w8a8_legacy_decode")),
    ("SGLang", "coming EP: range, drop_pad_mode 3", (("`none`", partial(shell, "none", "bf16")),)),
    ("SGLang", "drop_pad_mode 3, all experts", _of("finalize_one_block")),
    ("vllm-ascend", "bf16, no EP", _of("vllm_allgather", "token_permute", "unpermute_then_weigh")),
    ("vllm-ascend", "W8A8, int32 product", _of("w8a8_integer_product", "w8a8_listed", "w8a8_transposed")),
    ("vllm-ascend", "W4A8, fused gmm1", _of("w4a8_fused_first_product")),
    ("vllm-ascend", "W4A16", _of("w4a16")),
    ("vllm-ascend", "MXFP8, fused gmm1", _of("mxfp8_fused_first_product")),
    ("vllm-ascend", "MXFP8, swiglustep", _of("mxfp8_init_routing", "mxfp8_swiglustep")),
    ("vllm-ascend", "W4A8 MXFP", _of("mxfp4a8")),
    ("vllm-ascend", "W4A4 MXFP", _of("mxfp4_init_routing", "mxfp4_fused_first_product")),
    ("vllm-ascend", "W4A16 MXFP", _of("mxfp4a16")),
    ("any", "A4W4-FP: float4, then float8 rows", _of("mxfp4_then_float8")),
    ("vllm-ascend", "group lists", _of("cumulative", "counts_summed_up", "counts_from_ends")),
    ("vllm-ascend", "bf16, weights between the products", _of("weights_between")),
    ("xLLM", "W8A8, fused gmm1", _of("w8a8_fused_first_product")),
    ("any", "fused gmm2 and combine", _of("w8a8_fused_last_product")),
    ("any", "rows by slot; a skip", _of("slots_of_rows", "with_skip")),
)


def rendered() -> str:
    """Both tables."""
    lines = ["| engine | sequence | in `tests/npu` | meaning found |", "|---|---|---|---|"]
    for engine, what, graphs in ROWS:
        grouped: dict[str, list[str]] = {}
        for name, graph in graphs:
            grouped.setdefault(verdict(graph()), []).append(name)
        lines += [f"| {engine} | {what} | {', '.join(names)} | {said} |" for said, names in grouped.items()]
    lines += ["", f"| shell | {' | '.join(shells.MLPS)} |", "|---" * (len(shells.MLPS) + 1) + "|"]
    for name in shells.SHELLS:
        with shells.grouped() if name.startswith("ALLTOALL") else nullcontext():
            said = [verdict(shell(name, scheme)) for scheme in shells.MLPS]
        lines.append(f"| {name} | {' | '.join(said)} |")
    return "\n".join(lines)


def on_page(text: str) -> str:
    """What stands between the marks."""
    return text.partition(BEGIN)[2].partition(END)[0].strip()


if __name__ == "__main__":
    text = PAGE.read_text()
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n{rendered()}\n{END}{tail}")
