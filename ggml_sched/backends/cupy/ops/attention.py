"""Launches of attention.cu: FLASH_ATTN_EXT.

A block computes one, four or eight columns (queries of heads that share a key head) at once.  Where that gives too few
blocks for the device, the cells of the KV cache are divided into splits, a block for each, and a second kernel combines
their results.  Caches of types that the kernel does not read are decoded first.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cupy.launch import Builder, Location, Op
from ggml_sched.backends.cupy.ops._oracle import float_param, like_oracle
from ggml_sched.backends.cupy.ops.blocks import decoded, is_multiple, loads_whole
from ggml_sched.backends.cupy.repack import is_packed

__all__ = ["OPS"]

ATTENTION = np.dtype([(name, "<i8") for name in (
    "q1", "q2", "q3", "k1", "k2", "k3", "v1", "v2", "v3", "m1", "m2", "m3", "d1", "d2", "d3", "heads_of_mask",
    "batches_of_mask")] + [(name, "<i4") for name in (
        "d", "dv", "cells", "rows", "group", "heads", "matrices", "splits", "split", "k_kind", "v_kind", "mask_kind",
        "q0", "k0", "v0", "k_wide", "v_wide")] + [(name, "<f4") for name in ("scale", "softcap", "max_bias")]
    + [("whole", "<i4"), ("nothing", "<i4")])
"""`struct Attention` of caches.cuh."""

READ = frozenset({Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0})
"""Types of KV caches that the kernels read without decoding."""

WARPS = 4
CELLS = 32
LEAST = 2 * WARPS * CELLS
"""The most cells that are not divided into splits."""

BLOCKS = 4
"""Blocks for each multiprocessor, where cells can be split: with fewer there are too few loads in flight."""

NONE = np.uint64(0)


def _cache(b: Builder, node: Tensor, i: int) -> tuple[Location, Type]:
    t, location = node.src[i], b.source_location(node, i)
    if t.type in READ and not is_packed(t):
        return location, t.type
    return decoded(b, t, location, Type.F32), Type.F32


def _optional(node: Tensor, i: int) -> Tensor | None:
    return node.src[i] if i < len(node.src) else None


def _blocks(node: Tensor) -> tuple[int, int]:
    """(columns that a block computes, number of blocks if the cells are not split)."""
    q, k, v = node.src[:3]
    columns = q.ne[1] * (q.ne[2] // k.ne[2])
    together = 1 if columns == 1 else 4 if columns <= 4 or v.ne[0] > 256 else 8
    return together, -(-columns // together) * k.ne[2] * q.ne[3]


def _splits(node: Tensor, n_multiprocessors: int) -> tuple[int, int]:
    """(number of splits, cells of each)."""
    cells = node.src[1].ne[1]
    round_of = WARPS * CELLS
    if cells <= LEAST:
        return 1, max(1, cells)
    wanted = -(-BLOCKS * n_multiprocessors // max(1, _blocks(node)[1]))
    wanted = max(1, min(wanted, cells // round_of))
    rounds = (cells - 1) // (wanted * round_of) + 1
    return (cells - 1) // (rounds * round_of) + 1, rounds * round_of


def _flash(b: Builder, node: Tensor) -> None:
    q, k, v = node.src[:3]
    mask, sinks = _optional(node, 3), _optional(node, 4)
    at = [b.source_location(node, 0)]
    a = np.zeros(1, ATTENTION)
    for letter, i in (("k", 1), ("v", 2)):
        location, kind = _cache(b, node, i)
        at.append(location)
        a[letter + "_kind"], a[letter + "0"] = kind, location.nb[0]
        a[letter + "1"], a[letter + "2"], a[letter + "3"] = location.nb[1:]
    a["q0"], a["q1"], a["q2"], a["q3"] = at[0].nb
    a["d1"], a["d2"], a["d3"] = node.nb[1:]
    a["d"], a["dv"], a["cells"], a["rows"] = k.ne[0], v.ne[0], k.ne[1], q.ne[1]
    a["heads"], a["group"], a["matrices"] = k.ne[2], q.ne[2] // k.ne[2], k.ne[2] * q.ne[3]
    a["k_wide"] = at[1].nb[0] == Type(int(a["k_kind"][0])).type_size and is_multiple(at[1], 16)
    a["v_wide"] = at[2].nb[0] == Type(int(a["v_kind"][0])).type_size and is_multiple(at[2], 8) and v.ne[0] % 2 == 0
    softcap = float_param(node, 2)
    with np.errstate(all="ignore"):
        a["scale"] = float_param(node, 0) / softcap if softcap else float_param(node, 0)
    a["softcap"], a["max_bias"] = softcap, float_param(node, 1)
    a["whole"] = 1 << (q.ne[2].bit_length() - 1)
    a["mask_kind"], a["heads_of_mask"], a["batches_of_mask"] = -1, 1, 1
    mask_at = sinks_at = NONE
    if mask is not None:
        location = b.source_location(node, 3)
        mask_at, a["mask_kind"] = location.pointer(), mask.type
        a["m1"], a["m2"], a["m3"] = location.nb[1:]
        a["heads_of_mask"], a["batches_of_mask"] = mask.ne[2:]
    if sinks is not None:
        sinks_at = b.source_location(node, 4).pointer()
    together, _ = _blocks(node)
    a["splits"], a["split"] = splits, _ = _splits(node, b.n_multiprocessors)
    columns = q.ne[1] * int(a["group"][0])
    partial = NONE
    if splits > 1:
        partial = b.scratch(_partial(node, splits))
    halves = (a["k_kind"] == a["v_kind"] == Type.F16 and a["k_wide"] and a["v_wide"] and k.ne[0] % 8 == 0)
    size = next(size for size in (64, 128, 256, 512) if v.ne[0] <= size)
    shared = 4 * together * (-(-k.ne[0] // 64) * 64 + WARPS * CELLS + size + 2 * WARPS)
    b.launch(f"{'attention.half' if halves else 'attention_any.any'}_{size}_{together}",
             (-(-columns // together), splits, min(int(a["matrices"][0]), 65535)), (32 * WARPS,),
             a, at[0].pointer(), at[1].pointer(), at[2].pointer(), mask_at, sinks_at, b.pointer(node), partial,
             shared=shared)
    if splits > 1:
        b.launch("attention.combine", (min(columns * int(a["matrices"][0]), 1 << 16),), (128,),
                 a, sinks_at, b.pointer(node), partial)


def _partial(node: Tensor, splits: int) -> int:
    """Bytes of the partial results that the splits write for `combine`."""
    return 4 * splits * node.n_elements // node.ne[0] * (node.ne[0] + 2)


def _work(node: Tensor) -> int:
    """At most: as many splits as a device of 256 multiprocessors would get."""
    if node.n_elements == 0:
        return 0
    splits = _splits(node, 256)[0]
    total = 256 + _partial(node, splits) if splits > 1 else 0
    return total + sum(4 * t.n_elements + 256 for t in node.src[1:3] if t.type.is_quantized)


def _fits(node: Tensor) -> bool:
    """Whether masks and results have rows without gaps, and heads are within the kernels' largest size."""
    q, k, v = node.src[:3]
    mask, sinks = _optional(node, 3), _optional(node, 4)
    return (k.ne[0] <= 1024 and v.ne[0] <= 512 and max(k.ne[1], q.ne[1] * q.ne[2]) < 1 << 30
            and loads_whole(k) and loads_whole(v) and (node.nb[0] == 4 or node.ne[0] <= 1)
            and (mask is None or mask.nb[0] == mask.type.type_size or mask.ne[0] <= 1)
            and (sinks is None or sinks.is_contiguous) and max(q.nb[0], k.nb[0], v.nb[0]) < 1 << 31)


OPS: dict[str, Op] = {"FLASH_ATTN_EXT": like_oracle("FLASH_ATTN_EXT", _flash, only=_fits, work=_work)}
