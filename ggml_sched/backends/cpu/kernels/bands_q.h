/* bands_q.h -- interleaved rows of quantised weights (interleave.h) times columns.
 *
 * Included by product_loops.h.  A lane of a vector is a row.  A step (32 elements) is LEVELS_OF_BAND vectors of levels,
 * four of each row; their products with a column are added in integers, exactly, then scaled once for all rows.  Few
 * columns are multiplied at once, at most BAND_COLUMNS; then the band, which is in the cache by then, is decoded again
 * for the next ones.  Many columns take panels (many_q.h), which are filled from bands here.
 */
#define BAND_COLUMNS GS_TILE_Q
#define FEW_BANDS 16            /* most columns for which no panel is filled */
#define LEVELS_OF_BAND 8
#define BAND_PARTS (GS_BAND / ROWS)
/* Loads before it are not used after it: compilers would keep bytes for later steps, and have no registers for them. */
#define AFRESH() __asm__ volatile("" : : : "memory")

/* Whether a type's rows are interleaved: not those of Q8_0 and Q6_K.  Memory limits their products of one column as
 * they are; those of Q6_K take 3 % less time with AVX-512, and 4 % more with AVX2. */
INLINE int has_bands(const int type) {
    return type != GS_TYPE_Q8_0 && type != GS_TYPE_Q6_K;
}

static int32_t few_bands(const gs_block_kind *kind) {
    return has_bands(kind->type) ? FEW_BANDS : 0;
}

/* Where a block of a band has its fields, for the ROWS rows of one part of it. */
typedef struct band_block {
    const uint8_t *head, *dwords;
} band_block;

/* Bytes of a block's head (interleave.h), and of the rest. */
INLINE int head_bytes(const int type) {
    return type == GS_TYPE_MXFP4 ? 1 : bytes_of(type) % 4 == 0 ? 4 : 2;
}

INLINE int tail_bytes(const int type) {
    return bytes_of(type) - head_bytes(type);
}

INLINE band_block block_at(const int type, const uint8_t *heads, const uint8_t *dwords, const int part) {
    const int size = type == GS_TYPE_MXFP4 ? 1 : 2;
    return (band_block){heads + size * ROWS * part, dwords + 4 * ROWS * part};
}

/* Where block number `block` of n of a band begins: its head at *head, the rest at *p, where the block before ended. */
INLINE void begin_block_of_band(const int type, const int64_t block, const int64_t n, const uint8_t **head,
                                const uint8_t **p) {
    const int bytes = GS_BAND * head_bytes(type), group = gs_head_group(head_bytes(type));
    if (group == 1 || block % group == 0) {
        *head = *p;
        *p += bytes * (group < n - block ? group : n - block);
    } else {
        *head += bytes;
    }
}

/* Of each row, field n of four bytes of its block. */
INLINE ivec dwords_of(const band_block *p, const int64_t n) {
    ivec v = IVEC_LOAD(p->dwords + GS_BAND * 4 * n);
    VEC_KEEP(v);
    return v;
}

/* Of each row, f16 number n of its block. */
INLINE vec half_of(const band_block *p, const int n) {
    return VEC_OF_HALVES(p->head + GS_BAND * 2 * n);
}

/* The bits of `mask` in each byte, shifted to the right, or to the left where `by` is negative. */
INLINE ivec bits_of(ivec v, const int by, const int mask) {
    return IVEC_AND(shifted(v, -by), IVEC_SET1_8(mask));
}

/* -- levels -------------------------------------------------------------------------------------------------------- */

/* Vector n of the levels of step first + j has elements 4 n .. 4 n + 3 of each row; `first` is a multiple of
 * straight_steps(type).  The levels of Q2_K and Q3_K are shifted to the left by `left` bits.  `both` keeps the four
 * bytes that two vectors share: vector n + 4 follows n. */
INLINE ivec level_of_band(const int type, const band_block *p, const int64_t first, const int j, const int left,
                          const int n, ivec *both) {
    ivec v;
    switch (type) {
    case GS_TYPE_Q2_K: return bits_of(dwords_of(p, 4 + 2 * first + n), 2 * j - left, 3 << left);
    case GS_TYPE_Q3_K:
        v = dwords_of(p, 3 + 3 * first + gs_place_of_lower(n));
        return IVEC_OR_AND(bits_of(v, 2 * j - left, 3 << left),
                           shifted(dwords_of(p, 3 + 3 * first + gs_place_of_upper(n % 4)), left + 2 - j - n / 4 * 4),
                           IVEC_SET1_8(4 << left));
    case GS_TYPE_Q4_K: return bits_of(dwords_of(p, 3 + 4 * first + j / 2 * 8 + n), j % 2 * 4, 15);
    case GS_TYPE_Q5_K:
        v = dwords_of(p, 3 + 5 * first + gs_place_of_lower(j / 2 * 8 + n));
        return IVEC_OR_AND(bits_of(v, j % 2 * 4, 15),
                           shifted(dwords_of(p, 3 + 5 * first + gs_place_of_upper(n % 4)), 4 - j - n / 4 * 4),
                           IVEC_SET1_8(16));
    }
    if (n < 4)
        *both = dwords_of(p, (type == GS_TYPE_IQ4_XS ? 1 + 4 * (first + j) : has_fifths(type)) + n);
    v = bits_of(*both, n / 4 * 4, 15);
    if (has_fifths(type))
        return IVEC_OR_AND(v, shifted(dwords_of(p, 0), 4 - n), IVEC_SET1_8(16));
    return type == GS_TYPE_IQ4_NL || type == GS_TYPE_IQ4_XS || type == GS_TYPE_MXFP4
        ? IVEC_SHUFFLE(table_of(type), v) : v;
}

/* Which vector of a step's levels is decoded i-th: two that share their bytes follow one another. */
INLINE int order_of_levels(const int type, const int i) {
    return units_of(type) == 1 || type == GS_TYPE_IQ4_XS ? i / 2 + i % 2 * 4 : i;
}

INLINE void levels_of_band(const int type, const band_block *p, const int64_t first, const int j,
                           ivec v[LEVELS_OF_BAND]) {
    ivec both;
    UNROLL for (int i = 0; i < LEVELS_OF_BAND; i++) {
        const int n = order_of_levels(type, i);
        v[n] = level_of_band(type, p, first, j, 0, n, &both);
    }
}

/* -- scales -------------------------------------------------------------------------------------------------------- */

/* What the eight steps of a block of 256 elements share: the integer scales and minima, four to a lane, those of IQ4_XS
 * as they are in blocks, those of Q3_K plus 32; d; minus dmin; and d for levels that are shifted (band_step). */
typedef struct band_scales {
    ivec scale[4], least[4];
    vec d, dmin, d_of_odd;
} band_scales;

INLINE void begin_band(const int type, const band_block *p, band_scales *of) {
    switch (type) {
    case GS_TYPE_Q2_K:
        UNROLL for (int i = 0; i < 4; i++) {
            ivec both = dwords_of(p, i);
            of->scale[i] = bits_of(both, 0, 15);
            of->least[i] = bits_of(both, 4, 15);
        }
        of->d = half_of(p, 0);
        of->dmin = VEC_MUL(half_of(p, 1), VEC_SET1(-1.0f));
        return;
    case GS_TYPE_Q3_K:
        UNROLL for (int i = 0; i < 4; i++)
            of->scale[i] = IVEC_OR(bits_of(dwords_of(p, i % 2), i / 2 * 4, 15),
                                   IVEC_LEFT(bits_of(dwords_of(p, 2), 2 * i, 3), 4));
        of->d = half_of(p, 0);
        return;
    case GS_TYPE_IQ4_XS:
        of->scale[0] = dwords_of(p, 0);
        of->scale[1] = IVEC_OF_WORDS(p->head + GS_BAND * 2);
        of->d = half_of(p, 0);
        return;
    default: {
        ivec a = dwords_of(p, 0), b = dwords_of(p, 1), c = dwords_of(p, 2);
        of->scale[0] = bits_of(a, 0, 63);
        of->least[0] = bits_of(b, 0, 63);
        of->scale[1] = IVEC_OR(bits_of(c, 0, 15), bits_of(a, 2, 48));
        of->least[1] = IVEC_OR(bits_of(c, 4, 15), bits_of(b, 2, 48));
        of->d = half_of(p, 0);
        of->dmin = VEC_MUL(half_of(p, 1), VEC_SET1(-1.0f));
    }
    }
}

/* Byte n of each lane, with its sign or without. */
INLINE vec byte_n(ivec v, const int n, const int has_sign) {
    if (has_sign)
        v = IVEC_RIGHT_SIGNED(n < 3 ? IVEC_LEFT_32(v, 24 - 8 * n) : v, 24);
    else
        v = IVEC_AND(n ? IVEC_RIGHT_32(v, 8 * n) : v, IVEC_SET1(255));
    return VEC_OF_INT(v);
}

/* The scales of step first + j, half by half if there are two, and its minima. */
INLINE void scales_of_band(const int type, const band_block *p, const int64_t first, const int j,
                           const band_scales *of, vec s[2], vec m[2]) {
    ivec low, high;
    switch (type) {
    case GS_TYPE_Q4_1: case GS_TYPE_Q5_1:
        s[0] = half_of(p, 0);
        m[0] = half_of(p, 1);
        return;
    case GS_TYPE_Q4_0: case GS_TYPE_Q5_0: case GS_TYPE_IQ4_NL: s[0] = half_of(p, 0); return;
    case GS_TYPE_MXFP4: s[0] = powers_of_lanes(IVEC_OF_BYTES(p->head)); return;
    case GS_TYPE_IQ4_XS:
        low = IVEC_AND(IVEC_RIGHT_BY(of->scale[0], 4 * (int)first + 4 * j), IVEC_SET1(15));
        high = IVEC_AND(IVEC_RIGHT_BY(of->scale[1], 2 * (int)first + 2 * j), IVEC_SET1(3));
        low = IVEC_SUB(IVEC_OR(low, IVEC_LEFT_32(high, 4)), IVEC_SET1(32));
        s[0] = VEC_MUL(of->d, VEC_OF_INT(low));
        return;
    }
    UNROLL for (int h = 0; h < halves_of(type); h++) {
        const int at = j * halves_of(type) + h;
        const int64_t i = first / 4 * halves_of(type) + at / 4;
        ivec scale = type == GS_TYPE_Q3_K ? IVEC_SUB_8(of->scale[i], IVEC_SET1_8(32)) : of->scale[i];
        s[h] = VEC_MUL(of->d, byte_n(scale, at % 4, !has_min(type)));
        if (has_min(type))
            m[h] = VEC_MUL(of->dmin, byte_n(of->least[i], at % 4, 0));
    }
}

/* -- products with few columns ------------------------------------------------------------------------------------- */

/* Sums of products of levels with columns.  With SUMS_16 they are taken in words of 16 bits first: in `in_16`, which is
 * then added to `dot`, or in `dot` itself (joins_halves). */
typedef struct band_sums {
    ivec dot[BAND_COLUMNS], in_16[BAND_COLUMNS];
} band_sums;

/* Whether the sums of a step's halves are scaled and added in integers, as one sum for f32: where they fit 16 bits. */
INLINE int joins_halves(const int type) {
    return type == GS_TYPE_Q2_K || type == GS_TYPE_Q3_K;
}

#if SUMS_16
/* How many results of dot2 are added in 16 bits: as many as never overflow, and no more than a sum has. */
INLINE int summed_in_16_bits(const int type) {
    return is_signed(type) ? 0 : halves_of(type) == 2 || has_fifths(type)
        || type == GS_TYPE_Q5_K || type == GS_TYPE_MXFP4 ? 4 : 8;
}
#else
#define summed_in_16_bits(type) 0
#endif

/* Begins the sums of half number h of a step, or of all its 32 elements where it has one scale. */
INLINE void begin_sums(const int type, const int N, const int h, const int left, const gs_cell_q *const *y,
                       band_sums *sums) {
    UNROLL for (int c = 0; c < N; c++) {
        int32_t begin = !has_offset(type) ? 0 : halves_of(type) == 1 ? y[c]->both : h ? y[c]->high : y[c]->low;
        begin = (int32_t)((uint32_t)begin << left);
        if (summed_in_16_bits(type) && joins_halves(type))
            begin &= 0xffff;
        sums->dot[c] = has_offset(type) ? IVEC_SET1(begin) : IVEC_ZERO;
    }
}

/* Adds the products of vector n of the levels, which is the i-th of them, to the sums. */
INLINE void add_levels(const int type, const int N, ivec v, const int n, const int i, const gs_cell_q *const *y,
                       band_sums *sums) {
    UNROLL for (int c = 0; c < N; c++) {
        const ivec four = IVEC_SET1((int)gs_load_u32(y[c]->q + 4 * n));
#if SUMS_16
        const int most = summed_in_16_bits(type);
        if (most > 0) {
            ivec products = dot2(v, four);
            if (joins_halves(type)) {
                sums->dot[c] = add_16(sums->dot[c], products);
                continue;
            }
            sums->in_16[c] = i % most ? add_16(sums->in_16[c], products) : products;
            if (i % most == most - 1)
                sums->dot[c] = add_pairs(sums->dot[c], sums->in_16[c]);
            continue;
        }
#endif
        (void)i;
        sums->dot[c] = dot4_vec(type, sums->dot[c], v, four);
    }
}

/* In each lane two words: byte n of the lane times 256 as the lower one, byte m times 256 as the upper one. */
INLINE ivec words_of(ivec v, const int n, const int m) {
    const int two = (m << 24) + (n << 8) + 0x00800080;
    return IVEC_SHUFFLE(v, IVEC_SET1_128(_mm_setr_epi32(two, two + 0x04000400, two + 0x08000800, two + 0x0c000c00)));
}

/* Adds the products of step first + j of one part of a band with N columns, whose cells begin at `cells`, to acc.  Cell
 * number `last` is read in place of those after it. */
INLINE void band_step(const int type, const int N, const int64_t last, const band_block *p, const int64_t first,
                      const int j, const band_scales *of, const gs_cell_q *cells, vec *acc[BAND_COLUMNS]) {
    /* Levels of odd steps stay two bits higher where that saves shifts: the step before has the same bytes. */
    const int halves = halves_of(type), each = LEVELS_OF_BAND / halves, left = joins_halves(type) ? j % 2 * 2 : 0;
    const gs_cell_q *y[BAND_COLUMNS];
    band_sums sums, of_first;
    UNROLL for (int c = 0; c < N; c++)
        y[c] = cells + (N <= 2 || c < N / 2 || c < last ? c : last);
    vec s[2], m[2];
    ivec both, scale = IVEC_ZERO;
    if (joins_halves(type)) {
        const ivec four = of->scale[first / 2 + j / 2];
        scale = type == GS_TYPE_Q3_K ? IVEC_SUB_8(four, IVEC_SET1_8(32)) : four;
    } else {
        scales_of_band(type, p, first, j, of, s, m);
    }
    UNROLL for (int h = 0; h < halves; h++) {
        begin_sums(type, N, h, left, y, &sums);
        UNROLL for (int i = h * each; i < h * each + each; i++) {
            const int n = order_of_levels(type, i);
            add_levels(type, N, level_of_band(type, p, first, j, left, n, &both), n, i, y, &sums);
        }
        if (joins_halves(type)) {
            if (h == 0)
                of_first = sums;
            continue;
        }
        UNROLL for (int c = 0; c < N; c++) {
            *acc[c] = VEC_FMA(VEC_OF_INT(sums.dot[c]), VEC_MUL(s[h], VEC_SET1(y[c]->d)), *acc[c]);
            if (has_min(type))
                *acc[c] = VEC_FMA(m[h], VEC_SET1(halves == 1 ? y[c]->sum_both : h ? y[c]->sum_high : y[c]->sum_low),
                                  *acc[c]);
        }
    }
    if (!joins_halves(type))
        return;
    UNROLL for (int c = 0; c < N; c++) {
        const int at = j % 2 * 2;
        const vec d = VEC_SET1(y[c]->d);
        ivec sum;
        if (summed_in_16_bits(type)) {
            sum = IVEC_ADD(IVEC_MADD(of_first.dot[c], words_of(scale, at, at)),
                           IVEC_MADD(sums.dot[c], words_of(scale, at + 1, at + 1)));
        } else {
            sum = IVEC_MADD(IVEC_PAIRS(of_first.dot[c], sums.dot[c]), words_of(scale, at, at + 1));
        }
        *acc[c] = VEC_FMA(VEC_OF_INT(sum), VEC_MUL(left > 0 ? of->d_of_odd : of->d, d), *acc[c]);
        if (has_min(type)) {
            sum = IVEC_MADD(words_of(of->least[first / 2 + j / 2], at, at + 1), IVEC_SET1(y[c]->both));
            *acc[c] = VEC_FMA(VEC_OF_INT(sum), VEC_MUL(of->dmin, d), *acc[c]);
        }
    }
}

/* Multiplies the rows row0 .. row1 - 1 of a group with n columns, from `column` on, which are in one tile; N is n or
 * little more: those beyond the last repeat it, and are not stored.  The parts of a band are multiplied together where
 * their sums fit the registers. */
INLINE void bands_q(const int type, const int N, int64_t n, const gs_product *of, const char *shared, int64_t group,
                    int64_t row0, int64_t row1, int64_t column) {
    const int units = units_of(type), size = GS_BAND * tail_bytes(type), together = N < 3 ? BAND_PARTS : 1;
    const int straight = straight_steps(type), part = GS_BAND * bytes_of(type) / (units / straight);
    const int64_t blocks = of->steps / units;
    const int prefetches = !of->reads_ahead;
    const int64_t tile = column / GS_TILE_Q, width = gs_width_of(of, gs_columns_of(of, shared, group), tile);
    const gs_cell_q *begin = (const gs_cell_q *)gs_tile_of(of, shared, group, tile) + column % GS_TILE_Q;
    const int64_t stride = of->node->src[0]->layout.nb[1];
    const uint8_t *a = (const uint8_t *)gs_weights_of(of, shared, group);
    float *out[BAND_COLUMNS];
    int n_steps = units;        /* not known to compilers, which would unroll the loop */
    if (straight < units)
        __asm__("" : "+r"(n_steps));
    for (int c = 0; c < n; c++)
        out[c] = gs_result_at(of, shared, group, column + c);
    for (int64_t row = row0; row < row1; row += together * ROWS) {
        const uint8_t *p = a + row / GS_BAND * GS_BAND * stride, *head = p;
        const int first_part = (int)(row % GS_BAND / ROWS);
        const gs_cell_q *y = begin;
        vec acc[BAND_COLUMNS][BAND_PARTS];
        UNROLL for (int c = 0; c < N; c++)
            UNROLL for (int i = 0; i < together; i++)
                acc[c][i] = VEC_ZERO;
        for (int64_t number = 0; number < blocks; number++, p += size) {
            begin_block_of_band(type, number, blocks, &head, &p);
            band_scales held[BAND_PARTS];
            if (units > 1)
                UNROLL for (int i = 0; i < together; i++) {
                    band_block block = block_at(type, head, p, first_part + i);
                    begin_band(type, &block, &held[i]);
                    if (joins_halves(type)) {   /* words_of */
                        held[i].d = VEC_MUL(held[i].d, VEC_SET1(1.0f / 256));
                        held[i].dmin = VEC_MUL(held[i].dmin, VEC_SET1(1.0f / 256));
                        held[i].d_of_odd = VEC_MUL(held[i].d, VEC_SET1(1.0f / 4));
                    }
                }
            for (int64_t k = 0; k < n_steps; k += straight) {
                if (prefetches)
                    for (int line = 0; line < part + (straight < units ? 63 : 0); line += 64)
                        PREFETCH_LATER((const char *)p + 2 * AHEAD + k * part / straight + line);
                UNROLL for (int j = 0; j < straight; j++, y += width) {
                    UNROLL for (int i = 0; i < together; i++) {
                        const band_block block = block_at(type, head, p, first_part + i);
                        vec *sums[BAND_COLUMNS];
                        UNROLL for (int c = 0; c < N; c++)
                            sums[c] = &acc[c][i];
                        band_step(type, N, n - 1, &block, k, j, &held[i], y, sums);
                        if (!(WIDE && joins_halves(type) && j % 2 == 0))    /* the next step has the same bytes */
                            AFRESH();
                    }
                }
            }
        }
        UNROLL for (int c = 0; c < N; c++)
            if (c < n)
                UNROLL for (int i = 0; i < together; i++)
                    VEC_STORE(out[c] + row + ROWS * i, acc[c][i]);
    }
}

#define BANDS_Q(TYPE, type, N) \
    __attribute__((noinline)) static void bands_##type##_##N(int64_t n, const gs_product *of, const char *shared, \
                                                             int64_t group, int64_t row0, int64_t row1, \
                                                             int64_t column) { \
        if (has_bands(GS_TYPE_##TYPE)) \
            bands_q(GS_TYPE_##TYPE, N, n, of, shared, group, row0, row1, column); \
    }
#define FEW_BANDS_Q(TYPE, type) \
    BANDS_Q(TYPE, type, 1) BANDS_Q(TYPE, type, 2) BANDS_Q(TYPE, type, 4) BANDS_Q(TYPE, type, 6) \
    static void bands_##type(int64_t n, const gs_product *of, const char *shared, int64_t group, int64_t row0, \
                             int64_t row1, int64_t column) { \
        switch (n) { \
        case 1: bands_##type##_1(n, of, shared, group, row0, row1, column); return; \
        case 2: bands_##type##_2(n, of, shared, group, row0, row1, column); return; \
        case 3: case 4: bands_##type##_4(n, of, shared, group, row0, row1, column); return; \
        default: bands_##type##_6(n, of, shared, group, row0, row1, column); \
        } \
    }

GS_QUANTISED(FEW_BANDS_Q)

typedef void (*bands_fn)(int64_t, const gs_product *, const char *, int64_t, int64_t, int64_t, int64_t);

static void few_interleaved(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1,
                            char *scratch) {
    const int64_t columns = gs_columns_of(of, shared, group);
    bands_fn bands;
    (void)scratch;
    switch (of->type) {
#define CASE(TYPE, type) case GS_TYPE_##TYPE: bands = bands_##type; break;
    GS_QUANTISED(CASE)
#undef CASE
    default: return;
    }
    if (columns <= BAND_COLUMNS) {
        bands(columns, of, shared, group, row0, row1, 0);
        return;
    }
    for (int64_t row = row0; row < row1; row += GS_BAND)
        for (int64_t column = 0; column < columns; column += BAND_COLUMNS)
            bands(columns - column < BAND_COLUMNS ? columns - column : BAND_COLUMNS, of, shared, group, row,
                  row + GS_BAND, column);
}

/* -- panels of bands for many columns ------------------------------------------------------------------------------ */

/* Prefetches a block of a band that is packed soon. */
INLINE void prefetch_band(const int type, const uint8_t *p) {
    UNROLL for (int line = 0; line < GS_BAND * bytes_of(type); line += 64)
        PREFETCH_LATER((const char *)p + 2 * AHEAD + line);
}

/* As pack_q, of interleaved rows. */
INLINE void pack_bands(const int type, const char *a, int64_t stride, int64_t rows, int64_t step0, int64_t steps,
                       char *panel) {
    const int units = units_of(type), halves = halves_of(type), straight = straight_steps(type);
    const int64_t half_bytes = step_bytes(type) / halves, of_scales = 4 * PANEL * (1 + has_min(type));
    int n_steps = units;
    if (straight < units)
        __asm__("" : "+r"(n_steps));
    for (int at = 0; at < PANEL; at += ROWS) {
        const int64_t from = at / GS_BAND * GS_BAND < rows ? at / GS_BAND * GS_BAND : 0;
        const uint8_t *p = (const uint8_t *)a + from * stride + step0 / units * GS_BAND * bytes_of(type), *head = p;
        char *to = panel + 4 * at;
        for (int64_t step = 0; step < steps; step += units) {
            begin_block_of_band(type, (step0 + step) / units, stride / bytes_of(type), &head, &p);
            const band_block block = block_at(type, head, p, at % GS_BAND / ROWS);
            band_scales held;
            if (at % GS_BAND == 0)
                prefetch_band(type, p);
            if (units > 1)
                begin_band(type, &block, &held);
            for (int64_t k = 0; k < n_steps; k += straight) {
                UNROLL for (int j = 0; j < straight; j++, to += step_bytes(type)) {
                    ivec v[LEVELS_OF_BAND];
                    vec s[2], m[2];
                    levels_of_band(type, &block, k, j, v);
                    scales_of_band(type, &block, k, j, &held, s, m);
                    UNROLL for (int h = 0; h < halves; h++) {
                        VEC_STORE((float *)(to + h * half_bytes), s[h]);
                        if (has_min(type))
                            VEC_STORE((float *)(to + h * half_bytes + 4 * PANEL), m[h]);
                    }
                    UNROLL for (int g = 0; g < 8; g++)
                        IVEC_STORE(to + (g < 8 / halves ? 0 : of_scales) + of_scales + g * 4 * PANEL, v[g]);
                }
            }
            p += GS_BAND * tail_bytes(type);
        }
    }
}

/* The bytes that products_of gives for the factor of each row and the levels of four of its elements.  `four`: the
 * factor in each byte of a lane. */
INLINE ivec folded_band(const int type, ivec four, ivec v) {
    const ivec rows = IVEC_SET1_128(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
    ivec factor = IVEC_AND(four, IVEC_SET1(255));
    if (type == GS_TYPE_Q2_K)
        return IVEC_SHUFFLE(IVEC_MUL(factor, IVEC_SET1(0x03020100)), IVEC_OR(v, rows));
    ivec table = IVEC_ADD(IVEC_MUL(factor, IVEC_SET1(0x01020304)), IVEC_SET1(0x60402000));
    ivec low = IVEC_SHUFFLE(table, IVEC_OR(IVEC_AND(v, IVEC_SET1_8(3)), rows));
    ivec more = IVEC_SUB_8(IVEC_SET1_8(128), IVEC_LEFT(four, 2));       /* four levels more; a factor has six bits */
    return IVEC_ADD_8(low, IVEC_WHERE(v, 4, more));
}

/* As pack_folded, of interleaved rows. */
INLINE void fold_bands(const int type, const char *a, int64_t stride, int64_t rows, int64_t step0, int64_t steps,
                       char *panel) {
    int n_steps = 8;
    __asm__("" : "+r"(n_steps));
    for (int at = 0; at < PANEL; at += ROWS) {
        const int64_t from = at / GS_BAND * GS_BAND < rows ? at / GS_BAND * GS_BAND : 0;
        const uint8_t *p = (const uint8_t *)a + from * stride + step0 / 8 * GS_BAND * bytes_of(type), *head = p;
        char *to = panel + 4 * at;
        for (int64_t step = 0; step < steps; step += 8) {
            begin_block_of_band(type, (step0 + step) / 8, stride / bytes_of(type), &head, &p);
            const band_block block = block_at(type, head, p, at % GS_BAND / ROWS);
            band_scales held;
            if (at % GS_BAND == 0)
                prefetch_band(type, p);
            begin_band(type, &block, &held);
            VEC_STORE((float *)to, type == GS_TYPE_Q2_K ? held.d : VEC_MUL(held.d, VEC_SET1(-1.0f)));
            char *levels = to + folded_head(type);
            float *minima = (float *)(to + 4 * PANEL);
            for (int64_t k = 0; k < n_steps; k += 4) {
                UNROLL for (int j = 0; j < 4; j++, levels += 8 * 4 * PANEL) {
                    ivec v[LEVELS_OF_BAND];
                    levels_of_band(type, &block, k, j, v);
                    UNROLL for (int h = 0; h < 2; h++, minima += PANEL) {
                        const int n = (j * 2 + h) % 4;
                        const int64_t i = k / 2 + (j * 2 + h) / 4;
                        const int each = n * 0x01010101;
                        ivec place = IVEC_SET1_128(_mm_setr_epi32(each, each + 0x04040404, each + 0x08080808,
                                                                  each + 0x0c0c0c0c));
                        ivec four = IVEC_SHUFFLE(held.scale[i], place);
                        if (has_min(type))
                            VEC_STORE(minima, VEC_MUL(held.dmin, byte_n(held.least[i], n, 0)));
                        UNROLL for (int g = 4 * h; g < 4 * h + 4; g++)
                            IVEC_STORE(levels + g * 4 * PANEL, folded_band(type, four, v[g]));
                    }
                }
            }
            to += folded_head(type) + 256 * PANEL;
            p += GS_BAND * tail_bytes(type);
        }
    }
}

#define PACK_BANDS(TYPE, type) \
    static void pack_bands_##type(const char *a, int64_t stride, int64_t rows, int64_t step0, int64_t steps, \
                                  char *panel) { \
        if (!has_bands(GS_TYPE_##TYPE)) \
            return; \
        if (folds(GS_TYPE_##TYPE)) \
            fold_bands(GS_TYPE_##TYPE, a, stride, rows, step0, steps, panel); \
        else \
            pack_bands(GS_TYPE_##TYPE, a, stride, rows, step0, steps, panel); \
    }

GS_QUANTISED(PACK_BANDS)

static void many_interleaved(const gs_product *of, const char *shared, int64_t group, int64_t row0, int64_t row1,
                             int64_t column0, int64_t column1, char *scratch) {
    tiles_fn tiles;
    pack_fn pack;
    switch (of->type) {
#define CASE(TYPE, type) case GS_TYPE_##TYPE: tiles = tiles_for(GS_TYPE_##TYPE); pack = pack_bands_##type; break;
    GS_QUANTISED(CASE)
#undef CASE
    default: return;
    }
    panels_q(pack, tiles, of, shared, group, row0, row1, column0, column1, scratch);
}
