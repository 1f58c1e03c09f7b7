"""Loops over experts that branch on data, as people write them.

Each class is one style; `Base` has the router and the experts. Widths are small, weights random.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

H, INNER, E, K = 32, 16, 4, 2


class Expert(nn.Module):
    """A gated feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, INNER), nn.Linear(H, INNER), nn.Linear(INNER, H)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Base(nn.Module):
    """Router, a list of experts, stacked parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.router = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        return weights / weights.sum(-1, keepdim=True), ids


class HitList(Base):
    """Mixtral as transformers 4 has it: the loop runs over the experts that were hit."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weights, selected = self.route(hidden_states)
        final = torch.zeros_like(hidden_states)
        expert_mask = F.one_hot(selected, num_classes=self.num_experts).permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
            current = hidden_states[None, top_x].reshape(-1, hidden_states.shape[-1])
            current = expert_layer(current) * weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(hidden_states.dtype))
        return final


class HitListStacked(nn.Module):
    """Experts as transformers 5 has them, in a class of its own: stacked parameters and a class for no expert."""

    def __init__(self, act: Any = F.silu) -> None:
        super().__init__()
        self.num_experts = E
        self.router = nn.Linear(H, E, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * INNER, H) / 6)
        self.down_proj = nn.Parameter(torch.randn(E, H, INNER) / 4)
        self.act_fn = act

    def forward(self, hidden_states: Tensor) -> Tensor:
        weights, top_k_index = self.router(hidden_states).softmax(-1).topk(K, -1)
        final = torch.zeros_like(hidden_states)
        with torch.no_grad():
            expert_mask = F.one_hot(top_k_index, num_classes=self.num_experts + 1).permute(2, 1, 0)
            expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_idx = expert_idx[0]  # noqa: PLW2901
            if expert_idx == self.num_experts:
                continue
            top_k_pos, token_idx = torch.where(expert_mask[expert_idx])
            gate, up = F.linear(hidden_states[token_idx], self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
            current = self._combine(gate, up)
            current = F.linear(current, self.down_proj[expert_idx]) * weights[token_idx, top_k_pos, None]
            final.index_add_(0, token_idx, current.to(final.dtype))
        return final

    def _combine(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act_fn(gate) * up


class HitListNoGuard(HitListStacked):
    """The same without the test for the class that no token chooses: there are no weights for it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weights, top_k_index = self.router(hidden_states).softmax(-1).topk(K, -1)
        final = torch.zeros_like(hidden_states)
        expert_mask = F.one_hot(top_k_index, num_classes=self.num_experts + 1).permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_idx = expert_idx[0]  # noqa: PLW2901
            top_k_pos, token_idx = torch.where(expert_mask[expert_idx])
            gate, up = F.linear(hidden_states[token_idx], self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
            current = F.linear(self._combine(gate, up), self.down_proj[expert_idx])
            final.index_add_(0, token_idx, current * weights[token_idx, top_k_pos, None])
        return final


class HitNumbers(Base):
    """Numbers instead of rows: int(e.item()), and a test that never fires."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        mask = F.one_hot(ids, self.num_experts).permute(2, 1, 0)
        for hit in mask.any(dim=-1).any(dim=-1).nonzero(as_tuple=False):
            e = int(hit.item())
            slot, token = torch.where(mask[e])
            if token.numel() == 0:
                continue
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class Tolist(Base):
    """The list of experts as Python numbers."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        counts = F.one_hot(ids, E).sum(dim=(0, 1))
        for e in counts.nonzero().flatten().tolist():
            token, slot = torch.where(ids == e)
            y[token] += self.experts[e](x[token]) * weights[token, slot, None]
        return y


class Counts(Base):
    """DeepSeek-V3's own loop: experts without tokens are skipped by their count."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=self.num_experts).tolist()
        for i in range(self.num_experts):
            if counts[i] == 0:
                continue
            expert = self.experts[i]
            token, slot = torch.where(ids == i)
            y[token] += expert(x[token]) * weights[token, slot, None]
        return y


class Empty(Base):
    """Skipped by the number of tokens that were found."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.shape[0] == 0:
                continue
            y.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return y


class Any_(Base):  # noqa: N801
    """Work only if any token chose the expert."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            chosen = ids == e
            if chosen.any():
                token, slot = torch.where(chosen)
                y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class NotAny(Base):
    """The same, the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            chosen = ids == e
            if not chosen.any():
                continue
            token, slot = torch.where(chosen)
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class Where(Base):
    """The experts with tokens, found by torch.where."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=self.num_experts)
        for e in torch.where(counts > 0)[0]:
            token, slot = torch.where(ids == e)
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class Masked(Base):
    """Every expert on all tokens, unless none chose it."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = ids == e
            if not mask.any():
                continue
            y = y + expert(x) * (weights * mask).sum(-1, keepdim=True)
        return y


class Sorted(Base):
    """vLLM's and SGLang's plain loop over rows sorted by expert, with a running start."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        counts = ids.new_zeros((ids.shape[0], self.num_experts))
        counts.scatter_(1, ids, 1)
        tokens_per_expert = counts.sum(dim=0)
        idxs = ids.view(-1).argsort()
        sorted_tokens = x[idxs // ids.shape[1]]
        tokens_per_expert = tokens_per_expert.cpu().numpy()
        outputs = []
        start = 0
        for i, num_tokens in enumerate(tokens_per_expert):
            end = start + num_tokens
            if num_tokens == 0:
                continue
            expert = self.experts[i]
            outputs.append(expert(sorted_tokens[start:end]))
            start = end
        outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)  # noqa: PLC1802
        new_x = torch.empty_like(outs)
        new_x[idxs] = outs
        rows = new_x.view(*ids.shape, -1).type(weights.dtype)
        return rows.mul_(weights.unsqueeze(dim=-1)).sum(dim=1).type(new_x.dtype)


class MoeInfer(Sorted):
    """DeepSeek's remote code: the loop is in a method without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        return self.moe_infer(x, ids, weights)

    @torch.no_grad()
    def moe_infer(self, x: Tensor, topk_ids: Tensor, topk_weight: Tensor) -> Tensor:
        cnts = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        cnts.scatter_(1, topk_ids, 1)
        tokens_per_expert = cnts.sum(dim=0)
        idxs = topk_ids.view(-1).argsort()
        sorted_tokens = x[idxs // topk_ids.shape[1]]
        tokens_per_expert = tokens_per_expert.cpu().numpy()
        outputs = []
        start_idx = 0
        for i, num_tokens in enumerate(tokens_per_expert):
            end_idx = start_idx + num_tokens
            if num_tokens == 0:
                continue
            expert = self.experts[i]
            tokens_for_this_expert = sorted_tokens[start_idx:end_idx]
            expert_out = expert(tokens_for_this_expert)
            outputs.append(expert_out)
            start_idx = end_idx
        outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)  # noqa: PLC1802
        new_x = torch.empty_like(outs)
        new_x[idxs] = outs
        return (
            new_x.view(*topk_ids.shape, -1)
            .type(topk_weight.dtype)
            .mul_(topk_weight.unsqueeze(dim=-1))
            .sum(dim=1)
            .type(new_x.dtype)
        )


class HitNames(Base):
    """The experts by name, from a dictionary of modules (NLLB, Switch); the router is cast at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict({f"expert_{e}": expert for e, expert in enumerate(self.experts)})

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(torch.float32)
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        mask = F.one_hot(ids, self.num_experts).permute(2, 1, 0)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[hit].squeeze(0))
            y.index_add_(0, token, self.named[f"expert_{hit[0]}"](x[token]) * weights[token, slot, None])
        return y


class Enumerated(Base):
    """The position in the list isn't read; the list runs backwards."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        hits = F.one_hot(ids, E).sum(dim=(0, 1)).nonzero().flatten()
        for _, e in enumerate(hits.flip(0)):
            token, slot = torch.where(ids == e)
            y.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return y


class TwoLayers(Base):
    """One loop adds up two layers that share their routing."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(Expert() for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y, z = torch.zeros_like(x), torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            weight = weights[token, slot, None]
            y.index_add_(0, token, self.experts[e](x[token]) * weight)
            z.index_add_(0, token, self.others[e](x[token]) * weight)
        return torch.cat([y, z], -1)


class HitPieces(Base):
    """The sorted rows in pieces, one per expert that has any."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        order = ids.flatten().argsort()
        counts = F.one_hot(ids, E).sum(dim=(0, 1))
        pieces = x[order // K].split(counts.tolist())
        hits = counts.nonzero().flatten()
        outputs = []
        for e in hits:
            outputs.append(self.experts[e](pieces[e]))  # noqa: PERF401
        rows = torch.cat(outputs)[order.argsort()].view(len(x), K, -1)
        return (rows * weights[..., None]).sum(1)
