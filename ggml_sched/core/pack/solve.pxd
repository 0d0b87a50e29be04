# The C view of core/pack/solve: gs_blocks (the free blocks of an arena) and gs_pack (a packing problem).

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._c cimport gs_block, gs_pack_result


cdef enum:
    PACK_MAX = 0x1000000        # the most buffers: a sort key has 24 bits for the index
    PACK_CARRY_LIMIT = 6000000  # entries of gs_pack.carry; a problem that needs more is packed without these lists
    # Orders of buffers, largest first, by three quantities in the order of their letters: T is the most bytes alive at
    # once in the buffer's lifetime, W the length of this lifetime, A size * lifetime.
    PACK_BY_TWA = 0
    PACK_BY_SIZE = 1            # size, then lifetime
    PACK_BY_WAT = 2
    PACK_BY_TAW = 3
    PACK_ORDERS = 4             # number of the orders above; one-pass packing tries these, searches one more
    PACK_BY_LONG_AREA = 4       # size times lifetime cubed
    PACK_INDEX_BITS = 24        # low bits of a sort key, the buffer's index; the sorted fields are above them
    PACK_INDEX_MASK = 0xffffff
    N_PACK_METHODS = 9


# The free ranges of one arena, in address order.
ctypedef struct gs_blocks:
    gs_block *at
    int32_t n
    int32_t room                # elements that `at` has memory for
    int64_t max_size            # the highest end of a range ever taken: the bytes that the arena needs
    int64_t chunk               # bytes of each chunk; 0: the arena is one buffer
    int64_t stride              # from one chunk's first offset to the next's: above `chunk`, so that chunks never merge
    int32_t n_chunks


# A packing problem.  Buffers are numbered by section of birth; sections are intervals of time (see prepare.pxi).
ctypedef struct gs_pack:
    int32_t n                   # buffers, without those that have no bytes or no lifetime
    int32_t n_sections
    int64_t bound               # the most bytes alive in any section, which every arena needs
    int64_t n_neighbours        # summed over all buffers: how many overlap it in time, itself too; by pack_fill_carry
    int64_t n_carried           # entries that `carry` will need
    int32_t *id                 # the caller's index of buffer i
    int32_t *start              # first section of buffer i's lifetime
    int32_t *stop               # one past the last section of buffer i's lifetime
    int32_t *birth              # the time of birth; for the planner a position in the graph
    int32_t *life               # how long buffer i is alive, in units of `birth`
    int64_t *size
    int32_t *born               # [n_sections + 1] first buffer born in section k or later
    int64_t *live               # [n_sections] bytes of the buffers alive in section k
    int64_t *peak               # [n] the most bytes live in any section of buffer i
    int64_t *offset             # [n] the packing under construction, -1 for what is not placed
    int64_t *best               # [n] the best complete packing so far
    uint64_t *keys              # [2 n + 1] scratch of the sorts; other functions use it between sorts
    int32_t *order              # [n] buffers in the order in which a pass places them; pack_sort fills it
    int32_t *turn               # [n] rank of buffer i by birth, then by the caller's index; pack_settle fills it
    int32_t *carry_begin        # [n_sections + 1] where section k begins in `carry`; NULL until pack_fill_carry
    int32_t *carry              # for each section, the buffers alive in it that were born in an earlier section
    void *memory                # the one allocation of all arrays but carry_begin and carry
    void *carry_memory          # the allocation of carry_begin and carry


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
cdef int pack_prepared(gs_pack *p, int64_t capacity, int64_t budget, gs_pack_result *out) noexcept nogil
cdef int pack_prepare(gs_pack *p, int32_t n, int32_t n_times, const int32_t *lower, const int32_t *upper,
                      const int64_t *size) noexcept nogil
