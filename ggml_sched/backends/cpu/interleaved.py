"""Weights whose rows are interleaved: a second form, which the kernels of matrix products read in place of the first.

An `Interleaved` belongs to one buffer of weights, and ends with it.  The tensors stay as they are, for everything but
these kernels, which read them no more.  So the pages of a mapped file can be dropped: they come back from the file when
they are read.  kernels/interleave.h describes the form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backends.cpu._kernels import BAND, interleave, interleaves
from ggml_sched.backends.cpu.buffer import ALIGNMENT, address_of

if TYPE_CHECKING:
    from ggml_sched.backends.cpu.buffer import CpuBuffer

__all__ = ["Interleaved", "can_interleave"]

Key: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Of a tensor: its offset in the buffer, its type, its extents and its strides."""


def can_interleave(tensor: Tensor) -> bool:
    """Whether there are kernels here for the interleaved form of a tensor: it is quantised, its rows follow one
    another, and each matrix has a multiple of BAND rows."""
    return interleaves(int(tensor.type)) and tensor.nbytes > 0 and tensor.is_contiguous and tensor.ne[1] % BAND == 0


class Interleaved:
    """The interleaved weights of one buffer, in memory of its backend."""

    def __init__(self) -> None:
        self._memory: list[CpuBuffer] = []
        self._forms: dict[Key, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all interleaved weights."""
        return sum(form.nbytes for form in self._forms.values())

    def find(self, tensor: Tensor) -> np.ndarray | None:
        """The interleaved bytes of a tensor of the buffer; None if it was not interleaved."""
        return self._forms.get(_key(tensor))

    def has(self, offset: int) -> bool:
        """Whether a tensor at this offset was interleaved."""
        return any(key[0] == offset for key in self._forms)

    def add(self, tensors: Sequence[Tensor], buffer: CpuBuffer, done: Callable[[Tensor], object] | None) -> int:
        """Interleave tensors for which `can_interleave` is true, again if they were before; returns the bytes of all.

        `done(tensor)` is called after each.  Raises OutOfMemory.
        """
        size = sum(_aligned(tensor.nbytes) for tensor in tensors if self.find(tensor) is None)
        if size:
            self._memory.append(cast("CpuBuffer", buffer.backend.alloc_buffer(size)))
        end = 0
        for tensor in tensors:
            key = _key(tensor)
            form = self._forms.get(key)
            if form is None:
                form = self._memory[-1].memory[end : end + tensor.nbytes]
                end += _aligned(tensor.nbytes)
            interleave(int(tensor.type), buffer.base + key[0], tensor.nbytes // tensor.nb[1], tensor.nb[1],
                       address_of(form))
            self._forms[key] = form
            if done is not None:
                done(tensor)
        return sum(tensor.nbytes for tensor in tensors)

    def close(self) -> None:
        """Free the memory, which calls that read it now keep until they end."""
        for memory in self._memory:
            memory.close()
        self._memory, self._forms = [], {}


def _key(tensor: Tensor) -> Key:
    return cast("int", tensor.offset), int(tensor.type), tensor.ne, tensor.nb


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
