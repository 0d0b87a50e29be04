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

/* Writes the product of a (TILE_ROWS x n) and b (n x `vectors` * V) to c, or adds it to c if `more`.  lda, ldb and ldc:
 * floats from one row of a, b and c to the next. */
INLINE void small_product(float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t ldb, int64_t n,
                          int vectors, int more) {
    vf s[TILE_ROWS][TILE_VECTORS];
    for (int r = 0; r < TILE_ROWS; r++)
        for (int i = 0; i < vectors; i++)
            s[r][i] = more ? vload(c + r * ldc + i * V) : vset(0);
    for (int64_t k = 0; k < n; k++) {
        vf x[TILE_VECTORS];
        for (int i = 0; i < vectors; i++)
            x[i] = vload(b + k * ldb + i * V);
        for (int r = 0; r < TILE_ROWS; r++)
            for (int i = 0; i < vectors; i++)
                s[r][i] = vfma(vset(a[r * lda + k]), x[i], s[r][i]);
    }
    for (int r = 0; r < TILE_ROWS; r++)
        for (int i = 0; i < vectors; i++)
            vstore(c + r * ldc + i * V, s[r][i]);
}

/* Writes the product of a (`rows` x n) and b (n x `columns`) to c, or adds it to c if `more`.  `rows` must be a
 * multiple of TILE_ROWS, `columns` of V; lda, ldb and ldc: floats from one row to the next. */
static void block_product(float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t ldb,
                          int64_t rows, int64_t columns, int64_t n, int more) {
    int64_t i = 0;
    for (; i + TILE_VECTORS * V <= columns; i += TILE_VECTORS * V)
        for (int64_t r = 0; r < rows; r += TILE_ROWS)
            small_product(c + r * ldc + i, ldc, a + r * lda, lda, b + i, ldb, n, TILE_VECTORS, more);
    for (; i < columns; i += V)
        for (int64_t r = 0; r < rows; r += TILE_ROWS)
            small_product(c + r * ldc + i, ldc, a + r * lda, lda, b + i, ldb, n, 1, more);
}

typedef struct block_memory {
    float *q, *scores, *keys, *values, *out, *top, *total, *copy, *bias;
    char *is_sparse;                /* for each block of keys */
} block_memory;

static int64_t blocks_of_keys(const flash *f) {
    return (f->n_kv + BLOCK_KEYS - 1) / BLOCK_KEYS;
}

static block_memory block_memory_at(const flash *f, float *at) {
    block_memory s;
    s.q = at;
    s.scores = s.q + BLOCK_ROWS * padded(f->d);
    s.keys = s.scores + BLOCK_ROWS * BLOCK_KEYS;
    s.values = s.keys + padded(f->d) * BLOCK_KEYS;
    s.out = s.values + BLOCK_KEYS * padded(f->dv);
    s.top = s.out + BLOCK_ROWS * padded(f->dv);
    s.total = s.top + BLOCK_ROWS;
    s.bias = s.total + BLOCK_ROWS;
    s.copy = s.bias + BLOCK_ROWS * BLOCK_KEYS;
    s.is_sparse = (char *)(s.copy + 4 * padded(f->d));
    return s;
}

static int64_t block_floats(const flash *f) {
    int64_t d = padded(f->d), dv = padded(f->dv);
    return BLOCK_ROWS * (d + dv + 2 + 2 * BLOCK_KEYS) + BLOCK_KEYS * (d + dv) + 4 * d + (blocks_of_keys(f) + 3) / 4;
}

/* Writes n keys from `first` on, transposed and as f32, to s->keys[element][key]; keys n .. BLOCK_KEYS - 1 become 0. */
static void transposed_keys(const flash *f, int64_t head_kv, int64_t batch, int64_t first, int64_t n,
                            block_memory *s) {
    int64_t width = padded(f->d);
    for (int64_t key = 0; key < BLOCK_KEYS; key += 4) {
        const float *x[4];
        for (int i = 0; i < 4; i++) {
            float *copy = s->copy + i * width;
            if (key + i < n) {
                x[i] = row_as_f32(f->k, (where){first + key + i, head_kv, batch}, f->d, copy);
            } else {
                memset(copy, 0, (size_t)f->d * 4);
                x[i] = copy;
            }
        }
        for (int64_t i = 0; i < f->d; i++) {
            float *to = s->keys + i * BLOCK_KEYS + key;
            to[0] = x[0][i];
            to[1] = x[1][i];
            to[2] = x[2][i];
            to[3] = x[3][i];
        }
    }
}

static void values_of_keys(const flash *f, int64_t head_kv, int64_t batch, int64_t first, int64_t n, block_memory *s) {
    int64_t width = padded(f->dv);
    for (int64_t key = 0; key < BLOCK_KEYS; key++) {
        float *to = s->values + key * width;
        if (key < n)
            load_row(f->v->layout.type, row_of(f->v, (where){first + key, head_kv, batch}), to, f->dv);
        int64_t from = key < n ? f->dv : 0;
        memset(to + from, 0, (size_t)(width - from) * 4);
    }
}

/* Writes the masks of m query rows for n keys to s->bias, and -inf for keys n .. BLOCK_KEYS - 1.  Returns 0 if all keys
 * are masked for all rows: the caller then skips the block. */
static int block_bias(const flash *f, int64_t head_kv, int64_t batch, int64_t m0, int64_t m, int64_t first, int64_t n,
                      block_memory *s) {
    vi any = (vi)vset(0);
    float tile[BLOCK_KEYS];
    for (int64_t i = 0; i < m; i++) {
        float *to = s->bias + i * BLOCK_KEYS;
        const float *bias = bias_of(f, line_of(f, head_kv, batch, m0 + i), first, n, tile);
        if (bias == NULL)
            memset(to, 0, (size_t)n * 4);
        else
            memcpy(to, bias, (size_t)n * 4);
        for (int64_t k = n; k < BLOCK_KEYS; k++)
            to[k] = -INFINITY;
        for (int64_t k = 0; k < BLOCK_KEYS; k += V)
            any |= vload(to + k) != -INFINITY;
    }
    int32_t seen[V], found = 0;
    memcpy(seen, &any, sizeof(seen));
    for (int i = 0; i < V; i++)
        found |= seen[i];
    return found;
}

/* Turns the scores of a block into weights, exp(score - largest).  If a row's largest score grows, the row's sums over
 * earlier keys are rescaled to the new largest score. */
static void weigh_block(const flash *f, int64_t head_kv, int64_t batch, int64_t m0, int64_t m, block_memory *s) {
    int64_t width = padded(f->dv);
    for (int64_t i = 0; i < m; i++) {
        float *scores = s->scores + i * BLOCK_KEYS;
        finish_scores(f, line_of(f, head_kv, batch, m0 + i), scores, s->bias + i * BLOCK_KEYS, BLOCK_KEYS);
        float top = largest_of(scores, BLOCK_KEYS);
        if (top < s->top[i] || top == -INFINITY)
            top = s->top[i];
        if (top == -INFINITY) {
            if (has_nan(scores, BLOCK_KEYS))
                s->total[i] = NAN;              /* finish_block sees the NaN and recomputes the row */
            memset(scores, 0, BLOCK_KEYS * 4);
            continue;
        }
        if (top != s->top[i]) {
            float change = exp_of_one(s->top[i] - top);
            s->total[i] *= change;
            for (int64_t k = 0; k < width; k += V)
                vstore(s->out + i * width + k, vload(s->out + i * width + k) * change);
            s->top[i] = top;
        }
        s->total[i] += exponents(scores, BLOCK_KEYS, top);
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
 * keys, each of one row, take no longer than the block, a part of whose time is to convert and transpose its keys.
 * attend_keys converts keys again for each row: in registers, which takes little time, only those of f16 and bf16. */
static int block_is_sparse(const flash *f, int64_t m, const block_memory *s) {
    int64_t used = 0, most = (is_half(f->k) && is_half(f->v) ? 40 + 4 * m : 16 + m / 2);
    for (int64_t i = 0; i < m && used <= most; i++)
        used += used_fours(s->bias + i * BLOCK_KEYS, BLOCK_KEYS);
    return used <= most;
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

/* Adds the keys of sparse blocks to the sums of m rows: of those that have one mask, up to TOGETHER rows at a time.  It
 * works in the memory of the block's keys and values, which is larger for all sizes. */
static void attend_sparse(const flash *f, int64_t head_kv, int64_t batch, int64_t m0, int64_t m, block_memory *s) {
    int64_t size = 2 + padded(f->dv), width = padded(f->d);
    float *sums = s->keys;
    lines_memory lines = lines_memory_at(f, sums + TOGETHER * size, TOGETHER);
    for (int64_t i = 0, alike; i < m; i += alike) {
        for (alike = 1; i + alike < m && share_mask(f, m0 + i, alike + 1); alike++)
            ;
        for (int64_t block = 0, n; (n = gather_keys(f, line_of(f, head_kv, batch, m0 + i), &block, s, lines)) > 0;)
            for (int64_t r = i, now; r < i + alike; r += now) {
                now = together(i + alike - r);
                lines.q = s->q + r * width;
                attend_keys(f, head_kv, batch, m0 + r, now, 0, n, lines.tile, lines.index, lines, sums + 2, size, sums,
                            sums + 1);
                for (int64_t k = 0; k < now; k++)
                    add_sum(f, sums + k * size, &s->top[r + k], &s->total[r + k], s->out + (r + k) * padded(f->dv));
            }
    }
}

/* Recomputes a query row whose result is NaN, from unmasked keys and values alone.  The block products also multiply
 * masked values, by weight 0, and 0 times an inf or NaN is NaN. */
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

static void finish_block(const flash *f, int64_t head_kv, int64_t batch, int64_t m0, int64_t m, block_memory *s) {
    int64_t width = padded(f->dv);
    for (int64_t i = 0; i < m; i++) {
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
    int64_t width = padded(f.dv), d = padded(f.d), most = call->arg[3];
    for (int64_t unit = first_unit(call, part); unit < end_unit(call, part); unit++) {
        int64_t m0 = unit % blocks * most, head_kv = unit / blocks % n_head_kv;
        int64_t batch = unit / blocks / n_head_kv, m = rows - m0 < most ? rows - m0 : most;
        int64_t whole = (m + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        memset(s.q, 0, (size_t)(BLOCK_ROWS * d) * 4);
        memset(s.out, 0, (size_t)(BLOCK_ROWS * width) * 4);
        memset(s.scores, 0, BLOCK_ROWS * BLOCK_KEYS * 4);
        for (int64_t i = 0; i < BLOCK_ROWS; i++) {
            s.top[i] = -INFINITY;
            s.total[i] = 0;
        }
        for (int64_t i = 0; i < m; i++)
            scaled_query(&f, line_of(&f, head_kv, batch, m0 + i), s.q + i * d);
        int any_sparse = 0;
        for (int64_t first = 0; first < f.n_kv; first += BLOCK_KEYS) {
            int64_t n = f.n_kv - first < BLOCK_KEYS ? f.n_kv - first : BLOCK_KEYS;
            int used = block_bias(&f, head_kv, batch, m0, m, first, n, &s);
            int sparse = used && f.mask != NULL && block_is_sparse(&f, m, &s);
            s.is_sparse[first / BLOCK_KEYS] = (char)sparse;
            any_sparse |= sparse;
            if (!used || sparse)
                continue;
            transposed_keys(&f, head_kv, batch, first, n, &s);
            values_of_keys(&f, head_kv, batch, first, n, &s);
            block_product(s.scores, BLOCK_KEYS, s.q, d, s.keys, BLOCK_KEYS, whole, BLOCK_KEYS, f.d, 0);
            weigh_block(&f, head_kv, batch, m0, m, &s);
            block_product(s.out, width, s.scores, BLOCK_KEYS, s.values, width, whole, width, BLOCK_KEYS, 1);
        }
        if (any_sparse)
            attend_sparse(&f, head_kv, batch, m0, m, &s);
        finish_block(&f, head_kv, batch, m0, m, &s);
    }
}
