"""Random argument plans into libraries that note what arrives in each slot; `test_call.py` runs it under ASan.

In: the runtime library and the folder of the vendor packages. Out: a line, if no slot differs.
"""

import ctypes
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.operands import Operands
from moefuse.ops.options import Options
from moefuse.ops.quantised import Quantisation
from moefuse.targets.npu import Identified, MegaMoe, NpuContext, Sizes, find, formats
from moefuse.targets.npu.abi import DEFAULTS, REQUIRED
from moefuse.targets.npu.arguments import arguments
from moefuse.targets.npu.call import Buffer
from moefuse.targets.npu.calls import CCall
from moefuse.targets.npu.library import Library
from moefuse.targets.npu.machine import Machine
from tests.targets.npu.test_call import KNOWN, full, live, notes, shown
from tests.targets.npu.vendor import PROTOTYPES, parameters, plain_name

NUMBERS = {torch.bfloat16: 27, torch.int8: 2, torch.int32: 3, torch.float32: 0, torch.int64: 10}


def any_values(library: Library, revision: str, runtime: ctypes.CDLL) -> None:
    """Optional arguments left out or given, lists of any length."""
    call = MegaMoe(library, revision, runtime, lambda size: 1)
    for turn in range(100):
        values = full(revision, random.randrange(1, 10**6))
        for name in [n for n in values if n not in REQUIRED and n != "activation_params"]:
            if random.random() < 0.5:
                del values[name]
            elif isinstance(values[name], list):
                values[name] = values[name] * random.randrange(1, 40)
        call(values, stream=turn)
        noted = notes(library.handle)
        for _, name in parameters(PROTOTYPES[revision]):
            plain = plain_name(name)
            key = "activation_params" if plain == "activation_clamp" else plain
            wanted = values.get(key, DEFAULTS.get(key))
            assert noted[name] == ("null" if wanted is None else shown(wanted)), (revision, name)


def layer(scheme: str) -> tuple[Operands, Options, Quantisation | None]:
    """One rank's part of a layer: a tensor per expert or stacked ones, scales and biases in any dtype."""
    experts, hidden, inner, tokens = (
        random.randrange(1, 6),
        32 * random.randrange(1, 3),
        32,
        random.randrange(5),
    )
    stacked = random.random() < 0.5
    packed = 8 if scheme == "w4a8" else 1
    dtype = {"none": torch.bfloat16, "w8a8": torch.int8, "w4a8": torch.int32}[scheme]

    def own(tensor: Tensor) -> list[Tensor]:
        return [tensor] if stacked else [one.clone() for one in tensor]

    def vectors(width: int, dtypes: tuple[torch.dtype, ...]) -> list[Tensor]:
        return own(torch.zeros(experts, width, dtype=random.choice(dtypes)))

    weights = [
        own(torch.zeros(experts, inputs, outputs // packed, dtype=dtype))
        for inputs, outputs in ((hidden, 2 * inner), (inner, hidden))
    ]
    widths = (2 * inner, hidden)
    scales = [vectors(width, (torch.float32, torch.bfloat16, torch.int64)) for width in widths]
    biases = [vectors(width, (torch.float32, torch.bfloat16)) for width in widths]
    x, ids = torch.zeros(tokens, hidden, dtype=torch.bfloat16), torch.zeros(tokens, 1, dtype=torch.int64)
    assists = biases if scheme == "w4a8" else ((), ())
    operands = Operands(x, ids, torch.zeros(tokens, 1), *weights, *assists)
    options = Options(2 * experts, 2, transpose_weight1=False, transpose_weight2=False)
    return operands, options, None if scheme == "none" else Quantisation(scheme, *scales)


def whole_layers(library: Library, revision: str, runtime: ctypes.CDLL) -> None:
    """From the operator's operands to the slots: the lists of quantised and of plain layers."""
    machine = Machine("Ascend910_9382", library, Identified(revision, ()), None, runtime)
    call = CCall(machine, lambda _: 0)
    for _ in range(40):
        scheme = random.choice(("none", "w8a8", "w4a8"))
        operands, options, quantisation = layer(scheme)
        sizes = Sizes(2, options.num_experts, 1, operands.x.shape[1], 8, scheme=scheme)
        context = NpuContext(
            torch.zeros(4, dtype=torch.int32), sizes, 1 << 20, uniform_tokens=random.random() < 0.5
        )
        given = arguments(context, operands, options, "A3", quantisation, random.random() < 0.5)
        call(given)
        noted = {plain_name(name): text for name, text in notes(library.handle).items()}
        lists = {name: text for name, text in noted.items() if name[-1] in "12" and "shared" not in name}
        for name, text in lists.items():
            wanted = [described(name, tensor) for tensor in given.lists.get(name, ())]
            assert text == (",".join(map(shown, wanted)) if wanted else "null"), (revision, scheme, name)
            assert len(wanted) in (0, options.local_experts), (revision, scheme, name)
        quantised = ("2", "2") if quantisation else ("0", "-1")
        assert (noted["dispatch_quant_mode"], noted["dispatch_quant_out_dtype"]) == quantised


def described(name: str, tensor: Tensor) -> Buffer:
    tiles = tensor.dtype in (torch.int8, torch.int32) and name.startswith("weight")
    own = {"format": 29, "storage": (tensor.numel(),)} if tiles else {}
    shape: Any = tuple(tensor.shape)
    return Buffer(tensor.data_ptr(), shape, tensor.stride(), NUMBERS[tensor.dtype], **own)


def main(runtime_path: str, folder: Path) -> None:
    random.seed(0)
    formats.memory_format = lambda t: "FRACTAL_NZ" if t.dtype in (torch.int8, torch.int32) else "ND"
    runtime = ctypes.CDLL(runtime_path)
    for revision in KNOWN:
        library = find({"ASCEND_CUSTOM_OPP_PATH": str(folder / revision)})
        any_values(library, revision, runtime)
        if revision != "R0":  # without biases, and with other names: no row of the policy has it
            whole_layers(library, revision, runtime)
    assert live(runtime) == 0
    print("no slot differs")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
