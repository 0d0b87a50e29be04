"""Finds good scales: for each part of a block a step (and minimum) with which step * level is close to the elements.

A part is the elements of a block that share a scale; a level is the integer that an element becomes; the step is the
scale of a part as a real number.  The method: try some steps around the one with which the levels just cover the part's
values; for each, round the elements to levels, and compute the least-squares step for these levels; keep the step with
the smallest sum of squared errors.
Invariant: every result is finite; a part that holds an infinity or a NaN has the step 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ggml_sched.graph.quants.bits import limited

__all__ = ["fit_affine", "fit_signed", "fit_table", "share"]

AFFINE_SPANS = np.linspace(0.85, 1.05, 9, dtype=np.float32)
"""`fit_affine` tries levels that cover these fractions of the range from a part's least to its largest element."""

SIGNED_SPANS = np.linspace(0.78, 1.06, 15, dtype=np.float32)
"""`fit_table` tries these fractions of the step with which the levels just cover the elements."""

Nearest = Callable[[np.ndarray], np.ndarray]
"""A function from elements divided by a step to the nearest levels."""


def fit_affine(x: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """(step, minimum) of each part, both >= 0, so that x is about step * q - minimum with levels q of 0 .. top.

    x is f32 [..., n] with n elements of a part; the results are f32 [...].
    """
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
        # The types store -offset as an unsigned minimum, so an offset above zero is impossible: fit with 0 instead.
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
    """The step, f32 [...], of either sign, of each part x [..., n]: x is about step * q, q in low .. high."""
    return fit_table(x, lambda scaled: limited(np.rint(scaled), low, high), np.float32(low))


def fit_table(x: np.ndarray, nearest: Nearest, furthest: np.float32) -> np.ndarray:
    """The step, f32 [...], of either sign, of each part x [..., n], so that x is about step * level.

    `nearest` gives the levels; `furthest` is the level of the largest magnitude: the steps that are tried are around
    the one that gives it to the element furthest from zero.
    """
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], -1)
    step = spanning = extreme / furthest
    best = np.zeros(step.shape, np.float32)
    for share_of in SIGNED_SPANS:
        level = nearest(x / (spanning * share_of))
        with_x = np.einsum("...i,...i", level, x)[..., None]
        alone = np.einsum("...i,...i", level, level)[..., None]
        # With the least-squares step for these levels, the sum of squared errors is sum(x * x) - gain.
        gain = with_x * with_x / alone
        better = gain > best
        best, step = np.where(better, gain, best), np.where(better, with_x / alone, step)
    return _finite(step[..., 0])


def share(values: np.ndarray, unit: np.ndarray, low: int, high: int) -> np.ndarray:
    """The integers, as f32, that store the scales of parts: scale / unit, rounded and clamped to low .. high; 0 where
    the unit is 0.  `unit`: the f16 d (or dmin) of the block."""
    return limited(np.rint(np.where(unit != 0, values / unit, np.float32(0))), low, high)


def _finite(step: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(step), step, np.float32(0))
