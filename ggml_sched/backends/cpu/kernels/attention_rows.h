/* attention_rows.h -- attention of one token, by rows of a cache: all key heads of a few rows after each other.
 *
 * Included by attention.h.  A row of a cache holds the keys, or the values, of one position for all key heads.  Head by
 * head, as attention_few.h reads it, a cache is read in pieces that lie far from each other; but processors read ahead
 * in linear streams only, and without that a core waits for few lines at a time.  So a thread that computes all heads
 * of a chunk of keys reads it by blocks of rows, and prefetches the next blocks in order.  The results have the same
 * bits.
 */
#define FEW_VALUES 4            /* rows of values in a block for one or two query rows of a head; VALUES for more */

/* Whether rows consist of the parts of all key heads, in f16 or bf16. */
static int has_rows_of_heads(const gs_node *t) {
    return is_half(t) && t->layout.nb[2] * t->layout.ne[2] == t->layout.nb[1];
}

/* Whether chunks of all key heads can be read by rows: one token, with one mask, whose heads are whole vectors. */
static int reads_rows(const flash *f) {
    return f->n_rows == 1 && has_rows_of_heads(f->k) && has_rows_of_heads(f->v) && f->d % V == 0 && f->dv % (4 * V) == 0
           && (f->mask == NULL || f->mask->layout.ne[2] == 1);
}

/* The floats of scratch that attend_rows uses, without those for a mask. */
static int64_t rows_floats(const flash *f) {
    return f->n_head * (padded(f->d) + padded(f->dv) + APART) + padded(f->d);
}

/* Blocks of rows that are read in order. */
typedef struct blocks_of_rows {
    const char *first, *then;       /* where they begin, and where the rows do that are read after them    */
    int64_t nbytes, ahead;          /* bytes of all blocks; how far ahead of their use bytes are prefetched */
    int64_t rows, stride, apart;    /* rows of a block; bytes from row to row, and from head to head        */
} blocks_of_rows;

INLINE blocks_of_rows blocks_of(const gs_node *t, where w, int64_t n, int64_t rows, const char *then) {
    int64_t stride = t->layout.nb[1];
    return (blocks_of_rows){row_of(t, w), then, n * stride, AHEAD + rows * stride, rows, stride, t->layout.nb[2]};
}

/* Where head `head` begins in the block whose first row is `row`.  Of the bytes that are read `ahead` later it
 * prefetches as many as the head has in the block. */
INLINE const char *head_of_block(const blocks_of_rows *b, int64_t row, int64_t head) {
    int64_t nbytes = b->rows * b->apart, at = row * b->stride + head * nbytes + b->ahead;
    const char *later = at < b->nbytes ? b->first + at : b->then + (at - b->nbytes);
    for (int64_t line = 0; line < nbytes; line += 64)
        __builtin_prefetch(later + line, 0, 2);
    return b->first + row * b->stride + head * b->apart;
}

/* Attention of all query rows to keys first .. first + n - 1, of which `bias` is the mask (NULL: none).  For each query
 * row it writes [top, total, acc[dv]], `between` floats apart, as attend_keys computes them. */
static void attend_rows(const flash *f, int64_t batch, int64_t first, int64_t n, const float *bias, float *memory,
                        float *to, int64_t between) {
    const int64_t m = f->group, lines = f->n_head, heads = lines / m, width = padded(f->d), wide = padded(f->dv);
    float *q = memory, *acc = q + lines * width, *scores = acc + lines * wide, *copy = scores + lines * APART;
    const where begin = {first, 0, batch}, end = {first + n, 0, batch};
    const blocks_of_rows keys = blocks_of(f->k, begin, n, 4, row_of(f->v, begin));
    const blocks_of_rows values = blocks_of(f->v, begin, n, m <= 2 ? FEW_VALUES : VALUES, row_of(f->k, end));
    for (int64_t i = 0; i < lines; i++)
        scaled_query(f, line_of(f, i / m, batch, i % m), q + i * width);
    int64_t key = 0;
    for (; key + 4 <= n; key += 4)
        for (int64_t head = 0; head < heads; head++) {
            const char *k = head_of_block(&keys, key, head);
            const uint16_t *rows[4];
            for (int i = 0; i < 4; i++)
                rows[i] = (const uint16_t *)(k + i * keys.stride);
            score_four(f, q + head * m * width, m, are_masked(bias, key) ? NULL : rows,
                       scores + head * m * APART + key);
        }
    for (; key < n; key++)
        for (int64_t i = 0; i < lines; i++) {
            const float *k = row_as_f32(f->k, (where){first + key, i / m, batch}, f->d, copy);
            scores[i * APART + key] = dot_f32(q + i * width, k, f->d);
        }
    for (int64_t i = 0; i < lines; i++)
        weigh(f, line_of(f, i / m, batch, i % m), scores + i * APART, bias, n, &to[i * between],
              &to[i * between + 1]);
    memset(acc, 0, (size_t)(lines * wide) * sizeof(float));
    for (key = 0; key < n; key += values.rows)
        for (int64_t head = 0; head < heads; head++) {
            int64_t now = n - key < values.rows ? n - key : values.rows;
            const char *v = head_of_block(&values, key, head);
            float *sums = acc + head * m * wide, *weights = scores + head * m * APART + key;
            if (f->v->layout.type == GS_TYPE_F16)
                add_keys(GS_TYPE_F16, f->dv, sums, wide, weights, m, v, NULL, values.stride, now, 0, NULL, 0);
            else
                add_keys(GS_TYPE_BF16, f->dv, sums, wide, weights, m, v, NULL, values.stride, now, 0, NULL, 0);
        }
    for (int64_t i = 0; i < lines; i++)
        memcpy(to + i * between + 2, acc + i * wide, (size_t)f->dv * sizeof(float));
}

/* run_chunk for all heads of the chunk of unit `unit`: by rows where that gives the same bits, that is where
 * attend_lines would not gather keys. */
static void run_rows(const gs_call *call, const flash *f, int64_t unit, char *shared, char *scratch) {
    int64_t m = f->group, chunks = call->arg[2], size = call->arg[3], heads = f->n_head / m;
    const chunk_of_keys of = chunk_number(call, f, unit);
    float *to = (float *)shared + of.result, *tile = (float *)scratch + rows_floats(f);
    const float *bias = bias_of(f, line_of(f, 0, of.batch, 0), of.first, of.n, tile);
    if (gathers_keys(bias, of.n)) {
        for (int64_t head = 0; head < heads; head++)
            run_chunk(call, f, unit + head, shared, scratch);
        return;
    }
    attend_rows(f, of.batch, of.first, of.n, bias, (float *)scratch, to, chunks * size);
    for (int64_t i = 0; i < heads * m && chunks == 1; i++)
        merge_chunks(f, line_of(f, i / m, of.batch, i % m), to + i * size, 1, size);
}

/* Runs the units of n parts from `part` on.  arg[2]: number of chunks; arg[3]: floats of the result of one query row
 * for one chunk. */
static void run_several_chunks(const gs_call *call, int32_t part, int32_t n, char *shared, char *scratch,
                               gs_fault *fault) {
    const flash f = flash_of(call->node);
    const int64_t end = end_unit(call, part + n - 1), heads = reads_rows(&f) ? f.n_head / f.group : 0;
    for (int64_t unit = first_unit(call, part); unit < end;)
        if (heads > 1 && unit % heads == 0 && end - unit >= heads) {
            run_rows(call, &f, unit, shared, scratch);
            unit += heads;
        } else {
            run_chunk(call, &f, unit, shared, scratch);
            unit++;
        }
}

static void run_chunks(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    run_several_chunks(call, part, 1, shared, scratch, fault);
}
