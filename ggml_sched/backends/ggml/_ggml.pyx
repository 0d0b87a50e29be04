"""The compiled part of `GgmlBackend`: turns nodes into ggml graphs and runs them.

    library.pxi         Api: the functions of a loaded library, and its numbers of ops
    device.pxi          Device: a ggml backend, its threads and work memory
    repack.pxi          RepackedWeight: a copy of a weight in a layout that matrix products read faster
    graph_compiler.pxi  GraphPlan: a split, compiled once into ggml graphs over the plan's addresses
    products.pxi        OwnProducts: matrix products that CpuBackend's kernels compute, where they are faster
    replay.pxi          runs a GraphPlan: checks row ids, then computes each ggml graph with one call

Nothing here decides where a tensor lives; the addresses are those of the scheduler's plan.
"""

from weakref import ref as weakref_to

cimport cython

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from posix.unistd cimport _SC_PAGESIZE, getpid, sysconf

from ggml_sched._c cimport *
from ggml_sched._graph cimport BackendBase, BufferBase, NodeTable, Tensor, label, op_is_view
from ggml_sched.backends.cpu._kernels cimport Products, gs_run_parts, gs_shared_call

from ggml_sched._graph import apply_staged, check_graph_plan, staged_leafs
from ggml_sched.errors import BackendError, PlacementError, UnsupportedOp, no_host_memory

cdef extern from "sys/mman.h" nogil:
    int madvise(void *address, size_t size, int advice)
    enum: MADV_DONTNEED

cdef extern from "abi.h" nogil:
    enum: GX_FLAG_COMPUTE
    enum: GX_BUFFER_USAGE_WEIGHTS
    ctypedef struct gx_tensor:
        int32_t type
        void *buffer
        int64_t ne[4]
        size_t nb[4]
        int32_t op
        int32_t op_params[16]
        int32_t flags
        gx_tensor *src[10]
        gx_tensor *view_src
        size_t view_offs
        void *data
        char name[64]
        void *extra
    ctypedef struct gx_init_params:
        size_t mem_size
        void *mem_buffer
        bint no_alloc
    ctypedef struct gx_cplan:
        size_t work_size
        uint8_t *work_data
        int32_t n_threads
        void *threadpool
    ctypedef struct gx_threadpool_params:
        int32_t n_threads
        unsigned int poll
    ctypedef struct gx_custom:
        void (*fun)(gx_tensor *, int, int, void *) noexcept nogil
        int32_t n_tasks
        void *user
    ctypedef struct gx_api:
        void *(*init)(gx_init_params) noexcept nogil
        void (*free)(void *) noexcept nogil
        void *(*new_graph_custom)(void *, size_t, bint) noexcept nogil
        size_t (*graph_overhead_custom)(size_t, bint) noexcept nogil
        void (*graph_add_node)(void *, gx_tensor *) noexcept nogil
        void *(*backend_dev_init)(void *, const char *) noexcept nogil
        void (*backend_free)(void *) noexcept nogil
        int (*backend_graph_compute)(void *, void *) noexcept nogil
        bint (*backend_dev_supports_op)(void *, const gx_tensor *) noexcept nogil
        void *(*backend_buft_alloc_buffer)(void *, size_t) noexcept nogil
        size_t (*backend_buft_get_alloc_size)(void *, const gx_tensor *) noexcept nogil
        void *(*backend_buffer_get_base)(void *) noexcept nogil
        void (*backend_buffer_free)(void *) noexcept nogil
        void (*backend_buffer_set_usage)(void *, int) noexcept nogil
        int (*backend_buffer_init_tensor)(void *, gx_tensor *) noexcept nogil
        int (*backend_tensor_alloc)(void *, gx_tensor *, void *) noexcept nogil
        void (*backend_tensor_set)(gx_tensor *, const void *, size_t, size_t) noexcept nogil
        void (*backend_tensor_get)(const gx_tensor *, void *, size_t, size_t) noexcept nogil
        void *(*backend_cpu_buffer_from_ptr)(void *, size_t) noexcept nogil
        gx_cplan (*graph_plan)(const void *, int, void *) noexcept nogil
        int (*graph_compute)(void *, gx_cplan *) noexcept nogil
        void *(*threadpool_new)(gx_threadpool_params *) noexcept nogil
        void (*threadpool_free)(void *) noexcept nogil
        gx_threadpool_params (*threadpool_params_default)(int) noexcept nogil
    ctypedef struct gx_function:
        const char *name
        size_t offset
    const gx_function *gx_functions
    int GX_N_FUNCTIONS
    void gx_quiet(int, const char *, void *)

cdef extern from "supported_ops.h" nogil:
    gs_layout gx_regular(const gs_layout *a)
    bint gx_supports(const gs_node *node)
    bint gx_copy(const gs_layout *d, const gs_layout *a)
    bint gx_dense(const gs_layout *a)
    bint gx_rows(const gs_layout *a)
    int64_t gs_count(const int64_t *ne)
    bint gs_bad_id(const gs_layout *ids, const char *data, int64_t limit, int64_t *bad)
    bint gs_clashes(const gs_node *node, int k, int inplace)
    int64_t gx_unit(const gs_layout *a, int64_t *elements)
    int64_t gx_row_size(const gs_layout *a)

cdef extern from "rows.h" nogil:
    ctypedef struct gx_ids:
        const gs_layout *layout
        const char *data
        int64_t n_rows
        int64_t node
        int64_t tensor
    void gx_order(gx_tensor *dst, int ith, int nth, void *user)
    void gx_argmax(gx_tensor *dst, int ith, int nth, void *user)

include "library.pxi"
include "device.pxi"
include "repack.pxi"
include "products.pxi"
include "graph_compiler.pxi"
include "replay.pxi"
