/* elementwise.h -- functions of one element, of two, and gated units: ADD SUB MUL DIV ADD1 ADD_ID, SCALE SQR SQRT LOG
 * CLAMP, UNARY, GLU.
 *
 * Included once for each instruction set.  Kernels compute in f32, a tile (rows.h) at a time; results of f16 and bf16
 * are rounded once, when they are stored.  An element's result does not depend on its position in a row, because the
 * last elements of a row are computed in a full vector, too.
 */

/* Computes n elements of `out`.  `a`: the first operand; `b`: the second, or any floats if the op has none; `c`: the
 * node's parameters. */
typedef void (*tile_fn)(float *out, const float *a, const float *b, int64_t n, const float *c);

/* Defines a tile function; its body computes a vector `y` from the vectors `x` (of a) and `z` (of b). */
#define TILE_FN(name, body)                                                                   \
    static void name(float *out, const float *a, const float *b, int64_t n, const float *c) { \
        (void)b; (void)c;                                                                     \
        int64_t i = 0;                                                                        \
        for (; i + V <= n; i += V) {                                                          \
            vf x = vload(a + i), z = vload(b + i), y;                                         \
            (void)z;                                                                          \
            body                                                                              \
            vstore(out + i, y);                                                               \
        }                                                                                     \
        if (i < n) {                                                                          \
            float last[V] = {0}, other[V] = {0}, done[V];                                     \
            memcpy(last, a + i, (size_t)(n - i) * 4);                                         \
            memcpy(other, b + i, (size_t)(n - i) * 4);                                        \
            vf x = vload(last), z = vload(other), y;                                          \
            (void)z;                                                                          \
            body                                                                              \
            vstore(done, y);                                                                  \
            memcpy(out + i, done, (size_t)(n - i) * 4);                                       \
        }                                                                                     \
    }

/* Defines a tile function whose body computes one element `y` from `x`: for rarely used ops, which may be slow. */
#define EACH_FN(name, body)                                                                   \
    static void name(float *out, const float *a, const float *b, int64_t n, const float *c) { \
        (void)b; (void)c;                                                                     \
        for (int64_t i = 0; i < n; i++) {                                                     \
            float x = a[i], y;                                                                \
            body                                                                              \
            out[i] = y;                                                                       \
        }                                                                                     \
    }

/* above: the maximum of x and a limit; below: the minimum.  As in NumPy, the result is NaN where x is NaN.  Where x is
 * 0 and the limit is 0 of the other sign, the result is the limit, as in ggml. */
INLINE vf above(vf x, float limit) { return vpick((x > limit) | (x != x), x, vset(limit)); }
INLINE vf below(vf x, float limit) { return vpick((x < limit) | (x != x), x, vset(limit)); }

/* x rounded to the nearest f16 value, ties to even; values beyond the range of f16 stay unchanged. */
INLINE vf as_half(vf x) {
    vi bits = (vi)x;
    vf normal = (vf)((bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fff);
    /* Below 2^-14 the values of f16 are multiples of 2^-24, and so are those of f32 from 0.5 to 1: adding 0.75 rounds
     * to such a multiple, and subtracting 0.75 leaves it.  vsign_of keeps the sign of zeros. */
    vf tiny = vsign_of(x, (vabs(x) + 0.75f) - 0.75f);
    return vpick(vabs(x) <= 65504.0f, vpick(vabs(x) < 0x1p-14f, tiny, normal), x);
}

/* gelu and gelu_quick with argument and result rounded to f16: ggml looks them up in tables from f16 to f16. */
INLINE vf gelu_of_halves(vf x) {
    x = as_half(x);
    vf inner = (x * x * 0.044715f + 1.0f) * x * 0.797884561f;
    return as_half((vtanh(inner) + 1.0f) * 0.5f * x);
}
INLINE vf gelu_quick_of_halves(vf x) {
    x = as_half(x);
    return as_half(x / (1.0f + vexp(x * -1.702f)));
}

TILE_FN(f_add, y = x + z;)
TILE_FN(f_sub, y = x - z;)
TILE_FN(f_mul, y = x * z;)
TILE_FN(f_div, y = x / z;)
TILE_FN(f_scale, y = x * c[0];)
TILE_FN(f_sqr, y = x * x;)
TILE_FN(f_clamp, y = above(below(x, c[1]), c[0]);)
TILE_FN(f_abs, y = vabs(x);)
TILE_FN(f_neg, y = -x;)
TILE_FN(f_relu, y = above(x, 0.0f);)
TILE_FN(f_exp, y = vexp(x);)
TILE_FN(f_tanh, y = vtanh(x);)
TILE_FN(f_sigmoid, y = 1.0f / (1.0f + vexp(-x));)
TILE_FN(f_silu, y = x / (1.0f + vexp(-x));)
TILE_FN(f_gelu_quick, y = gelu_quick_of_halves(x);)
TILE_FN(f_gelu, y = vpick(x >= 10.0f, x, vpick(x <= -10.0f, vset(0.0f), gelu_of_halves(x)));)
TILE_FN(f_gelu_erf, {
    vf e = verfc_positive(vabs(x) * 0.70710678f);
    y = vpick(x > 0.0f, 2.0f - e, e) * 0.5f * x;
    y = vpick(x == -INFINITY, vset(NAN), y);
})
TILE_FN(f_step, y = (vf)((x > 0.0f) & (vi)vset(1.0f));)
TILE_FN(f_sgn, y = (vf)((x > 0.0f) & (vi)vset(1.0f)) - (vf)((x < 0.0f) & (vi)vset(1.0f));)
TILE_FN(f_hardsigmoid, y = below(above((x + 3.0f) / 6.0f, 0.0f), 1.0f);)
TILE_FN(f_hardswish, y = below(above((x + 3.0f) / 6.0f, 0.0f), 1.0f) * x;)
TILE_FN(f_softplus, y = vpick(x > 20.0f, x, vlog1p_positive(vexp(x)));)
EACH_FN(f_sqrt, y = sqrtf(x);)
EACH_FN(f_log, y = logf(x);)
EACH_FN(f_elu, y = x > 0 ? x : expm1f(x);)
EACH_FN(f_expm1, y = expm1f(x);)
EACH_FN(f_floor, y = floorf(x);)
EACH_FN(f_ceil, y = ceilf(x);)
EACH_FN(f_round, y = roundf(x);)
EACH_FN(f_trunc, y = truncf(x);)
EACH_FN(f_xielu, {
    y = x > 0 ? (c[1] * x + c[2]) * x : (expm1f(x > c[3] ? c[3] : x) - x) * c[0] + c[2] * x;
})
/* x * c[0] + c[1] in two steps, each rounded: the compiler could make one fused multiply-add of a single expression. */
static void f_scale_and_shift(float *out, const float *a, const float *b, int64_t n, const float *c) {
    float scaled[TILE], shift[TILE];
    f_scale(scaled, a, b, n, c);
    for (int64_t i = 0; i < n; i++)
        shift[i] = c[1];
    f_add(out, scaled, shift, n, c);
}

/* The functions of gated units (GLU): function(a) * b. */
TILE_FN(g_reglu, y = above(x, 0.0f) * z;)
TILE_FN(g_swiglu, y = x / (1.0f + vexp(-x)) * z;)
TILE_FN(g_geglu_quick, y = gelu_quick_of_halves(x) * z;)
TILE_FN(g_geglu, y = gelu_of_halves(x) * z;)
TILE_FN(g_geglu_erf, {
    vf e = verfc_positive(vabs(x) * 0.70710678f);
    y = vpick(x > 0.0f, 2.0f - e, e) * 0.5f * x * z;
    y = vpick(x == -INFINITY, vset(NAN), y);
})
TILE_FN(g_swiglu_oai, {
    vf gate = below(x, c[1]);
    vf factor = above(below(z, c[1]), -c[1]) + 1.0f;
    y = factor * gate / (1.0f + vexp(gate * -c[0]));
})

static tile_fn unary_of(int sub_op) {
    static const tile_fn table[GS_N_UNARY_OPS] = {
        [GS_UNARY_ABS] = f_abs, [GS_UNARY_SGN] = f_sgn, [GS_UNARY_NEG] = f_neg, [GS_UNARY_STEP] = f_step,
        [GS_UNARY_TANH] = f_tanh, [GS_UNARY_ELU] = f_elu, [GS_UNARY_RELU] = f_relu,
        [GS_UNARY_SIGMOID] = f_sigmoid, [GS_UNARY_GELU] = f_gelu, [GS_UNARY_GELU_QUICK] = f_gelu_quick,
        [GS_UNARY_SILU] = f_silu, [GS_UNARY_HARDSWISH] = f_hardswish, [GS_UNARY_HARDSIGMOID] = f_hardsigmoid,
        [GS_UNARY_EXP] = f_exp, [GS_UNARY_GELU_ERF] = f_gelu_erf, [GS_UNARY_XIELU] = f_xielu,
        [GS_UNARY_FLOOR] = f_floor, [GS_UNARY_CEIL] = f_ceil, [GS_UNARY_ROUND] = f_round,
        [GS_UNARY_TRUNC] = f_trunc, [GS_UNARY_EXPM1] = f_expm1, [GS_UNARY_SOFTPLUS] = f_softplus,
    };
    return sub_op >= 0 && sub_op < GS_N_UNARY_OPS ? table[sub_op] : NULL;
}

static tile_fn gate_of(int sub_op) {
    static const tile_fn table[GS_N_GLU_OPS] = {
        [GS_GLU_REGLU] = g_reglu, [GS_GLU_GEGLU] = g_geglu, [GS_GLU_SWIGLU] = g_swiglu,
        [GS_GLU_SWIGLU_OAI] = g_swiglu_oai, [GS_GLU_GEGLU_ERF] = g_geglu_erf,
        [GS_GLU_GEGLU_QUICK] = g_geglu_quick,
    };
    return sub_op >= 0 && sub_op < GS_N_GLU_OPS ? table[sub_op] : NULL;
}

/* The tile function of a node; NULL if its op has none.  Also writes the node's parameters to c. */
static tile_fn function_of(const gs_node *node, float *c) {
    const int32_t *p = node->params;
    c[0] = c[1] = c[2] = c[3] = 0;
    switch (node->op) {
    case GS_OP_ADD: case GS_OP_ADD1: case GS_OP_ADD_ID: return f_add;
    case GS_OP_SUB: return f_sub;
    case GS_OP_MUL: return f_mul;
    case GS_OP_DIV: return f_div;
    case GS_OP_SQR: return f_sqr;
    case GS_OP_SQRT: return f_sqrt;
    case GS_OP_LOG: return f_log;
    case GS_OP_SCALE: case GS_OP_CLAMP:
        c[0] = gs_param_f32(p, 0);
        c[1] = gs_param_f32(p, 1);
        return node->op == GS_OP_CLAMP ? f_clamp : c[1] != 0 ? f_scale_and_shift : f_scale;
    case GS_OP_UNARY:
        for (int i = 0; i < 4; i++)
            c[i] = gs_param_f32(p, i + 1);
        return unary_of(node->sub_op);
    case GS_OP_GLU:
        c[0] = gs_param_f32(p, 2);
        c[1] = gs_param_f32(p, 3);
        return gate_of(node->sub_op);
    default: return NULL;
    }
}

/* -- the kernel of all these ops --------------------------------------------------------------------------
 *
 * The second operand is repeated to the extents of the first; for ADD_ID, one of its rows is chosen for each row.
 *
 * A unit of work is a piece of a row.  arg[2]: elements of a row; arg[3]: pieces of a row, each of PIECE elements;
 * arg[4], arg[5]: bytes from the start of a row to the first element of operand a and of operand b (not 0 only for a
 * GLU of one source, whose halves are the operands); arg[6]: 1 if all tensors are dense and computed as one row. */
#define PIECE 8192
#define ROW_WORK 16384          /* about how many elements one part computes */

static void run_elementwise(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_node *node = call->node, *a = node->src[0];
    const gs_node *b = node->n_src > 1 && node->src[1] != NULL ? node->src[1] : a;
    float c[4], tile_a[TILE], tile_b[TILE], tile_out[TILE];
    tile_fn f = function_of(node, c);
    int is_flat = call->arg[6] != 0, is_same = b == a && call->arg[4] == call->arg[5] && node->op != GS_OP_ADD_ID;
    const int type_a = a->layout.type, type_b = b->layout.type, type = node->layout.type;
    int64_t width = call->arg[2], pieces = call->arg[3], period = is_flat || b == a ? width : b->layout.ne[0];
    int64_t sa = a->layout.nb[0], sb = b->layout.nb[0], so = node->layout.nb[0];
    if (is_flat) {                              /* dense, but nb[0] may have any value where ne[0] is 1 */
        sa = gs_plain_size(type_a);
        sb = gs_plain_size(type_b);
        so = gs_plain_size(type);
    }
    for (int64_t unit = first_unit(call, part); unit < end_unit(call, part); unit++) {
        where w = {0, 0, 0};
        if (!is_flat)
            w = row_at(node->layout.ne, pieces == 1 ? unit : unit / pieces);
        int64_t first = pieces == 1 ? 0 : unit % pieces * PIECE;
        int64_t end = pieces == 1 ? width : first + PIECE < width ? first + PIECE : width;
        char *from = row_of(a, w) + call->arg[4], *to = row_of(node, w), *other;
        if (node->op == GS_OP_ADD_ID) {
            int64_t id = id_at(node->src[2], w.i1, w.i2, 0);
            if (outside(id, b->layout.ne[1], 2, fault))
                return;
            other = row_of(b, (where){id, 0, 0});
        } else {
            other = (is_flat || b == a ? row_of(b, w) : row_repeated(b, w)) + call->arg[5];
        }
        if (period == 1 && !is_same) {
            float value = *tile_of(other, type_b, sb, 1, tile_b);
            for (int64_t i = 0; i < TILE && i < width; i++)
                tile_b[i] = value;
        }
        for (int64_t i = first, at = first > 0 ? first % period : 0, n; i < end; i += n) {
            n = end - i < TILE ? end - i : TILE;
            if (period != 1 && period - at < n)
                n = period - at;
            const float *x = tile_of(from + i * sa, type_a, sa, n, tile_a);
            const float *z = is_same ? x : period == 1 ? tile_b : tile_of(other + at * sb, type_b, sb, n, tile_b);
            float *y = tile_for(to + i * so, type, so, n, tile_out);
            f(y, x, z, n, c);
            put_tile(y, to + i * so, type, so, n);
            at = at + n == period ? 0 : at + n;
        }
    }
}

static int build_elementwise(const gs_node *node, int32_t position, gs_calls *to) {
    const gs_node *a = node->src[0], *b = node->n_src > 1 ? node->src[1] : NULL;
    float c[4];
    if (function_of(node, c) == NULL)
        return GS_UNSUPPORTED_OP;
    if (node->op == GS_OP_ADD_ID && add_check(node, position, to, 2, b->layout.ne[1]) != GS_OK)
        return GS_NO_HOST_MEMORY;
    int is_split = node->op == GS_OP_GLU && b == NULL, swapped = is_split && node->params[1] != 0;
    int is_flat = !is_split && node->op != GS_OP_ADD_ID && is_dense(a) && is_dense(node)
                  && (b == NULL || (is_dense(b) && same_extents(b, node)));
    int64_t half = is_split ? node->layout.ne[0] * a->layout.nb[0] : 0;
    int64_t width = is_flat ? n_elements_of(node) : node->layout.ne[0];
    int64_t rows = is_flat ? 1 : n_rows_of(node), pieces = (width + PIECE - 1) / PIECE;
    gs_call call = call_over(node, position, run_elementwise, rows * pieces, width < PIECE ? width : PIECE, ROW_WORK);
    call.arg[2] = width;
    call.arg[3] = pieces;
    call.arg[4] = swapped ? half : 0;
    call.arg[5] = swapped ? 0 : half;
    call.arg[6] = is_flat;
    return gs_add_call(to, &call);
}
