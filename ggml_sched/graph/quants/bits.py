"""Helpers of all formats: bf16, f16 scales as bytes, packing of 4-bit levels, and C's rounding.

Invariant: values are limited to the range of an integer type before they are cast to it, NaN included, because the
result of any other cast differs between processors.
"""

from __future__ import annotations

import numpy as np

__all__ = ["bf16_to_f32", "f16_bytes", "f32_to_bf16", "inverse", "join_nibbles", "limited", "put_nibbles",
           "round_away", "split_nibbles"]


def bf16_to_f32(bits: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Convert bf16 elements, given as uint16 with their bits, to f32; exact."""
    bits = np.asarray(bits, np.uint16)
    if out is None:
        out = np.empty(bits.shape, np.float32)
    np.left_shift(bits, np.uint32(16), out=out.view(np.uint32))
    return out


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Convert f32 to bf16 elements, as uint16 with their bits: rounded to nearest, ties to even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(values, np.float32).reshape(np.shape(values)).view(np.uint32)
    high = bits >> np.uint32(16)
    rounded = (bits + (high & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)
    # Rounding could turn a NaN into an infinity or a zero, so the lower bits of a NaN are cut off instead.  Its quiet
    # bit is set, because the bits that were cut off may have been the only ones that made it a NaN.
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, high | np.uint32(64), rounded).astype(np.uint16)


def inverse(d: np.ndarray) -> np.ndarray:
    """1 / d for the scale d of each block, 0 where d is 0, as an array with a last axis of 1, by which the elements of
    blocks can be multiplied."""
    found: np.ndarray = np.where(d != 0, np.float32(1) / d, np.float32(0))
    return found[..., None]


def limited(q: np.ndarray, low: int, high: int) -> np.ndarray:
    """q clamped to low .. high, `high` for NaN, so that a cast to an integer type is defined."""
    found: np.ndarray = np.fmax(np.fmin(q, np.float32(high)), np.float32(low))
    return found


def round_away(q: np.ndarray) -> np.ndarray:
    """Round to the nearest integer, halves away from zero, as C's roundf.  trunc(q + 0.5) would round up the float just
    below 0.5."""
    whole = np.trunc(q)
    found: np.ndarray = whole + np.copysign((np.abs(q - whole) >= np.float32(0.5)).astype(np.float32), q)
    return found


def f16_bytes(values: np.ndarray) -> np.ndarray:
    """The two bytes of each value as an f16: values [...] to uint8 [..., 2]."""
    return values.astype(np.float16)[..., None].view(np.uint8)


def put_nibbles(packed: np.ndarray, q: np.ndarray) -> None:
    """Write the nibbles of bytes [..., n] to 8-bit levels q [..., 2 n]: first all low nibbles, then all high ones."""
    n = packed.shape[-1]
    q = q.view(np.uint8)
    np.bitwise_and(packed, 15, out=q[..., :n])
    np.right_shift(packed, 4, out=q[..., n:])


def split_nibbles(packed: np.ndarray) -> np.ndarray:
    """The nibbles of bytes [..., n] as int8 levels [..., 2 n]: first all low nibbles, then all high ones."""
    q = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.int8)
    put_nibbles(packed, q)
    return q


def join_nibbles(q: np.ndarray) -> np.ndarray:
    """The inverse of `split_nibbles`: the low four bits of uint8 levels [..., 2 n] as bytes [..., n]."""
    n = q.shape[-1] // 2
    return (q[..., :n] & 15) | ((q[..., n:] & 15) << 4)
