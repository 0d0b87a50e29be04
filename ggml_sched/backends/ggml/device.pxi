# Device: a ggml backend, its threads and its work memory.
#
# A Device owns the ggml backend, a thread pool, and work memory that only grows.  GraphPlans and RepackedWeights refer
# to it, so it outlives all that was made from it.  Corresponds to ggml_backend_t, ggml_threadpool and ggml_cplan.

# no_gc: a Device refers to an Api alone, so it is in no reference cycle, and its fields are valid when it is freed.
@cython.no_gc
cdef class Device:
    """`Device(api, dev, n_threads, host)`: the backend of the ggml_backend_dev_t at `dev`.  `host`: the backend
    computes on memory that the CPU reads directly."""

    cdef readonly Api api
    cdef void *dev
    cdef void *backend
    cdef void *pool
    cdef void *host_buffer          # a ggml buffer for all tensors on the host: kernels read only its type
    cdef uint8_t[128] host_bytes    # the memory of host_buffer
    cdef uint8_t *work              # owned; the work memory of ggml's kernels
    cdef readonly size_t work_size  # bytes of `work`
    cdef readonly int n_threads
    cdef readonly bint host
    cdef readonly bint has_host_plans   # graphs are computed with `pool` and `work`; otherwise ggml makes its own
    cdef int pid                    # id of the process in which the pool was made: a fork has none of its threads

    def __cinit__(self, Api api not None, uintptr_t dev, int n_threads, bint host):
        self.api, self.dev, self.host, self.n_threads = api, <void *>dev, host, n_threads
        self.has_host_plans = host and api.has_plans
        self.backend = api.call.backend_dev_init(self.dev, NULL)
        if self.backend == NULL:
            raise BackendError("ggml does not start this device")
        if host:
            self.host_buffer = api.call.backend_cpu_buffer_from_ptr(aligned(self.host_bytes), 1)
            if self.host_buffer == NULL:
                raise no_host_memory("a buffer of ggml's")
            self.set_threads(n_threads)

    def __dealloc__(self):
        if self.pool != NULL and self.pid == getpid():
            self.api.call.threadpool_free(self.pool)
        if self.host_buffer != NULL:
            self.api.call.backend_buffer_free(self.host_buffer)
        if self.backend != NULL:
            self.api.call.backend_free(self.backend)
        free(self.work)

    cpdef int set_threads(self, int n) except -1:
        """Compute with n threads from now on, in a new pool.  A pool made before a fork is dropped without being freed:
        freeing it would wait for its threads, which do not exist here."""
        cdef gx_threadpool_params params
        cdef void *pool = NULL
        if self.has_host_plans:
            params = self.api.call.threadpool_params_default(n)
            pool = self.api.call.threadpool_new(&params)
            if pool == NULL:
                raise BackendError(f"ggml gives no pool of {n} threads")
            if self.pool != NULL and self.pid == getpid():
                self.api.call.threadpool_free(self.pool)
        self.pool, self.n_threads, self.pid = pool, n, getpid()
        return 0

    cdef int reserve(self, size_t size) except -1:
        """Make the work memory at least `size` bytes large."""
        cdef uint8_t *more
        if size <= self.work_size and self.work != NULL:
            return 0
        more = <uint8_t *>calloc(size + 64, 1)
        if more == NULL:
            raise no_host_memory(f"{size} bytes of work memory")
        free(self.work)
        self.work, self.work_size = more, size
        return 0

    cdef bint supports(self, const gs_node *node) noexcept nogil:
        """Whether ggml's own supports_op accepts a node; for devices other than the CPU, whose kernels supported_ops.h
        describes."""
        cdef gx_tensor[1 + GS_MAX_SRC] made
        self.api.fill_node(made, node, NULL)
        # CUSTOM nodes call functions of this package, which run on the host only.
        return made[0].op != self.api.custom and self.api.call.backend_dev_supports_op(self.dev, made)

    # -- memory of the device -------------------------------------------------------

    def allocate(self, uintptr_t buft, size_t size):
        """The handle of a new buffer; 0 without enough memory."""
        cdef void *buffer
        with nogil:
            buffer = self.api.call.backend_buft_alloc_buffer(<void *>buft, size)
        return <uintptr_t>buffer

    def base_of(self, uintptr_t buffer):
        """The address of the first byte of a buffer of `allocate`."""
        return <uintptr_t>self.api.call.backend_buffer_get_base(<void *>buffer)

    def release(self, uintptr_t buffer):
        """Free a buffer of `allocate`."""
        self.api.call.backend_buffer_free(<void *>buffer)

    def alloc_size(self, uintptr_t buft, Tensor t not None):
        """Bytes that a tensor takes in buffers of the ggml buffer type `buft`."""
        cdef gx_tensor made
        memset(&made, 0, sizeof(made))
        self.api.fill_layout(&made, &t.layout)
        return self.api.call.backend_buft_get_alloc_size(<void *>buft, &made)

    def prepare(self, uintptr_t buffer, uintptr_t address, Tensor t not None):
        """Call the buffer's init_tensor for a tensor that was just placed in it."""
        cdef gx_tensor made
        memset(&made, 0, sizeof(made))
        self.api.fill_layout(&made, &t.layout)
        made.buffer, made.data = <void *>buffer, <void *>address
        if self.api.call.backend_buffer_init_tensor(<void *>buffer, &made) != 0:
            raise BackendError(f"ggml does not take {label(t)} into its buffer")

    def move(self, uintptr_t buffer, uintptr_t address, view, bint into):
        """Copy bytes into a device's buffer, or out of it into a writable view."""
        cdef gx_tensor made
        cdef Py_buffer found
        PyObject_GetBuffer(view, &found, PyBUF_SIMPLE if into else PyBUF_WRITABLE)
        try:
            if found.len == 0:
                return
            byte_row(&made, <void *>buffer, <void *>address, found.len)
            with nogil:
                if into:
                    self.api.call.backend_tensor_set(&made, found.buf, 0, found.len)
                else:
                    self.api.call.backend_tensor_get(&made, found.buf, 0, found.len)
        finally:
            PyBuffer_Release(&found)


cdef void byte_row(gx_tensor *out, void *buffer, void *address, size_t size) noexcept nogil:
    """Make `out` a ggml tensor of `size` bytes (i8) at an address in a ggml buffer."""
    memset(out, 0, sizeof(gx_tensor))
    out.type, out.buffer, out.data = GS_TYPE_I8, buffer, address
    out.ne[0], out.ne[1], out.ne[2], out.ne[3] = <int64_t>size, 1, 1, 1
    out.nb[0], out.nb[1], out.nb[2], out.nb[3] = 1, size, size, size


cdef inline void *aligned(uint8_t *at) noexcept nogil:
    return <void *>((<uintptr_t>at + 63) & ~<uintptr_t>63)


def drop_pages(uintptr_t address, size_t size):
    """Release the pages of a file's mapping that lie wholly inside a range; the next access reads them again."""
    cdef size_t page = <size_t>sysconf(_SC_PAGESIZE)
    cdef uintptr_t start = (address + page - 1) // page * page
    cdef uintptr_t end = (address + size) // page * page
    if end > start:
        madvise(<void *>start, end - start, MADV_DONTNEED)
