"""The search for scales: for each part of a block the step (and minimum) whose levels are closest to its elements.

The method: try some steps around the one with which the levels just cover the part, round the elements to levels,
compute the least-squares step for these levels, and keep the one with the smallest sum of squared errors.
Invariant: every result is finite; a part that holds an infinity or a NaN has the step 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ggml_sched.graph.quants.bits import limited

__all__ = ["fit_affine", "fit_signed", "fit_table", "share"]

AFFINE_SPANS = np.linspace(0.85, 1.05, 9, dtype=np.float32)
"""The tried ranges of the levels, as fractions of the range from the least to the largest element."""

SIGNED_SPANS = np.linspace(0.78, 1.06, 15, dtype=np.float32)

Nearest = Callable[[np.ndarray], np.ndarray]
"""Maps elements divided by a step to the values of their nearest levels."""


def fit_affine(x: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """(step, minimum), both >= 0, f32 [...], so that x [..., n] is about step * q - minimum, q in 0 .. top."""
    low = np.minimum(x.min(axis=-1, keepdims=True), np.float32(0))
    span = x.max(axis=-1, keepdims=True) - low
    step, minimum = span / np.float32(top), -low
    best = np.full(span.shape, np.inf, np.float32)
    n = np.float32(x.shape[-1])
    sum_x = x.sum(axis=-1, keepdims=True)
    for share_of in AFFINE_SPANS:
        tried = span * (share_of / np.float32(top))
        q = limited(np.rint((x - low) / tried), 0, top)
        sum_q, sum_qq = q.sum(axis=-1, keepdims=True), np.einsum("...i,...i", q, q)[..., None]
        sum_qx = np.einsum("...i,...i", q, x)[..., None]
        fitted = (n * sum_qx - sum_q * sum_x) / (n * sum_qq - sum_q * sum_q)
        offset = (sum_x - fitted * sum_q) / n
        # The format cannot store an offset above zero: then fit with the offset 0.
        above = offset > 0
        fitted = np.where(above, sum_qx / sum_qq, fitted)
        offset = np.where(above, np.float32(0), offset)
        residue = x - (fitted * q + offset)
        error = np.einsum("...i,...i", residue, residue)[..., None]
        better = (error < best) & (fitted > 0)
        best = np.where(better, error, best)
        step, minimum = np.where(better, fitted, step), np.where(better, -offset, minimum)
    return _finite(step[..., 0]), _finite(minimum[..., 0])


def fit_signed(x: np.ndarray, low: int, high: int) -> np.ndarray:
    """The step, f32 [...], of either sign, so that x [..., n] is about step * q, q in low .. high."""
    return fit_table(x, lambda scaled: limited(np.rint(scaled), low, high), np.float32(low))


def fit_table(x: np.ndarray, nearest: Nearest, furthest: np.float32) -> np.ndarray:
    """The step, f32 [...], of either sign, so that x [..., n] is about step * level; the largest level is `furthest`.

    The first step tried maps the element furthest from zero to `furthest`.
    """
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], -1)
    step = spanning = extreme / furthest
    best = np.zeros(step.shape, np.float32)
    for share_of in SIGNED_SPANS:
        level = nearest(x / (spanning * share_of))
        with_x = np.einsum("...i,...i", level, x)[..., None]
        alone = np.einsum("...i,...i", level, level)[..., None]
        # By how much the least-squares step for these levels reduces the sum of squared errors, from sum(x * x).
        gain = with_x * with_x / alone
        better = gain > best
        best, step = np.where(better, gain, best), np.where(better, with_x / alone, step)
    return _finite(step[..., 0])


def share(values: np.ndarray, unit: np.ndarray, low: int, high: int) -> np.ndarray:
    """Scales divided by the block's unit, rounded and clamped to low .. high, f32; 0 where the unit is 0."""
    return limited(np.rint(np.where(unit != 0, values / unit, np.float32(0))), low, high)


def _finite(step: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(step), step, np.float32(0))
