"""Memory that ggml computes in: the host's, where we have put it, or a device's, from ggml.

A HostBuffer is a CpuBuffer that also keeps what ggml has packed of the weights in it; both end with `close()`.
Corresponds to ggml_backend_buffer_t.
"""

from __future__ import annotations

import numpy as np

from ggml_sched import hostdata
from ggml_sched._graph import Tensor
from ggml_sched.backend import Backend, Buffer, same_layout
from ggml_sched.backends.cpu.buffer import CpuBuffer
from ggml_sched.backends.ggml._ggml import Device, Packed
from ggml_sched.errors import BackendError

__all__ = ["DeviceBuffer", "HostBuffer", "copy_on_host"]


class HostBuffer(CpuBuffer):
    """Bytes that the CPU reads directly."""

    file_backed = False
    """Whether it is a read-only mapping of a file, whose pages may be dropped: they can be read again."""

    def __init__(self, backend: Backend, memory: np.ndarray, usage: str = "any", owned: bool = True) -> None:
        super().__init__(backend, memory, usage, owned)
        self.packs: dict[int, Packed | None] = {}       # by offset; None: ggml has no better layout

    def free(self) -> None:
        self.packs.clear()
        super().free()


class DeviceBuffer(Buffer):
    """Memory of a device that the CPU does not read."""

    writable = True

    def __init__(self, backend: Backend, device: Device, handle: int, base: int, size: int) -> None:
        super().__init__(backend, size, base)
        self.handle = handle
        self._device = device

    def write(self, offset: int, data: memoryview) -> None:
        self._device.move(*self._range(offset, len(data)), data, True)

    def read(self, offset: int, out: memoryview) -> None:
        self._device.move(*self._range(offset, len(out)), out, False)

    def init_tensor(self, tensor: Tensor) -> None:
        if tensor.nbytes:
            self._device.prepare(self.handle, self.base + tensor.offset, tensor)

    def free(self) -> None:
        handle, self.handle = self.handle, 0
        self._device.release(handle)
        self.backend.give_back(self.size)

    def _range(self, offset: int, size: int) -> tuple[int, int]:
        if self.closed:
            raise BackendError(f"a buffer of {self.size} bytes of backend {self.backend.name!r} is closed")
        if offset < 0 or offset > self.size - size:
            raise BackendError(f"bytes {offset} .. {offset + size} lie outside a buffer of {self.size} bytes "
                               f"of backend {self.backend.name!r}")
        return self.handle, self.base + offset


def copy_on_host(src: Tensor, dst: Tensor) -> bool:
    """Copy where both ends are host memory that we can see; only elements, not the gaps between them."""
    here, there = src.buffer, dst.buffer
    if here is None or there is None or not same_layout(src, dst):
        return False
    if not (here.backend.is_host and there.backend.is_host):
        return False
    a, b = getattr(here, "memory", None), getattr(there, "memory", None)
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray) or not b.flags.writeable:
        return False
    if src.nbytes > min(a.nbytes - src.offset, b.nbytes - dst.offset):
        return False
    # The other end may still be working on what is queued there.
    here.backend.synchronize()
    there.backend.synchronize()
    np.copyto(hostdata.array_over(dst, b, dst.offset), hostdata.array_over(src, a, src.offset))
    return True
