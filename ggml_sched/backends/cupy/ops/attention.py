"""Launches of attention.cu, attention_any.cu and attention_mma.cu: FLASH_ATTN_EXT.

A block computes one, four or eight columns (queries of heads that share a key head) at once, so that a cell is read
once for them.  Many columns over caches in f16 are computed on tensor cores, 16 or 64 in a block (`exact`: never).
If there are too few blocks for the device, the cells of the KV cache are divided into shares, a block for each, and the
block that ends last joins the results.  Caches of types that no kernel reads are first decoded to f32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cupy.launch import MAX_GRID, N_COUNTERS, Builder, Counters, scratch_size, struct
from ggml_sched.backends.cupy.ops import rounding
from ggml_sched.backends.cupy.ops.blocks import is_multiple, loads_whole, to_dense
from ggml_sched.backends.cupy.ops.registry import computes, float_param, optional
from ggml_sched.backends.cupy.regions import Pointer, Region
from ggml_sched.backends.cupy.repack import is_packed

ATTENTION = np.dtype([(name, "<i8", 3) for name in "qkvmd"]
                     + [(name, "<i8") for name in ("heads_of_mask", "batches_of_mask")]
                     + [(name, "<i4") for name in (
                         "d_k", "d_v", "cells", "rows", "group", "heads", "matrices", "shares", "share", "k_kind",
                         "v_kind", "mask_kind", "q0", "k0", "v0", "k_wide", "v_wide")]
                     + [(name, "<f4") for name in ("scale", "softcap", "max_bias")]
                     + [(name, "<i4") for name in ("whole", "chunk", "m_wide", "unused")])
"""`struct Attention` of caches.cuh; `q`, `k`, `v`, `m` and `d` are q1, q2, q3 and so on."""

READ = frozenset({Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0})
"""Types of KV caches that the kernels read without decoding."""

WARPS = 4
CHUNKS = (32, 16)
"""Cells that a warp takes at once: 16 where 32 would give fewer blocks than there are multiprocessors."""
LEAST = 256
"""Up to this many cells, one block for each multiprocessor is enough."""
BLOCKS = 4
"""Blocks for each multiprocessor, for more than LEAST cells: with fewer blocks too few loads are in flight."""
TILE_BLOCKS = 2
"""Blocks of 16 columns on tensor cores for each multiprocessor, for more than LEAST cells."""
MOST = 256
"""The most multiprocessors for which shares are chosen and work memory is planned."""
MAX_SHARES = WARPS * max(CHUNKS)
"""The most shares: the kernels' shared memory has room for so many factors, one for each share."""

MOST_SHARED = (99 << 10) - 64
"""Bytes of dynamic shared memory that a block may have on every device from sm_80 on, beside its static variables."""
RESULTS = 2 * 4 * 64 + WARPS * 2 * 16 * 16 + 4 * WARPS
"""Bytes of shared memory that attention_mma.cuh uses before the tiles, for results and weights of warps."""
MOST_FEW = 8
"""Up to this many columns of a key head are computed in f32; more on tensor cores, where that is possible."""
MANY_CELLS = 4096
"""From this many cells on, more than MOST_FEW / 2 columns suffice for tensor cores: with so many cells, operations in
f32 take longer than reading the cells on an A100 and an H200, and no device is slower with tensor cores
(bench/gpu_model.py)."""
WIDE_TILES = 32
"""Tensor cores compute up to this many columns in blocks of 16, more columns in blocks of 64."""

NONE = np.uint64(0)


class Tile(NamedTuple):
    """How many columns, and cells of the cache, a block of a kernel of attention_mma.cuh computes at once.  The kernel
    is for values of up to `size` elements."""

    size: int
    columns: int
    cells: int

    def shared(self, node: Tensor, shares: int) -> int:
        """Bytes of shared memory of a block."""
        part = -(-node.src[1].ne[0] // 32)
        pitch = 64 * (part if part % 2 else part + 1)
        tiles = self.cells * (pitch + 2 * self.size + 16) + (self.columns * pitch if self.size > 128 else 0)
        return RESULTS + max(tiles, 4 * self.columns * (self.size + 4),
                             4 * self.columns * MAX_SHARES if shares > 1 else 0)


def _cache(b: Builder, node: Tensor, i: int) -> tuple[Region, Type]:
    t, region = node.src[i], b.source(node, i)
    if t.type in READ and not is_packed(t):
        return region, t.type
    dense = b.scratch(4 * t.n_elements)
    to_dense(b, t, region, dense, Type.F32)
    nb = (4, 4 * t.ne[0], 4 * t.ne[0] * t.ne[1], 4 * t.ne[0] * t.ne[1] * t.ne[2])
    return Region(dense.offset, t.ne, nb, scratch=True), Type.F32


def _blocks(node: Tensor) -> tuple[int, int]:
    """(columns that a block computes, number of blocks if the cells are not divided)."""
    q, k, v = node.src[:3]
    columns = q.ne[1] * (q.ne[2] // k.ne[2])
    together = 1 if columns == 1 else 4 if columns <= 4 or v.ne[0] > 256 else 8
    return together, -(-columns // together) * k.ne[2] * q.ne[3]


def _shares(node: Tensor, n_multiprocessors: int) -> tuple[int, int, int]:
    """(number of shares, cells of each, cells that a warp takes at once) without tensor cores."""
    cells, blocks = node.src[1].ne[1], max(1, _blocks(node)[1])
    wanted = -(-n_multiprocessors * (1 if cells <= LEAST else BLOCKS) // blocks)
    if blocks > N_COUNTERS or wanted <= 1 or not cells:
        return 1, max(1, cells), CHUNKS[cells <= WARPS * CHUNKS[-1]]
    wanted = min(wanted, MAX_SHARES)
    chunk = next((n for n in CHUNKS if min(wanted, cells // (WARPS * n)) * blocks >= n_multiprocessors), CHUNKS[-1])
    rounds = (cells - 1) // (max(1, min(wanted, cells // (WARPS * chunk))) * WARPS * chunk) + 1
    return (cells - 1) // (rounds * WARPS * chunk) + 1, rounds * WARPS * chunk, chunk


def _tile(node: Tensor) -> Tile | None:
    """The tile for a node over caches in f16; None: it is computed without tensor cores."""
    q, k, v = node.src[:3]
    columns = q.ne[1] * (q.ne[2] // k.ne[2])
    if columns <= (MOST_FEW if k.ne[1] < MANY_CELLS else MOST_FEW // 2) or k.ne[0] % 8 or v.ne[0] % 8:
        return None
    size = next(size for size in (64, 128, 256, 512) if max(k.ne[0], v.ne[0]) <= size or size == 512)
    wide = columns > WIDE_TILES and size < 512
    tile = Tile(size, 64 if wide else 16, 64 if size <= 128 or (size == 256 and not wide) else 32)
    return tile if tile.shared(node, MAX_SHARES) <= MOST_SHARED else None


def _tile_shares(node: Tensor, tile: Tile, n_multiprocessors: int) -> tuple[int, int]:
    """(number of shares, cells of each, whole tiles) with tensor cores."""
    q, k = node.src[:2]
    blocks = max(1, -(-q.ne[1] * (q.ne[2] // k.ne[2]) // tile.columns) * k.ne[2] * q.ne[3])
    tiles = max(1, -(-k.ne[1] // tile.cells))
    wanted = -(-n_multiprocessors * (1 if tile.columns == 64 or k.ne[1] <= LEAST else TILE_BLOCKS) // blocks)
    if blocks > N_COUNTERS:
        wanted = 1
    each = -(-tiles // max(1, min(wanted, tiles, MAX_SHARES)))
    return -(-tiles // each), each * tile.cells


def _partial(node: Tensor, shares: int) -> int:
    """Bytes of the results of all shares, before they are joined."""
    return 4 * shares * node.n_elements // node.ne[0] * (node.ne[0] + 2)


def _work(node: Tensor) -> int:
    """Bytes of scratch memory, at most: for as many shares as a device with MOST multiprocessors gets."""
    if node.n_elements == 0:
        return 0
    tile = _tile(node)
    shares = max(_shares(node, MOST)[0], 1 if tile is None else _tile_shares(node, tile, MOST)[0])
    total = 256 + _partial(node, shares) if shares > 1 else 0
    total += scratch_size(*rounding.size(node.n_elements))
    return total + sum(4 * t.n_elements + 256 for t in node.src[1:3] if t.type.is_quantized)


def _fits(node: Tensor) -> bool:
    """Whether masks and results have rows without gaps, k and v are aligned for whole blocks, and heads are within the
    kernels' largest size."""
    q, k, v = node.src[:3]
    mask, sinks = optional(node, 3), optional(node, 4)
    return (k.ne[0] <= 1024 and v.ne[0] <= 512 and max(k.ne[1], q.ne[1] * q.ne[2]) < 1 << 30
            and loads_whole(k) and loads_whole(v) and (node.nb[0] == 4 or node.ne[0] <= 1)
            and (mask is None or mask.nb[0] == mask.type.type_size or mask.ne[0] <= 1)
            and (sinks is None or sinks.is_contiguous) and max(q.nb[0], k.nb[0], v.nb[0]) < 1 << 31)


@computes("FLASH_ATTN_EXT", only=_fits, work=_work)
def _flash(b: Builder, node: Tensor) -> None:
    q, k, v = node.src[:3]
    at_q = b.source(node, 0)
    (at_k, k_kind), (at_v, v_kind) = _cache(b, node, 1), _cache(b, node, 2)
    k_wide = at_k.nb[0] == k_kind.type_size and is_multiple(at_k, 16)
    v_wide = at_v.nb[0] == v_kind.type_size and is_multiple(at_v, 8) and v.ne[0] % 2 == 0
    softcap, group = float_param(node, 2), q.ne[2] // k.ne[2]
    with np.errstate(all="ignore"):
        scale = float_param(node, 0) / softcap if softcap else float_param(node, 0)
    halves = k_kind == v_kind == Type.F16 and k_wide and v_wide and k.ne[0] % 8 == 0
    tile = _tile(node) if halves and b.tensor and not b.exact and is_multiple(at_v, 16) else None
    n_multiprocessors = min(b.n_multiprocessors, MOST)
    shares, share, chunk = (_shares(node, n_multiprocessors) if tile is None
                            else (*_tile_shares(node, tile, n_multiprocessors), 0))
    a = struct(
        ATTENTION, q=at_q.nb[1:], k=at_k.nb[1:], v=at_v.nb[1:], d=node.nb[1:], q0=at_q.nb[0], k0=at_k.nb[0],
        v0=at_v.nb[0], k_kind=k_kind, v_kind=v_kind, k_wide=k_wide, v_wide=v_wide, d_k=k.ne[0], d_v=v.ne[0],
        cells=k.ne[1], rows=q.ne[1], heads=k.ne[2], group=group, matrices=k.ne[2] * q.ne[3], scale=scale,
        softcap=softcap, max_bias=float_param(node, 1), whole=1 << (q.ne[2].bit_length() - 1), mask_kind=-1,
        heads_of_mask=1, batches_of_mask=1, shares=shares, share=share,
        chunk=chunk)
    mask, sinks = optional(node, 3), optional(node, 4)
    mask_at: Pointer = NONE
    sinks_at: Pointer = NONE
    partial: Pointer = NONE
    if mask is not None:
        region = b.source(node, 3)
        mask_at, a["mask_kind"], a["m"] = region.pointer(), mask.type, region.nb[1:]
        a["heads_of_mask"], a["batches_of_mask"] = mask.ne[2:]
        a["m_wide"] = mask.type == Type.F16 and is_multiple(region, 16)
    if sinks is not None:
        sinks_at = b.source(node, 4).pointer()
    if shares > 1:
        partial = b.scratch(_partial(node, shares))
    rounded = rounding.beside(b, node)
    if tile is not None:
        kernel, together = f"attention_mma.tiles_{tile.size}_{tile.columns}", tile.columns
        shared = tile.shared(node, shares)
    else:
        together, _ = _blocks(node)
        size = next(size for size in (64, 128, 256, 512) if v.ne[0] <= size)
        kernel = f"{'attention.half' if halves else 'attention_any.any'}_{size}_{together}"
        shared = 4 * together * (-(-k.ne[0] // 64) * 64 + MAX_SHARES + size + 2 * WARPS)
    b.launch(kernel, (-(-q.ne[1] * group // together), shares, min(k.ne[2] * q.ne[3], MAX_GRID)), (32 * WARPS,), a,
             at_q.pointer(), at_k.pointer(), at_v.pointer(), mask_at, sinks_at, b.pointer(node), partial, Counters(),
             *rounded, shared=shared)
