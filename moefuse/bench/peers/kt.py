"""kt-kernel's BF16 experts.

In: a `Layer`. Out: a call of its C++ layer, AMX or AVX-512 as the package chooses, with weights packed by it. Its
Python wrapper reads weights from files and copies through pinned memory: the C++ object behind it is used as that does.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moefuse.bench.shapes import Layer, Run

PACKAGE = "kt_kernel"
_MOST_TOKENS = 4096
"""Its buffers are made for so many."""


def absent() -> str:
    """Why it can't run here, "" when it can."""
    try:
        return "" if _kind() is not None else "it has no BF16 experts for this CPU"
    except Exception as error:  # what an extension of C++ raises while it loads is anything
        return f"it can't be imported: {type(error).__name__}: {error}"


def limit(layer: Layer, tokens: int) -> str:
    """BF16 SwiGLU without biases."""
    if layer.dtype != torch.bfloat16:
        return f"only bfloat16, not {layer.dtype}"
    if layer.shape.oai:
        return "no biases"
    return f"at most {_MOST_TOKENS} tokens" if tokens > _MOST_TOKENS else ""


def build(layer: Layer) -> Run:
    """Its layer, with as many threads of its own as torch has."""
    with _stdout_to_stderr():  # it greets
        return _built(layer)


def _built(layer: Layer) -> Run:
    shape, extension = layer.shape, importlib.import_module("kt_kernel.kt_kernel_ext")
    pool = _pool(torch.get_num_threads())
    none, order = torch.zeros(shape.experts, dtype=torch.bool), torch.arange(shape.experts)
    config = extension.moe.MOEConfig(
        shape.experts, shape.top_k, shape.hidden, shape.intermediate, none.data_ptr()
    )
    config.layer_idx, config.pool, config.max_len = 0, pool.backend_, _MOST_TOKENS
    gate_up, down = layer.out_features_first()
    config.gate_projs = [[weight.data_ptr() for weight in gate_up]]
    config.up_projs = [[weight[shape.intermediate :].data_ptr() for weight in gate_up]]
    config.down_projs = [[weight.data_ptr() for weight in down]]
    config.gate_scales = config.up_scales = config.down_scales = [[0] * shape.experts]
    kept = (_kind()(config), none)  # it reads the mask through its pointer
    pool.submit(kept[0].load_weights_task(order.data_ptr()))
    pool.sync()

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y, ids, weights = torch.empty_like(x), ids.contiguous(), weights.float()
        count = torch.tensor([x.shape[0]], dtype=torch.int32)
        pointers = (ids.data_ptr(), weights.data_ptr(), x.data_ptr(), y.data_ptr())
        pool.submit(kept[0].forward_task(count.data_ptr(), shape.top_k, *pointers, False))
        pool.sync()
        return y

    return run


def _kind() -> Any:
    """The class of its layer for this CPU, None where it has none."""
    moe = importlib.import_module(PACKAGE).kt_kernel_ext.moe
    return getattr(moe, "AMXBF16_MOE", None) or getattr(moe, "AVX2BF16_MOE", None)


@functools.cache
def _pool(threads: int) -> Any:
    """Its pool of threads; kept to the end, it says goodbye on stdout."""
    extension = importlib.import_module("kt_kernel.kt_kernel_ext")
    config = extension.WorkerPoolConfig()
    config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
    pool = extension.CPUInfer(config)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    return pool


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """What C++ prints goes to stderr: stdout has the table."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(before, 1)
        os.close(before)
