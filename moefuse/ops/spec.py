"""What one MoE layer computes, as compile-time facts.

In: nothing. Out: `MoeSpec`, the value that the lifter fills from a graph, that policies and targets
judge, and that the `moefuse::mega_moe` node carries as arguments.

A spec holds only facts that are equal on every rank and for every batch: never a token count. A verdict
made from a spec is therefore rank-uniform by its type.

The layer, for token t with slots k (T tokens, K slots per token, E experts, H hidden, I intermediate,
O output features)::

    e        = topk_ids[t, k]                       # out of 0..E+Z-1: the slot contributes nothing
    r        = topk_weights[t, k]
    h1       = W1[e] @ (r * x[t] if "input" else x[t]) + b1[e]
    g, u     = gate and up part of h1               # layout `gate_up`; not gated: g = h1
    a        = activation(g, u) * (r if "mid" else 1)
    h2       = row_norm(W2[e] @ a + b2[e])
    y[t]     = sum over k of (r * h2 if "output" else h2)

A slot with an id of E..E+Z-1 (Z = num_identity_experts) chose an identity expert: it adds r * x[t]. row_norm, with
s the row scale (one value per feature, shared or per expert; 1 where there is none)::

    "none"           h
    "rms"            h * rsqrt(mean(h^2) + eps) * s
    "scaled_rms"     c * rsqrt(mean(c^2) + eps), c = s * h

The sum runs in float32 (float64 for float64 layers) and is rounded once, to `output_dtype`. Each of its terms is
rounded to `product_dtype` first where the model does that (None: no rounding): a model that multiplies in
bfloat16 gets the numbers it had. The activation runs in `activation_dtype` where the model casts up for it, in the
dtype of x otherwise (None). GEMMs run in the dtype of x; weights stored in another float dtype are cast, one expert's
at a time. A row norm runs in the dtype of the sum; its result, and c above, are rounded to the dtype of x.

Quantised experts (`quant`) are in quantised.py.
"""

from dataclasses import dataclass
from typing import Literal

import torch

GateUp = Literal["concat", "interleaved", "concat_swapped", "interleaved_swapped", "separate", "none"]
"""Where the gate (g) and the up part (u) of the first expert GEMM's N rows lie.

concat: g then u; interleaved: g0 u0 g1 u1 ...; *_swapped: the same with u first; separate: two weight
tensors, gate then up; none: a plain expert without gate (N = I).
"""

WeightPosition = Literal["output", "mid", "input"]
"""Where the routing weight multiplies: after the second GEMM, between the GEMMs, or on the token row."""

Quant = Literal["none", "w8a8", "w4a8", "w4a4", "w8a16", "w4a16", "mxfp8", "mxfp4", "mxfp4a8", "mxfp4a16"]
"""How the expert GEMMs are quantised: bits of the weights, then of the rows (16: rows are floats); mx: by blocks."""

RowNorm = Literal["none", "rms", "scaled_rms"]
"""How each row of the second GEMM is normalised over its features: see the module text."""


@dataclass(frozen=True)
class MoeSpec:
    """One MoE layer. See the module text for the formula.

    x_dtype is that of the token rows and of the GEMMs, expert_dtype that in which the weights are stored.

    Weight tensors are described as they lie in memory. `transpose_weight1` is True when the first weight is
    stored [E, N, H] (out-features first, as nn.Linear), False for [E, H, N]; `transpose_weight2` is True for
    [E, O, I], False for [E, I, O]. The names follow the public npu_mega_moe operator. `weight_form` tells one
    stacked 3-D tensor per role from a list of per-expert 2-D tensors.

    Quantised experts: hidden_dtype and rows_dtype are what the first and the second GEMM are rounded to (None: the
    dtype of x), weight_scale_groups into how many groups of inputs, each with a scale, both weights are divided.
    """

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    out_features: int
    device: str
    x_dtype: torch.dtype
    expert_dtype: torch.dtype
    router_dtype: torch.dtype
    output_dtype: torch.dtype
    product_dtype: torch.dtype | None = None
    gate_up: GateUp = "concat"
    transpose_weight1: bool = True
    transpose_weight2: bool = True
    weight_form: Literal["stacked", "list"] = "stacked"
    has_bias1: bool = False
    has_bias2: bool = False
    activation: str = "swiglu"
    activation_params: tuple[float, ...] = ()
    activation_program: str = ""
    activation_dtype: torch.dtype | None = None
    quant: Quant = "none"
    hidden_dtype: torch.dtype | None = None
    rows_dtype: torch.dtype | None = None
    has_weight_offsets: bool = False
    weight_scale_groups: tuple[int, int] = (1, 1)
    weight_position: WeightPosition = "output"
    row_norm: RowNorm = "none"
    row_norm_eps: float = 0.0
    has_row_scale: bool = False
    num_identity_experts: int = 0
    has_router_weight: bool = True
    ids_checked: bool = False
    ep_world_size: int = 1
    training: bool = False

    @property
    def gated(self) -> bool:
        """True when the first GEMM has a gate and an up part."""
        return self.gate_up != "none"

    @property
    def weight1_rows(self) -> int:
        """N of the first GEMM over all of its tensors: 2 I when gated, I otherwise."""
        return 2 * self.intermediate if self.gated else self.intermediate

    @property
    def weight_bytes(self) -> int:
        """Bytes of the expert weights (both GEMMs, without biases)."""
        per_expert = self.weight1_rows * self.hidden + self.intermediate * self.out_features
        return self.num_experts * per_expert * self.expert_dtype.itemsize // self.values_per_element

    @property
    def values_per_element(self) -> int:
        """How many weights one element of a weight tensor holds: eight int4 values an int32, two float4 a byte."""
        if self.quant.startswith("mxfp4"):
            return 2
        return 8 if self.quant.startswith("w4") and self.expert_dtype == torch.int32 else 1

    def describe(self) -> str:
        """The layer in plain words, one line: `128 experts, top-8, 2048 -> 768 (swiglu) -> 2048, bfloat16`."""
        dtype = str(self.expert_dtype).removeprefix("torch.")
        params = ",".join(f"{p:g}" for p in self.activation_params)
        activation = f"{self.activation}({params})" if params else self.activation
        words = [
            f"{self.num_experts} experts",
            f"top-{self.top_k}",
            f"{self.hidden} -> {self.intermediate} ({activation}) -> {self.out_features}",
            dtype,
        ]
        if self.gate_up not in ("concat", "none"):
            words.append(self.gate_up.replace("_", " "))
        if self.quant != "none":
            words.append(self.quant)
        elif self.expert_dtype != self.x_dtype:
            words.append(f"computed in {str(self.x_dtype).removeprefix('torch.')}")
        if self.has_bias1 or self.has_bias2:
            words.append("bias")
        if self.row_norm != "none":
            words.append("RMS norm of each expert's rows")
        if self.num_identity_experts:
            words.append(f"{self.num_identity_experts} identity experts")
        if not self.has_router_weight:
            words.append("no routing weight")
        elif self.weight_position != "output":
            words.append(
                f"routing weight on the {'input' if self.weight_position == 'input' else 'activation'}"
            )
        if self.weight_form == "list":
            words.append("per-expert tensors")
        return ", ".join(words)
