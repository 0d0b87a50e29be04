"""Policies: the rules by which a plan is made."""

from __future__ import annotations

import dataclasses
from operator import index

__all__ = ["Policy"]

PLACEMENTS, OFFSETS, REUSES = ("default", "seed"), ("packed", "best fit"), ("first", "whole", "front", "all")
"""The words of the fields placement, offsets and reuse; a word's index is its number in include/ggml_sched/policy.h."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The rules by which a plan is made; immutable, equal by value.

    Raises ValueError for a word, n_copies or windows that a plan cannot have.
    """

    placement: str = "default"
    """"default" (by weights, then neighbours, then split boundaries) or "seed" (ggml's first generation)."""
    offsets: str = "packed"
    """"packed" (all lifetimes of an arena together) or "best fit" (one after the other, in execution order)."""
    reuse: str = "all"
    """Which part of a source's memory a node may reuse in place: "first", as ggml's first generation; "whole", only all
    of it; "front", also its front, and the tail is freed; "all", also a part at an offset, through a view.  With
    "front" and "all", lower modes from "whole" on are tried, too, and each arena keeps the smallest result."""
    leafs_first: bool = True
    """Leafs are allocated from the start, not from their first use."""
    stream: bool = False
    """Copies of weights share memory, one after the other, and none is kept for the next compute."""
    n_copies: int = 1
    """The number of copy slots of each copy that every compute makes again; consecutive computes use them in turn."""
    windows: tuple[int, ...] = ()
    """For each backend the bytes that copies of stored weights may take together, each from the start of its fetch to
    its last reader, so that they are fetched while earlier nodes are computed.  For a backend with 0, or without an
    entry, each copy is fetched just before its reader."""

    numbers: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)
    """The fields of the C struct gs_policy, in its order; windows are not among them, but in gs_request."""

    def __post_init__(self) -> None:
        numbers = []
        for field, words in (("placement", PLACEMENTS), ("offsets", OFFSETS), ("reuse", REUSES)):
            if getattr(self, field) not in words:
                raise ValueError(f"{field} {getattr(self, field)!r} is not one of {', '.join(words)}")
            numbers.append(words.index(getattr(self, field)))
        if not 1 <= index(self.n_copies) <= 0xffff:
            raise ValueError(f"n_copies = {self.n_copies} is not in 1 .. {0xffff}")
        if not all(0 <= index(nbytes) < 1 << 63 for nbytes in self.windows):
            raise ValueError(f"windows = {self.windows} are not bytes in 0 .. 2**63 - 1")
        object.__setattr__(self, "numbers", (*numbers, int(self.leafs_first), int(self.stream), index(self.n_copies)))
