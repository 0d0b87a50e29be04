/* attention_many.h -- attention of many query rows of a key head, as of a prompt: in blocks.
 *
 * Included by attention.h.  A block has BLOCK_ROWS rows and BLOCK_KEYS keys, and is computed as products of small
 * matrices.  The keys of blocks that are nearly all masked, as where each row belongs to another sequence, are gathered
 * for the rows of one mask and computed by functions of attention_few.h.  So are, again, rows in which a masked cell
 * holds an inf or NaN.
 */
#define BLOCK_ROWS 64
#define BLOCK_KEYS 64
#define LEAST_ROWS 16           /* of a block of fewer rows than BLOCK_ROWS */
#define LEAST_BLOCKS 6          /* that are wanted, so that no thread waits long for another */

#define TILE_ROWS 4
#if GS_LEVEL == 2
#define TILE_VECTORS 4
#else
#define TILE_VECTORS 2
#endif

/* Writes the product of a (TILE_ROWS x n) and b (n x `vectors` * V) to c, or adds it to c if `more`.  Element (r, k) of
 * a is a[r * row_apart + k * k_apart]; ldb and ldc: floats from one row of b and c to the next. */
INLINE void small_product(float *c, int64_t ldc, const float *a, int64_t row_apart, int64_t k_apart, const float *b,
                          int64_t ldb, int64_t n, const int vectors, const int more) {
    vf s[TILE_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < TILE_ROWS; r++)
        UNROLL for (int i = 0; i < vectors; i++)
            s[r][i] = vset(0);
    for (int64_t k = 0; k < n; k++) {
        vf x[TILE_VECTORS];
        UNROLL for (int i = 0; i < vectors; i++)
            x[i] = vload(b + k * ldb + i * V);
        UNROLL for (int r = 0; r < TILE_ROWS; r++)
            UNROLL for (int i = 0; i < vectors; i++)
                s[r][i] = vfma(vset(a[r * row_apart + k * k_apart]), x[i], s[r][i]);
    }
    UNROLL for (int r = 0; r < TILE_ROWS; r++)
        UNROLL for (int i = 0; i < vectors; i++) {
            if (more)
                s[r][i] += vload(c + r * ldc + i * V);
            vstore(c + r * ldc + i * V, s[r][i]);
        }
}

/* The same for a of `rows` rows and b of `columns` columns, a multiple of V.  Rows of a and c up to the next multiple
 * of TILE_ROWS are read and written, too. */
INLINE void block_product(float *c, int64_t ldc, const float *a, int64_t row_apart, int64_t k_apart, const float *b,
                          int64_t ldb, int64_t rows, int64_t columns, int64_t n, const int more) {
    int64_t i = 0;
    for (; i + TILE_VECTORS * V <= columns; i += TILE_VECTORS * V)
        for (int64_t r = 0; r < rows; r += TILE_ROWS)
            small_product(c + r * ldc + i, ldc, a + r * row_apart, row_apart, k_apart, b + i, ldb, n, TILE_VECTORS,
                          more);
    for (; i < columns; i += V)
        for (int64_t r = 0; r < rows; r += TILE_ROWS)
            small_product(c + r * ldc + i, ldc, a + r * row_apart, row_apart, k_apart, b + i, ldb, n, 1, more);
}

/* q[element][row], scores[key][row] and bias[key][row], so that a vector has V rows; keys, values and out have a row
 * after another.  The masks of a block of keys are at `scores` first, as masks[row][key]; `bias` is their transpose. */
typedef struct block_memory {
    float *q, *scores, *keys, *values, *out, *top, *total, *slope, *bias;
    char *is_sparse;                /* for each block of keys */
    int64_t m;                      /* query rows of the block; vectors may have more, with queries of zeros */
    const char *mask[BLOCK_ROWS];   /* of each row, for all keys; NULL: the node has no mask */
} block_memory;

static int64_t blocks_of_keys(const flash *f) {
    return (f->n_kv + BLOCK_KEYS - 1) / BLOCK_KEYS;
}

/* Floats for keys and values, where attend_sparse and attend_again work, too. */
static int64_t key_floats(const flash *f) {
    int64_t dv = padded(f->dv), block = BLOCK_KEYS * (padded(f->d) + dv);
    int64_t lines = TOGETHER * (2 + dv) + lines_floats(f, TOGETHER);
    return padded(block > lines ? block : lines);
}

static block_memory block_memory_at(const flash *f, float *at) {
    block_memory s;
    s.q = at;
    s.scores = s.q + padded(f->d) * BLOCK_ROWS;
    s.keys = s.scores + BLOCK_KEYS * BLOCK_ROWS;
    s.values = s.keys + BLOCK_KEYS * padded(f->d);
    s.out = s.keys + key_floats(f);
    s.top = s.out + BLOCK_ROWS * padded(f->dv);
    s.total = s.top + BLOCK_ROWS;
    s.slope = s.total + BLOCK_ROWS;
    s.bias = s.slope + BLOCK_ROWS;
    s.is_sparse = (char *)(s.bias + BLOCK_KEYS * BLOCK_ROWS);
    s.m = 0;
    return s;
}

static int64_t block_floats(const flash *f) {
    return BLOCK_ROWS * (padded(f->d) + padded(f->dv) + 3 + 2 * BLOCK_KEYS) + key_floats(f)
        + (blocks_of_keys(f) + 3) / 4;
}

/* Writes the transpose of `rows` x `columns` floats, multiples of four, to to[column][row], in rows of BLOCK_ROWS. */
static void transpose_to(const float *from, int64_t apart, int64_t rows, int64_t columns, float *to) {
    for (int64_t i = 0; i < rows; i += 4)
        for (int64_t k = 0; k < columns; k += 4)
            transpose_4(from + i * apart + k, apart, to + k * BLOCK_ROWS + i, BLOCK_ROWS);
}

/* n rows, and as many more as make whole vectors of V rows. */
static int64_t whole_vectors(int64_t n) { return (n + V - 1) / V * V; }

/* Begins a block of m query rows: no key was read. */
static void begin_rows(const flash *f, int64_t head_kv, int64_t batch, int64_t m0, int64_t m, block_memory *s) {
    int64_t d = padded(f->d), whole = whole_vectors(m);
    float *rows = s->keys;
    memset(rows + m * d, 0, (size_t)((whole - m) * d) * 4);
    memset(s->out, 0, (size_t)(BLOCK_ROWS * padded(f->dv)) * 4);
    s->m = m;
    for (int64_t i = 0; i < BLOCK_ROWS; i++) {
        s->top[i] = -INFINITY;
        s->total[i] = 0;
        s->slope[i] = i < m ? slope_of(line_of(f, head_kv, batch, m0 + i).head, f->n_head, f->max_bias) : 0;
    }
    for (int64_t i = 0; i < m; i++) {
        line l = line_of(f, head_kv, batch, m0 + i);
        scaled_query(f, l, rows + i * d);
        s->mask[i] = mask_of(f, l);
    }
    transpose_to(rows, d, whole, d, s->q);
}

/* rows_as_f32 for rows of f16 or bf16, `type`, whose width is a multiple of 16. */
INLINE void halves_as_f32(const int type, const char *from, int64_t stride, int64_t n, int64_t width, float *to) {
    for (int64_t i = 0; i < n; i++, from += stride, to += width) {
        for (int64_t line = 0; line < 2 * width; line += 64)
            __builtin_prefetch(from + BLOCK_KEYS * stride + line, 0, 2);
        for (int64_t k = 0; k < width; k += V)
            vstore(to + k, vhalves(type, (const uint16_t *)from + k));
    }
}

/* Writes n rows of t from `first` on, of `width` elements each, to `to` as f32, `padded(width)` floats from one to the
 * next.  Rows of f16 or bf16 of the next block are prefetched. */
static void rows_as_f32(const gs_node *t, int64_t head_kv, int64_t batch, int64_t first, int64_t n, int64_t width,
                        float *to) {
    const char *from = row_of(t, (where){first, head_kv, batch});
    int64_t stride = t->layout.nb[1];
    int type = t->layout.type, is_whole = width == padded(width);
    if (is_whole && type == GS_TYPE_F16)
        halves_as_f32(GS_TYPE_F16, from, stride, n, width, to);
    else if (is_whole && type == GS_TYPE_BF16)
        halves_as_f32(GS_TYPE_BF16, from, stride, n, width, to);
    else
        for (int64_t i = 0; i < n; i++)
            load_row(type, from + i * stride, to + i * padded(width), width);
}

enum { MASKED, OPEN, MIXED };       /* all keys are masked for all rows; all masks are 0; neither */

/* Whether a vector of n bytes has a bit that is set. */
INLINE int is_any(const void *v, size_t n) {
    uint8_t found = 0;
    for (size_t i = 0; i < n; i++)
        found |= ((const uint8_t *)v)[i];
    return found != 0;
}

/* Whether row i of a block has the mask of the row before. */
INLINE int repeats_mask(const block_memory *s, int64_t i) {
    return i > 0 && s->mask[i] == s->mask[i - 1];
}

/* What the masks of a block's rows are, f16 numbers for BLOCK_KEYS keys from `first` on.  Prefetches those of the next
 * block. */
static int kind_of_f16_masks(const block_memory *s, int64_t first) {
    vh is_used = {0}, bits = is_used;
    for (int64_t i = 0; i < s->m; i++) {
        if (repeats_mask(s, i))
            continue;
        const uint16_t *mask = (const uint16_t *)s->mask[i] + first;
        for (int64_t k = 0; k < BLOCK_KEYS; k += V) {
            vh x = *(const vh_any *)(mask + k);
            is_used |= x ^ 0xfc00;
            bits |= x;
        }
        for (int64_t k = 0; k < BLOCK_KEYS; k += 32)
            __builtin_prefetch(mask + BLOCK_KEYS + k, 0, 2);
    }
    return !is_any(&is_used, sizeof(vh)) ? MASKED : is_any(&bits, sizeof(vh)) ? MIXED : OPEN;
}

/* What the masks of a block's rows are for n keys from `first` on.  If they are MIXED, they are at s->scores, of whole
 * vectors of rows; those of rows and keys that do not exist are -inf. */
static int read_masks(const flash *f, int64_t first, int64_t n, block_memory *s) {
    vi is_used = (vi)vset(0), differs = is_used;
    if (f->mask == NULL)
        return OPEN;
    int type = f->mask->layout.type, size = gs_plain_size(type);
    if (type == GS_TYPE_F16 && n == BLOCK_KEYS) {
        int kind = kind_of_f16_masks(s, first);
        if (kind != MIXED)
            return kind;
    }
    for (int64_t i = s->m * BLOCK_KEYS; i < whole_vectors(s->m) * BLOCK_KEYS; i++)
        s->scores[i] = -INFINITY;
    for (int64_t i = 0; i < s->m; i++) {
        float *to = s->scores + i * BLOCK_KEYS;
        if (repeats_mask(s, i))
            memcpy(to, to - BLOCK_KEYS, (size_t)n * 4);
        else
            floats_from(type, s->mask[i] + first * size, to, n);
        for (int64_t k = n; k < BLOCK_KEYS; k++)
            to[k] = -INFINITY;
        for (int64_t k = 0; k < BLOCK_KEYS; k += V) {
            vf x = vload(to + k);
            is_used |= x != -INFINITY;
            differs |= x != 0;
        }
    }
    return !is_any(&is_used, sizeof(vi)) ? MASKED : is_any(&differs, sizeof(vi)) ? MIXED : OPEN;
}

/* How many keys of a block are read for `rows` query rows from `row` on, whose masks are at s->scores: up to the last
 * one that one of them does not mask. */
static int64_t keys_read(int64_t row, int64_t rows, const block_memory *s) {
    int64_t n = 0;
    for (int64_t i = row; i < row + rows; i++) {
        const float *mask = s->scores + i * BLOCK_KEYS;
        int64_t last = BLOCK_KEYS;
        while (last > n && mask[last - 1] == -INFINITY)
            last--;
        n = last;
    }
    return n;
}

/* Multiplies the sums of V query rows from `row` on by `change`. */
static void rescale_rows(const flash *f, int64_t row, vf change, block_memory *s) {
    int64_t width = padded(f->dv);
    float by[V];
    vstore(by, change);
    for (int64_t i = 0; i < V; i++) {
        float *out = s->out + (row + i) * width;
        for (int64_t k = 0; k < width && by[i] != 1; k += V)
            vstore(out + k, vload(out + k) * by[i]);
    }
}

/* Turns the dot products of V query rows from `row` on with n keys into weights, exp(score - largest).  If a row's
 * largest score grows, the row's sums over earlier keys are rescaled to the new largest score.  With a score of NaN the
 * total is NaN: finish_block then computes the row again. */
INLINE void weigh_rows(const flash *f, int64_t row, int64_t n, const int has_bias, block_memory *s) {
    float *scores = s->scores + row;
    const float *bias = s->bias + row, cap = f->softcap;
    vf before = vload(s->top + row), top = before, slope = vload(s->slope + row);
    for (int64_t k = 0; k < n; k++) {
        vf x = vload(scores + k * BLOCK_ROWS);
        if (cap != 0)
            x = vtanh(x) * cap;
        if (has_bias)
            x = masked_score(x, vload(bias + k * BLOCK_ROWS), slope);
        if (cap != 0 || has_bias)
            vstore(scores + k * BLOCK_ROWS, x);
        top = vmax(x, top);
    }
    vf base = vpick(top == -INFINITY, vset(0), top), change = vexp(before - base), total = vset(0);
    for (int64_t k = 0; k < n; k++) {
        vf x = vexp(vload(scores + k * BLOCK_ROWS) - base);
        vstore(scores + k * BLOCK_ROWS, x);
        total += x;
    }
    vstore(s->top + row, top);
    vstore(s->total + row, vfma(vload(s->total + row), change, total));
    vi has_changed = (change != 1) & (before != -INFINITY);
    if (is_any(&has_changed, sizeof(vi)))
        rescale_rows(f, row, change, s);
}

/* Adds the first n keys of a block to the sums of `rows` query rows from `row` on; both are multiples of V. */
static void attend_block(const flash *f, int64_t row, int64_t rows, int64_t n, int has_bias, block_memory *s) {
    int64_t d = padded(f->d), dv = padded(f->dv), used = s->m - row < rows ? s->m - row : rows;
    block_product(s->scores + row, BLOCK_ROWS, s->keys, d, 1, s->q + row, BLOCK_ROWS, n, rows, f->d, 0);
    for (int64_t i = row; i < row + rows; i += V) {
        if (has_bias)
            weigh_rows(f, i, n, 1, s);
        else
            weigh_rows(f, i, n, 0, s);
    }
    block_product(s->out + row * dv, dv, s->scores + row, 1, BLOCK_ROWS, s->values, dv, used, dv, n, 1);
}

/* Adds the keys of a block with MIXED masks to the sums of `rows` query rows, of each as many keys as it reads:
 * neighbouring vectors of rows that read equally many keys are computed together. */
static void attend_mixed(const flash *f, int64_t rows, block_memory *s) {
    int64_t n[BLOCK_ROWS / V];
    for (int64_t i = 0; i < rows; i += V)
        n[i / V] = keys_read(i, V, s);
    transpose_to(s->scores, BLOCK_KEYS, rows, BLOCK_KEYS, s->bias);
    for (int64_t row = 0, end; row < rows; row = end) {
        for (end = row + V; end < rows && n[end / V] == n[row / V]; end += V)
            ;
        if (n[row / V] > 0)
            attend_block(f, row, end - row, n[row / V], 1, s);
    }
}

/* Adds a sum over some keys, [top, total, acc[dv]] as attend_lines writes it, to that over others: their weights become
 * relative to the larger of both top scores. */
static void add_sum(const flash *f, const float *sum, float *top, float *total, float *out) {
    if (sum[0] == -INFINITY)
        return;
    float larger = sum[0] > *top || sum[0] != sum[0] ? sum[0] : *top;
    float before = *top == -INFINITY ? 0 : exp_of_one(*top - larger), now = exp_of_one(sum[0] - larger);
    for (int64_t i = 0; i < f->dv; i++)
        out[i] = (before == 0 ? 0 : out[i] * before) + sum[2 + i] * now;
    *total = *total * before + sum[1] * now;
    *top = larger;
}

/* Whether a block has so few keys that are not masked that attend_keys is faster, as measured: `most` groups of four
 * keys, each of one row, take no longer than the block, a part of whose time is to convert its keys and values.  Rows
 * with the mask of the row before are computed together with it, which takes a third of the time for each.  attend_keys
 * converts keys again for each row: in registers, which takes little time, only those of f16 and bf16. */
static int block_is_sparse(const flash *f, const block_memory *s) {
    int64_t thirds = 0, most = is_half(f->k) && is_half(f->v) ? 24 + 5 * s->m / 2 : 20 + s->m;
    for (int64_t i = 0; i < s->m && thirds <= 3 * most; i++)
        thirds += used_fours(s->scores + i * BLOCK_KEYS, BLOCK_KEYS) * (repeats_mask(s, i) ? 1 : 3);
    return thirds <= 3 * most;
}

/* Gathers keys of sparse blocks, from block *block on, that a query row does not mask: up to CHUNK of them, of whole
 * blocks.  Returns their number, with those of whole_fours, and in *block where to go on. */
static int64_t gather_keys(const flash *f, line l, int64_t *block, const block_memory *s, lines_memory to) {
    int64_t used = 0, blocks = blocks_of_keys(f);
    for (; *block < blocks && used + BLOCK_KEYS <= CHUNK; ++*block) {
        if (!s->is_sparse[*block])
            continue;
        float tile[BLOCK_KEYS];
        int64_t first = *block * BLOCK_KEYS, n = f->n_kv - first < BLOCK_KEYS ? f->n_kv - first : BLOCK_KEYS;
        used += unmasked_keys(bias_of(f, l, first, n, tile), first, n, to.index + used, to.tile + used);
    }
    return whole_fours(used, to.index, to.tile);
}

/* Adds the keys of sparse blocks to the sums of a block's rows: of those that have one mask, up to TOGETHER rows at a
 * time. */
static void attend_sparse(const flash *f, int64_t head_kv, int64_t batch, int64_t m0, block_memory *s) {
    int64_t size = 2 + padded(f->dv);
    float *sums = s->keys;
    lines_memory lines = lines_memory_at(f, sums + TOGETHER * size, TOGETHER);
    for (int64_t i = 0, alike; i < s->m; i += alike) {
        for (alike = 1; i + alike < s->m && repeats_mask(s, i + alike); alike++)
            ;
        for (int64_t block = 0, n; (n = gather_keys(f, line_of(f, head_kv, batch, m0 + i), &block, s, lines)) > 0;)
            for (int64_t r = i, now; r < i + alike; r += now) {
                now = together(i + alike - r);
                for (int64_t k = 0; k < now; k++)
                    scaled_query(f, line_of(f, head_kv, batch, m0 + r + k), lines.q + k * padded(f->d));
                attend_keys(f, head_kv, batch, m0 + r, now, 0, n, lines.tile, lines.index, lines, sums + 2, size, sums,
                            sums + 1);
                for (int64_t k = 0; k < now; k++)
                    add_sum(f, sums + k * size, &s->top[r + k], &s->total[r + k], s->out + (r + k) * padded(f->dv));
            }
    }
}

/* Recomputes a query row whose result is NaN, from unmasked keys and values alone.  The block products also multiply
 * masked values, by weight 0, and 0 times an inf or NaN is NaN.  A block that makes a NaN of finite data is slow, not
 * wrong: results do not show it. */
static void attend_again(const flash *f, int64_t head_kv, int64_t batch, int64_t m, float *memory) {
    lines_memory s = lines_memory_at(f, memory + 2 * (2 + padded(f->dv)), 1);
    int64_t size = 2 + padded(f->dv);
    float *sum = memory, *chunk = memory + size;
    sum[0] = -INFINITY;
    sum[1] = 0;
    memset(sum + 2, 0, (size_t)f->dv * 4);
    scaled_query(f, line_of(f, head_kv, batch, m), s.q);
    for (int64_t first = 0; first < f->n_kv; first += CHUNK) {
        int64_t n = f->n_kv - first < CHUNK ? f->n_kv - first : CHUNK;
        attend_lines(f, head_kv, batch, m, 1, first, n, s, chunk + 2, size, chunk, chunk + 1);
        add_sum(f, chunk, sum, sum + 1, sum + 2);
    }
    merge_chunks(f, line_of(f, head_kv, batch, m), sum, 1, size);
}

static void finish_block(const flash *f, int64_t head_kv, int64_t batch, int64_t m0, block_memory *s) {
    int64_t width = padded(f->dv);
    for (int64_t i = 0; i < s->m; i++) {
        line l = line_of(f, head_kv, batch, m0 + i);
        float *out = result_of(f, l), total = s->total[i], weight = 1;
        const float *sum = s->out + i * width;
        if (f->sinks != NULL) {
            float sink = f->sinks[l.head], top = sink > s->top[i] ? sink : s->top[i];
            weight = s->top[i] == -INFINITY ? 0 : exp_of_one(s->top[i] - top);
            total = total * weight + exp_of_one(sink - top);
        }
        int lost = total != total;
        for (int64_t k = 0; k < f->dv; k++) {
            out[k] = total == 0 ? 0 : sum[k] * weight / total;
            lost |= out[k] != out[k];
        }
        if (lost)
            attend_again(f, head_kv, batch, m0 + i, s->keys);
    }
}

/* How many query rows a block has, of `heads` key heads with `rows` rows each: BLOCK_ROWS, or fewer where threads would
 * get too few blocks. */
static int64_t rows_of_block(int64_t heads, int64_t rows) {
    int64_t n = BLOCK_ROWS;
    while (n > LEAST_ROWS && heads * ((rows + n - 1) / n) < LEAST_BLOCKS)
        n /= 2;
    return n;
}

/* A unit of work is a block of up to arg[3] query rows of a key head, over all keys.  arg[2]: how many such blocks a
 * key head has. */
static void run_blocks(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    flash f = flash_of(call->node);
    block_memory s = block_memory_at(&f, (float *)scratch);
    int64_t rows = f.n_rows * f.group, blocks = call->arg[2], n_head_kv = f.n_head / f.group;
    int64_t most = call->arg[3];
    for (int64_t unit = first_unit(call, part); unit < end_unit(call, part); unit++) {
        int64_t m0 = unit % blocks * most, head_kv = unit / blocks % n_head_kv;
        int64_t batch = unit / blocks / n_head_kv, m = rows - m0 < most ? rows - m0 : most;
        begin_rows(&f, head_kv, batch, m0, m, &s);
        int any_sparse = 0;
        for (int64_t first = 0; first < f.n_kv; first += BLOCK_KEYS) {
            int64_t n = f.n_kv - first < BLOCK_KEYS ? f.n_kv - first : BLOCK_KEYS;
            int masks = read_masks(&f, first, n, &s), sparse = masks == MIXED && block_is_sparse(&f, &s);
            s.is_sparse[first / BLOCK_KEYS] = (char)sparse;
            any_sparse |= sparse;
            if (masks == MASKED || sparse)
                continue;
            rows_as_f32(f.k, head_kv, batch, first, n, f.d, s.keys);
            rows_as_f32(f.v, head_kv, batch, first, n, f.dv, s.values);
            if (masks == OPEN)
                attend_block(&f, 0, whole_vectors(m), n, 0, &s);
            else
                attend_mixed(&f, whole_vectors(m), &s);
        }
        if (any_sparse)
            attend_sparse(&f, head_kv, batch, m0, &s);
        finish_block(&f, head_kv, batch, m0, &s);
    }
}
