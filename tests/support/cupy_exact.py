"""Each tensor in an allocation of exactly its size, so that AddressSanitizer detects a kernel that leaves a tensor."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack

from cuda_emulator import EmulatedDevice

import ggml_sched as gs
from ggml_sched.backends.cupy.device import Memory

__all__ = ["ExactBackend", "place"]


class ExactBuffer(gs.Buffer):
    """Memory of an emulated device that the host reads and writes directly."""

    def __init__(self, backend: gs.Backend, memory: Memory, size: int) -> None:
        super().__init__(backend, size, memory.ptr)
        self.memory = memory

    def write(self, offset: int, data: memoryview) -> None:
        ctypes.memmove(self.base + offset, bytes(data), len(data))

    def read(self, offset: int, out: memoryview) -> None:
        out[:] = ctypes.string_at(self.base + offset, len(out))

    def free(self) -> None:
        self.memory.free()


class ExactBackend(gs.Backend):
    """A backend with memory and without compute."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__("EXACT", 256)
        self.device = device

    def __enter__(self) -> ExactBackend:
        return self

    def __exit__(self, *what: object) -> None:
        self.close()

    def alloc_buffer(self, size: int) -> ExactBuffer:
        return ExactBuffer(self, self.device.alloc(size), size)


def place(ctx: gs.Context, backend: ExactBackend, poison: int) -> ExitStack:
    """Give each tensor of a context a buffer of its own, filled with `poison`; closes the buffers at the end."""
    with ExitStack() as held:
        for tensor in ctx.tensors:
            if tensor.view_src is None:
                buffer = held.enter_context(backend.alloc_buffer(tensor.nbytes))
                buffer.clear(poison)
                gs.bind_resident(tensor, buffer, 0)
        return held.pop_all()
