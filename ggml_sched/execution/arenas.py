"""The arenas of one scheduler: the buffers that hold the tensors of plans, one or more for each backend.

Invariant: a request for larger buffers either succeeds for all of them, or leaves all of them unchanged.
shared_arenas.py has arenas that several schedulers share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from ggml_sched._graph import new_buffer
from ggml_sched.backend import Backend, Buffer
from ggml_sched.errors import each

__all__ = ["SchedulerArenas", "Sizes"]

Sizes = Sequence[Sequence[int]]
"""For each backend the bytes of each of its buffers."""


class SchedulerArenas:
    """The buffers of one scheduler.

    `buffers` has a tuple of buffers for each backend; every change makes a new object, so that `is` shows a change.
    `budgets` maps positions in `backends` to the most bytes of buffers and of kernels' work memory.
    """

    def __init__(self, backends: tuple[Backend, ...], budgets: Mapping[int, int]) -> None:
        self.backends = backends
        self._budgets = budgets
        self._set(((),) * len(backends))
        self._checked = self.buffers
        self._large_enough: Sequence[Sequence[int]] | None = None
        """The sizes for which `hold` last returned True; `buffers` was `_checked` then.  For the same two objects it
        does not compare the sizes again."""

    def held(self) -> list[int]:
        """Bytes of each backend's open buffers."""
        return [sum(buffer.size for buffer in buffers if not buffer.closed) for buffers in self.buffers]

    def hold(self, sizes: Sizes) -> bool:
        """Whether the arenas have, for each of these sizes, an open buffer that is large enough."""
        if self._large_enough is sizes and self._checked is self.buffers:
            return self.are_open()
        if not all(self._holds(i, chunk, size) for i, wanted in enumerate(sizes) for chunk, size in enumerate(wanted)):
            return False
        self._large_enough, self._checked = sizes, self.buffers
        return True

    def grow(self, sizes: Sizes, invalidate: Callable[[], None]) -> None:
        """Replace buffers that are too small, after a call of `invalidate`, which must release their allocations.

        Raises OutOfMemory, and every exception of a backend; then all buffers have their old sizes.  Where old and new
        buffers do not fit into memory or a budget together, the old ones are closed first; if allocating the new ones
        then fails, buffers of the old sizes are allocated again, without their data.
        """
        short = {(i, chunk): size for i, wanted in enumerate(sizes) for chunk, size in enumerate(wanted)
                 if not self._holds(i, chunk, size)}
        crowded = {(i, c): self.buffers[i][c].size for i, c in short if self._is_crowded(i, short)
                   and c < len(self.buffers[i]) and not self.buffers[i][c].closed}
        if not crowded:
            self._exchange(short, invalidate)
            return
        invalidate()
        each(self.buffers[i][c].close for i, c in crowded)
        try:
            self._exchange(short, invalidate)
        except BaseException:
            self._exchange(crowded, invalidate)
            raise

    def close(self) -> None:
        """Close every buffer, even if closing one of them raises."""
        held = self.all
        self._set(((),) * len(self.backends))
        each(buffer.close for buffer in held)

    def are_open(self) -> bool:
        """Whether none of the buffers was closed."""
        return True not in [buffer.closed for buffer in self.all]

    def _set(self, buffers: tuple[tuple[Buffer, ...], ...]) -> None:
        self.buffers = buffers
        self.all: list[Buffer] = [*chain.from_iterable(buffers)]

    def _holds(self, i: int, chunk: int, size: int) -> bool:
        """Whether buffer number `chunk` of backend i is open, and has at least `size` bytes."""
        held = self.buffers[i]
        return chunk < len(held) and not held[chunk].closed and held[chunk].size >= size

    def _is_crowded(self, i: int, short: dict[tuple[int, int], int]) -> bool:
        """Whether backend i has no room for its new buffers while the old ones are open; `short` is {(backend, chunk):
        bytes} of all new buffers."""
        backend, wanted = self.backends[i], sum(size for (k, _), size in short.items() if k == i)
        free, budget = backend.memory_available(), self._budgets.get(i)
        return (free is not None and free < wanted
                or budget is not None and budget < self.held()[i] + backend.work_held + wanted)

    def _exchange(self, sizes: dict[tuple[int, int], int], invalidate: Callable[[], None]) -> None:
        """Replace buffers by new ones, all or none; `sizes` is {(backend, chunk): bytes}.  Calls `invalidate` before it
        closes the old ones."""
        fresh: dict[tuple[int, int], Buffer] = {}
        try:
            for (i, chunk), size in sizes.items():
                fresh[i, chunk] = new_buffer(self.backends[i], size)
                fresh[i, chunk].usage = "compute"
            invalidate()
        except BaseException:
            each(buffer.close for buffer in fresh.values())
            raise
        replaced, buffers = [], []
        for i, held in enumerate(self.buffers):
            chunks = dict(enumerate(held)) | {c: buffer for (k, c), buffer in fresh.items() if k == i}
            buffers.append(tuple(chunks[c] for c in sorted(chunks)))
            replaced += [buffer for buffer in held if buffer not in buffers[-1]]
        self._set(tuple(buffers))
        each(buffer.close for buffer in replaced)
