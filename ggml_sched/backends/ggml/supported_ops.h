/* ggml_sched/backends/ggml/supported_ops.h -- the nodes that ggml's CPU kernels compute correctly.
 *
 * ggml's supports_op accepts nearly every node; ggml then aborts the process, or computes wrong results, where types,
 * strides or parameters violate a kernel's assumptions.  So this file lists the assumptions of each kernel and admits a
 * node only where all hold.  Other nodes run on other backends.  Types and extents of an op's nodes are in op_rules.h.
 *
 * gx_supports(node): 1 or 0.  It reads op, parameters and layouts, never addresses.
 */
#ifndef GGML_SCHED_BACKENDS_GGML_SUPPORTED_OPS_H
#define GGML_SCHED_BACKENDS_GGML_SUPPORTED_OPS_H

#include <math.h>
#include <string.h>
#include "kernels/op_rules.h"

#define GX_SMALL_BLOCKS (GS_BIT(Q4_0) | GS_BIT(Q4_1) | GS_BIT(Q5_0) | GS_BIT(Q5_1) | GS_BIT(Q8_0) \
                         | GS_BIT(IQ4_NL) | GS_BIT(MXFP4))
/* q2_K q3_K q4_K q5_K q6_K, and every iq type but iq4_nl: these have the numbers 16 .. 23 and 29. */
#define GX_BIG_BLOCKS ((UINT64_C(0x1f) << GS_TYPE_Q2_K) | (UINT64_C(0xff) << 16 & ~GS_BIT(IQ4_NL)) | GS_BIT(IQ1_M))

/* The largest extent that is supported: some kernels count in 32-bit integers. */
#define GX_MAX_EXTENT INT64_C(0x7fffffff)

typedef const gs_layout *gx_layout;

static inline int gx_is(gx_layout a, uint64_t types)
{
    return gs_is_one_of(a->type, types);
}

static inline int gx_f32(gx_layout a)
{
    return a->type == GS_TYPE_F32;
}

static inline int gx_same_ne(gx_layout a, gx_layout b)
{
    return gs_same_from(0, a->ne, b->ne);
}

/* The bytes of an element (of a quantised type: of a block); sets *elements to how many elements that is.  -1, which
 * equals no stride, for unknown types. */
static inline int64_t gx_unit(gx_layout a, int64_t *elements)
{
    const gs_type_traits traits = gs_traits_of_type(a->type);
    *elements = traits.block_size ? traits.block_size : 1;
    return traits.type_size ? (int64_t)traits.type_size : -1;
}

/* Layout a, with the strides that ggml itself would set for dimensions of extent 1.  The stride of such a dimension has
 * no effect, so callers may set any value; but ggml's kernels compare it. */
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

static inline float gx_float(const gs_node *node, int i)
{
    float value;
    memcpy(&value, &node->params[i], sizeof value);
    return value;
}

/* Whether ggml computes a function of each element, from layout a to d.  `even`: the kernel needs rows at one stride
 * (gx_even). */
static int gx_elementwise(gx_layout d, gx_layout a, uint64_t types, int even)
{
    return gx_is(a, types) && (even ? gx_even(d) && gx_even(a) : gx_rows(d) && gx_rows(a));
}

static int gx_unary(const gs_node *n, gx_layout d, gx_layout a)
{
    switch (n->sub_op) {
    case GS_UNARY_GELU_QUICK:
        return 0;       /* wrong result: ggml reads a table from f16 to f16, in which -inf becomes -inf * 0, NaN */
    case GS_UNARY_GELU: case GS_UNARY_GELU_ERF: case GS_UNARY_SILU:
        return gx_elementwise(d, a, GS_F32_F16, 0);
    default:
        return gx_elementwise(d, a, GS_FLOATS, 0);
    }
}

static int gx_glu(const gs_node *n, gx_layout d, gx_layout a, gx_layout b)
{
    return gx_is(a, n->sub_op == GS_GLU_SWIGLU_OAI ? GS_BIT(F32) : GS_F32_F16) && gx_even(d) && gx_even(a)
        && n->sub_op != GS_GLU_GEGLU_QUICK && (b == NULL || gx_even(b));
}

/* CPY, CONT, DUP: whether ggml copies from layout a to d: between which types, and for which strides. */
static int gx_copy(gx_layout d, gx_layout a)
{
    if (a->type == d->type) {
        if (gx_is(a, GS_PLAIN)) {
            return gx_is(a, GS_FLOATS | GS_BIT(I32)) ? 1 : gx_rows(a) && gx_rows(d) && gx_same_ne(a, d);
        }
        return (gx_dense(a) && gx_dense(d)) || (gx_rows(a) && gx_rows(d) && gx_same_ne(a, d));
    }
    if (gx_is(a, GS_FLOATS) && gx_is(d, GS_FLOATS)) {
        return 1;
    }
    if (gx_f32(a) && gx_is(d, GX_SMALL_BLOCKS)) {
        return gx_rows(a) && gx_dense(d) && gx_same_ne(a, d);
    }
    if (gx_is(a, GX_SMALL_BLOCKS) && gx_f32(d)) {
        return gx_dense(a) && gx_dense(d) && gx_same_ne(a, d);
    }
    return a->type == GS_TYPE_I32 || d->type == GS_TYPE_I32;
}

/* Whether ggml multiplies matrices of layout a with columns of layout b.  Its kernels convert the columns to a type
 * that depends on a's, from f32 only. */
static int gx_factors(gx_layout a, gx_layout b)
{
    return gx_strided(a) && gx_strided(b) && (gx_f32(b) || b->type == a->type);
}

/* Whether a product's parameters are a precision that ggml knows (0 or 10), and no hint that a is a special matrix. */
static int gx_is_plain_product(const gs_node *n)
{
    return (n->params[0] == 0 || n->params[0] == 10) && n->params[1] == 0;
}

static int gx_pad(const int32_t *p, gx_layout d, gx_layout a)
{
    return gx_rows(a) && gx_dense(d) && p[0] == 0 && p[2] == 0 && p[4] == 0 && p[6] == 0 && p[8] == 0;
}

static int gx_arange(const gs_node *n, gx_layout d)
{
    const float start = gx_float(n, 0), stop = gx_float(n, 1), step = gx_float(n, 2);
    return gx_dense(d) && isfinite(start) && isfinite(stop) && isfinite(step) && step != 0
        && (int64_t)ceilf((stop - start) / step) == d->ne[0];
}

/* Whether ggml's kernels take a node's mask (NULL only without ALiBi) and sinks (or NULL). */
static int gx_mask(const gs_node *n, gx_layout mask, gx_layout sinks)
{
    return (mask == NULL ? !(gx_float(n, 1) > 0) : gx_rows(mask)) && (sinks == NULL || gx_dense(sinks));
}

static int gx_rope(const gs_node *n, gx_layout d, gx_layout a, gx_layout positions, gx_layout factors)
{
    return gx_rows(a) && gx_rows(d) && n->params[1] > 0 && a->ne[0] % 2 == 0 && gx_dense(positions)
        && (factors == NULL || gx_dense(factors));
}

static int gx_flash(const gs_node *n, gx_layout d, const gx_layout s[])
{
    gx_layout q = s[0], k = s[1], v = s[2], mask = s[3];
    const uint64_t stored = GS_FLOATS | GX_SMALL_BLOCKS;
    if (n->params[3] != 0 && n->params[3] != 10) {
        return 0;       /* not a precision that ggml knows */
    }
    if (gx_float(n, 2) != 0 && q->ne[1] >= 64 && k->ne[1] % 64 != 0) {
        /* ggml 0.15 would compute wrongly: it pads keys to tiles of 64 with scores of -inf, and then applies the soft
         * cap, which turns -inf into a number. */
        return 0;
    }
    return gx_is(k, stored) && gx_is(v, stored) && gx_strided(q) && gx_strided(k) && gx_strided(v) && gx_dense(d)
        && (mask == NULL || mask->type == GS_TYPE_F16) && gx_mask(n, mask, s[4]);
}

static int gx_ssm_scan(const gs_node *n, gx_layout d, const gx_layout s[])
{
    gx_layout x = s[1], b = s[4], c = s[5];
    for (int i = 0; i < 6; i++) {
        if (!gx_rows(s[i])) {
            return 0;
        }
    }
    return n->params[0] == 1 && gx_dense(d) && gx_dense(s[0]) && gx_dense(s[2]) && gx_dense(s[3]) && gx_dense(s[6])
        && x->nb[1] == x->ne[0] * 4 && b->nb[1] == b->ne[0] * 4 && c->nb[1] == c->ne[0] * 4
        && memcmp(b->nb, c->nb, sizeof b->nb) == 0;
}

/* Whether kernels can count with the extents and strides, and there is at least one element. */
static int gx_is_sound(gx_layout a)
{
    for (int i = 0; i < 4; i++) {
        if (a->ne[i] > GX_MAX_EXTENT || a->nb[i] < 0) {
            return 0;
        }
    }
    return gs_count(a->ne) > 0;
}

static int gx_admits(const gs_node *n)
{
    gx_layout d = &n->layout, s[GS_MAX_SRC] = {NULL};
    if (n->op == GS_OP_NONE || (n->op >= GS_OP_VIEW && n->op <= GS_OP_TRANSPOSE)) {
        return 1;
    }
    if (!gs_extents_fit(n) || !gs_types_fit(n, GX_BIG_BLOCKS) || !gx_is_sound(d)) {
        return 0;
    }
    for (int i = 0; i < n->n_src; i++) {
        if (n->src[i] != NULL) {
            s[i] = &n->src[i]->layout;
            if (!gx_is_sound(s[i])) {
                return 0;
            }
        }
    }
    switch (n->op) {
    case GS_OP_ADD: case GS_OP_SUB: case GS_OP_MUL: case GS_OP_DIV:
        return (s[1]->type == d->type || gx_f32(s[1])) && gx_rows(d) && gx_rows(s[0]);
    case GS_OP_ADD1:
        return gx_f32(d) && gx_f32(s[1]) && gx_rows(d) && gx_rows(s[0]);
    case GS_OP_ADD_ID:
        return gx_rows(d) && gx_rows(s[0]) && gx_rows(s[1]) && gx_rows(s[2]);
    case GS_OP_SCALE:
        return gx_f32(d) && gx_dense(d) && gx_dense(s[0]);
    case GS_OP_CLAMP:
        return gx_elementwise(d, s[0], GS_F32_F16, 1);
    case GS_OP_UNARY:
        return gx_unary(n, d, s[0]);
    case GS_OP_GLU:
        return gx_glu(n, d, s[0], s[1]);
    case GS_OP_SUM:
        return gx_f32(d) && gx_rows(s[0]);
    case GS_OP_SQR: case GS_OP_SQRT: case GS_OP_LOG: case GS_OP_SUM_ROWS: case GS_OP_MEAN: case GS_OP_ARGMAX:
    case GS_OP_ARGSORT: case GS_OP_TOP_K: case GS_OP_GET_ROWS:
        return gx_rows(s[0]) && gx_rows(d);
    case GS_OP_NORM: case GS_OP_RMS_NORM: case GS_OP_L2_NORM:
        return gx_rows(s[0]) && gx_rows(d) && gx_float(n, 0) >= 0;
    case GS_OP_GROUP_NORM:
        return gx_rows(s[0]) && gx_rows(d) && gx_float(n, 1) >= 0 && s[0]->ne[2] % n->params[0] == 0;
    case GS_OP_DIAG_MASK_INF: case GS_OP_DIAG_MASK_ZERO:
        return gx_dense(d) && gx_dense(s[0]) && n->params[0] >= 0;
    case GS_OP_SOFT_MAX:
        return gx_dense(d) && gx_rows(s[0]) && gx_mask(n, s[1], s[2]);
    case GS_OP_ROPE:
        return gx_rope(n, d, s[0], s[1], s[2]);
    case GS_OP_MUL_MAT:
        return gx_is_plain_product(n) && gx_factors(s[0], s[1]) && gx_dense(d);
    case GS_OP_MUL_MAT_ID:
        return gx_is_plain_product(n) && gx_factors(s[0], s[1]) && gx_f32(s[1]) && gx_dense(d) && gx_rows(s[2]);
    case GS_OP_SET_ROWS:
        return gx_is(d, GS_FLOATS | GX_SMALL_BLOCKS) && gx_rows(d) && gx_rows(s[0]);
    case GS_OP_SET:
        return gx_is(d, GS_BIT(F32) | GS_BIT(I32)) && gx_dense(d) && gx_dense(s[0]) && gx_rows(s[1]);
    case GS_OP_CONT: case GS_OP_DUP:
        return n->n_src == 1 && gx_copy(d, s[0]);
    case GS_OP_CPY:
        return gx_copy(d, s[0]);
    case GS_OP_REPEAT:
        return gx_is(d, GS_FLOATS | GS_BIT(I32)) && gx_rows(d) && gx_rows(s[0]);
    case GS_OP_CONCAT:
        return gx_is(d, GS_PLAIN) && gx_rows(d);
    case GS_OP_PAD:
        return gx_pad(n->params, d, s[0]);
    case GS_OP_ARANGE:
        return gx_arange(n, d);
    case GS_OP_FLASH_ATTN_EXT:
        return gx_flash(n, d, s);
    case GS_OP_SSM_CONV:
        return gx_dense(d) && gx_dense(s[0]) && gx_dense(s[1]);
    case GS_OP_SSM_SCAN:
        return gx_ssm_scan(n, d, s);
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
