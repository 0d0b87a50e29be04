"""Kernels of an emulated device: compiled for the host, launched with a GPU's checks and with more of them.

A GPU takes any bytes for arguments and any address in them.  Here the number, size and kind of each argument must be
the kernel's, and every pointer must lie in memory that is alive when the kernel runs.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cuda_emulator.compile import library
from cuda_emulator.simulator import EmulatedStream, Launching
from ggml_sched.backends.cupy.device import DeviceError, Function, KernelArguments, block_of
from ggml_sched.backends.cupy.source import kernel_source

__all__ = ["MAX_SHARED", "EmulatedFunction", "load"]

MAX_SHARED = 101_376
"""The most bytes of dynamic shared memory of a block: every GPU since sm_80 has as many."""
MAX_GRID = ((1 << 31) - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
KINDS = {"p": "a pointer", "f": "a float", "i": "an integer", "s": "a struct"}


def load(name: str, folder: Path, sanitize: tuple[str, ...]) -> ctypes.PyDLL:
    """The library of <folder>/<name>.cu, compiled unless it is cached."""
    try:
        text = kernel_source(name, folder)
    except OSError as error:
        raise DeviceError(f"no kernels {name}: {error}") from None
    # Keeps the interpreter's lock: the library's static variables hold one launch at a time.
    found = ctypes.PyDLL(str(library(name, text, sanitize)))
    found.host_cuda_message.restype = ctypes.c_char_p
    found.host_cuda_switches.restype = ctypes.c_uint64
    return found


class Stale(ctypes.Structure):
    """`host_cuda::Stale` of host_overlap.h."""

    _fields_ = (("at", ctypes.c_void_p), ("size", ctypes.c_uint64), ("then", ctypes.c_char_p),
                ("now", ctypes.c_void_p))


class EmulatedFunction(Function):
    """`sizes` (bytes) and `kinds` describe the kernel's arguments, `max_threads` is its launch bound."""

    def __init__(self, device, name: str, found: ctypes.PyDLL | None) -> None:
        self.device = device
        self.name = name
        self._library = found
        if found is None:
            return
        kernel = name.rpartition(".")[2]
        if not hasattr(found, f"host_launch_{kernel}"):
            raise DeviceError(f"no kernel {name}: not in {name.partition('.')[0]}.cu")
        self._call = found[f"host_launch_{kernel}"]
        describe = found[f"host_describe_{kernel}"]
        sizes, kinds, threads = (ctypes.c_uint * 256)(), ctypes.create_string_buffer(256), ctypes.c_int()
        n = describe(sizes, kinds, ctypes.byref(threads))
        self.sizes = tuple(sizes[:n])
        self.kinds = kinds.raw[:n].decode()
        self.max_threads = threads.value

    @property
    def switches(self) -> int:
        """Switches to a thread's stack by all kernels of this source since loading."""
        return 0 if self._library is None else self._library.host_cuda_switches()

    def pack(self, args: Sequence[np.generic | np.ndarray]) -> KernelArguments:
        packed = super().pack(args)
        if self._library is None:
            return packed
        if len(packed.values) != len(self.sizes):
            raise DeviceError(f"{self.name}: {len(packed.values)} arguments, the kernel takes {len(self.sizes)}")
        for i, (value, size, kind) in enumerate(zip(packed.values, self.sizes, self.kinds, strict=True)):
            if value.nbytes != size:
                raise DeviceError(f"{self.name}: argument {i} is {value.dtype.name} of {value.nbytes} bytes, "
                                  f"the kernel takes {KINDS[kind]} of {size}")
            if value.dtype.kind not in {"p": "ui", "f": "f", "i": "iub", "s": "Vc"}[kind]:
                raise DeviceError(f"{self.name}: argument {i} is {value.dtype.name}, the kernel takes {KINDS[kind]}")
        return packed

    def launch(
        self, grid: Sequence[int], block: Sequence[int], packed: KernelArguments, shared: int, stream: EmulatedStream,
        early: bool = False,
    ) -> None:
        self.device.check_open()
        if stream.device is not self.device:
            raise DeviceError(f"{self.name}: a kernel of {self.device.name} on a stream of {stream.device.name}")
        grid, block = block_of(grid, self.name), block_of(block, self.name)
        self._check_sizes(grid, block, shared)
        self.device.counts.launches += 1
        self.device.counts.early += early
        if self._library is None:
            stream.push(Launching(lambda: None, early))
            return
        sizes = (ctypes.c_uint * 6)(*grid, *block)
        args, offsets = packed.block.tobytes(), packed.offsets       # copied: the caller may change them
        stream.push(Launching(lambda: self._run(sizes, shared, args, offsets, stream.before if early else None), early))

    def _check_sizes(self, grid: tuple[int, ...], block: tuple[int, ...], shared: int) -> None:
        if not all(1 <= n <= limit for n, limit in zip(grid, MAX_GRID, strict=True)):
            raise DeviceError(f"{self.name}: a grid of {grid}; from 1 to {MAX_GRID} there may be")
        if not all(1 <= n <= limit for n, limit in zip(block, MAX_BLOCK, strict=True)):
            raise DeviceError(f"{self.name}: a block of {block}; from 1 to {MAX_BLOCK} there may be")
        threads, limit = block[0] * block[1] * block[2], 1024 if self._library is None else min(1024, self.max_threads)
        if threads > limit:
            raise DeviceError(f"{self.name}: a block of {threads} threads, its launch bound is {limit}")
        if not 0 <= shared <= MAX_SHARED:
            raise DeviceError(f"{self.name}: {shared} bytes of shared memory, a block may have {MAX_SHARED}")

    def _run(self, sizes: ctypes.Array, shared: int, args: bytes, offsets: np.ndarray,
             before: dict[int, bytes] | None) -> None:
        """`before`: the memory before the launches that this one may overlap with."""
        self._check_pointers(args, offsets)
        device = self.device
        kept = [] if before is None else self._let_begin_early(before)
        seed = device.simulator.random.getrandbits(31) if device.order > 1 else 0
        if self._call(sizes, ctypes.c_uint(shared), args, offsets.ctypes.data_as(ctypes.c_void_p),
                      ctypes.c_uint(device.order), ctypes.c_uint(device.order ^ seed)):
            raise DeviceError(f"{self.name}: {self._library.host_cuda_message().decode(errors='replace')}")
        del kept

    def _let_begin_early(self, before: dict[int, bytes]) -> list[object]:
        """Let the launch begin with the memory as it was; returns what has to live until it has ended."""
        known = [(memory, before[memory.ptr]) for memory in self.device.simulator.heap.of(self.device)
                 if len(before.get(memory.ptr, b"")) == memory.size > 0]
        now = [ctypes.create_string_buffer(memory.size) for memory, _ in known]
        pieces = (Stale * len(known))(*(
            Stale(memory.ptr, memory.size, then, ctypes.addressof(space))
            for (memory, then), space in zip(known, now, strict=True)))
        self._library.host_cuda_early(pieces, ctypes.c_uint(len(known)))
        return [pieces, now, known]

    def _check_pointers(self, args: bytes, offsets: np.ndarray) -> None:
        heap = self.device.simulator.heap
        for i, (kind, size) in enumerate(zip(self.kinds, self.sizes, strict=True)):
            if kind == "p":
                self._check_pointer(i, int.from_bytes(args[offsets[i]:offsets[i] + 8], "little"))
            elif kind == "s":
                # The pointers among a struct's words are unknown; a word that points into freed memory must be one of
                # them.
                for at in range(int(offsets[i]), int(offsets[i]) + size - 7, 8):
                    if heap.is_gone(int.from_bytes(args[at:at + 8], "little")):
                        raise DeviceError(f"{self.name}: argument {i} points into memory that was freed")

    def _check_pointer(self, i: int, ptr: int) -> None:
        if not ptr:
            return
        heap, device = self.device.simulator.heap, self.device
        memory = heap.find(ptr)
        if memory is None:
            if heap.is_gone(ptr):
                raise DeviceError(f"{self.name}: argument {i} points into memory that was freed")
            if not device.host_access and heap.pinned_around(ptr, 1) is None:
                raise DeviceError(f"{self.name}: argument {i} points into no memory of a device "
                                  f"(EmulatedDevice(host_access=True) lets kernels have the host's)")
        elif memory.device is not device and not device.can_access(memory.device):
            raise DeviceError(f"{self.name}: argument {i} points into memory of {memory.device.name}, which is no peer")
