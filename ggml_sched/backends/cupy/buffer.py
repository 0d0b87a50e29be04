"""Memory of a CUDA device: one allocation for each buffer, and work memory.

Invariant: memory is freed only after all queued work that uses it, on any stream, is done.  Weights in a buffer may be
rearranged (packed.py); the bytes that `write` and `read` take and return are always in ggml's order.
Corresponds to ggml's buffer of the CUDA backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backend import Buffer
from ggml_sched.backends.cupy import packed
from ggml_sched.backends.cupy.device import Memory

if TYPE_CHECKING:
    from ggml_sched.backends.cupy.backend import CupyBackend

__all__ = ["DeviceBuffer", "WorkMemory", "as_bytes"]


def as_bytes(data: bytes | memoryview | np.ndarray) -> np.ndarray:
    """A uint8 array over the same contiguous bytes."""
    return np.frombuffer(data, np.uint8)


class DeviceBuffer(Buffer):
    """A buffer in the memory of a device; `base` is the address of its first byte there.

    `users`: other backends that have queued copies from or to it; `packed`: the weights in it that are rearranged.
    """

    writable = True
    if TYPE_CHECKING:
        @property
        def backend(self) -> CupyBackend: ...

    def __init__(self, backend: CupyBackend, memory: Memory, size: int) -> None:
        super().__init__(backend, size, memory.ptr)
        self.users: set[CupyBackend] = set()
        self.packed: packed.PackedRows = packed.PackedRows()
        self._memory: Memory | None = memory

    def write(self, offset: int, data: memoryview | np.ndarray) -> None:
        """Queue a copy of `data` into the buffer, from `offset` on; `data` may change once this returns."""
        if not len(data):
            return
        address, given = self.address(offset, len(data)), as_bytes(data)
        if not len(self.packed):
            self.backend.upload(address, given)
            return
        self.backend.write_packed(self, offset, given)

    def read(self, offset: int, out: memoryview) -> None:
        self.read_later(offset, out)
        self.backend.synchronize()

    def read_later(self, offset: int, out: memoryview | np.ndarray) -> None:
        """Queue a copy of the buffer's bytes from `offset` on into `out`; it is complete after `synchronize`."""
        if not len(out):
            return
        address, wanted = self.address(offset, len(out)), as_bytes(out)
        if not len(self.packed):
            self.backend.download(wanted, address)
            return
        straightened = -1
        while straightened != self.backend.n_straightened:      # else another thread has straightened weights meanwhile
            straightened, pieces = self.backend.packed_pieces(self, offset, len(wanted))
            for start, stop, weight in pieces:
                piece = wanted[start - offset : stop - offset]
                if weight is None:
                    self.backend.download(piece, self.base + start)
                else:
                    packed.read(weight, start, piece, self._fetch)

    def _fetch(self, start: int, size: int) -> np.ndarray:
        """Wait for, and return, bytes of the device from offset `start` on as they are stored."""
        out = np.empty(size, np.uint8)
        self.backend.download(out, self.base + start)
        self.backend.synchronize()
        return out

    def clear(self, value: int = 0) -> None:
        value = self.checked_byte(value)
        if self.size:
            self.backend.fill(self.address(0, self.size), value, self.size)

    def init_tensor(self, tensor: Tensor) -> None:
        if self.usage == "weights" and self.backend.repack:
            self.packed.add(tensor)

    def free_tensor(self, tensor: Tensor) -> None:
        if tensor.offset is not None and self.is_packed(tensor):
            self.packed.drop(tensor.offset)

    def is_packed(self, root: Tensor) -> bool:
        """Whether the rows of `root`, which is no view, are stored in the order of repack.py."""
        return self.packed.find(root) is not None

    def free(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self.backend.release(memory, self)

    def address(self, offset: int, size: int) -> int:
        """The device address of a range; BackendError if it is outside the buffer, or the buffer is closed."""
        self._check_range(offset, size)
        return self.base + offset


class WorkMemory:
    """Work memory, in which the launches of a node keep data for each other: one area for all plans of a backend.

    It only grows.  All plans can share it, because a backend has one queue, and kernels read in it only what kernels of
    the same node wrote (within a plan also of earlier nodes: `Builder.keep`).  `generation` changes with the address:
    arguments that hold the address, and captured graphs, are then made anew.  The backend allocates and bounds it.
    """

    def __init__(self) -> None:
        self.generation: int = 0
        self._memory: Memory | None = None

    @property
    def size(self) -> int:
        return 0 if self._memory is None else self._memory.size

    @property
    def address(self) -> int:
        return 0 if self._memory is None else self._memory.ptr

    def exchange(self, memory: Memory | None) -> None:
        """Free the area, which no queued work uses any more, and use `memory` instead; None: nothing."""
        old, self._memory = self._memory, memory
        self.generation += 1
        if old is not None:
            old.free()
