"""Invalid data that kernels find, such as an id out of range: they note it in the error word on the device.

A kernel cannot raise, so it writes the number of its node to the error word, unless another fault is there already.
Waits for the device fetch the word, raise a BackendError that names the node, and clear it.  Nodes of different plans
have different numbers.  Invariants: a number is not given to another node before the word was checked after all work
that ran with it; a fault is raised once, however many threads have fetched the word before it was cleared.  Callers
hold the backend's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ggml_sched._graph import Tensor, label
from ggml_sched.backends.cupy.device import Device, Stream
from ggml_sched.backends.cupy.launch import FAULT, STATE
from ggml_sched.errors import BackendError

__all__ = ["Faults", "Fetched", "Numbers"]

SIZE = FAULT.itemsize


class Numbers:
    """Consecutive numbers from `first` on, one for each of `nodes`.  `is_over`: no new work will use these numbers."""

    __slots__ = ("first", "is_over", "nodes")

    def __init__(self, first: int, nodes: Sequence[Tensor]) -> None:
        self.first: int = first
        self.nodes: Sequence[Tensor] = nodes
        self.is_over: bool = False

    @property
    def stop(self) -> int:
        return self.first + len(self.nodes)


class Fetched(NamedTuple):
    """Copy number `number` of the error word to the host, as it was queued.  `ran`: the runs whose faults the copy
    shows, {numbers: the index of their last run}."""

    number: int
    ran: Mapping[Numbers, int]


class Faults:
    """The error word of one device, at `address`, and the rest of `STATE` after it."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._stream = stream
        self._memory = device.alloc(STATE.itemsize)
        self._host = device.pinned(SIZE)
        self._host[:] = 0
        self._host_ptr: int = self._host.ctypes.data
        self._given: list[Numbers] = []
        """The numbers in use, ascending; those of freed plans until the error word was checked after their last run."""
        self._ran: dict[Numbers, int] = {}
        """{numbers: the index of their last run}, for work queued since the last check of the word."""
        self._runs = 0
        self._fetches = self._n_cleared = 0
        """How often the word was fetched; and how many of these fetches came before the last clearing of a fault."""
        stream.fill(self._memory.ptr, 0, STATE.itemsize)

    @property
    def address(self) -> int:
        return self._memory.ptr

    # -- numbers ------------------------------------------------------------------

    def number(self, nodes: Sequence[Tensor]) -> Numbers:
        """Numbers for these nodes: the lowest consecutive ones that are not in use."""
        first, at = 0, len(self._given)
        for i, other in enumerate(self._given):
            if first + len(nodes) <= other.first:
                at = i
                break
            first = other.stop
        found = Numbers(first, nodes)
        self._given.insert(at, found)
        return found

    def give_back(self, numbers: Numbers) -> None:
        """Release numbers with which nothing will run any more; idempotent."""
        numbers.is_over = True
        if numbers not in self._ran and numbers in self._given:
            self._given.remove(numbers)

    def ran(self, numbers: Numbers) -> None:
        """Note that work with these numbers was queued."""
        self._runs += 1
        self._ran[numbers] = self._runs

    # -- the word -----------------------------------------------------------------

    def fetch(self) -> Fetched:
        """Queue a copy of the word to the host, if something ran; returns the argument of a later `check`."""
        if self._ran:
            self._fetches += 1
            self._stream.pinned_out(self._host_ptr, self._memory.ptr, SIZE)
        return Fetched(self._fetches, dict(self._ran))

    def check(self, fetched: Fetched, backend_name: str) -> None:
        """Check the word in pinned memory, a copy that is `fetched` or later.  A fault is cleared, and raised as a
        BackendError."""
        if not fetched.ran:
            return
        fault = self._host.view(FAULT)[0]
        number, value, limit = int(fault["position"]) - 1, int(fault["value"]), int(fault["limit"])
        node = self._node(number)
        for numbers, run in fetched.ran.items():
            if self._ran.get(numbers) == run:
                del self._ran[numbers]
                if numbers.is_over:
                    self.give_back(numbers)
        if number < 0 or fetched.number <= self._n_cleared:
            return          # no fault, or another thread has raised it
        # Words that were fetched before now and are checked later show the same fault, which must not be raised again.
        self._n_cleared = self._fetches
        self._stream.fill(self._memory.ptr, 0, SIZE)
        subject = "a kernel found that" if node is None else f"node {label(node)} ({node.op}):"
        raise BackendError(f"backend {backend_name!r}: {subject} id {value} does not name one of {limit} rows")

    def _node(self, number: int) -> Tensor | None:
        for numbers in self._given:
            if numbers.first <= number < numbers.stop:
                return numbers.nodes[number - numbers.first]
        return None

    def free(self) -> None:
        """Free the word, and drop the pinned memory that it is fetched to."""
        self._host = np.zeros(SIZE, np.uint8)
        self._memory.free()
