"""The emulated CANN runtime: torch_npu's own operators are there, with shapes, on a machine without a device."""

import ctypes
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.npu.emulator.build import BASE
from tests.npu.emulator.wheel import needs

SITE = Path(sysconfig.get_paths()["purelib"])


def test_the_real_schemas_are_registered() -> None:
    schema = torch.ops.npu.npu_moe_init_routing_v2.default._schema
    assert schema.arguments[3].name == "offset"
    assert Path(sys.modules["torch_npu"].__file__).is_relative_to(SITE)


def test_the_real_operators_tell_their_shapes_without_running() -> None:
    with FakeTensorMode():
        x, ids = torch.empty(6, 32, dtype=torch.bfloat16), torch.empty(6, 2, dtype=torch.int32)
        rows, row_idx, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
            x, ids, expert_num=8, active_num=12, expert_tokens_num_type=1, expert_tokens_num_flag=True
        )
        assert (rows.shape, row_idx.shape, counts.shape) == ((12, 32), (12,), (8,))


def test_every_gap_is_filled_and_none_is_listed_by_hand() -> None:
    # In a process of its own: here the gaps are filled already.
    code = f"from tests.npu.emulator.wheel import needs; n = needs(Path('{SITE}')); print(*n.libraries, *n.symbols)"
    found = _python(f"from pathlib import Path; {code}").stdout.split()
    assert BASE in found
    symbols = [name for name in found if not name.endswith(".so")]
    library = ctypes.CDLL(str(Path(sys.prefix) / "emulated_cann" / BASE))
    assert len(symbols) > 100
    assert [name for name in symbols if not hasattr(library, name)] == []


def test_a_folder_without_the_wheel_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is torch-npu installed"):
        needs(tmp_path)


def test_text_that_does_not_fit_is_reported_not_cut() -> None:
    library = ctypes.CDLL(str(Path(sys.prefix) / "emulated_cann" / BASE))
    out = ctypes.create_string_buffer(8)
    size, most = ctypes.c_size_t(8), ctypes.c_size_t(7)
    assert library.snprintf_s(out, size, most, b"%s", b"1234567") == 7
    assert out.value == b"1234567"
    assert library.snprintf_s(out, size, most, b"%s", b"12345678") == -1
    assert library.strcpy_s(out, size, b"12345678") != 0


def test_an_import_that_would_have_failed_already_is_explained() -> None:
    run = _python("from tests.npu.emulator import install; install()", TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert "set TORCH_DEVICE_BACKEND_AUTOLOAD=0" in run.stderr


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    where = Path(__file__).parents[2]
    return subprocess.run(
        command, check=False, cwd=where, env={**os.environ, **environment}, capture_output=True, text=True
    )
