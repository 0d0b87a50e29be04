"""Launches of copies.cu: cpy cont dup, set, repeat, concat, pad."""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cupy.launch import Builder, struct
from ggml_sched.backends.cupy.ops.registry import computes, int_param, kind
from ggml_sched.backends.cupy.regions import Region

__all__ = ["WRITABLE"]

WRITABLE = frozenset({Type.F32, Type.F16, Type.BF16, Type.I32, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0,
                      Type.IQ4_NL})
"""Types that elements can be converted to."""

BEFORE = np.dtype([("n", "<i8", 4)])
"""`struct Before` of copies.cu."""


def _units(t: Tensor) -> tuple[tuple[int, ...], int]:
    """(a tensor's extents, counted in elements or blocks; bytes of one of these)."""
    return (t.ne[0] // t.type.block_size, *t.ne[1:]), t.type.type_size


def _copy_fits(node: Tensor) -> bool:
    return node.src[0].type == node.type or node.type in WRITABLE


@computes("CPY", "DUP", "CONT", only=_copy_fits)
def _copy(b: Builder, node: Tensor) -> None:
    """cpy writes to the memory of its second source, of which the node is a view, and does not read that source."""
    a, d = b.source(node, 0), b.region(node)
    source = node.src[0]
    if source.type != node.type:
        _convert(b, a, d, node)
    elif source.ne == node.ne:
        if a != d:
            b.move(a, d, *_units(node))
    else:
        ne, size = _units(node)
        n = np.int64(node.n_elements // node.type.block_size)
        if node.is_contiguous and (a.scratch or source.is_contiguous):
            line = (int(n), 1, 1, 1)
            b.move(a.shaped(line, (size, 0, 0, 0)), d.shaped(line, (size, 0, 0, 0)), line, size)
        else:
            b.flat("copies.reorder", int(n), a.shaped(_units(source)[0]), d.shaped(ne), n, np.int32(size))


def _convert(b: Builder, a: Region, d: Region, node: Tensor) -> None:
    kinds = kind(node.src[0]), kind(node)
    if node.type.is_quantized:
        ne, _ = _units(node)
        n = node.n_elements // node.type.block_size
        b.flat("copies.quantize", 32 * n, a, d.shaped(ne), np.int64(n), *kinds)
    else:
        b.flat("copies.convert", node.n_elements, a, d, np.int64(node.n_elements), *kinds)


def _set_fits(node: Tensor) -> bool:
    """Whether the window has whole elements at distinct addresses: else the result depends on the order of writes."""
    size = node.type.type_size
    window = sorted((int_param(node, i), n) for i, n in enumerate(node.src[1].ne[1:]) if n > 1)
    if int_param(node, 3) % size or any(stride % size for stride, _ in window):
        return False
    end = node.src[1].ne[0] * size
    for stride, n in window:
        if stride < end:
            return False
        end = stride * (n - 1) + end
    return True


@computes("SET", only=_set_fits)
def _set(b: Builder, node: Tensor) -> None:
    """The result is a copy of the first source, or is that source itself in place; then the second source is copied to
    a window of it."""
    size = node.type.type_size
    whole, part, d = b.source(node, 0), b.source(node, 1), b.region(node)
    if not int_param(node, 4) and whole != d:
        b.move(whole, d, node.ne, size)
    window = d.moved(int_param(node, 3)).shaped(part.ne, (size, *(int_param(node, i) for i in range(3))))
    b.move(part, window, part.ne, size)


@computes("REPEAT")
def _repeat(b: Builder, node: Tensor) -> None:
    a, d = b.source(node, 0), b.region(node)
    if a != d:
        b.move(a, d, node.ne, node.type.type_size, repeat=True)


@computes("CONCAT")
def _concat(b: Builder, node: Tensor) -> None:
    axis, d = int_param(node, 0), b.region(node)
    # Both sources are located before the first write, because `source` copies a source that overlaps the result.
    first, second = b.source(node, 0), b.source(node, 1)
    behind = node.src[0].ne[axis] // (node.type.block_size if axis == 0 else 1)
    b.move(first, d, *_units(node.src[0]))
    b.move(second, d.moved(behind * d.nb[axis]), *_units(node.src[1]))


@computes("PAD")
def _pad(b: Builder, node: Tensor) -> None:
    b.each("copies.pad", node, struct(BEFORE, n=[int_param(node, 2 * i) for i in range(4)]))
