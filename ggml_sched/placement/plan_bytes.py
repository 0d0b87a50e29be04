"""Bytes that the plans of a model's graphs take on one backend, of which one plan runs at a time."""

from __future__ import annotations

from collections.abc import Sequence

from ggml_sched.planning.plan import Plan

__all__ = ["arena_bytes", "store_bytes"]


def arena_bytes(plans: Sequence[Plan], k: int) -> int:
    """The most bytes of arena and work memory that one of these plans takes on its backend number k."""
    return max(plan.buffer_sizes[k] + plan.work_sizes[k] for plan in plans)


def store_bytes(plans: Sequence[Plan], k: int) -> int:
    """The bytes of host memory that these plans take for the store, their backend number k: its arena and work memory
    need not be largest in the same plan, and it gets both."""
    return max(plan.buffer_sizes[k] for plan in plans) + max(plan.work_sizes[k] for plan in plans)
