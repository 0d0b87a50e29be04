"""Memory of emulated devices: the owner of each byte, and the bytes that were freed.

Owns every allocation of a simulator.  Invariant: an address that a copy or a kernel gets is in a live allocation that
its device may use, or the launch fails.  New memory is full of 0xA5; freed memory is retained for a while, so that its
addresses are not reused and a kernel with a stale pointer fails.
"""

import bisect
import ctypes
import weakref
from collections import deque

import numpy as np

from ggml_sched.backends.cupy.device import ALIGNMENT, DeviceError, DeviceOutOfMemory, Memory

__all__ = ["EmulatedMemory", "Heap", "Pinned"]

FRESH = 0xA5
GONE = 0xDD
KEPT = 32 << 20
"""The most bytes of freed memory that are retained."""
KEPT_PIECES = 256
"""The most pieces of freed memory that are retained."""

_libc = ctypes.CDLL(None)
_libc.posix_memalign.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t)
_libc.free.argtypes = (ctypes.c_void_p,)
_libc.free.restype = None


class EmulatedMemory(Memory):
    """Memory of an emulated device. `has_bytes` is False on a dry device: addresses only."""

    def __init__(self, device, ptr: int, size: int, has_bytes: bool) -> None:
        self.device = device
        self.ptr = ptr
        self.size = size
        self.is_free = False
        self.has_bytes = has_bytes

    def free(self) -> None:
        if not self.is_free:
            self.device.free(self)


class Pinned:
    """Page-locked bytes of the host, as long as an array over them lives."""

    def __init__(self, owner: np.ndarray, start: int, size: int) -> None:
        self.owner = weakref.ref(owner)
        self.start = start
        self.end = start + size


class Heap:
    """All memory of a simulator.  Sizes are not rounded up, so that AddressSanitizer detects accesses past the end."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._live: dict[int, EmulatedMemory] = {}
        self._gone: deque[EmulatedMemory] = deque()
        self._gone_ends: dict[int, int] = {}
        self._gone_starts: list[int] = []
        self._gone_bytes = 0
        self._pinned: list[Pinned] = []
        self._next_dry = 1 << 46        # addresses of dry devices, never read

    def alloc(self, device, n: int, free: int, is_dry: bool) -> EmulatedMemory:
        size = max(n, 1)
        if is_dry:
            ptr, self._next_dry = self._next_dry, self._next_dry + -(-size // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        else:
            at = ctypes.c_void_p()
            if _libc.posix_memalign(ctypes.byref(at), ALIGNMENT, size):
                raise DeviceOutOfMemory(n, free)
            ptr = at.value
            ctypes.memset(ptr, FRESH, size)
        memory = EmulatedMemory(device, ptr, n, not is_dry)
        bisect.insort(self._starts, ptr)
        self._live[ptr] = memory
        return memory

    def release(self, memory: EmulatedMemory, at_once: bool = False) -> None:
        """Free an allocation.  `at_once`: return its bytes to the host now (AddressSanitizer then detects later
        uses)."""
        memory.is_free = True
        del self._live[memory.ptr]
        del self._starts[bisect.bisect_left(self._starts, memory.ptr)]
        if not memory.has_bytes:
            return
        if at_once:
            _libc.free(memory.ptr)
            return
        ctypes.memset(memory.ptr, GONE, memory.size)
        self._gone_bytes += memory.size
        self._gone.append(memory)
        self._gone_ends[memory.ptr] = memory.ptr + memory.size
        bisect.insort(self._gone_starts, memory.ptr)
        while self._gone_bytes > KEPT or len(self._gone) > KEPT_PIECES:
            self._forget()

    def _forget(self) -> None:
        memory = self._gone.popleft()
        self._gone_bytes -= memory.size
        del self._gone_ends[memory.ptr]
        del self._gone_starts[bisect.bisect_left(self._gone_starts, memory.ptr)]
        _libc.free(memory.ptr)

    def of(self, device) -> list[EmulatedMemory]:
        return [memory for memory in self._live.values() if memory.device is device]

    def drop_kept(self) -> None:
        """Return the retained freed memory to the host."""
        while self._gone:
            self._forget()

    # -- owner of an address -----------------------------------------------------

    def find(self, ptr: int) -> EmulatedMemory | None:
        """The live allocation that contains an address, or ends at it."""
        at = bisect.bisect_right(self._starts, ptr) - 1
        if at < 0:
            return None
        memory = self._live[self._starts[at]]
        return memory if ptr <= memory.ptr + memory.size else None

    def is_gone(self, ptr: int) -> bool:
        """Whether an address is in freed memory that is kept.  Kernels are given many words that might be addresses."""
        at = bisect.bisect_right(self._gone_starts, ptr) - 1
        return at >= 0 and ptr < self._gone_ends[self._gone_starts[at]]

    def check(self, ptr: int, n: int, what: str) -> EmulatedMemory:
        """The allocation that contains n bytes from an address; raises if there is none."""
        memory = self.find(ptr)
        if memory is None:
            state = "in memory that was freed" if self.is_gone(ptr) else "in no memory of a device"
            raise DeviceError(f"{what}: {n} bytes at {ptr:#x}, which is {state}")
        if ptr + n > memory.ptr + memory.size:
            at = ptr - memory.ptr
            raise DeviceError(f"{what}: {n} bytes from byte {at} of {memory.size} of {memory.device.name}")
        return memory

    # -- host memory -------------------------------------------------------------

    def pinned(self, n: int) -> np.ndarray:
        owner = np.full(n + ALIGNMENT, FRESH, np.uint8)
        skip = -owner.ctypes.data % ALIGNMENT
        self._pinned = [pinned for pinned in self._pinned if pinned.owner() is not None]
        self._pinned.append(Pinned(owner, owner.ctypes.data + skip, n))
        return owner[skip:skip + n]

    def pinned_around(self, start: int, n: int) -> Pinned | None:
        for pinned in self._pinned:
            if pinned.start <= start and start + n <= pinned.end and pinned.owner() is not None:
                return pinned
        return None
