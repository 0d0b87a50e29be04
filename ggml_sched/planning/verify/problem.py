"""Problems of a plan, and the reason codes that name them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["REASONS", "Problem"]

REASONS = {
    "bad-index": "an index of the plan is out of range",
    "bad-step": "a step of the program has other memory, or another backend, than the plan",
    "split-gap": "the splits do not cover the nodes in order",
    "wrong-order": "the sequence of positions is not what the splits execute",
    "wrong-backend": "a node or copy is in a split of another backend",
    "bad-group": "a fusion group is not valid, or not in one run",
    "not-run": "the program does not run each node that computes once, in order",
    "unsupported-op": "a node is on a backend that cannot run it",
    "resident-moved": "a tensor with memory of its own is placed by the plan",
    "unplaced": "a tensor that the compute touches has no address",
    "view-misplaced": "a view is not at its root's address plus its offset",
    "bad-copy": "a node reads a copy of another layout",
    "misaligned": "an offset is not a multiple of the backend's alignment",
    "too-small": "a tensor has fewer bytes than its backend allocates for it",
    "out-of-bounds": "a tensor does not lie inside its arena",
    "live-bytes": "more bytes are live than the arena has",
    "overlap": "two tensors are live in the same bytes",
    "inplace-live": "a node writes over a source that is read later",
    "inplace-layout": "a node writes over a source of another layout or address",
    "inplace-not-tolerated": "a node writes over a source over which its backend's kernel cannot write",
    "output-overwritten": "a result does not survive until the end",
    "wrong-overwritten": "a tensor is declared overwritten at the end of a compute and is not, or the other way round",
    "missing-input": "a leaf whose data is read is not among the inputs that must have been set",
    "missing-copy": "a node reads memory that its backend cannot, or a copy that was never made",
    "copy-before-write": "a copy is made before its source is computed",
    "read-before-write": "a node reads bytes that no step has written",
    "clobbered-read": "a node reads bytes that another step has written over",
    "stale-read": "a node reads a value that has been written to since",
    "wrong-range": "a node reads other bytes of a weight than it should, because others were fetched",
    "partial-read": "a node reads experts that were not copied or fetched, because that was done for other ids",
    "lost-write": "a node writes through a view to memory that its backend cannot access",
    "unordered": "two steps access the same bytes, one of them writes, and no wait orders them",
}
"""Every reason code that a Problem may have."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a plan: a code of `REASONS`, and a sentence with names and numbers."""

    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"
