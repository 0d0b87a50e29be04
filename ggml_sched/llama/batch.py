"""Tokens that are evaluated together, of one sequence or several.

Owns the check of token ids.  Invariant: every id that `checked_tokens` returns is in the vocabulary.  Corresponds to
llama.cpp's llama_batch, where each token belongs to one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ggml_sched.errors import shown

__all__ = ["Batch", "checked_tokens", "is_one_token"]


@dataclass(frozen=True, slots=True)
class Batch:
    """n tokens in order; a token attends to the tokens of its sequence at its own position and before."""

    tokens: np.ndarray
    """i32 [n], the token ids"""
    positions: np.ndarray
    """i32 [n], the position of each token in its sequence"""
    sequences: np.ndarray
    """i32 [n], the sequence of each token"""
    outputs: np.ndarray
    """i32 [m], ascending: indices of the tokens whose logits (or embeddings) are computed"""


def is_one_token(tokens: object, n_vocab: int) -> bool:
    """Whether `tokens` is a list of one valid id, as in every step of a generation.

    Then the check of `checked_tokens`, which is much slower, is not needed.
    """
    return type(tokens) is list and len(tokens) == 1 and type(tokens[0]) is int and 0 <= tokens[0] < n_vocab


def checked_tokens(tokens: object, n_vocab: int) -> np.ndarray:
    """Token ids as i32; TypeError if `tokens` is no sequence of ints, ValueError for an unknown id."""
    if is_one_token(tokens, n_vocab):
        return np.array(tokens, np.int32)
    if isinstance(tokens, (str, bytes, bytearray)):
        raise TypeError(f"tokens are a sequence of ints, not {type(tokens).__name__}: model.tokenizer.encode(text) "
                        "gives the ids of a text, and model.generate takes text")
    if not hasattr(tokens, "__len__"):
        raise TypeError(f"tokens are a sequence of ints, not {type(tokens).__name__}")
    try:
        ids = np.asarray(tokens)
    except ValueError:      # nested lists of unequal lengths
        raise TypeError("tokens are a sequence of ints, not of several sequences") from None
    if ids.dtype.kind not in "iu" and isinstance(tokens, (list, tuple)) and all(type(token) is int for token in tokens):
        ids = np.array(tokens, object)      # none, or NumPy has no integer type for all of them
    elif ids.ndim != 1 or not (ids.dtype.kind in "iu" or ids.size == 0):
        raise TypeError(f"tokens are a sequence of ints, not {ids.dtype} {list(ids.shape)}")
    bad = np.flatnonzero((ids < 0) | (ids >= n_vocab))
    if len(bad):
        raise ValueError(f"token {shown(int(ids[bad[0]]))} at {bad[0]} is not in 0 .. {n_vocab - 1}")
    return ids.astype(np.int32)
