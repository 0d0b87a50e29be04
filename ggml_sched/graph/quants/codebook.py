"""Types whose levels are looked up in a table of 16 values, by 4-bit indices q: iq4_nl iq4_xs mxfp4.

          elements  bytes of a block, in order
    iq4_nl   32     d:f16, then 16 bytes: the low nibble of byte j is element j, the high nibble element j + 16
    iq4_xs  256     d:f16, a u16 with the upper bits of 8 scales, 4 bytes with the lower bits, 8 times 16 bytes as above
    mxfp4    32     e:u8, the exponent of a power of 2 (d), then 16 bytes as in iq4_nl

An element is d * table[q]; of iq4_xs d * (scale - 32) * table[q], where each 32 elements have a scale of 6 bits.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Type
from ggml_sched.graph.quants.bits import f16_bytes, join_nibbles, limited, split_nibbles
from ggml_sched.graph.quants.fit import fit_table, share

__all__ = ["FORMATS"]

UNEVEN = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The table of iq4_nl and iq4_xs: dense around zero, as weights are."""

FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""The 16 values of a 4-bit float (e2m1), doubled so that they are integers; `_halves` halves the scale in return."""

_PLACES = np.searchsorted((UNEVEN[1:] + UNEVEN[:-1]) / 2, np.arange(-254, 256) / 2, "right").astype(np.uint8)
"""For each multiple of 0.5 from -127 on the index of the nearest element of UNEVEN.  A value has the same nearest
element as the multiple of 0.5 below it, because all midpoints between elements are multiples of 0.5."""


def _uneven(scaled: np.ndarray) -> np.ndarray:
    """For each value, already divided by its scale, the index of the nearest element of the table UNEVEN."""
    return _PLACES[limited(np.floor(scaled * np.float32(2)), -254, 255).astype(np.int16) + 254]


def _halves(exponent: np.ndarray) -> np.ndarray:
    """The scale of an mxfp4 block with exponent e: 2 ** (e - 128) as f32, subnormals included
    (ggml_e8m0_to_fp32_half)."""
    e = exponent.astype(np.uint32)
    bits = np.where(e < 2, np.uint32(0x00200000) << np.minimum(e, np.uint32(1)), (e - np.uint32(1)) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)


# -- dequantising --------------------------------------------------------------------------------------


def _from_iq4_nl(blocks: np.ndarray, kind: Type, x: np.ndarray) -> None:
    d = blocks.view(np.float16)[..., :1].astype(np.float32)
    np.multiply(UNEVEN[split_nibbles(blocks[..., 2:])], d, out=x)


def _from_iq4_xs(blocks: np.ndarray, kind: Type, x: np.ndarray) -> None:
    d = blocks.view(np.float16)[..., :1].astype(np.float32)
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    high = (blocks.view(np.uint16)[..., 1:2] >> shifts).astype(np.uint8) & 3
    packed = blocks[..., 4:8]
    low = np.stack([packed & 15, packed >> 4], axis=-1).reshape(high.shape)
    step = d * ((low | high << 4).view(np.int8) - np.int8(32))
    q = split_nibbles(blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16))
    np.multiply(UNEVEN[q], step[..., None], out=x.reshape(q.shape))


def _from_mxfp4(blocks: np.ndarray, kind: Type, x: np.ndarray) -> None:
    np.multiply(FP4[split_nibbles(blocks[..., 1:])], _halves(blocks[..., :1]), out=x)


# -- quantising --------------------------------------------------------------------------------------


def _to_iq4_nl(x: np.ndarray, kind: Type, blocks: np.ndarray) -> None:
    d = fit_table(x, lambda scaled: UNEVEN[_uneven(scaled)], UNEVEN[0])
    blocks[:, :2] = f16_bytes(d)
    blocks[:, 2:] = join_nibbles(_uneven(_units(x, d.astype(np.float16).astype(np.float32))))


def _to_iq4_xs(x: np.ndarray, kind: Type, blocks: np.ndarray) -> None:
    parts = x.reshape(-1, 8, 32)
    scale = fit_table(parts, lambda scaled: UNEVEN[_uneven(scaled)], UNEVEN[0])
    furthest = np.take_along_axis(scale, np.abs(scale).argmax(axis=-1)[:, None], -1)[:, 0]
    d = (furthest / np.float32(-32)).astype(np.float16)
    blocks[:, :2] = f16_bytes(d)
    unit = d.astype(np.float32)[:, None]
    scales = share(scale, unit, -32, 31)
    blocks[:, 8:] = join_nibbles(_uneven(_units(parts, unit * scales))).reshape(-1, 128)
    stored = (scales + np.float32(32)).astype(np.uint8)
    blocks[:, 4:8] = join_nibbles(stored.reshape(-1, 4, 2)).reshape(-1, 4)
    high = (stored >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)
    blocks[:, 2:4] = np.bitwise_or.reduce(high, axis=-1)[:, None].view(np.uint8)


def _units(x: np.ndarray, step: np.ndarray) -> np.ndarray:
    """x divided by the step (scale) of its part of a block; 0 where the step is 0."""
    step = step[..., None]
    return np.where(step != 0, x / step, np.float32(0))


def _to_mxfp4(x: np.ndarray, kind: Type, blocks: np.ndarray) -> None:
    largest = np.abs(x).max(axis=-1)
    _, exponent = np.frexp(largest)            # largest = m * 2 ** exponent, m in 0.5 .. 1
    usable = np.isfinite(largest) & (largest > 0)
    e = np.where(usable, np.clip(exponent + 124, 0, 254), 0).astype(np.uint8)
    distance = np.abs(FP4[:, None, None] * _halves(e)[:, None] - x)
    distance = np.where(np.isnan(distance), np.float32(np.inf), distance)
    blocks[:, 0] = e
    blocks[:, 1:] = join_nibbles(distance.argmin(axis=0).astype(np.uint8))


FORMATS = {Type.IQ4_NL: (_from_iq4_nl, _to_iq4_nl), Type.IQ4_XS: (_from_iq4_xs, _to_iq4_xs),
           Type.MXFP4: (_from_mxfp4, _to_mxfp4)}
