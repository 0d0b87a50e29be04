# The C view of core/pack/solve: free blocks, and the packing of buffers over sections of time.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport gs_block


cdef enum:
    PACK_MAX = 0x1000000        # buffers: a sort key has 24 bits for the index
    PACK_CARRY_LIMIT = 6000000  # entries; above it, a problem does without overlap lists
    PACK_BY_TWA = 0             # busiest section, then lifetime, then area, all descending
    PACK_BY_SIZE = 1            # size, then lifetime
    PACK_BY_WAT = 2
    PACK_BY_TAW = 3
    PACK_ORDERS = 4
    PACK_BY_LONG_AREA = 4       # size times lifetime cubed; for searches only
    PACK_INDEX_BITS = 24        # of a sort key; the fields have the rest
    PACK_INDEX_MASK = 0xffffff
    N_PACK_METHODS = 9
    PACK_NO_CAPACITY = -1
    PACK_DEFAULT_BUDGET = -1        # two million tries, fewer where each takes long
    PACK_PLANNER_BUDGET = -2        # a hundred thousand, in the same way


# The free ranges of one arena, in address order.
ctypedef struct gs_blocks:
    gs_block *at
    int32_t n
    int32_t room
    int64_t max_size            # high-water mark, from the arena's start
    int64_t chunk               # bytes of one chunk of an arena that may not be one buffer; 0: no bound
    int64_t stride              # distance of the chunks' first offsets, so that they never touch
    int32_t n_chunks


ctypedef struct gs_pack:
    int32_t n                   # buffers with a size and a lifetime
    int32_t n_sections
    int64_t bound               # max-live, bytes
    int64_t n_neighbours        # sum of all overlap lists
    int64_t n_carried           # entries that carry will need
    int32_t *id                 # the caller's index of buffer i
    int32_t *start              # first section
    int32_t *stop               # one past the last section
    int32_t *birth              # time
    int32_t *life               # times lived
    int64_t *size
    int32_t *born               # [n_sections + 1] first buffer born in section k or later
    int64_t *live               # [n_sections] bytes
    int64_t *peak               # [n] the most bytes live in any section of buffer i
    int64_t *offset             # [n] the packing under construction, -1 for what is not placed
    int64_t *best               # [n] the best complete packing so far
    uint64_t *keys              # [2 n + 1] scratch of the sorts
    int32_t *order              # [n]
    int32_t *turn               # [n] when the caller had the buffer born: place among all; after pack_settle
    int32_t *carry_begin        # [n_sections + 1]; NULL until pack_fill_carry
    int32_t *carry
    void *memory                # the one allocation behind all but carry
    void *carry_memory


# The result of packing.
ctypedef struct gs_packing:
    int64_t arena           # bytes
    int64_t bound           # max-live bytes
    int64_t proven          # no arena is smaller than this
    int64_t tries           # of the search
    int32_t method
    bint optimal


cdef int pack_expect(gs_pack *p, int64_t n, int64_t n_sections, int64_t n_scratch, char **scratch) noexcept nogil
cdef int pack_measure(gs_pack *p) noexcept nogil
cdef void pack_free(gs_pack *p) noexcept nogil
cdef void pack_sort_keys(uint64_t *keys, int64_t n, int from_bit, int n_bytes) noexcept nogil
cdef int blocks_reset(gs_blocks *b, int64_t size) noexcept nogil
cdef int blocks_reset_chunked(gs_blocks *b, int64_t chunk, int64_t alignment) noexcept nogil
cdef void blocks_free(gs_blocks *b) noexcept nogil
cdef int blocks_copy(gs_blocks *to, const gs_blocks *b) noexcept nogil
cdef int64_t blocks_largest(const gs_blocks *b) noexcept nogil
cdef int blocks_take(gs_blocks *b, int64_t size, int64_t *offset) noexcept nogil
cdef int blocks_give(gs_blocks *b, int64_t offset, int64_t size) noexcept nogil
cdef int blocks_cut(gs_blocks *b, int64_t offset, int64_t size) noexcept nogil
cdef int pack_prepared(gs_pack *p, int64_t capacity, int64_t budget, gs_packing *out) noexcept nogil
cdef int pack_run(int32_t n, int32_t n_times, const int32_t *lower, const int32_t *upper, const int64_t *size,
                  int64_t capacity, int64_t budget, int64_t *offsets, gs_packing *out) noexcept nogil
