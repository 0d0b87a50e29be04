/* block_traits.h -- properties of a type's blocks: compile-time constants where `type` is one.
 *
 * Included by matmul_x86.h and matmul_neon.h.
 */
INLINE int bytes_of(const int type) {
    switch (type) {
#define GS_X(name, number, called, block, size) case number: return size;
    GS_TYPES(GS_X)
#undef GS_X
    default: return 0;
    }
}

INLINE int units_of(const int type) { /* how many steps of 32 elements a block has */
    return (type >= GS_TYPE_Q2_K && type <= GS_TYPE_Q6_K) || type == GS_TYPE_IQ4_XS ? 8 : 1;
}

INLINE int halves_of(const int type) { /* how many scales 32 elements have */
    return type == GS_TYPE_Q2_K || type == GS_TYPE_Q3_K || type == GS_TYPE_Q6_K ? 2 : 1;
}

INLINE int has_fifths(const int type) { /* whether four bytes before a block's nibbles hold fifth bits */
    return type == GS_TYPE_Q5_0 || type == GS_TYPE_Q5_1;
}

INLINE int has_min(const int type) {
    return type == GS_TYPE_Q4_1 || type == GS_TYPE_Q5_1 || type == GS_TYPE_Q2_K || type == GS_TYPE_Q4_K
        || type == GS_TYPE_Q5_K;
}
