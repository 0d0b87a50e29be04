/* attention_few.h -- attention of few query rows of a key head, as in decoding: key by key.
 *
 * Included by attention.h.  Each key is multiplied with each row.  Different threads take different chunks of CHUNK
 * keys, and the results of the chunks are merged in order.  Where rows attend to different keys, as those of several
 * sequences do, the rows of one mask are computed alone, with those keys alone that it does not mask if these are at
 * most half of all.
 */
#define TOGETHER (V == 16 ? 4 : 3) /* the most query rows that share the conversion of a key, with sums in registers */
#define AHEAD 8192              /* about how many bytes before their use keys, or values, are prefetched to L2 */
#define SOON 2048               /* and from there to L1 */
#define NEXT 16                 /* how many keys before their use gathered keys are prefetched */
#define VALUES 8                /* keys whose values are added for all columns before those of the next keys */
#define MORE_VALUES 64          /* the same where all rows and columns are added at once */
#define APART (CHUNK + 16)      /* floats between the scores of two rows: multiples of CHUNK would use few cache sets */

/* How many of n keys are not masked, in groups of four, the last of which need not be whole. */
static int64_t used_fours(const float *bias, int64_t n) {
    int32_t used = 0;
    for (int64_t key = 0; key < n; key++)
        used += bias[key] != -INFINITY;
    return (used + 3) / 4;
}

/* Whether of n keys those are gathered that are not masked: if they are at most half, counted in fours. */
static int gathers_keys(const float *bias, int64_t n) {
    return bias != NULL && 2 * 4 * used_fours(bias, n) <= n;
}

/* Of n keys, whose numbers begin at `first`, the numbers of those that are not masked to `index`, and their masks to
 * `to`, which may be `bias`.  Returns how many these are. */
static int64_t unmasked_keys(const float *bias, int64_t first, int64_t n, int32_t *index, float *to) {
    int64_t used = 0;
    for (int64_t key = 0; key < n; key++)
        if (bias[key] != -INFINITY) {
            index[used] = (int32_t)(first + key);
            to[used++] = bias[key];
        }
    return used;
}

/* Appends the last of n keys again, masked, up to a multiple of four keys, and returns their number. */
static int64_t whole_fours(int64_t n, int32_t *index, float *bias) {
    for (; n % 4; n++) {
        index[n] = index[n - 1];
        bias[n] = -INFINITY;
    }
    return n;
}

/* The number of key i of `index`; NULL: of all keys. */
INLINE int64_t key_of(const int32_t *index, int64_t i) {
    return index == NULL ? i : index[i];
}

INLINE float dot_f32(const float *a, const float *b, int64_t n) {
    vf s = vset(0), t = s;
    int64_t i = 0;
    for (; i + 2 * V <= n; i += 2 * V) {
        s = vfma(vload(a + i), vload(b + i), s);
        t = vfma(vload(a + i + V), vload(b + i + V), t);
    }
    if (i + V <= n) {
        s += vload(a + i) * vload(b + i);
        i += V;
    }
    float sum = vsum(s + t);
    for (; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

/* n rows of a cache, `stride` bytes apart, that are read in order, and others that are read after them. */
typedef struct reading {
    const char *first, *then;       /* where the n rows begin, and where the others do                               */
    int64_t n, stride, then_stride;
    int64_t to_l2, to_l1;           /* how many rows ahead are prefetched; L2 waits for more lines at once than L1 */
} reading;

/* How many rows of n f16 or bf16 values are about nbytes; at most `most`. */
INLINE int64_t rows_of_bytes(int64_t nbytes, int64_t n, int64_t most) {
    int64_t rows = n > 0 && nbytes / (2 * n) > 1 ? nbytes / (2 * n) : 1;
    return rows < most ? rows : most;
}

/* The reading of n rows of t, of `width` values each, from `first` on, and then of rows of `next` from `then` on. */
INLINE reading reading_of(const gs_node *t, const char *first, int64_t n, int64_t width, const gs_node *next,
                          const char *then) {
    return (reading){first, then, n, t->layout.nb[1], next->layout.nb[1], rows_of_bytes(AHEAD, width, n),
                     rows_of_bytes(SOON, width, n)};
}

INLINE const char *row_number(const reading *of, int64_t i) {
    return i < of->n ? of->first + i * of->stride : of->then + (i - of->n) * of->then_stride;
}

/* With row i, prefetches nbytes of the two rows that are to_l2 and to_l1 rows later. */
INLINE void prefetch_rows(const reading *of, int64_t i, int64_t nbytes) {
    const char *l2 = row_number(of, i + of->to_l2), *l1 = row_number(of, i + of->to_l1);
    for (int64_t line = 0; line < nbytes; line += 64) {
        __builtin_prefetch(l2 + line, 0, 2);
        __builtin_prefetch(l1 + line, 0, 3);
    }
}

/* Prefetches four keys of `index` that come NEXT after number i of n, and the values of key i and the three after it.
 */
INLINE void prefetch_keys(const flash *f, const char *k, const char *v, const int32_t *index, int64_t i, int64_t n) {
    for (int64_t j = i; j < i + 4; j++) {
        const char *later = k + index[j + NEXT < n ? j + NEXT : n - 1] * f->k->layout.nb[1];
        for (int64_t line = 0; line < 2 * f->d; line += 64)
            __builtin_prefetch(later + line, 0, 3);
        for (int64_t line = 0; line < 2 * f->dv; line += 64)
            __builtin_prefetch(v + index[j] * f->v->layout.nb[1] + line, 0, 2);
    }
}

/* V values of f16, or of bf16, as f32. */
INLINE vf vhalves(const int type, const uint16_t *p) {
    return type == GS_TYPE_BF16 ? vfrom_bf16(p) : vfrom_f16(p);
}

/* The dot products of R query rows of f32 with four keys of f16 or bf16: those of row r to to[r * APART] and the three
 * floats after it.  `width`: floats from one query row to the next; n, the elements of a key, is a multiple of V.  Each
 * vector of a key is converted once for all rows. */
INLINE void dots_of_halves(const int type, const int R, const float *q, int64_t width, const uint16_t *const *k,
                           int64_t n, float *to) {
    vf s[TOGETHER][4];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < 4; i++)
            s[r][i] = vset(0);
    for (int64_t at = 0; at < n; at += V)
        UNROLL for (int i = 0; i < 4; i++) {
            vf x = vhalves(type, k[i] + at);
            UNROLL for (int r = 0; r < R; r++)
                s[r][i] = vfma(vload(q + r * width + at), x, s[r][i]);
        }
    UNROLL for (int r = 0; r < R; r++)
        vsums(s[r][0], s[r][1], s[r][2], s[r][3], to + r * APART);
}

/* acc[i] += weight * x[i], for n elements. */
INLINE void add_scaled(float *acc, float weight, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + V <= n; i += V)
        vstore(acc + i, vfma(vset(weight), vload(x + i), vload(acc + i)));
    for (; i < n; i++)
        acc[i] += weight * x[i];
}

/* acc[r * apart + i] += weights[r * APART + key] * v[key][i], summed over n keys, for r in 0 .. R - 1 and i in
 * 0 .. C * V - 1; v has f16 or bf16 values.  The sums stay in registers, and each vector of v is converted once for all
 * rows.  `index`: the numbers of the keys, or NULL; `stride`: bytes from the values of one number to the next.  With
 * each key `width` bytes of rows that are read later are prefetched: key 0 is row `number` of `values`.  Values whose
 * weight is 0 are not used: they may be NaN. */
INLINE void add_halves(const int type, const int R, const int C, float *acc, int64_t apart, const float *weights,
                       const char *v, const int32_t *index, int64_t stride, int64_t n, int64_t width,
                       const reading *values, int64_t number) {
    vf s[TOGETHER][8];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++)
            s[r][c] = vload(acc + r * apart + c * V);
    int zeros = 0;
    UNROLL for (int r = 0; r < R; r++)
        ONE_BY_ONE for (int64_t key = 0; key < n; key++)
            zeros |= weights[r * APART + key] == 0;
    ONE_BY_ONE for (int64_t key = 0; key < n; key++) {
        const uint16_t *x = (const uint16_t *)(v + key_of(index, key) * stride);
        if (width > 0)
            prefetch_rows(values, number + key, width);
        if (!zeros) {
            UNROLL for (int c = 0; c < C; c++) {
                vf value = vhalves(type, x + c * V);
                UNROLL for (int r = 0; r < R; r++)
                    s[r][c] = vfma(vset(weights[r * APART + key]), value, s[r][c]);
            }
            continue;
        }
        UNROLL for (int r = 0; r < R; r++)
            if (weights[r * APART + key] != 0)
                UNROLL for (int c = 0; c < C; c++)
                    s[r][c] = vfma(vset(weights[r * APART + key]), vhalves(type, x + c * V), s[r][c]);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++)
            vstore(acc + r * apart + c * V, s[r][c]);
}

/* How many of m query rows are computed together next.  Registers hold sums for TOGETHER rows, so the m rows are cut
 * into as few groups as that allows, as equal as they can be. */
INLINE int64_t together(int64_t m) {
    int64_t groups = (m + TOGETHER - 1) / TOGETHER;
    return (m + groups - 1) / groups;
}

/* Writes the dot products of m query rows with four keys, as dots_of_halves. */
INLINE void dots_of_rows(const int type, const float *q, int64_t width, int64_t m, const uint16_t *const *k, int64_t n,
                         float *to) {
    for (int64_t r = 0, now; r < m; r += now, q += now * width, to += now * APART) {
        now = together(m - r);
        switch (now) {
        case 1: dots_of_halves(type, 1, q, width, k, n, to); break;
        case 2: dots_of_halves(type, 2, q, width, k, n, to); break;
        case 3: dots_of_halves(type, 3, q, width, k, n, to); break;
        default: dots_of_halves(type, TOGETHER, q, width, k, n, to);
        }
    }
}

/* Whether `bias` (NULL: no mask) masks key `key` and the three after it. */
INLINE int are_masked(const float *bias, int64_t key) {
    return bias != NULL && bias[key] == -INFINITY && bias[key + 1] == -INFINITY && bias[key + 2] == -INFINITY
           && bias[key + 3] == -INFINITY;
}

/* Writes the scores of m query rows for four keys of f16 or bf16, as dots_of_halves; 0 each if the keys are NULL. */
INLINE void score_four(const flash *f, const float *q, int64_t m, const uint16_t *const *k, float *to) {
    if (k == NULL)
        for (int64_t i = 0; i < m; i++)
            memset(to + i * APART, 0, 16);
    else if (f->k->layout.type == GS_TYPE_F16)
        dots_of_rows(GS_TYPE_F16, q, padded(f->d), m, k, f->d, to);
    else
        dots_of_rows(GS_TYPE_BF16, q, padded(f->d), m, k, f->d, to);
}

static int are_zero(const float *x, int64_t n) {
    int zero = 1;
    for (int64_t i = 0; i < n; i++)
        zero &= x[i] == 0;
    return zero;
}

/* How many of n keys come before VALUES of them whose weights are all 0 (`zero`), or are not (!`zero`), for one row. */
static int64_t keys_until(int zero, const float *weights, int64_t n) {
    int64_t key = 0;
    while (key < n && are_zero(weights + key, n - key < VALUES ? n - key : VALUES) != zero)
        key += VALUES;
    return key < n ? key : n;
}

/* Adds the weighted values of n keys to acc of m query rows, as add_halves, for all columns but the last dv % (4 V).
 * With each key it prefetches `fetched` bytes of rows that come later in `values`, of which key 0 is row `number`. */
INLINE void add_keys(const int type, int64_t dv, float *acc, int64_t apart, const float *weights, int64_t m,
                     const char *v, const int32_t *index, int64_t stride, int64_t n, int64_t fetched,
                     const reading *values, int64_t number) {
    for (int64_t r = 0, now; r < m; r += now) {
        now = together(m - r);
        for (int64_t column = 0, wide; column + 4 * V <= dv; column += wide * V, fetched = 0) {
            float *to = acc + r * apart + column;
            const float *weight = weights + r * APART;
            const char *from = v + column * 2;
            wide = now == 1 && column + 8 * V <= dv ? 8 : 4;
            switch (now + wide) {
#define ADD(R, C) add_halves(type, R, C, to, apart, weight, from, index, stride, n, fetched, values, number)
            case 1 + 8: ADD(1, 8); break;
            case 1 + 4: ADD(1, 4); break;
            case 2 + 4: ADD(2, 4); break;
            case 3 + 4: ADD(3, 4); break;
            default: ADD(TOGETHER, 4);
#undef ADD
            }
        }
    }
}

/* add_keys for the n keys of a chunk; returns how many columns it added.  It takes VALUES keys at a time: their values
 * are in the cache for all rows and columns; MORE_VALUES where they are needed once.  Of one row it skips VALUES keys
 * whose weights are 0.  `then`: where the keys begin that are read next. */
INLINE int64_t add_weighted(const int type, const flash *f, float *acc, int64_t apart, const float *weights, int64_t m,
                            const char *v, const int32_t *index, int64_t n, const char *then) {
    int64_t stride = f->v->layout.nb[1];
    const reading values = reading_of(f->v, v, n, f->dv, f->k, then);
    for (int64_t key = 0, block; key < n; key += block) {
        block = m <= TOGETHER && f->dv <= 4 * V ? MORE_VALUES : VALUES;
        if (m == 1) {
            key += keys_until(0, weights + key, n - key);
            if (key == n)
                break;
            if (f->dv <= 8 * V)
                block = keys_until(1, weights + key, n - key);
        }
        int64_t keys = n - key < block ? n - key : block;
        if (index == NULL)
            add_keys(type, f->dv, acc, apart, weights + key, m, v + key * stride, NULL, stride, keys, 2 * f->dv,
                     &values, key);
        else
            add_keys(type, f->dv, acc, apart, weights + key, m, v, index + key, stride, keys, 0, &values, key);
    }
    return f->dv / (4 * V) * (4 * V);
}

static int is_half(const gs_node *t) {
    return t->layout.type == GS_TYPE_F16 || t->layout.type == GS_TYPE_BF16;
}

typedef struct lines_memory { float *q, *scores, *copy, *tile; int32_t *index; } lines_memory;

static lines_memory lines_memory_at(const flash *f, float *at, int64_t m) {
    lines_memory s;
    s.q = at;
    s.scores = s.q + m * padded(f->d);
    s.copy = s.scores + m * APART;
    s.tile = s.copy + padded(f->d > f->dv ? f->d : f->dv);
    s.index = (int32_t *)(s.tile + CHUNK + 16);
    return s;
}

static int64_t lines_floats(const flash *f, int64_t m) {
    return m * (padded(f->d) + APART) + padded(f->d > f->dv ? f->d : f->dv) + 2 * CHUNK + 16;
}

/* Whether query rows m0 .. m0 + m - 1 have one mask. */
static int share_mask(const flash *f, int64_t m0, int64_t m) {
    return m == 1 || (m0 / f->group == (m0 + m - 1) / f->group && f->mask != NULL && f->mask->layout.ne[2] == 1);
}

/* Replaces the dot products of query row l with n keys by the keys' weights, exp(score - top), and writes the largest
 * score, top, and the sum of the weights. */
static void weigh(const flash *f, line l, float *scores, const float *bias, int64_t n, float *top, float *total) {
    finish_scores(f, l, scores, bias, n);
    *top = largest_of(scores, n);
    if (*top == -INFINITY && has_nan(scores, n))
        *top = 0;
    *total = *top == -INFINITY ? 0 : exponents(scores, n, *top);
    if (*top == -INFINITY)
        memset(scores, 0, (size_t)n * 4);
}

/* Attention of query rows m0 .. m0 + m - 1 of a key head, which are in s.q and scaled, to n keys: those of `index`, or
 * all from `first` on if it is NULL.  `bias`: the keys' mask, if the rows have one mask; NULL: each row's own.
 * For query row m0 + i it writes the sum of weighted values to acc + i * stride (dv floats), the largest score to
 * top[i * stride] and the sum of the weights, exp(score - largest), to total[i * stride]. */
static void attend_keys(const flash *f, int64_t head_kv, int64_t batch, int64_t m0, int64_t m, int64_t first,
                        int64_t n, const float *bias, const int32_t *index, lines_memory s, float *acc, int64_t stride,
                        float *top, float *total) {
    int64_t width = padded(f->d);
    const char *v0 = row_of(f->v, (where){first, head_kv, batch});
    /* Where the keys begin that run_chunk reads next: of this chunk those of the next head, or else the next chunk. */
    const int has_next = head_kv + 1 < f->n_head / f->group;
    const char *then = row_of(f->k, (where){has_next ? first : first + n, has_next ? head_kv + 1 : 0, batch});
    int64_t key = 0;
    if (is_half(f->k) && f->d % V == 0) {
        /* Four keys at a time.  The dot product of a masked key among them is computed, too, which is cheaper than a
         * branch; finish_scores replaces the masked key's score. */
        const char *k = row_of(f->k, (where){first, head_kv, batch});
        const reading keys = reading_of(f->k, k, n, f->d, f->v, v0);
        for (; key + 4 <= n; key += 4) {
            if (are_masked(bias, key)) {
                score_four(f, s.q, m, NULL, s.scores + key);
                continue;
            }
            const uint16_t *rows[4];
            for (int i = 0; i < 4; i++) {
                rows[i] = (const uint16_t *)(k + key_of(index, key + i) * keys.stride);
                if (index == NULL)
                    prefetch_rows(&keys, key + i, 2 * f->d);
            }
            if (index != NULL)
                prefetch_keys(f, k, v0, index, key, n);
            score_four(f, s.q, m, rows, s.scores + key);
        }
    }
    for (; key < n; key++) {
        if (bias != NULL && bias[key] == -INFINITY) {
            for (int64_t i = 0; i < m; i++)
                s.scores[i * APART + key] = 0;
            continue;
        }
        const float *k = row_as_f32(f->k, (where){first + key_of(index, key), head_kv, batch}, f->d, s.copy);
        for (int64_t i = 0; i < m; i++)
            s.scores[i * APART + key] = dot_f32(s.q + i * width, k, f->d);
    }
    for (int64_t i = 0; i < m; i++) {
        line l = line_of(f, head_kv, batch, m0 + i);
        float *scores = s.scores + i * APART;
        weigh(f, l, scores, bias != NULL ? bias : bias_of(f, l, first, n, s.tile), n, &top[i * stride],
              &total[i * stride]);
        memset(acc + i * stride, 0, (size_t)f->dv * 4);
    }
    /* Sum the weighted values: of f16 and bf16 values 4 V columns at a time, with the sums in registers; then the
     * remaining columns, or all columns of other types, key by key. */
    int64_t column = 0;
    if (f->v->layout.type == GS_TYPE_F16)
        column = add_weighted(GS_TYPE_F16, f, acc, stride, s.scores, m, v0, index, n, then);
    else if (f->v->layout.type == GS_TYPE_BF16)
        column = add_weighted(GS_TYPE_BF16, f, acc, stride, s.scores, m, v0, index, n, then);
    if (column == f->dv)
        return;
    for (int64_t key = 0; key < n; key++) {
        const float *v = NULL;
        for (int64_t i = 0; i < m; i++) {
            if (s.scores[i * APART + key] == 0)
                continue;
            if (v == NULL)
                v = row_as_f32(f->v, (where){first + key_of(index, key), head_kv, batch}, f->dv, s.copy);
            add_scaled(acc + i * stride + column, s.scores[i * APART + key], v + column, f->dv - column);
        }
    }
}

/* attend_keys for keys first .. first + n - 1, or for those of them that are not masked if these are at most half.
 * Where all are masked, by one mask, it writes no sum of values: the largest score is -inf. */
static void attend_lines(const flash *f, int64_t head_kv, int64_t batch, int64_t m0, int64_t m, int64_t first,
                         int64_t n, lines_memory s, float *acc, int64_t stride, float *top, float *total) {
    const float *bias = NULL;
    const int32_t *index = NULL;
    if (share_mask(f, m0, m))
        bias = bias_of(f, line_of(f, head_kv, batch, m0), first, n, s.tile);
    if (gathers_keys(bias, n)) {
        n = unmasked_keys(bias, 0, n, s.index, s.tile);
        if (n == 0) {
            for (int64_t i = 0; i < m; i++) {
                top[i * stride] = -INFINITY;
                total[i * stride] = 0;
            }
            return;
        }
        n = whole_fours(n, s.index, s.tile);
        index = s.index;
        bias = s.tile;
    }
    attend_keys(f, head_kv, batch, m0, m, first, n, bias, index, s, acc, stride, top, total);
}

/* Merges the results of n chunks of keys, in order, into the result of query row l.  The result of a chunk is [top,
 * total, acc[dv]], as attend_lines wrote it; `between`: floats from the start of one chunk's result to the next. */
static void merge_chunks(const flash *f, line l, const float *from, int64_t n, int64_t between) {
    float *out = result_of(f, l), top = -INFINITY, total = 0;
    float sink = f->sinks == NULL ? -INFINITY : f->sinks[l.head];
    for (int64_t i = 0; i < n; i++)
        top = from[i * between] > top || from[i * between] != from[i * between] ? from[i * between] : top;
    top = sink > top || sink != sink ? sink : top;
    memset(out, 0, (size_t)f->dv * 4);
    if (top == -INFINITY)
        return;
    for (int64_t i = 0; i < n; i++) {
        const float *chunk = from + i * between;
        if (chunk[0] == -INFINITY)
            continue;
        float weight = exp_of_one(chunk[0] - top);
        total += chunk[1] * weight;
        add_scaled(out, weight, chunk + 2, f->dv);
    }
    if (sink != -INFINITY)
        total += exp_of_one(sink - top);
    if (total != 0)
        shift_and_divide(out, out, f->dv, 0, total);
}

/* Whether rows use so few of the keys first .. first + n - 1 that they are computed one by one: at most half of all,
 * counted in fours, if all are f16 or bf16, which are converted in registers.  Keys of other types are converted anew
 * for each row: no more often than for all rows at once. */
static int uses_few_keys(const flash *f, int64_t head_kv, int64_t batch, int64_t first, int64_t n, float *tile) {
    if (f->n_rows == 1 || f->mask == NULL)
        return 0;
    int64_t used = 0, fours = (n + 3) / 4;
    for (int64_t row = 0; row < f->n_rows; row++)
        used += used_fours(bias_of(f, line_of(f, head_kv, batch, row * f->group), first, n, tile), n);
    return is_half(f->k) && is_half(f->v) ? 2 * used <= f->n_rows * fours : used <= fours;
}

/* A unit of work: one chunk of keys of one key head.  The heads of a chunk, which are neighbours in the rows of a
 * cache, are consecutive units. */
typedef struct chunk_of_keys { int64_t head_kv, batch, first, n, result; } chunk_of_keys;

/* Unit number `unit` of run_chunks.  `result`: where the result begins in `shared`, which is [key head][query row of
 * that head][chunk], each of arg[3] floats. */
static chunk_of_keys chunk_number(const gs_call *call, const flash *f, int64_t unit) {
    chunk_of_keys of;
    int64_t chunks = call->arg[2], n_head_kv = f->n_head / f->group, chunk = unit / n_head_kv % chunks;
    of.head_kv = unit % n_head_kv;
    of.batch = unit / n_head_kv / chunks;
    of.first = chunk * CHUNK;
    of.n = f->n_kv - of.first < CHUNK ? f->n_kv - of.first : CHUNK;
    of.result = ((of.batch * n_head_kv + of.head_kv) * f->n_rows * f->group * chunks + chunk) * call->arg[3];
    return of;
}

/* Runs attend_lines for a unit of work, whose result is final if there is no other chunk. */
static void run_chunk(const gs_call *call, const flash *f, int64_t unit, char *shared, char *scratch) {
    int64_t m = f->n_rows * f->group, chunks = call->arg[2], size = call->arg[3], width = padded(f->d);
    const chunk_of_keys of = chunk_number(call, f, unit);
    float *to = (float *)shared + of.result;
    lines_memory s = lines_memory_at(f, (float *)scratch, m);
    int64_t now = uses_few_keys(f, of.head_kv, of.batch, of.first, of.n, s.tile) ? f->group : m;
    for (int64_t i = 0; i < m; i++)
        scaled_query(f, line_of(f, of.head_kv, of.batch, i), s.q + i * width);
    for (int64_t i = 0; i < m; i += now, s.q += now * width)
        attend_lines(f, of.head_kv, of.batch, i, now, of.first, of.n, s, to + i * chunks * size + 2, chunks * size,
                     to + i * chunks * size, to + i * chunks * size + 1);
    for (int64_t i = 0; i < m && chunks == 1; i++)
        merge_chunks(f, line_of(f, of.head_kv, of.batch, i), to + i * size, 1, size);
}

static void run_merge(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    flash f = flash_of(call->node);
    int64_t m = f.n_rows * f.group, chunks = call->arg[2], size = call->arg[3], n_head_kv = f.n_head / f.group;
    for (int64_t unit = first_unit(call, part); unit < end_unit(call, part); unit++) {
        int64_t head_kv = unit / m % n_head_kv, batch = unit / m / n_head_kv;
        merge_chunks(&f, line_of(&f, head_kv, batch, unit % m), (const float *)shared + unit * chunks * size, chunks,
                     size);
    }
}
