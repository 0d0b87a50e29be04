# TensorSet: an open-addressing hash set of tensors with dense ids.
#
# Owns the table (gs_seats, tensor.pxd); the owner of the set (a graph) keeps the tensors alive.  Invariant: at least half
# of the table is free, so a search always ends.  Corresponds to ggml_hash_set.

cdef int seats_init(gs_seats *seats, int64_t n) noexcept nogil:
    """Room for n tensors; GS_NO_HOST_MEMORY."""
    cdef int bits = 4
    while (<int64_t>1 << bits) < 2 * n:
        bits += 1
    seats.shift = 64 - bits
    seats.seat = <gs_seat *>calloc(<size_t>1 << bits, sizeof(gs_seat))
    return GS_NO_HOST_MEMORY if seats.seat == NULL else GS_OK


cdef class TensorSet:
    """Maps each tensor of a tuple to its position; members are compared by identity."""

    def __cinit__(self, tuple tensors not None):
        cdef gs_seat *seat
        cdef Py_ssize_t i
        self.tensors = tensors
        if seats_init(&self.seats, len(tensors)) != GS_OK:
            raise no_host_memory(f"a hash set of {len(tensors)} tensors")
        for i in range(len(tensors)):
            seat = seats_find(&self.seats, PyTuple_GET_ITEM(tensors, i))
            seat.of, seat.at = PyTuple_GET_ITEM(tensors, i), <int32_t>i

    def __dealloc__(self):
        free(self.seats.seat)

    cdef int32_t find(self, object t):
        """The position of `t`, -1 if it is not a member."""
        cdef gs_seat *seat = seats_find(&self.seats, <void *>t)
        return -1 if seat.of == NULL else seat.at
