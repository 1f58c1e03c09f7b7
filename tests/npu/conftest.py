"""With the torch_npu wheel: its real operators, on the emulated CANN runtime. Without: what needs them is left out.

`make test-npu` runs everything here; the default environment runs what moefuse's own schemas are enough for.
"""

import importlib.util

if importlib.util.find_spec("torch_npu") is None:
    collect_ignore = [
        "test_device.py",
        "test_emulator.py",
        "test_hooks.py",
        "test_schemas.py",
        "test_torchair.py",
    ]
else:
    from tests.npu.emulator import install

    install()
