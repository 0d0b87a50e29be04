"""Stores: the base class, which holds weights in host memory and fetches them on threads of its own.

`Store` serves tests, and devices whose weights stay in host memory.  A subclass holds weights elsewhere, in buffers of
another class, and overrides `read`.  Invariant: `n_readers` threads begin to read in the order in which fetches were
queued; with several, a large weight is read in parts (`PART`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ggml_sched._graph import BufferBase, Graph, Tensor, label
from ggml_sched.backend import Buffer, Event, GraphView, as_nodes, checked_bytes, overrides
from ggml_sched.backends.cpu.buffer import ALIGNMENT, CpuBuffer, HostBackend, address_of, as_bytes
from ggml_sched.backends.store.queue import Mark, StoreQueue
from ggml_sched.backends.store.rows import RowsPlan, fits, rows_size
from ggml_sched.errors import BackendError, FetchError

if TYPE_CHECKING:
    from ggml_sched.backends.store.slots import ExpertSlots

__all__ = ["Fetched", "Store", "StoreEvent", "Traffic"]

PART = 4 << 20
"""If a store has several threads, they read a large weight in parts of this many bytes, which begin at multiples of it
in the store: large enough for the full speed of a disk, small enough that the last part of a weight is soon read."""


class Traffic(NamedTuple):
    """What a store has read since it was made."""

    fetches: int
    """How many fetches of weights have ended."""
    nbytes: int
    """Bytes of the weights and of the rows that were read, and of what lies between rows that were read together."""
    seconds: float
    """How long reading took; while several threads read at the same time, that time counts once."""
    stalled: float
    """Seconds for which threads have waited for the store."""


class Fetched(NamedTuple):
    """A fetch that has ended: `began` and `ended` are seconds of `time.perf_counter`."""

    tensor: str
    nbytes: int
    began: float
    ended: float


class StoreEvent(Event):
    """A point in the queue of a store."""

    def __init__(self, backend: Store) -> None:
        super().__init__(backend)
        self.mark: Mark | None = None


class _Fetch:
    """A fetch of `size` bytes of a weight, from byte `first` of a buffer on, in parts that threads may read together.

    `source`: the buffer; for the other arguments see `Store.read`.
    """

    def __init__(self, store: Store, weight: Tensor, source: BufferBase, first: int, memory: np.ndarray, at: int,
                 size: int, room: tuple[int, int]) -> None:
        self.store, self.weight, self.source, self.memory = store, weight, source, memory
        self.first, self.at, self.size, self.room = first, at, size, room
        self.began = float("inf")
        self.left = 0
        """How many parts were not read yet."""
        self._lock = threading.Lock()

    def parts(self, size: int) -> list[Callable[[], object]]:
        """For each part a function that reads it.  Parts begin and end at multiples of `size` bytes in the buffer, but
        for the begin of the first and the end of the last one; less than twice `size` bytes are one part."""
        stop = self.first + self.size
        cuts = [self.first, *range((self.first // size + 1) * size, stop, size), stop]
        if self.size < 2 * size:
            cuts = [self.first, stop]
        self.left = len(cuts) - 1
        return [partial(self._read, a, b) for a, b in pairwise(cuts)]

    def _read(self, start: int, stop: int) -> None:
        began, store = time.perf_counter(), self.store
        at = self.at + start - self.first
        with store.naming(self.weight):
            room = (self.room[0] if start == self.first else at,
                    self.room[1] if stop == self.first + self.size else at + stop - start)
            store.read(self.source, start, self.memory, at, stop - start, room)
        with self._lock:
            self.began = min(self.began, began)
            self.left -= 1
            if not self.left:
                store.note_fetch(self.weight, self.size, self.began)


class Store(HostBackend):
    """A store whose weights are in host memory: `alloc_tensors` allocates this memory, `buffer_from_ptr` uses the
    caller's.

    `rows`: a backend over host memory that computes GET_ROWS of stored weights for the store, on the store's thread.
    The store then reads only the rows that are needed, and the results are bit-equal to that backend's.  Without it
    GET_ROWS reads a fetched copy of the whole weight.  Closing the store closes `rows`.  `memory`: the most bytes of
    buffers.  `listener`, if it is set, is called with a `Fetched` after each fetch, on a thread of the store; it must
    not raise.
    """

    is_store = True
    asynchronous = True
    n_readers: int = 1
    """How many threads read.  With more than one, `read` is called on several threads at the same time."""

    def __init__(self, name: str = "store", rows: HostBackend | None = None, memory: int | None = None) -> None:
        super().__init__(name, ALIGNMENT)
        self.memory: int | None = checked_bytes(self.name, "memory", memory)
        self.rows = rows
        self.listener: Callable[[Fetched], object] | None = None
        self.slots: ExpertSlots | None = None
        """The slots of experts that this store reads, while there are any."""
        self._queue = StoreQueue(name, self.n_readers)
        self._rows_memory: Buffer | None = None
        self._fetches = self._nbytes = 0
        self._seconds = 0.0

    # -- reading ------------------------------------------------------------------

    def read(self, buffer: BufferBase, start: int, memory: np.ndarray, at: int, size: int,
             room: tuple[int, int]) -> None:
        """Read bytes of a buffer of weights, from `start` on, to `memory[at : at + size]`; on a thread of the store.

        The bytes `room[0]` .. `room[1]` of `memory` may be written, too.  FetchError, or another exception.
        """
        assert isinstance(buffer, CpuBuffer)
        memory[at : at + size] = buffer.memory[start : start + size]

    def fetch(self, weight: Tensor, start: int, nbytes: int, copy: Tensor, room: tuple[int, int]) -> None:
        root = weight.root
        source, offset = root.buffer, root.offset
        if source is None or offset is None or source.backend is not self:      # closed while the graph is computed
            raise BackendError(f"backend {self.name!r} does not hold {label(weight)}")
        first = offset + start
        target = copy.buffer
        memory = getattr(target, "memory", None)
        if isinstance(memory, np.ndarray):
            fetch = _Fetch(self, weight, source, first, memory, copy.offset, nbytes, room)
            self._queue.put_reads(fetch.parts(PART if self.n_readers > 1 else nbytes))
        else:
            self._queue.put(partial(self._fetch_through, weight, source, first, target, copy.offset, nbytes))

    def shift(self, weight: Tensor, address: int) -> int:
        return self.shift_at(weight.buffer, weight.offset, address)

    def shift_at(self, buffer: BufferBase | None, start: int, address: int) -> int:
        """How many bytes after `address` the first byte of a read must be placed, if the read begins at byte `start` of
        a buffer of weights; 0, unless a subclass needs more."""
        return 0

    def put(self, task: Callable[[], object]) -> None:
        """Queue a task for the store's thread; BackendError once the store is closed."""
        self._queue.put(task)

    def is_stopping(self) -> bool:
        """Whether the store is being closed, so that a read may end without all bytes."""
        return self._queue.is_closing

    def _fetch_through(self, weight: Tensor, source: BufferBase, first: int, target: BufferBase, at: int,
                       size: int) -> None:
        """Fetch to memory that the host cannot address: the target's buffer writes the bytes."""
        staging = np.empty(size + self.margin, np.uint8)
        place = self.shift_at(source, first, address_of(staging))
        began = time.perf_counter()
        with self.naming(weight):
            self.read(source, first, staging, place, size, (0, staging.nbytes))
        self._seconds += time.perf_counter() - began
        self.note_fetch(weight, size, began)
        cast("Buffer", target).write(at, memoryview(cast("Any", staging[place : place + size])))

    def note_part(self, weight: Tensor, size: int, began: float) -> None:
        """Count `size` bytes that were read of a weight (rows of it, or an expert), and notify the listener.  `began`:
        when the read began, in seconds of `time.perf_counter`."""
        self._seconds += time.perf_counter() - began
        self._note(weight, size, began)

    def note_fetch(self, weight: Tensor, size: int, began: float) -> None:
        """Count a fetch of a weight that has ended, and notify the listener.  `began`: when it began, in seconds of
        `time.perf_counter`."""
        self._fetches += 1
        self._note(weight, size, began)

    def _note(self, weight: Tensor, size: int, began: float) -> None:
        self._nbytes += size
        if self.listener is not None:
            self.listener(Fetched(weight.name, size, began, time.perf_counter()))

    @contextmanager
    def naming(self, weight: Tensor) -> Iterator[None]:
        """Exceptions of `read` in the block name the weight that is read."""
        try:
            yield
        except FetchError as error:
            raise FetchError(f"backend {self.name!r}: {label(weight)}: {error}", weight.name, error.path, error.start,
                             error.stop, error.code) from error
        except BaseException as error:
            error.add_note(f"backend {self.name!r} was reading {label(weight)}")
            raise

    @property
    def traffic(self) -> Traffic:
        """What was read so far."""
        return Traffic(self._fetches, self._nbytes, self._seconds + self._queue.seconds, self._queue.stalled)

    # -- the queue ------------------------------------------------------------------

    def set_tensor_async(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        self._queue.put(partial(tensor.buffer.write, tensor.offset + offset, data))

    def get_tensor_async(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        self._queue.put(partial(self._get, tensor, tensor.buffer, tensor.offset + offset, as_bytes(out)))

    def _get(self, tensor: Tensor, buffer: BufferBase, start: int, out: np.ndarray) -> None:
        with self.naming(tensor):
            self.read(buffer, start, out, 0, out.nbytes, (0, out.nbytes))

    def cpy_tensor_from(self, src: Tensor, dst: Tensor) -> bool:
        return False

    def cpy_tensor_to(self, src: Tensor, dst: Tensor) -> bool:
        return self.cpy_tensor_async(src, dst)

    def cpy_tensor_async(self, src: Tensor, dst: Tensor) -> bool:
        """Queue a copy of a result of this store, or of a weight, to memory that the host can address; False for other
        memory, and for tensors that are not contiguous."""
        memory = getattr(dst.buffer, "memory", None)
        if not isinstance(memory, np.ndarray) or not (src.is_contiguous and dst.is_contiguous):
            return False
        at, size = dst.offset, dst.nbytes
        self._queue.put(partial(self._get, src, src.buffer, src.offset, memory[at : at + size]))
        return True

    def synchronize(self) -> None:
        error = self._queue.synchronize(self.note_failure)
        if error is not None:
            raise error

    def event_new(self) -> StoreEvent:
        return StoreEvent(self)

    def event_record(self, event: Event) -> None:
        assert isinstance(event, StoreEvent)
        event.mark = self._queue.mark()

    def event_wait(self, event: Event) -> None:
        other = event.backend
        if other is not self and overrides(other, "event_synchronize"):
            self._queue.put_wait(partial(other.event_synchronize, event))

    def event_synchronize(self, event: Event) -> None:
        if isinstance(event, StoreEvent) and event.mark is not None:
            self._queue.wait(event.mark)

    def rows_memory(self, size: int) -> Buffer:
        """Memory of the backend `rows` for the rows of one node, of `size` bytes or more; called on the store's
        thread."""
        assert self.rows is not None
        found = self._rows_memory
        if found is None or found.size < size:
            if found is not None:
                self._rows_memory = None
                found.close()               # before a larger one is allocated
            found = self._rows_memory = self.rows.alloc_buffer(size)
        return found

    @property
    def host_work_held(self) -> int:        # type: ignore[override]
        return 0 if self.rows is None else self.rows.used + self.rows.host_work_held

    # -- rows of weights ----------------------------------------------------------------

    def supports_op(self, node: Tensor) -> bool:
        return not node.computes or self.rows is not None and fits(node) and bool(self.rows.supports_op(node))

    def work_size(self, nodes: Sequence[Tensor]) -> int:
        return rows_size(nodes, self.margin)

    def graph_plan_create(self, graph: Graph | GraphView) -> RowsPlan:
        if self.rows is None:
            raise BackendError(f"backend {self.name!r} is a store without `rows`, which computes nothing")
        return RowsPlan(self, self.rows, as_nodes(graph))

    def graph_plan_compute(self, plan: RowsPlan) -> None:
        self._queue.put(plan.run)

    def graph_plan_free(self, plan: RowsPlan) -> None:
        plan.free()

    def graph_compute(self, graph: Graph | GraphView) -> None:
        plan = self.graph_plan_create(graph)
        self._queue.put(plan.run)
        self._queue.put(plan.free)

    # -- life -------------------------------------------------------------------

    def close(self) -> None:
        """End the threads, after the reads that run now; buffers keep their memory until they are closed."""
        self._closed = True
        self._queue.close()
        if self._rows_memory is not None:
            self._rows_memory.close()
        if self.rows is not None:
            self.rows.close()
