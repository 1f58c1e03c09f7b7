"""Set-up of the fuzz tests: how much to try, and no log of fake kernels that refuse a mutant's arguments."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Refused arguments are daily business here; torch would log a stack trace for each."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def fuzz_examples(pytestconfig: pytest.Config) -> int | None:
    """The value of `--fuzz-examples`, None in an ordinary run."""
    count: int | None = pytestconfig.getoption("--fuzz-examples")
    return count
