"""Work memory, which kernels use between the launches of a node: one area for all plans of a backend.

It only grows.  No kernel reads in it what another node's kernels wrote, except where `Builder.keep` allows it within a
plan, and a backend has one queue: so all plans share it.  `generation` changes with its address: then arguments that
hold the address, and captured graphs, are made anew.
"""

from __future__ import annotations

from ggml_sched.backends.cupy.device import Memory

__all__ = ["WorkMemory"]


class WorkMemory:
    """`address` and `size` of the area, which the backend allocates and bounds."""

    def __init__(self) -> None:
        self.generation = 0
        self._memory: Memory | None = None

    @property
    def size(self) -> int:
        return 0 if self._memory is None else self._memory.size

    @property
    def address(self) -> int:
        return 0 if self._memory is None else self._memory.ptr

    def exchange(self, memory: Memory | None) -> None:
        """Replace the area, which no queued work uses any more, by another one."""
        old, self._memory = self._memory, memory
        self.generation += 1
        if old is not None:
            old.free()
