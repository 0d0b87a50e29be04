/* op_rules.h -- which nodes each op allows: how many sources, of which types and extents, with which parameters; and
 * which sources the result may overwrite.
 *
 * Invariant: these checks read no address, and read strides only for SET.  What else a kernel needs is checked with the
 * kernel: by the builders of compiled kernels, and in supported_ops.h for ggml's kernels.
 *
 * gs_extents_fit: whether ggml's op allows the number of sources, the extents and the parameters of a node.
 * gs_types_fit, called only after gs_extents_fit has returned true: whether the oracle computes a node of these types;
 * in sources and results that may be quantised, types of the set `more` are allowed, too.
 */
#ifndef GGML_SCHED_KERNELS_OP_RULES_H
#define GGML_SCHED_KERNELS_OP_RULES_H

#include <string.h>
#include "blocks.h"
#include "ggml_sched/checked.h"
#include "ggml_sched/graph.h"

#define GS_BIT(name) (UINT64_C(1) << GS_TYPE_##name)
#define GS_OR_BIT(NAME, name) | GS_BIT(NAME)
#define GS_F32_F16 (GS_BIT(F32) | GS_BIT(F16))
#define GS_FLOATS (GS_F32_F16 | GS_BIT(BF16))
#define GS_WEIGHTS (GS_FLOATS GS_QUANTISED(GS_OR_BIT))
#define GS_PLAIN (GS_FLOATS | GS_BIT(I8) | GS_BIT(I16) | GS_BIT(I32) | GS_BIT(I64) | GS_BIT(F64))
#define GS_MOVABLE (GS_WEIGHTS | GS_PLAIN)
#define GS_MAX_RULED_SRC 7

/* A node has `least` to `most` sources.  Bit i of `inplace`: compiled kernels and the oracle compute the op correctly,
 * too, if source i has the result's memory and layout.  `result` and `src[i]`: sets of allowed types (bit t: type t);
 * if `result` is 0, the result has the type of source 0. */
typedef struct gs_op_rule {
    int32_t least, most, inplace;
    uint64_t result, src[GS_MAX_RULED_SRC];
} gs_op_rule;

/* The rule of an op; NULL if the op has no rule. */
static inline const gs_op_rule *gs_rule_of(int op) {
#define ROWS(inplace) {1, 1, inplace, GS_BIT(F32), {GS_BIT(F32)}}
#define FUNCTION(inplace) {1, 1, inplace, 0, {GS_FLOATS}}
#define ARITHMETIC {2, 2, 3, 0, {GS_FLOATS, GS_FLOATS}}
#define COPY {1, 2, 1, GS_MOVABLE, {GS_MOVABLE, ~UINT64_C(0)}}
#define INDICES {1, 1, 0, GS_BIT(I32), {GS_BIT(F32)}}
    /* clang-format off */
    static const gs_op_rule rules[] = {
        [GS_OP_ADD] = ARITHMETIC, [GS_OP_SUB] = ARITHMETIC, [GS_OP_MUL] = ARITHMETIC, [GS_OP_DIV] = ARITHMETIC,
        [GS_OP_ADD1] = ARITHMETIC, [GS_OP_GLU] = {1, 2, 3, 0, {GS_FLOATS, GS_FLOATS}},
        [GS_OP_SCALE] = FUNCTION(1), [GS_OP_CLAMP] = FUNCTION(1), [GS_OP_SQR] = FUNCTION(1),
        [GS_OP_SQRT] = FUNCTION(1), [GS_OP_LOG] = FUNCTION(1), [GS_OP_UNARY] = FUNCTION(1), [GS_OP_SUM] = FUNCTION(0),
        [GS_OP_SUM_ROWS] = ROWS(0), [GS_OP_MEAN] = ROWS(0), [GS_OP_PAD] = ROWS(0), [GS_OP_NORM] = ROWS(1),
        [GS_OP_RMS_NORM] = ROWS(1), [GS_OP_L2_NORM] = ROWS(1), [GS_OP_GROUP_NORM] = ROWS(1),
        [GS_OP_DIAG_MASK_INF] = ROWS(1), [GS_OP_DIAG_MASK_ZERO] = ROWS(1),
        [GS_OP_ARGMAX] = INDICES, [GS_OP_ARGSORT] = INDICES, [GS_OP_TOP_K] = INDICES,
        [GS_OP_CPY] = COPY, [GS_OP_DUP] = COPY, [GS_OP_CONT] = COPY,
        [GS_OP_SET] = {2, 2, 1, 0, {GS_PLAIN, GS_PLAIN}}, [GS_OP_REPEAT] = {1, 1, 1, 0, {GS_PLAIN}},
        [GS_OP_CONCAT] = {2, 2, 0, 0, {GS_MOVABLE, GS_MOVABLE}}, [GS_OP_ARANGE] = {0, 0, 0, GS_BIT(F32), {0}},
        [GS_OP_GET_ROWS] = {2, 2, 0, GS_BIT(F32) | GS_BIT(I32), {GS_WEIGHTS | GS_BIT(I32), GS_BIT(I32)}},
        [GS_OP_SET_ROWS] = {3, 3, 0, GS_WEIGHTS, {GS_BIT(F32), GS_BIT(I32) | GS_BIT(I64), GS_WEIGHTS}},
        [GS_OP_ADD_ID] = {3, 3, 1, GS_BIT(F32), {GS_BIT(F32), GS_BIT(F32), GS_BIT(I32)}},
        [GS_OP_MUL_MAT] = {2, 2, 0, GS_BIT(F32), {GS_WEIGHTS, GS_FLOATS}},
        [GS_OP_MUL_MAT_ID] = {3, 3, 0, GS_BIT(F32), {GS_WEIGHTS, GS_FLOATS, GS_BIT(I32)}},
        [GS_OP_SOFT_MAX] = {1, 3, 1, GS_BIT(F32), {GS_BIT(F32), GS_F32_F16, GS_BIT(F32)}},
        [GS_OP_ROPE] = {2, 3, 1, 0, {GS_F32_F16, GS_BIT(I32), GS_BIT(F32)}},
        [GS_OP_FLASH_ATTN_EXT] = {3, 5, 0, GS_BIT(F32), {GS_BIT(F32), GS_WEIGHTS, GS_WEIGHTS, GS_F32_F16, GS_BIT(F32)}},
        [GS_OP_SSM_CONV] = {2, 2, 0, GS_BIT(F32), {GS_BIT(F32), GS_BIT(F32)}},
        [GS_OP_SSM_SCAN] = {7, 7, 0, GS_BIT(F32), {GS_BIT(F32), GS_BIT(F32), GS_BIT(F32), GS_BIT(F32), GS_BIT(F32),
                                                GS_BIT(F32), GS_BIT(I32)}},
    };
    /* clang-format on */
#undef ROWS
#undef FUNCTION
#undef ARITHMETIC
#undef COPY
#undef INDICES
    const gs_op_rule *rule = op >= 0 && (size_t)op < sizeof(rules) / sizeof(rules[0]) ? &rules[op] : NULL;
    return rule != NULL && (rule->most || rule->result) ? rule : NULL;
}

/* Whether source k of a node is the destination that the op writes to, of which the node is a view. */
static inline int gs_is_destination(const gs_node *n, int k) {
    return (n->op == GS_OP_CPY && k == 1) || (n->op == GS_OP_SET_ROWS && k == 2);
}

static inline int gs_overlap(const gs_node *a, const gs_node *b) {
    const char *x = a->data, *y = b->data;
    return x < y + b->layout.nbytes && y < x + a->layout.nbytes;
}

/* Whether two tensors are the same elements in memory: address, type, extents and strides. */
static inline int gs_same_elements(const gs_node *a, const gs_node *b) {
    return a->data == b->data && a->layout.type == b->layout.type
           && memcmp(a->layout.ne, b->layout.ne, sizeof(a->layout.ne)) == 0
           && memcmp(a->layout.nb, b->layout.nb, sizeof(a->layout.nb)) == 0;
}

/* Whether writing the result of a node may change elements of source k that are still to be read.  `inplace`: bit i is
 * set if source i may have the result's memory and layout. */
static inline int gs_clashes(const gs_node *n, int k, int inplace) {
    const gs_node *s = n->src[k];
    if (s == NULL || gs_is_destination(n, k) || !gs_overlap(n, s))
        return 0;
    return !(inplace >> k & 1) || !gs_same_elements(s, n);
}

static inline int gs_is_one_of(int type, uint64_t types) { return (types >> type & 1) != 0; }

static inline int gs_types_fit(const gs_node *n, uint64_t more) {
    const gs_op_rule *rule = gs_rule_of(n->op);
    const uint64_t weights = GS_WEIGHTS | more;
    int type[GS_MAX_RULED_SRC] = {0}, d = n->layout.type;
    for (int i = 0; i < n->n_src; i++)
        if (n->src[i] != NULL) {
            type[i] = n->src[i]->layout.type;
            if (!gs_is_one_of(type[i], rule->src[i] & GS_BIT(Q8_0) ? rule->src[i] | more : rule->src[i]))
                return 0;
        }
    if (rule->result ? !gs_is_one_of(d, rule->result & GS_BIT(Q8_0) ? rule->result | more : rule->result)
                     : d != type[0])
        return 0;
    switch (n->op) {
    case GS_OP_CPY: case GS_OP_DUP: case GS_OP_CONT:
        return type[0] == d || (gs_is_one_of(type[0], weights) && gs_is_one_of(d, weights))
               || (type[0] == GS_TYPE_F32 && d == GS_TYPE_I32) || (type[0] == GS_TYPE_I32 && d == GS_TYPE_F32);
    case GS_OP_GLU: return n->n_src < 2 || n->src[1] == NULL || type[1] == d;
    case GS_OP_SET: case GS_OP_CONCAT: return type[1] == d;
    case GS_OP_GET_ROWS: return (type[0] == GS_TYPE_I32) == (d == GS_TYPE_I32);
    case GS_OP_SET_ROWS: return type[2] == d;
    default: return 1;
    }
}

/* Whether some id of a tensor of row ids is outside 0 .. limit - 1; sets *bad to the first such id.  `data`: the memory
 * of the ids, which need not be aligned. */
static inline int gs_bad_id(const gs_layout *ids, const char *data, int64_t limit, int64_t *bad) {
    const int64_t *ne = ids->ne, *nb = ids->nb;
    for (int64_t i3 = 0; i3 < ne[3]; i3++)
        for (int64_t i2 = 0; i2 < ne[2]; i2++)
            for (int64_t i1 = 0; i1 < ne[1]; i1++) {
                const char *at = data + i1 * nb[1] + i2 * nb[2] + i3 * nb[3];
                for (int64_t i0 = 0; i0 < ne[0]; i0++, at += nb[0]) {
                    int32_t narrow;
                    memcpy(&narrow, at, sizeof(narrow));
                    *bad = narrow;
                    if (ids->type == GS_TYPE_I64)
                        memcpy(bad, at, sizeof(*bad));
                    if (*bad < 0 || *bad >= limit)
                        return 1;
                }
            }
    return 0;
}

/* -- extents: of the result (d) and of sources (a, b, ..), innermost first ----------------------------------------- */

/* Whether the extents from dimension `first` on are equal. */
static inline int gs_same_from(int first, const int64_t *a, const int64_t *b) {
    return memcmp(a + first, b + first, (size_t)(GS_MAX_DIMS - first) * sizeof(*a)) == 0;
}

static inline int gs_extents_are(const int64_t *a, int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
    return a[0] == n0 && a[1] == n1 && a[2] == n2 && a[3] == n3;
}

/* The number of elements; -1 if 64 bits do not hold it. */
static inline int64_t gs_count(const int64_t *a) {
    int64_t n = 1;
    if (a[0] == 0 || a[1] == 0 || a[2] == 0 || a[3] == 0)
        return 0;
    for (int i = 0; i < GS_MAX_DIMS; i++)
        if (gs_checked_mul(n, a[i], &n))
            return -1;
    return n;
}

/* Whether n is a multiple of `each`; the only multiple of 0 is 0. */
static inline int gs_is_multiple(int64_t n, int64_t each) { return each == 0 ? n == 0 : n % each == 0; }

/* Whether a tensor of extents a can be repeated, a whole number of times in each dimension, to extents d; true if d is
 * empty. */
static inline int gs_repeats(const int64_t *a, const int64_t *d) {
    int fits = 1;
    for (int i = 0; i < GS_MAX_DIMS; i++)
        fits &= a[i] > 0 && d[i] % a[i] == 0;
    return fits || gs_count(d) == 0;
}

/* Whether a mask has extents [n_kv, >= n_rows, n_head / r, n_batch / s], for whole numbers r and s.  NULL (no mask)
 * fits. */
static inline int gs_mask_fits(const int64_t *mask, int64_t n_kv, int64_t n_rows, int64_t n_head, int64_t n_batch) {
    return mask == NULL || (mask[0] == n_kv && mask[1] >= n_rows && mask[2] > 0 && n_head % mask[2] == 0 && mask[3] > 0
                            && n_batch % mask[3] == 0);
}

/* Whether the elements that SET writes, by the strides and the offset in its parameters, lie inside its result, and the
 * result has no gaps. */
static inline int gs_window_fits(const gs_node *n) {
    const gs_layout *d = &n->layout, *b = &n->src[1]->layout;
    int64_t size = gs_traits_of_type(b->type).type_size, end = size, dense = gs_traits_of_type(d->type).type_size;
    const int64_t strides[GS_MAX_DIMS] = {size, n->params[0], n->params[1], n->params[2]};
    for (int i = 0; i < GS_MAX_DIMS; i++) {
        if ((d->ne[i] != 1 && d->nb[i] != dense) || gs_checked_mul(dense, d->ne[i], &dense))
            return 0;
    }
    if (gs_count(b->ne) == 0)
        return 1;
    for (int i = 0; i < GS_MAX_DIMS; i++) {
        int64_t bytes;
        if (gs_checked_mul(b->ne[i] - 1, strides[i], &bytes) || gs_checked_add(end, bytes, &end))
            return 0;
    }
    return gs_checked_add(end, n->params[3], &end) == GS_OK && end <= d->nbytes;
}

static inline int gs_concat_fits(const int64_t *d, const int64_t *a, const int64_t *b, int dim) {
    int fits = dim >= 0 && dim < GS_MAX_DIMS;
    for (int i = 0; i < GS_MAX_DIMS; i++)
        fits &= i == dim ? d[i] - a[i] == b[i] : d[i] == a[i] && a[i] == b[i];
    return fits;
}

/* Parameters 2 i and 2 i + 1 of PAD: how many zeros it adds before and after the source's elements in dimension i. */
static inline int gs_pad_fits(const int64_t *d, const int64_t *a, const int32_t *p) {
    int fits = 1;
    for (int i = 0; i < GS_MAX_DIMS; i++)
        fits &= p[2 * i] >= 0 && p[2 * i + 1] >= 0 && d[i] - a[i] == (int64_t)p[2 * i] + p[2 * i + 1];
    return fits;
}

static inline int gs_flash_fits(const int64_t *d, const int64_t *q, const int64_t *k, const int64_t *v,
                                const int64_t *mask, const int64_t *sinks) {
    return k[0] == q[0] && gs_same_from(1, k, v) && k[3] == q[3] && gs_is_multiple(q[2], k[2])
           && gs_extents_are(d, v[0], q[2], q[1], q[3]) && gs_mask_fits(mask, k[1], q[1], q[2], q[3])
           && (sinks == NULL || gs_count(sinks) == q[2]);
}

/* s, source 0: the table of states, [d_state, head_dim, n_head, n].  x, source 1: [head_dim, n_head, n_tokens,
 * n_seqs]. */
static inline int gs_scan_fits(const int64_t *d, const int64_t *const src[]) {
    const int64_t *s = src[0], *x = src[1], *b = src[4], kept[GS_MAX_DIMS] = {s[0], s[1], s[2], x[3]};
    int64_t n;
    return x[0] == s[1] && x[1] == s[2] && gs_extents_are(src[2], s[2], x[2], x[3], 1)
           && (gs_extents_are(src[3], s[0], s[2], 1, 1) || gs_extents_are(src[3], 1, s[2], 1, 1))
           && gs_same_from(0, b, src[5]) && b[0] == s[0] && b[2] == x[2] && b[3] == x[3] && b[1] > 0
           && s[2] % b[1] == 0 && gs_extents_are(src[6], x[3], 1, 1, 1)
           && gs_checked_add(gs_count(x), gs_count(kept), &n) == GS_OK && gs_extents_are(d, n, 1, 1, 1);
}

static inline int gs_extents_fit(const gs_node *n) {
    const gs_op_rule *rule = gs_rule_of(n->op);
    const int64_t *d = n->layout.ne, *src[GS_MAX_RULED_SRC] = {NULL};
    const int32_t *p = n->params;
    if (rule == NULL || n->n_src < rule->least || n->n_src > rule->most)
        return 0;
    for (int i = 0; i < n->n_src; i++) {
        src[i] = n->src[i] != NULL ? n->src[i]->layout.ne : NULL;
        if (src[i] == NULL && i < rule->least)
            return 0;
    }
    const int64_t *a = src[0], *b = src[1], *c = src[2];
    /* clang-format off */
    switch (n->op) {
    case GS_OP_ADD: case GS_OP_SUB: case GS_OP_MUL: case GS_OP_DIV: return gs_same_from(0, d, a) && gs_repeats(b, d);
    case GS_OP_ADD1: return gs_same_from(0, d, a) && gs_count(b) == 1;
    case GS_OP_GLU:
        return b != NULL ? gs_same_from(0, d, a) && gs_same_from(0, d, b)
                         : a[0] % 2 == 0 && a[0] / 2 == d[0] && gs_same_from(1, d, a);
    case GS_OP_GROUP_NORM: return gs_same_from(0, d, a) && p[0] > 0;
    case GS_OP_SUM: return gs_extents_are(d, 1, 1, 1, 1);
    case GS_OP_SUM_ROWS: case GS_OP_MEAN: return d[0] == 1 && gs_same_from(1, d, a);
    case GS_OP_ARGMAX: return a[0] > 0 && a[2] == 1 && a[3] == 1 && gs_extents_are(d, a[1], 1, 1, 1);
    case GS_OP_ARGSORT: return gs_same_from(0, d, a);
    case GS_OP_TOP_K: return d[0] <= a[0] && gs_same_from(1, d, a);
    case GS_OP_ARANGE: return gs_extents_are(d, d[0], 1, 1, 1);
    case GS_OP_CPY: case GS_OP_DUP: case GS_OP_CONT: return gs_count(d) == gs_count(a);
    case GS_OP_SET: return gs_same_from(0, d, a) && gs_window_fits(n);
    case GS_OP_REPEAT: return gs_repeats(a, d);
    case GS_OP_CONCAT: return gs_concat_fits(d, a, b, p[0]);
    case GS_OP_PAD: return gs_pad_fits(d, a, p);
    case GS_OP_MUL_MAT:
        return a[0] == b[0] && d[0] == a[1] && gs_same_from(1, d, b) && gs_is_multiple(b[2], a[2])
               && gs_is_multiple(b[3], a[3]);
    case GS_OP_MUL_MAT_ID:
        return a[0] == b[0] && a[3] == 1 && b[3] == 1 && c[2] == 1 && c[3] == 1 && c[1] == b[2] && b[1] > 0
               && c[0] % b[1] == 0 && gs_extents_are(d, a[1], c[0], b[2], 1);
    case GS_OP_GET_ROWS:
        return b[3] == 1 && a[2] == b[1] && a[3] == b[2] && gs_extents_are(d, a[0], b[0], b[1], b[2]);
    case GS_OP_SET_ROWS:            /* a: the rows; b: their ids; c: the tensor that the result is a view of */
        return gs_same_from(0, d, c) && a[0] == d[0] && gs_same_from(2, a, d) && b[3] == 1 && a[1] == b[0] && b[1] > 0
               && b[2] > 0 && a[2] % b[1] == 0 && a[3] % b[2] == 0;
    case GS_OP_ADD_ID:
        return gs_same_from(0, d, a) && a[0] == b[0] && b[2] == 1 && b[3] == 1 && a[3] == 1
               && gs_extents_are(c, a[1], a[2], 1, 1);
    case GS_OP_SOFT_MAX:
        return gs_same_from(0, d, a) && gs_mask_fits(b, d[0], d[1], d[2], d[3]) && (c == NULL || gs_count(c) == d[2]);
    case GS_OP_ROPE:
        return gs_same_from(0, d, a) && (p[2] == 0 || p[2] == 2) && p[1] >= 0 && p[1] <= d[0] && p[1] % 2 == 0
               && gs_count(b) == d[2] && (c == NULL || c[0] >= p[1] / 2);
    case GS_OP_FLASH_ATTN_EXT: return gs_flash_fits(d, a, b, c, src[3], src[4]);
    case GS_OP_SSM_CONV:
        return a[3] == 1 && b[2] == 1 && b[3] == 1 && b[1] == a[1] && b[0] >= 1 && b[0] <= a[0] + 1
               && gs_extents_are(d, a[1], a[0] - b[0] + 1, a[2], 1);
    case GS_OP_SSM_SCAN: return (p[0] == 0 || p[0] == 1) && gs_scan_fits(d, src);
    default: return gs_same_from(0, d, a);
    }
    /* clang-format on */
}

#endif
