"""The table of kernels: for each op name its function and the sources it may overwrite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ggml_sched._graph import Tensor, op_numbers
from ggml_sched.backends.cpu._kernels import fits, inplace_sources
from ggml_sched.backends.cpu.oracle.operands import Operands

__all__ = ["KERNELS", "Kernel", "kernel", "repeated"]

Compute = Callable[[Operands], "np.ndarray | None"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """`compute` returns the values of a node's result as f32, or writes them to `dst` itself and returns None.  Bit i
    of `inplace` is set if source i may have the result's memory, provided that it has the result's layout: the kernel's
    result is then the same."""

    compute: Compute
    inplace: int

    def fits(self, node: Tensor) -> bool:
        """Whether the kernel computes a node, by its types, extents and parameters (kernels/op_rules.h)."""
        return fits(node)

    def run(self, operands: Operands) -> None:
        """Compute a node, unless its result is empty.  SET_ROWS to a table without rows has ids, which are faults."""
        if operands.dst.size or (operands.node.op == "SET_ROWS" and operands.raw(0).size):
            values = self.compute(operands)
            if values is not None:
                operands.store(values)


KERNELS: dict[str, Kernel] = {}


def kernel(*ops: str) -> Callable[[Compute], Compute]:
    """Register the function that computes these ops."""

    def register(compute: Compute) -> Compute:
        for op in ops:
            KERNELS[op] = Kernel(compute, inplace_sources(op_numbers()[op]))
        return compute

    return register


def repeated(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The array, repeated so that NumPy broadcasts it to `shape`.  NumPy itself repeats only extents of 1; ggml repeats
    also 2 rows to 6."""
    return np.tile(array, [1 if n in (1, m) else m // n for n, m in zip(array.shape, shape, strict=True)])
