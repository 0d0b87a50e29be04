/* rope.h -- ROPE: rotary position embedding, pairs side by side ("normal") or half a head apart ("neox"), with YaRN.
 *
 * Included once for each instruction set.  Sines and cosines are computed once for each position, in f64, into a table
 * that later nodes with the same positions and parameters share (build.h); the rotation is in f32.
 *
 * The table has, for each position, `half` cosines, then `half` sines; `half` is the number of rotated pairs.
 */

/* A table of sines and cosines, and the values from a node's parameters that it is computed from. */
typedef struct angles {
    double *per_position;       /* [half] the angle of each pair at position 1, in radians */
    int64_t back;               /* bytes from the begin of the table to the `shared` work memory */
    int64_t n_positions;
    int32_t half;
    float magnitude;
} angles;

static float *table_of(const angles *of, char *shared) {
    return (float *)(shared - of->back);
}

static double pair_of_turns(double turns, int n_dims, int n_ctx_orig, double base) {
    return n_dims * log(n_ctx_orig / (turns * 2 * 3.14159265358979323846)) / (2 * log(base));
}

static void fill_angles(const gs_node *node, angles *of) {
    const int32_t *p = node->params;
    int n_dims = p[1];
    double base = gs_param_f32(p, 5), scale = gs_param_f32(p, 6), extrapolate = gs_param_f32(p, 7);
    double magnitude = gs_param_f32(p, 8), low = 0, high = 0;
    if (extrapolate != 0) {
        low = floor(pair_of_turns(gs_param_f32(p, 9), n_dims, p[4], base));
        high = ceil(pair_of_turns(gs_param_f32(p, 10), n_dims, p[4], base));
        low = low > 0 ? low : 0;
        high = high < n_dims - 1.0 ? high : n_dims - 1.0;
        magnitude *= 1 + 0.1 * log(1 / scale);
    }
    for (int i = 0; i < of->half; i++) {
        double share = 0;
        if (extrapolate != 0) {
            double width = high - low > 0.001 ? high - low : 0.001, ramp = (i - low) / width;
            ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
            share = (1 - ramp) * extrapolate;
        }
        of->per_position[i] = pow(base, -2.0 * i / n_dims) * (scale * (1 - share) + share);
    }
    of->magnitude = (float)magnitude;
}

/* Fills the table of the `angles` at arg[2]; a unit of work is a position. */
static void run_sines(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_node *node = call->node, *positions = node->src[1];
    const gs_node *factors = node->n_src > 2 ? node->src[2] : NULL;
    const angles *of = (const angles *)call->arg[2];
    float *table = table_of(of, shared);
    for (int64_t i = first_unit(call, part); i < end_unit(call, part); i++) {
        where w = row_at(positions->layout.ne, i / positions->layout.ne[0]);
        double position = *(const int32_t *)(row_of(positions, w)
                                             + i % positions->layout.ne[0] * positions->layout.nb[0]);
        float *cosines = table + i * 2 * of->half, *sines = cosines + of->half;
        for (int k = 0; k < of->half; k++) {
            double each = of->per_position[k];
            if (factors != NULL)
                each /= *(const float *)((const char *)factors->data + k * factors->layout.nb[0]);
            cosines[k] = (float)(cos(position * each) * (double)of->magnitude);
            sines[k] = (float)(sin(position * each) * (double)of->magnitude);
        }
    }
}

INLINE void turn_one(float *a, float *b, float x, float y, float c, float s) {
    *a = x * c - y * s;
    *b = x * s + y * c;
}

/* Rotates the pairs of one contiguous row by the cosines c and sines s; other elements are copied.  `out` may be x. */
static void turn_row(float *out, const float *x, int64_t n, int half, const float *c, const float *s, int neox) {
    int k = 0;
    if (neox) {
        for (; k + V <= half; k += V) {
            vf a = vload(x + k), b = vload(x + half + k), cv = vload(c + k), sv = vload(s + k);
            vstore(out + k, a * cv - b * sv);
            vstore(out + half + k, a * sv + b * cv);
        }
        for (; k < half; k++)
            turn_one(out + k, out + half + k, x[k], x[half + k], c[k], s[k]);
    } else {
        for (; k < half; k++)
            turn_one(out + 2 * k, out + 2 * k + 1, x[2 * k], x[2 * k + 1], c[k], s[k]);
    }
    if (out != x)
        memcpy(out + 2 * half, x + 2 * half, (size_t)(n - 2 * half) * 4);
}

static void run_rope(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_node *node = call->node, *a = node->src[0];
    const angles *of = (const angles *)call->arg[2];
    int64_t n = node->layout.ne[0], sa = a->layout.nb[0], so = node->layout.nb[0];
    int type = node->layout.type, size = gs_plain_size(type);
    const float *table = table_of(of, shared);
    float *row = (float *)scratch;
    for (int64_t r = first_unit(call, part); r < end_unit(call, part); r++) {
        where w = row_at(node->layout.ne, r);
        const float *c = table + w.i2 * 2 * of->half;
        const char *from = row_of(a, w);
        char *to = row_of(node, w);
        if (type == GS_TYPE_F32) {
            const float *x = dense_row(from, sa, n, row);
            float *out = so == 4 || n == 1 ? (float *)to : row;
            turn_row(out, x, n, of->half, c, c + of->half, node->params[2] == 2);
            spread_row(out, to, so, n);
        } else {
            uint16_t *halves = (uint16_t *)(row + n);
            move_units(from, sa, (char *)halves, size, n, size);
            floats_from(type, halves, row, n);
            turn_row(row, row, n, of->half, c, c + of->half, node->params[2] == 2);
            floats_to(type, row, halves, n);
            move_units((const char *)halves, size, to, so, n, size);
        }
    }
}

/* Sets `found` to the angles for a node's positions and parameters.  If no earlier node has made the table of these
 * angles, adds a call that computes the table. */
static int find_angles(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables, angles **found) {
    const gs_node *positions = node->src[1], *factors = node->n_src > 2 ? node->src[2] : NULL;
    *found = gs_find_table(tables, positions, factors, node->params);
    if (*found != NULL)
        return GS_OK;
    int64_t half = node->params[1] / 2, n = n_elements_of(positions);
    if (half > INT32_MAX || (half > 0 && n > INT64_MAX / 64 / half))
        return GS_UNSUPPORTED_OP;
    int64_t end = gs_end_of_tables(tables), size = row_bytes_padded(2 * n * half);
    if (end > INT64_MAX / 2 - size)
        return GS_UNSUPPORTED_OP;
    end += size;
    angles *of = gs_keep(to, (int64_t)sizeof(angles));
    double *per_position = gs_keep(to, half * 8);
    if (of == NULL || per_position == NULL)
        return GS_NO_HOST_MEMORY;
    need(&to->tables, end);
    *of = (angles){per_position, end, n, (int32_t)half, 1};
    fill_angles(node, of);
    gs_call call = call_over(node, position, run_sines, n, half * 32, ROW_WORK);
    call.arg[2] = (int64_t)of;
    *found = of;
    gs_add_table(tables, positions, factors, node->params, of, end);
    return gs_add_call(to, &call);
}

static int build_rope(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables) {
    angles *of;
    int status = find_angles(node, position, to, tables, &of);
    if (status != GS_OK)
        return status;
    need(&to->scratch, row_bytes_padded(2 * node->layout.ne[0]));
    gs_call call = call_over(node, position, run_rope, n_rows_of(node), node->layout.ne[0], ROW_WORK);
    call.arg[2] = (int64_t)of;
    return gs_add_call(to, &call);
}
