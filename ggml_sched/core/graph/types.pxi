# Types: element and block types, their sizes, and checked shape arithmetic.
#
# Owns the type table (ggml's numbers and names).  Invariant: every size that
# leaves this file went through include/ggml_sched/checked.h.
# Corresponds to ggml's type_traits, ggml_row_size and ggml_nbytes.

class Type(enum.IntEnum):
    """Element types, numbered and named as in ggml; `str(t)` is ggml's lower-case name."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39

    def __str__(self):
        return _TYPE_NAMES[int(self)]

    @property
    def block_size(self):
        """Elements per block (1 for plain types)."""
        return traits[<int>int(self)].block_size

    @property
    def type_size(self):
        """Bytes per block."""
        return traits[<int>int(self)].type_size

    @property
    def is_quantized(self):
        return traits[<int>int(self)].block_size > 1


cdef enum:
    N_TYPES = 64
    T_F32 = 0
    T_F16 = 1
    T_I8 = 24
    T_I16 = 25
    T_I32 = 26
    T_I64 = 27
    T_F64 = 28
    T_BF16 = 30

cdef gs_type_traits traits[N_TYPES]
memset(traits, 0, sizeof(traits))

cdef dict _TYPE_NAMES = {}
cdef dict _TYPE_BY_NAME = {}
cdef list _TYPE_OBJECTS = [None] * N_TYPES


def _fill_type_table():
    sizes = {
        "F32": (1, 4), "F16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
        "Q5_1": (32, 24), "Q8_0": (32, 34), "Q8_1": (32, 36), "Q2_K": (256, 84), "Q3_K": (256, 110),
        "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "Q8_K": (256, 292),
        "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ3_XXS": (256, 98), "IQ1_S": (256, 50),
        "IQ4_NL": (32, 18), "IQ3_S": (256, 110), "IQ2_S": (256, 82), "IQ4_XS": (256, 136),
        "I8": (1, 1), "I16": (1, 2), "I32": (1, 4), "I64": (1, 8), "F64": (1, 8), "IQ1_M": (256, 56),
        "BF16": (1, 2), "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17),
    }
    k_quants = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"}
    for member in Type:
        block, size = sizes[member.name]
        traits[<int>member.value].block_size = block
        traits[<int>member.value].type_size = size
        # ggml spells the k-quants with a capital K ("q4_K").
        name = member.name.lower()
        if member.name in k_quants:
            name = name[:-1] + "K"
        _TYPE_NAMES[member.value] = name
        _TYPE_BY_NAME[name] = member.value
        _TYPE_BY_NAME[name.lower()] = member.value
        _TYPE_OBJECTS[member.value] = member


_fill_type_table()


cdef int type_id(object type) except -1:
    """The number of a type given as `gs.Type`, ggml name or number; GraphError if unknown."""
    cdef int number
    if isinstance(type, str):
        found = _TYPE_BY_NAME.get(type)
        if found is None:
            found = _TYPE_BY_NAME.get(type.lower())
        if found is None:
            raise GraphError(f"unknown tensor type {type!r}")
        return found
    if isinstance(type, (int, Type)) and not isinstance(type, bool):
        if 0 <= type < N_TYPES:
            number = type
            if traits[number].block_size > 0:
                return number
        raise GraphError(f"unknown tensor type number {int(type)}")
    raise TypeError(f"a type is a gs.Type or its name, not {type!r}")


cdef str numbers_of(const int64_t *n):
    """How messages give extents or strides."""
    return f"[{n[0]}, {n[1]}, {n[2]}, {n[3]}]"


cdef inline bint layout_is_empty(const gs_layout *a) noexcept nogil:
    return a.ne[0] == 0 or a.ne[1] == 0 or a.ne[2] == 0 or a.ne[3] == 0


cdef int layout_set_nbytes(gs_layout *a) noexcept nogil:
    """Bytes from the first to the last element of a layout, by its strides.

    GS_OVERFLOW for elements that 63 bits do not count, too: with strides of 0 they take few bytes.
    """
    cdef int64_t total, step, count = 1
    cdef int i
    cdef int block = traits[a.type].block_size
    if layout_is_empty(a):
        a.nbytes = 0
        return GS_OK
    for i in range(GS_MAX_DIMS):
        if gs_checked_mul(count, a.ne[i], &count) != GS_OK:
            return GS_OVERFLOW
    if block == 1:
        total = traits[a.type].type_size
        i = 0
    else:
        if gs_checked_mul(a.ne[0] // block, a.nb[0], &total) != GS_OK:
            return GS_OVERFLOW
        i = 1
    while i < GS_MAX_DIMS:
        if gs_checked_mul(a.ne[i] - 1, a.nb[i], &step) != GS_OK or gs_checked_add(total, step, &total) != GS_OK:
            return GS_OVERFLOW
        i += 1
    a.nbytes = total
    return GS_OK


cdef int layout_set_dense(gs_layout *a) noexcept nogil:
    """Fill in the strides and byte size of a contiguous tensor of type and ne."""
    cdef int i
    cdef int64_t row
    a.nb[0] = traits[a.type].type_size
    if gs_checked_mul(a.ne[0] // traits[a.type].block_size, a.nb[0], &row) != GS_OK:
        return GS_OVERFLOW
    a.nb[1] = row
    for i in range(2, GS_MAX_DIMS):
        if gs_checked_mul(a.nb[i - 1], a.ne[i - 1], &a.nb[i]) != GS_OK:
            return GS_OVERFLOW
    return layout_set_nbytes(a)


cdef inline bint layout_contiguous(const gs_layout *a) noexcept nogil:
    """No gaps and no reordering; dimensions of one element may have any stride."""
    cdef int64_t expected = traits[a.type].type_size
    cdef int i
    if a.ne[0] != traits[a.type].block_size and a.nb[0] != expected:
        return False
    expected *= a.ne[0] // traits[a.type].block_size
    for i in range(1, GS_MAX_DIMS):
        if a.ne[i] != 1:
            if a.nb[i] != expected:
                return False
            expected *= a.ne[i]
    return True


cdef bint layout_may_overlap(const gs_layout *a) noexcept nogil:
    """Whether elements may share bytes: False where each dimension steps over all that the finer ones cover."""
    cdef int64_t count[GS_MAX_DIMS]
    cdef int64_t covered = traits[a.type].type_size
    cdef int i, k, finest
    cdef unsigned int done = 0
    if layout_is_empty(a):
        return False
    for i in range(GS_MAX_DIMS):
        count[i] = a.ne[i]
    count[0] //= traits[a.type].block_size
    for i in range(GS_MAX_DIMS):
        finest = -1
        for k in range(GS_MAX_DIMS):
            if not done >> k & 1 and (finest < 0 or a.nb[k] < a.nb[finest]):
                finest = k
        done |= <unsigned int>1 << finest
        if count[finest] > 1:
            if a.nb[finest] < covered:
                return True
            covered += (count[finest] - 1) * a.nb[finest]
    return False


cdef bint layout_permutes(const gs_layout *a, const gs_layout *b) noexcept nogil:
    """Whether the dimensions of a are those of b, extents with their strides, in any order."""
    cdef int i, k
    cdef unsigned int used = 0
    for i in range(GS_MAX_DIMS):
        for k in range(GS_MAX_DIMS):
            if not used >> k & 1 and a.ne[i] == b.ne[k] and a.nb[i] == b.nb[k]:
                used |= <unsigned int>1 << k
                break
        else:
            return False
    return True


cdef inline int64_t layout_n_elements(const gs_layout *a) noexcept nogil:
    return a.ne[0] * a.ne[1] * a.ne[2] * a.ne[3]


cdef inline bint layout_can_repeat(const gs_layout *small, const gs_layout *big) noexcept nogil:
    """ggml_can_repeat: every extent of `big` is a multiple of `small`'s."""
    cdef int i
    if layout_is_empty(small):
        return layout_is_empty(big)
    for i in range(GS_MAX_DIMS):
        if big.ne[i] % small.ne[i]:
            return False
    return True
