# cython: language_level=3
"""Requests: all inputs of a plan besides the graph, as flat arrays (gs_request).

The inputs are the policy, the residents and their backends, the assignments of the caller, and the results of the
support queries: which backend computes which node, and the size of each tensor on each backend.  The queries run here,
so that the passes need no GIL.  An array of results is allocated only if some result differs from its default.

Includes, before the code below:

    devices          Devices: the backends of one scheduler, with their constant properties and the support cache.
    support_queries  Support queries of a request: one to each backend for each kind of node.
    fusion_groups    Fusion groups that backends offer: queried and checked.
"""

from operator import index as _index

from ggml_sched.core.graph.tensor import measure_buffer
from ggml_sched.errors import BackendError, GraphError, PlacementError, no_host_memory

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset

from ggml_sched._c cimport *
from ggml_sched.core.graph.flat cimport MAX_KIND_WORDS, kind_words, node_of_kind
from ggml_sched.core.graph.graph cimport Graph
from ggml_sched.core.graph.tensor cimport (
    ASKS_OFFLOAD, ASKS_SIZE, ASKS_SUPPORTS, BackendBase, BufferBase, ContextState, Lease, Tensor, checked_alloc_size,
    describe,
    fill_inplace_masks,
)

include "devices.pxi"
include "support_queries.pxi"
include "fusion_groups.pxi"


cdef class Request:
    """A gs_request with its memory."""

    def __cinit__(self, Graph graph not None, Devices devices not None, object assigned):
        cdef int32_t i
        cdef gs_request *r = &self.c
        cdef gs_graph *g = &graph.flat
        cdef gs_backend_info *infos
        cdef int64_t n = max(g.n_tensors, 1)
        self.graph, self.devices = graph, devices
        self.buffers = []
        self.readers = []
        r.g = g
        r.p.n_backends = devices.n
        r.shares = devices.shares_buffers
        # One block for the arrays that do not depend on support queries.
        r.memory = malloc(devices.n * sizeof(gs_backend_info) + n * (2 * sizeof(int32_t) + 1) + devices.n * devices.n)
        if r.memory == NULL:
            raise no_host_memory(f"planning {g.n_tensors} tensors")
        infos = <gs_backend_info *>r.memory
        r.p.backends = infos
        for i in range(devices.n):
            limit = devices.backends[i].max_buffer_size
            infos[i].alignment = devices.alignment[i]
            try:
                infos[i].max_buffer = 0 if limit is None else min(max(_index(limit), 1), GS_MAX_CHUNK)
            except TypeError:
                raise TypeError(f"backend {devices.backends[i].name!r}: max_buffer_size is {limit!r}, neither None nor "
                                "an integer") from None
        r.p.resident = <int32_t *>(infos + devices.n)
        r.p.buffer = r.p.resident + n
        r.p.usage = <unsigned char *>(r.p.buffer + n)
        r.p.reads = r.p.usage + n
        memset(r.p.resident, 0xff, n * sizeof(int32_t))
        memset(r.p.buffer, 0, n * sizeof(int32_t) + n + devices.n * devices.n)
        if devices.stores:
            self.window = <int64_t *>calloc(devices.n, sizeof(int64_t))
            if self.window == NULL:
                raise no_host_memory(f"planning {g.n_tensors} tensors")
            r.store, r.margin, r.window = devices.store, devices.margin, self.window
        self.check_open()
        self.fill_residents()
        if assigned:
            self.fill_assigned(assigned)

    def __dealloc__(self):
        free(self.c.memory)
        free(self.window)
        free(self.c.p.assigned)
        self.free_support()
        free(self.c.p.group_backend)

    cdef int check_open(self) except -1:
        """GraphError for a tensor whose context is closed."""
        cdef ContextState context_state
        cdef Tensor t
        for context_state in self.graph.context_states:
            if context_state.closed:
                for t in self.graph.tensors:
                    if t.context_state is context_state:
                        raise GraphError(f"{describe(t)} belongs to closed context {context_state.name!r}")
        return 0

    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.nonecheck(False)
    cdef int fill_residents(self) except -1:
        """Find the residents, their backends and buffers; PlacementError for memory that no backend can read."""
        cdef gs_request *r = &self.c
        cdef const gs_graph *g = &self.graph.flat
        cdef tuple tensors = self.graph.tensors
        # Borrowed references, which the graph owns: counting references would write to each tensor, which is slow.
        cdef void *at
        cdef void *buffer
        cdef void *lease
        cdef void *last = NULL
        cdef void *temporary = NULL
        cdef int32_t i, k, last_index = -1, last_buffer = -1
        cdef unsigned char last_usage = 0
        # The key begins with names_residents: graphs with tensors marked as weights or caches also need check_placed,
        # so they must not share a cached plan with other graphs.
        cdef uint64_t h = self.graph.names_residents, last_readers = 0
        cdef dict indices = {}            # {buffer: its index}
        for k in range(g.n_roots):
            i = g.root[k]
            at = PyTuple_GET_ITEM(tensors, i)
            buffer = <void *>(<Tensor>at)._buffer
            lease = <void *>(<Tensor>at)._lease
            if buffer == <void *>None or lease == temporary:
                continue
            if lease != <void *>None and ((<Lease>lease).transient or not (<Lease>lease).alive):
                temporary = lease
                continue
            if (<BufferBase>buffer).closed:
                if lease == <void *>None:
                    raise PlacementError(f"{describe(<Tensor>at)} has no memory any more: its buffer on backend "
                                         f"{(<BufferBase>buffer).backend.name!r} was closed")
                continue
            if buffer != last:
                last_buffer = self.index_of_buffer(<BufferBase>buffer, indices)
                last_index = self.reader_of(<Tensor>at, <BufferBase>buffer)
                # The key includes the buffer's readers, because buffers of one backend may have different readers.
                last_readers = <uint64_t>hash(self.readers[last_buffer]) if r.shares else 0
                last_usage = GS_USAGE_WEIGHTS if (<BufferBase>buffer).usage == "weights" else GS_USAGE_ANY
                if self.devices.stores:
                    last_readers ^= self.bank_key(<BufferBase>buffer)
                last = buffer
            r.p.resident[i] = last_index
            r.p.usage[i] = last_usage
            r.p.buffer[i] = last_buffer
            h = gs_mix(h, ((<uint64_t>i << 16) | (<uint64_t>last_index << 2) | last_usage) ^ last_readers)
        if last != NULL:
            for i in range(g.n_tensors):
                r.p.resident[i] = r.p.resident[g.memory[i]]
                r.p.usage[i] = r.p.usage[g.memory[i]]
        self.key = h
        return 0

    cdef uint64_t bank_key(self, BufferBase buffer) except? 0:
        """A key of the bank of experts whose slots a buffer has, by its store and its number; 0 for other buffers.
        Plans of a bank's weights fetch experts, so plans of the same graph without it must not serve them."""
        bank = getattr(buffer, "experts", None)
        if bank is None:
            return 0
        return gs_mix(1 + self.devices.index(bank.store), 1 + <uint64_t>bank.number)

    cdef int32_t index_of_buffer(self, BufferBase buffer, dict indices) except -1:
        """The index of a buffer in self.buffers; a new buffer is added, together with its readers."""
        found = indices.get(buffer)
        if found is None:
            found = indices[buffer] = len(self.buffers)
            self.buffers.append(buffer)
            self.readers.append(self.readers_of(buffer) if self.c.shares else ())
        return found

    cdef int fill_assigned(self, object assigned) except -1:
        """Fill p.assigned from the caller's {tensor: backend}."""
        cdef gs_request *r = &self.c
        cdef int64_t n = max(r.g.n_tensors, 1)
        cdef int32_t i, k
        r.p.assigned = <int32_t *>malloc(n * sizeof(int32_t))
        if r.p.assigned == NULL:
            raise no_host_memory(f"planning {r.g.n_tensors} tensors")
        memset(r.p.assigned, 0xff, n * sizeof(int32_t))
        for tensor, backend in assigned.items():
            i = self.graph.id_of(tensor)
            if i >= 0:
                r.p.assigned[i] = self.devices.index(backend)
        for i in range(r.g.n_tensors if assigned else 0):       # by id, whatever the order of the assignments
            k = r.p.assigned[i]
            if k >= 0:
                self.key = gs_mix(self.key, (<uint64_t>i << 16) | <uint64_t>(k + 1) | <uint64_t>1 << 63)
        return 0

    cdef int check_placed(self) except -1:
        """PlacementError for a weight or cache that is used, has no memory, and was not assigned by the caller."""
        cdef gs_request *r = &self.c
        cdef const gs_graph *g = &self.graph.flat
        cdef Tensor t
        cdef int32_t i, k
        for k in range(g.n_roots):
            i = g.root[k]
            if r.p.resident[i] >= 0 or g.op[i] != GS_OP_NONE or r.p.assigned != NULL and r.p.assigned[i] >= 0:
                continue
            t = self.graph.tensors[i]
            if t._resident is not None and (g.n_readers[i] or g.n_viewers[i]):
                raise PlacementError(
                    f"{describe(t)} is a {t._resident} of a graph file and has no memory: allocate it with place= of "
                    "load_graph or backend.alloc_tensors, or assign it with scheduler.set_tensor_backend")
        return 0

    cdef tuple readers_of(self, BufferBase buffer):
        """The backends, by index, that own a buffer or read it without a copy."""
        cdef tuple backends = self.devices.backends, overrides = self.devices.reads_buffers
        cdef list found = []
        cdef int32_t k
        for k in range(self.devices.n):
            if buffer.backend is backends[k] or overrides[k] and backends[k].supports_buffer(buffer):
                found.append(k)
        return tuple(found)

    cdef int32_t reader_of(self, Tensor t, BufferBase buffer) except -2:
        """The scheduler's backend that owns the buffer of a resident tensor, or else the first one that can read it."""
        cdef int32_t k = self.devices.index(buffer.backend)
        if k >= 0:
            return k
        for k in self.readers_of(buffer):
            return k
        raise PlacementError(f"{describe(t)} has memory on backend {buffer.backend.name!r}, which is not one of the "
                             f"scheduler's ({names_of(self.devices.backends)}) and which none of them can read")

    cdef int set_policy(self, object policy) except -1:
        """Copy the fields of a Policy to the request, and choose the in-place rules that belong to it."""
        cdef gs_policy *p = &self.c.p.policy
        cdef int32_t i
        p.placement, p.offsets, p.reuse, p.leafs_first, p.stream, p.n_copies = policy.numbers
        for i in range(self.devices.n if self.window != NULL else 0):
            self.window[i] = policy.windows[i] if i < len(policy.windows) else 0
        self.c.inplace = self.devices.inplace_first if p.reuse == GS_REUSE_FIRST else self.devices.inplace
        return 0

    cdef int query_support(self) except -1:
        """Run the support queries about nodes, buffers and sizes, once for all plans of this request."""
        if self.has_support:
            return 0
        if self.graph.names_residents:
            self.check_placed()
        self.free_support()
        self.query_buffers()
        if self.devices.queries:
            self.query_nodes()
        self.has_support = True
        return 0

    def groups(self, policy not None):
        """The fusion groups that backends offer: tuples (backend, positions in the graph's nodes), by first position.

        The placement of ggml's first generation uses none.  BackendError for an invalid group.
        """
        if not self.devices.fuses or policy.placement == "seed":
            return ()
        if self.group_offers is None:
            self.group_offers = query_groups(self)
        return self.group_offers

    cdef void free_support(self) noexcept:
        """Free the results of the support queries, also those of queries that failed halfway."""
        cdef gs_request *r = &self.c
        free(r.p.reads_buffer)
        free(r.p.supports)
        free(r.p.offloads)
        free(r.p.nbytes)
        r.p.reads_buffer = r.p.supports = r.p.offloads = NULL
        r.p.nbytes = NULL

    cdef int query_buffers(self) except -1:
        """Find out which backends can read each buffer, and the memory of each other backend."""
        cdef gs_request *r = &self.c
        cdef Devices devices = self.devices
        cdef int32_t b, i
        r.p.n_buffers = <int32_t>len(self.buffers)
        r.p.reads_buffer = <unsigned char *>calloc(max(r.p.n_buffers, 1) * devices.n, 1)
        if r.p.reads_buffer == NULL:
            raise no_host_memory(f"planning {r.g.n_tensors} tensors")
        for i in range(r.p.n_buffers):
            # If no backend overrides supports_buffer, only the owner reads a buffer.
            for b in self.readers[i] or self.readers_of(self.buffers[i]):
                r.p.reads_buffer[<int64_t>b * r.p.n_buffers + i] = True
        for b in range(devices.n):
            if devices.reads_buffers[b]:
                for i in range(devices.n):
                    if i != b:
                        stand_in = measure_buffer(devices.backends[i])
                        r.p.reads[b * devices.n + i] = bool(devices.backends[b].supports_buffer(stand_in))
        return 0

    cdef int query_nodes(self) except -1:
        """Query which backends support and offload each node, and the size of each tensor on each backend.

        A backend with an `answers_version` gets one query for each kind of node, any other backend one for each node.
        """
        cdef Devices devices = self.devices
        cdef SupportQueries queries
        cdef int64_t epoch = devices.epoch()
        cdef int32_t b
        self.graph.find_kinds(devices.queries & ASKS_SIZE)
        queries = SupportQueries(self.graph, devices)
        queries.look_up()
        for b in range(devices.n):
            if devices.versions[b] is not None:
                queries.query(b)
            else:
                self.query_each(b)
        if devices.epoch() == epoch:
            queries.store()
        for b in range(devices.n):
            self.apply(b, queries)
        return 0

    cdef int apply(self, int32_t b, SupportQueries queries) except -1:
        """Apply the results of one backend's queries, one for each kind, to all tensors of that kind.

        Has no effect for a backend that got a query for each tensor.
        """
        cdef const gs_graph *g = &self.graph.flat
        cdef const int32_t *of = self.graph._kinds.of
        cdef int32_t i, k, at, differs = 0
        for k in range(queries.n):
            at = k * queries.n_backends + b
            differs |= ((0 if queries.bits[at] & ASKS_SUPPORTS else ASKS_SUPPORTS) | queries.bits[at] & ASKS_OFFLOAD
                        | (0 if queries.size[at] == g.nbytes[queries.example[k]] else ASKS_SIZE))
        if differs & (ASKS_SUPPORTS | ASKS_OFFLOAD):
            for i in range(g.n_work):
                at = of[g.work[i]] * queries.n_backends + b
                self.set_support(b, g.work[i], queries.bits[at] & ASKS_SUPPORTS, queries.bits[at] & ASKS_OFFLOAD)
        if differs & ASKS_SIZE:
            for i in range(g.n_tensors):
                self.set_size(b, i, queries.size[of[i] * queries.n_backends + b])
        return 0

    cdef int query_each(self, int32_t b) except -1:
        """Make a query to one backend for every tensor, because the results may depend on more than the kind."""
        cdef const gs_graph *g = &self.graph.flat
        cdef tuple tensors = self.graph.tensors
        cdef int32_t i, wanted = self.devices.in_python[b] | self.devices.in_c[b]
        cdef BackendBase backend = self.devices.backends[b]
        if wanted & (ASKS_SUPPORTS | ASKS_OFFLOAD):
            for i in range(g.n_work):
                t = <Tensor>tensors[g.work[i]]
                self.set_support(b, g.work[i], not wanted & ASKS_SUPPORTS or backend.supports_op(t),
                                 wanted & ASKS_OFFLOAD and backend.offload_op(t))
        if wanted & ASKS_SIZE:
            for i in range(g.n_tensors):
                t = <Tensor>tensors[i]
                self.set_size(b, i, checked_alloc_size(backend, t, backend.alloc_size(t)))
        return 0

    cdef int set_support(self, int32_t b, int32_t id, bint supports, bint offloads) except -1:
        """Record support and offload of one node on one backend, if they differ from the default (supported, not
        offloaded)."""
        cdef gs_request *r = &self.c
        cdef int64_t n = r.g.n_tensors
        if not supports:
            if r.p.supports == NULL:
                r.p.supports = <unsigned char *>malloc(n * r.p.n_backends)
                if r.p.supports == NULL:
                    raise no_host_memory(f"planning {n} tensors")
                memset(r.p.supports, 1, n * r.p.n_backends)
            r.p.supports[b * n + id] = False
        if offloads:
            if r.p.offloads == NULL:
                r.p.offloads = <unsigned char *>calloc(n * r.p.n_backends, 1)
                if r.p.offloads == NULL:
                    raise no_host_memory(f"planning {n} tensors")
            r.p.offloads[b * n + id] = True
        return 0

    cdef int set_size(self, int32_t b, int32_t id, int64_t size) except -1:
        """Record the size of one tensor on one backend, if it differs from the tensor's own bytes."""
        cdef gs_request *r = &self.c
        cdef int64_t n = r.g.n_tensors
        cdef int32_t i
        if size != r.g.nbytes[id]:
            if r.p.nbytes == NULL:
                r.p.nbytes = <int64_t *>malloc(n * r.p.n_backends * sizeof(int64_t))
                if r.p.nbytes == NULL:
                    raise no_host_memory(f"planning {n} tensors")
                for i in range(r.p.n_backends):
                    memcpy(r.p.nbytes + i * n, r.g.nbytes, n * sizeof(int64_t))
            r.p.nbytes[b * n + id] = size
        return 0
