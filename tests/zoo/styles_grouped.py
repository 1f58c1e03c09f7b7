"""Plain styles with all experts in one product: grouped GEMMs, einsums, all experts on all tokens."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.styles_common import (
    EXPERTS,
    HIDDEN,
    INTER,
    TOP_K,
    Gated,
    Routed,
    RoutedStack,
    Style,
    grouped,
    style,
    weight,
)
from tests.zoo.styles_loops import dense_routing, permute, unpermute


class Torchtitan(RoutedStack):
    """Sigmoid scores with a choice bias; sorted rows, grouped GEMMs; slots written back, then summed."""

    before = True

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(EXPERTS) / 8)
        self.shared = Gated()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        scores = torch.sigmoid(self.gate(rows).float())
        _, ids = torch.topk(scores + self.bias, k=TOP_K, dim=-1, sorted=False)
        chosen = scores.gather(dim=1, index=ids)
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20) * 2.5
        counts = torch.histc(ids.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS)
        order = torch.argsort(ids.view(-1), stable=True)
        sorted_scores = chosen.view(-1)[order]
        routed = rows[order // TOP_K]
        if self.before:
            routed = (routed.float() * sorted_scores.reshape(-1, 1)).to(x.dtype)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        hidden = F.silu(grouped(routed, self.w1.transpose(-2, -1), ends))
        hidden = hidden * grouped(routed, self.w3.transpose(-2, -1), ends)
        out = grouped(hidden, self.w2.transpose(-2, -1), ends).to(x.dtype)
        slots = torch.zeros((rows.shape[0] * TOP_K, HIDDEN), dtype=out.dtype, device=x.device)
        slots[order] = out
        slots = slots.reshape(-1, TOP_K, HIDDEN)
        if self.before:
            total = slots.sum(dim=1)
        else:
            total = torch.bmm(chosen.reshape(-1, 1, TOP_K), slots.float()).to(x.dtype).squeeze(1)
        return (self.shared(rows) + total).view_as(x)


class TorchtitanAfter(Torchtitan):
    """The same with the scores multiplied in by a bmm at the end."""

    before = False


class TorchtitanW13(Routed):
    """Gate and up in one weight; counts from a scattered mask; scatter_add."""

    def __init__(self) -> None:
        super().__init__()
        self.w13, self.w2 = weight(EXPERTS, HIDDEN, 2 * INTER), weight(EXPERTS, INTER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        scores = self.gate(rows).softmax(-1, dtype=torch.float32)
        ids = scores.topk(TOP_K, dim=-1)[1]
        chosen = scores.gather(1, ids)
        counts = torch.zeros_like(scores).scatter(1, ids, 1.0).sum(0)
        order = ids.view(-1).argsort(stable=True)
        token = order // TOP_K
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = grouped(rows[token], self.w13, ends).chunk(2, dim=-1)
        out = grouped(F.silu(gate) * up, self.w2, ends)
        out = (out * chosen.view(-1)[order].unsqueeze(-1)).to(x.dtype)
        return torch.zeros_like(rows).scatter_add(0, token[:, None].expand(-1, HIDDEN), out).view_as(x)


class TorchtuneGrouped(Routed):
    """Sigmoid scores on the input; gather by an expanded index; scatter_add onto the shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = weight(EXPERTS, HIDDEN, INTER), weight(EXPERTS, HIDDEN, INTER)
        self.w2 = weight(EXPERTS, INTER, HIDDEN)
        self.shared = Gated()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, HIDDEN)
        scores, ids = torch.sigmoid(self.gate(rows).float()).topk(TOP_K, dim=1)
        counts = torch.histc(ids.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        order = torch.argsort(ids.view(-1), stable=True)
        token = (order // TOP_K).reshape(-1, 1).expand(-1, HIDDEN)
        routed = torch.gather(rows, dim=0, index=token)
        routed = routed * scores.view(-1)[order].to(x.dtype).reshape(-1, 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        hidden = F.silu(grouped(routed, self.w1, ends)) * grouped(routed, self.w3, ends)
        out = grouped(hidden, self.w2, ends).to(x.dtype)
        return self.shared(rows).scatter_add(dim=0, index=token, src=out).view_as(x)


class MegatronGrouped(Routed):
    """Tokens permuted by the routing map, expert after expert; probabilities multiplied between the GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = weight(EXPERTS, HIDDEN, 2 * INTER), weight(EXPERTS, INTER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        probs, routing_map = dense_routing(self, rows)
        permuted, token = permute(rows, routing_map)
        scores = probs.T.contiguous().masked_select(routing_map.T.contiguous())
        ends = routing_map.sum(dim=0).cumsum(0).to(torch.int32)
        gate, up = grouped(permuted, self.w1, ends).chunk(2, dim=-1)
        hidden = F.silu(gate) * up * scores.unsqueeze(-1).to(gate.dtype)
        return unpermute(grouped(hidden, self.w2, ends).to(x.dtype), token, rows).view_as(x)


class MegatronSinkhorn(MegatronGrouped):
    """The same, balanced by Sinkhorn's iteration until it converges: a loop that depends on the data.

    It breaks the graph, and nothing says of a mask that comes from another graph that it holds K experts per token.
    """

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See `Routed`."""
        logits = self.gate(rows)
        ids = sinkhorn(logits.float()).topk(TOP_K, dim=1)[1]
        return logits.sigmoid().gather(1, ids), ids


def sinkhorn(cost: Tensor, tolerance: float = 1e-3) -> Tensor:
    """Scale exp(cost) [T, E] until its rows and columns are balanced."""
    cost = torch.exp(cost)
    row = torch.ones(cost.shape[0], device=cost.device)
    column = torch.ones(cost.shape[1], device=cost.device)
    error, before = torch.tensor(1e9), column
    while error > tolerance:
        row = 1 / row.shape[0] / ((column * cost).sum(1) + 1e-8)
        column = 1 / column.shape[0] / ((row.unsqueeze(1) * cost).sum(0) + 1e-8)
        error, before = (before - column).abs().mean(), column
    return column * cost * row.unsqueeze(1)


class Stacked2d(Routed):
    """Weights as views of one two-dimensional tensor each; squared ReLU; counts by bincount."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = weight(EXPERTS * INTER, HIDDEN), weight(EXPERTS * INTER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        scores, ids = self.gate(rows).sigmoid().topk(TOP_K, dim=-1)
        scores = scores / scores.sum(dim=-1, keepdim=True)
        order = ids.flatten().argsort(stable=True)
        ends = torch.bincount(ids.flatten(), minlength=EXPERTS).cumsum(0).to(torch.int32)
        token = order // TOP_K
        w1 = torch.stack(self.w1.chunk(EXPERTS)).transpose(1, 2)
        w2 = torch.stack(self.w2.chunk(EXPERTS))
        hidden = F.relu(grouped(rows[token], w1, ends)).square()
        out = grouped(hidden, w2, ends).to(x.dtype) * scores.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, token, out).view_as(x)


class GptFast(RoutedStack):
    """The chosen experts' weights are gathered per token, and einsum multiplies."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, HIDDEN)
        weights, ids = self.route(rows)
        gate = F.silu(torch.einsum("th,tkih->tki", rows, self.w1[ids]))
        up = torch.einsum("th,tkih->tki", rows, self.w3[ids])
        expert = torch.einsum("tki,tkhi->tkh", gate * up, self.w2[ids])
        return torch.einsum("tkh,tk->th", expert, weights).reshape(x.shape)


class SglangGather(Routed):
    """The same with gate and up in one weight, gathered once."""

    def __init__(self) -> None:
        super().__init__()
        self.w13, self.w2 = weight(EXPERTS, 2 * INTER, HIDDEN), weight(EXPERTS, HIDDEN, INTER)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        weights, ids = self.route(rows)
        gate, up = torch.chunk(self.w13[ids], 2, dim=2)
        hidden = F.silu(torch.einsum("ti,taoi->tao", rows, gate))
        hidden = hidden * torch.einsum("ti,taoi->tao", rows, up)
        experts = torch.einsum("tao,taio->tai", hidden, self.w2[ids])
        return torch.einsum("tai,ta->ti", experts, weights.to(experts.dtype)).view_as(x)


class GptOssTorch(nn.Module):
    """Interleaved gate and up, biases, clamps, the sigmoid gate of gpt-oss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.w1, self.b1 = weight(EXPERTS, 2 * INTER, HIDDEN), weight(EXPERTS, 2 * INTER)
        self.w2, self.b2 = weight(EXPERTS, HIDDEN, INTER), weight(EXPERTS, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        values, ids = torch.topk(self.gate(rows), k=TOP_K, dim=-1, sorted=True)
        weights = F.softmax(values, dim=1)
        hidden = torch.einsum("beck,bk->bec", self.w1[ids], rows) + self.b1[ids]
        gate, up = hidden[..., ::2], hidden[..., 1::2]
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        out = torch.einsum("beck,bek->bec", self.w2[ids], hidden) + self.b2[ids]
        return torch.einsum("bec,be->bc", out, weights).view_as(x)


class DenseEinsum(RoutedStack):
    """Every expert runs on every token; scattered scores pick what counts."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        weights, ids = self.route(rows)
        scores = torch.zeros(rows.shape[0], EXPERTS, dtype=x.dtype, device=x.device).scatter(1, ids, weights)
        hidden = F.silu(torch.einsum("th,eih->eti", rows, self.w1))
        hidden = hidden * torch.einsum("th,eih->eti", rows, self.w3)
        out = torch.einsum("eti,ehi->eth", hidden, self.w2)
        return torch.einsum("eth,te->th", out, scores).view_as(x)


GROUPED: dict[str, Style] = {
    "torchtitan_grouped_before": style(Torchtitan),
    "torchtitan_grouped_after": style(TorchtitanAfter),
    "torchtitan_w13_scatter_add": style(TorchtitanW13),
    "torchtune_grouped": style(TorchtuneGrouped),
    "megatron_grouped": style(MegatronGrouped, captured_by="moefuse.compile"),
    "megatron_sinkhorn": style(
        MegatronSinkhorn,
        fusable=False,
        reason="isn't proved to be the choices of a top-k",
        captured_by="moefuse.compile",
    ),
    "stacked2d_grouped_bincount": style(Stacked2d, captured_by="moefuse.compile"),
    "gpt_fast": style(GptFast),
    "sglang_native_gather": style(SglangGather),
    "gptoss_torch": style(GptOssTorch),
    "dense_einsum": style(DenseEinsum),
}
