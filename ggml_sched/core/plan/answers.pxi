# Support cache: the results of the support queries to the backends of a scheduler, by kind of node.
#
# Owns a hash table of records; the key of a record is the sequence of words that describes the kind.  Invariants:
# lookup returns a record only if all words are equal, and there are never more than MAX_ANSWERS records.

cdef enum:
    MAX_ANSWERS = 4096          # kinds; a full cache is cleared

cdef class Answers:
    """Results of the support queries to `n_backends` backends, by kind of node."""

    def __cinit__(self, int32_t n_backends):
        self.n_backends = n_backends

    def __dealloc__(self):
        self.forget()

    cdef void forget(self) noexcept:
        """Clear the cache."""
        cdef int32_t i
        if self.slot != NULL:
            for i in range(2 * MAX_ANSWERS):
                free(self.slot[i])
        free(self.slot)
        self.slot = NULL
        self.n = 0

    cdef const gs_answer *find(self, uint64_t hash, const uint64_t *words, int32_t n_words) noexcept:
        """Look up the record of a kind; NULL if there is none."""
        cdef const gs_answer *found
        cdef int32_t at = <int32_t>(hash & <uint64_t>(2 * MAX_ANSWERS - 1))
        if self.slot == NULL:
            return NULL
        while self.slot[at] != NULL:
            found = self.slot[at]
            if found.n_words == n_words and memcmp(found.words, words, n_words * sizeof(uint64_t)) == 0:
                return found
            at = (at + 1) & (2 * MAX_ANSWERS - 1)
        return NULL

    cdef void add(self, uint64_t hash, const uint64_t *words, int32_t n_words, const unsigned char *bits,
                  const int64_t *sizes) noexcept:
        """Add a record for a kind without one; does nothing if malloc fails."""
        cdef gs_answer *record
        cdef int32_t at = <int32_t>(hash & <uint64_t>(2 * MAX_ANSWERS - 1))
        cdef size_t n_sizes = self.n_backends * sizeof(int64_t)
        if self.n == MAX_ANSWERS:
            self.forget()
        if self.slot == NULL:
            self.slot = <gs_answer **>calloc(2 * MAX_ANSWERS, sizeof(gs_answer *))
        record = <gs_answer *>malloc(sizeof(gs_answer) + n_sizes + n_words * sizeof(uint64_t) + self.n_backends)
        if self.slot == NULL or record == NULL:
            free(record)
            return
        record.n_words = n_words
        record.size = <int64_t *>(record + 1)
        record.words = <uint64_t *>(record.size + self.n_backends)
        record.bits = <unsigned char *>(record.words + n_words)
        memcpy(record.size, sizes, n_sizes)
        memcpy(record.words, words, n_words * sizeof(uint64_t))
        memcpy(record.bits, bits, self.n_backends)
        while self.slot[at] != NULL:
            at = (at + 1) & (2 * MAX_ANSWERS - 1)
        self.slot[at] = record
        self.n += 1
