"""Block quantisation: f32 rows to ggml's q4_0 q4_1 q5_0 q5_1 q8_0 blocks and back, and bf16.

Owns the byte layout of those blocks, bit for bit ggml's, and its reference rounding
(quantize_row_*_ref, dequantize_row_*).  A block covers 32 neighbouring elements of a
row and is an array of `type_size` bytes here:

    q4_0   d:f16                    16 bytes: element j low nibble, j + 16 high nibble
    q4_1   d:f16 m:f16              the same
    q5_0   d:f16        qh:u32      the same; bit j of qh is the fifth bit of element j
    q5_1   d:f16 m:f16  qh:u32      the same
    q8_0   d:f16                    32 signed bytes

Element = d * (q - offset), or d * q + m where the block has a minimum m.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Type
from ggml_sched.errors import UnsupportedOp

__all__ = ["QUANTIZED", "bf16_to_f32", "dequantize", "f32_to_bf16", "quantize"]

BLOCK = 32
HALF = BLOCK // 2

QUANTIZED = frozenset({Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0})
"""The quantised types that this module knows."""

_OFFSET = {Type.Q4_0: 8, Type.Q5_0: 16}
_WITH_MINIMUM = {Type.Q4_1: 15, Type.Q5_1: 31}


def bf16_to_f32(bits: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """uint16 bf16 patterns as f32: exact."""
    bits = np.asarray(bits, np.uint16)
    if out is None:
        out = np.empty(bits.shape, np.float32)
    np.left_shift(bits, np.uint32(16), out=out.view(np.uint32))
    return out


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """f32 as uint16 bf16 patterns: rounded to nearest, ties to even; a NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, np.float32).reshape(np.shape(values)).view(np.uint32)
    high = bits >> np.uint32(16)
    rounded = (bits + (high & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)
    # Rounding could carry a NaN's payload into the sign or away: set its quiet bit instead.
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, high | np.uint32(64), rounded).astype(np.uint16)


def quantize(values: np.ndarray, kind: Type) -> np.ndarray:
    """f32 [..., ne0] -> uint8 blocks [..., ne0 / 32, type_size].

    Raises ValueError for rows that do not hold whole blocks, UnsupportedOp for another type.
    """
    _require(kind)
    x = np.asarray(values, np.float32)
    row = x.shape[-1] if x.ndim else 1
    if row % BLOCK:
        raise ValueError(f"rows of {row} elements do not hold whole {kind} blocks of {BLOCK}")
    x = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    blocks = np.empty((*x.shape[:-1], kind.type_size), np.uint8)
    if x.size == 0:
        return blocks
    with np.errstate(all="ignore"):
        if kind == Type.Q8_0:
            d = np.abs(x).max(axis=-1) / np.float32(127)
            q = _round(x * _inverse(d))
            blocks[..., 2:] = _limited(q, -128, 127).astype(np.int8).view(np.uint8)
        elif kind in _OFFSET:
            _quantize_signed(x, kind, blocks)
            return blocks
        else:
            low = x.min(axis=-1)
            levels = _WITH_MINIMUM[kind]
            d = (x.max(axis=-1) - low) / np.float32(levels)
            q = (x - low[..., None]) * _inverse(d) + np.float32(0.5)
            blocks[..., 2:4] = _f16_bytes(low)
            _put_nibbles(_limited(q, 0, levels).astype(np.uint8), kind, blocks)
        blocks[..., :2] = _f16_bytes(d)
    return blocks


def _quantize_signed(x: np.ndarray, kind: Type, blocks: np.ndarray) -> None:
    """q4_0 and q5_0: the element furthest from zero, sign included, becomes the lowest level."""
    offset = _OFFSET[kind]
    at = np.abs(x).argmax(axis=-1)
    # + 0: the reference starts from +0, so that a block of -0 has the scale of a block of 0.
    d = (np.take_along_axis(x, at[..., None], -1)[..., 0] + np.float32(0)) / np.float32(-offset)
    q = x * _inverse(d) + np.float32(offset + 0.5)
    blocks[..., :2] = _f16_bytes(d)
    _put_nibbles(_limited(q, 0, 2 * offset - 1).astype(np.uint8), kind, blocks)


def dequantize(blocks: np.ndarray, kind: Type, out: np.ndarray | None = None) -> np.ndarray:
    """uint8 blocks [..., n, type_size] -> f32 [..., n * 32]; `out`, if given, is contiguous.

    Raises ValueError for blocks of another size, UnsupportedOp for another type.
    """
    _require(kind)
    blocks = np.asarray(blocks)
    if blocks.dtype != np.uint8 or blocks.ndim < 2 or blocks.shape[-1] != kind.type_size:
        raise ValueError(f"{kind} blocks are uint8 [..., n, {kind.type_size}], "
                         f"not {blocks.dtype} {blocks.shape}")
    shape = (*blocks.shape[:-2], blocks.shape[-2] * BLOCK)
    if out is None:
        out = np.empty(shape, np.float32)
    if blocks.size == 0:
        return out
    x = out.reshape(*blocks.shape[:-1], BLOCK)
    if not blocks.flags.c_contiguous:
        blocks = np.ascontiguousarray(blocks)
    halves = blocks.view(np.float16)          # every block size is even
    d = halves[..., 0:1].astype(np.float32)
    with np.errstate(all="ignore"):
        if kind == Type.Q8_0:
            np.multiply(blocks[..., 2:].view(np.int8), d, out=x)
            return out
        nibbles = blocks[..., -HALF:]
        q = np.empty(x.shape, np.int8)
        np.bitwise_and(nibbles, 15, out=q[..., :HALF].view(np.uint8))
        np.right_shift(nibbles, 4, out=q[..., HALF:].view(np.uint8))
        if kind in (Type.Q5_0, Type.Q5_1):
            bits = np.unpackbits(blocks[..., -HALF - 4 : -HALF], axis=-1, bitorder="little")
            q |= (bits << np.uint8(4)).view(np.int8)
        if kind in _OFFSET:
            q -= np.int8(_OFFSET[kind])
            np.multiply(q, d, out=x)
        else:
            np.multiply(q, d, out=x)
            x += halves[..., 1:2].astype(np.float32)
    return out


def _require(kind: Type) -> None:
    if kind not in QUANTIZED:
        raise UnsupportedOp(f"type {kind} is not one of the quantised types that are implemented: "
                            f"{', '.join(sorted(map(str, QUANTIZED)))}")


def _inverse(d: np.ndarray) -> np.ndarray:
    """1 / d, 0 where d is 0, ready to multiply the elements of its block."""
    return np.where(d != 0, np.float32(1) / d, np.float32(0))[..., None]


def _limited(q: np.ndarray, low: int, high: int) -> np.ndarray:
    """q within low .. high, `high` for NaN: no cast below ever leaves its type's range."""
    return np.fmax(np.fmin(q, np.float32(high)), np.float32(low))


def _round(q: np.ndarray) -> np.ndarray:
    """C's roundf: halves away from zero (x + 0.5 would be wrong just below a half)."""
    whole = np.trunc(q)
    return whole + np.copysign((np.abs(q - whole) >= np.float32(0.5)).astype(np.float32), q)


def _f16_bytes(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16)[..., None].view(np.uint8)


def _put_nibbles(q: np.ndarray, kind: Type, blocks: np.ndarray) -> None:
    """Levels 0 .. 15 or 31 of whole blocks into their bytes."""
    blocks[..., -HALF:] = (q[..., :HALF] & 15) | ((q[..., HALF:] & 15) << 4)
    if kind in (Type.Q5_0, Type.Q5_1):
        blocks[..., -HALF - 4 : -HALF] = np.packbits(q >> 4, axis=-1, bitorder="little")
