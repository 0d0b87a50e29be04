"""The one queue of a CUDA device: copies and launches in order, and the waits between them.

Owns the stream, the pinned memory of copies, the error word (fault.py), and the lock around them.  Invariant: the
device never accesses the caller's memory: the host copies bytes between it and pinned memory.  So queued work is done
when an event recorded after it has passed *and* the host has copied its downloads out of pinned memory; a wait for the
event also makes these copies.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from operator import index
from typing import Any, TypeVar, cast

import numpy as np

from ggml_sched.backend import Backend, Event
from ggml_sched.backends.cupy.device import Device, DeviceError, DeviceOutOfMemory, Stream, StreamEvent
from ggml_sched.backends.cupy.fault import Faults, Fetched
from ggml_sched.backends.cupy.staging import Downloads, Uploads
from ggml_sched.errors import BackendError, OutOfMemory
from ggml_sched.threads.locks import ForkLock

__all__ = ["STAGING", "CupyEvent", "DeviceQueue", "guarded", "queueing"]

STAGING = 16 << 20
LEAST_STAGING = 4096

Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(method: Method) -> Method:
    """A method that holds the lock and checks that the backend is open and of this process; errors name the backend."""

    @wraps(method)
    def call(self: DeviceQueue, *args: Any) -> Any:
        # The lock is not taken in a helper function: a signal must find it either free, or held by this `with`.
        with self._lock:
            if self._closed or self._pid != os.getpid():
                self._refuse()
            try:
                return method(self, *args)
            except DeviceError as error:
                raise self._failure(error) from error

    return cast("Method", call)


def queueing(method: Method) -> Method:
    """A guarded method that queues something."""

    @guarded
    @wraps(method)
    def call(self: DeviceQueue, *args: Any) -> Any:
        self._queued += 1
        return method(self, *args)

    return cast("Method", call)


class CupyEvent(Event):
    """An event of a CUDA backend.  `event`: the device's; `n_downloads`: how many downloads were queued before it."""

    backend: DeviceQueue

    def __init__(self, backend: DeviceQueue) -> None:
        super().__init__(backend)
        self.event: StreamEvent = backend.device.event()
        self.n_downloads = 0


class DeviceQueue(Backend):
    """The part of CupyBackend that queues copies and waits for them; CupyBackend adds memory and computing."""

    device: Device

    def _open_queue(self, device: Device, staging: int) -> None:
        """Make the stream, the error word and pinned memory of `staging` bytes each way on a device.  After an error
        (OutOfMemory, BackendError) nothing is held."""
        staging = index(staging)
        if staging < LEAST_STAGING:
            raise ValueError(f"backend {self.name!r}: staging = {staging} is less than {LEAST_STAGING} bytes")
        self.device = device
        self._pid = os.getpid()
        self._closed = False
        self._lock = ForkLock()
        self._error: DeviceError | None = None
        """An error that could not be raised where it happened, for the next `synchronize`."""
        self._queued = self._done = 0
        """The number of queued operations, and how many of them are known to be done."""
        self.stream: Stream = device.stream()
        faults: Faults | None = None
        self.faults: Faults
        try:
            self.faults = faults = Faults(device, self.stream)
            self._uploads = Uploads(device, self.stream, staging)
            self._downloads = Downloads(device, self.stream, staging)
        except BaseException:
            if faults is not None:
                faults.free()
            raise

    @queueing
    def upload(self, address: int, data: np.ndarray) -> None:
        """Queue a copy of bytes (uint8) to an address of the device."""
        self._uploads.put(address, data)

    @queueing
    def download(self, out: np.ndarray, address: int) -> None:
        """Queue a copy of bytes of the device into `out` (uint8)."""
        self._downloads.get(out, address)

    @queueing
    def fill(self, address: int, value: int, size: int) -> None:
        """Queue filling bytes of the device."""
        self.stream.fill(address, value, size)

    # -- order --------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until all queued work is done; BackendError for its errors, and for invalid data that a kernel found
        (an id out of range), naming the node."""
        if self._queued == self._done and self._error is None and self._is_here:
            return          # nothing is queued; a closed backend returns here, too
        queued, n_downloads, fetched = self._end_of_queue()
        try:
            self.stream.synchronize()
        except DeviceError as error:
            raise self._give_up(queued, error) from error
        self._passed(queued, n_downloads, fetched)

    @guarded
    def _end_of_queue(self) -> tuple[int, int, Fetched]:
        """The present numbers of queued operations and downloads, and a queued copy of the error word."""
        return self._queued, self._downloads.number, self.faults.fetch()

    @guarded
    def _passed(self, queued: int, n_downloads: int, fetched: Fetched) -> None:
        """Copy the first `n_downloads` downloads out of pinned memory, check the error word, and note that the first
        `queued` operations are done.  This comes last: `synchronize` reads without the lock that nothing is queued."""
        try:
            self._complete(n_downloads, fetched)
        except BackendError as error:
            self.note_failure(error)
            self._done = max(self._done, queued)
            raise
        self._done = max(self._done, queued)

    def _complete(self, n_downloads: int, fetched: Fetched) -> None:
        error, self._error = self._error, None
        if error is not None:
            self._downloads.drop()
            raise error
        self._downloads.finish(n_downloads)
        self.faults.check(fetched, self.name)

    @guarded
    def _give_up(self, queued: int, error: DeviceError) -> BackendError | OutOfMemory:
        """Note that the first `queued` operations have ended, with an error; downloads are dropped.  Returns the
        exception to raise."""
        self._downloads.drop()
        failure = self._noted(error)
        self._done = max(self._done, queued)
        return failure

    def settle(self) -> None:
        """Wait for all queued work before memory is freed.  Errors are kept: the next `synchronize` raises them."""
        try:
            self.stream.synchronize()
        except DeviceError as error:
            self._error = self._error or error

    @guarded
    def event_new(self) -> CupyEvent:
        return CupyEvent(self)

    @guarded
    def event_record(self, event: Event) -> None:
        recorded = cast("CupyEvent", event)
        self.stream.record(recorded.event)
        recorded.n_downloads = self._downloads.number

    def event_here(self) -> CupyEvent:
        """A new event, recorded after all work queued so far."""
        event = self.event_new()
        self.event_record(event)
        return event

    def event_wait(self, event: Event) -> None:
        if isinstance(event, CupyEvent):
            other = event.backend
            if other is self:
                return          # the same queue, in order anyway
            if type(other.device) is type(self.device) and not other.is_downloading(event):
                self._follow(event)
                return
        super().event_wait(event)

    @queueing
    def _follow(self, event: CupyEvent) -> None:
        self.stream.wait(event.event)

    def event_synchronize(self, event: Event) -> None:
        if self._closed:
            return
        self._check_here()
        recorded = cast("CupyEvent", event)
        try:
            recorded.event.synchronize()
        except DeviceError as error:
            raise self._noted(error) from error
        if self.is_downloading(recorded):
            self._arrived(recorded)

    @guarded
    def _arrived(self, event: CupyEvent) -> None:
        self._downloads.finish(event.n_downloads)

    def is_downloading(self, event: CupyEvent) -> bool:
        """Whether downloads queued before the event are still to be copied out of pinned memory."""
        with self._lock:        # another thread may be finishing them
            return self._downloads.is_waiting(event.n_downloads)

    @guarded
    def is_download_target(self, data: np.ndarray) -> bool:
        """Whether queued downloads are still to be copied to these bytes of host memory."""
        return self._downloads.is_target(data)

    # -- locking --------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def _is_here(self) -> bool:
        """Whether this is the process that opened the device."""
        return self._pid == os.getpid()

    def _refuse(self) -> None:
        if self._closed:
            raise BackendError(f"backend {self.name!r} is closed")
        self._check_here()

    def _check_here(self) -> None:
        if self._pid != os.getpid():
            raise BackendError(f"backend {self.name!r} was opened by process {self._pid}: a process that was forked "
                               "from it cannot use its device, and opens one of its own")

    def _noted(self, error: DeviceError) -> BackendError | OutOfMemory:
        """Note a device's error as a failure of the backend; returns the exception to raise, naming the backend."""
        failure = self._failure(error)
        self.note_failure(failure)
        return failure

    def _failure(self, error: DeviceError) -> BackendError | OutOfMemory:
        if isinstance(error, DeviceOutOfMemory):
            return OutOfMemory(f"backend {self.name!r}: {error.needed} bytes needed, {error.free} left on the device",
                               self.name, error.needed, error.free)
        return BackendError(f"backend {self.name!r}: {error}")
