"""Memory for ggml's kernels: host memory that this package allocates, or a device's memory, allocated by ggml.

A HostBuffer is a CpuBuffer that also owns the repacked copies of the weights in it; `close()` frees both.
Corresponds to ggml_backend_buffer_t.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, cast

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backend import Backend, Buffer
from ggml_sched.backends.cpu.buffer import CpuBuffer
from ggml_sched.backends.ggml._ggml import Device, RepackedWeight

if TYPE_CHECKING:
    from ggml_sched.backends.ggml.backend import GgmlBackend

__all__ = ["DeviceBuffer", "HostBuffer"]


class HostBuffer(CpuBuffer):
    """A CpuBuffer with the repacked copies of its weights."""

    def __init__(self, backend: Backend, memory: np.ndarray, usage: str = "any") -> None:
        super().__init__(backend, memory, usage)
        self.packs: dict[int, RepackedWeight | None] = {}       # by the weight's offset; None: no faster layout exists

    def changed(self) -> None:
        for packed in self.packs.values():
            if packed is not None:
                packed.outdate()        # plans hold it too

    def free(self) -> None:
        self.packs.clear()
        super().free()


class DeviceBuffer(Buffer):
    """Memory of a device that the CPU cannot read directly: ggml copies data to it and back."""

    writable = True

    def __init__(self, backend: Backend, device: Device, handle: int, base: int, size: int) -> None:
        super().__init__(backend, size, base)
        self.handle: int = handle
        self._device = device
        self._release = weakref.finalize(self, device.release, handle)
        self._release.atexit = False        # the library may be gone by then

    def write(self, offset: int, data: memoryview) -> None:
        self._device.move(*self._range(offset, len(data)), data, True)

    def read(self, offset: int, out: memoryview) -> None:
        self._device.move(*self._range(offset, len(out)), out, False)

    def init_tensor(self, tensor: Tensor) -> None:
        if tensor.nbytes:
            self._device.prepare(self.handle, self.base + tensor.offset, tensor)

    def free(self) -> None:
        self.handle = 0
        self._release()
        cast("GgmlBackend", self.backend).buffer_sizes.drop(self)

    def _range(self, offset: int, size: int) -> tuple[int, int]:
        self._check_range(offset, size)
        return self.handle, self.base + offset
