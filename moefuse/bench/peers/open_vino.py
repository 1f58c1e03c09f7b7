"""OpenVINO's CPU plugin.

In: a `Layer`. Out: a call of the compiled layer, spelled as optimum-intel exports it (every expert on every token,
times a matrix of routing weights): from that OpenVINO makes its own gathered matrix products. Where it didn't, it would
compute every expert in earnest; that is an error, not a figure.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn
from torch.nn import functional

from moefuse.bench.shapes import Layer, Run

PACKAGE = "openvino"
FUSED = "GatherMatmul"
_EXAMPLE_TOKENS = 2


def absent() -> str:
    """Why it can't run here, "" when it can."""
    try:
        devices = importlib.import_module(PACKAGE).Core().available_devices
    except Exception as error:  # its libraries raise what they like while they load
        return f"it can't be imported: {type(error).__name__}: {error}"
    return "" if "CPU" in devices else "it has no CPU device"


def build(layer: Layer) -> Run:
    """The layer compiled for as many threads as torch has. Raises RuntimeError where OpenVINO doesn't fuse it."""
    openvino = importlib.import_module(PACKAGE)
    shape = layer.shape
    example = (
        torch.zeros(_EXAMPLE_TOKENS, shape.hidden),
        torch.arange(shape.top_k).repeat(_EXAMPLE_TOKENS, 1),
        torch.zeros(_EXAMPLE_TOKENS, shape.top_k),
    )
    module = _Tiled(layer).eval()
    model = openvino.convert_model(module, example_input=example)
    settings = {
        "ENABLE_CPU_PINNING": False,  # the calling thread is the other contestants' too
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": _PRECISION[layer.dtype],
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    kinds = [node.get_rt_info()["layerType"].astype(str) for node in compiled.get_runtime_model().get_ops()]
    if FUSED not in kinds:
        raise RuntimeError(f"OpenVINO {openvino.__version__} computes every expert on every token here")
    kept = (compiled.create_infer_request(), module)  # its constants are the module's memory

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        given = [tensor.contiguous().numpy() for tensor in (x.float(), ids, weights.float())]
        request = kept[0]
        for i, array in enumerate(given):  # the request doesn't keep them alive
            request.set_input_tensor(i, openvino.Tensor(array, shared_memory=True))
        request.infer()
        return torch.tensor(request.get_output_tensor(0).data, dtype=x.dtype)

    return run


_PRECISION = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


class _Tiled(nn.Module):
    """The layer over float32 rows; weights as they lie where their output features come first."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.shape = layer.shape
        self.gate_up, self.down = (nn.Parameter(w, requires_grad=False) for w in layer.out_features_first())
        names = ("gate_up_proj_bias", "down_proj_bias") if self.shape.oai else ()
        self.biases = nn.ParameterList(layer.weights(*names))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        experts, hidden = self.shape.experts, self.shape.hidden
        scores = torch.zeros((x.shape[0], experts)).scatter(1, ids, weights)
        rows = x.reshape(-1, hidden).repeat(experts, 1).view(experts, -1, hidden)
        y = (self._oai(rows) if self.shape.oai else self._swiglu(rows)).view(experts, 1, -1, hidden)
        y = y * scores.transpose(0, 1).view(experts, 1, -1)[..., None]
        return y.sum(0).view(-1, hidden)

    def _swiglu(self, rows: Tensor) -> Tensor:
        gate, up = (half.float().transpose(1, 2) for half in self.gate_up.chunk(2, 1))
        hidden = functional.silu(torch.matmul(rows, gate)) * torch.matmul(rows, up)
        return torch.matmul(hidden, self.down.float().transpose(1, 2))

    def _oai(self, rows: Tensor) -> Tensor:
        b1, b2 = (bias.float()[:, None, :] for bias in self.biases.parameters())
        gate_up = torch.matmul(rows, self.gate_up.float().transpose(1, 2)) + b1
        gate, up = gate_up[..., ::2].clamp(max=7.0), gate_up[..., 1::2].clamp(-7.0, 7.0)
        hidden = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
        return torch.matmul(hidden, self.down.float().transpose(1, 2)) + b2
