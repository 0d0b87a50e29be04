"""Blocks of 32 elements with one scale: q4_0 q4_1 q5_0 q5_1 q8_0, rounded as ggml's reference does.

    q4_0   d:f16                    16 bytes: the low nibble of byte j is element j, the high nibble element j + 16
    q4_1   d:f16 m:f16              16 bytes as in q4_0
    q5_0   d:f16        qh:u32      16 bytes as in q4_0; bit j of qh is the fifth bit of element j
    q5_1   d:f16 m:f16  qh:u32      16 bytes as in q4_0; qh as in q5_0
    q8_0   d:f16                    32 signed bytes

q is the stored integer.  An element is d * q + m where the block has a minimum m, else d * (q - offset), with an offset
of 8 in q4_0, 16 in q5_0 and 0 in q8_0.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Type
from ggml_sched.graph.quants.bits import f16_bytes, inverse, join_nibbles, limited, put_nibbles, round_away

__all__ = ["FORMATS"]

HALF = 16

_OFFSET = {Type.Q4_0: 8, Type.Q5_0: 16}
_WITH_MINIMUM = {Type.Q4_1: 15, Type.Q5_1: 31}
_FIVE_BITS = (Type.Q5_0, Type.Q5_1)


def _quantize(x: np.ndarray, kind: Type, blocks: np.ndarray) -> None:
    """Quantise n blocks: x, f32 [n, 32], to `blocks`, uint8 [n, type_size]."""
    if kind == Type.Q8_0:
        d = np.abs(x).max(axis=-1) / np.float32(127)
        q = round_away(x * inverse(d))
        blocks[..., 2:] = limited(q, -128, 127).astype(np.int8).view(np.uint8)
    elif kind in _OFFSET:
        # The element furthest from zero gets q = 0, and so the value d * -offset: d has the opposite sign.
        offset = _OFFSET[kind]
        at = np.abs(x).argmax(axis=-1)
        # + 0 turns -0 into 0: ggml's reference gives a block of elements -0 the same scale as a block of elements 0.
        d = (np.take_along_axis(x, at[..., None], -1)[..., 0] + np.float32(0)) / np.float32(-offset)
        q = x * inverse(d) + np.float32(offset + 0.5)
        _put_levels(limited(q, 0, 2 * offset - 1).astype(np.uint8), kind, blocks)
    else:
        low = x.min(axis=-1)
        levels = _WITH_MINIMUM[kind]
        d = (x.max(axis=-1) - low) / np.float32(levels)
        q = (x - low[..., None]) * inverse(d) + np.float32(0.5)
        blocks[..., 2:4] = f16_bytes(low)
        _put_levels(limited(q, 0, levels).astype(np.uint8), kind, blocks)
    blocks[..., :2] = f16_bytes(d)


def _dequantize(blocks: np.ndarray, kind: Type, x: np.ndarray) -> None:
    """Dequantise contiguous blocks, uint8 [..., type_size], to x, f32 [..., 32]."""
    halves = blocks.view(np.float16)          # possible as every type_size is even
    d = halves[..., 0:1].astype(np.float32)
    if kind == Type.Q8_0:
        np.multiply(blocks[..., 2:].view(np.int8), d, out=x)
        return
    q = np.empty(x.shape, np.int8)
    put_nibbles(blocks[..., -HALF:], q)
    if kind in _FIVE_BITS:
        bits = np.unpackbits(blocks[..., -HALF - 4 : -HALF], axis=-1, bitorder="little")
        q |= (bits << np.uint8(4)).view(np.int8)
    if kind in _OFFSET:
        q -= np.int8(_OFFSET[kind])
        np.multiply(q, d, out=x)
    else:
        np.multiply(q, d, out=x)
        x += halves[..., 1:2].astype(np.float32)


def _put_levels(q: np.ndarray, kind: Type, blocks: np.ndarray) -> None:
    """Store levels 0 .. 15 or 0 .. 31 [n, 32] in the bytes of their blocks."""
    blocks[..., -HALF:] = join_nibbles(q)
    if kind in _FIVE_BITS:
        blocks[..., -HALF - 4 : -HALF] = np.packbits(q >> 4, axis=-1, bitorder="little")


FORMATS = dict.fromkeys((*_OFFSET, *_WITH_MINIMUM, Type.Q8_0), (_dequantize, _quantize))
