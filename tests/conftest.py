"""Set-up shared by all tests: no network, fresh compile caches, seeds, a clean Dynamo for each test."""

import atexit
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator

# Read by torch, transformers and Inductor when they are imported, so set before any of them is.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
# One compiler per test process: a worker pool costs seconds to start and the tests' kernels are few.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Fresh, so that no kernel of an older checkout can hide a fault; one for all worker processes, which
    # inherit the variable, so that none compiles what another did.
    _cache = tempfile.mkdtemp(prefix="moefuse-inductor-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache

import hypothesis
import pytest
import torch

FUZZ_EXAMPLES = 50


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--fuzz-examples N` runs the property tests longer, on new examples each time."""
    parser.addoption(
        "--fuzz-examples",
        type=int,
        default=None,
        help=f"random examples per property test (default: the same {FUZZ_EXAMPLES} in every run)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Load the property tests' profile; a test that sets max_examples itself isn't reached by the option."""
    examples = config.getoption("--fuzz-examples")
    hypothesis.settings.register_profile(
        "moefuse",
        max_examples=FUZZ_EXAMPLES if examples is None else examples,
        # CI must not fail on a change that didn't cause the failure.
        derandomize=examples is None,
        # A first example compiles or traces: seconds, then milliseconds.
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("moefuse")
    # Tests run side by side, one process per core; and one thread sums in one order.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """Same random numbers whichever tests ran before; no compiled code, guards or counters left over."""
    random.seed(0)
    torch.manual_seed(0)
    yield
    # Importing Dynamo takes a second: a test that didn't has nothing to reset.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
