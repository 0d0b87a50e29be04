"""EmulatedDevice: the CUDA device interface on the host, with counts of the host's calls."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuda_emulator.compile import sanitizers
from cuda_emulator.kernels import MAX_SHARED, EmulatedFunction, load
from cuda_emulator.memory import EmulatedMemory
from cuda_emulator.simulator import EmulatedEvent, EmulatedStream, Simulator
from ggml_sched.backends.cupy import source
from ggml_sched.backends.cupy.device import ALIGNMENT, Device, DeviceError, DeviceOutOfMemory

__all__ = ["Counts", "EmulatedDevice"]


@dataclass
class Counts:
    """`waits`: times that the host waited for work (of a stream, an event, the device, a pageable copy, a free);
    `launches`: single kernels launched or captured; `copies`: copies between devices or within one, not to or from the
    host; `early`: launches that may begin before those before them have ended."""

    launches: int = 0
    graph_launches: int = 0
    captures: int = 0
    waits: int = 0
    copies_in: int = 0
    copies_out: int = 0
    copies: int = 0
    early: int = 0


class EmulatedDevice(Device):
    """A device of `memory` bytes.  `order` of threads: 0 forward, 1 backward, any other a seed; it may be set later.

    Devices of one `simulator` run together; `peers` (of the same simulator, which is theirs if none is given) are
    devices that copies go to and from directly.  `seed` is that of a new simulator.  A `dry` device has addresses and
    no memory, and runs nothing: for counting the host's calls.  With `host_access` kernels may get addresses of any
    host memory.
    """

    arch = "host"
    n_multiprocessors = 4
    max_shared = MAX_SHARED
    can_overlap = True

    def __init__(
        self,
        seed: int = 0,
        memory: int = 1 << 30,
        order: int = 0,
        peers: Iterable[EmulatedDevice] = (),
        *,
        simulator: Simulator | None = None,
        name: str | None = None,
        dry: bool = False,
        host_access: bool = False,
    ) -> None:
        peers = tuple(peers)
        if simulator is None:
            simulator = peers[0].simulator if peers else Simulator(seed)
        if any(peer.simulator is not simulator for peer in peers):
            raise DeviceError("peers are devices of one simulator")
        self.simulator = simulator
        self.number = simulator.n_devices
        simulator.n_devices += 1
        self.name = name or f"emulated{self.number}"
        self.order = order
        self.is_dry = dry
        self.host_access = host_access
        self.total = memory
        self.used = 0
        self.counts = Counts()
        self.sanitize = sanitizers()
        self.is_closed = False
        self._streams: list[EmulatedStream] = []
        self._libraries: dict[str, ctypes.PyDLL] = {}
        self._peers = set(peers)
        for peer in peers:
            peer._peers.add(self)

    def check_open(self) -> None:
        if self.is_closed:
            raise DeviceError(f"{self.name} is closed")

    # -- memory --------------------------------------------------------------------

    def memory(self) -> tuple[int, int]:
        self.check_open()
        return self.total - self.used, self.total

    def alloc(self, n: int) -> EmulatedMemory:
        self.check_open()
        self.simulator.refuse_while_capturing("allocating memory")
        if n < 0:
            raise ValueError(f"no memory has {n} bytes")
        if _rounded(n) > self.total - self.used:
            raise DeviceOutOfMemory(n, self.total - self.used)
        memory = self.simulator.heap.alloc(self, n, self.total - self.used, self.is_dry)
        self.used += _rounded(n)
        return memory

    def free(self, memory: EmulatedMemory) -> None:
        """As cudaFree: completes the device's queued work first."""
        self.simulator.refuse_while_capturing("freeing memory")
        try:
            self.synchronize()
        finally:
            self._release(memory)

    def _release(self, memory: EmulatedMemory) -> None:
        self.simulator.heap.release(memory, at_once="address" in self.sanitize)
        self.used -= _rounded(memory.size)

    def pinned(self, n: int) -> np.ndarray:
        self.check_open()
        self.simulator.refuse_while_capturing("allocating pinned memory")
        return self.simulator.heap.pinned(n)

    # -- the rest --------------------------------------------------------------------

    def stream(self) -> EmulatedStream:
        self.check_open()
        stream = EmulatedStream(self)
        self._streams.append(stream)
        self.simulator.streams.append(stream)
        return stream

    def event(self) -> EmulatedEvent:
        self.check_open()
        return EmulatedEvent(self)

    def function(self, name: str, folder: Path | None = None, *, overlap: bool = False) -> EmulatedFunction:
        """`folder`: where the sources are, if not in the package.  Any kernel for the host may begin early."""
        self.check_open()
        module = name.partition(".")[0]
        if not self.is_dry and module not in self._libraries:
            self._libraries[module] = load(module, folder or source.KERNELS, self.sanitize)
        return EmulatedFunction(self, name, self._libraries.get(module))

    def can_access(self, other: Device) -> bool:
        return other is self or other in self._peers

    def synchronize(self) -> None:
        self.check_open()
        self.simulator.refuse_while_capturing("waiting for the device")
        waiting = [stream for stream in self._streams if stream.done < stream.pushed]
        self.counts.waits += bool(waiting)
        for stream in waiting:
            self.simulator.run(stream, stream.pushed)

    def close(self) -> None:
        """Drops a capture that was not ended.  Raises the error of the last work, if any; the device is closed in
        either case."""
        if self.is_closed:
            return
        for stream in self._streams:
            self.simulator.capture(stream, False)
        try:
            self.synchronize()
        finally:
            self.is_closed = True
            for memory in self.simulator.heap.of(self):
                self._release(memory)
            self.simulator.streams = [stream for stream in self.simulator.streams if stream.device is not self]
            self._streams.clear()
            if not self.simulator.streams:
                self.simulator.heap.drop_kept()


def _rounded(n: int) -> int:
    return -(-max(n, 1) // ALIGNMENT) * ALIGNMENT
