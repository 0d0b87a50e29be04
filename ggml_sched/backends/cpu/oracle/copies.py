"""Moving data: dup cpy cont, set, repeat, concat, pad.

Elements keep their order (innermost first) when the two shapes differ.  Types convert
through f32; equal types copy bytes unchanged.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cpu.oracle.operands import Operands, int_param
from ggml_sched.backends.cpu.oracle.registry import F32, WEIGHTS, kernel, repeated, repeats, types
from ggml_sched.graph import hostdata
from ggml_sched.graph.quants import QUANTIZED

_PLAIN = frozenset(hostdata.DTYPES)
_MOVABLE = _PLAIN | QUANTIZED


def _copy_fits(node: Tensor) -> bool:
    if not 1 <= len(node.src) <= 2 or node.src[0] is None:
        return False
    a, b = node.src[0].type, node.type
    if node.src[0].n_elements != node.n_elements:
        return False
    return (a == b and a in _MOVABLE) or (a in WEIGHTS and b in WEIGHTS) or {a, b} == {Type.F32, Type.I32}


@kernel("CPY", "DUP", "CONT", fits=_copy_fits, inplace=0b1)
def copy(of: Operands) -> np.ndarray | None:
    """A CPY node is a view of its second source: writing the result writes there, and that source is not read."""
    if of.type(0) != of.node.type and Type.I32 not in (of.type(0), of.node.type):
        return of.f32(0).reshape(of.node.ne[::-1])
    np.copyto(of.dst, of.raw(0).reshape(of.dst.shape), "unsafe")
    return None


_SET = types(None, _PLAIN, _PLAIN, like=0)


def _set_fits(node: Tensor) -> bool:
    return _SET(node) and node.src[1].type == node.type and _set_window_fits(node)


@kernel("SET", fits=_set_fits, inplace=0b1)
def set_(of: Operands) -> None:
    node, a, b = of.node, of.raw(0), of.raw(1)
    if not int_param(node, 4):
        of.dst[...] = a
    if b.size:
        strides = (*(int_param(node, i) for i in (2, 1, 0)), b.itemsize)
        np.ndarray(b.shape, b.dtype, of.dst.reshape(-1).view(np.uint8), int_param(node, 3), strides)[...] = b


def _set_window_fits(node: Tensor) -> bool:
    """Whether the result is contiguous and contains all that SET writes (by strides and an offset in op_params)."""
    if not node.is_contiguous:
        return False
    b = node.src[1]
    if b.n_elements == 0:
        return True
    strides = (b.type.type_size, *(int_param(node, i) for i in range(3)))
    end = int_param(node, 3) + b.type.type_size + sum((n - 1) * s for n, s in zip(b.ne, strides, strict=True))
    return min(strides) >= 0 <= int_param(node, 3) and end <= node.nbytes


_REPEAT = types(None, _PLAIN)


@kernel("REPEAT", fits=lambda node: _REPEAT(node) and repeats(node.src[0], node), inplace=0b1)
def repeat(of: Operands) -> None:
    of.dst[...] = repeated(of.raw(0), of.dst.shape)


_CONCAT = types(None, _MOVABLE, _MOVABLE)


def _concat_fits(node: Tensor) -> bool:
    dim = int_param(node, 0)
    if not _CONCAT(node) or node.src[1].type != node.type or not 0 <= dim < 4:
        return False
    a, b = (s.ne for s in node.src)
    return all(n == (x + y if i == dim else x) and (i == dim or x == y)
               for i, (n, x, y) in enumerate(zip(node.ne, a, b, strict=True)))


@kernel("CONCAT", fits=_concat_fits)
def concat(of: Operands) -> None:
    axis = 3 - int_param(of.node, 0)        # NumPy's order of axes is the reverse of ggml's
    of.dst[...] = np.concatenate([of.raw(0), of.raw(1)], axis)


_PAD = types(F32, F32)


def _pads(node: Tensor) -> list[tuple[int, int]]:
    """(zeros before, zeros behind) in each dimension, innermost first."""
    return [(int_param(node, 2 * i), int_param(node, 2 * i + 1)) for i in range(4)]


def _pad_fits(node: Tensor) -> bool:
    return _PAD(node) and all(min(p, q) >= 0 and n + p + q == m
                              for (p, q), n, m in zip(_pads(node), node.src[0].ne, node.ne, strict=True))


@kernel("PAD", fits=_pad_fits)
def pad(of: Operands) -> np.ndarray:
    return np.pad(of.raw(0), _pads(of.node)[::-1])
