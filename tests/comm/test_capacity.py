"""The one place where capacity is computed."""

import dataclasses
import itertools

import pytest
import torch

from moefuse.comm import Capacity, ContextError
from moefuse.comm.capacity import ALIGNMENT, HEADER_BYTES

GOOD = Capacity(4, 16, 3, 10, 7, 5, torch.bfloat16)


def test_sections_are_apart_aligned_and_inside() -> None:
    sections = sorted(GOOD.sections.values())
    assert sections[0].offset == HEADER_BYTES
    for section, after in itertools.pairwise(sections):
        assert section.offset + section.bytes <= after.offset
    assert all(section.offset % ALIGNMENT == 0 for section in sections)
    assert sections[-1].offset + sections[-1].bytes <= GOOD.window_bytes


def test_sizes_are_those_of_the_worst_case() -> None:
    shapes = {name: section.shape for name, section in GOOD.sections.items()}
    assert shapes == {"edges": (4, 7), "x": (5, 10), "slots": (15,), "weights": (15,), "planes": (15, 7)}
    assert GOOD.max_recv_tokens == 20
    assert GOOD.receive_bytes == 20 * 10 * 2
    wide = dataclasses.replace(GOOD, rows_dtype=torch.float32)
    assert {name: (s.dtype, s.bytes) for name, s in wide.sections.items() if name in ("x", "planes")} == {
        "x": (torch.bfloat16, 5 * 10 * 2),
        "planes": (torch.float32, 15 * 7 * 4),
    }
    double = dataclasses.replace(GOOD, dtype=torch.float64)
    assert double.sections["weights"].dtype == torch.float64  # as the sum over slots


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ep_world_size": 0}, "ep_world_size: expected a positive integer, got 0"),
        ({"ep_world_size": 3}, "num_experts: expected a multiple of ep_world_size=3, got 16"),
        ({"ep_world_size": 2048, "num_experts": 2048}, "ep_world_size: expected at most 1024"),
        ({"max_tokens_per_rank": -1}, "max_tokens_per_rank: expected a positive"),
        ({"max_tokens_per_rank": 2**30}, "max_tokens_per_rank: expected fewer than"),
        ({"top_k": True}, "top_k: expected a positive integer, got True"),
        ({"hidden": 2.0}, "hidden: expected a positive integer, got 2.0"),
        ({"rows_dtype": torch.float8_e5m2}, "rows_dtype: expected one of .*, got torch.float8_e5m2"),
        ({"dtype": torch.int8}, "dtype: expected one of .*, got torch.int8"),
    ],
    ids=str,
)
def test_errors_name_the_field(changes, words) -> None:
    with pytest.raises(ContextError, match=words):
        dataclasses.replace(GOOD, **changes)
