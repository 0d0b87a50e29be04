"""The tokens of one evaluation, of one sequence or of several.

Owns four arrays.  Corresponds to llama.cpp's llama_batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True)
class Batch:
    """n tokens; m of them have logits (or embeddings)."""

    tokens: np.ndarray
    """i32 [n]"""
    positions: np.ndarray
    """i32 [n], the position of each token in its sequence"""
    sequences: np.ndarray
    """i32 [n], the sequence that each token belongs to"""
    outputs: np.ndarray
    """i32 [m] ascending: which tokens' results are wanted; may be empty"""
