"""Bytes of a device by what they are for: what a dry run predicts, and what is open now."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Held"]


@dataclass(frozen=True)
class Held:
    """Bytes of one device, by what they are for."""

    weights: int = 0
    caches: int = 0
    """Caches of attention, and states of recurrent layers."""
    compute: int = 0
    """Compute buffers, which hold the tensors that graphs compute."""
    work: int = 0
    """Buffers for logits and embeddings that computes return."""
    mapped: int = 0
    """Bytes of `weights` that are pages of the mapped file, which the system reads when needed and may drop."""

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.compute + self.work
