# TensorSet: an open-addressing hash set of tensors with dense ids.
#
# Owns the table (gs_tensor_table, tensor.pxd), and keeps its tensors alive.  Invariant: at least half of the table is
# free, so a search always ends.  Corresponds to ggml_hash_set.

cdef int table_init(gs_tensor_table *table, int64_t n) noexcept nogil:
    """Room for n tensors; GS_NO_HOST_MEMORY."""
    cdef int bits = 4
    while (<int64_t>1 << bits) < 2 * n:
        bits += 1
    table.shift = 64 - bits
    table.slot = <gs_table_slot *>calloc(<size_t>1 << bits, sizeof(gs_table_slot))
    return GS_NO_HOST_MEMORY if table.slot == NULL else GS_OK


cdef class TensorSet:
    """Maps each tensor of a tuple to its position; members are compared by identity."""

    def __cinit__(self, tuple tensors not None):
        cdef gs_table_slot *slot
        cdef Py_ssize_t i
        self.tensors = tensors
        if table_init(&self.table, len(tensors)) != GS_OK:
            raise no_host_memory(f"a hash set of {len(tensors)} tensors")
        for i in range(len(tensors)):
            slot = table_find(&self.table, PyTuple_GET_ITEM(tensors, i))
            slot.of, slot.at = PyTuple_GET_ITEM(tensors, i), <int32_t>i

    def __dealloc__(self):
        free(self.table.slot)

    cdef int32_t find(self, object t):
        """The position of `t`, -1 if it is not a member."""
        cdef gs_table_slot *slot = table_find(&self.table, <void *>t)
        return -1 if slot.of == NULL else slot.at
