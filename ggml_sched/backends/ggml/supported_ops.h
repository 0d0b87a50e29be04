/* ggml_sched/backends/ggml/supported_ops.h -- the nodes that ggml's CPU kernels compute correctly.
 *
 * ggml's supports_op accepts nearly every node; ggml then aborts the process, or computes wrong results, where types,
 * strides or parameters violate a kernel's assumptions.  So this file lists the assumptions of each kernel and admits a
 * node only where all hold.  Other nodes run on other backends.
 *
 * gx_supports(node): 1 or 0.  It reads op, parameters and layouts, never addresses.
 */
#ifndef GGML_SCHED_BACKENDS_GGML_SUPPORTED_OPS_H
#define GGML_SCHED_BACKENDS_GGML_SUPPORTED_OPS_H

#include <math.h>
#include <string.h>
#include "ggml_sched/graph.h"
#include "ggml_sched/types.h"

#define GX_BIT(name) (UINT64_C(1) << GS_TYPE_##name)
#define GX_FLOATS (GX_BIT(F32) | GX_BIT(F16) | GX_BIT(BF16))
#define GX_SMALL_BLOCKS (GX_BIT(Q4_0) | GX_BIT(Q4_1) | GX_BIT(Q5_0) | GX_BIT(Q5_1) | GX_BIT(Q8_0) \
                         | GX_BIT(IQ4_NL) | GX_BIT(MXFP4))
/* q2_K q3_K q4_K q5_K q6_K, and every iq type but iq4_nl: 16..23, 29 */
#define GX_BIG_BLOCKS ((UINT64_C(0x1f) << GS_TYPE_Q2_K) | (UINT64_C(0xff) << 16 & ~GX_BIT(IQ4_NL)) | GX_BIT(IQ1_M))
#define GX_WEIGHTS (GX_FLOATS | GX_SMALL_BLOCKS | GX_BIG_BLOCKS)
#define GX_INTS (GX_BIT(I8) | GX_BIT(I16) | GX_BIT(I32) | GX_BIT(I64))
#define GX_PLAIN (GX_FLOATS | GX_INTS | GX_BIT(F64))

/* The largest extent that is supported: some kernels count in 32-bit integers. */
#define GX_MAX_EXTENT INT64_C(0x7fffffff)

typedef const gs_layout *gx_layout;

static inline int gx_is(gx_layout a, uint64_t types)
{
    return (types >> a->type & 1) != 0;
}

static inline int gx_f32(gx_layout a)
{
    return a->type == GS_TYPE_F32;
}

static inline int gx_i32(gx_layout a)
{
    return a->type == GS_TYPE_I32;
}

static inline int64_t gx_count(gx_layout a)
{
    return a->ne[0] * a->ne[1] * a->ne[2] * a->ne[3];
}

static inline int gx_empty(gx_layout a)
{
    return a->ne[0] == 0 || a->ne[1] == 0 || a->ne[2] == 0 || a->ne[3] == 0;
}

static inline int gx_same_ne(gx_layout a, gx_layout b)
{
    return memcmp(a->ne, b->ne, sizeof a->ne) == 0;
}

/* Whether the extents of dimensions 1 to 3 are equal. */
static inline int gx_same_rows(gx_layout a, gx_layout b)
{
    return memcmp(a->ne + 1, b->ne + 1, sizeof a->ne - sizeof *a->ne) == 0;
}

/* The bytes of an element (of a quantised type: of a block); sets *elements to how many elements that is.  -1, which
 * equals no stride, for unknown types. */
static inline int64_t gx_unit(gx_layout a, int64_t *elements)
{
    const gs_type_traits traits = gs_traits_of_type(a->type);
    *elements = traits.block_size ? traits.block_size : 1;
    return traits.type_size ? (int64_t)traits.type_size : -1;
}

/* The layout, with the strides of extents of 1 as ggml itself would set them.  Such strides have no effect, so callers
 * may set any; but ggml's kernels compare them. */
static inline gs_layout gx_regular(gx_layout a)
{
    gs_layout out = *a;
    int64_t block;
    const int64_t size = gx_unit(a, &block);
    if (a->ne[0] == block) {
        out.nb[0] = size;
    }
    for (int i = 1; i < 4; i++) {
        if (a->ne[i] == 1) {
            out.nb[i] = i == 1 ? a->ne[0] / block * out.nb[0] : out.nb[i - 1] * a->ne[i - 1];
        }
    }
    return out;
}

/* Whether the elements (or blocks) of a row lie side by side. */
static inline int gx_rows(gx_layout a)
{
    int64_t block;
    const int64_t size = gx_unit(a, &block);
    return a->nb[0] == size && a->ne[0] % block == 0;
}

/* The bytes of a row without gaps. */
static inline int64_t gx_row_size(gx_layout a)
{
    int64_t block;
    const int64_t size = gx_unit(a, &block);
    return a->ne[0] / block * size;
}

/* Whether all rows follow each other at one stride, nb[1], in all dimensions (ggml_is_contiguous_1). */
static inline int gx_even(gx_layout a)
{
    return gx_rows(a) && (a->ne[2] == 1 || a->nb[2] == a->ne[1] * a->nb[1])
        && (a->ne[3] == 1 || a->nb[3] == a->ne[1] * a->ne[2] * a->nb[1]);
}

/* Whether the tensor has no gaps and is not permuted: its strides are those of a new tensor. */
static inline int gx_dense(gx_layout a)
{
    return gx_even(a) && a->nb[1] == gx_row_size(a)
        && a->nb[2] == a->ne[1] * a->nb[1] && a->nb[3] == a->ne[2] * a->nb[2];
}

/* Whether elements of a row lie side by side, and outer strides are multiples of an element or block: what the kernels
 * of matrix products take. */
static inline int gx_strided(gx_layout a)
{
    int64_t block;
    const int64_t size = gx_unit(a, &block);
    return gx_rows(a) && a->nb[1] % size == 0 && a->nb[2] % size == 0 && a->nb[3] % size == 0;
}

static inline int gx_repeats(gx_layout little, gx_layout big)
{
    for (int i = 0; i < 4; i++) {
        if (big->ne[i] % little->ne[i] != 0) {
            return 0;
        }
    }
    return 1;
}

static inline float gx_float(const gs_node *node, int i)
{
    float value;
    memcpy(&value, &node->params[i], sizeof value);
    return value;
}

static int gx_binary(gx_layout d, gx_layout a, gx_layout b)
{
    const int typed = (gx_is(a, GX_FLOATS) && b->type == a->type)
        || ((a->type == GS_TYPE_F16 || a->type == GS_TYPE_BF16) && gx_f32(b));
    return typed && d->type == a->type && gx_same_ne(d, a) && gx_repeats(b, a) && gx_rows(d) && gx_rows(a);
}

/* Whether ggml computes a function of each element, from layout a to d.  `even`: the kernel needs one row stride. */
static int gx_elementwise(gx_layout d, gx_layout a, uint64_t types, int even)
{
    return gx_is(a, types) && d->type == a->type && gx_same_ne(d, a)
        && (even ? gx_even(d) && gx_even(a) : gx_rows(d) && gx_rows(a));
}

static int gx_unary(const gs_node *n, gx_layout d, gx_layout a)
{
    switch (n->sub_op) {
    case GS_UNARY_GELU_QUICK:
        return 0;       /* wrong result: ggml reads a table from f16 to f16, in which -inf becomes -inf * 0, NaN */
    case GS_UNARY_GELU: case GS_UNARY_GELU_ERF: case GS_UNARY_SILU:
        return gx_elementwise(d, a, GX_BIT(F32) | GX_BIT(F16), 0);
    default:
        return gx_elementwise(d, a, GX_FLOATS, 0);
    }
}

static int gx_glu(const gs_node *n, gx_layout d, gx_layout a, gx_layout b)
{
    const uint64_t types = n->sub_op == GS_GLU_SWIGLU_OAI ? GX_BIT(F32) : GX_BIT(F32) | GX_BIT(F16);
    if (!gx_is(a, types) || d->type != a->type || !gx_even(d) || !gx_even(a) || n->sub_op == GS_GLU_GEGLU_QUICK) {
        return 0;
    }
    if (b != NULL) {
        return b->type == a->type && gx_even(b) && gx_same_ne(d, a) && gx_same_ne(d, b);
    }
    return a->ne[0] == 2 * d->ne[0] && gx_same_rows(a, d);
}

/* CPY, CONT, DUP: whether ggml copies from layout a to d: between which types, and for which strides. */
static int gx_copy(gx_layout d, gx_layout a)
{
    if (gx_count(d) != gx_count(a)) {
        return 0;
    }
    if (a->type == d->type) {
        if (gx_is(a, GX_PLAIN)) {
            return gx_is(a, GX_FLOATS | GX_BIT(I32)) ? 1 : gx_rows(a) && gx_rows(d) && gx_same_ne(a, d);
        }
        return gx_is(a, GX_WEIGHTS) && ((gx_dense(a) && gx_dense(d)) || (gx_rows(a) && gx_rows(d) && gx_same_ne(a, d)));
    }
    if (gx_is(a, GX_FLOATS) && gx_is(d, GX_FLOATS)) {
        return 1;
    }
    if (gx_f32(a) && gx_is(d, GX_SMALL_BLOCKS)) {
        return gx_rows(a) && gx_dense(d) && gx_same_ne(a, d);
    }
    if (gx_is(a, GX_SMALL_BLOCKS) && gx_f32(d)) {
        return gx_dense(a) && gx_dense(d) && gx_same_ne(a, d);
    }
    return ((gx_f32(a) && gx_i32(d)) || (gx_i32(a) && gx_f32(d)));
}

/* Whether ggml multiplies matrices of layout a with columns of layout b.  Its kernels convert the columns to a type
 * that depends on a's, from f32 only. */
static int gx_factors(gx_layout a, gx_layout b)
{
    return gx_is(a, GX_WEIGHTS) && gx_strided(a) && gx_strided(b) && a->ne[0] == b->ne[0]
        && (gx_f32(b) || (b->type == a->type && (a->type == GS_TYPE_F16 || a->type == GS_TYPE_BF16)));
}

/* Whether a product's parameters are a precision that ggml knows (0 or 10), and no hint that a is a special matrix. */
static int gx_is_plain_product(const gs_node *n)
{
    return (n->params[0] == 0 || n->params[0] == 10) && n->params[1] == 0;
}

static int gx_mul_mat(gx_layout d, gx_layout a, gx_layout b)
{
    return gx_factors(a, b) && gx_f32(d) && gx_dense(d) && d->ne[0] == a->ne[1] && d->ne[1] == b->ne[1]
        && d->ne[2] == b->ne[2] && d->ne[3] == b->ne[3] && b->ne[2] % a->ne[2] == 0 && b->ne[3] % a->ne[3] == 0;
}

static int gx_mul_mat_id(gx_layout d, gx_layout a, gx_layout b, gx_layout ids)
{
    return gx_factors(a, b) && gx_f32(b) && gx_i32(ids) && gx_f32(d) && gx_dense(d)
        && a->ne[3] == 1 && b->ne[3] == 1 && ids->ne[2] == 1 && ids->ne[3] == 1 && gx_rows(ids)
        && ids->ne[1] == b->ne[2] && ids->ne[0] % b->ne[1] == 0
        && d->ne[0] == a->ne[1] && d->ne[1] == ids->ne[0] && d->ne[2] == b->ne[2] && d->ne[3] == 1;
}

static int gx_get_rows(gx_layout d, gx_layout a, gx_layout ids)
{
    return (gx_is(a, GX_WEIGHTS) ? gx_f32(d) : gx_i32(a) && gx_i32(d))
        && gx_i32(ids) && gx_rows(a) && gx_rows(d) && ids->ne[3] == 1
        && a->ne[2] == ids->ne[1] && a->ne[3] == ids->ne[2]
        && d->ne[0] == a->ne[0] && d->ne[1] == ids->ne[0] && d->ne[2] == ids->ne[1] && d->ne[3] == ids->ne[2];
}

static int gx_set_rows(gx_layout d, gx_layout b, gx_layout ids, gx_layout a)
{
    return gx_is(d, GX_FLOATS | GX_SMALL_BLOCKS) && a->type == d->type && gx_same_ne(a, d) && gx_f32(b)
        && (ids->type == GS_TYPE_I64 || gx_i32(ids)) && gx_rows(d) && gx_rows(b)
        && b->ne[0] == d->ne[0] && b->ne[2] == d->ne[2] && b->ne[3] == d->ne[3] && b->ne[1] == ids->ne[0]
        && ids->ne[3] == 1 && b->ne[2] % ids->ne[1] == 0 && b->ne[3] % ids->ne[2] == 0;
}

static int gx_set(const gs_node *n, gx_layout d, gx_layout a, gx_layout b)
{
    const int32_t *p = n->params;
    if (!gx_is(a, GX_BIT(F32) | GX_BIT(I32)) || d->type != a->type || b->type != a->type || !gx_dense(d)
        || !gx_dense(a) || !gx_same_ne(d, a) || !gx_rows(b) || p[0] < 0 || p[1] < 0 || p[2] < 0 || p[3] < 0) {
        return 0;
    }
    const int64_t strides[4] = {4, p[0], p[1], p[2]};
    int64_t end = p[3] + 4;
    for (int i = 0; i < 4; i++) {
        if (b->ne[i] - 1 > (INT64_C(1) << 32)) {
            return 0;
        }
        end += (b->ne[i] - 1) * strides[i];
    }
    return end <= d->nbytes;
}

static int gx_concat(const gs_node *n, gx_layout d, gx_layout a, gx_layout b)
{
    const int dim = n->params[0];
    if (!gx_is(a, GX_PLAIN) || d->type != a->type || b->type != a->type || dim < 0 || dim > 3) {
        return 0;
    }
    for (int i = 0; i < 4; i++) {
        if (i == dim ? d->ne[i] != a->ne[i] + b->ne[i] : d->ne[i] != a->ne[i] || d->ne[i] != b->ne[i]) {
            return 0;
        }
    }
    return gx_rows(d);
}

static int gx_pad(const gs_node *n, gx_layout d, gx_layout a)
{
    if (a->type != GS_TYPE_F32 || d->type != GS_TYPE_F32 || !gx_rows(a) || !gx_dense(d) || n->params[8] != 0) {
        return 0;
    }
    for (int i = 0; i < 4; i++) {
        if (n->params[2 * i] != 0 || n->params[2 * i + 1] < 0 || a->ne[i] + n->params[2 * i + 1] != d->ne[i]) {
            return 0;
        }
    }
    return 1;
}

static int gx_arange(const gs_node *n, gx_layout d)
{
    const float start = gx_float(n, 0), stop = gx_float(n, 1), step = gx_float(n, 2);
    return gx_f32(d) && gx_dense(d) && d->ne[0] == gx_count(d) && isfinite(start) && isfinite(stop)
        && isfinite(step) && step != 0 && (int64_t)ceilf((stop - start) / step) == d->ne[0];
}

/* Whether a mask has extents [n_kv, >= n_rows, n_head / r, n_batch / s], r and s whole, and rows without gaps.
 * gx_sinks below: sinks are an f32 for each head. */
static int gx_mask(gx_layout mask, int64_t n_kv, int64_t n_rows, int64_t n_head, int64_t n_batch)
{
    return gx_rows(mask) && mask->ne[0] == n_kv && mask->ne[1] >= n_rows && n_head % mask->ne[2] == 0
        && n_batch % mask->ne[3] == 0;
}

static int gx_sinks(gx_layout sinks, int64_t n_head)
{
    return sinks == NULL || (gx_f32(sinks) && gx_dense(sinks) && gx_count(sinks) == n_head);
}

static int gx_soft_max(const gs_node *n, gx_layout d, gx_layout a, gx_layout mask, gx_layout sinks)
{
    return gx_f32(a) && gx_f32(d) && gx_same_ne(d, a) && gx_dense(d) && gx_rows(a)
        && (mask == NULL ? !(gx_float(n, 1) > 0)
                         : gx_is(mask, GX_BIT(F32) | GX_BIT(F16))
                             && gx_mask(mask, d->ne[0], d->ne[1], d->ne[2], d->ne[3]))
        && gx_sinks(sinks, d->ne[2]);
}

static int gx_rope(const gs_node *n, gx_layout d, gx_layout a, gx_layout positions, gx_layout factors)
{
    const int32_t n_dims = n->params[1], mode = n->params[2];
    return gx_is(a, GX_BIT(F32) | GX_BIT(F16)) && d->type == a->type && gx_same_ne(d, a) && gx_rows(a)
        && gx_rows(d) && (mode == 0 || mode == 2) && n_dims > 0 && n_dims % 2 == 0 && n_dims <= a->ne[0]
        && a->ne[0] % 2 == 0 && gx_i32(positions) && gx_dense(positions) && gx_count(positions) == a->ne[2]
        && (factors == NULL || (gx_f32(factors) && gx_dense(factors) && factors->ne[0] >= n_dims / 2));
}

static int gx_flash(const gs_node *n, gx_layout d)
{
    gx_layout q = &n->src[0]->layout, k = &n->src[1]->layout, v = &n->src[2]->layout;
    gx_layout mask = n->n_src > 3 && n->src[3] != NULL ? &n->src[3]->layout : NULL;
    gx_layout sinks = n->n_src > 4 && n->src[4] != NULL ? &n->src[4]->layout : NULL;
    const uint64_t stored = GX_FLOATS | GX_SMALL_BLOCKS;
    if (n->params[3] != 0 && n->params[3] != 10) {
        return 0;       /* not a precision that ggml knows */
    }
    if (gx_float(n, 2) != 0 && q->ne[1] >= 64 && k->ne[1] % 64 != 0) {
        /* ggml 0.15 would compute wrongly: it pads keys to tiles of 64 with scores of -inf, and then applies the soft
         * cap, which makes numbers of them. */
        return 0;
    }
    return gx_f32(q) && gx_f32(d) && gx_is(k, stored) && gx_is(v, stored) && gx_strided(q)
        && gx_strided(k) && gx_strided(v) && gx_dense(d) && q->ne[0] == k->ne[0]
        && k->ne[1] == v->ne[1] && k->ne[2] == v->ne[2] && k->ne[3] == v->ne[3]
        && q->ne[2] % k->ne[2] == 0 && q->ne[3] == k->ne[3]
        && d->ne[0] == v->ne[0] && d->ne[1] == q->ne[2] && d->ne[2] == q->ne[1] && d->ne[3] == q->ne[3]
        && (mask == NULL ? !(gx_float(n, 1) > 0)
                         : mask->type == GS_TYPE_F16 && gx_mask(mask, k->ne[1], q->ne[1], q->ne[2], q->ne[3]))
        && gx_sinks(sinks, q->ne[2]);
}

static int gx_ssm_conv(gx_layout d, gx_layout sx, gx_layout c)
{
    return gx_f32(d) && gx_f32(sx) && gx_f32(c) && gx_dense(d) && gx_dense(sx) && gx_dense(c)
        && sx->ne[3] == 1 && c->ne[2] == 1 && c->ne[3] == 1 && c->ne[1] == sx->ne[1] && d->ne[0] == sx->ne[1]
        && d->ne[1] == sx->ne[0] - c->ne[0] + 1 && d->ne[2] == sx->ne[2] && d->ne[3] == 1;
}

static int gx_ssm_scan(const gs_node *n, gx_layout d)
{
    gx_layout s = &n->src[0]->layout, x = &n->src[1]->layout, dt = &n->src[2]->layout, A = &n->src[3]->layout;
    gx_layout B = &n->src[4]->layout, C = &n->src[5]->layout, ids = &n->src[6]->layout;
    const int64_t d_state = s->ne[0], head_dim = s->ne[1], n_head = s->ne[2];
    for (int i = 0; i < 6; i++) {
        if (n->src[i]->layout.type != GS_TYPE_F32 || !gx_rows(&n->src[i]->layout)) {
            return 0;
        }
    }
    if (n->params[0] != 1 || d->type != GS_TYPE_F32 || !gx_dense(d) || !gx_dense(s) || !gx_dense(dt) || !gx_dense(A)
        || ids->type != GS_TYPE_I32 || !gx_dense(ids) || gx_count(ids) != x->ne[3]
        || x->nb[1] != x->ne[0] * 4 || B->nb[1] != B->ne[0] * 4 || C->nb[1] != C->ne[0] * 4) {
        return 0;
    }
    return x->ne[0] == head_dim && x->ne[1] == n_head && dt->ne[0] == n_head && dt->ne[1] == x->ne[2]
        && dt->ne[2] == x->ne[3] && dt->ne[3] == 1 && A->ne[1] == n_head && A->ne[2] == 1 && A->ne[3] == 1
        && (A->ne[0] == 1 || A->ne[0] == d_state) && B->ne[0] == d_state && n_head % B->ne[1] == 0
        && B->ne[2] == x->ne[2] && B->ne[3] == x->ne[3] && gx_same_ne(B, C)
        && memcmp(B->nb, C->nb, sizeof B->nb) == 0
        && d->ne[0] == gx_count(d) && d->ne[0] == gx_count(x) + d_state * head_dim * n_head * x->ne[3];
}

/* Whether kernels can count with the extents and strides, and there is at least one element. */
static int gx_is_sound(gx_layout a)
{
    for (int i = 0; i < 4; i++) {
        if (a->ne[i] > GX_MAX_EXTENT || a->nb[i] < 0) {
            return 0;
        }
    }
    return !gx_empty(a);
}

static int gx_admits(const gs_node *n)
{
    /* How many sources each op needs, and how many it may have.  Ops that are not listed have one; ARANGE has none. */
    static const struct { int8_t least, most; } arities[] = {
        [GS_OP_ADD] = {2, 2}, [GS_OP_SUB] = {2, 2}, [GS_OP_MUL] = {2, 2}, [GS_OP_DIV] = {2, 2}, [GS_OP_ADD1] = {2, 2},
        [GS_OP_MUL_MAT] = {2, 2}, [GS_OP_GET_ROWS] = {2, 2}, [GS_OP_SET] = {2, 2}, [GS_OP_CONCAT] = {2, 2},
        [GS_OP_SSM_CONV] = {2, 2}, [GS_OP_ADD_ID] = {3, 3}, [GS_OP_MUL_MAT_ID] = {3, 3}, [GS_OP_SET_ROWS] = {3, 3},
        [GS_OP_SOFT_MAX] = {1, 3}, [GS_OP_ROPE] = {2, 3}, [GS_OP_FLASH_ATTN_EXT] = {3, 5}, [GS_OP_SSM_SCAN] = {7, 7},
        [GS_OP_CPY] = {1, 2}, [GS_OP_GLU] = {1, 2},
    };
    const int listed = (size_t)n->op < sizeof arities / sizeof *arities && arities[n->op].most;
    const int least = listed ? arities[n->op].least : n->op != GS_OP_ARANGE;
    const int most = listed ? arities[n->op].most : least;
    gx_layout d = &n->layout, s[GS_MAX_SRC] = {NULL};
    if (n->op == GS_OP_NONE || (n->op >= GS_OP_VIEW && n->op <= GS_OP_TRANSPOSE)) {
        return 1;
    }
    if (n->n_src < least || n->n_src > most || !gx_is_sound(d)) {
        return 0;
    }
    for (int i = 0; i < n->n_src; i++) {
        if (n->src[i] != NULL) {
            s[i] = &n->src[i]->layout;
        }
        if (s[i] != NULL ? !gx_is_sound(s[i]) : i < least) {
            return 0;
        }
    }
    switch (n->op) {
    case GS_OP_ADD: case GS_OP_SUB: case GS_OP_MUL: case GS_OP_DIV:
        return gx_binary(d, s[0], s[1]);
    case GS_OP_ADD1:
        return gx_f32(d) && gx_f32(s[0]) && gx_f32(s[1]) && gx_same_ne(d, s[0])
            && gx_rows(d) && gx_rows(s[0]) && gx_count(s[1]) == 1;
    case GS_OP_ADD_ID:
        return gx_f32(d) && gx_f32(s[0]) && gx_f32(s[1]) && gx_i32(s[2])
            && gx_same_ne(d, s[0]) && gx_rows(d) && gx_rows(s[0]) && gx_rows(s[1]) && gx_rows(s[2])
            && s[1]->ne[0] == d->ne[0] && s[1]->ne[2] == 1 && s[1]->ne[3] == 1 && d->ne[3] == 1
            && s[2]->ne[0] == d->ne[1] && s[2]->ne[1] == d->ne[2] && s[2]->ne[2] == 1 && s[2]->ne[3] == 1;
    case GS_OP_SCALE:
        return gx_elementwise(d, s[0], GX_BIT(F32), 1) && gx_dense(d) && gx_dense(s[0]);
    case GS_OP_SQR: case GS_OP_SQRT: case GS_OP_LOG:
        return gx_elementwise(d, s[0], GX_FLOATS, 0);
    case GS_OP_CLAMP:
        return gx_elementwise(d, s[0], GX_BIT(F32) | GX_BIT(F16), 1);
    case GS_OP_UNARY:
        return gx_unary(n, d, s[0]);
    case GS_OP_GLU:
        return gx_glu(n, d, s[0], s[1]);
    case GS_OP_SUM:
        return gx_f32(d) && gx_f32(s[0]) && gx_rows(s[0]) && gx_count(d) == 1;
    case GS_OP_SUM_ROWS: case GS_OP_MEAN:
        return gx_f32(d) && gx_f32(s[0]) && gx_rows(s[0]) && gx_rows(d) && d->ne[0] == 1
            && gx_same_rows(d, s[0]);
    case GS_OP_ARGMAX:
        return gx_i32(d) && gx_f32(s[0]) && gx_rows(s[0]) && s[0]->ne[2] == 1 && s[0]->ne[3] == 1
            && d->ne[0] == s[0]->ne[1] && gx_count(d) == d->ne[0] && gx_rows(d);
    case GS_OP_ARGSORT: case GS_OP_TOP_K:
        return gx_i32(d) && gx_f32(s[0]) && gx_rows(s[0]) && gx_rows(d)
            && (n->op == GS_OP_TOP_K ? d->ne[0] <= s[0]->ne[0] : d->ne[0] == s[0]->ne[0])
            && gx_same_rows(d, s[0]);
    case GS_OP_NORM: case GS_OP_RMS_NORM: case GS_OP_L2_NORM:
        return gx_elementwise(d, s[0], GX_BIT(F32), 0) && gx_float(n, 0) >= 0;
    case GS_OP_GROUP_NORM: {
        const int64_t groups = n->params[0];
        return gx_elementwise(d, s[0], GX_BIT(F32), 0) && gx_float(n, 1) >= 0 && groups > 0
            && s[0]->ne[2] % groups == 0;
    }
    case GS_OP_DIAG_MASK_INF: case GS_OP_DIAG_MASK_ZERO:
        return gx_elementwise(d, s[0], GX_BIT(F32), 0) && gx_dense(d) && gx_dense(s[0]) && n->params[0] >= 0;
    case GS_OP_SOFT_MAX:
        return gx_soft_max(n, d, s[0], s[1], s[2]);
    case GS_OP_ROPE:
        return gx_rope(n, d, s[0], s[1], s[2]);
    case GS_OP_MUL_MAT:
        return gx_is_plain_product(n) && gx_mul_mat(d, s[0], s[1]);
    case GS_OP_MUL_MAT_ID:
        return gx_is_plain_product(n) && gx_mul_mat_id(d, s[0], s[1], s[2]);
    case GS_OP_GET_ROWS:
        return gx_get_rows(d, s[0], s[1]);
    case GS_OP_SET_ROWS:
        return gx_set_rows(d, s[0], s[1], s[2]);
    case GS_OP_SET:
        return gx_set(n, d, s[0], s[1]);
    case GS_OP_CPY: case GS_OP_CONT: case GS_OP_DUP:
        return gx_copy(d, s[0]);
    case GS_OP_REPEAT:
        return gx_is(d, GX_FLOATS | GX_BIT(I32)) && d->type == s[0]->type && gx_rows(d) && gx_rows(s[0])
            && gx_repeats(s[0], d);
    case GS_OP_CONCAT:
        return gx_concat(n, d, s[0], s[1]);
    case GS_OP_PAD:
        return gx_pad(n, d, s[0]);
    case GS_OP_ARANGE:
        return gx_arange(n, d);
    case GS_OP_FLASH_ATTN_EXT:
        return gx_flash(n, d);
    case GS_OP_SSM_CONV:
        return gx_ssm_conv(d, s[0], s[1]);
    case GS_OP_SSM_SCAN:
        return gx_ssm_scan(n, d);
    default:
        return 0;
    }
}

static int gx_supports(const gs_node *given)
{
    gs_node node = *given, src[GS_MAX_SRC];
    if (given->n_src > GS_MAX_SRC) {
        return 0;
    }
    node.layout = gx_regular(&given->layout);
    for (int i = 0; i < given->n_src; i++) {
        if (given->src[i] != NULL) {
            src[i].layout = gx_regular(&given->src[i]->layout);
            node.src[i] = &src[i];
        }
    }
    return gx_admits(&node);
}

#endif
