"""Columns rounded to 8 bits, as products with quantised weights read them: where they are kept, and what writes them.

The kernel that computes a result may write it rounded, too, beside its f32: then no launch rounds it.  `results` finds
the nodes for which that pays, before launches are built; `beside` gives the kernel the addresses for the rounded
result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ggml_sched._graph import BufferBase, Tensor, Type
from ggml_sched.backends.cupy.launch import Builder
from ggml_sched.backends.cupy.ops import library
from ggml_sched.backends.cupy.regions import Pointer, Region

__all__ = ["beside", "columns", "results", "size"]

PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")

NONE = np.uint64(0)


def size(n: int) -> tuple[int, int]:
    """Bytes of n elements rounded to 8 bits: of their levels; of their scales and sums."""
    return n, n // 2


def results(nodes: Sequence[Tensor], exact: bool, by_library: bool, tensor: bool) -> frozenset[Tensor]:
    """The nodes whose whole results later products among `nodes` read rounded, from where they were computed.  The
    other arguments are those of `ops.work_size`."""
    found: set[Tensor] = set()
    if exact:
        return frozenset()
    last: dict[tuple[BufferBase | None, int], Tensor] = {}
    for node in nodes:
        if not node.computes:
            continue
        if node.op in PRODUCTS and node.src[0].type.is_quantized and not (by_library and library.suits(node, tensor)):
            x = node.src[1]
            writer = last.get((x.buffer, x.offset))
            if (writer is not None and writer.type == x.type == Type.F32 and writer.n_elements == x.n_elements
                    and writer.is_contiguous and x.is_contiguous and writer.ne[0] % 32 == 0):
                found.add(writer)
        last[node.buffer, node.offset] = node
    return frozenset(found)


def columns(b: Builder, x: Tensor, region: Region) -> tuple[Pointer, Pointer]:
    """The addresses of the rounded columns of x, which lie at `region`: of levels; of scales and sums.  They are kept
    from an earlier node (`Builder.keep`), or a launch that is appended here writes them."""
    n = x.n_elements
    where, what = _whole(x, region), ("rounded", x.type)
    # Columns of inputs are not reused, because the caller may set inputs between nodes; a node's result stays until a
    # node writes to its memory.
    kept = b.kept(what, where) if x.root.computes else None
    if kept is not None:
        q, runs = kept
        return q, runs
    q, runs = value = tuple(map(b.scratch, size(n)))
    b.flat("activations.quantize", n // 4, region, *value, np.int64(n // 4), np.int32(x.type))
    if x.root.computes:
        b.keep(what, where, x.nbytes, value)
    return q, runs


def beside(b: Builder, node: Tensor) -> tuple[Pointer, Pointer]:
    """The addresses to which the kernel that computes `node` also writes the result rounded, for later products; null
    if it does not.

    This must be the node's last allocation of scratch memory, because the rounded result is kept there.
    """
    if node not in b.rounded:
        return NONE, NONE
    value = tuple(map(b.scratch, size(node.n_elements)))
    b.keep(("rounded", node.type), _whole(node, b.region(node)), node.nbytes, value)
    return value[0], value[1]


def _whole(t: Tensor, region: Region) -> Region:
    """The region of a tensor without gaps as one row, whatever its extents; of a tensor with gaps, `region` itself."""
    if not t.is_contiguous:
        return region
    nb = t.n_elements * t.type.type_size
    return region.shaped((t.n_elements, 1, 1, 1), (t.type.type_size, nb, nb, nb))
