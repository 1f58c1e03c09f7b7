"""Two processes, an emulated device each, in a group of torch_npu's real ProcessGroupHCCL, whose HCCL is emulated.

The layers become one operator of the vendor's package each, which is emulated, too (`emulated_vendor.py`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORLD = 2
CLOSE = (
    1e-2  # norm-wise; outputs are bfloat16, and one rounding moves some integers of a quantised row by one
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank said."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    command = [sys.executable, "-W", "ignore", "-m", "tests.npu.rank_program"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD), str(store)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        said = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, said, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(output.strip().splitlines()[-1]) for output, _ in said]


def test_a_collective_of_hccl(ranks: list[dict[str, Any]]) -> None:
    assert [said["sum"] for said in ranks] == [3.0, 3.0]


def test_rows_by_all_to_all_with_empty_ranks(ranks: list[dict[str, Any]]) -> None:
    """(5, 2), (0, 3), (1, 1) and (8, 0) tokens through one compiled graph."""
    for rank, said in enumerate(ranks):
        errors, fused, words = said["floats"]
        assert fused == [1]
        assert max(errors) < CLOSE
        assert [error == 0.0 for error in errors] == [
            (rank == 0 and step == 1) or (rank == 1 and step == 3) for step in range(4)
        ]
        assert words == "rows travel inside the node, over the 2 ranks of group 0"


@pytest.mark.parametrize("operator", ["quantised", "combine"])
def test_quantised_rows_by_mc2_captured_by_npugraph_ex(operator: str, ranks: list[dict[str, Any]]) -> None:
    """As npu_mega_moe, and as dispatch_ffn_combine where there is nothing else.

    Uneven tokens, a captured graph for each number, ranks with none and with one; the group is known by the name that
    HCCL gave it.
    """
    for rank, said in enumerate(ranks):
        errors, fused, words = said[operator]
        assert fused == [1, 1, 1]  # for no token, for one, for more
        assert max(errors) < CLOSE
        assert [step for step, error in enumerate(errors) if error == 0.0] == [(4, 6)[rank]]
        assert "over the 2 ranks of group emulated_" in words
