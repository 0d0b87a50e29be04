"""Memory for ggml's kernels: host memory that this package allocates, or a device's memory, allocated by ggml.

A HostBuffer is a CpuBuffer that also owns the repacked copies of the weights in it; `close()` frees both.
Corresponds to ggml_backend_buffer_t.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, cast

import numpy as np

from ggml_sched._graph import Tensor
from ggml_sched.backend import Backend, Buffer
from ggml_sched.backends.cpu.buffer import CpuBuffer
from ggml_sched.backends.ggml._ggml import Device, RepackedWeight

if TYPE_CHECKING:
    from ggml_sched.backends.ggml.backend import GgmlBackend

__all__ = ["DeviceBuffer", "DeviceMemory", "HostBuffer"]


class HostBuffer(CpuBuffer):
    """A CpuBuffer with the repacked copies of its weights."""

    def __init__(self, backend: Backend, memory: np.ndarray, usage: str = "any") -> None:
        super().__init__(backend, memory, usage)
        self.packs: dict[int, RepackedWeight | None] = {}       # by the weight's offset; None: no faster layout exists

    def is_read(self, offset: int) -> bool:
        return self.packs.get(offset) is None

    def changed(self) -> None:
        for packed in self.packs.values():
            if packed is not None:
                packed.outdate()        # plans hold it too

    def free(self) -> None:
        self.packs.clear()
        super().free()


class DeviceMemory:
    """A buffer of ggml's in the memory of a device; `handle` is 0 if ggml gives none.  `drop` or the last reference
    gives it back."""

    def __init__(self, device: Device, buft: int, size: int) -> None:
        handles: list[int] = []
        self.drop: Callable[[], None] = partial(_give_back, device.release, handles)
        weakref.finalize(self, self.drop).atexit = False        # the library may be gone by then
        # Memory is allocated, and its handle put into the list from which `drop` takes it, by one call of C, in which
        # no signal handler runs: an interrupt finds no memory without an owner.
        handles.extend(starmap(device.allocate, ((buft, size),)))
        self.handle: int = handles[0]


def _give_back(release: Callable[[int], object], handles: list[int]) -> None:
    """Take the handle off a list, if it is still there and not 0, and release it: by one call of C, as above."""
    with suppress(IndexError):
        next(map(release, iter(handles.pop, 0)), None)


class DeviceBuffer(Buffer):
    """Memory of a device that the CPU cannot read directly: ggml copies data to it and back."""

    writable = True

    def __init__(self, backend: Backend, device: Device, memory: DeviceMemory, size: int) -> None:
        super().__init__(backend, size, device.base_of(memory.handle))
        self.handle: int = memory.handle
        self._device = device
        self._memory = memory

    def write(self, offset: int, data: memoryview) -> None:
        self._device.move(*self._range(offset, len(data)), data, True)

    def read(self, offset: int, out: memoryview) -> None:
        self._device.move(*self._range(offset, len(out)), out, False)

    def init_tensor(self, tensor: Tensor) -> None:
        if tensor.nbytes:
            self._device.prepare(self.handle, self.base + tensor.offset, tensor)

    def free(self) -> None:
        self.handle = 0
        self._memory.drop()
        cast("GgmlBackend", self.backend).buffer_sizes.drop(self)

    def _range(self, offset: int, size: int) -> tuple[int, int]:
        self._check_range(offset, size)
        return self.handle, self.base + offset
