/* ssm.h -- SSM_CONV and SSM_SCAN: the convolution along tokens and the selective scan of state-space models.
 *
 * Included once for each instruction set.  The products of a filter's taps are added tap after tap, as in the oracle.
 * A scan goes token after token, because each state depends on the one before; so parts are cut along channels, heads
 * and sequences, never along tokens.
 */

/* A unit of work is one channel, in all sequences. */
static void run_ssm_conv(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_node *node = call->node, *x = node->src[0], *filters = node->src[1];
    int64_t taps = filters->layout.ne[0], n_tokens = node->layout.ne[1], n_seqs = node->layout.ne[2];
    int64_t sx = x->layout.nb[0], sf = filters->layout.nb[0];
    for (int64_t channel = first_unit(call, part); channel < end_unit(call, part); channel++) {
        const char *f = (const char *)filters->data + channel * filters->layout.nb[1];
        for (int64_t s = 0; s < n_seqs; s++) {
            const char *from = row_of(x, (where){channel, s, 0});
            for (int64_t t = 0; t < n_tokens; t++) {
                float sum = *(const float *)(from + t * sx) * *(const float *)f;
                for (int64_t k = 1; k < taps; k++)
                    sum += *(const float *)(from + (t + k) * sx) * *(const float *)(f + k * sf);
                *(float *)(row_of(node, (where){t, s, 0}) + channel * node->layout.nb[0]) = sum;
            }
        }
    }
}

static int build_ssm_conv(const gs_node *node, int32_t position, gs_calls *to) {
    const int64_t *o = node->layout.ne;
    gs_call call = call_over(node, position, run_ssm_conv, o[0], node->src[1]->layout.ne[0] * o[1] * o[2], ROW_WORK);
    return gs_add_call(to, &call);
}

/* One token of one channel: state[i] = state[i] * exp(step * a[i]) + x * step * b[i] for n elements; returns the sum of
 * state[i] * c[i].  sa, sb, sc: strides in bytes; sa is 0 where all elements share one a. */
static float scan_row(float *state, int64_t n, const char *a, int64_t sa, float step, float x, const char *b,
                      int64_t sb, const char *c, int64_t sc) {
    vf sum = vset(0);
    for (int64_t i = 0; i < n; i += V) {
        float av[V] = {0}, bv[V] = {0}, cv[V] = {0}, sv[V] = {0};
        int64_t count = n - i < V ? n - i : V;
        for (int64_t k = 0; k < count; k++) {
            av[k] = *(const float *)(a + (i + k) * sa);
            bv[k] = *(const float *)(b + (i + k) * sb);
            cv[k] = *(const float *)(c + (i + k) * sc);
            sv[k] = state[i + k];
        }
        vf s = vload(sv) * vexp(vload(av) * step) + x * step * vload(bv);
        vstore(sv, s);
        memcpy(state + i, sv, (size_t)count * 4);
        for (int64_t k = count; k < V; k++)
            sv[k] = 0; /* an infinite x makes these lanes NaN */
        sum += vload(sv) * vload(cv);
    }
    return vsum(sum);
}

static float softplus(float x) {
    float t[V];
    vstore(t, vlog1p_positive(vexp(vset(x))));
    return x > 20.0f ? x : t[0];
}

/* A unit of work is one head of one sequence. */
static void run_ssm_scan(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_node *node = call->node, *table = node->src[0], *x = node->src[1], *dt = node->src[2];
    const gs_node *a = node->src[3], *b = node->src[4], *c = node->src[5], *ids = node->src[6];
    int64_t d_state = table->layout.ne[0], head_dim = table->layout.ne[1], n_head = table->layout.ne[2];
    int64_t n_tokens = x->layout.ne[2], n_seqs = x->layout.ne[3], together = n_head / b->layout.ne[1];
    int64_t sa = a->layout.ne[0] == 1 ? 0 : a->layout.nb[0];
    float *y = node->data, *states = y + head_dim * n_head * n_tokens * n_seqs;
    for (int64_t unit = first_unit(call, part); unit < end_unit(call, part); unit++) {
        int64_t head = unit % n_head, s = unit / n_head, group = head / together, id = id_at(ids, s, 0, 0);
        if (outside(id, table->layout.ne[3], 6, fault))
            return;
        const char *decay = (const char *)a->data + head * a->layout.nb[1];
        for (int64_t channel = 0; channel < head_dim; channel++) {
            float *state = states + ((s * n_head + head) * head_dim + channel) * d_state;
            move_units(row_of(table, (where){channel, head, id}), table->layout.nb[0], (char *)state, 4, d_state, 4);
        }
        for (int64_t t = 0; t < n_tokens; t++) {
            float step = softplus(*(const float *)(row_of(dt, (where){t, s, 0}) + head * dt->layout.nb[0]));
            const char *bt = row_of(b, (where){group, t, s}), *ct = row_of(c, (where){group, t, s});
            const char *xt = row_of(x, (where){head, t, s});
            for (int64_t channel = 0; channel < head_dim; channel++)
                y[((s * n_tokens + t) * n_head + head) * head_dim + channel] =
                    scan_row(states + ((s * n_head + head) * head_dim + channel) * d_state, d_state, decay, sa, step,
                             *(const float *)(xt + channel * x->layout.nb[0]), bt, b->layout.nb[0], ct,
                             c->layout.nb[0]);
        }
    }
}

static int build_ssm_scan(const gs_node *node, int32_t position, gs_calls *to) {
    const int64_t *s = node->src[0]->layout.ne, *x = node->src[1]->layout.ne;
    if (!is_dense(node))
        return GS_UNSUPPORTED_OP;
    int status = add_check(node, position, to, 6, s[3]);
    gs_call call = call_over(node, position, run_ssm_scan, s[2] * x[3], s[0] * s[1] * x[2], ROW_WORK / 4);
    return status != GS_OK ? status : gs_add_call(to, &call);
}
