"""CupyBackend: a CUDA device with one queue, on which copies and replayed graphs follow each other.

Only `synchronize`, `event_synchronize` and reads by the host wait for the device.  Invariant: the device never reads
or writes the caller's host memory itself: bytes go through pinned memory (staging.py).
Corresponds to ggml's CUDA backend.

Threads: every method takes the backend's lock for as long as it queues, and waits without it (queue.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from operator import index

import numpy as np

from ggml_sched._graph import Graph, Tensor, Type, label, no_address
from ggml_sched.backend import Backend, BufferSizes, GraphView, as_nodes, checked_bytes, overrides, same_layout
from ggml_sched.backends.cupy import packed
from ggml_sched.backends.cupy.buffer import DeviceBuffer, WorkMemory, as_bytes
from ggml_sched.backends.cupy.device import Blas, Device, DeviceError, DeviceOutOfMemory, Function, Memory
from ggml_sched.backends.cupy.ops import OPS, fusion_groups, supports, work_size
from ggml_sched.backends.cupy.plan import DevicePlan
from ggml_sched.backends.cupy.queue import STAGING, CupyEvent, DeviceQueue, guarded, queueing
from ggml_sched.errors import BackendError, OutOfMemory, PlacementError

__all__ = ["CupyBackend", "CupyEvent"]

ALIGNMENT = 256
OFFLOAD_COLUMNS = 32
"""From this many columns of a matrix product on, copying its weights to the device pays; ggml has the same number."""


class CupyBackend(DeviceQueue):
    """`CupyBackend(device=0)`: the CUDA device of this number (or a `Device` of cupy.device, which stays the caller's).

    `memory` bounds buffers and work memory together, in bytes.  `exact`: matrix products take f32 activations instead
    of rounding them to 8 bits.  `capture=False` launches every kernel by itself instead of replaying CUDA graphs.
    `overlap`: a kernel may begin before earlier kernels have ended, and prefetches weights and caches meanwhile; this
    needs a device from sm_90 on and a driver for CUDA 12.3 or later, and has no effect elsewhere.
    `repack`: quantised weights are rearranged, in place, to an order that matrix products read faster, until an op
    needs ggml's order.  `staging`: bytes of pinned host memory for copies to the device, and as many for copies to the
    host.

    Raises BackendError where there is no CuPy (it says what to install) or no such device.  A child process cannot use
    a backend of its parent: everything but closing raises BackendError there.
    """

    asynchronous = True
    takes_at_once = True
    concurrent_copies = True
    kv_padding = 256

    def __init__(self, device: int | Device = 0, *, name: str | None = None, memory: int | None = None,
                 exact: bool = False, capture: bool = True, overlap: bool = False, repack: bool = True,
                 staging: int = STAGING) -> None:
        given = device if isinstance(device, Device) else index(device)
        self._is_own = isinstance(given, int)
        super().__init__(name or (f"CUDA{given}" if isinstance(given, int) else given.name), ALIGNMENT)
        self.memory: int | None = checked_bytes(self.name, "memory", memory)
        self.exact: bool = bool(exact)
        self.capture: bool = bool(capture)
        self.repack: bool = bool(repack)
        self.n_straightened: int = 0
        """How often rearranged weights were converted back, because an op needed ggml's order."""
        self.work: WorkMemory = WorkMemory()
        self._functions: dict[str, Function] = {}
        self._plans: weakref.WeakSet[DevicePlan] = weakref.WeakSet()
        self.buffer_sizes: BufferSizes = BufferSizes()
        opened = _open(given, self.name) if isinstance(given, int) else given
        self.overlap: bool = bool(overlap) and opened.can_overlap
        self.blas: Blas | None = None
        try:
            self.blas = opened.blas()
            self._open_queue(opened, staging)
        except BaseException as error:
            if self.blas is not None:
                self.blas.close()
            if self._is_own:
                opened.close()
            if isinstance(error, DeviceError):
                raise self._failure(error) from error
            raise

    # -- memory -----------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes of all buffers and of the work memory."""
        return self.buffer_sizes.total + self.work.size

    @guarded
    def memory_available(self) -> int | None:
        """Bytes that can still be allocated: bounded by the device, and by `memory`."""
        free = self.device.memory()[0]
        return free if self.memory is None else min(free, self.memory - self.used)

    @property
    def work_held(self) -> int:     # type: ignore[override]  # only `_grow_work` and `close` change it
        return self.work.size

    def work_size(self, nodes: Sequence[Tensor]) -> int:
        return work_size(nodes, self.exact, self.blas is not None, self.device.has_tensor_cores)

    @guarded
    def alloc_buffer(self, size: int) -> DeviceBuffer:
        """`size` uninitialised bytes at a multiple of 256."""
        if size < 0:
            raise ValueError(f"backend {self.name!r}: a buffer of {size} bytes")
        buffer = DeviceBuffer(self, self._take(size, f"{size} bytes needed"), size)
        self.buffer_sizes.add(buffer)
        return buffer

    def release(self, memory: Memory, buffer: DeviceBuffer) -> None:
        """Free the memory of a buffer that is being closed, after waiting for the queued work that may use it."""
        if not self._is_here:
            self.buffer_sizes.drop(buffer)
            return
        try:
            for user in (*buffer.users, self):
                if not user.closed:
                    user.settle()
        finally:        # also after an interrupt: the buffer counts as closed
            with self._lock:
                self.buffer_sizes.drop(buffer)
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
            return self.device.alloc(max(size, 1))
        except DeviceOutOfMemory as error:
            raise OutOfMemory(f"backend {self.name!r}: {what}, {error.free} left on the device", self.name, size,
                              error.free) from error

    def _grow_work(self, size: int) -> None:
        """Replace the work memory by a larger one if it has fewer than `size` bytes."""
        held = self.work.size
        if size <= held:
            return
        self.settle()
        # The old memory is freed first, so that never two are allocated; no queued launch uses it any more.
        self.work.exchange(None)
        self.work.exchange(self._take(size, f"work memory of {size} bytes needed"))

    # -- data -------------------------------------------------------------------

    def set_tensor_async(self, tensor: Tensor, data: memoryview, offset: int = 0) -> None:
        """Queue a copy of bytes into the tensor; `data` may change once this returns."""
        _buffer(tensor).write(tensor.offset + offset, data)

    def get_tensor_async(self, tensor: Tensor, out: memoryview, offset: int = 0) -> None:
        """Queue a copy of the tensor's bytes; they are in `out` after `synchronize`."""
        _buffer(tensor).read_later(tensor.offset + offset, out)

    def put_leaf(self, leaf: Tensor, stash: bytes) -> None:
        """Queue a copy of the bytes that the caller has set for an input; the lock is held."""
        data = as_bytes(stash)
        self._uploads.put(_buffer(leaf).address(leaf.offset, len(data)), data)

    def cpy_tensor_from(self, src: Tensor, dst: Tensor) -> bool:
        there = src.buffer
        if isinstance(there, DeviceBuffer):
            return self._copy_on_devices(src, dst, there)
        data = _host_bytes(src)
        if data is None or not _is_dense(src, dst):
            return False
        there.backend.synchronize()
        if self.is_download_target(data):
            self.synchronize()      # queued copies to this host memory must be done before the host reads it
        _buffer(dst).write(dst.offset, data)
        return True

    def cpy_tensor_to(self, src: Tensor, dst: Tensor) -> bool:
        there = dst.buffer
        if isinstance(there, DeviceBuffer) or not _is_dense(src, dst):
            return False        # not dense; or a CUDA backend has refused the copy in `cpy_tensor_from`
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
        return self._copy_on_devices(src, dst, there)

    def _copy_on_devices(self, src: Tensor, dst: Tensor, other: DeviceBuffer) -> bool:
        """Queue a copy from or to buffer `other`, possibly of another backend.  False if the copy has to go through the
        host: because the devices do not reach each other, or to convert between the two orders of weights."""
        there = other.backend
        if not _is_dense(src, dst) or _is_packed(src) or _is_packed(dst):
            return False
        if there is not self:
            if there.device is not self.device and not self.device.can_access(there.device):
                return False
            if src.buffer is other:
                self.event_wait(there.event_here())
        self._copy(src, dst, other)
        return True

    @queueing
    def _copy(self, src: Tensor, dst: Tensor, other: DeviceBuffer) -> None:
        start = _buffer(src).address(src.offset, src.nbytes)
        to = _buffer(dst).address(dst.offset, src.nbytes)
        if other.backend is not self:
            other.users.add(self)
        self.stream.copy(to, start, src.nbytes)

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
            found = self._functions[kernel] = self.device.function(kernel, overlap=self.overlap)
        return found

    def load(self, kernels: Iterable[str]) -> None:
        """Compile in parallel what these kernels, "module.function", need, unless it is compiled; the lock is held."""
        self.device.load(sorted(kernel for kernel in kernels if kernel not in self._functions), overlap=self.overlap)

    def graph_compute(self, graph: Graph | GraphView) -> None:
        if overrides(self, "compute_node"):
            Backend.graph_compute(self, graph)
            return
        plan = self.graph_plan_create(graph)
        try:
            self.graph_plan_compute(plan)
        finally:
            self.graph_plan_free(plan)

    @guarded
    def graph_plan_create(self, graph: Graph | GraphView) -> DevicePlan:
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

    @queueing
    def write_packed(self, buffer: DeviceBuffer, offset: int, data: np.ndarray) -> None:
        """Queue a copy of bytes, given in ggml's order, into a buffer of rearranged weights.

        The lock is held until all is queued: no other thread converts a weight of which some bundles are fetched.
        """
        for start, stop, weight in buffer.packed.pieces(offset, len(data)):
            piece = data[start - offset : stop - offset]
            if weight is None:
                self._uploads.put(buffer.base + start, piece)
            else:
                packed.write(weight, start, piece, partial(self._fetch, buffer), partial(self._put, buffer),
                             partial(self._pack, buffer, weight.kind))

    def _fetch(self, buffer: DeviceBuffer, start: int, size: int) -> np.ndarray:
        """Wait for bytes of a buffer as they are stored; the lock is held."""
        out = np.empty(size, np.uint8)
        self._downloads.get(out, buffer.base + start)
        self.stream.synchronize()
        self._downloads.finish(self._downloads.number)
        return out

    def _put(self, buffer: DeviceBuffer, start: int, data: np.ndarray) -> None:
        """Queue a copy of bytes as they are to be stored; the lock is held."""
        self._uploads.put(buffer.base + start, data)

    def _pack(self, buffer: DeviceBuffer, kind: Type, start: int, size: int) -> None:
        """Queue the rearrangement of `size` bytes of weights, which are whole bundles of blocks and in ggml's order;
        the lock is held."""
        launch = packed.packing(buffer.base + start, size, kind)
        function = self.function(launch.kernel)
        function.launch(launch.grid, launch.block, function.pack(launch.bound(0, 0)), launch.shared, self.stream)

    @guarded
    def packed_pieces(self, buffer: DeviceBuffer, start: int, size: int) -> tuple[int, list[packed.Piece]]:
        """`n_straightened`, and the pieces of a range of the buffer's bytes (`PackedRows.pieces`): no other thread is
        converting weights at this moment."""
        return self.n_straightened, list(buffer.packed.pieces(start, size))

    def straighten(self, buffer: DeviceBuffer, weight: packed.PackedWeight) -> None:
        """Convert a rearranged weight to ggml's order; the lock is held.  Plans are rebuilt before they run again."""
        # Counted before the conversion, so that plans are rebuilt even if the conversion is interrupted.
        self._queued += 1
        self.n_straightened += 1
        packed.straighten(weight, partial(self._fetch, buffer), partial(self._put, buffer),
                          partial(buffer.packed.straightened, weight))

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
            self._grow_work(plan.work_size)     # an earlier attempt to grow it failed for lack of memory
        self.faults.ran(plan.numbers)
        plan.run(self)

    # -- life -------------------------------------------------------------------

    def close(self) -> None:
        """Finish what is queued and free graphs and work memory; buffers keep theirs until they are closed."""
        with self._lock:
            if self._closed:
                return
            if not self._is_here:
                self._closed = True
                return
            self.settle()           # an interrupt of this wait leaves the backend open
            self._closed = True
            if self._error is None:
                self._downloads.finish(self._downloads.number)
            self._downloads.close()
            self._uploads.close()
            self._done, self._error = self._queued, None
            self._functions.clear()
            # A device that was lost refuses these calls; each of them is still tried.
            for give_back in (*(plan.free for plan in list(self._plans)), lambda: self.work.exchange(None),
                              self.faults.free, *([self.blas.close] if self.blas is not None else ())):
                with suppress(DeviceError):
                    give_back()
            self._close_device()

    def _close_device(self) -> None:
        """Close the device, if this backend opened it and no buffer uses it any more."""
        if self._closed and self._is_own and not self.buffer_sizes:
            self.device.close()

def _open(number: int, name: str) -> Device:
    """The CUDA device of a number; raises BackendError that says what is missing."""
    from ggml_sched.backends.cupy.real import open_device

    try:
        return open_device(number)
    except BackendError as error:
        raise BackendError(f"backend {name!r}: {error}") from error


def _buffer(tensor: Tensor) -> DeviceBuffer:
    buffer = tensor.buffer
    if not isinstance(buffer, DeviceBuffer):
        raise PlacementError(no_address(tensor) if buffer is None else
                             f"{label(tensor)} is on backend {buffer.backend.name!r}")
    return buffer


def _is_packed(tensor: Tensor) -> bool:
    """Whether a tensor shares bytes with rearranged weights."""
    return bool(_buffer(tensor).packed.under(tensor))


def _is_dense(src: Tensor, dst: Tensor) -> bool:
    """Whether both have equal layouts without gaps; bytes in gaps may belong to other tensors."""
    kind = src.type
    return same_layout(src, dst) and src.nbytes == src.n_elements // kind.block_size * kind.type_size


def _host_bytes(tensor: Tensor) -> np.ndarray | None:
    """The bytes (uint8) of a tensor in host memory with a known address; None for any other tensor."""
    memory = getattr(tensor.buffer, "memory", None)
    if tensor.buffer is None or not tensor.buffer.backend.is_host or not isinstance(memory, np.ndarray):
        return None
    found = memory[tensor.offset : tensor.offset + tensor.nbytes]
    return found if found.nbytes == tensor.nbytes else None
