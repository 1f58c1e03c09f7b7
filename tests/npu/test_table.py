"""docs/ascend-sequences.md says what is."""

from tests.npu.mx_sequences import CASES as MX_CASES
from tests.npu.quant_sequences import CASES
from tests.npu.sequences import SEQUENCES
from tests.npu.table import PAGE, on_page, rendered


def test_the_page_is_up_to_date() -> None:
    assert on_page(PAGE.read_text()) == rendered(), "run: python -m tests.npu.table"


def test_every_sequence_is_on_the_page() -> None:
    text = on_page(PAGE.read_text())
    assert not [name for name in (*SEQUENCES, *CASES, *MX_CASES) if f"`{name}`" not in text]
