"""Moving data: dup cpy cont, set, repeat, concat, pad.

Elements keep their order (innermost first) when the two shapes differ.  Types convert
through f32; equal types copy bytes unchanged.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cpu.oracle.job import Job, int_param, load_call, split_axes, spread_axes
from ggml_sched.backends.cpu.oracle.registry import F32, WEIGHTS, kernel, types
from ggml_sched.graph import hostdata
from ggml_sched.graph.quants import QUANTIZED

_PLAIN = frozenset(hostdata.DTYPES)
_MOVABLE = _PLAIN | QUANTIZED
_CAST_BY_NUMPY = ({Type.F32, Type.F16}, {Type.F32, Type.I32})


def _copy_fits(node: Tensor) -> bool:
    if not 1 <= len(node.src) <= 2 or node.src[0] is None:
        return False
    a, b = node.src[0].type, node.type
    if node.src[0].n_elements != node.n_elements:
        return False
    return (a == b and a in _MOVABLE) or (a in WEIGHTS and b in WEIGHTS) or {a, b} == {Type.F32, Type.I32}


@kernel("CPY", "DUP", "CONT", fits=_copy_fits, inplace=0b1)
def copy(job: Job) -> None:
    """cpy writes to the memory of its second source, of which the node is a view, and does not read that source."""
    a, b = job.type(0), job.node.type
    src, dst = job.src(0), job.dst
    if src.size == 0:
        return
    same_ne = job.node.src[0].ne == job.node.ne
    if a == b or {a, b} in _CAST_BY_NUMPY:
        if same_ne:
            for part in job.parts():
                part.do(np.copyto, part.cut(dst), part.raw(0), "unsafe")
            return
        if dst.flags.c_contiguous:
            dst = dst.reshape(src.shape)
        elif src.flags.c_contiguous:
            src = src.reshape(dst.shape)
        else:
            flat = job.shared.take(src.shape, src.dtype)
            job.do(np.copyto, flat, src)
            src = flat.reshape(dst.shape)
        job.part().do(np.copyto, dst, src, "unsafe")
        return
    if same_ne:
        for part in job.parts():
            part.store(part.f32(0))
        return
    flat = job.shared.take(job.node.src[0].ne[::-1])
    job.before.append(load_call(src, a, flat))
    job.part().store(flat.reshape(job.node.ne[::-1]))


_SET = types(None, _PLAIN, _PLAIN, like=0)


def _set_fits(node: Tensor) -> bool:
    return _SET(node) and node.src[1].type == node.type and _set_window_fits(node)


@kernel("SET", fits=_set_fits, inplace=0b1)
def set_(job: Job) -> None:
    node, b, dst = job.node, job.src(1), job.dst
    if not int_param(node, 4):
        for part in job.parts():
            part.do(np.copyto, part.cut(dst), part.raw(0))
    if b.size:
        strides = (*(int_param(node, i) for i in (2, 1, 0)), b.itemsize)
        window = np.ndarray(b.shape, b.dtype, dst.reshape(-1).view(np.uint8), int_param(node, 3), strides)
        job.after.append(partial(np.copyto, window, b))


def _set_window_fits(node: Tensor) -> bool:
    """The window lies inside a contiguous result."""
    if not node.is_contiguous:
        return False
    b = node.src[1]
    if b.n_elements == 0:
        return True
    strides = (b.type.type_size, *(int_param(node, i) for i in range(3)))
    end = int_param(node, 3) + b.type.type_size + sum((n - 1) * s for n, s in zip(b.ne, strides, strict=True))
    return min(strides) >= 0 <= int_param(node, 3) and end <= node.nbytes


_REPEAT = types(None, _PLAIN)


@kernel("REPEAT", fits=lambda node: _REPEAT(node) and _repeat_fits(node), inplace=0b1)
def repeat(job: Job) -> None:
    src, dst = job.src(0), job.dst
    if dst.size:
        job.part().do(np.copyto, split_axes(dst, src.shape), spread_axes(src))


def _repeat_fits(node: Tensor) -> bool:
    return node.n_elements == 0 or all(n and m % n == 0 for n, m in zip(node.src[0].ne, node.ne, strict=True))


_CONCAT = types(None, _MOVABLE, _MOVABLE)


def _concat_fits(node: Tensor) -> bool:
    dim = int_param(node, 0)
    if not _CONCAT(node) or node.src[1].type != node.type or not 0 <= dim < 4:
        return False
    a, b = (s.ne for s in node.src)
    return all(n == (x + y if i == dim else x) and (i == dim or x == y)
               for i, (n, x, y) in enumerate(zip(node.ne, a, b, strict=True)))


@kernel("CONCAT", fits=_concat_fits)
def concat(job: Job) -> None:
    a, b, dst = job.src(0), job.src(1), job.dst
    axis = 3 - int_param(job.node, 0)      # of 4-D arrays, and of the blocks of quantised ones
    front = (slice(None),) * axis
    cut = a.shape[axis]
    job.part().do(np.copyto, dst[(*front, slice(None, cut))], a)
    job.part().do(np.copyto, dst[(*front, slice(cut, None))], b)


_PAD = types(F32, F32)


def _pad_fits(node: Tensor) -> bool:
    if not _PAD(node):
        return False
    left, right = ([int_param(node, 2 * i + side) for i in range(4)] for side in (0, 1))
    return min(*left, *right) >= 0 and all(
        n + p + q == m for n, p, q, m in zip(node.src[0].ne, left, right, node.ne, strict=True))


@kernel("PAD", fits=_pad_fits)
def pad(job: Job) -> None:
    src, dst = job.src(0), job.dst
    starts = [int_param(job.node, 2 * i) for i in (3, 2, 1, 0)]
    window = dst[tuple(slice(p, p + n) for p, n in zip(starts, src.shape, strict=True))]
    part = job.part()
    part.do(dst.fill, 0)
    part.do(np.copyto, window, src)
