"""Random weights and activations, and their products in f64, as the kernels of quantised weights round them."""

from functools import cache

import numpy as np

import ggml_sched as gs
from ggml_sched.graph import quants

FLOATS = ("f32", "f16", "bf16")
BLOCKS = tuple(str(kind) for kind in sorted(quants.QUANTIZED))
RNG = np.random.default_rng(9)
TIGHT = 2e-6
"""Tolerance, as a fraction of the root mean square of sums of |weight * activation|."""


def block_size(type: str) -> int:
    return gs.Type[type.upper()].block_size


@cache  # to quantise takes longer than to multiply
def weights(type: str, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Random weights: what to set a tensor of `type` to, and what it then holds, in f32."""
    kind = gs.Type[type.upper()]
    x = RNG.standard_normal(shape).astype(np.float32)
    if type in BLOCKS:
        blocks = quants.quantize(x, kind)
        return blocks, quants.dequantize(blocks, kind)
    if type == "bf16":
        x = quants.bf16_to_f32(quants.f32_to_bf16(x))
    if type == "f16":
        x = x.astype(np.float16).astype(np.float32)
    return x, x


def eight_bits(x: np.ndarray) -> np.ndarray:
    """Activations as quantised weights meet them: 32 neighbours share a scale, the largest becomes 127.

    Neighbours that are all smaller than 2^-120 count as zero.
    """
    groups = np.ascontiguousarray(x, np.float32).reshape(*x.shape[:-1], -1, 32)
    most = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(all="ignore"):
        q = np.where(most >= 2.0**-120, np.rint(groups * (np.float32(127) / most)), np.float32(0))
    return (q.astype(np.float64) * (most / np.float32(127))).reshape(x.shape)


def product(w: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, float]:
    """x @ w.T with the batches of w repeated, and the root mean square of sums of |weight * activation|."""
    w = w.reshape((1,) * (4 - w.ndim) + w.shape).astype(np.float64)
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    w = w.repeat(x.shape[1] // w.shape[1], 1).repeat(x.shape[0] // w.shape[0], 0).swapaxes(-1, -2)
    return x @ w, np.sqrt(np.mean((np.abs(x) @ np.abs(w)) ** 2))


def assert_near(got: np.ndarray, want: np.ndarray, scale: float) -> None:
    """The numbers of a `product`, within the rounding of f32 sums."""
    assert np.isfinite(got).all()
    assert np.abs(got.reshape(want.shape) - want).max() <= TIGHT * scale


def normal(*shape: int) -> np.ndarray:
    """Activations whose mean is not zero, so that offsets and minima count."""
    return (RNG.standard_normal(shape) + 0.3).astype(np.float32)
