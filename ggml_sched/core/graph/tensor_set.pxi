# TensorSet: an open-addressing hash set of tensors with dense ids.
#
# Owns the slot table; the owner of the set (a graph) keeps the tensors alive.  Invariant: linear probing over a prime
# capacity of at least twice the number of members, so a probe always ends.  Corresponds to ggml_hash_set.

cdef bint is_prime(int64_t x) noexcept nogil:
    cdef int64_t d = 3
    if x % 2 == 0:
        return x == 2
    while d * d <= x:
        if x % d == 0:
            return False
        d += 2
    return x > 1


cdef class TensorSet:
    """Maps each tensor of a tuple to its position; members are compared by identity."""

    def __cinit__(self, tuple tensors not None):
        cdef Py_ssize_t i
        cdef int64_t h
        self.tensors = tensors
        self.capacity = max(2 * len(tensors), 2) | 1
        while not is_prime(self.capacity):
            self.capacity += 2
        self.slots = <int32_t *>malloc(self.capacity * sizeof(int32_t))
        if self.slots == NULL:
            raise no_host_memory(f"a hash set of {self.capacity} tensors")
        for h in range(self.capacity):
            self.slots[h] = -1
        for i in range(len(tensors)):
            self.slots[self.probe(tensors[i])] = <int32_t>i

    def __dealloc__(self):
        free(self.slots)

    cdef int64_t probe(self, object t):
        """The slot of `t`, or the empty slot where it would go."""
        cdef int64_t h = <int64_t>((<uint64_t><size_t><void *>t >> 4) % <uint64_t>self.capacity)
        while self.slots[h] >= 0 and self.tensors[self.slots[h]] is not t:
            h += 1
            if h == self.capacity:
                h = 0
        return h

    cdef int32_t find(self, object t):
        """The position of `t`, -1 if it is not a member."""
        return self.slots[self.probe(t)]
