"""A pretended device: the graph compilers of torch_npu work to their end, the graphs run on CPU tensors.

In: the emulated libraries, which have no device. Out: `pretended()`, inside which torch_npu answers what its compilers
ask of a device. Nothing is captured into device graphs, and GE compiles nothing: where a compiler would hand over its
graph to run it, it must be told to run the FX graph (`force_eager`, `debug.run_eagerly`).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


@contextmanager
def pretended(soc: str = "Ascend910_9382") -> Iterator[None]:
    """soc: the name of the pretended device."""
    import torch_npu

    stream = SimpleNamespace(stream_id=0, device_index=0, device_type=0, npu_stream=0)
    answers: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "Stream": lambda *_, **__: stream,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda *_: stream,
        "current_device": lambda: 0,
        "synchronize": lambda *_: None,
        "get_device_name": lambda *_: soc,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            for module in {id(m): m for m in (torch_npu.npu, torch.npu)}.values():
                stack.enter_context(mock.patch.object(module, name, answer))
        yield


@contextmanager
def pretended_engine() -> Iterator[None]:
    """GE accepts every operator and compiles nothing: torchair's "max-autotune" works up to its graph."""
    import torchair

    converter = torchair._ge_concrete_graph.fx2ge_converter
    compat = torchair._ge_concrete_graph.compat_ir
    with (
        mock.patch.object(converter, "initialize_graph_engine", return_value=None),
        mock.patch.object(compat, "is_cann_compat", return_value=""),
    ):
        yield
