"""Moving data: dup cpy cont, set, repeat, concat, pad.

Elements keep their order (innermost first) when the two shapes differ.  Different types are converted through f32;
equal types are copied byte by byte.
"""

from __future__ import annotations

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cpu.oracle.operands import Operands, int_param
from ggml_sched.backends.cpu.oracle.registry import kernel, repeated


@kernel("CPY", "DUP", "CONT")
def copy(of: Operands) -> np.ndarray | None:
    """A CPY node is a view of its second source: writing the result writes there, and that source is not read."""
    if of.type(0) != of.node.type and Type.I32 not in (of.type(0), of.node.type):
        return of.f32(0).reshape(of.node.ne[::-1])
    np.copyto(of.dst, of.raw(0).reshape(of.dst.shape), "unsafe")
    return None


@kernel("SET")
def set_(of: Operands) -> None:
    node, a, b = of.node, of.raw(0), of.raw(1)
    if not int_param(node, 4):
        of.dst[...] = a
    if b.size:
        strides = (*(int_param(node, i) for i in (2, 1, 0)), b.itemsize)
        np.ndarray(b.shape, b.dtype, of.dst.reshape(-1).view(np.uint8), int_param(node, 3), strides)[...] = b


@kernel("REPEAT")
def repeat(of: Operands) -> None:
    of.dst[...] = repeated(of.raw(0), of.dst.shape)


@kernel("CONCAT")
def concat(of: Operands) -> None:
    axis = 3 - int_param(of.node, 0)        # NumPy's order of axes is the reverse of ggml's
    of.dst[...] = np.concatenate([of.raw(0), of.raw(1)], axis)


def _pads(node: Tensor) -> list[tuple[int, int]]:
    """(zeros before, zeros after) in each dimension, innermost first."""
    return [(int_param(node, 2 * i), int_param(node, 2 * i + 1)) for i in range(4)]


@kernel("PAD")
def pad(of: Operands) -> np.ndarray:
    return np.pad(of.raw(0), _pads(of.node)[::-1])
