"""The stub's state: devices, memory, streams, events, captures and graphs; and when queued work runs.

Memory of a device is host memory.  Where `late` is set, queued work waits until a call waits for its stream, for an
event after it, or for the device; otherwise it runs at once.  Calls that CUDA forbids during a capture are refused, and
invalidate the capture.  `complaints` lists every refused call: a test that expects none asserts that it is empty.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["CudaError", "NAMES", "World"]

INVALID_VALUE, NO_MEMORY, NO_DEVICE, BAD_DEVICE = 1, 2, 100, 101
NO_CONTEXT, BAD_HANDLE, NOT_FOUND, NOT_READY, BAD_ADDRESS = 201, 400, 500, 600, 700
PEER_ALREADY, NOT_SUPPORTED, CAPTURE_FORBIDS, CAPTURE_INVALID, OTHER_THREAD = 704, 801, 900, 901, 908
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2     # modes of a capture

NAMES = {
    INVALID_VALUE: "INVALID_VALUE", NO_MEMORY: "OUT_OF_MEMORY", NO_DEVICE: "NO_DEVICE", BAD_DEVICE: "INVALID_DEVICE",
    NO_CONTEXT: "INVALID_CONTEXT", BAD_HANDLE: "INVALID_HANDLE", NOT_FOUND: "NOT_FOUND", NOT_READY: "NOT_READY",
    BAD_ADDRESS: "ILLEGAL_ADDRESS", PEER_ALREADY: "PEER_ACCESS_ALREADY_ENABLED", NOT_SUPPORTED: "NOT_SUPPORTED",
    CAPTURE_FORBIDS: "STREAM_CAPTURE_UNSUPPORTED", CAPTURE_INVALID: "STREAM_CAPTURE_INVALIDATED",
    OTHER_THREAD: "STREAM_CAPTURE_WRONG_THREAD", 701: "LAUNCH_OUT_OF_RESOURCES", 719: "LAUNCH_FAILED",
}

CONTEXTS = 0x7000_0000
"""The handle of device 0's primary context; those of other devices follow."""


class CudaError(Exception):
    """A call fails with this status."""

    def __init__(self, status: int, why: str = "") -> None:
        super().__init__(status, why)
        self.status = status
        self.why = why


class Work(NamedTuple):
    """A piece of queued work, and what it is."""

    what: str
    run: Callable[[], None]


class Capture:
    """The capture of a stream, begun by `thread` in a mode."""

    def __init__(self, mode: int, thread: int) -> None:
        self.mode = mode
        self.thread = thread
        self.work: list[Work] = []
        self.is_invalid = False


class StreamState:
    """A stream of a device: the queue, how much was ever queued, and how much of it ran."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.queue: deque[Work] = deque()
        self.n_queued = self.n_ran = 0
        self.capture: Capture | None = None
        self.is_running = False


class Allocation(NamedTuple):
    """Bytes at an address; `holder` keeps them.  Device -1: page-locked host memory."""

    address: int
    size: int
    device: int
    holder: Any


class World:
    """`counts` has how often each function was called; `failing[name]` is the status that a function returns from now
    on, `failing_once[name]` that of one call, after so many others; `contexts` are the devices whose primary context
    was made."""

    def __init__(self, devices: int = 1, memory: int = 2 << 30, arch: int = 90, n_multiprocessors: int = 132,
                 late: bool = False) -> None:
        self.n_devices = devices
        self.memory = memory
        self.arch = arch
        self.n_multiprocessors = n_multiprocessors
        self.late = late
        self.runtime_version = 0
        self.driver_version = 0
        self.lock = threading.RLock()
        self.counts: Counter[str] = Counter()
        self.failing: dict[str, int] = {}
        self.failing_once: dict[str, tuple[int, int]] = {}      # {name: (calls before it, status)}
        self.complaints: list[str] = []
        self.contexts: set[int] = set()
        self.allocations: dict[int, Allocation] = {}
        self.streams: dict[int, StreamState] = {0: StreamState(0)}
        self.events: dict[int, int] = {}                        # {event: its device}
        self.marks: dict[int, tuple[int, int]] = {}             # {event: (stream, how much was queued there)}
        self.graphs: dict[int, list[Work]] = {}
        self.executables: dict[int, list[Work]] = {}
        self.modules: dict[int, Any] = {}
        self.functions: dict[int, Any] = {}
        self.blas: dict[int, int] = {}                          # {handle of cuBLAS: its stream}
        self.peers: set[tuple[int, int]] = set()
        self.launched: Counter[str] = Counter()
        self.early: Counter[str] = Counter()        # of those launched, such as may begin before others have ended
        self._thread = threading.local()
        self._handle = 0x5000_0000

    def planted(self, name: str) -> int:
        """The status that this call of a function has to return; 0: none was planted."""
        if name in self.failing_once:
            before, status = self.failing_once.pop(name)
            if not before:
                return status
            self.failing_once[name] = before - 1, status
        return self.failing.get(name, 0)

    # -- what is left -------------------------------------------------------------

    def on_devices(self) -> int:
        """Bytes of device memory that are allocated."""
        return sum(a.size for a in self.allocations.values() if a.device >= 0)

    def pinned(self) -> int:
        """Bytes of page-locked memory that are allocated."""
        return sum(a.size for a in self.allocations.values() if a.device < 0)

    def left(self) -> dict[str, int]:
        """How many of each kind of object exist, without those of which there are none."""
        kinds = {"device bytes": self.on_devices(), "pinned bytes": self.pinned(), "streams": len(self.streams) - 1,
                 "events": len(self.events), "graphs": len(self.graphs) + len(self.executables),
                 "cuBLAS handles": len(self.blas)}
        return {kind: n for kind, n in kinds.items() if n}

    def forget(self) -> None:
        """Drop what is left: objects of tests in which the calls that destroy them fail."""
        for table in (self.allocations, self.events, self.marks, self.graphs, self.executables, self.blas):
            table.clear()
        self.streams = {0: self.streams[0]}

    # -- handles and contexts -------------------------------------------------------

    def handle(self) -> int:
        self._handle += 0x40
        return self._handle

    @property
    def context(self) -> int:
        """The thread's current context, or 0."""
        return getattr(self._thread, "context", 0)

    @context.setter
    def context(self, handle: int) -> None:
        if handle and handle - CONTEXTS not in self.contexts:
            raise CudaError(NO_CONTEXT, f"context {handle:#x}")
        self._thread.context = handle

    @property
    def device(self) -> int:
        """The thread's current device: that of its context, or 0."""
        return self.context - CONTEXTS if self.context else 0

    def enter(self, device: int | None = None) -> None:
        """Give the thread a context, as calls of the runtime do: that of `device`, or of its current device."""
        device = self.device if device is None else device
        self.contexts.add(device)
        self._thread.context = CONTEXTS + device

    # -- memory -----------------------------------------------------------------------

    def allocate(self, size: int, device: int) -> int:
        if device >= 0 and sum(a.size for a in self.allocations.values() if a.device == device) + size > self.memory:
            raise CudaError(NO_MEMORY)
        holder = ctypes.create_string_buffer(size + 4096)
        address = -(-ctypes.addressof(holder) // 4096) * 4096
        ctypes.memset(address, 0xA5, size)
        self.allocations[address] = Allocation(address, size, device, holder)
        return address

    def free(self, address: int, on_device: bool) -> None:
        found = self.allocations.get(address)
        if found is None or (found.device >= 0) is not on_device:
            raise CudaError(INVALID_VALUE, f"freeing {address:#x}")
        self.drain_all()
        self.allocations.pop(address, None)

    def kind_of(self, address: int, size: int) -> str:
        """"device", "pinned" or "pageable"; bytes that leave device memory are an illegal address."""
        for a in self.allocations.values():
            if a.address < address + size and address < a.address + max(a.size, 1):
                if not (a.address <= address and address + size <= a.address + a.size):
                    raise CudaError(BAD_ADDRESS, f"{address:#x} and {size} bytes, of an allocation of {a.size}")
                return "device" if a.device >= 0 else "pinned"
        return "pageable"

    # -- streams --------------------------------------------------------------------

    def stream(self, handle: int | None) -> StreamState:
        found = self.streams.get(handle or 0)
        if found is None:
            raise CudaError(BAD_HANDLE, f"stream {handle:#x}")
        return found

    def queue(self, handle: int | None, what: str, run: Callable[[], None]) -> None:
        """Queue work on a stream, or record it where the stream is captured."""
        stream, work = self.stream(handle), Work(what, run)
        if stream.capture is None:
            stream.queue.append(work)
            stream.n_queued += 1
            if not self.late:
                self.drain(handle)
        elif stream.capture.is_invalid:
            raise CudaError(CAPTURE_INVALID, what)
        else:
            stream.capture.work.append(work)

    def drain(self, handle: int | None, upto: int | None = None) -> None:
        """Run what is queued on a stream, up to its `upto`th piece.

        Within a piece of the same stream nothing runs: a finaliser may call this from there, and order has to stay.
        """
        stream = self.streams.get(handle or 0)
        if stream is None or stream.is_running:
            return
        while stream.queue and (upto is None or stream.n_ran < upto):
            work = stream.queue.popleft()
            stream.is_running = True
            try:
                work.run()
            finally:
                stream.is_running = False
                stream.n_ran += 1

    def drain_all(self) -> None:
        for handle in list(self.streams):
            self.drain(handle)

    def has_passed(self, event: int) -> bool:
        stream, upto = self.marks.get(event, (0, 0))
        return stream not in self.streams or self.streams[stream].n_ran >= upto

    def refuse_in_capture(self, name: str) -> None:
        """Refuse a potentially unsafe call while a capture forbids it: one of any thread in global mode, one of this
        thread in thread-local mode.  Such a call invalidates the capture."""
        me = threading.get_ident()
        for stream in self.streams.values():
            capture = stream.capture
            if capture is not None and (capture.mode == GLOBAL or capture.mode == THREAD_LOCAL
                                        and capture.thread == me):
                capture.is_invalid = True
                raise CudaError(CAPTURE_FORBIDS, f"{name} while a stream is captured")
