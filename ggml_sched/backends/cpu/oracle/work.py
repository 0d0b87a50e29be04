"""Scratch memory, which kernels need between reading sources and writing results.

Nodes run one after the other and share it: each begins at its start.
Invariant: memory only grows; an array handed out keeps its block alive.  A plan
owns one Work, the backend's plan-less path another (ggml's work buffers).
"""

from __future__ import annotations

from math import prod

import numpy as np

from ggml_sched.backends.cpu.buffer import ALIGNMENT, allocate

__all__ = ["Scratch", "Work"]


class Scratch:
    """One stack of arrays; `reset` takes them all back."""

    __slots__ = ("_block", "_name", "_used")

    def __init__(self, name: str) -> None:
        self._name = name
        self._block = np.empty(0, np.uint8)
        self._used = 0

    @property
    def size(self) -> int:
        return self._block.nbytes

    def reset(self) -> None:
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
        """An uninitialised C-contiguous array at a multiple of 64; OutOfMemory."""
        dtype = np.dtype(dtype)
        size = prod(shape) * dtype.itemsize
        start = self._used
        if size > self._block.nbytes - start:
            # Sizes double, so that all blocks held by earlier nodes of a plan are together smaller than the last one.
            self._block = allocate(max(size, 2 * self._block.nbytes, 4096), self._name)
            start = 0
        self._used = start + -(-size // ALIGNMENT) * ALIGNMENT
        return np.ndarray(shape, dtype, self._block, start) if size else np.empty(shape, dtype)


class Work:
    """The scratch of one sequence of nodes: a shared part, one for each lane, and one for compiled kernels."""

    __slots__ = ("_name", "compiled", "lanes", "shared")

    def __init__(self, name: str) -> None:
        self._name = name
        self.shared = Scratch(name)
        self.compiled = Scratch(name)
        self.lanes: list[Scratch] = []

    @property
    def size(self) -> int:
        return self.shared.size + self.compiled.size + sum(lane.size for lane in self.lanes)

    def lane(self, i: int) -> Scratch:
        while len(self.lanes) <= i:
            self.lanes.append(Scratch(self._name))
        return self.lanes[i]
