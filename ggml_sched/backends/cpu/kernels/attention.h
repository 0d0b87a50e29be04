/* attention.h -- FLASH_ATTN_EXT: softmax(q k + mask) v without ever holding all the scores.
 *
 * Included once for each instruction set.  Several query heads may share a key head, so all query rows of a key head
 * are computed together: fewer than FEW of them (decoding) by attention_few.h, or attention_rows.h, FEW or more (a
 * prompt) by attention_many.h.  Here is what all use, and the choice between them.  The content of KV cache cells whose
 * mask is -inf, even a NaN, does not affect the result; a row without any unmasked cell gives zeros.
 */
#define UNROLL _Pragma("GCC unroll 16")
#define ONE_BY_ONE _Pragma("GCC unroll 1")  /* for short loops, where -funroll-loops costs more than it saves */
#define FEW 8
#define CHUNK 256
#define FLASH_WORK (1 << 17)    /* about how many multiplications one part makes where there are FEW rows or more */
#define FEW_WORK (1 << 15)      /* the same for fewer rows */

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

/* Where the mask of a query row begins; NULL if the node has no mask. */
static const char *mask_of(const flash *f, line l) {
    if (f->mask == NULL)
        return NULL;
    const int64_t *ne = f->mask->layout.ne;
    return row_of(f->mask, (where){l.row, l.head % ne[2], l.batch % ne[3]});
}

/* The mask of a query row for keys first .. first + n - 1, as f32: a pointer into an f32 mask, else to `tile`, to which
 * the values are converted.  NULL if the node has no mask. */
static const float *bias_of(const flash *f, line l, int64_t first, int64_t n, float *tile) {
    if (f->mask == NULL)
        return NULL;
    const char *at = mask_of(f, l) + first * gs_plain_size(f->mask->layout.type);
    if (f->mask->layout.type == GS_TYPE_F32)
        return (const float *)at;
    floats_from(f->mask->layout.type, at, tile, n);
    return tile;
}

static int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

INLINE const float *row_as_f32(const gs_node *t, where w, int64_t n, float *copy) {
    const char *from = row_of(t, w);
    if (t->layout.type == GS_TYPE_F32)
        return (const float *)from;
    load_row(t->layout.type, from, copy, n);
    return copy;
}

/* A score with its mask b, times `slope`: -inf where the key is masked, whatever its dot product was. */
INLINE vf masked_score(vf score, vf b, vf slope) {
    return vpick(b == -INFINITY, vset(-INFINITY), score + b * slope);
}

/* The final scores of V keys, from their dot products `scores`: limited by the soft cap `cap` (0: none), plus the mask
 * `bias` (NULL: none) times `slope`.  Masked keys get -inf, whatever their dot product was. */
INLINE vf final_scores(const float *scores, const float *bias, float slope, float cap) {
    vf s = vload(scores);
    if (cap != 0)
        s = vtanh(s) * cap;
    if (bias == NULL)
        return s;
    return masked_score(s, vload(bias), vset(slope));
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

#include "attention_few.h"
#include "attention_rows.h"
#include "attention_many.h"

/* -- choosing between the ways ------------------------------------------------------------------------------------ */

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

static int build_attention(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables) {
    if (!flash_fits(node))
        return GS_UNSUPPORTED_OP;
    flash f = flash_of(node);
    int64_t m = f.n_rows * f.group, heads = f.k->layout.ne[2] * f.k->layout.ne[3], work = f.d + f.dv;
    if (m >= FEW) {
        int64_t rows = rows_of_block(heads, m), blocks = (m + rows - 1) / rows;
        need(&to->scratch, row_bytes_padded(block_floats(&f)));
        gs_call call = call_over(node, position, run_blocks, heads * blocks, rows * work * (f.n_kv + 1) / 4,
                                 FLASH_WORK);
        call.arg[2] = blocks;
        call.arg[3] = rows;
        return gs_add_call(to, &call);
    }
    int64_t chunks = (f.n_kv + CHUNK - 1) / CHUNK, size = 2 + padded(f.dv);
    int64_t keys = f.n_kv < CHUNK ? f.n_kv : CHUNK;
    need(&to->scratch, row_bytes_padded(lines_floats(&f, m)));
    gs_use_shared(to, tables, row_bytes_padded(heads * m * chunks * size));
    int64_t each = m * work * keys, units = units_per_part(heads * chunks, each, FEW_WORK);
    if (reads_rows(&f)) {
        need(&to->scratch, row_bytes_padded(rows_floats(&f) + CHUNK));
        while (units < f.k->layout.ne[2] && f.k->layout.ne[2] % units != 0)     /* so that parts divide a row */
            units--;
    }
    gs_call call = call_over(node, position, run_chunks, heads * chunks, each, units * each);
    call.arg[2] = chunks;
    call.arg[3] = size;
    if (reads_rows(&f)) {
        call.run_several = run_several_chunks;
        call.at_once = (int32_t)(f.k->layout.ne[2] / units);
    }
    int status = gs_add_call(to, &call);
    if (status != GS_OK || chunks == 1)
        return status;
    gs_call merge = call_over(node, position, run_merge, heads * m, f.dv * chunks, ROW_WORK);
    merge.arg[2] = chunks;
    merge.arg[3] = size;
    return gs_add_call(to, &merge);
}
