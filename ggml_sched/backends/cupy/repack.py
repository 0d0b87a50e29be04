"""Rearranges the bytes of quantised weights so that a GPU loads them 16 bytes at a time, without more memory.

ggml's blocks have odd lengths, such as 18 bytes, so that loads from them are narrow.  Here 8 (mxfp4: 16) consecutive
blocks of a row form a bundle: the first fields of all its blocks come first, then the second fields, and so on.  A
bundle is as long as its blocks, but its fields start at multiples of 16 bytes.  This module defines that order for the
host; kernels/blocks.cuh reads it.  Rows whose number of blocks is no multiple of 8 (or 16) keep ggml's order, as do
types whose fields are aligned already.

A buffer with such weights has a method `is_packed(root)`; its reads and writes take and return bytes in ggml's order.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor, Type, label
from ggml_sched.errors import UnsupportedOp

__all__ = ["is_packed", "packs", "repack", "unpack"]

FIELDS: dict[Type, tuple[int, ...]] = {
    Type.Q4_0: (2, 16),
    Type.Q4_1: (2, 2, 16),
    Type.Q5_0: (2, 4, 16),
    Type.Q5_1: (2, 2, 4, 16),
    Type.Q8_0: (2, 32),
    Type.Q2_K: (16, 64, 2, 2),
    Type.Q3_K: (32, 64, 12, 2),
    Type.Q6_K: (128, 64, 16, 2),
    Type.IQ4_NL: (2, 16),
    Type.MXFP4: (1, 16),
}
"""The sizes of a block's fields, in ggml's order."""

_MANY = {Type.MXFP4: 16}


def together(kind: Type) -> int:
    """The number of blocks in a bundle: those that are rearranged together."""
    return _MANY.get(kind, 8)


def packs(kind: Type, ne0: int) -> bool:
    """Whether rows of `ne0` elements are rearranged."""
    return kind in FIELDS and ne0 > 0 and ne0 % (together(kind) * kind.block_size) == 0


def repack(rows: np.ndarray, kind: Type) -> np.ndarray:
    """A new array with rows in ggml's order, uint8 [..., bytes of a row], rearranged; ValueError unless they are
    bundles."""
    return _fields(rows, kind, packing=True)


def unpack(rows: np.ndarray, kind: Type) -> np.ndarray:
    """Convert rearranged rows to ggml's order: the inverse of `repack`."""
    return _fields(rows, kind, packing=False)


def _fields(rows: np.ndarray, kind: Type, packing: bool) -> np.ndarray:
    n, sizes = together(kind), FIELDS[kind]
    if rows.dtype != np.uint8 or rows.ndim < 1 or rows.shape[-1] % (n * kind.type_size):
        raise ValueError(f"{n} {kind} blocks of {kind.type_size} bytes are rearranged together, "
                         f"not {rows.dtype} {rows.shape}")
    groups = rows.reshape(*rows.shape[:-1], -1, n * kind.type_size)
    out = np.empty_like(groups)
    blocks, fields = (groups, out) if packing else (out, groups)
    blocks = blocks.reshape(*groups.shape[:-1], n, kind.type_size)
    at = 0
    for size in sizes:
        field = fields[..., n * at : n * (at + size)].reshape(*groups.shape[:-1], n, size)
        if packing:
            field[...] = blocks[..., at : at + size]
        else:
            blocks[..., at : at + size] = field
        at += size
    return out.reshape(rows.shape)


def is_packed(t: Tensor) -> bool:
    """Whether the rows of a tensor are stored rearranged.

    UnsupportedOp for a view whose rows do not start at bundles, or that has another type.
    """
    root = t
    while root.view_src is not None:
        root = root.view_src
    says = getattr(root.buffer, "is_packed", None)
    if says is None or not says(root):
        return False
    bundle = together(root.type) * root.type.type_size
    if t.type != root.type or t.view_offs % bundle or any(nb % bundle for n, nb in zip(t.ne[1:], t.nb[1:], strict=True)
                                                        if n > 1):
        raise UnsupportedOp(f"{label(t)} does not view whole rearranged rows of {label(root)} ({root.type})")
    return True
