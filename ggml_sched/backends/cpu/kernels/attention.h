/* attention.h -- FLASH_ATTN_EXT: softmax(q k + mask) v without ever holding all the scores.
 *
 * Included once for each instruction set.  Several query heads may share a key head, so all query rows of a key head
 * are computed together.  If a key head has fewer than FEW query rows (decoding), each key is multiplied with each row;
 * different threads take different chunks of CHUNK keys, and the results of the chunks are merged in order.  FEW query
 * rows or more (a prompt) are computed in blocks of BLOCK_ROWS rows by BLOCK_KEYS keys, as products of small matrices.
 * The content of KV cache cells whose mask is -inf, even a NaN, does not affect the result; a row without any unmasked
 * cell gives zeros.
 */
#define UNROLL _Pragma("GCC unroll 16")
#define FEW 8
#define CHUNK 256
#define TOGETHER 3              /* the most query rows that share the conversion of a key: registers hold their sums */
#define AHEAD (24 * 64)         /* about how many bytes of keys, or of values, are prefetched before their use */
#define VALUES 8                /* keys whose values are added for all columns before those of the next keys */
#define BLOCK_ROWS 64
#define BLOCK_KEYS 64
#define FLASH_WORK (1 << 17)    /* about how many multiplications one part makes */

/* The sources and parameters of a node.  d, dv: elements of a key and of a value; group: how many query heads share a
 * key head.  A key head has n_rows * group query rows, numbered m = row * group + head, where `head` counts the query
 * heads that share it. */
typedef struct flash {
    const gs_node *node, *q, *k, *v, *mask;
    const float *sinks;
    int64_t d, dv, n_rows, n_kv, n_head, group;
    float scale, softcap, max_bias;
} flash;

static flash flash_of(const gs_node *node) {
    flash f = {.node = node, .q = node->src[0], .k = node->src[1], .v = node->src[2]};
    f.mask = node->n_src > 3 ? node->src[3] : NULL;
    f.sinks = node->n_src > 4 && node->src[4] != NULL ? node->src[4]->data : NULL;
    f.d = f.q->layout.ne[0];
    f.dv = f.v->layout.ne[0];
    f.n_rows = f.q->layout.ne[1];
    f.n_head = f.q->layout.ne[2];
    f.n_kv = f.k->layout.ne[1];
    f.group = f.n_head / f.k->layout.ne[2];
    f.scale = gs_param_f32(node->params, 0);
    f.max_bias = gs_param_f32(node->params, 1);
    f.softcap = gs_param_f32(node->params, 2);
    if (f.softcap != 0)
        f.scale /= f.softcap;
    return f;
}

/* The indices of a query row. */
typedef struct line { int64_t row, head, batch; } line;

INLINE line line_of(const flash *f, int64_t head_kv, int64_t batch, int64_t m) {
    return (line){m / f->group, head_kv * f->group + m % f->group, batch};
}

INLINE float *result_of(const flash *f, line l) {
    return (float *)row_of(f->node, (where){l.head, l.row, l.batch});
}

static void scaled_query(const flash *f, line l, float *to) {
    const float *q = (const float *)row_of(f->q, (where){l.row, l.head, l.batch});
    for (int64_t i = 0; i < f->d; i++)
        to[i] = q[i] * f->scale;
}

/* The mask of a query row for keys first .. first + n - 1, as f32: a pointer into an f32 mask, else to `tile`, to which
 * the values are converted.  NULL if the node has no mask. */
static const float *bias_of(const flash *f, line l, int64_t first, int64_t n, float *tile) {
    if (f->mask == NULL)
        return NULL;
    const int64_t *ne = f->mask->layout.ne;
    int size = gs_plain_size(f->mask->layout.type);
    const char *at = row_of(f->mask, (where){l.row, l.head % ne[2], l.batch % ne[3]}) + first * size;
    if (f->mask->layout.type == GS_TYPE_F32)
        return (const float *)at;
    floats_from(f->mask->layout.type, at, tile, n);
    return tile;
}

/* -- few rows: key by key ------------------------------------------------------------------------------------- */

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

/* How many bytes after a row of n f16 or bf16 values the row begins that is prefetched with it; `next`: bytes from one
 * row to the next.  0 if the cache, of n_kv rows, has no such row. */
INLINE int64_t ahead_of(int64_t n, int64_t next, int64_t n_kv) {
    int64_t rows = n > 0 && AHEAD / (2 * n) > 1 ? AHEAD / (2 * n) : 1;
    return rows < n_kv ? rows * next : 0;
}

/* V values of f16, or of bf16, as f32. */
INLINE vf vhalves(const int type, const uint16_t *p) {
    return type == GS_TYPE_BF16 ? vfrom_bf16(p) : vfrom_f16(p);
}

/* The dot products of R query rows of f32 with four keys of f16 or bf16: those of row r to to[r * CHUNK] and the three
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
        vsums(s[r][0], s[r][1], s[r][2], s[r][3], to + r * CHUNK);
}

/* acc[i] += weight * x[i], for n elements. */
INLINE void add_scaled(float *acc, float weight, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + V <= n; i += V)
        vstore(acc + i, vfma(vset(weight), vload(x + i), vload(acc + i)));
    for (; i < n; i++)
        acc[i] += weight * x[i];
}

/* acc[r * apart + i] += weights[r * CHUNK + key] * v[key][i], summed over n keys, for r in 0 .. R - 1 and i in
 * 0 .. C * V - 1; v has f16 or bf16 values.  The sums stay in registers, and each vector of v is converted once for all
 * rows.  `stride`: bytes from one key's values to the next.  For each key `width` bytes are prefetched that lie `ahead`
 * bytes after its values.  Values whose weight is 0 are not used: they may be NaN. */
INLINE void add_halves(const int type, const int R, const int C, float *acc, int64_t apart, const float *weights,
                       const char *v, int64_t stride, int64_t n, int64_t width, int64_t ahead) {
    vf s[TOGETHER][8];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++)
            s[r][c] = vload(acc + r * apart + c * V);
    int zeros = 0;
    for (int r = 0; r < R; r++)
        for (int64_t key = 0; key < n; key++)
            zeros |= weights[r * CHUNK + key] == 0;
    for (int64_t key = 0; key < n; key++) {
        const uint16_t *x = (const uint16_t *)(v + key * stride);
        for (int64_t line = 0; line < width; line += 64)
            __builtin_prefetch((const char *)x + ahead + line);
        if (!zeros) {
            UNROLL for (int c = 0; c < C; c++) {
                vf value = vhalves(type, x + c * V);
                UNROLL for (int r = 0; r < R; r++)
                    s[r][c] = vfma(vset(weights[r * CHUNK + key]), value, s[r][c]);
            }
            continue;
        }
        UNROLL for (int r = 0; r < R; r++)
            if (weights[r * CHUNK + key] != 0)
                UNROLL for (int c = 0; c < C; c++)
                    s[r][c] = vfma(vset(weights[r * CHUNK + key]), vhalves(type, x + c * V), s[r][c]);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++)
            vstore(acc + r * apart + c * V, s[r][c]);
}

/* How many of m query rows are computed together next: as many as registers hold sums for, but twice 2 of 4 rows. */
INLINE int64_t together(int64_t m) {
    return m == 4 ? 2 : m < TOGETHER ? m : TOGETHER;
}

/* Writes the dot products of m query rows with four keys, as dots_of_halves. */
INLINE void dots_of_rows(const int type, const float *q, int64_t width, int64_t m, const uint16_t *const *k, int64_t n,
                         float *to) {
    for (int64_t r = 0, now; r < m; r += now, q += now * width, to += now * CHUNK) {
        now = together(m - r);
        switch (now) {
        case 1: dots_of_halves(type, 1, q, width, k, n, to); break;
        case 2: dots_of_halves(type, 2, q, width, k, n, to); break;
        default: dots_of_halves(type, 3, q, width, k, n, to);
        }
    }
}

/* Adds the weighted values of n keys to acc of m query rows, as add_halves, for all columns but the last dv % (4 V);
 * returns how many columns that are.  It takes VALUES keys at a time: their values are in the cache for all rows and
 * columns. */
INLINE int64_t add_weighted(const int type, const flash *f, float *acc, int64_t apart, const float *weights, int64_t m,
                            const char *v, int64_t n) {
    int64_t stride = f->v->layout.nb[1], ahead = ahead_of(f->dv, stride, f->n_kv);
    int64_t block = m == 1 && f->dv <= 8 * V ? n : VALUES;
    for (int64_t key = 0; key < n; key += block)
        for (int64_t r = 0, now; r < m; r += now) {
            now = together(m - r);
            for (int64_t column = 0, wide; column + 4 * V <= f->dv; column += wide * V) {
                float *to = acc + r * apart + column;
                const float *weight = weights + r * CHUNK + key;
                const char *from = v + key * stride + column * 2;
                int64_t keys = n - key < block ? n - key : block, fetched = r + column == 0 ? 2 * f->dv : 0;
                wide = now == 1 && column + 8 * V <= f->dv ? 8 : 4;
                switch (now + wide) {
                case 1 + 8: add_halves(type, 1, 8, to, apart, weight, from, stride, keys, fetched, ahead); break;
                case 1 + 4: add_halves(type, 1, 4, to, apart, weight, from, stride, keys, fetched, ahead); break;
                case 2 + 4: add_halves(type, 2, 4, to, apart, weight, from, stride, keys, fetched, ahead); break;
                default: add_halves(type, 3, 4, to, apart, weight, from, stride, keys, fetched, ahead);
                }
            }
        }
    return f->dv / (4 * V) * (4 * V);
}

static int is_half(const gs_node *t) {
    return t->layout.type == GS_TYPE_F16 || t->layout.type == GS_TYPE_BF16;
}

INLINE const float *row_as_f32(const gs_node *t, where w, int64_t n, float *copy) {
    const char *from = row_of(t, w);
    if (t->layout.type == GS_TYPE_F32)
        return (const float *)from;
    load_row(t->layout.type, from, copy, n);
    return copy;
}

typedef struct lines_memory { float *q, *scores, *copy, *tile; } lines_memory;

static int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

static lines_memory lines_memory_at(const flash *f, float *at, int64_t m) {
    lines_memory s;
    s.q = at;
    s.scores = s.q + m * padded(f->d);
    s.copy = s.scores + m * CHUNK;
    s.tile = s.copy + padded(f->d > f->dv ? f->d : f->dv);
    return s;
}

static int64_t lines_floats(const flash *f, int64_t m) {
    return m * padded(f->d) + m * CHUNK + padded(f->d > f->dv ? f->d : f->dv) + CHUNK + 16;
}

/* The final scores of V keys, from their dot products `scores`: limited by the soft cap `cap` (0: none), plus the mask
 * `bias` (NULL: none) times `slope`.  Masked keys get -inf, whatever their dot product was. */
INLINE vf final_scores(const float *scores, const float *bias, float slope, float cap) {
    vf s = vload(scores);
    if (cap != 0)
        s = vtanh(s) * cap;
    if (bias == NULL)
        return s;
    vf b = vload(bias);
    return vpick(b == -INFINITY, vset(-INFINITY), s + b * slope);
}

/* Replaces the dot products of query row l with n keys by their final scores. */
static void finish_scores(const flash *f, line l, float *scores, const float *bias, int64_t n) {
    int64_t i = 0;
    float slope = slope_of(l.head, f->n_head, f->max_bias), cap = f->softcap;
    for (; i + V <= n; i += V)
        vstore(scores + i, final_scores(scores + i, bias == NULL ? NULL : bias + i, slope, cap));
    if (i < n) {
        size_t rest = (size_t)(n - i) * 4;
        float part[V] = {0}, add[V] = {0};
        memcpy(part, scores + i, rest);
        if (bias != NULL)
            memcpy(add, bias + i, rest);
        vstore(part, final_scores(part, bias == NULL ? NULL : add, slope, cap));
        memcpy(scores + i, part, rest);
    }
}

static int has_nan(const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (x[i] != x[i])
            return 1;
    return 0;
}

/* Attention of query rows m0 .. m0 + m - 1 of a key head to keys first .. first + n - 1.  For query row m0 + i it
 * writes the sum of weighted values to acc + i * stride (dv floats), the largest score to top[i * stride] and the sum
 * of the weights, exp(score - largest), to total[i * stride]. */
static void attend_lines(const flash *f, int64_t head_kv, int64_t batch, int64_t m0, int64_t m, int64_t first,
                         int64_t n, lines_memory s, float *acc, int64_t stride, float *top, float *total) {
    int64_t width = padded(f->d);
    const float *bias = NULL;
    for (int64_t i = 0; i < m; i++)
        scaled_query(f, line_of(f, head_kv, batch, m0 + i), s.q + i * width);
    if (m == 1 || (f->n_rows == 1 && f->mask != NULL && f->mask->layout.ne[2] == 1))
        bias = bias_of(f, line_of(f, head_kv, batch, m0), first, n, s.tile);    /* one mask for all m rows */
    int64_t key = 0;
    if (is_half(f->k) && f->d % V == 0) {
        /* Four keys at a time.  The dot product of a masked key among them is computed, too, which is cheaper than a
         * branch; finish_scores replaces the masked key's score. */
        const char *k = row_of(f->k, (where){first, head_kv, batch});
        int64_t next = f->k->layout.nb[1], ahead = ahead_of(f->d, next, f->n_kv);
        for (; key + 4 <= n; key += 4) {
            if (bias != NULL && bias[key] == -INFINITY && bias[key + 1] == -INFINITY && bias[key + 2] == -INFINITY
                && bias[key + 3] == -INFINITY) {
                for (int64_t i = 0; i < m; i++)
                    memset(s.scores + i * CHUNK + key, 0, 16);
                continue;
            }
            const uint16_t *rows[4];
            for (int i = 0; i < 4; i++) {
                rows[i] = (const uint16_t *)(k + (key + i) * next);
                for (int64_t line = 0; line < 2 * f->d; line += 64)
                    __builtin_prefetch((const char *)rows[i] + ahead + line);
            }
            if (f->k->layout.type == GS_TYPE_F16)
                dots_of_rows(GS_TYPE_F16, s.q, width, m, rows, f->d, s.scores + key);
            else
                dots_of_rows(GS_TYPE_BF16, s.q, width, m, rows, f->d, s.scores + key);
        }
    }
    for (; key < n; key++) {
        if (bias != NULL && bias[key] == -INFINITY) {
            for (int64_t i = 0; i < m; i++)
                s.scores[i * CHUNK + key] = 0;
            continue;
        }
        const float *k = row_as_f32(f->k, (where){first + key, head_kv, batch}, f->d, s.copy);
        for (int64_t i = 0; i < m; i++)
            s.scores[i * CHUNK + key] = dot_f32(s.q + i * width, k, f->d);
    }
    for (int64_t i = 0; i < m; i++) {
        line l = line_of(f, head_kv, batch, m0 + i);
        float *scores = s.scores + i * CHUNK;
        finish_scores(f, l, scores, bias_of(f, l, first, n, s.tile), n);
        top[i * stride] = largest_of(scores, n);
        if (top[i * stride] == -INFINITY && has_nan(scores, n))
            top[i * stride] = 0;
        total[i * stride] = top[i * stride] == -INFINITY ? 0 : exponents(scores, n, top[i * stride]);
        if (top[i * stride] == -INFINITY)
            memset(scores, 0, (size_t)n * 4);
        memset(acc + i * stride, 0, (size_t)f->dv * 4);
    }
    /* Sum the weighted values: of f16 and bf16 values 4 V columns at a time, with the sums in registers; then the
     * remaining columns, or all columns of other types, key by key. */
    int64_t column = 0;
    const char *v0 = row_of(f->v, (where){first, head_kv, batch});
    if (f->v->layout.type == GS_TYPE_F16)
        column = add_weighted(GS_TYPE_F16, f, acc, stride, s.scores, m, v0, n);
    else if (f->v->layout.type == GS_TYPE_BF16)
        column = add_weighted(GS_TYPE_BF16, f, acc, stride, s.scores, m, v0, n);
    if (column == f->dv)
        return;
    for (int64_t key = 0; key < n; key++) {
        const float *v = NULL;
        for (int64_t i = 0; i < m; i++) {
            if (s.scores[i * CHUNK + key] == 0)
                continue;
            if (v == NULL)
                v = row_as_f32(f->v, (where){first + key, head_kv, batch}, f->dv, s.copy);
            add_scaled(acc + i * stride + column, s.scores[i * CHUNK + key], v + column, f->dv - column);
        }
    }
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

/* Runs attend_lines; a unit of work is one chunk of keys of one key head.  The key heads of a chunk, which are
 * neighbours in the rows of a cache, are consecutive units.  arg[2]: number of chunks; arg[3]: floats of the result of
 * one query row for one chunk. */
static void run_chunks(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    flash f = flash_of(call->node);
    int64_t m = f.n_rows * f.group, chunks = call->arg[2], size = call->arg[3], n_head_kv = f.n_head / f.group;
    for (int64_t unit = first_unit(call, part); unit < end_unit(call, part); unit++) {
        int64_t head_kv = unit % n_head_kv, chunk = unit / n_head_kv % chunks, batch = unit / n_head_kv / chunks;
        int64_t first = chunk * CHUNK, n = f.n_kv - first < CHUNK ? f.n_kv - first : CHUNK;
        /* `shared` is [key head][query row of that head][chunk], each of `size` floats. */
        float *to = (float *)shared + ((batch * n_head_kv + head_kv) * m * chunks + chunk) * size;
        attend_lines(&f, head_kv, batch, 0, m, first, n, lines_memory_at(&f, (float *)scratch, m), to + 2,
                     chunks * size, to, to + 1);
    }
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

/* -- many rows: in blocks ---------------------------------------------------------------------------------------- */

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

typedef struct block_memory { float *q, *scores, *keys, *values, *out, *top, *total, *copy, *bias; } block_memory;

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
    return s;
}

static int64_t block_floats(const flash *f) {
    int64_t d = padded(f->d), dv = padded(f->dv);
    return BLOCK_ROWS * (d + dv + 2 + 2 * BLOCK_KEYS) + BLOCK_KEYS * (d + dv) + 4 * d;
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

/* Recomputes a query row whose result is NaN, from unmasked keys and values alone.  The block products also multiply
 * masked values, by weight 0, and 0 times an inf or NaN is NaN. */
static void attend_again(const flash *f, int64_t head_kv, int64_t batch, int64_t m, float *memory) {
    lines_memory s = lines_memory_at(f, memory + 2 * (2 + padded(f->dv)), 1);
    int64_t size = 2 + padded(f->dv);
    float *sum = memory, *chunk = memory + size;
    sum[0] = -INFINITY;
    sum[1] = 0;
    memset(sum + 2, 0, (size_t)f->dv * 4);
    for (int64_t first = 0; first < f->n_kv; first += CHUNK) {
        int64_t n = f->n_kv - first < CHUNK ? f->n_kv - first : CHUNK;
        attend_lines(f, head_kv, batch, m, 1, first, n, s, chunk + 2, size, chunk, chunk + 1);
        if (chunk[0] == -INFINITY)
            continue;
        float top = chunk[0] > sum[0] || chunk[0] != chunk[0] ? chunk[0] : sum[0];
        float before = sum[0] == -INFINITY ? 0 : exp_of_one(sum[0] - top), now = exp_of_one(chunk[0] - top);
        for (int64_t i = 0; i < f->dv; i++)
            sum[2 + i] = (before == 0 ? 0 : sum[2 + i] * before) + chunk[2 + i] * now;
        sum[1] = sum[1] * before + chunk[1] * now;
        sum[0] = top;
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

/* A unit of work is a block of up to BLOCK_ROWS query rows of a key head, over all keys.  arg[2]: how many blocks a key
 * head has. */
static void run_blocks(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    flash f = flash_of(call->node);
    block_memory s = block_memory_at(&f, (float *)scratch);
    int64_t rows = f.n_rows * f.group, blocks = call->arg[2], n_head_kv = f.n_head / f.group;
    int64_t width = padded(f.dv), d = padded(f.d);
    for (int64_t unit = first_unit(call, part); unit < end_unit(call, part); unit++) {
        int64_t m0 = unit % blocks * BLOCK_ROWS, head_kv = unit / blocks % n_head_kv;
        int64_t batch = unit / blocks / n_head_kv, m = rows - m0 < BLOCK_ROWS ? rows - m0 : BLOCK_ROWS;
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
        for (int64_t first = 0; first < f.n_kv; first += BLOCK_KEYS) {
            int64_t n = f.n_kv - first < BLOCK_KEYS ? f.n_kv - first : BLOCK_KEYS;
            if (!block_bias(&f, head_kv, batch, m0, m, first, n, &s))
                continue;
            transposed_keys(&f, head_kv, batch, first, n, &s);
            values_of_keys(&f, head_kv, batch, first, n, &s);
            block_product(s.scores, BLOCK_KEYS, s.q, d, s.keys, BLOCK_KEYS, whole, BLOCK_KEYS, f.d, 0);
            weigh_block(&f, head_kv, batch, m0, m, &s);
            block_product(s.out, width, s.scores, BLOCK_KEYS, s.values, width, whole, width, BLOCK_KEYS, 1);
        }
        finish_block(&f, head_kv, batch, m0, m, &s);
    }
}

/* -- choosing between the two ways -------------------------------------------------------------------------------- */

static int rows_are_whole(const gs_node *t) {
    int elements = gs_block_elements(t->layout.type);
    return t->layout.ne[0] % elements == 0
           && (t->layout.nb[0] == gs_block_bytes(t->layout.type) || t->layout.ne[0] == 1);
}

static int flash_fits(const gs_node *node) {
    const gs_layout *q = &node->src[0]->layout, *k = &node->src[1]->layout, *v = &node->src[2]->layout;
    return rows_are_whole(node->src[0]) && rows_are_whole(node->src[1]) && rows_are_whole(node->src[2])
           && rows_are_whole(node) && k->ne[1] > 0 && q->ne[0] <= 4096 && v->ne[0] <= 4096
           && masks_are_dense(node->n_src > 3 ? node->src[3] : NULL, node->n_src > 4 ? node->src[4] : NULL);
}

static int build_attention(const gs_node *node, int32_t position, gs_calls *to) {
    if (!flash_fits(node))
        return GS_UNSUPPORTED_OP;
    flash f = flash_of(node);
    int64_t m = f.n_rows * f.group, heads = f.k->layout.ne[2] * f.k->layout.ne[3], work = f.d + f.dv;
    if (m >= FEW) {
        int64_t blocks = (m + BLOCK_ROWS - 1) / BLOCK_ROWS;
        int64_t again = 2 * (2 + padded(f.dv)) + lines_floats(&f, 1);
        int64_t before_keys = BLOCK_ROWS * (padded(f.d) + BLOCK_KEYS);
        need(&to->scratch, row_bytes_padded(block_floats(&f)));
        need(&to->scratch, row_bytes_padded(before_keys + again));
        gs_call call = call_over(node, position, run_blocks, heads * blocks, BLOCK_ROWS * work * (f.n_kv + 1) / 4,
                                 FLASH_WORK);
        call.arg[2] = blocks;
        return gs_add_call(to, &call);
    }
    int64_t chunks = (f.n_kv + CHUNK - 1) / CHUNK, size = 2 + padded(f.dv);
    int64_t keys = f.n_kv < CHUNK ? f.n_kv : CHUNK;
    need(&to->scratch, row_bytes_padded(lines_floats(&f, m)));
    need(&to->shared, row_bytes_padded(heads * m * chunks * size));
    gs_call call = call_over(node, position, run_chunks, heads * chunks, m * work * keys, FLASH_WORK);
    call.arg[2] = chunks;
    call.arg[3] = size;
    int status = gs_add_call(to, &call);
    if (status != GS_OK)
        return status;
    gs_call merge = call_over(node, position, run_merge, heads * m, f.dv * chunks, ROW_WORK);
    merge.arg[2] = chunks;
    merge.arg[3] = size;
    return gs_add_call(to, &merge);
}
