"""An MoE layer written as loops over Python floats, and random layers in every layout: the tests' own oracle."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

SIGMOID = lambda v: 1 / (1 + math.exp(-v)) if v > -700 else 0.0  # noqa: E731
SILU = lambda v: v * SIGMOID(v)  # noqa: E731
GELU = lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2)))  # noqa: E731
GELU_TANH = lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))  # noqa: E731
CLAMP = lambda v, low, high: min(max(v, low), high)  # noqa: E731

GATED = {
    ("swiglu", ()): lambda g, u: SILU(g) * u,
    ("swiglu", (0.5,)): lambda g, u: SILU(min(g, 0.5)) * CLAMP(u, -0.5, 0.5),
    ("swiglustep", (0.3,)): lambda g, u: min(SILU(g), 0.3) * CLAMP(u, -0.3, 0.3),
    ("swigluoai", (0.7, 1.702, 1.0)): lambda g, u: (
        min(g, 0.7) * SIGMOID(1.702 * min(g, 0.7)) * (CLAMP(u, -0.7, 0.7) + 1)
    ),
    ("situglu", (0.6, 1.3)): lambda g, u: 0.6 * math.tanh(g / 0.6) * SIGMOID(g) * 1.3 * math.tanh(u / 1.3),
    ("geglu", ()): lambda g, u: GELU(g) * u,
    ("geglu_tanh", ()): lambda g, u: GELU_TANH(g) * u,
    ("quick_geglu", ()): lambda g, u: g * SIGMOID(1.702 * g) * u,
    ("reglu", ()): lambda g, u: max(g, 0) * u,
    ("relu2glu", ()): lambda g, u: max(g, 0) ** 2 * u,
    ("sigmoidglu", ()): lambda g, u: SIGMOID(g) * u,
    ("bilinear", ()): lambda g, u: g * u,
}
PLAIN = {
    ("silu", ()): SILU,
    ("gelu", ()): GELU,
    ("gelu_tanh", ()): GELU_TANH,
    ("quick_gelu", ()): lambda g: g * SIGMOID(1.702 * g),
    ("relu", ()): lambda g: max(g, 0),
    ("relu2", ()): lambda g: max(g, 0) ** 2,
    ("sigmoid", ()): SIGMOID,
    ("tanh", ()): math.tanh,
    ("identity", ()): lambda g: g,
}


@dataclass
class Layer:
    """A random layer: plain float64 facts of the layer, and the same as arguments of the operator."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gate: torch.Tensor  # [E, I, H]
    up: torch.Tensor | None
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down: torch.Tensor  # [E, O, I]
    down_bias: torch.Tensor | None
    activation: tuple[str, tuple[float, ...]]
    position: str
    norm: tuple[str, float] = ("none", 0.0)
    scale: torch.Tensor | None = None  # [O] or [E, O]
    identities: int = 0
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def call(self, target: str) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.moefuse.mega_moe(*self.args, **self.kwargs, target=target)

    def loop(self) -> tuple[torch.Tensor, list[int]]:
        """y [T, O] float64 and the slots per expert."""
        experts, out = self.down.shape[0], self.down.shape[1]
        y = torch.zeros(self.x.shape[0], out, dtype=torch.float64)
        counts = [0] * experts
        for t, ids in enumerate(self.ids.tolist()):
            for k, e in enumerate(ids):
                if experts <= e < experts + self.identities:
                    y[t] += self.x[t].double() * float(self.weights[t, k])
                if not 0 <= e < experts:
                    continue
                counts[e] += 1
                y[t] += self._slot(t, e, float(self.weights[t, k]))
        return y, counts

    def _slot(self, t: int, e: int, r: float) -> torch.Tensor:
        row = self.x[t].double() * (r if self.position == "input" else 1)
        g = self.gate[e] @ row + (0 if self.gate_bias is None else self.gate_bias[e])
        if self.up is None:
            a = [PLAIN[self.activation](v) for v in g.tolist()]
        else:
            u = self.up[e] @ row + (0 if self.up_bias is None else self.up_bias[e])
            a = [GATED[self.activation](v, w) for v, w in zip(g.tolist(), u.tolist(), strict=True)]
        rows = torch.tensor(a, dtype=torch.float64) * (r if self.position == "mid" else 1)
        h = self.down[e] @ rows + (0 if self.down_bias is None else self.down_bias[e])
        h = self._normed(h, e)
        return h * (r if self.position == "output" else 1)

    def _normed(self, h: torch.Tensor, e: int) -> torch.Tensor:
        kind, eps = self.norm
        if kind == "none":
            return h
        s = [1.0] * len(h) if self.scale is None else (self.scale if self.scale.dim() == 1 else self.scale[e])
        scales = [float(v) for v in s]
        values = (
            [v * w for v, w in zip(h.tolist(), scales, strict=True)] if kind == "scaled_rms" else h.tolist()
        )
        root = math.sqrt(sum(v * v for v in values) / len(values) + eps)
        after = [1.0] * len(values) if kind == "scaled_rms" else scales
        return torch.tensor([v / root * w for v, w in zip(values, after, strict=True)], dtype=torch.float64)


def make_layer(
    seed: int,
    *,
    tokens: int = 5,
    top_k: int = 2,
    experts: int = 4,
    hidden: int = 6,
    inner: int = 4,
    out: int = 5,
    dtype: torch.dtype = torch.float32,
    router_dtype: torch.dtype = torch.float32,
    ids_dtype: torch.dtype = torch.int64,
    output_dtype: torch.dtype | None = None,
    gate_up: str = "concat",
    transposed: tuple[bool, bool] = (True, True),
    form: str = "stacked",
    bias: tuple[bool, bool] = (False, False),
    activation: tuple[str, tuple[float, ...]] = ("swiglu", ()),
    position: str = "output",
    ids: str = "distinct",
    norm: tuple[str, float] = ("none", 0.0),
    scale: str = "none",
    identities: int = 0,
    weight_dtype: torch.dtype | None = None,
) -> Layer:
    rng = torch.Generator().manual_seed(seed)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=rng, dtype=torch.float64) * scale).to(weight_dtype or dtype)

    x = randn(tokens, hidden).to(dtype)
    if ids == "distinct":
        topk = torch.rand(tokens, experts + identities, generator=rng).argsort(1)[:, :top_k]
    elif ids == "one":
        topk = torch.full((tokens, top_k), experts - 1)
    else:  # repeated and out of range on both sides
        topk = torch.randint(-2, experts + identities + 2, (tokens, top_k), generator=rng)
    weights = torch.rand(tokens, top_k, generator=rng, dtype=torch.float64).to(router_dtype)
    gated = gate_up != "none"
    gate, down = (
        randn(experts, inner, hidden, scale=hidden**-0.5),
        randn(experts, out, inner, scale=inner**-0.5),
    )
    up = randn(experts, inner, hidden, scale=hidden**-0.5) if gated else None
    gate_bias = randn(experts, inner) if bias[0] else None
    up_bias = randn(experts, inner) if bias[0] and gated else None
    down_bias = randn(experts, out) if bias[1] else None

    row_scale = {
        "none": None,
        "shared": lambda: 1 + randn(out, scale=0.3).to(router_dtype),
        "own": lambda: 1 + randn(experts, out, scale=0.3).to(router_dtype),
    }[scale]
    row_scale = None if row_scale is None else row_scale()

    weight1 = [_lay(w, transposed[0], form) for w in _join(gate, up, gate_up)]
    weight2 = [_lay(down, transposed[1], form)]
    bias1 = [] if gate_bias is None else _join(gate_bias, up_bias, gate_up)
    bias2 = [] if down_bias is None else [down_bias]
    if form == "list":
        weight1, weight2, bias1, bias2 = (
            [t[e].clone() for t in ts for e in range(experts)] for ts in (weight1, weight2, bias1, bias2)
        )
    kwargs = {
        "num_experts": experts,
        "gate_up": gate_up,
        "transpose_weight1": transposed[0],
        "transpose_weight2": transposed[1],
        "activation": activation[0],
        "activation_params": list(activation[1]),
        "weight_position": position,
        "output_dtype": output_dtype,
        "num_identity_experts": identities,
    } | ({} if norm[0] == "none" else {"row_norm": norm[0], "row_norm_eps": norm[1]})
    as_double = [None if t is None else t.double() for t in (gate, up, gate_bias, up_bias, down, down_bias)]
    args = (None, x, topk.to(ids_dtype), weights, weight1, weight2, bias1, bias2)
    args += () if row_scale is None else (row_scale,)
    return Layer(
        x, topk, weights, *as_double, activation, position, norm, row_scale, identities, args, kwargs
    )


def _join(gate: torch.Tensor, up: torch.Tensor | None, gate_up: str) -> list[torch.Tensor]:
    """Gate and up rows (dim 1) as the layout wants them."""
    if up is None:
        return [gate]
    if gate_up == "separate":
        return [gate, up]
    first, second = (up, gate) if gate_up.endswith("_swapped") else (gate, up)
    if gate_up.startswith("interleaved"):
        return [torch.stack((first, second), 2).flatten(1, 2)]
    return [torch.cat((first, second), 1)]


def _lay(weight: torch.Tensor, transposed: bool, form: str) -> torch.Tensor:
    """[E, N, K] as it is or [E, K, N]; "strided" has gaps between rows, "view" is a transposed view."""
    weight = weight if transposed else weight.transpose(1, 2)
    if form == "strided":
        wide = torch.full(
            (weight.shape[0], weight.shape[1] + 1, weight.shape[2] + 3), torch.nan, dtype=weight.dtype
        )
        inside = wide[:, 1:, 1:-2]
        return inside.copy_(weight)
    if form == "view":
        return weight.transpose(1, 2).contiguous().transpose(1, 2)
    return weight.contiguous()


@st.composite
def layers(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> Layer:
    """Random layers: sizes, layouts, dtypes, strides, ids."""
    gate_up = draw(
        st.sampled_from(
            ["concat", "interleaved", "concat_swapped", "interleaved_swapped", "separate", "none"]
        )
    )
    dtype = draw(st.sampled_from(dtypes))
    experts = draw(st.integers(1, 5))
    hidden = draw(st.integers(1, 9))
    identities = draw(st.sampled_from([0, 0, 1, 3]))
    # eps keeps the rows of tiny layers, whose mean square may be near 0, from being blown up with their roundings
    norm = draw(st.sampled_from([("none", 0.0), ("none", 0.0), ("rms", 0.5), ("scaled_rms", 0.5)]))
    return make_layer(
        draw(st.integers(0, 2**20)),
        tokens=draw(st.sampled_from([0, 1, 2, 5, 13])),
        top_k=draw(st.integers(1, experts)),
        experts=experts,
        hidden=hidden,
        inner=draw(st.integers(1, 7)),
        out=hidden if identities else draw(st.integers(1, 9)),
        norm=norm,
        scale="none" if norm[0] == "none" else draw(st.sampled_from(["none", "shared", "own"])),
        identities=identities,
        weight_dtype=draw(st.sampled_from([None, None, None, *dtypes])),
        dtype=dtype,
        router_dtype=draw(st.sampled_from([dtype, torch.float32, torch.float64])),
        ids_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        output_dtype=draw(st.sampled_from([None, torch.float32, torch.bfloat16])),
        gate_up=gate_up,
        transposed=(draw(st.booleans()), draw(st.booleans())),
        form=draw(st.sampled_from(["stacked", "list", "strided", "view"])),
        bias=(draw(st.booleans()), draw(st.booleans())),
        activation=draw(st.sampled_from(list(PLAIN if gate_up == "none" else GATED))),
        position=draw(st.sampled_from(["output", "mid", "input"])),
        ids=draw(st.sampled_from(["distinct", "one", "wild"])),
    )
