"""Choosing the next token from a row of logits.

Owns a random generator, nothing shared: equal seeds give equal tokens.  A sampler is any callable
from logits [n_vocab] to a token id.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

__all__ = ["Sampler", "greedy"]


def greedy(logits: np.ndarray) -> int:
    """The likeliest token, the first on a tie."""
    return int(np.argmax(logits))


@dataclass
class Sampler:
    """Temperature, then the top_k likeliest tokens (0: all), then the fewest of probability top_p."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    seed: int | None = None
    random: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"temperature {self.temperature} >= 0, top_k {self.top_k} >= 0 and "
                             f"0 < top_p {self.top_p} <= 1 are needed")
        self.random = np.random.default_rng(self.seed)

    def __call__(self, logits: np.ndarray) -> int:
        if self.temperature == 0:
            return greedy(logits)
        scaled = np.asarray(logits, np.float64) / self.temperature
        order = np.argsort(-scaled, kind="stable")[: self.top_k or None]
        p = np.exp(scaled[order] - scaled[order[0]])
        p /= p.sum()
        # Tokens before which less than top_p has been gathered: always the first.
        kept = int(np.searchsorted(np.cumsum(p) - p, self.top_p, side="left")) or 1
        return int(self.random.choice(order[:kept], p=p[:kept] / p[:kept].sum()))
