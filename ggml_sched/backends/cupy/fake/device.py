"""FakeDevice: the device layer on the host, for tests.  What it counts is what the host asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ggml_sched.backends.cupy.device import ALIGNMENT, Device, DeviceError, DeviceOutOfMemory
from ggml_sched.backends.cupy.fake.compile import sanitizers
from ggml_sched.backends.cupy.fake.kernels import MAX_SHARED, FakeModule
from ggml_sched.backends.cupy.fake.memory import FakeMemory
from ggml_sched.backends.cupy.fake.world import FakeEvent, FakeStream, FakeWorld

__all__ = ["Counts", "FakeDevice"]


@dataclass
class Counts:
    """`waits`: how often the host had to wait for work (of a stream, an event, the device, a pageable copy, a free);
    `launches`: kernels that were launched or captured one by one; `copies` are those between devices or within one."""

    launches: int = 0
    graph_launches: int = 0
    captures: int = 0
    waits: int = 0
    copies_in: int = 0
    copies_out: int = 0
    copies: int = 0


class FakeDevice(Device):
    """A device of `memory` bytes.  `order` of threads: 0 forward, 1 backward, any other a seed; it may be set later.

    Devices of one `world` run together; `peers` (of the same world, which is theirs if none is given) are devices that
    copies go to and from directly.  `seed` is that of a new world.  A `dry` device has addresses and no memory, and
    runs nothing: for counting what the host does.  With `host_access` kernels may get addresses of any host memory.
    """

    arch = "host"
    n_multiprocessors = 4
    max_shared = MAX_SHARED

    def __init__(
        self,
        seed: int = 0,
        memory: int = 1 << 30,
        order: int = 0,
        peers: Iterable[FakeDevice] = (),
        *,
        world: FakeWorld | None = None,
        name: str | None = None,
        dry: bool = False,
        host_access: bool = False,
    ) -> None:
        peers = tuple(peers)
        if world is None:
            world = peers[0].world if peers else FakeWorld(seed)
        if any(peer.world is not world for peer in peers):
            raise DeviceError("peers are devices of one world")
        self.world = world
        self.number = world.n_devices
        world.n_devices += 1
        self.name = name or f"fake{self.number}"
        self.order = order
        self.is_dry = dry
        self.host_access = host_access
        self.total = memory
        self.used = 0
        self.counts = Counts()
        self.sanitize = sanitizers()
        self.is_closed = False
        self._streams: list[FakeStream] = []
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

    def alloc(self, n: int) -> FakeMemory:
        self.check_open()
        self.world.refuse_while_capturing("allocating memory")
        if n < 0:
            raise ValueError(f"no memory has {n} bytes")
        if _rounded(n) > self.total - self.used:
            raise DeviceOutOfMemory(n, self.total - self.used)
        memory = self.world.heap.alloc(self, n, self.total - self.used, self.is_dry)
        self.used += _rounded(n)
        return memory

    def free(self, memory: FakeMemory) -> None:
        """As cudaFree: whatever is queued on the device is done first."""
        self.world.refuse_while_capturing("freeing memory")
        try:
            self.synchronize()
        finally:
            self._release(memory)

    def _release(self, memory: FakeMemory) -> None:
        self.world.heap.release(memory, at_once="address" in self.sanitize)
        self.used -= _rounded(memory.size)

    def pinned(self, n: int) -> np.ndarray:
        self.check_open()
        self.world.refuse_while_capturing("allocating pinned memory")
        return self.world.heap.pinned(n)

    # -- the rest --------------------------------------------------------------------

    def stream(self) -> FakeStream:
        self.check_open()
        stream = FakeStream(self)
        self._streams.append(stream)
        self.world.streams.append(stream)
        return stream

    def event(self) -> FakeEvent:
        self.check_open()
        return FakeEvent(self)

    def module(self, names: Sequence[str], folder: Path | None = None) -> FakeModule:
        """`folder`: where sources are looked for, instead of the package's own."""
        self.check_open()
        return FakeModule(self, names, folder)

    def can_access(self, other: Device) -> bool:
        return other is self or other in self._peers

    def synchronize(self) -> None:
        self.check_open()
        self.world.refuse_while_capturing("waiting for the device")
        waiting = [stream for stream in self._streams if stream.done < stream.pushed]
        self.counts.waits += bool(waiting)
        for stream in waiting:
            self.world.run(stream, stream.pushed)

    def close(self) -> None:
        """A capture that was not ended is dropped.  Raises what the last work raised; it is closed all the same."""
        if self.is_closed:
            return
        for stream in self._streams:
            self.world.capture(stream, False)
        try:
            self.synchronize()
        finally:
            self.is_closed = True
            for memory in self.world.heap.of(self):
                self._release(memory)
            self.world.streams = [stream for stream in self.world.streams if stream.device is not self]
            self._streams.clear()
            if not self.world.streams:
                self.world.heap.drop_kept()


def _rounded(n: int) -> int:
    return -(-max(n, 1) // ALIGNMENT) * ALIGNMENT
