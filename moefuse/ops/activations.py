"""The activations between the two expert GEMMs, by name.

In: the name in `mega_moe(activation=...)` and its parameters. Out: the formula in torch ops. `g` is the gate
part (or the whole of a plain expert), `u` the up part (None for a plain expert); any float dtype, any shape.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moefuse.ops import program as programs

Function = Callable[..., Tensor]

CUSTOM = "custom"
"""The activation whose formula is the text in `activation_program` (see program.py)."""


@dataclass(frozen=True)
class Activation:
    """One activation: `function(g, u, *params)` when gated, `function(g, *params)` otherwise.

    params: names of the parameters, in order; the last `optional` of them may be left out.
    """

    name: str
    gated: bool
    formula: str
    function: Function
    params: tuple[str, ...] = ()
    optional: int = 0


def _swiglu(g: Tensor, u: Tensor, limit: float = math.inf) -> Tensor:
    if limit == math.inf:
        return F.silu(g) * u
    return F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)


def _swiglustep(g: Tensor, u: Tensor, limit: float) -> Tensor:
    return F.silu(g).clamp(max=limit) * u.clamp(-limit, limit)


def _swigluoai(g: Tensor, u: Tensor, limit: float, alpha: float, beta: float) -> Tensor:
    g = g.clamp(max=limit)
    return g * torch.sigmoid(alpha * g) * (u.clamp(-limit, limit) + beta)


def _situglu(g: Tensor, u: Tensor, beta: float, linear_beta: float) -> Tensor:
    return beta * torch.tanh(g / beta) * torch.sigmoid(g) * (linear_beta * torch.tanh(u / linear_beta))


def _quick_gelu(g: Tensor) -> Tensor:
    return g * torch.sigmoid(1.702 * g)


def _relu2(g: Tensor) -> Tensor:
    return F.relu(g).square()


_TABLE = (
    Activation(
        "swiglu", True, "silu(min(g, limit)) * clamp(u, -limit, limit)", _swiglu, ("limit",), optional=1
    ),
    Activation("swiglustep", True, "min(silu(g), limit) * clamp(u, -limit, limit)", _swiglustep, ("limit",)),
    Activation(
        "swigluoai",
        True,
        "c * sigmoid(alpha * c) * (clamp(u, -limit, limit) + beta), c = min(g, limit)",
        _swigluoai,
        ("limit", "alpha", "beta"),
    ),
    Activation(
        "situglu",
        True,
        "beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)",
        _situglu,
        ("beta", "linear_beta"),
    ),
    Activation("geglu", True, "gelu(g) * u, gelu by erf", lambda g, u: F.gelu(g) * u),
    Activation(
        "geglu_tanh", True, "gelu(g) * u, gelu by tanh", lambda g, u: F.gelu(g, approximate="tanh") * u
    ),
    Activation("quick_geglu", True, "g * sigmoid(1.702 g) * u", lambda g, u: _quick_gelu(g) * u),
    Activation("reglu", True, "relu(g) * u", lambda g, u: F.relu(g) * u),
    Activation("relu2glu", True, "relu(g)^2 * u", lambda g, u: _relu2(g) * u),
    Activation("sigmoidglu", True, "sigmoid(g) * u", lambda g, u: torch.sigmoid(g) * u),
    Activation("bilinear", True, "g * u", lambda g, u: g * u),
    Activation("silu", False, "g * sigmoid(g)", F.silu),
    Activation("gelu", False, "gelu(g) by erf", F.gelu),
    Activation("gelu_tanh", False, "gelu(g) by tanh", lambda g: F.gelu(g, approximate="tanh")),
    Activation("quick_gelu", False, "g * sigmoid(1.702 g)", _quick_gelu),
    Activation("relu", False, "max(g, 0)", F.relu),
    Activation("relu2", False, "relu(g)^2", _relu2),
    Activation("sigmoid", False, "1 / (1 + exp(-g))", torch.sigmoid),
    Activation("tanh", False, "tanh(g)", torch.tanh),
    Activation("identity", False, "g", lambda g: g),
)

ACTIVATIONS: dict[str, Activation] = {activation.name: activation for activation in _TABLE}


def check(name: str, params: Sequence[float], program: str, gated: bool) -> str:
    """Why this activation can't be used, "" when it can: unknown, wrong parameters, gate missing."""
    if name == CUSTOM:
        return _check_custom(params, program, gated)
    activation = ACTIVATIONS.get(name)
    if activation is None:
        return f"activation {name!r} is unknown; known: {', '.join([*ACTIVATIONS, CUSTOM])}"
    if program:
        return f"activation_program is only read by activation='custom', not by {name!r}"
    least, most = len(activation.params) - activation.optional, len(activation.params)
    if not least <= len(params) <= most:
        wanted = f"{most}" if least == most else f"{least} to {most}"
        names = f" ({', '.join(activation.params)})" if activation.params else ""
        return f"activation {name!r} takes {wanted} activation_params{names}, got {len(params)}"
    if activation.gated != gated:
        need = "a gate and an up part" if activation.gated else "a plain expert (gate_up='none')"
        return f"activation {name!r} needs {need}"
    return ""


def _check_custom(params: Sequence[float], program: str, gated: bool) -> str:
    if params:
        return "activation 'custom' takes no activation_params; write the numbers into activation_program"
    try:
        reads_up = programs.reads_up(program)
    except ValueError as error:
        return str(error)
    if reads_up and not gated:
        return "activation_program reads u, but gate_up='none' has no up part"
    return ""


def apply(name: str, params: Sequence[float], program: str, g: Tensor, u: Tensor | None) -> Tensor:
    """The activation of g and u, in their dtype (a custom program's result is brought back to it)."""
    if name == CUSTOM:
        return programs.evaluate(program, g, u).to(g.dtype)
    activation = ACTIVATIONS[name]
    return activation.function(g, u, *params) if activation.gated else activation.function(g, *params)
