"""With the torch_npu wheel: its real operators. Without: what needs them is left out.

`make test-npu` runs everything here; the default environment runs what moefuse's own schemas are enough for.
"""

from tests.npu.ready import WHEEL

collect_ignore = (
    ["test_table.py"]  # the page is made with moefuse's schemas: the wheel has no shape for one of its rows
    if WHEEL
    else [
        "test_device.py",
        "test_emulator.py",
        "test_hooks.py",
        "test_ranks.py",
        "test_schemas.py",
        "test_torchair.py",
    ]
)
