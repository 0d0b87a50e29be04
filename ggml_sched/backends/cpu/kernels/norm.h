/* norm.h -- RMS_NORM, NORM, L2_NORM, SOFT_MAX, SUM_ROWS, MEAN, DIAG_MASK_*: ops over whole rows.
 *
 * Included once for each instruction set.  Sums are added up in four vectors of partial sums: additions to different
 * vectors need not wait for each other.
 */

INLINE vf squared_if(vf x, int squares) {
    if (squares)
        return x * x;
    return x;
}

/* The sum of (x[i] - shift)^2 if `squares`, else of x[i] - shift, over n elements. */
INLINE float sum_over(const float *x, int64_t n, float shift, int squares) {
    vf s0 = vset(0), s1 = s0, s2 = s0, s3 = s0;
    int64_t i = 0;
    for (; i + 4 * V <= n; i += 4 * V) {
        vf a = vload(x + i) - shift, b = vload(x + i + V) - shift;
        vf c = vload(x + i + 2 * V) - shift, d = vload(x + i + 3 * V) - shift;
        s0 += squared_if(a, squares);
        s1 += squared_if(b, squares);
        s2 += squared_if(c, squares);
        s3 += squared_if(d, squares);
    }
    for (; i + V <= n; i += V) {
        vf a = vload(x + i) - shift;
        s0 += squared_if(a, squares);
    }
    float rest = 0;
    for (; i < n; i++)
        rest += squares ? (x[i] - shift) * (x[i] - shift) : x[i] - shift;
    return vsum((s0 + s1) + (s2 + s3)) + rest;
}

HELPER float sum_of(const float *x, int64_t n) { return sum_over(x, n, 0, 0); }
HELPER float squares_of(const float *x, int64_t n) { return sum_over(x, n, 0, 1); }
HELPER float squares_around(const float *x, int64_t n, float mean) { return sum_over(x, n, mean, 1); }

/* out[i] = (x[i] - shift) / divisor.  A subtraction rather than an addition, so that with shift 0 a -0 stays -0. */
HELPER void shift_and_divide(float *out, const float *x, int64_t n, float shift, float divisor) {
    int64_t i = 0;
    for (; i + V <= n; i += V)
        vstore(out + i, (vload(x + i) - shift) / divisor);
    for (; i < n; i++)
        out[i] = (x[i] - shift) / divisor;
}

/* A row of n f32 elements, `stride` bytes apart, as contiguous elements: `from` itself if they are contiguous, else a
 * copy in `copy`.  spread_row does the reverse for a result. */
INLINE const float *dense_row(const char *from, int64_t stride, int64_t n, float *copy) {
    if (stride == 4 || n == 1)
        return (const float *)from;
    for (int64_t i = 0; i < n; i++)
        copy[i] = *(const float *)(from + i * stride);
    return copy;
}

INLINE void spread_row(const float *x, char *to, int64_t stride, int64_t n) {
    if ((const char *)x != to)
        for (int64_t i = 0; i < n; i++)
            *(float *)(to + i * stride) = x[i];
}

static void run_norm(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_node *node = call->node, *a = node->src[0];
    int64_t n = node->layout.ne[0], so = node->layout.nb[0];
    float eps = gs_param_f32(node->params, 0);
    for (int64_t r = first_unit(call, part); r < end_unit(call, part); r++) {
        where w = row_at(node->layout.ne, r);
        const float *x = dense_row(row_of(a, w), a->layout.nb[0], n, (float *)scratch);
        char *to = row_of(node, w);
        float *out = so == 4 || n == 1 ? (float *)to : (float *)scratch;
        float shift = 0, divisor;
        if (node->op == GS_OP_RMS_NORM) {
            divisor = sqrtf(squares_of(x, n) / (float)n + eps);
        } else if (node->op == GS_OP_NORM) {
            shift = sum_of(x, n) / (float)n;
            divisor = sqrtf(squares_around(x, n, shift) / (float)n + eps);
        } else {
            divisor = sqrtf(squares_of(x, n));
            divisor = divisor > eps || divisor != divisor ? divisor : eps;
        }
        shift_and_divide(out, x, n, shift, divisor);
        spread_row(out, to, so, n);
    }
}

/* -- SUM_ROWS, MEAN ------------------------------------------------------------------------------------- */

static void run_sum_rows(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_node *node = call->node, *a = node->src[0];
    int64_t n = a->layout.ne[0];
    for (int64_t r = first_unit(call, part); r < end_unit(call, part); r++) {
        where w = row_at(node->layout.ne, r);
        float sum = sum_of(dense_row(row_of(a, w), a->layout.nb[0], n, (float *)scratch), n);
        *(float *)row_of(node, w) = node->op == GS_OP_MEAN ? sum / (float)n : sum;
    }
}

/* -- DIAG_MASK_INF, DIAG_MASK_ZERO ---------------------------------------------------------------------- */

static void run_diag_mask(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_node *node = call->node, *a = node->src[0];
    float value = node->op == GS_OP_DIAG_MASK_INF ? -INFINITY : 0;
    int64_t n = node->layout.ne[0], sa = a->layout.nb[0], so = node->layout.nb[0];
    for (int64_t r = first_unit(call, part); r < end_unit(call, part); r++) {
        where w = row_at(node->layout.ne, r);
        const char *from = row_of(a, w);
        char *to = row_of(node, w);
        int64_t kept = node->params[0] + w.i1 + 1;
        for (int64_t i = 0; i < n; i++)
            *(float *)(to + i * so) = i < kept ? *(const float *)(from + i * sa) : value;
    }
}

/* -- SOFT_MAX --------------------------------------------------------------------------------------------- */

/* ALiBi: the factor by which the mask of a head is multiplied (Press et al. 2021); 1 if max_bias is 0 (no ALiBi). */
HELPER float slope_of(int64_t head, int64_t n_head, float max_bias) {
    if (max_bias <= 0 || max_bias != max_bias)
        return 1;
    int64_t whole = 1;
    while (whole * 2 <= n_head)
        whole *= 2;
    double share = head < whole ? (double)(head + 1) / (double)whole
                                : (double)(2 * (head - whole) + 1) / (double)(2 * whole);
    return (float)exp2(-(double)max_bias * share);
}

/* out = x * scale + mask * slope, for n scores; the mask is contiguous f32 or f16 (`type`), or NULL. */
static void scale_and_mask(float *out, const float *x, int64_t n, float scale, const char *mask, int type,
                           float slope) {
    float tile[TILE];
    for (int64_t first = 0; first < n; first += TILE) {
        int64_t count = n - first < TILE ? n - first : TILE, i = 0;
        const float *m = mask == NULL ? NULL
                         : tile_of(mask + first * gs_plain_size(type), type, gs_plain_size(type), count, tile);
        for (; i + V <= count; i += V) {
            vf y = vload(x + first + i) * scale;
            if (m != NULL)
                y += vload(m + i) * slope;
            vstore(out + first + i, y);
        }
        for (; i < count; i++) {
            float y = x[first + i] * scale;
            out[first + i] = m == NULL ? y : y + m[i] * slope;
        }
    }
}

HELPER float largest_of(const float *x, int64_t n) {
    vf t = vset(-INFINITY);
    int64_t i = 0;
    for (; i + V <= n; i += V)
        t = vmax(vload(x + i), t);
    float top = vlargest(t);
    for (int64_t k = n - n % V; k < n; k++)
        top = x[k] > top ? x[k] : top;
    return top;
}

/* Replaces each x[i] by exp(x[i] - top), and returns their sum. */
HELPER float exponents(float *x, int64_t n, float top) {
    vf s = vset(0);
    int64_t i = 0;
    for (; i + V <= n; i += V) {
        vf e = vexp(vload(x + i) - top);
        vstore(x + i, e);
        s += e;
    }
    float sum = vsum(s);
    if (i < n) {
        float last[V];
        int64_t rest = n - i;
        for (int64_t k = 0; k < V; k++)
            last[k] = k < rest ? x[i + k] - top : -INFINITY;
        vstore(last, vexp(vload(last)));
        for (int64_t k = 0; k < V && k < rest; k++) {
            x[i + k] = last[k];
            sum += last[k];
        }
    }
    return sum;
}

static float exp_of_one(float x) {
    float t[V];
    vstore(t, vexp(vset(x)));
    return t[0];
}

static void run_soft_max(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_node *node = call->node, *a = node->src[0];
    const gs_node *mask = node->n_src > 1 ? node->src[1] : NULL, *sinks = node->n_src > 2 ? node->src[2] : NULL;
    int64_t n = node->layout.ne[0], so = node->layout.nb[0];
    float scale = gs_param_f32(node->params, 0), max_bias = gs_param_f32(node->params, 1);
    for (int64_t r = first_unit(call, part); r < end_unit(call, part); r++) {
        where w = row_at(node->layout.ne, r);
        const float *x = dense_row(row_of(a, w), a->layout.nb[0], n, (float *)scratch);
        char *to = row_of(node, w);
        float *out = so == 4 || n == 1 ? (float *)to : (float *)scratch;
        const char *m = mask == NULL ? NULL : row_of(mask, (where){w.i1, w.i2 % mask->layout.ne[2],
                                                                   w.i3 % mask->layout.ne[3]});
        scale_and_mask(out, x, n, scale, m, mask == NULL ? GS_TYPE_F32 : mask->layout.type,
                       slope_of(w.i2, node->layout.ne[2], max_bias));
        float top = largest_of(out, n), sink = 0;
        if (sinks != NULL) {
            sink = ((const float *)sinks->data)[w.i2];
            top = sink > top || sink != sink ? sink : top;
        }
        float sum = exponents(out, n, top);
        if (sinks != NULL)
            sum += exp_of_one(sink - top);
        shift_and_divide(out, out, n, 0, sum);
        spread_row(out, to, so, n);
    }
}

/* Whether the rows of a mask of SOFT_MAX or FLASH_ATTN_EXT have no gaps, and the sinks are dense. */
static int masks_are_dense(const gs_node *mask, const gs_node *sinks) {
    return (mask == NULL || mask->layout.nb[0] == gs_plain_size(mask->layout.type) || mask->layout.ne[0] == 1)
           && (sinks == NULL || is_dense(sinks));
}
