"""May a shared expert, a dense FFN beside a MoE layer, become a node of its own?

In: the layer of one expert that it is, the target of the layer beside it, and the tokens of the graph. Out: `CHECKS`,
after those of the target. Where the answer is no the inner compiler computes it, as it did before; nothing crosses
between ranks in it, so ranks need not decide alike, and it may ask for the tokens.
"""

from dataclasses import dataclass

import torch

from moefuse.ops.spec import MoeSpec
from moefuse.policy.check import Check, extended

TARGETS = ("cpu", "reference")
"""Targets to which one expert for all tokens is a layer like any other."""
MOST_TOKENS = 64
"""In bfloat16 the inner compiler's dense products are faster from about 120 tokens on, measured with AVX-512. At 64
they take 1.2 times as long, at one token twice as long; in float32 and float16 they were never faster."""


@dataclass(frozen=True)
class SharedExpert(MoeSpec):
    """A shared expert. target, spread: of the layer beside it. tokens: those of the graph, None where it is dynamic."""

    target: str = ""
    spread: bool = False
    tokens: int | None = None

    @staticmethod
    def of(spec: MoeSpec, target: str, spread: bool, tokens: int | None) -> "SharedExpert":
        """The expert as these checks read it."""
        return extended(SharedExpert, spec, target=target, spread=spread, tokens=tokens)


CHECKS = (
    Check(
        "shared_target",
        ("target",),
        lambda s: s.target in TARGETS,
        "the target {target!r} has no kernel for one expert that all tokens go to",
        subject=SharedExpert,
    ),
    Check(
        "shared_spread",
        ("spread",),
        lambda s: not s.spread,
        "the layer's rows travel between ranks, and the expert's stay on this one",
        subject=SharedExpert,
    ),
    Check(
        "shared_training",
        ("training",),
        lambda s: not s.training,
        "gradients are wanted: forward and backward pass stay together",
        subject=SharedExpert,
    ),
    Check(
        "shared_dtype",
        ("x_dtype", "expert_dtype"),
        lambda s: s.x_dtype == s.expert_dtype and s.x_dtype != torch.float64,
        "rows are {x_dtype} and weights {expert_dtype}: faster are float32, bfloat16 and float16 for both",
        subject=SharedExpert,
    ),
    Check(
        "shared_tokens",
        ("tokens", "x_dtype"),
        lambda s: s.tokens is None or s.tokens <= MOST_TOKENS or s.x_dtype != torch.bfloat16,
        f"{{tokens}} tokens in bfloat16 are more than {MOST_TOKENS}: dense products of the inner compiler are faster",
        subject=SharedExpert,
    ),
)
