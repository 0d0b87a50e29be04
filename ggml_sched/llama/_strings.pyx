# cython: language_level=3, nonecheck=False, boundscheck=False
"""Strings of a GGUF file as a table by text, and the merging of a text's letters into tokens.

Owns hash tables over bytes of the file; strings become Python objects only when one is accessed.  Invariant: every
string lies inside the memory that its table keeps alive; a table does not change after it was made, so that several
threads may read it.  Compiled, because a vocabulary has 262,144 strings, and as many merges.  Corresponds to
llama.cpp's llama_vocab::impl (token_to_id, bpe_ranks) and to its llm_tokenizer_spm and llm_tokenizer_bpe sessions.
"""

cimport cython
from cpython.buffer cimport PyBuffer_Release
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memcpy

from ggml_sched.llama._arrays cimport take

import os

cdef enum:
    LENGTH = 8          # bytes in which GGUF stores a string's length, before its text

cdef extern from *:
    """
    /* The two halves of the 128-bit product a * b, combined by exclusive or. */
    static inline uint64_t gl_fold(uint64_t a, uint64_t b)
    {
        __extension__ const unsigned __int128 product = (unsigned __int128)a * b;
        return (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    """
    uint64_t gl_fold(uint64_t a, uint64_t b) noexcept nogil

# Secret random numbers of the hash: with known ones, a file's author could choose strings that all fall into one
# slot.  `gl_fold` uses the upper half of the product for the same reason: in the lower half, changing the top bit of a
# word would change just the top bit of the result, and a change of the next word could cancel that.
cdef uint64_t SEED = int.from_bytes(os.urandom(8), "little")
cdef uint64_t FACTOR = int.from_bytes(os.urandom(8), "little") | 1


# -- lengths and hashes of strings ---------------------------------------------------------------------------------


cdef inline uint64_t mixed(uint64_t h, uint64_t word) noexcept nogil:
    return gl_fold(h ^ word, FACTOR)


cdef uint64_t hash_of(const uint8_t *text, size_t n) noexcept nogil:
    cdef uint64_t h = SEED ^ n, word
    while n >= 8:
        memcpy(&word, text, 8)
        h = mixed(h, word)
        text += 8
        n -= 8
    word = 0
    memcpy(&word, text, n)
    h = mixed(h, word)
    return mixed(h, 0)


cdef uint64_t length_at(const uint8_t *memory, uint64_t start) noexcept nogil:
    cdef uint64_t n = 0
    cdef int i
    for i in range(LENGTH):
        n |= <uint64_t>memory[start + i] << (8 * i)
    return n


cdef uint64_t length_inside(const uint8_t *memory, uint64_t size, uint64_t start) noexcept nogil:
    """The length of the string at byte `start`, limited so that the string ends inside the `size` bytes of memory.

    The memory may be a mapped file in which the length has changed since the string was checked.
    """
    return min(length_at(memory, start), size - start - LENGTH)


cdef int64_t count_chars(const uint8_t *text, size_t n) noexcept nogil:
    """The number of characters of a text in UTF-8; -1 for bytes that are no UTF-8."""
    cdef size_t i = 0, more, k
    cdef int64_t chars = 0
    cdef uint8_t first, low, high
    while i < n:
        first, low, high = text[i], 0x80, 0xbf
        i += 1
        chars += 1
        if first < 0x80:
            continue
        if first < 0xc2 or first > 0xf4:
            return -1
        more = 1 if first < 0xe0 else 2 if first < 0xf0 else 3
        if first == 0xe0:           # refuse encodings longer than needed
            low = 0xa0
        elif first == 0xed:         # refuse surrogates
            high = 0x9f
        elif first == 0xf0:
            low = 0x90
        elif first == 0xf4:         # refuse characters above U+10FFFF
            high = 0x8f
        if more > n - i:
            return -1
        for k in range(more):
            if not low <= text[i + k] <= high:
                return -1
            low, high = 0x80, 0xbf
        i += more
    return chars


@cython.final
cdef class _Strings:
    """Strings in the bytes of a file: `data` are these bytes, `size` their number, and `begins` has for each of n
    strings the byte at which its length stands, with the text after it."""

    cdef Py_buffer views[2]
    cdef object memory, starts
    cdef const uint8_t *data
    cdef uint64_t *begins
    cdef uint64_t size
    cdef Py_ssize_t n

    def __cinit__(self, memory, starts, bint writable=False):
        self.memory, self.starts = memory, starts
        self.size = take(memory, &self.views[0], b"B", 1, False)
        self.n = take(starts, &self.views[1], b"QL", sizeof(uint64_t), writable)
        self.data, self.begins = <const uint8_t *>self.views[0].buf, <uint64_t *>self.views[1].buf

    def __dealloc__(self):
        PyBuffer_Release(&self.views[0])
        PyBuffer_Release(&self.views[1])

    cdef int check(self) except -1:
        """ValueError if a string does not lie inside the bytes of the file."""
        cdef Py_ssize_t i
        cdef uint64_t at
        for i in range(self.n):
            at = self.begins[i]
            if at > self.size or self.size - at < LENGTH or length_at(self.data, at) > self.size - at - LENGTH:
                raise ValueError(f"string {i} does not lie inside {self.size} bytes")
        return 0


def find_strings(memory, uint64_t pos, starts):
    """Find len(starts) strings that follow each other in `memory` from byte `pos` on; `starts` gets where each begins.

    Returns (the number of strings found, the byte after the last of them).  The number is less than len(starts) if the
    next string does not lie inside the memory.
    """
    cdef _Strings strings = _Strings(memory, starts, True)
    cdef uint64_t size = strings.size, n
    cdef Py_ssize_t i
    for i in range(strings.n):
        if pos > size or size - pos < LENGTH:
            return i, pos
        n = length_at(strings.data, pos)
        if n > size - pos - LENGTH:
            return i, pos
        strings.begins[i] = pos
        pos += LENGTH + n
    return strings.n, pos


# -- the table of strings ---------------------------------------------------------------------------------------------


cdef struct Slot:
    uint32_t hash           # the upper half of the hash of the string's text
    uint32_t number         # the number of the string, plus one; 0: the slot is free


@cython.final
cdef class StringTable:
    """A hash table that finds strings of an array of a GGUF file by text: their numbers, of equal strings the last.

    `memory` and `starts` are those of `find_strings`; ValueError if a string does not lie inside the memory.  Empty
    strings cannot be found.
    """

    cdef _Strings strings
    cdef const uint8_t *data
    cdef const uint64_t *begins
    cdef uint64_t size
    cdef Py_ssize_t n
    cdef Slot *slots
    cdef uint64_t mask

    def __cinit__(self, memory, starts):
        cdef uint64_t n_slots = 16
        cdef Py_ssize_t i
        self.strings = _Strings(memory, starts)
        self.data, self.begins = self.strings.data, self.strings.begins
        self.size, self.n = self.strings.size, self.strings.n
        if self.n >= 1 << 30:
            raise ValueError(f"a table of {self.n} strings")
        self.strings.check()
        while n_slots < 2 * <uint64_t>self.n:
            n_slots *= 2
        self.mask = n_slots - 1
        self.slots = <Slot *>calloc(n_slots, sizeof(Slot))
        if self.slots == NULL:
            raise MemoryError
        with nogil:
            for i in range(self.n):
                self.insert(i)

    def __dealloc__(self):
        free(self.slots)

    cdef void insert(self, Py_ssize_t i) noexcept nogil:
        cdef const uint8_t *text = self.text_at(i)
        cdef size_t n = self.size_at(i)
        cdef uint64_t h, at
        cdef Slot *slot
        if n == 0:
            return
        h = hash_of(text, n)
        at = h & self.mask
        while True:
            slot = &self.slots[at]
            if slot.number == 0 or slot.hash == h >> 32 and self.is_text(slot.number - 1, text, n):
                slot.hash = h >> 32
                slot.number = <uint32_t>i + 1
                return
            at = (at + 1) & self.mask

    cdef const uint8_t *text_at(self, Py_ssize_t i) noexcept nogil:
        return self.data + self.begins[i] + LENGTH

    cdef size_t size_at(self, Py_ssize_t i) noexcept nogil:
        return length_inside(self.data, self.size, self.begins[i])

    cdef bint is_text(self, Py_ssize_t i, const uint8_t *text, size_t n) noexcept nogil:
        return self.size_at(i) == n and memcmp(self.text_at(i), text, n) == 0

    cdef int32_t find(self, const uint8_t *text, size_t n) noexcept nogil:
        """The number of the string with this text; -1 if there is none."""
        cdef uint64_t h, at
        cdef Slot *slot
        if n == 0:
            return -1
        h = hash_of(text, n)
        at = h & self.mask
        while True:
            slot = &self.slots[at]
            if slot.number == 0:
                return -1
            if slot.hash == h >> 32 and self.is_text(slot.number - 1, text, n):
                return slot.number - 1
            at = (at + 1) & self.mask

    def __reduce__(self):
        return StringTable, (bytes(self.strings.memory), self.strings.starts)

    def __len__(self):
        return self.n

    def get(self, str text not None):
        """The number of the string with this text; None if there is none, as for a text with a lone surrogate, which
        UTF-8 cannot express."""
        cdef Py_ssize_t n
        cdef const char *data
        cdef int32_t found
        try:
            data = PyUnicode_AsUTF8AndSize(text, &n)
        except UnicodeEncodeError:
            return None
        found = self.find(<const uint8_t *>data, n)
        return None if found < 0 else found

    def __contains__(self, str text):
        return self.get(text) is not None

    def __getitem__(self, str text):
        found = self.get(text)
        if found is None:
            raise KeyError(text)
        return found

    def text(self, Py_ssize_t i):
        """String i; [EMPTY_i] for an empty one.  Bytes that are no UTF-8 become lone surrogates."""
        if not 0 <= i < self.n:
            raise IndexError(f"string {i} of {self.n}")
        if self.size_at(i) == 0:
            return f"[EMPTY_{i}]"
        return PyUnicode_DecodeUTF8(<const char *>self.text_at(i), self.size_at(i), "surrogateescape")

    def measure(self):
        """(characters of all strings together, characters of the longest string, the number of that string, the number
        of the first string that is no UTF-8: -1 if all are)."""
        cdef int64_t chars, total = 0, longest = 0
        cdef Py_ssize_t i, which = 0, wrong = -1
        with nogil:
            for i in range(self.n):
                chars = count_chars(self.text_at(i), self.size_at(i))
                if chars < 0:
                    if wrong < 0:
                        wrong = i
                    chars = self.size_at(i)
                total += chars
                if chars > longest:
                    longest, which = chars, i
        return total, longest, which, wrong


# -- merging parts of a text into tokens ------------------------------------------------------------------------------


cdef struct Part:
    size_t start            # the byte of the text at which this part of it begins
    size_t size             # bytes; 0: this part was merged into the part before it
    int32_t token           # the token that has the part's text; -1: none
    Py_ssize_t before       # index of the part before this one; -1: none
    Py_ssize_t after        # index of the part after this one; -1: none


cdef struct Pair:
    double cost             # the pair of least cost is merged first
    Py_ssize_t left         # index of a part
    Py_ssize_t right        # index of the part after it
    size_t size             # bytes of both parts; if their sizes have another sum, one of them was merged since
    int32_t token           # the token that has the text of both parts together


cdef inline bint precedes(const Pair *a, const Pair *b) noexcept nogil:
    return a.cost < b.cost or a.cost == b.cost and a.left < b.left


cdef class _Work:
    """Memory for merging: the parts of a text, and a heap of the pairs of neighbours that may be merged.

    One object serves one text after the other, and grows when a text needs it.
    """

    cdef Part *parts
    cdef Pair *pairs
    cdef Py_ssize_t n_parts, n_pairs, room

    def __dealloc__(self):
        free(self.parts)
        free(self.pairs)

    cdef int make_room(self, Py_ssize_t n) except -1:
        """Make room for n parts, and for 2 n pairs in the heap, which are enough: it has n - 1 pairs at first, and each
        of at most n - 1 merges takes one pair and adds at most two."""
        cdef void *grown
        if n > self.room:
            if <size_t>n > (<size_t>1 << 62) // (2 * sizeof(Pair)):
                raise MemoryError
            self.room = 0
            grown = realloc(self.parts, n * sizeof(Part))
            if grown == NULL:
                raise MemoryError
            self.parts = <Part *>grown
            grown = realloc(self.pairs, 2 * n * sizeof(Pair))
            if grown == NULL:
                raise MemoryError
            self.pairs = <Pair *>grown
            self.room = n
        return 0

    cdef void push(self, Pair pair) noexcept nogil:
        cdef Py_ssize_t at = self.n_pairs, parent
        self.n_pairs += 1
        while at:
            parent = (at - 1) // 2
            if not precedes(&pair, &self.pairs[parent]):
                break
            self.pairs[at] = self.pairs[parent]
            at = parent
        self.pairs[at] = pair

    cdef Pair pop(self) noexcept nogil:
        cdef Pair first = self.pairs[0], last
        cdef Py_ssize_t at = 0, child
        self.n_pairs -= 1
        last = self.pairs[self.n_pairs]
        while True:
            child = 2 * at + 1
            if child >= self.n_pairs:
                break
            if child + 1 < self.n_pairs and precedes(&self.pairs[child + 1], &self.pairs[child]):
                child += 1
            if not precedes(&self.pairs[child], &last):
                break
            self.pairs[at] = self.pairs[child]
            at = child
        self.pairs[at] = last
        return first


cdef class _Merger:
    """Cuts a text into characters and merges neighbours: the pair of least cost first, the leftmost of equal ones."""

    cdef StringTable tokens

    cdef bint look_up(self, const uint8_t *text, const Part *left, const Part *right, Pair *pair) noexcept nogil:
        """Look up a pair of neighbours: True, with its cost and token in `pair`, if the two may be merged."""
        return False

    cdef int merge(self, const uint8_t *text, Py_ssize_t n, _Work work) except -1:
        """Cut a text of n bytes and merge its parts in `work`; parts of size 0 are merged into the part before them."""
        cdef Py_ssize_t i = 0, k = 0, size
        work.make_room(n)
        while i < n:
            size = 1 if text[i] < 0x80 else 2 if text[i] < 0xe0 else 3 if text[i] < 0xf0 else 4
            size = min(size, n - i)
            work.parts[k] = Part(i, size, self.tokens.find(text + i, size), k - 1, k + 1)
            i += size
            k += 1
        work.n_parts, work.n_pairs = k, 0
        if k:
            work.parts[k - 1].after = -1
            with nogil:
                self.merge_parts(text, work)
        return 0

    cdef void merge_parts(self, const uint8_t *text, _Work work) noexcept nogil:
        cdef Py_ssize_t i
        cdef Pair pair
        cdef Part *left
        cdef Part *right
        for i in range(work.n_parts - 1):
            self.offer(text, work, i, i + 1)
        while work.n_pairs:
            pair = work.pop()
            left, right = &work.parts[pair.left], &work.parts[pair.right]
            if left.size == 0 or right.size == 0 or left.size + right.size != pair.size:
                continue                # the pair is out of date: one of its parts was merged since
            left.size, left.token, left.after = pair.size, pair.token, right.after
            right.size = 0
            if left.after >= 0:
                work.parts[left.after].before = pair.left
                self.offer(text, work, pair.left, left.after)
            if left.before >= 0:
                self.offer(text, work, left.before, pair.left)

    cdef void offer(self, const uint8_t *text, _Work work, Py_ssize_t left, Py_ssize_t right) noexcept nogil:
        cdef Pair pair
        if self.look_up(text, &work.parts[left], &work.parts[right], &pair):
            pair.left, pair.right = left, right
            pair.size = work.parts[left].size + work.parts[right].size
            work.push(pair)


@cython.final
cdef class ScoreMerger(_Merger):
    """Merges as SentencePiece: a pair whose text is a token may be merged, the one of the highest score first.

    `scores`, f32 [len(tokens)]; `bytes_`, i32 [256]: the token of each byte, -1 for none; `unknown`: the token for
    characters that no token has, -1 for none.
    """

    cdef Py_buffer views[2]
    cdef const float *scores
    cdef const int32_t *bytes_
    cdef int32_t unknown

    def __cinit__(self, StringTable tokens not None, scores, bytes_, int32_t unknown):
        cdef Py_ssize_t n_scores = take(scores, &self.views[0], b"f", sizeof(float), False)
        cdef Py_ssize_t n_bytes = take(bytes_, &self.views[1], b"il", sizeof(int32_t), False)
        if n_scores != tokens.n or n_bytes != 256:
            raise ValueError(f"{n_scores} scores and {n_bytes} bytes for {tokens.n} tokens")
        self.scores, self.bytes_ = <const float *>self.views[0].buf, <const int32_t *>self.views[1].buf
        self.tokens, self.unknown = tokens, unknown

    def __dealloc__(self):
        PyBuffer_Release(&self.views[0])
        PyBuffer_Release(&self.views[1])

    cdef bint look_up(self, const uint8_t *text, const Part *left, const Part *right, Pair *pair) noexcept nogil:
        pair.token = self.tokens.find(text + left.start, left.size + right.size)
        if pair.token < 0:
            return False
        pair.cost = -self.scores[pair.token]
        return True

    def encode(self, str text):
        """The ids of a text.  A character that is no token becomes the tokens of its bytes if all have one, else the
        unknown token."""
        cdef _Work work = _Work()
        cdef Py_ssize_t n, i, k
        cdef const uint8_t *data = <const uint8_t *>PyUnicode_AsUTF8AndSize(text, &n)
        cdef Part *part
        cdef bint known
        self.merge(data, n, work)
        ids = []
        for i in range(work.n_parts):
            part = &work.parts[i]
            if part.size == 0:
                continue
            if part.token >= 0:
                ids.append(part.token)
                continue
            known = True
            for k in range(<Py_ssize_t>part.size):
                known = known and self.bytes_[data[part.start + k]] >= 0
            if known:
                for k in range(<Py_ssize_t>part.size):
                    ids.append(self.bytes_[data[part.start + k]])
            elif self.unknown >= 0:
                ids.append(self.unknown)
        return ids


cdef struct Merge:
    uint64_t pair           # the left token << 32 | the right one
    uint32_t rank           # the number of the line that lists the pair, plus one; 0: the slot is free
    int32_t token           # the token that has the text of both together


@cython.final
cdef class RankMerger(_Merger):
    """Merges as GPT-2: a file lists the pairs that may be merged, as lines "left right", the first to be merged first.

    `wrong` is the number of the first line that is not two tokens whose texts together are a token; -1 if there is
    none.  With such a line nothing is merged.
    """

    cdef Merge *merges
    cdef uint64_t mask
    cdef bint whole_words
    cdef readonly Py_ssize_t wrong

    def __cinit__(self, StringTable tokens not None, memory, starts, bint whole_words):
        cdef _Strings strings = _Strings(memory, starts)
        cdef uint64_t n_slots = 16
        cdef Py_ssize_t i, n = strings.n
        if n >= 1 << 30:
            raise ValueError(f"{n} merges")
        self.tokens, self.whole_words, self.wrong = tokens, whole_words, -1
        while n_slots < 2 * <uint64_t>n:
            n_slots *= 2
        self.mask = n_slots - 1
        self.merges = <Merge *>calloc(n_slots, sizeof(Merge))
        if self.merges == NULL:
            raise MemoryError
        strings.check()
        with nogil:
            for i in range(n):
                if not self.add(i, strings.data + strings.begins[i]):
                    self.wrong = i
                    break
        if self.wrong >= 0:
            self.mask = 0
            self.merges[0].rank = 0

    def __dealloc__(self):
        free(self.merges)

    cdef bint add(self, Py_ssize_t rank, const uint8_t *string) noexcept nogil:
        """Add a line "left right" of the list of merges, with its rank; of equal lines the first one counts.

        False for a line of which a part, or both joined, is no token, and for one of more than 4096 bytes.
        """
        cdef size_t n = length_at(string, 0), at = 1
        cdef const uint8_t *line = string + LENGTH
        cdef int32_t left, right, both
        cdef uint8_t joined[4096]
        while at < n and line[at] != 32:        # a space that is the first character belongs to the left token
            at += 1
        if at + 1 >= n or n > sizeof(joined):
            return False
        left = self.tokens.find(line, at)
        right = self.tokens.find(line + at + 1, n - at - 1)
        memcpy(joined, line, at)
        memcpy(joined + at, line + at + 1, n - at - 1)
        both = self.tokens.find(joined, n - 1)
        if left < 0 or right < 0 or both < 0:
            return False
        cdef uint64_t pair = <uint64_t>left << 32 | <uint64_t>right
        cdef Merge *merge = self.slot(pair)
        if merge.rank == 0:
            merge.pair, merge.rank, merge.token = pair, <uint32_t>rank + 1, both
        return True

    cdef Merge *slot(self, uint64_t pair) noexcept nogil:
        """The slot of a pair, or the free slot in which it belongs."""
        cdef uint64_t at = mixed(mixed(SEED, pair), 0) & self.mask
        while self.merges[at].rank and self.merges[at].pair != pair:
            at = (at + 1) & self.mask
        return &self.merges[at]

    cdef bint look_up(self, const uint8_t *text, const Part *left, const Part *right, Pair *pair) noexcept nogil:
        if left.token < 0 or right.token < 0:
            return False
        cdef Merge *merge = self.slot(<uint64_t>left.token << 32 | <uint64_t>right.token)
        if merge.rank == 0:
            return False
        pair.cost, pair.token = merge.rank, merge.token
        return True

    def encode(self, list words):
        """The ids of `words`, tuples that begin with the text of a word; a character that is no token gets no id."""
        cdef _Work work = _Work()
        cdef Py_ssize_t n, i
        cdef const uint8_t *data
        cdef int32_t token
        ids = []
        for found in words:
            data = <const uint8_t *>PyUnicode_AsUTF8AndSize(found[0], &n)
            if self.whole_words:
                token = self.tokens.find(data, n)
                if token >= 0:
                    ids.append(token)
                    continue
            self.merge(data, n, work)
            for i in range(work.n_parts):
                if work.parts[i].size and work.parts[i].token >= 0:
                    ids.append(work.parts[i].token)
        return ids
