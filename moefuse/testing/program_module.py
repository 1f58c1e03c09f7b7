"""The plain torch module of a `Program`: one MoE layer, spelled the way the program says.

In: a `Program`. Out: `ProgramModule`, whose forward takes x (and, with given routing, ids and weights) and
returns y, followed by harmless extra outputs where the program has them.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from moefuse.testing import program_loops
from moefuse.testing.program_loops import Linear
from moefuse.testing.program_shared import SharedExpert

if TYPE_CHECKING:
    from moefuse.testing.programs import Program


class ProgramModule(torch.nn.Module):
    """Shapes: T tokens, K slots, S = T K, E experts, H hidden, I intermediate, N rows of W1."""

    def __init__(self, program: "Program") -> None:
        super().__init__()
        self.program = program
        size = program.sizes
        generator = torch.Generator().manual_seed(program.seed)

        def parameter(*shape: int, fan_in: int = 1) -> torch.nn.Parameter:
            value = torch.randn(*shape, generator=generator) / fan_in**0.5
            return torch.nn.Parameter(value.to(program.dtype), requires_grad=False)

        def expert(rows: int, columns: int) -> torch.nn.Parameter:
            shape = (rows, columns) if program.out_features_first else (columns, rows)
            return parameter(size.experts, *shape, fan_in=columns)

        self.gate = parameter(size.experts, size.hidden)
        self.score_bias = parameter(size.experts)
        self.scale = torch.nn.Parameter(parameter(size.experts).abs() + 0.5, requires_grad=False)
        rows = 2 * size.inter if program.gate_up not in ("none", "separate") else size.inter
        self.w1 = expert(rows, size.hidden)
        self.w3 = expert(rows, size.hidden) if program.gate_up == "separate" else None
        self.w2 = expert(size.hidden, size.inter)
        self.b1 = parameter(size.experts, rows) if program.bias else None
        self.b3 = parameter(size.experts, rows) if program.bias and program.gate_up == "separate" else None
        self.b2 = parameter(size.experts, size.hidden) if program.bias else None
        self.norm_scale = parameter(size.hidden) if program.norm != "none" else None
        self.shared = SharedExpert(program, parameter) if program.shared != "none" else None
        self._noise = random.Random()

    def forward(
        self, x: Tensor, ids: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """X [T, H] or [1, T, H]; ids, weights [T, K]. Returns y of x's shape, then extra outputs."""
        p = self.program
        self._noise.seed(p.seed)
        flat = self._no_op(x.reshape(-1, p.sizes.hidden))
        logits = flat @ self.gate.t()
        if ids is None or weights is None:
            ids, weights = self._route(logits)
            ids = ids.to(torch.int32) if p.int32_ids else ids
        ids, weights = self._no_op(ids), self._no_op(weights)
        factor = self._factor(ids, weights)
        if p.weight_dtype == "native":
            factor = None if factor is None else factor.to(p.dtype)
        y, interior = self._body(flat, ids, factor)
        y = self._no_op(y).to(x.dtype)
        if self.shared is not None:
            added = self._no_op(self.shared(flat, self._hidden))
            y = added + y if p.shared == "first" else y + added
        out: tuple[Tensor, ...] = (y.view(x.shape),)
        if p.extra_users:
            counts = functional.one_hot(ids.long(), p.sizes.experts).sum((0, 1))
            out = (*out, logits, counts, ids * 2)
        return (*out, interior) if p.trap == "escape" else out

    def _body(self, x: Tensor, ids: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
        """Token rows [T, H] -> y [T, H] and the interior rows, in the program's dispatch."""
        p = self.program
        if p.dispatch == "where":
            return program_loops.by_where(p, x, ids, factor, self._experts)
        if p.dispatch == "every":
            return program_loops.on_every_token(p, x, ids, factor, self._experts)
        body = {"gather": self._gather, "einsum": self._einsum, "dense": self._dense}
        if p.dispatch in body:
            return body[p.dispatch](x, ids, factor)
        return self._mapped(x, ids, factor) if p.dispatch.startswith("map") else self._sorted(x, ids, factor)

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, E] -> ids, weights [T, K]."""
        p, k = self.program, self.program.sizes.top_k
        kind = torch.float32 if p.weight_dtype == "float32" else p.dtype
        if p.router == "topk_softmax":
            values, ids = torch.topk(logits, k, dim=-1)
            return ids, torch.softmax(values.float(), dim=-1).to(kind)
        if p.router == "softmax_topk_renorm":
            values, ids = torch.topk(torch.softmax(logits.float(), dim=-1), k, dim=-1)
            return ids, (values / values.sum(-1, keepdim=True)).to(kind)
        scores = logits.float().sigmoid()
        choice = scores + self.score_bias.float()
        if p.router == "group_limited":
            groups = choice.view(-1, 2, p.sizes.experts // 2)
            best = groups.amax(-1).topk(1, dim=-1)[1]
            mask = torch.zeros_like(groups[..., 0]).scatter(1, best, 1.0)
            keep = mask.unsqueeze(-1).expand(groups.shape).reshape(choice.shape)
            choice = choice.masked_fill(~keep.bool(), float("-inf"))
        ids = torch.topk(choice, k, dim=-1, sorted=False)[1]
        values = scores.gather(1, ids)
        return ids, (values / (values.sum(-1, keepdim=True) + 1e-20) * 2.5).to(kind)

    def _factor(self, ids: Tensor, weights: Tensor) -> Tensor | None:
        """All row factors as one [T, K] tensor, None without any."""
        p = self.program
        if p.factors == "none":
            return None
        value = weights
        if "scale" in p.factors:
            value = value * self.scale[ids]
        return value * 1.5 if "constant" in p.factors else value

    def _sorted(self, x: Tensor, ids: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
        """Slots sorted by expert, grouped GEMMs. Returns y [T, H] and the interior rows [S, H]."""
        p, k, tokens = self.program, self.program.sizes.top_k, x.shape[0]
        flat = self._no_op(ids.reshape(-1))
        sorted_ids, perm = torch.sort(flat)
        perm, sorted_ids = self._no_op(perm), self._no_op(sorted_ids)
        if p.token_index == "floor_divide":
            token = perm // k
        elif p.token_index == "arange":
            token = torch.arange(tokens).unsqueeze(1).expand(tokens, k).reshape(-1)[perm]
        else:
            token = torch.arange(tokens).repeat_interleave(k)[perm]
        if p.trap == "wrong_token":
            token = perm % tokens
        token = self._no_op(token)
        rows = self._no_op(x.repeat_interleave(k, 0)[perm] if p.token_index == "repeat" else x[token])
        row_factor = None if factor is None else self._no_op(factor.reshape(-1)[perm])
        back = p.combine in ("inverse_put", "inverse_argsort", "put_back")
        late = back and p.late_weight and p.position == "output"

        if p.dispatch == "pieces":
            counts = self._count(flat, sorted_ids)
            rows = program_loops.by_pieces(p, rows, None if late else row_factor, counts, self._experts)
        else:
            offs = self._no_op(torch.cumsum(self._count(flat, sorted_ids), 0, dtype=torch.int32))
            rows = self._experts(rows, None if late else row_factor, self._grouped(offs, sorted_ids))
        interior = rows
        if back:
            if p.combine == "put_back":
                rows = torch.empty_like(rows).index_put((perm,), rows)
            else:
                inverse = torch.argsort(perm)
                if p.combine == "inverse_put":
                    inverse = torch.empty_like(perm)
                    inverse[perm] = torch.arange(perm.shape[0])
                rows = rows[self._no_op(inverse)]
            return self._sum(rows.view(tokens, k, -1), factor if late else None), interior
        return self._added(x, token, rows), interior

    def _mapped(self, x: Tensor, ids: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
        """Megatron: slots expert by expert, by a mask of the choices; a grouped GEMM, or the experts one by one."""
        p = self.program
        token, own, counts = program_loops.by_map(p, x, ids, factor)
        rows = x.index_select(0, token)
        if p.dispatch == "map_pieces":
            rows = program_loops.by_pieces(p, rows, own, counts, self._experts)
        else:
            offs = self._no_op(counts.cumsum(0).to(torch.int32))
            rows = self._experts(rows, own, self._grouped(offs, None))
        return self._added(x, token, rows), rows

    def _grouped(self, offs: Tensor, sorted_ids: Tensor | None) -> Linear:
        """A grouped GEMM over rows in expert order; biases are taken by the ids in that order."""
        p, grouped = self.program, _grouped_mm(self.program.dtype)

        def linear(value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            weight = self._no_op(weight.transpose(1, 2) if p.out_features_first else weight)
            out = grouped(value, weight, offs)
            return self._no_op(out if bias is None or sorted_ids is None else out + bias[sorted_ids])

        return linear

    def _added(self, x: Tensor, token: Tensor, rows: Tensor) -> Tensor:
        """Rows [S, H] added up at their tokens, [T, H]."""
        p = self.program
        zeros = torch.zeros(x.shape[0], rows.shape[1], dtype=rows.dtype)
        base = x.to(rows.dtype) if p.trap == "residual_base" else zeros
        if p.combine == "index_add":
            y = base.index_add(0, token, rows)
        elif p.combine == "scatter_add":
            y = base.scatter_add(0, token.unsqueeze(1).expand(-1, rows.shape[1]), rows)
        else:
            y = base.index_put((token,), rows, accumulate=True)
        return y + rows.sum(0) if p.trap == "twice" else y

    def _count(self, flat: Tensor, sorted_ids: Tensor) -> Tensor:
        """How many slots each expert has, [E]."""
        experts, kind = self.program.sizes.experts, self.program.counts
        if kind == "one_hot":
            return functional.one_hot(flat.long(), experts).sum(0)
        if kind == "compare":
            return (flat.unsqueeze(1) == torch.arange(experts)).sum(0)
        if kind == "bincount":
            return torch.bincount(flat, minlength=experts)[:experts]
        source = sorted_ids if kind == "histc_sorted" else flat
        return torch.histc(source.float(), bins=experts, min=0, max=max(experts - 1, 1))

    def _gather(self, x: Tensor, ids: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
        """One bmm over the slots with gathered expert weights."""
        p, k, tokens = self.program, self.program.sizes.top_k, x.shape[0]
        flat = self._no_op(ids.reshape(-1))
        token = self._no_op(torch.arange(tokens).unsqueeze(1).expand(tokens, k).reshape(-1))
        rows = self._no_op(x[token] if p.token_index != "repeat" else x.repeat_interleave(k, 0))
        late = p.position == "output" and (
            p.combine in ("bmm", "einsum") or (p.late_weight and p.combine == "sum")
        )

        def linear(value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            chosen = self._no_op(weight[flat])
            if p.out_features_first:
                out = torch.bmm(chosen, value.unsqueeze(-1)).squeeze(-1)
            else:
                out = torch.bmm(value.unsqueeze(1), chosen).squeeze(1)
            return self._no_op(out if bias is None else out + bias[flat])

        row_factor = None if factor is None else factor.reshape(-1)
        rows = self._experts(rows, None if late else row_factor, linear)
        if p.combine == "index_add":
            y = torch.zeros(tokens, rows.shape[1], dtype=rows.dtype).index_add(0, token, rows)
            return (y + rows.sum(0) if p.trap == "twice" else y), rows
        return self._sum(rows.view(tokens, k, -1), factor if late else None), rows

    def _einsum(self, x: Tensor, ids: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
        """gpt-fast: einsums over gathered weights [T, K, ., .]."""
        p = self.program
        late = p.position == "output"
        letters = "oi" if p.out_features_first else "io"

        def linear(value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            chosen = self._no_op(weight[ids])
            source = "ti" if value.dim() == 2 else "tai"
            out = torch.einsum(f"{source},ta{letters}->tao", value, chosen)
            return self._no_op(out if bias is None else out + bias[ids])

        rows = x
        if p.position == "input" and factor is not None:
            rows = (x.unsqueeze(1) * factor.unsqueeze(-1)).to(p.dtype)
        rows = self._experts(rows, None if p.position != "mid" else factor, linear)
        return self._sum(rows, factor if late else None), rows

    def _dense(self, x: Tensor, ids: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
        """llama4: every expert sees every token, masked by scores [T, E]."""
        p, experts, tokens = self.program, self.program.sizes.experts, x.shape[0]
        values = torch.ones(ids.shape, dtype=p.dtype) if factor is None else factor
        scores = torch.zeros(tokens, experts, dtype=values.dtype).scatter(1, ids.long(), values.contiguous())
        scores = self._no_op(scores.transpose(0, 1))
        rows = (
            x.repeat(experts, 1).view(experts, tokens, -1) if p.late_weight else x.expand(experts, *x.shape)
        )

        def linear(value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out = torch.bmm(value, self._no_op(weight.transpose(1, 2) if p.out_features_first else weight))
            return self._no_op(out if bias is None else out + bias.unsqueeze(1))

        contract = p.combine == "einsum" and p.position == "output"
        rows = self._experts(rows, None if contract else scores, linear)
        if contract:
            return torch.einsum("et,eth->th", scores.to(rows.dtype), rows), rows
        y = rows.sum(0)
        return (y + rows.sum(0) if p.trap == "twice" else y), rows

    def _experts(self, rows: Tensor, factor: Tensor | None, linear: Linear) -> Tensor:
        """Both GEMMs and the activation with `factor` [...] at the program's position."""
        p = self.program
        if factor is not None and p.position == "input":
            rows = (rows * factor.unsqueeze(-1)).to(p.dtype)
        first = linear(rows, self.w1, self.b1)
        hidden = self._hidden(first, None if self.w3 is None else linear(rows, self.w3, self.b3))
        if factor is not None and p.position == "mid":
            hidden = (hidden * factor.unsqueeze(-1)).to(p.dtype)
        out = self._normed(linear(hidden, self.w2, self.b2))
        if factor is not None and p.position == "output":
            out = (out * factor.unsqueeze(-1)).to(p.dtype)
        return self._no_op(out)

    def _hidden(self, first: Tensor, up: Tensor | None) -> Tensor:
        """The activation of the first GEMM's rows; up: those of a second one."""
        if up is not None:
            return self._gated(first, up)
        return self._gated(*self._halve(first)) if self.program.gated else self._plain(first)

    def _normed(self, rows: Tensor) -> Tensor:
        """Each row [..., H] under the program's norm."""
        norm, scale = self.program.norm, self.norm_scale
        if scale is None:
            return rows
        wide = rows.float() * scale.float() if norm == "scaled_rms" else rows.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 0.25)
        return (wide if norm == "scaled_rms" else wide * scale.float()).to(rows.dtype)

    def _halve(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """gate, up [..., I] of [..., 2 I], in the program's layout."""
        p, inter = self.program, self.program.sizes.inter
        if p.gate_up.startswith("interleaved"):
            if p.halves == "view":
                pairs = value.view(*value.shape[:-1], inter, 2)
                first, second = pairs[..., 0], pairs[..., 1]
            else:
                first, second = value[..., ::2], value[..., 1::2]
        elif p.halves == "chunk":
            first, second = value.chunk(2, dim=-1)
        elif p.halves == "split":
            first, second = torch.split(value, inter, dim=-1)
        elif p.halves == "slice":
            first, second = value[..., :inter], value[..., inter:]
        else:
            pairs = value.view(*value.shape[:-1], 2, inter)
            first, second = pairs[..., 0, :], pairs.select(-2, 1)
        first, second = self._no_op(first), self._no_op(second)
        return (second, first) if p.gate_up.endswith("swapped") else (first, second)

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        kind = self.program.activation
        if kind == "swiglu_oai":
            gate, up = gate.clamp(max=1.25), up.clamp(-1.25, 1.25)
            return (up + 1) * (gate * torch.sigmoid(gate * 1.702))
        if kind == "clamped_silu":
            return functional.silu(gate.clamp(max=0.75)) * up.clamp(-0.75, 0.75)
        if kind == "clamp_after":
            return functional.silu(gate).clamp(max=0.5) * up.clamp(-0.5, 0.5)
        if kind == "softcap":
            return functional.silu(torch.tanh(gate / 1.5) * 1.5) * up
        return self._plain(gate) * up

    def _plain(self, value: Tensor) -> Tensor:
        kind = self.program.activation
        if kind == "relu2":
            return functional.relu(value).square()
        if kind == "gelu_tanh":
            return functional.gelu(value, approximate="tanh")
        if kind == "gelu":
            return functional.gelu(value)
        return functional.silu(value) if kind == "silu" else functional.relu(value)

    def _sum(self, rows: Tensor, factor: Tensor | None) -> Tensor:
        """Rows [T, K, H], optional factor [T, K] -> [T, H]: the sum (or the trap's version)."""
        p, trap = self.program, self.program.trap
        if p.combine in ("bmm", "einsum") and not trap:
            weights = (
                torch.ones(rows.shape[:2], dtype=rows.dtype) if factor is None else factor.to(rows.dtype)
            )
            if p.combine == "einsum":
                return torch.einsum("tah,ta->th", rows, weights)
            return torch.bmm(weights.unsqueeze(1), rows).squeeze(1)
        if factor is not None:
            rows = (rows * factor.unsqueeze(-1)).to(p.dtype)
        rows = self._no_op(rows)
        if trap == "mean":
            return rows.mean(1)
        if trap == "amax":
            return rows.amax(1)
        if trap == "partial":
            return rows[:, : max(1, p.sizes.top_k - 1)].sum(1)
        return rows.sum(1) + rows.sum(1) if trap == "twice" else rows.sum(1)

    def _no_op(self, value: Tensor) -> Tensor:
        """`value`, sometimes through an operation that changes nothing."""
        level = self.program.noise
        if not level or self._noise.random() > level / 4:
            return value
        kind = self._noise.choice(("slice", "clone", "squeeze", "view", "one", "zero", "transpose", "cast"))
        if kind == "slice":
            return value[: value.shape[0]]
        if kind == "clone":
            return value.clone()
        if kind == "squeeze":
            return value.unsqueeze(0).squeeze(0)
        if kind == "view":
            return value.reshape(1, *value.shape).reshape(value.shape)
        if kind == "transpose" and value.dim() > 1:
            return value.transpose(0, -1).transpose(0, -1)
        if kind == "one" and value.is_floating_point():
            return value * 1.0
        if kind == "zero" and value.is_floating_point():
            return value + 0.0
        return value.to(value.dtype).contiguous()


def _grouped_mm(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What transformers takes for `dtype`: (rows [S, I], weight [E, I, O], offs [E]) -> [S, O]."""
    if dtype == torch.bfloat16:
        return torch.ops.aten._grouped_mm.default
    # Its fake kernel takes bfloat16 only; transformers brings an operator for the other types.
    import transformers.integrations.moe  # noqa: F401

    return torch.ops.transformers.grouped_mm_fallback.default
