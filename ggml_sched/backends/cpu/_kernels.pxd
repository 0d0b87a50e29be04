# Declarations of kernels/*.h and _kernels.pyx for Cython modules, and which object keeps which alive.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport gs_node
from ggml_sched._graph cimport BufferBase, NodeTable


cdef extern from "kernels/call.h" nogil:
    enum: GS_FAULT_NONE

    ctypedef struct gs_fault:
        int32_t kind
        int32_t source
        int64_t value
        int64_t limit

    ctypedef struct gs_call:
        int32_t n_parts
        int32_t position

    ctypedef struct gs_calls:
        gs_call *call
        int32_t n
        int64_t tables
        int64_t shared
        int64_t scratch
        int64_t copied

    void gs_free_calls(gs_calls *of)
    int gs_isa()

cdef extern from "kernels/op_rules.h" nogil:
    bint gs_extents_fit(const gs_node *node)
    ctypedef struct gs_op_rule:
        int32_t inplace

    const gs_op_rule *gs_rule_of(int op)
    bint gs_types_fit(const gs_node *node, uint64_t more)

cdef extern from "kernels/build.h" nogil:
    ctypedef struct gs_table:
        const gs_node *positions
        const gs_node *factors

    ctypedef struct gs_tables:
        int32_t n
        gs_table *table
        const char *interleaved

    int gs_build_node(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables)
    void gs_forget_tables(gs_tables *of, const gs_node *node)

cdef extern from "kernels/interleave.h" nogil:
    enum: GS_BAND

    bint gs_interleaves(int type)
    void gs_interleave(int type, const char *from_, int64_t rows, int64_t row_bytes, char *to)

cdef extern from "kernels/pool.h" nogil:
    ctypedef struct gs_pool

    ctypedef struct gs_work:
        char *memory
        int64_t shared
        int64_t scratch
        int32_t n_threads

    ctypedef struct gs_time:
        int64_t wall
        int64_t busy

    gs_pool *gs_pool_new()
    void gs_pool_resize(gs_pool *pool, int32_t n_threads)
    void gs_pool_stop(gs_pool *pool)
    void gs_pool_free(gs_pool *pool)
    int32_t gs_pool_alive(gs_pool *pool)
    int32_t gs_pool_run(gs_pool *pool, const gs_call *calls, int32_t n, const gs_work *work, gs_time *times,
                        gs_fault *fault)

cdef extern from "kernels/shared_calls.h" nogil:
    ctypedef struct gs_shared_call:
        int32_t next
        const gs_call *call
        const gs_work *work

    void gs_run_parts(gs_shared_call *shared, int32_t thread)


cdef class Pool:
    cdef gs_pool *pool                  # owned
    cdef readonly int32_t n_threads
    cdef public object times            # the NodeTimes to which runs add their times; None: nothing is measured


cdef enum:
    WORK_HEAD = 64      # bytes of the header before a block of work memory; the block begins at a multiple of 64


ctypedef struct gs_work_block:
    gs_work_block *next         # the next block that no run uses
    void *memory                # what malloc returned
    int64_t size                # bytes, without the header


cdef class WorkMemory:
    cdef readonly str name              # of the backend, for errors
    cdef readonly int64_t held
    cdef gs_work_block *free_blocks     # owned
    cdef char *take(self, int64_t size) except NULL
    cdef void give(self, char *memory) noexcept
    cpdef clear(self)


cdef class CallList:
    cdef readonly str name              # of the backend, for errors
    cdef readonly NodeTable table       # keeps the tensors and the gs_node structs that calls point to
    cdef gs_calls calls                 # owned
    cdef unsigned char *state           # owned; bits of each tensor of the table: LOOKED_AT, READABLE, WRITABLE
    cdef dict known                     # {buffer: (address, size, writable), or None if kernels cannot use it}; keeps
                                        # the buffers alive, though close() may still free their memory: see `held`
    cdef BufferBase last                # the buffer that was looked up last: neighbours mostly share one
    cdef int64_t last_size              # bytes of `last`; -1: kernels cannot use it
    cdef bint last_writable             # whether kernels may write to `last`
    cdef object memory_of
    cdef WorkMemory memory
    cdef list forms                     # arrays of interleaved weights that calls read; keeps their memory alive
    cdef const char *interleaved_of(self, Py_ssize_t t) except? NULL
    cpdef int64_t work_size(self, int32_t n_threads) except -1
    cdef int know(self, BufferBase buffer) except -1
    cdef bint is_good(self, const gs_node *node) except -1
    cdef bint used(self, Py_ssize_t t, bint writes) except -1
    cdef unsigned char look_at(self, Py_ssize_t t) except? 255


cdef class Products:
    cdef gs_calls calls                 # owned
    cdef gs_shared_call *shared         # owned; one for each call
    cdef gs_work work
    cdef int add(self, const gs_node *node) except -1
    cdef gs_shared_call *shared_calls(self) except NULL
    cdef int64_t work_size(self, int32_t n_threads) except -1
    cdef void begin(self, char *memory, int32_t n_threads) noexcept nogil
