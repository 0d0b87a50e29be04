"""Memory of a CUDA device: one allocation for each buffer.

Invariant: it is given back only after everything that was queued on it, on any stream, is done.
Corresponds to ggml's buffer of the CUDA backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggml_sched.backend import Buffer
from ggml_sched.backends.cupy.device import Memory
from ggml_sched.errors import BackendError

if TYPE_CHECKING:
    from ggml_sched.backends.cupy.backend import CupyBackend

__all__ = ["DeviceBuffer", "as_bytes"]


def as_bytes(data) -> np.ndarray:
    """A uint8 array over a contiguous buffer."""
    return np.frombuffer(data, np.uint8)


class DeviceBuffer(Buffer):
    """`base` is the address of its first byte on the device.

    `users`: other backends that have queued copies from or to it.
    """

    writable = True

    def __init__(self, backend: CupyBackend, memory: Memory, size: int) -> None:
        super().__init__(backend, size, memory.ptr)
        self.users: set[CupyBackend] = set()
        self._memory: Memory | None = memory

    def write(self, offset: int, data: memoryview) -> None:
        """Queue a copy of bytes; what is queued here later sees them, and `data` may change at once."""
        if len(data):
            self.backend.upload(self.address(offset, len(data)), as_bytes(data))

    def read(self, offset: int, out: memoryview) -> None:
        if len(out):
            self.backend.download(as_bytes(out), self.address(offset, len(out)))
            self.backend.synchronize()

    def clear(self, value: int = 0) -> None:
        value = self.checked_byte(value)
        if self.size:
            self.backend.fill(self.address(0, self.size), value, self.size)

    def free(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self.backend.release(memory, self)

    def address(self, offset: int, size: int) -> int:
        """Of a range on the device; BackendError outside the buffer, or when it is closed."""
        if self._memory is None:
            raise BackendError(f"a buffer of {self.size} bytes of backend {self.backend.name!r} is closed")
        if offset < 0 or offset > self.size - size:
            raise BackendError(f"bytes {offset} .. {offset + size} lie outside a buffer of {self.size} bytes "
                               f"of backend {self.backend.name!r}")
        return self.base + offset
