# The C view of core/alloc/arenas: lifetimes and offsets of a graph in splits.

from libc.stdint cimport int32_t, int64_t

from ggml_sched._c cimport gs_plan
from ggml_sched.core.alloc.gallocr cimport gs_arena, gs_groups, gs_walk
from ggml_sched.core.pack.solve cimport gs_blocks
from ggml_sched.core.plan.placement cimport gs_request


ctypedef struct gs_allocation:
    const gs_request *r
    const gs_plan *plan         # with the placement, the splits and the copies
    const int32_t *src          # the graph's sources; where a node reads copy c, the id n_tensors + c
    gs_groups *groups           # fusion groups, or NULL
    gs_walk walk                # result: lifetimes, in-place reuse and offsets
    gs_arena *arenas            # [n_backends]
    gs_blocks *blocks           # [n_backends]
    int32_t *methods            # [n_backends] result: GS_METHOD_*
    int32_t failed              # result: the tensor id that caused an error, or -1


cdef int allocation_init(gs_allocation *a, const gs_request *r) noexcept nogil
cdef void allocation_free(gs_allocation *a) noexcept nogil
cdef int allocate(gs_allocation *a) noexcept nogil
cdef int64_t fill_chunks(const gs_plan *p, int32_t backend, const gs_blocks *blocks, int64_t *sizes) noexcept nogil
cdef int walk_from_splits(gs_walk *f, const gs_request *r, const gs_plan *p, const int32_t *src,
                          int32_t *failed) noexcept nogil
