"""A simulator of streams: work of emulated devices runs as late as events permit, in an order that a seed decides.

Owns the queues.  Invariants: nothing runs before the host waits; a stream runs in order; between streams only events
order anything.  A missing event or wait therefore gives wrong data, on any machine.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cuda_emulator.memory import Heap, Pinned
from ggml_sched.backends.cupy.device import CapturedGraph, DeviceError, Stream, StreamEvent, bytes_of

__all__ = ["EmulatedEvent", "EmulatedGraph", "EmulatedStream", "Launching", "Simulator"]

Job = Callable[[], object]
PACES = (0.0, 0.3, 0.9)
"""While the host waits for a stream, another stream runs a job before each of that stream's jobs with one of these
probabilities, drawn anew for each wait."""
PATIENCE = 16
"""Unsuccessful queries of an event after which its work runs: a GPU makes progress while the host polls."""


class Simulator:
    """Emulated devices that share a host, and the order in which their streams run: equal seeds give equal orders."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.heap = Heap()
        self.streams: list[EmulatedStream] = []
        self.n_devices = 0
        self.lock = threading.RLock()
        self._capturing: dict[int, EmulatedStream] = {}     # by thread

    def run(self, stream: EmulatedStream, number: int) -> None:
        """Run a stream until `number` of its jobs are done, and jobs of other streams in between."""
        with self.lock:
            self._run(stream, number, self.random.choice(PACES))

    def _run(self, stream: EmulatedStream, number: int, pace: float) -> None:
        while stream.done < number:
            if pace and self.random.random() < pace:
                others = [other for other in self.streams if other is not stream and other.is_ready]
                if others:
                    self.random.choice(others).step()
                    continue
            if not stream.is_ready:
                # The recursion ends: a wait refers only to jobs queued before it.
                self._run(*stream.queue[0], pace)
            stream.step()

    def refuse_while_capturing(self, what: str) -> None:
        """Raise, and invalidate the calling thread's capture, for a call that CUDA forbids between begin_capture and
        end_capture."""
        stream = self._capturing.get(threading.get_ident())
        if stream is not None:
            stream.break_capture(what)
            raise DeviceError(f"{what} while this thread captures a stream")

    def capture(self, stream: EmulatedStream, is_on: bool) -> None:
        if is_on:
            self._capturing[threading.get_ident()] = stream
        else:
            self._capturing = {thread: one for thread, one in self._capturing.items() if one is not stream}


class EmulatedEvent(StreamEvent):
    def __init__(self, device) -> None:
        self.device = device
        self.place: Place | None = None             # where it was recorded
        self.capture: list[Job] | None = None       # the capture that it was recorded in
        self.asked = 0

    @property
    def has_passed(self) -> bool:
        return self.place is None or self.place.has_passed

    def _check(self, what: str) -> None:
        self.device.check_open()
        self.device.simulator.refuse_while_capturing(what)
        if self.capture is not None:
            raise DeviceError(f"{what}, which was recorded while its stream was captured")

    def synchronize(self) -> None:
        self._check("waiting for an event")
        if not self.has_passed:
            self.device.counts.waits += 1
            self.device.simulator.run(*self.place)

    def query(self) -> bool:
        self._check("querying an event")
        if not self.has_passed:
            self.asked += 1
            if self.asked >= PATIENCE:
                self.device.simulator.run(*self.place)
        return self.has_passed


class EmulatedGraph(CapturedGraph):
    def __init__(self, device, jobs: list[Job]) -> None:
        self.device = device
        self.jobs: tuple[Job, ...] | None = tuple(jobs)

    def launch(self, stream: EmulatedStream) -> None:
        self.device.check_open()
        if self.jobs is None:
            raise DeviceError("a graph is launched that was freed")
        if stream.device is not self.device:
            raise DeviceError(f"a graph of {self.device.name} is launched on a stream of {stream.device.name}")
        if stream.is_capturing:
            stream.break_capture("launching a graph")
            raise DeviceError("a graph is launched on a stream that is captured")
        self.device.counts.graph_launches += 1
        stream.push(*self.jobs)

    def free(self) -> None:
        self.jobs = None


class Launching(NamedTuple):
    """A job that runs a kernel.  `early`: it may begin before the launches right before it in the stream have ended."""

    run: Job
    early: bool

    def __call__(self) -> None:
        self.run()


class Place(NamedTuple):
    """A point in a stream: passed when `number` of its jobs are done."""

    stream: EmulatedStream
    number: int

    @property
    def has_passed(self) -> bool:
        return self.stream.done >= self.number


class EmulatedStream(Stream):
    """`queue` holds tuples of jobs (one job, or all jobs of a graph), and points of other streams to wait for."""

    def __init__(self, device) -> None:
        self.device = device
        self.queue: deque[tuple[Job, ...] | Place] = deque()
        self.pushed = 0
        self.done = 0
        self._inside = 0            # jobs of the first tuple that are done
        self.before: dict[int, bytes] | None = None
        """The device's memory, {address: bytes}, before the launches with which the next one may overlap; None: with
        none."""
        self._captured: list[Job] | None = None
        self._broken: str | None = None

    # -- running -----------------------------------------------------------------

    def push(self, *jobs: Job) -> None:
        """Queue jobs as one tuple, or add them to the capture."""
        if self._captured is not None:
            self._captured.extend(jobs)
        elif not self.device.is_dry:
            self.queue.append(jobs)
            self.pushed += 1

    @property
    def is_ready(self) -> bool:
        """Whether the next job may run."""
        return bool(self.queue) and (not isinstance(self.queue[0], Place) or self.queue[0].has_passed)

    def step(self) -> None:
        """Run the next job.  A job that fails ends its tuple; streams that wait for it continue."""
        jobs, is_last = self.queue[0], True
        try:
            if not isinstance(jobs, Place) and jobs:
                job = jobs[self._inside]
                self._inside += 1
                self._note(job)
                job()
                is_last = self._inside == len(jobs)
        finally:
            if is_last:
                self.queue.popleft()
                self._inside = 0
                self.done += 1

    def _note(self, job: Job) -> None:
        """Keep the memory before a launch with which later ones may overlap."""
        is_launch = isinstance(job, Launching)
        if not is_launch:
            self.before = None
        elif self.device.counts.early and (self.before is None or not job.early):
            self.before = {memory.ptr: ctypes.string_at(memory.ptr, memory.size)
                           for memory in self.device.simulator.heap.of(self.device)}

    def synchronize(self) -> None:
        self.device.check_open()
        self.device.simulator.refuse_while_capturing("waiting for a stream")
        if self._captured is not None:
            self.break_capture("waiting for the stream")
            raise DeviceError("waiting for a stream that another thread captures")
        if self.done < self.pushed:
            self.device.counts.waits += 1
            self.device.simulator.run(self, self.pushed)

    # -- events ------------------------------------------------------------------

    def record(self, event: EmulatedEvent) -> None:
        self.device.check_open()
        if event.device is not self.device:
            raise DeviceError(f"an event of {event.device.name} is recorded on a stream of {self.device.name}")
        event.asked = 0
        event.capture = self._captured
        if self._captured is None:
            event.place = Place(self, self.pushed)

    def wait(self, event: EmulatedEvent) -> None:
        self.device.check_open()
        if event.capture is not None:
            if event.capture is not self._captured:
                self.break_capture("waiting for an event of another capture")
                raise DeviceError("a stream waits for an event that was recorded in another stream's capture")
            return
        place = event.place
        if place is None:
            return
        if self._captured is not None:
            self.break_capture("waiting for work outside of the capture")
            raise DeviceError("a stream that is captured waits for an event from outside of the capture")
        if place.stream is not self and not place.has_passed:
            self.queue.append(place)
            self.pushed += 1

    # -- copies ------------------------------------------------------------------

    def copy_in(self, memory_ptr: int, host: np.ndarray) -> None:
        self.device.check_open()
        data, to = bytes_of(host), int(memory_ptr)
        self._range(to, data.size, "a copy to the device")
        pinned = self._pinned(data, "copying from pageable memory")
        self.device.counts.copies_in += 1
        if pinned is None:
            data = data.copy()
            self.push(lambda: self._move(to, data.ctypes.data, data.size, to))
        else:
            start, n = data.ctypes.data, data.size
            self.push(lambda: self._move(to, start, n, to, pinned))

    def copy_out(self, host: np.ndarray, memory_ptr: int) -> None:
        self.device.check_open()
        data, start = bytes_of(host, writing=True), int(memory_ptr)
        self._range(start, data.size, "a copy from the device")
        pinned = self._pinned(data, "copying to pageable memory")
        self.device.counts.copies_out += 1
        to, n = data.ctypes.data, data.size
        if pinned is None:
            self.push(lambda: self._move(data.ctypes.data, start, n, start))
            self.synchronize()
        else:
            self.push(lambda: self._move(to, start, n, start, pinned))

    def pinned_in(self, memory_ptr: int, host_ptr: int, n: int) -> None:
        self.device.check_open()
        self._range(memory_ptr, n, "a copy to the device")
        pinned = self._in_pinned(host_ptr, n)
        self.device.counts.copies_in += 1
        self.push(lambda: self._move(memory_ptr, host_ptr, n, memory_ptr, pinned))

    def pinned_out(self, host_ptr: int, memory_ptr: int, n: int) -> None:
        self.device.check_open()
        self._range(memory_ptr, n, "a copy from the device")
        pinned = self._in_pinned(host_ptr, n)
        self.device.counts.copies_out += 1
        self.push(lambda: self._move(host_ptr, memory_ptr, n, memory_ptr, pinned))

    def copy(self, dst_ptr: int, src_ptr: int, n: int) -> None:
        self.device.check_open()
        to, start = int(dst_ptr), int(src_ptr)
        self._pair(to, start, n)
        if to < start + n and start < to + n:
            raise DeviceError(f"a copy of {n} bytes within memory that overlaps")
        self.device.counts.copies += 1
        self.push(lambda: self._copy(to, start, n))

    def _copy(self, to: int, start: int, n: int) -> None:
        self._pair(to, start, n)
        ctypes.memmove(to, start, n)

    def _pair(self, to: int, start: int, n: int) -> None:
        ends = [self.device.simulator.heap.check(ptr, n, "a copy on the device").device for ptr in (to, start)]
        for one in ends:
            if self.device not in ends or (one is not self.device and not self.device.can_access(one)):
                raise DeviceError(f"{self.device.name} copies from {ends[1].name} to {ends[0].name}, "
                                  f"and they are no peers")

    def fill(self, ptr: int, value: int, n: int) -> None:
        self.device.check_open()
        at, byte = int(ptr), int(value)
        if not 0 <= byte < 256:
            raise ValueError(f"fill takes a byte, not {byte}")
        self._range(at, n, "filling memory")

        def run() -> None:
            self._range(at, n, "filling memory")
            ctypes.memset(at, byte, n)

        self.push(run)

    def _range(self, ptr: int, n: int, what: str) -> None:
        owner = self.device.simulator.heap.check(ptr, n, what).device
        if owner is not self.device:
            raise DeviceError(f"{what}: a stream of {self.device.name} gets memory of {owner.name}")

    def _pinned(self, data: np.ndarray, what: str) -> Pinned | None:
        pinned = self.device.simulator.heap.pinned_around(data.ctypes.data, data.size)
        if pinned is None and self._captured is not None:
            self.break_capture(what)
            raise DeviceError(f"{what} while the stream is captured")
        return pinned

    def _in_pinned(self, host_ptr: int, n: int) -> Pinned:
        pinned = self.device.simulator.heap.pinned_around(host_ptr, n)
        if pinned is None or n < 1:
            raise DeviceError(f"a copy of {n} bytes at {host_ptr:#x}, which are not in pinned memory")
        return pinned

    def _move(self, to: int, start: int, n: int, ptr: int, pinned: Pinned | None = None) -> None:
        """Copy between host and device; `ptr` is the address on the device."""
        self._range(ptr, n, "a copy")
        if pinned is not None and pinned.owner() is None:
            raise DeviceError(f"pinned memory was freed before a copy of {n} bytes ran")
        ctypes.memmove(to, start, n)

    # -- capture -----------------------------------------------------------------

    @property
    def is_capturing(self) -> bool:
        return self._captured is not None

    def begin_capture(self) -> None:
        self.device.check_open()
        self.device.simulator.refuse_while_capturing("beginning another capture")
        self._captured, self._broken = [], None
        self.device.simulator.capture(self, True)

    def break_capture(self, why: str) -> None:
        if self._captured is not None:
            self._broken = self._broken or why

    def end_capture(self) -> EmulatedGraph:
        self.device.check_open()
        if self._captured is None:
            raise DeviceError("end_capture without begin_capture")
        jobs, self._captured = self._captured, None
        self.device.simulator.capture(self, False)
        if self._broken is not None:
            raise DeviceError(f"the capture was broken by {self._broken}")
        self.device.counts.captures += 1
        return EmulatedGraph(self.device, jobs)
