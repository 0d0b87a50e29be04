"""CupyBackend: a CUDA device with one queue, on which copies and replayed graphs follow each other.

Nothing waits for the device but `synchronize`, `event_synchronize`, and what the host reads.  Invariant: host memory
that the caller gave is never read or written by the device itself: bytes go through pinned memory (staging.py).
Corresponds to ggml's CUDA backend.

Threads: every method takes the backend's lock for as long as it queues, and waits without it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from operator import index
from typing import TypeVar

import numpy as np

from ggml_sched._graph import Graph, Tensor
from ggml_sched._locks import ForkLock
from ggml_sched.backend import Backend, Event, GraphView, as_nodes, same_layout
from ggml_sched.backends.cupy import packed
from ggml_sched.backends.cupy.buffer import DeviceBuffer, as_bytes
from ggml_sched.backends.cupy.device import Device, DeviceError, DeviceOutOfMemory, Function, Memory
from ggml_sched.backends.cupy.fault import Faults, Numbers
from ggml_sched.backends.cupy.ops import OPS, fusion_groups, supports
from ggml_sched.backends.cupy.plan import DevicePlan
from ggml_sched.backends.cupy.staging import Downloads, Uploads
from ggml_sched.backends.cupy.work import WorkMemory
from ggml_sched.errors import BackendError, OutOfMemory, PlacementError

__all__ = ["CupyBackend", "CupyEvent"]

ALIGNMENT = 256
STAGING = 16 << 20
LEAST_STAGING = 4096
OFFLOAD_COLUMNS = 32
"""A matrix product of so many columns is worth bringing the weights here, as ggml has it."""


Method = TypeVar("Method", bound=Callable)


def guarded(method: Method) -> Method:
    """A method that has the lock, on a backend that is open and of this process; errors of the device name it."""

    @wraps(method)
    def call(self, *args):
        # Not by way of a helper: a signal must find the lock either not taken, or in the hands of `with`.
        with self._lock:
            if self._closed or self._pid != os.getpid():
                self._refuse()
            try:
                return method(self, *args)
            except DeviceError as error:
                raise self._failure(error) from error

    return call     # type: ignore[return-value]


def queueing(method: Method) -> Method:
    """A guarded method that queues something."""

    @guarded
    @wraps(method)
    def call(self, *args):
        self._queued += 1
        return method(self, *args)

    return call     # type: ignore[return-value]


class CupyEvent(Event):
    """`event` of the device; the first `n_downloads` copies to the host belong to what it stands for."""

    def __init__(self, backend: CupyBackend) -> None:
        super().__init__(backend)
        self.event = backend.device.event()
        self.n_downloads = 0


class CupyBackend(Backend):
    """`CupyBackend(device=0)`: the CUDA device of this number (or a `Device` of cupy.device, which stays the caller's).

    `memory` bounds buffers and work memory together, in bytes.  `exact`: matrix products with f32 activations instead
    of 8-bit ones.  `capture=False` launches every kernel by itself instead of replaying graphs.  `repack`: quantised
    weights are kept in an order that matrix products read faster, in their own bytes, where no op needs another.
    `staging`: bytes of pinned host memory through which data goes each way.

    Raises BackendError where there is no CuPy (it says what to install) or no such device.  A child process cannot use
    a backend of its parent: everything but closing raises BackendError there.
    """

    asynchronous = True
    concurrent_copies = True
    kv_padding = 256

    def __init__(self, device: int | Device = 0, *, name: str | None = None, memory: int | None = None,
                 exact: bool = False, capture: bool = True, repack: bool = True,
                 staging: int = STAGING) -> None:
        self._is_own = not isinstance(device, Device)
        number = index(device) if self._is_own else None
        super().__init__(name or (device.name if number is None else f"CUDA{number}"), ALIGNMENT)
        self.memory = None if memory is None else index(memory)
        staging = index(staging)
        if staging < LEAST_STAGING:
            raise ValueError(f"backend {self.name!r}: staging = {staging} is less than {LEAST_STAGING} bytes")
        self.exact = bool(exact)
        self.capture = bool(capture)
        self.repack = bool(repack)
        self.n_straightened = 0
        """How often rearranged weights were brought into ggml's order, because another op reads them."""
        self.device: Device = device if number is None else _open(number, self.name)
        self.used = 0
        self.work = WorkMemory()
        self._pid = os.getpid()
        self._closed = False
        self._lock = ForkLock()
        self._functions: dict[str, Function] = {}
        self._plans: weakref.WeakSet[DevicePlan] = weakref.WeakSet()
        self._n_buffers = 0
        self._error: DeviceError | None = None
        """What went wrong where nobody could be told."""
        self._queued = self._done = 0
        """How often something was queued, and how much of it was waited for."""
        try:
            self.blas = self.device.blas()
            self.stream = self.device.stream()
            self.faults = Faults(self.device, self.stream)
            self._uploads = Uploads(self.device, self.stream, staging)
            self._downloads = Downloads(self.device, self.stream, staging)
        except DeviceError as error:
            if self._is_own:
                self.device.close()
            raise self._failure(error) from error

    # -- memory -----------------------------------------------------------------

    @guarded
    def memory_available(self) -> int | None:
        """Bytes that can still be allocated here: of the device, and of `memory`."""
        free = self.device.memory()[0]
        return free if self.memory is None else min(free, self.memory - self.used)

    @guarded
    def alloc_buffer(self, size: int) -> DeviceBuffer:
        """`size` bytes at a multiple of 256; what is in them is not defined."""
        if size < 0:
            raise ValueError(f"backend {self.name!r}: a buffer of {size} bytes")
        memory = self._take(size, f"{size} bytes needed")
        self._n_buffers += 1
        return DeviceBuffer(self, memory, size)

    def release(self, memory: Memory, buffer: DeviceBuffer) -> None:
        """Called by a buffer that closes: give its memory back when nobody uses it any more."""
        self.used -= buffer.size
        if not self._is_here:
            return
        for user in (*buffer.users, self):
            if not user.closed:
                user.settle()
        with self._lock:
            self._n_buffers -= 1
            try:
                memory.free()
            except DeviceError as error:
                self._error = self._error or error
            self._close_device()

    def _take(self, size: int, what: str) -> Memory:
        if self.memory is not None and size > self.memory - self.used:
            raise OutOfMemory(f"backend {self.name!r}: {what}, {self.memory - self.used} of {self.memory} left",
                              self.name, size, self.memory - self.used)
        try:
            memory = self.device.alloc(max(size, 1))
        except DeviceOutOfMemory as error:
            raise OutOfMemory(f"backend {self.name!r}: {what}, {error.free} left on the device", self.name, size,
                              error.free) from error
        self.used += size
        return memory

    def _grow_work(self, size: int) -> None:
        """Work memory of `size` bytes or more."""
        held = self.work.size
        if size <= held:
            return
        self.settle()
        # One area at a time: what it holds is nobody's any more.
        self.work.exchange(None)
        self.used -= held
        self.work.exchange(self._take(size, f"work memory of {size} bytes needed"))

    # -- data -------------------------------------------------------------------

    def set_tensor_async(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        """Queue a copy of bytes into the tensor; `data` may change once this returns."""
        _buffer(tensor).write(tensor.offset + offset, data)

    def get_tensor_async(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        """Queue a copy of the tensor's bytes; they are in `out` after `synchronize`."""
        _buffer(tensor).read_later(tensor.offset + offset, out)

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

    def put_leaf(self, leaf: Tensor) -> None:
        """Queue the bytes that the caller has set for an input; the lock is held."""
        data = as_bytes(leaf.stash)
        self._uploads.put(_buffer(leaf).address(leaf.offset, len(data)), data)

    def cpy_tensor_from(self, src: Tensor, dst: Tensor) -> bool:
        there = src.buffer
        if not _is_dense(src, dst):
            return False
        if isinstance(there, DeviceBuffer):
            if _is_packed(src) or _is_packed(dst):
                return False        # the host knows both orders
            source = there.backend
            if source is not self:
                if not self._reaches(source):
                    return False
                self.event_wait(source.event_here())
            self._copy(src, dst, there)
            return True
        data = _host_bytes(src)
        if data is None:
            return False
        there.backend.synchronize()
        _buffer(dst).write(dst.offset, data)
        return True

    def cpy_tensor_to(self, src: Tensor, dst: Tensor) -> bool:
        there = dst.buffer
        if isinstance(there, DeviceBuffer) or not _is_dense(src, dst):
            return False        # another device that cannot read this one's memory
        data = _host_bytes(dst)
        if data is None or not data.flags.writeable:
            return False
        there.backend.synchronize()
        _buffer(src).read_later(src.offset, data)
        return True

    def cpy_tensor_async(self, src: Tensor, dst: Tensor) -> bool:
        there = dst.buffer
        if not isinstance(there, DeviceBuffer):
            return self.cpy_tensor_to(src, dst)
        if not _is_dense(src, dst) or _is_packed(src) or _is_packed(dst):
            return False
        if there.backend is not self and not self._reaches(there.backend):
            return False
        self._copy(src, dst, there)
        return True

    @queueing
    def _copy(self, src: Tensor, dst: Tensor, other: DeviceBuffer) -> None:
        """Queue a copy from or to another buffer, which another backend may have."""
        start = _buffer(src).address(src.offset, src.nbytes)
        to = _buffer(dst).address(dst.offset, src.nbytes)
        if other.backend is not self:
            other.users.add(self)
        self.stream.copy(to, start, src.nbytes)

    def _reaches(self, other: CupyBackend) -> bool:
        return other.device is self.device or self.device.can_access(other.device)

    # -- order --------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until everything queued here is done; BackendError for what went wrong in it, and for data that a
        kernel must not use (a row that is not there), naming the node."""
        if self._queued == self._done and self._error is None and self._is_here:
            return          # a backend that is closed has nothing queued
        queued, n_downloads, ran = self._end_of_queue()
        try:
            self.stream.synchronize()
        except DeviceError as error:
            self._give_up(queued)
            raise self._failure(error) from error
        self._passed(queued, n_downloads, ran)

    @guarded
    def _end_of_queue(self) -> tuple[int, int, Mapping[Numbers, int]]:
        """What is done when everything queued by now is."""
        return self._queued, self._downloads.number, self.faults.fetch()

    @guarded
    def _passed(self, queued: int, n_downloads: int, ran: Mapping[Numbers, int]) -> None:
        """The host has waited for so much."""
        self._done = max(self._done, queued)
        error, self._error = self._error, None
        if error is not None:
            self._downloads.drop()
            raise error
        self._downloads.finish(n_downloads)
        self.faults.check(ran, self.name)

    @guarded
    def _give_up(self, queued: int) -> None:
        """So much has failed: what was to be fetched will not come."""
        self._done = max(self._done, queued)
        self._downloads.drop()

    def settle(self) -> None:
        """Wait, for memory that is about to go; what went wrong is raised by `synchronize`."""
        try:
            self.stream.synchronize()
        except DeviceError as error:
            self._error = self._error or error

    @guarded
    def event_new(self) -> CupyEvent:
        return CupyEvent(self)

    @guarded
    def event_record(self, event: CupyEvent) -> None:
        self.stream.record(event.event)
        event.n_downloads = self._downloads.number

    def event_here(self) -> CupyEvent:
        """An event that stands for everything queued so far."""
        event = self.event_new()
        self.event_record(event)
        return event

    def event_wait(self, event: Event) -> None:
        if isinstance(event, CupyEvent):
            other = event.backend
            if other is self:
                return          # one queue, in order
            if type(other.device) is type(self.device) and not other.is_downloading(event):
                self._follow(event)
                return
        super().event_wait(event)

    @queueing
    def _follow(self, event: CupyEvent) -> None:
        self.stream.wait(event.event)

    def event_synchronize(self, event: CupyEvent) -> None:
        if self._closed:
            return
        self._check_here()
        try:
            event.event.synchronize()
        except DeviceError as error:
            raise self._failure(error) from error
        if self.is_downloading(event):
            self._arrived(event)

    @guarded
    def _arrived(self, event: CupyEvent) -> None:
        self._downloads.finish(event.n_downloads)

    def is_downloading(self, event: CupyEvent) -> bool:
        """Whether the host has still to take what the event stands for out of pinned memory."""
        return self._downloads.is_waiting(event.n_downloads)

    # -- computing ----------------------------------------------------------------

    def supports_op(self, node: Tensor) -> bool:
        return not node.computes or supports(node)

    def offload_op(self, node: Tensor) -> bool:
        columns = {"MUL_MAT": 1, "MUL_MAT_ID": 2}.get(node.op)
        return columns is not None and node.ne[columns] >= OFFLOAD_COLUMNS and supports(node)

    def inplace_sources(self, op: str) -> int:
        found = OPS.get(op)
        return 0 if found is None else found.inplace

    def fusion_groups(self, graph: Graph) -> Iterable[tuple[int, ...]]:
        return fusion_groups(graph.nodes)

    def function(self, kernel: str) -> Function:
        """A kernel by its name, "module.function"; the lock is held."""
        found = self._functions.get(kernel)
        if found is None:
            module, _, name = kernel.partition(".")
            found = self._functions[kernel] = self.device.module([module]).function(name)
        return found

    def graph_compute(self, graph) -> None:
        plan = self.graph_plan_create(graph)
        try:
            self.graph_plan_compute(plan)
        finally:
            self.graph_plan_free(plan)

    @guarded
    def graph_plan_create(self, graph) -> DevicePlan:
        nodes = as_nodes(graph)
        groups, needed = (graph.groups, graph.needed) if isinstance(graph, GraphView) else ((), None)
        numbers = self.faults.number(nodes)
        try:
            plan = DevicePlan(self, nodes, numbers, groups, needed)
            self._grow_work(plan.work_size)
        except BaseException:
            self.faults.give_back(numbers)
            raise
        self._plans.add(plan)
        return plan

    def straighten(self, buffer: DeviceBuffer, part: packed.Part) -> None:
        """Bring rearranged weights into ggml's order, at once; the lock is held.  Plans that read them so notice."""

        def get(start: int, size: int) -> np.ndarray:
            out = np.empty(size, np.uint8)
            self._downloads.get(out, buffer.base + start)
            self.stream.synchronize()
            self._downloads.finish(self._downloads.number)
            return out

        packed.straighten(part, get, lambda start, rows: self._uploads.put(buffer.base + start, rows))
        buffer.packed.drop(part.start)
        self._queued += 1
        self.n_straightened += 1

    def graph_plan_free(self, plan: DevicePlan) -> None:
        with self._lock:
            if plan.freed or not self._is_here:
                return
            self.faults.give_back(plan.numbers)
            if plan.graph is not None and self._queued != self._done:
                self.settle()
            plan.free()

    @queueing
    def graph_plan_compute(self, plan: DevicePlan) -> None:
        plan.check(self.name)
        plan.refresh(self)
        if plan.work_size > self.work.size:
            self._grow_work(plan.work_size)     # there was no memory for more, once
        self.faults.ran(plan.numbers)
        plan.run(self)

    # -- life -------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Finish what is queued and free graphs and work memory; buffers keep theirs until they are closed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._is_here:
                return
            self.settle()
            if self._error is None:
                self._downloads.finish(self._downloads.number)
            self._downloads.drop()
            self._done, self._error = self._queued, None
            for plan in list(self._plans):
                plan.free()
            self.used -= self.work.size
            self.work.exchange(None)
            self.faults.free()
            self._functions.clear()
            self._close_device()

    def _close_device(self) -> None:
        """The device, if it is ours and nobody uses it any more."""
        if self._closed and self._is_own and not self._n_buffers:
            self.device.close()

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

    def _failure(self, error: DeviceError) -> BackendError | OutOfMemory:
        if isinstance(error, DeviceOutOfMemory):
            return OutOfMemory(f"backend {self.name!r}: {error.needed} bytes needed, {error.free} left on the device",
                               self.name, error.needed, error.free)
        return BackendError(f"backend {self.name!r}: {error}")


def _open(number: int, name: str) -> Device:
    """The CUDA device of a number; BackendError that says what is missing."""
    from ggml_sched.backends.cupy.real import open_device

    try:
        return open_device(number)
    except BackendError as error:
        raise BackendError(f"backend {name!r}: {error}") from error


def _buffer(tensor: Tensor) -> DeviceBuffer:
    buffer = tensor.buffer
    if not isinstance(buffer, DeviceBuffer):
        where = "has no address" if buffer is None else f"is on backend {buffer.backend.name!r}"
        raise PlacementError(f"tensor {tensor.name!r} {where}")
    return buffer


def _is_packed(tensor: Tensor) -> bool:
    """Whether weights that lie rearranged share bytes with a tensor."""
    return bool(_buffer(tensor).packed.under(tensor))


def _is_dense(src: Tensor, dst: Tensor) -> bool:
    """Equal layouts without gaps: what lies in those may be other tensors'."""
    kind = src.type
    return same_layout(src, dst) and src.nbytes == src.n_elements // kind.block_size * kind.type_size


def _host_bytes(tensor: Tensor) -> np.ndarray | None:
    """The bytes of a tensor in host memory that we can see, uint8; None for any other."""
    memory = getattr(tensor.buffer, "memory", None)
    if tensor.buffer is None or not tensor.buffer.backend.is_host or not isinstance(memory, np.ndarray):
        return None
    found = memory[tensor.offset : tensor.offset + tensor.nbytes]
    return found if found.nbytes == tensor.nbytes else None
