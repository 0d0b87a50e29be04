"""Block quantisation: f32 rows to ggml's blocks and back, and bf16.

A block holds 32 or 256 consecutive elements of a row, as an array of `type_size` bytes.  Dequantising gives exactly the
values of ggml (dequantize_row_*).  Quantising to the types of `plain` and to mxfp4 gives exactly the blocks of ggml's
reference (quantize_row_*_ref); for other types `fit` searches scales, so blocks differ from ggml's.  A level is the
integer that an element is before its scale is applied.

    plain      q4_0 q4_1 q5_0 q5_1 q8_0: 32 levels and a scale         fit     searches scales
    k_quants   q2_K to q6_K: 256 levels, and quantised scales          bits    bf16, nibbles, rounding
    codebook   iq4_nl iq4_xs mxfp4: levels are looked up in a table
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from ggml_sched._graph import Type
from ggml_sched.errors import UnsupportedOp
from ggml_sched.graph.quants import codebook, k_quants, plain
from ggml_sched.graph.quants.bits import bf16_to_f32, f32_to_bf16

__all__ = ["QUANTIZED", "bf16_to_f32", "dequantize", "f32_to_bf16", "quantize"]

Coder: TypeAlias = Callable[[np.ndarray, Type, np.ndarray], None]
"""A function (source, type, result): writes the blocks of the source's elements to the result, or the reverse."""

FORMATS: Mapping[Type, tuple[Coder, Coder]] = plain.FORMATS | k_quants.FORMATS | codebook.FORMATS
"""{quantised type: its functions (dequantize, quantize) for arrays of blocks}."""

QUANTIZED = frozenset(FORMATS)
"""The quantised types that this package knows."""

CHUNK = 1 << 16
"""How many elements are quantised at a time, so that the temporary arrays stay in the cache of a core."""


def quantize(values: np.ndarray, kind: Type) -> np.ndarray:
    """Quantise rows of f32 [..., ne0] to uint8 blocks [..., ne0 / block_size, type_size].

    Raises ValueError for rows that do not hold whole blocks, UnsupportedOp for another type.
    """
    _, encode = _format(kind)
    x = np.asarray(values, np.float32)
    row, block = x.shape[-1] if x.ndim else 1, kind.block_size
    if row % block:
        raise ValueError(f"rows of {row} elements do not hold whole {kind} blocks of {block}")
    shape = (*x.shape[:-1], row // block)
    x = x.reshape(-1, block)
    blocks = np.empty((len(x), kind.type_size), np.uint8)
    step = CHUNK // block
    with np.errstate(all="ignore"):
        for start in range(0, len(x), step):
            encode(x[start : start + step], kind, blocks[start : start + step])
    return blocks.reshape(*shape, kind.type_size)


def dequantize(blocks: np.ndarray, kind: Type, out: np.ndarray | None = None) -> np.ndarray:
    """Dequantise uint8 blocks [..., n, type_size] to f32 [..., n * block_size].  `out`: a contiguous array for the
    result.

    Raises ValueError for blocks of another size, UnsupportedOp for another type.
    """
    decode, _ = _format(kind)
    blocks = np.asarray(blocks)
    if blocks.dtype != np.uint8 or blocks.ndim < 2 or blocks.shape[-1] != kind.type_size:
        raise ValueError(f"{kind} blocks are uint8 [..., n, {kind.type_size}], "
                         f"not {blocks.dtype} {blocks.shape}")
    if out is None:
        out = np.empty((*blocks.shape[:-2], blocks.shape[-2] * kind.block_size), np.float32)
    if blocks.size:
        if not blocks.flags.c_contiguous:
            blocks = np.ascontiguousarray(blocks)
        with np.errstate(all="ignore"):
            decode(blocks, kind, out.reshape(*blocks.shape[:-1], kind.block_size))
    return out


def _format(kind: Type) -> tuple[Coder, Coder]:
    found = FORMATS.get(kind)
    if found is None:
        raise UnsupportedOp(f"type {kind} is not one of the quantised types that are implemented: "
                            f"{', '.join(sorted(map(str, QUANTIZED)))}")
    return found
