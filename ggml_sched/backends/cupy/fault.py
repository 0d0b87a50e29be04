"""What a kernel found wrong with the data: one word on the device, which names a node.

Kernels write the first fault since the word was read last.  Every plan has numbers of its own for its nodes, so that
the word says which node it was.  Invariant: numbers are not given again before what ran with them was looked at.
Callers hold the backend's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ggml_sched._graph import Tensor
from ggml_sched.backends.cupy.device import Device, Stream
from ggml_sched.backends.cupy.launch import FAULT
from ggml_sched.errors import BackendError

__all__ = ["Faults", "Numbers"]

SIZE = FAULT.itemsize


class Numbers:
    """`first` and those after it: one for each of some nodes.  `is_over`: nothing runs with them any more."""

    __slots__ = ("first", "is_over", "nodes")

    def __init__(self, first: int, nodes: Sequence[Tensor]) -> None:
        self.first, self.nodes = first, nodes
        self.is_over = False

    @property
    def stop(self) -> int:
        return self.first + len(self.nodes)


class Faults:
    """The word of one device, at `address`."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self._stream = stream
        self._memory = device.alloc(SIZE)
        self._host = device.pinned(SIZE)
        self._host[:] = 0
        self._given: list[Numbers] = []
        """Ascending; those of plans that are gone stay until they were looked at."""
        self._ran: dict[Numbers, int] = {}
        """Of what was queued since the word was read: the number of the run."""
        self._runs = 0
        stream.fill(self._memory.ptr, 0, SIZE)

    @property
    def address(self) -> int:
        return self._memory.ptr

    # -- numbers ------------------------------------------------------------------

    def number(self, nodes: Sequence[Tensor]) -> Numbers:
        """Numbers that nobody else has: the lowest that are free."""
        first, place = 0, len(self._given)
        for i, other in enumerate(self._given):
            if first + len(nodes) <= other.first:
                place = i
                break
            first = other.stop
        found = Numbers(first, nodes)
        self._given.insert(place, found)
        return found

    def give_back(self, numbers: Numbers) -> None:
        """Nothing will run with these numbers any more; idempotent."""
        numbers.is_over = True
        if numbers not in self._ran and numbers in self._given:
            self._given.remove(numbers)

    def ran(self, numbers: Numbers) -> None:
        """What has these numbers is queued."""
        self._runs += 1
        self._ran[numbers] = self._runs

    # -- the word -----------------------------------------------------------------

    def fetch(self) -> Mapping[Numbers, int]:
        """Queue the word's way to the host, if something ran: what `check` takes once that is done."""
        if self._ran:
            self._stream.copy_out(self._host, self._memory.ptr)
        return dict(self._ran)

    def check(self, ran: Mapping[Numbers, int], backend_name: str) -> None:
        """Look at the word that was fetched; BackendError for a fault, which is forgotten then."""
        for numbers, run in ran.items():
            if self._ran.get(numbers) == run:
                del self._ran[numbers]
                if numbers.is_over:
                    self.give_back(numbers)
        fault = self._host.view(FAULT)[0]
        if not ran or not fault["position"]:
            return
        number, value, limit = int(fault["position"]) - 1, int(fault["value"]), int(fault["limit"])
        self._host[:] = 0
        self._stream.fill(self._memory.ptr, 0, SIZE)
        what = f"id {value} does not name one of {limit} rows"
        for numbers in ran:
            if numbers.first <= number < numbers.stop:
                node = numbers.nodes[number - numbers.first]
                raise BackendError(f"backend {backend_name!r}: node {node.name!r} ({node.op}): {what}")
        raise BackendError(f"backend {backend_name!r}: a kernel found that {what}")

    def free(self) -> None:
        self._memory.free()
