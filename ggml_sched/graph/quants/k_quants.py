"""Blocks of 256 elements whose scales are quantised, too: q2_K q3_K q4_K q5_K q6_K.

A block has parts of 16 or 32 elements.  Each part has a scale, and in some types a minimum, stored as integers of a few
bits; the block's f16 d and dmin are the units of these integers.  Bytes of a block, in order (name:number of bytes):

    q2_K   16 bytes: scale low nibble, minimum high nibble    qs:64                   d:f16 dmin:f16
    q3_K   high:32      qs:64       scales:12 (16 of 6 bits)  d:f16
    q4_K   d:f16 dmin:f16           scales:12 (8 pairs of 6 bits)                     qs:128
    q5_K   d:f16 dmin:f16           scales:12 (8 pairs of 6 bits)           high:32   qs:128
    q6_K   low:128      high:64     scales:16 (signed bytes)  d:f16

An element with the level q is d * scale * q - dmin * minimum.  In q3_K and q6_K q is signed, and there is no minimum.
Where levels have two bits, 32 bytes hold 128 elements: byte l those of index l, l + 32, l + 64 and l + 96.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Type
from ggml_sched.graph.quants.bits import f16_bytes, join_nibbles, limited, split_nibbles
from ggml_sched.graph.quants.fit import fit_affine, fit_signed, share

__all__ = ["FORMATS"]

Scales = tuple[np.ndarray, np.ndarray | None]
"""For each part, f32 [..., parts]: (d * scale, by which levels are multiplied; dmin * minimum, which is then
subtracted, None for types without minima)."""


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The f16 at byte `at` of each block, as f32 [..., 1]."""
    return blocks.view(np.float16)[..., at // 2 : at // 2 + 1].astype(np.float32)


# -- packing of bits ---------------------------------------------------------------------------------------


def _two_bits(packed: np.ndarray) -> np.ndarray:
    """Unpack the 64 bytes of each block to 256 levels of 0 .. 3."""
    by_lane = packed.reshape(*packed.shape[:-1], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return ((by_lane >> shifts) & 3).reshape(*packed.shape[:-1], 256)


def _join_fours(q: np.ndarray, apart: int) -> np.ndarray:
    """Pack levels of 0 .. 3, four in a byte: those of elements i, i + apart, i + 2 * apart and i + 3 * apart."""
    lanes = (q & 3).reshape(*q.shape[:-1], -1, 4, apart)
    packed = lanes[..., 0, :] | lanes[..., 1, :] << 2 | lanes[..., 2, :] << 4 | lanes[..., 3, :] << 6
    return packed.reshape(*q.shape[:-1], -1)


def _one_bit(packed: np.ndarray) -> np.ndarray:
    """Unpack the 32 bytes of each block to a bit for each element: bit j of byte l is that of element 32 j + l."""
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    return ((packed[..., None, :] >> shifts) & 1).reshape(*packed.shape[:-1], 256)


def _join_one_bit(bits: np.ndarray) -> np.ndarray:
    lanes = bits.reshape(*bits.shape[:-1], 8, 32).swapaxes(-1, -2)
    return np.packbits(lanes, axis=-1, bitorder="little")[..., 0]


def _pairs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack 12 bytes to 8 scales and 8 minima of 6 bits.  Bytes 0 .. 7 hold the first four of each in their lower six
    bits; the others have their lower four bits in bytes 8 .. 11, and the upper two in the spare bits of bytes 0 ..
    7."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=-1)
    return scales, minima


def _join_pairs(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    return np.concatenate([
        scales[..., :4] | (scales[..., 4:] >> 4) << 6,
        minima[..., :4] | (minima[..., 4:] >> 4) << 6,
        (scales[..., 4:] & 15) | (minima[..., 4:] & 15) << 4,
    ], axis=-1)


def _sixteen(packed: np.ndarray) -> np.ndarray:
    """Unpack 12 bytes to 16 scales of 6 bits: the lower four bits are nibbles of the first eight bytes, the upper two
    are in the last four bytes."""
    low = split_nibbles(packed[..., :8]).view(np.uint8)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = ((packed[..., None, 8:] >> shifts) & 3).reshape(low.shape)
    return low | high << 4


def _join_sixteen(scales: np.ndarray) -> np.ndarray:
    return np.concatenate([join_nibbles(scales), _join_fours(scales >> 4, 4)], axis=-1)


# -- dequantising --------------------------------------------------------------------------------------


def _q2(blocks: np.ndarray) -> tuple[np.ndarray, Scales]:
    packed = blocks[..., :16]
    return _two_bits(blocks[..., 16:80]), (_half(blocks, 80) * (packed & 15), _half(blocks, 82) * (packed >> 4))


def _q3(blocks: np.ndarray) -> tuple[np.ndarray, Scales]:
    q = (_two_bits(blocks[..., 32:96]) | _one_bit(blocks[..., :32]) << 2).view(np.int8) - np.int8(4)
    scales = _sixteen(blocks[..., 96:108]).view(np.int8) - np.int8(32)
    return q, (_half(blocks, 108) * scales, None)


def _q4(blocks: np.ndarray) -> tuple[np.ndarray, Scales]:
    scales, minima = _pairs(blocks[..., 4:16])
    q = split_nibbles(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32))
    return q, (_half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q5(blocks: np.ndarray) -> tuple[np.ndarray, Scales]:
    scales, minima = _pairs(blocks[..., 4:16])
    low = split_nibbles(blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32)).view(np.uint8)
    q = low.reshape(*blocks.shape[:-1], 256) | _one_bit(blocks[..., 16:48]) << 4
    return q, (_half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q6(blocks: np.ndarray) -> tuple[np.ndarray, Scales]:
    low = split_nibbles(blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)).reshape(*blocks.shape[:-1], 256)
    q = (low.view(np.uint8) | _two_bits(blocks[..., 128:192]) << 4).view(np.int8) - np.int8(32)
    return q, (_half(blocks, 208) * blocks[..., 192:208].view(np.int8), None)


# -- quantising --------------------------------------------------------------------------------------


def _halves_at(values: np.ndarray, blocks: np.ndarray, at: int) -> np.ndarray:
    """Store one f32 of each block as f16 at byte `at`; returns the values rounded to f16, as f32 [n, 1]."""
    blocks[:, at : at + 2] = f16_bytes(values)
    return values.astype(np.float16).astype(np.float32)[:, None]


def _with_minima(x: np.ndarray, blocks: np.ndarray, part: int, top: int, most: int,
                 at: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantise n blocks with parts of `part` elements; stores d and dmin at byte `at` of the blocks.

    Returns, as uint8, (levels of 0 .. top [n, 256], scales of 0 .. most [n, parts], minima likewise), which the caller
    packs.
    """
    parts = x.reshape(len(x), -1, part)
    scale, minimum = fit_affine(parts, top)
    d = _halves_at(scale.max(axis=-1) / np.float32(most), blocks, at)
    dmin = _halves_at(minimum.max(axis=-1) / np.float32(most), blocks, at + 2)
    scales, minima = share(scale, d, 0, most), share(minimum, dmin, 0, most)
    step, low = (d * scales)[..., None], (dmin * minima)[..., None]
    q = np.where(step != 0, (parts + low) / step, np.float32(0))
    return _levels(q, 0, top).reshape(x.shape), scales.astype(np.uint8), minima.astype(np.uint8)


def _without_minima(x: np.ndarray, blocks: np.ndarray, low: int, high: int, lowest: int,
                    at: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantise n blocks with 16 parts and no minima; stores d at byte `at` of the blocks.

    Returns, as int8, (levels of low .. high [n, 256], scales of lowest .. -lowest - 1 [n, 16]), which the caller packs.
    """
    parts = x.reshape(len(x), -1, 16)
    scale = fit_signed(parts, low, high)
    furthest = np.take_along_axis(scale, np.abs(scale).argmax(axis=-1)[:, None], -1)[:, 0]
    d = _halves_at(furthest / np.float32(lowest), blocks, at)
    scales = share(scale, d, lowest, -lowest - 1)
    step = (d * scales)[..., None]
    q = np.where(step != 0, parts / step, np.float32(0))
    return _levels(q, low, high).view(np.int8).reshape(x.shape), scales.astype(np.int8)


def _levels(q: np.ndarray, low: int, high: int) -> np.ndarray:
    return limited(np.rint(q), low, high).astype(np.int8).view(np.uint8)


def _to_q2(x: np.ndarray, blocks: np.ndarray) -> None:
    q, scales, minima = _with_minima(x, blocks, 16, 3, 15, 80)
    blocks[:, :16] = scales | minima << 4
    blocks[:, 16:80] = _join_fours(q, 32)


def _to_q3(x: np.ndarray, blocks: np.ndarray) -> None:
    q, scales = _without_minima(x, blocks, -4, 3, -32, 108)
    q = (q + np.int8(4)).view(np.uint8)
    blocks[:, :32] = _join_one_bit(q >> 2)
    blocks[:, 32:96] = _join_fours(q, 32)
    blocks[:, 96:108] = _join_sixteen((scales + np.int8(32)).view(np.uint8))


def _to_q4(x: np.ndarray, blocks: np.ndarray) -> None:
    q, scales, minima = _with_minima(x, blocks, 32, 15, 63, 0)
    blocks[:, 4:16] = _join_pairs(scales, minima)
    blocks[:, 16:] = join_nibbles(q.reshape(-1, 4, 64)).reshape(-1, 128)


def _to_q5(x: np.ndarray, blocks: np.ndarray) -> None:
    q, scales, minima = _with_minima(x, blocks, 32, 31, 63, 0)
    blocks[:, 4:16] = _join_pairs(scales, minima)
    blocks[:, 16:48] = _join_one_bit(q >> 4)
    blocks[:, 48:] = join_nibbles(q.reshape(-1, 4, 64)).reshape(-1, 128)


def _to_q6(x: np.ndarray, blocks: np.ndarray) -> None:
    q, scales = _without_minima(x, blocks, -32, 31, -128, 208)
    q = (q + np.int8(32)).view(np.uint8)
    blocks[:, :128] = join_nibbles(q.reshape(-1, 2, 128)).reshape(-1, 128)
    blocks[:, 128:192] = _join_fours(q >> 4, 32)
    blocks[:, 192:208] = scales.view(np.uint8)


_READERS = {Type.Q2_K: _q2, Type.Q3_K: _q3, Type.Q4_K: _q4, Type.Q5_K: _q5, Type.Q6_K: _q6}
_WRITERS = {Type.Q2_K: _to_q2, Type.Q3_K: _to_q3, Type.Q4_K: _to_q4, Type.Q5_K: _to_q5, Type.Q6_K: _to_q6}


def _dequantize(blocks: np.ndarray, kind: Type, x: np.ndarray) -> None:
    """Dequantise contiguous blocks, uint8 [..., type_size], to x, f32 [..., 256]."""
    q, (step, minimum) = _READERS[kind](blocks)
    x = x.reshape(*step.shape, 256 // step.shape[-1])
    np.multiply(q.reshape(x.shape), step[..., None], out=x)
    if minimum is not None:
        x -= minimum[..., None]


def _quantize(x: np.ndarray, kind: Type, blocks: np.ndarray) -> None:
    """Quantise n blocks: x, f32 [n, 256], to `blocks`, uint8 [n, type_size]."""
    _WRITERS[kind](x, blocks)


FORMATS = dict.fromkeys(_READERS, (_dequantize, _quantize))
