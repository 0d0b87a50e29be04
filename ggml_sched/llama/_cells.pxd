# The C view of _cells.

from libc.stdint cimport int32_t, int64_t, uint64_t

from ggml_sched._graph cimport Tensor


cdef class Cells:
    cdef readonly int64_t n_rows
    cdef readonly int64_t n_seq
    cdef readonly int64_t n_used        # rows that hold a token
    cdef readonly object positions      # i32 [n_rows]: the position of the token in each row; -1 for a free row
    cdef readonly object sets           # u64 [n_rows]: the sequences to which the row belongs, a bit for each
    cdef Py_buffer views[2]             # keep the memory of `positions` and `sets`, in this order, at its address
    cdef int32_t *position              # the elements of `positions`
    cdef uint64_t *set                  # the elements of `sets`
    cdef int64_t end                    # all rows from this one on are free
    cdef int64_t first_free             # all rows before this one are in use
    cdef void release(self) noexcept
    cdef void fill_mask(self, char *out, int64_t position, int64_t seq, int64_t n_kv, int64_t window,
                        bint half) noexcept nogil
    cdef int64_t put(self, int32_t position, int64_t seq) except -1
    cdef int check_room(self, int64_t n) except -1
    cdef int check(self, int64_t seq) except -1
    cdef object bit(self, int64_t seq)
    cdef object held(self, int64_t seq, int64_t start, stop)
    cdef int recount(self) except -1


cdef class TokenInputs:
    cdef int64_t n                      # tokens of the graph
    cdef Tensor tokens
    cdef Tensor positions
    cdef Tensor rows
    cdef list elements
    cdef list masks
    cdef Tensor state_row
