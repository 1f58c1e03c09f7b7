"""Helpers for people who write rules, targets or policies: build, capture, mutate and compare MoE graphs."""

from moefuse.testing.capture import Captured, capture_graph, capture_model
from moefuse.testing.compare import Comparison, assert_fuses, assert_not_fused, rewrite_and_compare
from moefuse.testing.fake_group import fake_ep_group

__all__ = [
    "Captured",
    "Comparison",
    "assert_fuses",
    "assert_not_fused",
    "capture_graph",
    "capture_model",
    "fake_ep_group",
    "rewrite_and_compare",
]
