"""Pinned memory, through which all copies between the host and a device go.

A queued copy reads or writes pinned memory when it runs.  Invariant: no byte of pinned memory is reused before the copy
that uses it is done.  Addresses of pinned memory are kept as integers.  Callers hold the backend's lock.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from ggml_sched.backends.cupy.device import Device, Stream, StreamEvent

__all__ = ["Downloads", "Uploads"]

ALIGNMENT = 256
"""The alignment in pinned memory of the data of each copy, in bytes."""
N_SLOTS = 4


class Uploads:
    """Copies to the device, through a ring of pinned slots: data is copied into a slot, and from there to the
    device by a queued copy.  When a slot is full, an event is recorded after its copies, and the slot is reused
    only when this event has passed.

    `n_waits` counts how often the host had to wait for an event.
    """

    def __init__(self, device: Device, stream: Stream, size: int) -> None:
        self._stream = stream
        self._slot = slot = size // N_SLOTS // ALIGNMENT * ALIGNMENT
        self._memory = device.pinned(slot * N_SLOTS)
        self._address: int = self._memory.ctypes.data
        self._events: list[StreamEvent] = [device.event() for _ in range(N_SLOTS)]
        self._recorded = [False] * N_SLOTS
        self._number = 0
        self._at, self._end = 0, slot
        self.n_waits: int = 0

    def put(self, address: int, data: np.ndarray) -> None:
        """Queue a copy of host bytes (uint8) to the device; they may change once this returns."""
        done, size = 0, len(data)
        while done < size:
            room = self._end - self._at
            if room < min(size - done, self._slot):
                # Small data goes in one copy; large data takes whole slots.
                self._next_slot()
                room = self._slot
            n = min(size - done, room)
            start = self._at
            # Memory is reserved before it is used, so that after an interrupt no other copy overwrites it.
            self._at = start + -(-n // ALIGNMENT) * ALIGNMENT
            self._memory[start : start + n] = data[done : done + n] if done or n < size else data
            self._stream.pinned_in(address + done, self._address + start, n)
            done += n

    def close(self) -> None:
        """Drop pinned memory and events; nothing may be queued or copied any more."""
        self._memory = np.empty(0, np.uint8)
        self._events = []

    def _next_slot(self) -> None:
        """Continue in the next slot, which the device no longer reads."""
        self._stream.record(self._events[self._number])
        self._recorded[self._number] = True
        following = (self._number + 1) % len(self._events)
        event = self._events[following]
        if self._recorded[following] and not event.query():
            self.n_waits += 1
            event.synchronize()
        self._number = following
        self._at, self._end = following * self._slot, (following + 1) * self._slot


class Downloads:
    """Copies to the host: a queued copy writes data of the device to pinned memory; later `finish` copies them to their
    destination, and only then the copy is complete.

    `number`: how many copies were queued.
    """

    def __init__(self, device: Device, stream: Stream, size: int) -> None:
        self._stream = stream
        self._memory = device.pinned(size)
        self._address: int = self._memory.ctypes.data
        self._at = 0
        self._waiting: deque[tuple[int, np.ndarray, np.ndarray]] = deque()
        self.number: int = 0

    def get(self, out: np.ndarray, address: int) -> None:
        """Queue a copy of bytes of the device into `out` (uint8).  If pinned memory is full, wait for earlier
        copies."""
        done, size = 0, len(out)
        while done < size:
            if not self._waiting:
                self._at = 0
            n = min(size - done, len(self._memory) - self._at)
            if n < min(size - done, len(self._memory)):
                self._stream.synchronize()
                self.finish(self.number)
                continue
            start = self._at
            self._at = min(start + -(-n // ALIGNMENT) * ALIGNMENT, len(self._memory))
            self._stream.pinned_out(self._address + start, address + done, n)
            self.number += 1
            self._waiting.append((self.number, self._memory[start : start + n],
                                  out[done : done + n] if done or n < size else out))
            done += n

    def is_waiting(self, number: int) -> bool:
        """Whether one of the first `number` copies has still to be finished."""
        return bool(self._waiting) and self._waiting[0][0] <= number

    def is_target(self, data: np.ndarray) -> bool:
        """Whether a copy that has still to be finished goes to bytes of `data`."""
        return any(np.may_share_memory(out, data) for _, _, out in self._waiting)

    def finish(self, number: int) -> None:
        """Copy the data of the first `number` queued copies, which the device must have done, to their destinations."""
        while self._waiting and self._waiting[0][0] <= number:
            _, part, out = self._waiting[0]
            out[:] = part
            self._waiting.popleft()

    def drop(self) -> None:
        """Drop unfinished copies: the device has failed, or nothing waits for them any more."""
        self._waiting.clear()

    def close(self) -> None:
        """Drop pinned memory, and unfinished copies; nothing may be queued any more."""
        self.drop()
        self._memory = np.empty(0, np.uint8)
