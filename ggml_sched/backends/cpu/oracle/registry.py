"""The table of kernels: for each op name its function, the nodes that it computes, and the sources it may overwrite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cpu.oracle.operands import Operands
from ggml_sched.graph import quants

__all__ = ["FLOATS", "KERNELS", "WEIGHTS", "Kernel", "kernel", "types"]

FLOATS = frozenset({Type.F32, Type.F16, Type.BF16})
WEIGHTS = FLOATS | quants.QUANTIZED
F32 = frozenset({Type.F32})
I32 = frozenset({Type.I32})

Fits = Callable[[Tensor], bool]
Compute = Callable[[Operands], "np.ndarray | None"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """`compute` returns the values of a node's result as f32, or writes them to `dst` itself and returns None.
    `fits` says, by types and extents, whether the kernel computes a node.
    Bit i of `inplace`: source i, if it has the result's layout, may have its memory, and the result is the same."""

    compute: Compute
    fits: Fits
    inplace: int

    def run(self, operands: Operands) -> None:
        """Compute a node, unless its result is empty."""
        if operands.dst.size:
            values = self.compute(operands)
            if values is not None:
                operands.store(values)


KERNELS: dict[str, Kernel] = {}


def kernel(*ops: str, fits: Fits, inplace: int = 0) -> Callable[[Compute], Compute]:
    """Register the function that computes these ops."""

    def register(compute: Compute) -> Compute:
        for op in ops:
            KERNELS[op] = Kernel(compute, fits, inplace)
        return compute

    return register


def types(dst: frozenset | None, *src: frozenset, optional: tuple[frozenset, ...] = (),
          like: int | None = None) -> Fits:
    """Make a function that checks a node: whether its result and its sources have types of these sets.

    `optional`: sets for further sources, which may be missing.  `dst` None: the result must have the type of source 0.
    `like`: the number of a source whose extents the result must have.
    """

    allowed = (*src, *optional)

    def fits(node: Tensor) -> bool:
        if not len(src) <= len(node.src) <= len(allowed):
            return False
        for i, tensor in enumerate(node.src):
            if tensor is None:
                if i < len(src):
                    return False
            elif tensor.type not in allowed[i]:
                return False
        if node.type not in ({node.src[0].type} if dst is None else dst):
            return False
        return like is None or node.ne == node.src[like].ne

    return fits


def repeats(small: Tensor, large: Tensor) -> bool:
    """Whether every extent of `large` is a multiple of that of `small`, or `large` is empty."""
    return large.n_elements == 0 or all(n and m % n == 0 for n, m in zip(small.ne, large.ne, strict=True))


def repeated(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The array, repeated so that NumPy broadcasts it to `shape`.  NumPy itself repeats only extents of 1; ggml repeats
    also 2 rows to 6."""
    return np.tile(array, [1 if n in (1, m) else m // n for n, m in zip(array.shape, shape, strict=True)])
