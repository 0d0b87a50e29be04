"""GgmlBackend: a device of an installed ggml, computing splits as whole ggml graphs.

A graph plan here is a GraphPlan: the split compiled once, then computed with one call for each token.  Memory of the
CPU is allocated by this package, or mapped from a file; that of other devices by ggml.  In ggml: ggml_backend_t.

Kernels run on ggml's thread pool, or on OpenMP's threads where the library was built with OpenMP.  A forked child has
none of these threads.  Without OpenMP it makes a new pool.  With OpenMP it computes on a new thread, for which OpenMP
starts new ones; on the old thread OpenMP would wait for the lost ones.
"""

from __future__ import annotations

import os
import threading
import warnings
from functools import partial
from typing import cast

from ggml_sched._graph import Graph, Tensor, op_numbers
from ggml_sched.backend import Backend, Buffer, GraphView, as_nodes, checked_bytes, overrides
from ggml_sched.backends.cpu._kernels import isa
from ggml_sched.backends.cpu.buffer import ALIGNMENT, CpuBuffer, HostBackend
from ggml_sched.backends.ggml._ggml import Device, GgmlBase, GraphPlan, drop_pages, run_graph_plan, tolerated_sources
from ggml_sched.backends.ggml.buffer import DeviceBuffer, DeviceMemory, HostBuffer
from ggml_sched.backends.ggml.library import Device as Offered
from ggml_sched.backends.ggml.library import Library, load
from ggml_sched.errors import BackendError, OutOfMemory
from ggml_sched.threads.locks import ForkLock
from ggml_sched.threads.workers import Crew, thread_count

__all__ = ["GgmlBackend"]

MAX_THREADS = 512
"""ggml's limit (GGML_MAX_N_THREADS)."""
OWN_COLUMNS = 32
"""From this many columns on, CpuBackend's kernels multiply by quantised weights: only prompts have so many columns."""
STARTED_IN = os.getpid()
"""Id of the process that loaded this module: a process with another id is a forked child, see `_compute_in_child`."""


class GgmlBackend(GgmlBase, HostBackend):
    """`GgmlBackend(device="CPU", n_threads=None, library=None)`: ggml's kernels.

    `device` is a name of `GgmlBackend.devices()`; `n_threads` counts the calling thread (None: the CPUs that this
    process may use); `library` is a folder with ggml's shared libraries (None: those of the installed `llama_cpp` or
    `ggml` package).  `memory` bounds all buffers together, in bytes.  `repack`: quantised weights that only matrix
    products read are kept a second time, in layouts that ggml computes faster with.  `own_products`: where ggml has no
    such layout, CpuBackend's kernels multiply prompts by quantised weights, on ggml's threads, if the CPU has AVX-512
    with VNNI: ggml's kernels take up to fifteen times as long.  On such a CPU they also multiply four columns or fewer
    by float weights, which they read faster.  `steady` does nothing and is deprecated.

    Raises BackendError where there is no ggml (it says what to install), or no such device.
    """

    buffer_class: type[CpuBuffer] = HostBuffer
    used: int
    kv_padding = 64
    """Attention reads a multiple of this many keys of a KV cache: ggml's flash attention computes that many at once."""

    def __init__(self, device: str = "CPU", n_threads: int | None = None,
                 library: str | os.PathLike[str] | None = None, *, name: str | None = None, memory: int | None = None,
                 repack: bool = True, own_products: bool = True, steady: bool | None = None) -> None:
        if steady is not None:
            warnings.warn("GgmlBackend: steady= has no effect: a compute always uses all threads", DeprecationWarning,
                          stacklevel=2)
        self.library: Library = load(library)
        self.device: Offered = _named(self.library, device)
        self._buft = self.library.buffer_type(self.device)
        self.is_host: bool = self.library.is_host(self._buft)
        super().__init__(name or ("GGML" if self.device.kind == "cpu" else self.device.name),
                         max(ALIGNMENT, self.library.alignment(self._buft)))
        self.memory: int | None = checked_bytes(self.name, "memory", memory)
        self._lock = ForkLock()
        self._crew: Crew | None = None
        self._pid = os.getpid()
        self._teams = threading.local()
        """Of each thread that computes, attribute `size`: how many threads, itself included, the host has already given
        it in a trial (see `_run`)."""
        self._device = Device(self.library.api, self.device.handle, thread_count(n_threads, MAX_THREADS), self._is_cpu)
        self.own_products = OWN_COLUMNS if own_products and self._is_cpu and isa() == "avx512" else 0
        """The smallest number of columns for products by quantised weights; 0: no own products at all."""
        self.packed_bufts: tuple[int, ...] = ()
        if repack and self._is_cpu:
            self.packed_bufts = self.library.extra_buffer_types(self.device)
        if not self.is_host:
            self.max_buffer_size: int | None = min(self.library.max_size(self._buft), (1 << 63) - 1)
            # None says that buffers cannot be made over existing memory: a loader then reads the file, and maps
            # nothing.
            vars(self)["buffer_from_ptr"] = None    # hides the method of the class
        self.adopt(self._device)

    @property
    def _is_cpu(self) -> bool:
        return self.is_host and self.device.kind in ("cpu", "accel")

    @staticmethod
    def devices(library: str | os.PathLike[str] | None = None) -> tuple[Offered, ...]:
        """What the library offers: name, description and kind of each device."""
        return load(library).devices

    # -- memory -----------------------------------------------------------------

    def memory_available(self) -> int | None:
        """Bytes that can still be allocated here; None on the host if `memory` sets no bound."""
        return super().memory_available() if self.is_host or self.memory is not None else (
            self.library.memory(self.device)[0])

    def alloc_size(self, tensor: Tensor) -> int:
        if self.is_host:
            return tensor.nbytes
        return max(tensor.nbytes, self._device.alloc_size(self._buft, tensor))

    def alloc_buffer(self, size: int) -> Buffer:
        """`size` bytes, zero on the host, at a multiple of the alignment."""
        if self.is_host:
            return super().alloc_buffer(size)
        self._check_size(size)
        memory = DeviceMemory(self._device, self._buft, max(size, 1))
        if not memory.handle:
            free = self.memory_available()
            raise OutOfMemory(f"backend {self.name!r}: ggml gives no {size} bytes, {free} are free", self.name, size,
                              free)
        buffer = DeviceBuffer(self, self._device, memory, size)
        self.buffer_sizes.add(buffer)
        return buffer

    # -- packed weights -----------------------------------------------------------

    def plain_unread(self, weight: Tensor) -> None:
        """Drop the pages of a mapped weight from memory: from now on its repacked copy is read, not its plain bytes.
        Pages of a buffer of which parts have moved stay: those that have moved are in no file."""
        buffer = cast("HostBuffer | DeviceBuffer", weight.buffer)
        if buffer.file_backed and not buffer.moved and not buffer.writable:
            drop_pages(buffer.base + weight.offset, weight.nbytes)

    # -- computing ----------------------------------------------------------------

    @property
    def n_threads(self) -> int:
        return self._device.n_threads

    def set_n_threads(self, n: int) -> None:
        """Use n threads from now on."""
        with self._lock:
            self._device.set_threads(thread_count(n, MAX_THREADS))

    def inplace_sources(self, op: str) -> int:
        number = op_numbers().get(op)
        return 0 if number is None else tolerated_sources(number)

    def graph_compute(self, graph: Graph | GraphView) -> None:
        if overrides(self, "compute_node"):
            Backend.graph_compute(self, graph)
            return
        plan = self.graph_plan_create(graph)
        try:
            self.graph_plan_compute(plan)
        finally:
            self.graph_plan_free(plan)

    def graph_plan_create(self, graph: Graph | GraphView) -> GraphPlan:
        self._require_open()
        with self._lock:
            return GraphPlan(self, self._device, as_nodes(graph))

    def graph_plan_free(self, plan: GraphPlan) -> None:
        with self._lock:
            plan.free()

    def graph_plan_compute(self, plan: GraphPlan) -> None:
        if self._closed:
            self._require_open()
        with self._lock:
            if self._device.n_threads > 1 and os.getpid() != STARTED_IN:
                self._compute_in_child(plan)
            else:
                self._run(plan)

    def _run(self, plan: GraphPlan) -> None:
        """Compute on the calling thread and on OpenMP's threads, or on those of ggml's pool.

        libgomp (OpenMP of GCC) ends the process if the host refuses it a thread.  So before it starts n threads for the
        first time, n threads are started here and ended again as a trial; OutOfMemory if that fails.
        """
        n = self._device.n_threads
        if n > 1 and self.library.uses_openmp and getattr(self._teams, "size", 1) < n:
            trial = Crew([f"{self.name} trial {i}" for i in range(1, n)])
            n_started = len(trial.threads)
            trial.close()
            if n_started < n - 1:
                raise OutOfMemory(f"backend {self.name!r}: the host starts {n_started} of {n - 1} threads beside the "
                                  "calling one; set_n_threads lowers their number", self.name)
            self._teams.size = n
        run_graph_plan(plan)

    def _compute_in_child(self, plan: GraphPlan) -> None:
        """Compute in a process that was forked from one that may have had threads of ggml's."""
        if not self.library.uses_openmp:
            if self._pid != os.getpid():
                self._device.set_threads(self._device.n_threads)
                self._pid = os.getpid()
            self._run(plan)
            return
        # libgomp keeps its threads for the thread that started them.  This thread's were lost in the fork, and libgomp
        # would wait for them without end; a new thread gets new ones.
        if self._crew is None or not self._crew.is_here:
            self._crew = Crew([f"{self.name} after fork"])
        if not self._crew.threads:
            raise BackendError(f"backend {self.name!r}: the host gives no thread to compute on after a fork")
        self._crew.share([partial(self._run, plan)], int)      # `int` does nothing: this thread computes no part

    # -- life -------------------------------------------------------------------

    def close(self) -> None:
        """Compute no more; buffers keep their memory until they are closed."""
        with self._lock:
            self._closed = True
            crew, self._crew = self._crew, None
            if crew is not None:
                crew.close()


def _named(library: Library, name: str) -> Offered:
    for device in library.devices:
        if device.name.lower() == str(name).lower():
            return device
    names = ", ".join(device.name for device in library.devices) or "none"
    raise BackendError(f"ggml {library.version} in {library.folder} has no device {name!r}; it has: {names}")
