"""The acceptance matrix: real models compiled with moefuse against eager.

In: which part of the matrix. Out: a table on the screen, one line per cell as it is done, and JSON. A cell is a model
x experts implementation x dtype x length of the input x static or dynamic shapes; tests/zoo/harness.py says what is
measured. Exit status 1 when a cell fails. Needs transformers.

    python benchmarks/models.py --json matrix.json
    python benchmarks/models.py --inner inductor --lengths 16,1 --no-count
    python benchmarks/models.py --models gpt_oss --implementations batched_mm --dtypes bfloat16 --shapes dynamic
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checks are shared with the tests

from tests.zoo import harness
from tests.zoo.harness import Cell

HEADER = (
    f"{'model':14} {'experts':10} {'dtype':9} {'shapes':8} {'tokens':>6} {'graphs':>8} {'nodes':>5} "
    f"{'fp32 rel':>9} {'block x':>8} {'logits x':>8}  verdict"
)


def groups(arguments: argparse.Namespace) -> Iterator[tuple[str, str, torch.dtype, bool | None]]:
    """The compiles: one for each model, implementation, dtype and kind of shapes."""
    for model in arguments.models:
        for implementation in harness.implementations(model):
            if implementation not in (*arguments.implementations, "own"):
                continue
            for shapes in arguments.shapes:
                for dtype in arguments.dtypes:
                    yield model, implementation, getattr(torch, dtype), True if shapes == "dynamic" else None


def line(cell: Cell) -> str:
    unfused = "" if cell.unfused_graphs is None else f"/{cell.unfused_graphs}"
    relative = "" if cell.relative is None else f"{cell.relative:.1e}"
    block = f"{max(cell.block):.2f}" if cell.block else ""
    logits = "" if cell.logits is None else f"{cell.logits:.2f}"
    return (
        f"{cell.model:14} {cell.implementation:10} {cell.dtype:9} {'dynamic' if cell.dynamic else 'static':8} "
        f"{cell.tokens:6} {f'{cell.graphs}{unfused}':>8} {cell.nodes:5} {relative:>9} {block:>8} {logits:>8}  "
        f"{'; '.join(cell.failures) or 'ok'}"
    )


def run(arguments: argparse.Namespace) -> list[Cell]:
    cells: list[Cell] = []
    print(HEADER, flush=True)
    for model, implementation, dtype, dynamic in groups(arguments):
        new = harness.run_cells(
            model,
            implementation,
            dtype,
            dynamic=dynamic,
            inner=arguments.inner,
            lengths=arguments.lengths,
            seeds=arguments.seeds,
            count=arguments.count,
        )
        for cell in new:
            print(line(cell), flush=True)
        cells += new
        if arguments.json:
            Path(arguments.json).write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    return cells


def parse() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(word) for word in text.split(","))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", type=words, default=[*harness.MODELS, harness.GATHER_EINSUM])
    parser.add_argument("--implementations", type=words, default=list(harness.IMPLEMENTATIONS))
    parser.add_argument("--dtypes", type=words, default=["float32", "bfloat16"])
    parser.add_argument("--shapes", type=words, default=["static", "dynamic"])
    parser.add_argument(
        "--lengths", type=numbers, default=(16, 24, 40, 1), help="tokens per row, in this order"
    )
    parser.add_argument("--seeds", type=int, default=4, help="inputs per length")
    parser.add_argument("--inner", choices=["eager", "inductor"], default="eager")
    parser.add_argument(
        "--no-count", dest="count", action="store_false", help="don't compile unfused as well"
    )
    parser.add_argument("--json", help="write the cells to this file")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    cells = run(arguments)
    failed = [cell for cell in cells if cell.failures]
    print(
        f"\n{len(cells)} cells, {len(failed)} failed, {time.perf_counter() - start:.0f} s, inner {arguments.inner}"
    )
    for title, values in (
        ("largest float32 difference", [cell.relative for cell in cells if cell.relative is not None]),
        ("largest bfloat16 block error, x eager's", [ratio for cell in cells for ratio in cell.block]),
        (
            "largest bfloat16 logits error, x eager's",
            [cell.logits for cell in cells if cell.logits is not None],
        ),
    ):
        if values:
            print(f"{title}: {max(values):.3g}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
