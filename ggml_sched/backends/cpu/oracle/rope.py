"""Rotary position embedding, with YaRN.

Angles and their sines are computed in f64, the rotation in f32.  ggml computes each angle from that of the pair before
by a multiplication in f32, and is less exact.
"""

from __future__ import annotations

import math

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backends.cpu.oracle.operands import Operands, float_param, int_param
from ggml_sched.backends.cpu.oracle.registry import kernel


class Angles:
    """The values that follow from the parameters of a ROPE node alone: `per_position`, the angle of each pair at
    position 1, and `magnitude`, the factor of sines and cosines."""

    def __init__(self, node: Tensor) -> None:
        n_dims = int_param(node, 1)
        n_ctx_orig = int_param(node, 4)
        base, scale, extrapolate, attention, fast, slow = (float(float_param(node, i)) for i in range(5, 11))
        pairs = np.arange(n_dims // 2, dtype=np.float64)
        with np.errstate(all="ignore"):
            # np.power: a base of 0 or less gives IEEE's result, where Python's ** would raise an exception.
            frequencies = np.power(np.float64(base), -2.0 * pairs / n_dims) if n_dims else pairs
            share = np.zeros_like(pairs)
            self.magnitude: float = attention
            if extrapolate != 0:
                low, high = _corrections(n_dims, n_ctx_orig, base, fast, slow)
                ramp = (pairs - low) / max(0.001, high - low)
                share = (1 - np.clip(ramp, 0, 1)) * extrapolate
                self.magnitude *= 1 + 0.1 * float(np.log(1 / np.float64(scale)))
            # YaRN: a mean of interpolated (scaled) and extrapolated angles; the latter have the weight `share`.
            self.per_position: np.ndarray = frequencies * (scale * (1 - share) + share)


def _corrections(n_dims: int, n_ctx_orig: int, base: float, fast: float, slow: float) -> tuple[float, float]:
    """The numbers of the two pairs between which YaRN changes gradually from extrapolated to interpolated angles."""

    def pair(rotations: float) -> float:
        turns = np.log(np.float64(n_ctx_orig) / (rotations * 2 * math.pi))
        return float(n_dims * turns / (2 * np.log(np.float64(base))))

    low, high = np.floor(pair(fast)), np.ceil(pair(slow))
    return max(0.0, float(low)), min(n_dims - 1.0, float(high))


@kernel("ROPE")
def rope(of: Operands) -> np.ndarray:
    node, angles = of.node, Angles(of.node)
    n_dims, half = int_param(node, 1), int_param(node, 1) // 2
    per_position = angles.per_position / of.raw(2)[0, 0, 0, :half] if of.has(2) else angles.per_position
    # theta[n_tokens, 1, pairs]: all heads have the same angles
    theta = of.raw(1).reshape(-1).astype(np.float64)[:, None, None] * per_position
    cos, sin = ((wave(theta) * angles.magnitude).astype(np.float32) for wave in (np.cos, np.sin))
    first, second = ((slice(0, half), slice(half, n_dims)) if int_param(node, 2) == 2
                     else (slice(0, n_dims, 2), slice(1, n_dims, 2)))
    x = of.f32(0)
    out, a, b = x.copy(), x[..., first], x[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out
