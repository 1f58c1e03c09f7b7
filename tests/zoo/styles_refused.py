"""Plain styles that are no weighted sum over chosen experts: capacity, expert choice, soft mixtures."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.styles_common import EXPERTS, HIDDEN, INTER, TOP_K, Routed, RoutedStack, Style, style, weight

CAPACITY = 4


class NanoMoeCapacity(Routed):
    """Each expert has places for `CAPACITY` slots; later ones are dropped. Dispatch and combine by dense masks."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = weight(EXPERTS, HIDDEN, INTER), weight(EXPERTS, INTER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        logits = self.gate(rows)
        values, ids = logits.topk(TOP_K, dim=-1)
        probs = torch.full_like(logits, float("-inf")).scatter(-1, ids, values).softmax(-1)
        chosen = F.one_hot(ids, EXPERTS).permute(1, 0, 2)  # [K, T, E]
        rank = chosen.reshape(-1, EXPERTS).cumsum(0).reshape(TOP_K, -1, EXPERTS) - 1
        chosen = chosen * (rank < CAPACITY)
        place = (rank * chosen).sum(dim=0)  # [T, E]
        weights = probs * chosen.sum(dim=0)
        slots = F.one_hot(place, CAPACITY).to(x.dtype)
        combine = weights.unsqueeze(-1) * slots  # [T, E, C]
        dispatch = combine.bool().to(x.dtype)
        batches = dispatch.permute(1, 2, 0).reshape(-1, rows.shape[0]) @ rows
        out = torch.bmm(F.gelu(torch.bmm(batches.view(EXPERTS, CAPACITY, HIDDEN), self.w1)), self.w2)
        return (combine.reshape(rows.shape[0], -1) @ out.reshape(-1, HIDDEN)).view_as(x)


class GShardEinsum(RoutedStack):
    """Top-2 by two argmaxes, capacity by running counts, einsums with [T, E, C] masks."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        gates = self.gate(rows).softmax(-1)
        first = F.one_hot(gates.argmax(-1), EXPERTS)
        second = F.one_hot(gates.masked_fill(first.bool(), 0.0).argmax(-1), EXPERTS)
        place1 = first.cumsum(0) - 1
        place2 = second.cumsum(0) - 1 + first.sum(0, keepdim=True)
        first, second = first * (place1 < CAPACITY), second * (place2 < CAPACITY)
        gate1, gate2 = (gates * first).sum(-1), (gates * second).sum(-1)
        total = (gate1 + gate2).clamp(min=1e-9)
        combine = torch.zeros(rows.shape[0], EXPERTS, CAPACITY, dtype=x.dtype, device=x.device)
        for gate, mask, place in ((gate1, first, place1), (gate2, second, place2)):
            slot = F.one_hot((place * mask).sum(-1), CAPACITY).to(x.dtype)
            combine = combine + torch.einsum("t,te,tc->tec", gate / total, mask.to(x.dtype), slot)
        batches = torch.einsum("tec,th->ech", combine.bool().to(x.dtype), rows)
        hidden = F.silu(torch.einsum("ech,eih->eci", batches, self.w1))
        hidden = hidden * torch.einsum("ech,eih->eci", batches, self.w3)
        out = torch.einsum("eci,ehi->ech", hidden, self.w2)
        return torch.einsum("tec,ech->th", combine, out).view_as(x)


class ExpertChoice(RoutedStack):
    """Each expert chooses its tokens; a token may have any number of experts."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        scores = self.gate(rows).softmax(-1)
        weights, token = scores.t().topk(CAPACITY, dim=-1)  # [E, C]
        picked = rows[token]
        hidden = F.silu(torch.bmm(picked, self.w1.transpose(1, 2))) * torch.bmm(
            picked, self.w3.transpose(1, 2)
        )
        out = torch.bmm(hidden, self.w2.transpose(1, 2)) * weights.unsqueeze(-1)
        return torch.zeros_like(rows).index_add(0, token.reshape(-1), out.reshape(-1, HIDDEN)).view_as(x)


class SoftMoe(nn.Module):
    """Every slot of an expert is a mixture of all tokens, every token a mixture of all slots."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = weight(HIDDEN, EXPERTS * CAPACITY)
        self.w1, self.w2 = weight(EXPERTS, HIDDEN, INTER), weight(EXPERTS, INTER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        logits = x @ self.phi  # [B, S, E C]
        batches = logits.softmax(1).transpose(1, 2) @ x
        batches = batches.view(-1, EXPERTS, CAPACITY, HIDDEN).transpose(0, 1).reshape(EXPERTS, -1, HIDDEN)
        out = torch.bmm(F.gelu(torch.bmm(batches, self.w1)), self.w2)
        out = out.view(EXPERTS, -1, CAPACITY, HIDDEN).transpose(0, 1).reshape(x.shape[0], -1, HIDDEN)
        return logits.softmax(2) @ out


REFUSED: dict[str, Style] = {
    "nanomoe_capacity": style(NanoMoeCapacity, fusable=False, reason="capacity"),
    "gshard_einsum": style(GShardEinsum, fusable=False, reason="capacity"),
    "expert_choice": style(ExpertChoice, fusable=False, reason="expert-choice"),
    "soft_moe": style(SoftMoe, fusable=False, reason="soft"),
}
