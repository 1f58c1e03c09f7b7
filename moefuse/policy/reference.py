"""What the reference target, plain torch, can run: everything that the operator can express on one rank.

In: nothing. Out: `CHECKS`, the parts that other targets build on included.
"""

import torch

from moefuse.ops import activations
from moefuse.ops.options import FLOATS, GATE_UPS, ROW_NORMS, WEIGHT_POSITIONS
from moefuse.ops.quantised import BLOCKS, SCHEMES
from moefuse.ops.spec import MoeSpec
from moefuse.policy.check import Check


def _activation(spec: MoeSpec) -> str:
    """The activation is unknown, its parameters don't fit, or its program isn't pointwise: the text says which."""
    return activations.check(spec.activation, spec.activation_params, spec.activation_program, spec.gated)


def _gradient(spec: MoeSpec) -> str:
    """Quantised experts have none; a custom program may cut it (a comparison, integers): found by running it."""
    if spec.training and spec.quant != "none":
        return f"training needs a gradient, and experts quantised as {spec.quant} have none"
    if not spec.training or spec.activation != activations.CUSTOM or _activation(spec):
        return ""
    g = torch.ones(1, requires_grad=True)
    u = torch.ones(1, requires_grad=True) if spec.gated else None
    with torch.enable_grad():
        try:
            a = activations.apply(spec.activation, (), spec.activation_program, g, u)
            torch.autograd.grad(a, g)
        except RuntimeError as error:
            return f"training needs a gradient that activation_program doesn't give ({error})"
    return ""


SIZES = Check(
    "sizes",
    ("num_experts", "top_k", "hidden", "intermediate", "out_features"),
    lambda s: min(s.num_experts, s.top_k, s.hidden, s.intermediate, s.out_features) >= 1,
    "a size is below 1: {num_experts} experts, top-{top_k}, {hidden} -> {intermediate} -> {out_features}",
)
DTYPES = Check(
    "dtypes",
    ("x_dtype", "expert_dtype", "output_dtype"),
    lambda s: s.x_dtype in FLOATS and s.output_dtype in FLOATS,
    "x is {x_dtype} and the output {output_dtype}; only float16, bfloat16, float32 and float64 can be computed",
)
_STORED: dict[str, tuple[torch.dtype, ...]] = {"none": FLOATS} | {
    name: own for name, (own, _) in BLOCKS.items()
}
EXPERT_DTYPE = Check(
    "expert_dtype",
    ("expert_dtype", "quant"),
    lambda s: s.expert_dtype in _STORED.get(s.quant, (torch.int8, torch.int32)),
    "the experts are {expert_dtype}, quantised as {quant}; floats and the schemes of mega_moe.quant can be computed",
)
QUANT = Check(
    "quant",
    ("quant",),
    lambda s: s.quant in ("none", *SCHEMES),
    "the experts are quantised as {quant!r}, which is unknown",
)
ROUTER_DTYPE = Check(
    "router_dtype",
    ("router_dtype",),
    lambda s: s.router_dtype in FLOATS,
    "the routing weights are {router_dtype}, not a float dtype",
)
LAYOUT = Check(
    "layout",
    ("gate_up", "weight_position", "row_norm"),
    lambda s: s.gate_up in GATE_UPS and s.weight_position in WEIGHT_POSITIONS and s.row_norm in ROW_NORMS,
    "gate_up={gate_up!r}, weight_position={weight_position!r} or row_norm={row_norm!r} is unknown",
)
ACTIVATION = Check(
    "activation", ("activation", "activation_params", "activation_program", "gate_up"), _activation
)
TOP_K = Check(
    "top_k",
    ("top_k", "num_experts", "num_identity_experts", "ids_checked"),
    lambda s: s.top_k <= s.num_experts + s.num_identity_experts or not s.ids_checked,
    "top-{top_k} of {num_experts} experts: a token would go to one expert twice",
)
IDENTITY = Check(
    "identity",
    ("num_identity_experts", "hidden", "out_features"),
    lambda s: s.num_identity_experts == 0 or s.hidden == s.out_features,
    "{num_identity_experts} identity experts return x of {hidden} features, the output has {out_features}",
)
ONE_RANK = Check(
    "ep_world_size",
    ("ep_world_size",),
    lambda s: s.ep_world_size == 1,
    "the experts are spread over {ep_world_size} ranks and this target doesn't communicate",
)
GRADIENT = Check("training", ("training", "activation", "activation_program", "gate_up", "quant"), _gradient)

CHECKS = (
    SIZES,
    DTYPES,
    QUANT,
    EXPERT_DTYPE,
    ROUTER_DTYPE,
    LAYOUT,
    ACTIVATION,
    TOP_K,
    IDENTITY,
    ONE_RANK,
    GRADIENT,
)
