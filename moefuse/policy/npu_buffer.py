"""How large the communication buffer of aclnnMegaMoe must be.

In: the layer's sizes and the tokens per rank that it must hold. Out: bytes of HCCL's buffer (`HCCL_BUFFSIZE`) on A2
and A3, where the operator communicates through it. A5 registers a buffer of its own: nothing to check.
"""

from dataclasses import dataclass

MIB = 1 << 20
_MAX_EXPERTS_PER_RANK = 128
_RESERVED = 10 * MIB
"""The operator keeps 10 MB of each half for itself."""


@dataclass(frozen=True)
class Traffic:
    """What one layer sends: sizes that are equal on all ranks. tokens: the most that one rank may have."""

    ep_world_size: int
    num_experts: int
    top_k: int
    hidden: int
    tokens: int
    quantised: bool

    @property
    def worst_receive(self) -> int:
        """Rows that one rank receives if every token of every rank chooses as many of its experts as it can."""
        local = self.num_experts // self.ep_world_size
        return self.ep_world_size * self.tokens * min(self.top_k, local)


def required_bytes(family: str, traffic: Traffic, max_recv_token_num: int = 0) -> int:
    """Bytes that HCCL's buffer needs; 0 on A5. max_recv_token_num: 0 stands for the worst case.

    Raises ValueError for an unknown family.
    """
    if family == "A5":
        return 0
    if family not in ("A2", "A3"):
        raise ValueError(f"family: expected A2, A3 or A5, got {family!r}")
    ep, slots = traffic.ep_world_size, traffic.tokens * traffic.top_k
    plain = 2 * traffic.hidden
    sent = traffic.hidden + 512 if traffic.quantised else plain
    counts = ep * _aligned(ep * _MAX_EXPERTS_PER_RANK + 1, 128) * 4
    if family == "A3":
        rows = slots * (sent + plain) + (slots * 4 if traffic.quantised else 0)
        flags = max(ep * 512, 512 * 1024)
    else:
        received = max_recv_token_num or traffic.worst_receive
        rows = max(received * sent + slots * plain, slots * sent + received * plain)
        rows += received * 4 if traffic.quantised else 0
        flags = ep * (512 + _MAX_EXPERTS_PER_RANK * 64 + 64)
    return 2 * (counts + rows + flags + _RESERVED)


def combine_bytes(traffic: Traffic) -> int:
    """Bytes that HCCL's buffer needs for dispatch_ffn_combine: a byte of each row out, two back, and 10 MB."""
    return 3 * traffic.tokens * traffic.top_k * traffic.hidden + _RESERVED


def _aligned(size: int, unit: int) -> int:
    return -(-size // unit) * unit
