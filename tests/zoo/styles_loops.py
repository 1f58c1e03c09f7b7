"""Plain styles that loop over the experts in Python, in our own words."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.zoo.styles_common import (
    EXPERTS,
    HIDDEN,
    INTER,
    TOP_K,
    Gated,
    Routed,
    RoutedModules,
    RoutedStack,
    Style,
    style,
    weight,
)


class MistralInference(RoutedModules):
    """`where(ids == e)` per expert; rows added in place at their tokens; softmax over the chosen logits."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        weights, ids = self.gate(rows).topk(TOP_K)
        weights = F.softmax(weights, dim=1, dtype=torch.float).to(x.dtype)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out[token] += weights[token, slot, None] * expert(rows[token])
        return out.view_as(x)


class LitGpt(RoutedModules):
    """One mask per expert, made at once for all of them; nonzero of each."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        weights, ids = self.gate(rows).topk(TOP_K)
        weights = weights.softmax(dim=1, dtype=torch.float).to(x.dtype)
        masks = ids.unsqueeze(-1) == torch.arange(EXPERTS, device=x.device)
        masks = masks.permute(2, 0, 1)
        y = torch.zeros_like(rows)
        for mask, expert in zip(masks, self.experts, strict=True):
            token, slot = torch.where(mask)
            y[token] += weights[token, slot, None] * expert(rows[token])
        return y.view_as(x)


class MixtralV4(RoutedModules):
    """The Mixtral block of transformers 4: one-hot masks, expert first; index_add_."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        weights, ids = self.route(rows)
        out = torch.zeros_like(rows)
        masks = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
        for e in range(EXPERTS):
            slot, token = torch.where(masks[e])
            current = rows[None, token].reshape(-1, HIDDEN)
            current = self.experts[e](current) * weights[token, slot, None]
            out.index_add_(0, token, current.to(x.dtype))
        return out.view_as(x)


class DeepSeekV3Official(RoutedModules):
    """Counts on the host; an expert without tokens is skipped."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        weights, ids = self.route(rows)
        y = torch.zeros_like(rows)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
        for e in range(EXPERTS):
            if counts[e] == 0:
                continue
            token, slot = torch.where(ids == e)
            y[token] += self.experts[e](rows[token]) * weights[token, slot, None]
        return y.view_as(x)


class DeepSeekMoeInfer(RoutedModules):
    """Slots sorted by expert, cut into pieces by counts on the host; outputs put back by the permutation."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        weights, ids = self.route(rows)
        counts = ids.new_zeros((ids.shape[0], EXPERTS)).scatter_(1, ids, 1).sum(dim=0)
        order = ids.view(-1).argsort()
        sorted_rows = rows[order // ids.shape[1]]
        counts = counts.cpu().numpy()
        outputs = []
        start = 0
        for e, count in enumerate(counts):
            end = start + count
            if count == 0:
                continue
            outputs.append(self.experts[e](sorted_rows[start:end]))
            start = end
        outs = torch.cat(outputs, dim=0) if outputs else sorted_rows.new_empty(0)
        new = torch.empty_like(outs)
        new[order] = outs
        out = new.view(*ids.shape, -1).to(weights.dtype).mul_(weights.unsqueeze(-1)).sum(dim=1)
        return out.to(new.dtype).view_as(x)


class SglangSortedLoop(RoutedStack):
    """The same dispatch over stacked weights, gate and up in one."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = weight(EXPERTS, 2 * INTER, HIDDEN)
        del self.w1, self.w3

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        weights, ids = self.route(rows)
        counts = ids.new_zeros((ids.shape[0], EXPERTS)).scatter_(1, ids, 1).sum(dim=0)
        order = ids.view(-1).argsort()
        sorted_rows = rows[order // ids.shape[1]]
        outputs = []
        start = 0
        for e, count in enumerate(counts.cpu().tolist()):
            end = start + count
            if count == 0:
                continue
            gate, up = F.linear(sorted_rows[start:end], self.w13[e]).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, self.w2[e]))
            start = end
        outs = torch.cat(outputs, dim=0) if outputs else sorted_rows.new_empty(0)
        new = torch.empty_like(outs)
        new[order] = outs
        out = new.view(*ids.shape, -1).to(weights.dtype).mul_(weights.unsqueeze(-1)).sum(dim=1)
        return out.to(new.dtype).view_as(x)


class VllmIterative(RoutedStack):
    """Every expert runs on every token; its output counts where the router chose it."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        weights, ids = self.route(rows)
        final: Tensor | None = None
        for e in range(EXPERTS):
            score = (weights * (ids == e)).sum(dim=-1, keepdim=True)
            hidden = F.silu(F.linear(rows, self.w1[e])) * F.linear(rows, self.w3[e])
            current = F.linear(hidden, self.w2[e]).mul_(score)
            final = current if final is None else final.add_(current)
        assert final is not None
        return final.view_as(x)


class TorchtuneLoop(Routed):
    """Sigmoid scores on the input; pieces by `tolist` of the counts, weights [E, H, I] per expert; scatter_add."""

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
        scores = scores.view(-1)[order].to(x.dtype)
        token = (order // TOP_K).reshape(-1, 1).expand(-1, HIDDEN)
        routed = torch.gather(rows, dim=0, index=token) * scores.reshape(-1, 1)
        outs = []
        for e, piece in enumerate(torch.split(routed, counts.int().tolist(), dim=0)):
            hidden = F.silu(piece @ self.w1[e]) * (piece @ self.w3[e])
            outs.append(hidden @ self.w2[e])
        out = self.shared(rows)
        out = out.scatter_add(dim=0, index=token, src=torch.cat(outs, dim=0))
        return out.view_as(x)


class MegatronSequential(RoutedModules):
    """Tokens permuted by the routing map, expert after expert; split by the counts, one module for each piece."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, HIDDEN)
        probs, routing_map = dense_routing(self, rows)
        permuted, token = permute(rows, routing_map)
        scores = probs.T.contiguous().masked_select(routing_map.T.contiguous())
        pieces = torch.split(permuted, routing_map.sum(dim=0).tolist())
        outs = [expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)]
        out = torch.cat(outs, dim=0) * scores.unsqueeze(-1)
        return unpermute(out, token, rows).view_as(x)


def dense_routing(module: Routed, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [T, E] and the routing map [T, E] (bool) of the chosen experts."""
    weights, ids = module.route(rows)
    logits = rows.new_zeros(rows.shape[0], EXPERTS)
    return logits.scatter(1, ids, weights), torch.zeros_like(logits).int().scatter(1, ids, 1).bool()


def permute(rows: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [S, H] expert after expert, and each one's token [S]."""
    routing_map = routing_map.bool().T.contiguous()
    token = torch.arange(rows.shape[0], device=rows.device).unsqueeze(0).expand(EXPERTS, -1)
    token = token.masked_select(routing_map)
    return rows.index_select(0, token), token


def unpermute(outs: Tensor, token: Tensor, rows: Tensor) -> Tensor:
    """Rows [S, H] added up at their tokens, [T, H]."""
    total = torch.zeros(rows.shape, dtype=outs.dtype, device=rows.device)
    return total.scatter_add_(0, token.unsqueeze(1).expand(-1, HIDDEN), outs).to(rows.dtype)


LOOPS: dict[str, Style] = {
    "mistral_inference": style(MistralInference, captured_by="moefuse.compile"),
    "litgpt": style(LitGpt, captured_by="moefuse.compile"),
    "hf_v4_mixtral": style(MixtralV4, captured_by="moefuse.compile"),
    "dsv3_official": style(DeepSeekV3Official, captured_by="rewriter"),
    "deepseek_remote_moe_infer": style(DeepSeekMoeInfer, captured_by="rewriter"),
    "sglang_sorted_loop": style(SglangSortedLoop, captured_by="rewriter"),
    "vllm_iterative": style(VllmIterative),
    "torchtune_loop": style(TorchtuneLoop, captured_by="moefuse.compile"),
    "megatron_sequential": style(MegatronSequential, captured_by="moefuse.compile"),
}
