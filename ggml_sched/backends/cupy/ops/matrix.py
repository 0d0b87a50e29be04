"""Launches of matrix products: MUL_MAT and MUL_MAT_ID.

Few columns (tokens): matvec_*.cu, which read the weights once for up to eight columns.  More: mma_*.cu, in tiles on
tensor cores, for quantised weights on devices that have these; else matmul_*.cu, in tiles.  Many: cuBLAS, where it is
installed, with weights decoded to f16 in scratch memory.  For quantised weights, columns are rounded to 8 bits once
(`exact`: they stay f32, and weights are decoded to f32).  Invariant: every load is aligned to its size, which `_fits`
and the field `wide` check.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product as iterproduct
from math import prod
from typing import NamedTuple

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cupy.launch import (
    MAX_GRID,
    N_COUNTERS,
    Argument,
    Builder,
    Counters,
    scratch_size,
    struct,
)
from ggml_sched.backends.cupy.ops import library, rounding
from ggml_sched.backends.cupy.ops.blocks import is_multiple, loads_whole, to_dense
from ggml_sched.backends.cupy.ops.registry import computes
from ggml_sched.backends.cupy.regions import Pointer, Region, Scratch
from ggml_sched.backends.cupy.repack import is_packed

__all__ = ["NORM", "PRODUCTS", "PRODUCT_AT", "few", "is_few", "most_work", "together", "work"]

PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")

FURTHER = np.dtype([(name, "<u8") for name in ("w", "d", "bias")]
                + [(name, "<i8") for name in ("rows", "w1", "d1", "first")])
"""`struct Part` of matvec.cuh."""
PRODUCT = np.dtype([(name, "<i8") for name in ("k", "rows", "columns", "matrices")]
                   + [(name, "<i8", 3) for name in "wxd"]
                   + [(name, "<i8") for name in ("n2", "r2", "r3", "id0", "id1", "n_used", "n_slots", "n_experts")]
                   + [(name, "<i4") for name in ("gate", "wide", "packed", "w0", "part", "unused")]
                   + [("bias", "<u8"), ("more", FURTHER, 2)])
"""`struct Product` of matvec.cuh; `w`, `x` and `d` are w1, w2, w3 and so on."""

NORM = np.dtype([(name, "<u8") for name in ("x", "y", "factor", "kept", "out")]
                + [("n", "<i4"), ("eps", "<f4"), ("role", "<i4"), ("unused", "<i4")])
"""`struct Norm` of matvec.cuh."""
PRODUCT_AT = {name: i for i, name in enumerate((
    "p", "w", "second", "x", "runs", "ids", "d", "word", "position", "rounded", "rounded_runs", "counters", "norm",
    "squares"))}
"""{argument of the kernels of matvec.cuh: its position}; up to `position` also of those of matmul.cuh and mma.cuh."""

FAMILY = {
    **dict.fromkeys((Type.F32, Type.F16, Type.BF16), "float"),
    **dict.fromkeys((Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0), "plain"),
    **dict.fromkeys((Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K), "k"),
    **dict.fromkeys((Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4), "table"),
}
"""{type: the part of the names of the files with its kernels}."""

FEW = 8
"""The most columns that one pass over the weights computes."""

WARPS = 4
ROWS = 2
"""In matvec.cuh: warps of a block; rows of weights of a warp."""

PART = 256
"""Of rows that several warps share, each warp takes a multiple of this many elements of k."""

TILE = 64
"""Rows and columns of a tile of matmul.cuh, and rows of one of mma.cuh."""

class Tile(NamedTuple):
    """A tile of the kernels of mma.cuh has TILE rows and `columns` columns.  `threads` of a block; `blocks`: how many a
    multiprocessor should get."""

    columns: int
    threads: int
    blocks: int


TILES = (Tile(16, 128, 8), Tile(64, 256, 2))
PIECE = 128
"""Elements of a piece of k in mma.cuh."""
PIECES = 4
"""Fewest pieces of a part of k."""
MAX_PARTS = 16
MOST = 256
"""The most multiprocessors for which parts of k are chosen and work memory is planned."""

SHARED_ROUNDED = 2 * 8 * 65 * (16 + 8)
SHARED_FLOATS = 2 * 32 * 65 * 4
"""Bytes of `struct Rounded` and `struct Floats` of matmul.cuh."""

NONE = np.uint64(0)


class Columns:
    """The columns of a product, in the form that kernels read.

    Neighbouring nodes with the same columns (queries, keys and values of one token) share one converted copy.
    `x`: the address of the columns, f32 or levels; `runs`: that of scales and sums; `strides`: from column to column,
    and over the outer two extents: in bytes for f32 columns, in columns where they are rounded to 8 bits.
    """

    def __init__(self, x: Tensor, region: Region, b: Builder, rounded: bool) -> None:
        n = x.n_elements
        self.x: Pointer
        self.runs: Pointer = NONE
        self.strides: tuple[int, ...]
        dense = (1, x.ne[1], x.ne[1] * x.ne[2])
        if rounded:
            self.strides = dense
            self.x, self.runs = rounding.columns(b, x, region)
        elif x.type == Type.F32 and (region.nb[0] == 4 or x.ne[0] == 1):
            self.x, self.strides = region.pointer(), region.nb[1:]
            self.aligned: bool = is_multiple(region, 16)
        else:
            out = self.x = b.scratch(4 * n)
            self.strides = tuple(4 * x.ne[0] * s for s in dense)
            self.aligned = x.ne[0] % 4 == 0
            to_dense(b, x, region, out, Type.F32)


def product(b: Builder, node: Tensor, dst: Tensor | None = None
            ) -> tuple[np.ndarray, Region, Columns, Region | None]:
    """The `struct Product` of a node, its weights, its columns and its expert ids (None for MUL_MAT).

    `dst`: a tensor of the node's extents that gets the result instead of the node, and shares no memory with the
    sources.
    """
    source = b.source if dst is None else lambda node, i: b.region(node.src[i])
    a, x = node.src[:2]
    ids = source(node, 2) if node.op == "MUL_MAT_ID" else None
    columns = Columns(x, source(node, 1), b, a.type.is_quantized and not b.exact)
    w = source(node, 0)
    p = struct(PRODUCT, k=a.ne[0], rows=a.ne[1], w=w.nb[1:], x=columns.strides, d=(dst or node).nb[1:], w0=w.nb[0])
    if a.type.is_quantized:
        p["packed"] = is_packed(a)
    else:
        p["wide"] = w.nb[0] == a.type.type_size and columns.aligned and is_multiple(w, 16)
    if ids is not None:
        p["columns"], p["n2"], p["r2"], p["r3"] = 1, 1, 1, 1
        p["matrices"] = ids.ne[0] * ids.ne[1]
        p["id0"], p["id1"] = ids.nb[:2]
        p["n_used"], p["n_slots"], p["n_experts"] = ids.ne[0], x.ne[1], a.ne[2]
        return p, w, columns, ids
    p["columns"], p["n2"] = x.ne[1], max(1, x.ne[2])
    p["matrices"] = x.ne[2] * x.ne[3]
    p["r2"], p["r3"] = (max(1, m // max(1, n)) for n, m in zip(a.ne[2:], x.ne[2:], strict=True))
    if x.ne[1] == 1 and 1 < p["r2"][0] <= FEW:
        # Several matrices of one column that share weights (r2 of them): computed as one matrix of r2 columns.
        r2 = int(p["r2"][0])
        p["columns"], p["n2"], p["r2"], p["matrices"] = r2, a.ne[2], 1, a.ne[2] * x.ne[3]
        for name in "xd":
            p[name][0, :2] = p[name][0, 1] * np.array([1, r2])
    return p, w, columns, ids


def few(b: Builder, node: Tensor, second: Tensor | None = None, dst: Tensor | None = None, gate: int = 0) -> None:
    """Append the product of a node with few columns.

    With `second`, other weights of the same layout, the result is the gated unit of both products, in the tensor `dst`.
    """
    a = node.src[0]
    p, w, columns, ids = product(b, node, dst)
    p["gate"] = gate
    rows = WARPS * (ROWS if second is None else 1)
    if second is None:
        rows = _share(b, a, p, -(-a.ne[1] // rows))
    rounded: tuple[Pointer, Pointer] = NONE, NONE
    if second is not None and dst is not None and _rounds(b, a, p, dst):
        rounded = rounding.beside(b, dst)
    _emit_few(b, a, p, -(-a.ne[1] // rows), w.pointer(), NONE if second is None else b.pointer(second), columns.x,
              columns.runs, NONE if ids is None else ids.pointer(), b.pointer(dst or node), b.error, b.position,
              *rounded)


def _share(b: Builder, a: Tensor, p: np.ndarray, n_blocks: int) -> int:
    """How many rows a block computes.  Usually each warp has rows of its own, which makes `n_blocks` blocks.  If these
    are no more than there are multiprocessors, and a warp would wait for memory several times, the warps of a block
    share rows instead, and `p["part"]` is set.  With more blocks that gains nothing (bench/gpu_model.py)."""
    k, n_columns = a.ne[0], int(p["columns"][0])
    at_once = 2 * 32 * (32 if a.type.is_quantized else 8)       # a unit, or eight elements, a lane; unrolled twice
    others = int(p["matrices"][0]) * -(-n_columns // FEW)
    if k <= at_once or n_blocks * others > b.n_multiprocessors:
        return WARPS * ROWS
    p["part"] = -(-k // (WARPS * PART)) * PART
    return ROWS


def _rounds(b: Builder, a: Tensor, p: np.ndarray, unit: Tensor) -> bool:
    """Whether the kernel of a gated unit can also write its result rounded to 8 bits: only if the number of rows is a
    multiple of 32, and there is a counter for each 32."""
    n_columns, matrices = int(p["columns"][0]), int(p["matrices"][0])
    return (a.ne[1] % 32 == 0 and matrices * a.ne[1] // 32 <= N_COUNTERS and unit.is_contiguous
            and (n_columns == 1 or matrices == 1 and not b.exact) and n_columns <= FEW)


def _emit_few(b: Builder, a: Tensor, p: np.ndarray, n_blocks: int, *args: Argument) -> None:
    """Append the launch of the kernel for few columns and weights `a`; `n_blocks`: blocks that divide the rows."""
    n_columns, name = int(p["columns"][0]), a.type.name.lower()
    step = 1 if n_columns == 1 else FEW
    if a.type.is_quantized and b.exact:
        step, name = 1, f"exact_{name}"
    else:
        name = f"{'packed_' if p['packed'][0] else ''}{name}_{step}"
    b.launch(f"matvec_{FAMILY[a.type]}.{name}", (n_blocks, min(int(p["matrices"][0]), MAX_GRID), -(-n_columns // step)),
             (32 * WARPS,), p, *args, Counters(), struct(NORM), NONE)


def together(b: Builder, products: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> None:
    """Append one launch of up to three products of the same few columns, with weights of one type and order.

    Each is (node, tensor that gets the result, bias to be added or None).  No result shares memory with what is read.
    """
    node, dst, _ = products[0]
    p, w, columns, _ = product(b, node, dst)
    rows = _share(b, node.src[0], p, sum(-(-other.ne[0] // (WARPS * ROWS)) for other, _, _ in products))
    first = 0
    for i, (other, to, term) in enumerate(products):
        at, added = b.region(other.src[0]), 0 if term is None else b.region(term).address
        if i:
            p["more"][0, i - 1] = (at.address, b.region(to).address, added, other.ne[0], at.nb[1], to.nb[1], first)
            p["wide"] &= is_multiple(at, 16)
        else:
            p["bias"] = added
        first += -(-other.ne[0] // rows)
    _emit_few(b, node.src[0], p, first, w.pointer(), NONE, columns.x, columns.runs, NONE, b.pointer(dst), b.error,
              b.position, NONE, NONE)


def many(b: Builder, node: Tensor) -> None:
    """Append the product of a node with many columns, or of many tokens with their experts."""
    a = node.src[0]
    is_rounded = a.type.is_quantized and not b.exact
    if is_rounded and b.tensor:
        _on_tensor_cores(b, node)
        return
    p, w, columns, ids = product(b, node)
    tiles = -(-node.src[1].ne[1] // TILE)
    pairs: Pointer = NONE
    groups: Pointer = NONE
    if ids is not None:
        pairs, groups, tiles = _grouped(b, ids, a.ne[2], TILE)
        p["matrices"] = 1
    is_exact = a.type.is_quantized and b.exact
    b.launch(f"matmul_{FAMILY[a.type]}.{'exact_' if is_exact else ''}{a.type.name.lower()}",
             (-(-a.ne[1] // TILE), tiles, min(int(p["matrices"][0]), MAX_GRID)), (256,),
             p, w.pointer(), NONE, columns.x, columns.runs, NONE, b.pointer(node), b.error, b.position,
             pairs, groups, shared=SHARED_ROUNDED if is_rounded else SHARED_FLOATS)


def _on_tensor_cores(b: Builder, node: Tensor) -> None:
    a = node.src[0]
    tile = _tile(node)
    n_parts, pieces = _parts_of_k(node, min(b.n_multiprocessors, MOST))
    p, w, columns, ids = product(b, node)
    tiles = -(-node.src[1].ne[1] // tile.columns)
    pairs: Pointer = NONE
    groups: Pointer = NONE
    partial: Pointer = NONE
    if ids is not None:
        pairs, groups, tiles = _grouped(b, ids, a.ne[2], tile.columns)
        p["matrices"] = 1
    if n_parts > 1:
        partial = b.scratch(_partial(node, n_parts))
    b.launch(f"mma_{FAMILY[a.type]}.{a.type.name.lower()}_{tile.columns}",
             (-(-a.ne[1] // TILE), tiles, n_parts if n_parts > 1 else min(int(p["matrices"][0]), MAX_GRID)),
             (tile.threads,), p, w.pointer(), NONE, columns.x, columns.runs, NONE, b.pointer(node), b.error, b.position,
             pairs, groups, partial, Counters(), np.int32(pieces if n_parts > 1 else 0))


def _tile(node: Tensor) -> Tile:
    """The tile for a product: the narrow one if the product (MUL_MAT_ID: an expert on average) has no more columns than
    this tile."""
    if node.op == "MUL_MAT_ID":
        n_pairs, n_experts = prod(node.src[2].ne[:2]), node.src[0].ne[2]
        is_narrow = (n_pairs <= TILES[0].columns * n_experts
                     and n_pairs // TILES[0].columns + min(n_experts, n_pairs) <= MAX_GRID)
    else:
        is_narrow = node.src[1].ne[1] <= TILES[0].columns
    return TILES[not is_narrow]


def _tiles(node: Tensor) -> int:
    return -(-node.ne[0] // TILE) * -(-node.ne[1] // _tile(node).columns)


def _parts_of_k(node: Tensor, n_multiprocessors: int) -> tuple[int, int]:
    """(number of parts of k, pieces of each): several parts where one matrix has too few tiles for the device."""
    total, blocks = max(1, -(-node.src[0].ne[0] // PIECE)), _tiles(node)
    if node.op == "MUL_MAT_ID" or prod(node.ne[2:]) > 1 or blocks > N_COUNTERS:
        return 1, total
    wanted = -(-_tile(node).blocks * n_multiprocessors // max(1, blocks))
    pieces = -(-total // max(1, min(wanted, total // PIECES, MAX_PARTS)))
    return -(-total // pieces), pieces


def _partial(node: Tensor, n_parts: int) -> int:
    """Bytes of the sums of all parts of k."""
    return 4 * n_parts * _tiles(node) * TILE * _tile(node).columns


def _grouped(b: Builder, ids: Region, n_experts: int, size: int) -> tuple[Scratch, Scratch, int]:
    """Append the launches of `count` and `place`.  Returns the addresses of their results (the list of (token, slot)
    pairs ordered by expert, and the table of tiles of `size` pairs), and how many tiles there are at most."""
    n_pairs = prod(ids.ne[:2])
    n_tiles = n_pairs // size + min(n_experts, n_pairs)
    counts, pairs, groups = b.scratch(4 * n_experts), b.scratch(4 * n_pairs), b.scratch(16 * n_tiles)
    grid, block, numbers = (-(-n_experts // WARPS),), (32 * WARPS,), (np.int32(n_pairs), np.int32(n_experts))
    b.launch("experts.count", grid, block, ids, counts, *numbers, b.error, b.position)
    b.launch("experts.place", grid, block, ids, counts, pairs, groups, *numbers, np.int32(size),
             np.int32(n_tiles))
    return pairs, groups, n_tiles


def is_few(node: Tensor) -> bool:
    """Whether a product has so few columns (MUL_MAT_ID: tokens) that one pass over the weights computes it.

    So do the kernels for few columns where there is no expert: they find that every id is a fault, while a grid over
    experts would be empty.
    """
    if node.op == "MUL_MAT_ID":
        return node.src[2].ne[1] <= FEW or node.src[0].ne[2] == 0
    return node.src[1].ne[1] <= FEW


def work(node: Tensor, exact: bool, by_library: bool, tensor: bool) -> int:
    """Bytes of scratch memory, at most: of converted columns, of the list and table of experts.cu, and of sums of
    parts of k; or, with cuBLAS, those of `library.multiply`."""
    if not node.n_elements:
        return 0
    if by_library and not exact and library.suits(node, tensor):
        return library.work(node)
    a, x = node.src[:2]
    is_rounded = a.type.is_quantized and not exact
    if is_rounded:
        parts = [*rounding.size(x.n_elements)]
    else:
        parts = [] if x.type == Type.F32 and (x.nb[0] == 4 or x.ne[0] == 1) else [4 * x.n_elements]
    if not is_few(node):
        size = _tile(node).columns if is_rounded and tensor else TILE
        if node.op == "MUL_MAT_ID":
            n_pairs, n_experts = prod(node.src[2].ne[:2]), a.ne[2]
            parts += [4 * n_experts, 4 * n_pairs, 16 * (n_pairs // size + min(n_experts, n_pairs))]
        n_parts = _parts_of_k(node, MOST)[0] if is_rounded and tensor else 1
        if n_parts > 1:
            parts.append(_partial(node, n_parts))
    return scratch_size(*parts)


def most_work(node: Tensor) -> int:
    """The most bytes of scratch memory that any way to compute the product needs."""
    return max(work(node, *way) for way in iterproduct((False, True), repeat=3))


def _fits(node: Tensor) -> bool:
    """Whether blocks are aligned for loads of words, the result's rows have no gaps, and extents fit in 32 bits."""
    a, x = node.src[:2]
    if node.op == "MUL_MAT_ID":
        n_pairs = prod(node.src[2].ne[:2])
        counted = n_pairs < 1 << 31 and n_pairs // TILE + a.ne[2] < 1 << 16
    else:
        counted = x.ne[2] * x.ne[3] < 1 << 31 and x.ne[1] <= TILE * MAX_GRID
    return (a.type in FAMILY and loads_whole(a) and counted and max(*a.ne[:2], a.nb[0]) < 1 << 31
            and (node.nb[0] == 4 or node.ne[0] <= 1))


@computes(*PRODUCTS, only=_fits, work=most_work)
def _mul_mat(b: Builder, node: Tensor) -> None:
    if is_few(node):
        few(b, node)
    elif b.blas and not b.exact and library.suits(node, b.tensor):
        library.multiply(b, node)
    else:
        many(b, node)
