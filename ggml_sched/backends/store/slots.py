"""Slots for experts: weights of MUL_MAT_ID of which only some experts are in memory, read from a store when needed.

A bank, the weights of one layer from which the same numbers choose, is a buffer of the backend that computes with it:
addresses are reserved for all of its experts, and the pages of those that are in a slot have memory.  So an expert has
the same address with and without slots, and kernels of every backend over host memory can use it.  A page that two
neighbouring experts share has memory while either of them is in a slot; `slot_nbytes` counts such a page for both.

Experts stay from one compute to the next.  The store's thread reads those that are in no slot; an expert counts as
present only when all of its weights were read, so that after an error the next visit reads it again.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ggml_sched._graph import BufferBase, Tensor, bind_resident
from ggml_sched.backend import Buffer
from ggml_sched.backends.cpu.buffer import CpuBuffer, HostBackend, address_of
from ggml_sched.errors import BackendError, FetchError, OutOfMemory
from ggml_sched.experts.table import Hits, SlotTable
from ggml_sched.graph.hostdata import array_over

if TYPE_CHECKING:
    from ggml_sched.backends.store.store import Store
    from ggml_sched.experts.policies import Policy

__all__ = ["ExpertBank", "ExpertSlots", "Stored", "has_slots", "slot_nbytes"]

PAGE = mmap.PAGESIZE
EDGE = max(PAGE, 4096)
"""Bytes before and after each weight, for whole blocks that a store reads."""


def has_slots() -> bool:
    """Whether the system can give back the memory of pages whose addresses stay reserved, as Linux does."""
    return sys.platform == "linux" and hasattr(mmap, "MADV_DONTNEED")


def slot_nbytes(sizes: Sequence[int]) -> int:
    """The most bytes of memory, in whole pages, that one expert takes: `sizes` are the bytes of its weights."""
    return sum((-(-size // PAGE) + 1) * PAGE for size in sizes)


class Stored(NamedTuple):
    """A weight [k, m, n_expert] of a bank, and where its bytes are in a store."""

    tensor: Tensor
    source: BufferBase
    start: int
    """The offset of its first byte in `source`."""


class ExpertBank:
    """The experts of one layer: `buffer` has the addresses of all of them.  `number`: the index in `slots.banks`."""

    def __init__(self, slots: ExpertSlots, number: int, name: str, weights: Sequence[Stored]) -> None:
        self.slots, self.number, self.name = slots, number, name
        self.weights: tuple[Stored, ...] = tuple(weights)
        self.n_experts: int = weights[0].tensor.ne[2]
        self._map: mmap.mmap
        self._memory: np.ndarray
        self._starts = self._reserve()
        self._users: np.ndarray = np.zeros(-(-self._memory.nbytes // PAGE), np.int32)
        """For each page of memory the number of its users: a user is an expert that is in a slot, once for each of its
        weights that has bytes in the page."""
        self.buffer: Buffer = slots.home.buffer_from_ptr(self._memory, usage="weights")
        self.buffer.experts = self
        for weight, start in zip(self.weights, self._starts, strict=True):
            bind_resident(weight.tensor, self.buffer, start)

    @property
    def store(self) -> Store:
        """The store that reads its experts."""
        return self.slots.store

    def _reserve(self) -> list[int]:
        """Reserve addresses, without memory; returns for each weight an offset to which the store can read directly."""
        store, starts, at = self.slots.store, [], 0
        size = sum(weight.tensor.nbytes + 4 * EDGE for weight in self.weights)
        try:
            self._map = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):
                self._map.madvise(mmap.MADV_NOHUGEPAGE)     # a page of 2 MiB would be memory that no slot counts
        except (OSError, ValueError, OverflowError) as error:
            raise OutOfMemory(f"backend {self.slots.home.name!r}: the host reserves no addresses for {size} bytes of "
                              f"experts of {self.name!r}: {error}", self.slots.home.name, size) from error
        self._memory = np.frombuffer(self._map, np.uint8)
        base = address_of(self._memory)
        for weight in self.weights:
            at = -(-at // EDGE) * EDGE + EDGE
            starts.append(at + store.shift_at(weight.source, weight.start, base + at))
            at = starts[-1] + weight.tensor.nbytes
        return starts

    def range_of(self, k: int, expert: int) -> tuple[int, int]:
        """The bytes [start, stop) of the buffer where an expert's matrix of weight number k lies."""
        tensor, start = self.weights[k].tensor, self._starts[k]
        return start + expert * tensor.nb[2], start + (expert + 1) * tensor.nb[2]

    def read(self, expert: int) -> int:
        """Read all weights of an expert, on the store's thread; returns how many bytes were read.  After an exception
        of the store the expert has no memory."""
        try:
            for k, weight in enumerate(self.weights):
                self._read(k, weight, expert)
        except BaseException:
            self._use(expert, 0)
            raise
        self._use(expert, 1)
        return sum(weight.tensor.nb[2] for weight in self.weights)

    def _read(self, k: int, weight: Stored, expert: int) -> None:
        store, began = self.slots.store, time.perf_counter()
        start, stop = self.range_of(k, expert)
        first, size = weight.start + expert * weight.tensor.nb[2], stop - start
        with store.naming(weight.tensor):
            try:
                store.read(weight.source, first, self._memory, start, size,
                           (start // PAGE * PAGE, -(-stop // PAGE) * PAGE))
            except FetchError as error:
                raise FetchError(f"expert {expert}: {error}", "", error.path, error.start, error.stop,
                                 error.code) from error
        store.note_part(weight.tensor, size, began)

    def drop(self, expert: int) -> None:
        """Give the memory of an expert back."""
        self._use(expert, -1)

    def _use(self, expert: int, change: int) -> None:
        """Add `change` to the number of users of an expert's pages; give back the pages that have none."""
        for k in range(len(self.weights)):
            start, stop = self.range_of(k, expert)
            first, last = start // PAGE, -(-stop // PAGE)
            self._users[first:last] += change
            if change > 0:
                continue
            unused = np.flatnonzero(self._users[first:last] == 0) + first
            for run in np.split(unused, np.flatnonzero(np.diff(unused) != 1) + 1):
                if len(run):
                    self._map.madvise(mmap.MADV_DONTNEED, int(run[0]) * PAGE, len(run) * PAGE)

    @property
    def nbytes(self) -> int:
        """The bytes of pages that have memory."""
        return int(np.count_nonzero(self._users)) * PAGE

    def close(self) -> None:
        """Close the buffer; its addresses are given back when nothing refers to them any more."""
        self.buffer.close()


class ExpertSlots:
    """`n_slots` slots of a store for the experts of banks, which the backend `home` computes with.

    `banks` has for each bank its name and its weights, all of the same number of experts; the weights get their
    addresses here.  `policy` says which expert gives up its slot (`ggml_sched.experts`).  A compute that needs more
    experts of a layer than there are slots fails with OutOfMemory.  Only one scheduler at a time may compute with
    these slots.  OutOfMemory if no addresses can be reserved, BackendError where the system cannot give memory back
    (`has_slots`).
    """

    def __init__(self, store: Store, home: HostBackend, n_slots: int, policy: Policy,
                 banks: Sequence[tuple[str, Sequence[Stored]]]) -> None:
        if not has_slots():
            raise BackendError(f"backend {home.name!r}: this system has no slots for experts, which need pages that "
                               "give their memory back and keep their addresses")
        self.store, self.home, self.n_slots, self.policy = store, home, n_slots, policy
        if store.slots is not None:
            raise BackendError(f"backend {store.name!r} has slots for experts already")
        self.banks: list[ExpertBank] = []
        self._nbytes = 0
        try:
            for k, (name, weights) in enumerate(banks):
                self.banks.append(ExpertBank(self, k, name, weights))
        except BaseException:
            self.close()
            raise
        most = max((bank.n_experts for bank in self.banks), default=1)
        self._table = SlotTable(len(self.banks), most, n_slots, policy)
        store.slots = self

    @property
    def n_experts(self) -> int:
        """Experts of all banks together."""
        return sum(bank.n_experts for bank in self.banks)

    @property
    def slot_nbytes(self) -> int:
        """The most bytes of memory that one slot takes."""
        return max((slot_nbytes([weight.tensor.nb[2] for weight in bank.weights]) for bank in self.banks), default=0)

    @property
    def nbytes(self) -> int:
        """The most bytes of memory that all slots take."""
        return self.n_slots * self.slot_nbytes

    @property
    def held_nbytes(self) -> int:
        """The bytes of memory that slots take now: those of whole pages."""
        return sum(bank.nbytes for bank in self.banks)

    @property
    def traffic(self) -> Hits:
        """What the slots have counted so far: hits, misses, bytes read, evictions."""
        return self._table.counted(self._nbytes)

    def holds(self, bank: int, expert: int) -> bool:
        """Whether an expert of a bank is in a slot."""
        return bool(self._table.held[bank, expert])

    def fetch(self, bank: ExpertBank, ids: Tensor) -> None:
        """Queue: read the experts of a bank that the tensor `ids` names and that are in no slot.

        `ids` is in host memory, and is read when the store's thread executes this task.  Numbers that name no expert
        are left to the kernel, which refuses them.
        """
        self.store.put(partial(self._bring, bank, ids))

    def _bring(self, bank: ExpertBank, ids: Tensor) -> None:
        buffer = ids.buffer
        assert isinstance(buffer, CpuBuffer)
        numbers = np.unique(array_over(ids, buffer.memory, ids.offset))
        used = numbers[(numbers >= 0) & (numbers < bank.n_experts)].tolist()
        try:
            missing = self._table.visit(bank.number, used)
        except ValueError as error:
            size = self.slot_nbytes
            raise OutOfMemory(f"backend {self.store.name!r}: {bank.name}: {error}", self.home.name, len(used) * size,
                              self.n_slots * size) from error
        for expert, gone in missing:
            if gone is not None:
                self.banks[gone[0]].drop(gone[1])
            self._nbytes += bank.read(expert)
            self._table.put(bank.number, expert)

    def close(self) -> None:
        """Close the buffers of all banks; idempotent."""
        if self.store.slots is self:
            self.store.slots = None
        for bank in self.banks:
            bank.close()
