"""Imported for its effect: with the torch_npu wheel, its real operators are there, on the emulated CANN runtime.

`conftest.py` imports it; a spawned process, which has no conftest, gets it from the module that it runs.
"""

import importlib.util

WHEEL = importlib.util.find_spec("torch_npu") is not None

if WHEEL:
    from tests.npu.emulator import install

    install()
