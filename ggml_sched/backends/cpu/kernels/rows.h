/* rows.h -- iterates over rows of tensors, and converts pieces of rows to f32 and back.
 *
 * Included once for each instruction set, after vector.h.  Kernels compute in f32, in pieces of at most TILE elements.
 * A piece that is contiguous f32 is read or written in place; any other goes through an array ("tile") on the stack.
 */
#define TILE 512

typedef struct where { int64_t i1, i2, i3; } where;     /* the indices of a row in the outer three dimensions */

/* The indices of row number r, where rows of a tensor with extents `ne` are counted innermost dimension first. */
INLINE where row_at(const int64_t *ne, int64_t r) {
    where w;
    w.i1 = r % ne[1];
    r /= ne[1];
    w.i2 = r % ne[2];
    w.i3 = r / ne[2];
    return w;
}

INLINE char *row_of(const gs_node *t, where w) {
    const int64_t *nb = t->layout.nb;
    return (char *)t->data + w.i1 * nb[1] + w.i2 * nb[2] + w.i3 * nb[3];
}

/* The row of t that is combined with the result's row at w, where t is repeated (broadcast) to the result's extents. */
INLINE char *row_repeated(const gs_node *t, where w) {
    const int64_t *ne = t->layout.ne;
    return row_of(t, (where){ne[1] == 1 ? 0 : w.i1 % ne[1], ne[2] == 1 ? 0 : w.i2 % ne[2],
                             ne[3] == 1 ? 0 : w.i3 % ne[3]});
}

HELPER int64_t n_rows_of(const gs_node *t) {
    return t->layout.ne[1] * t->layout.ne[2] * t->layout.ne[3];
}

HELPER int64_t n_elements_of(const gs_node *t) {
    return t->layout.ne[0] * n_rows_of(t);
}

HELPER int same_extents(const gs_node *a, const gs_node *b) {
    return memcmp(a->layout.ne, b->layout.ne, sizeof(a->layout.ne)) == 0;
}

HELPER int is_dense(const gs_node *t) {
    const gs_layout *l = &t->layout;
    int64_t size = gs_plain_size(l->type);
    for (int d = 0; d < 4; d++) {
        if (l->ne[d] != 1 && l->nb[d] != size)
            return 0;
        size *= l->ne[d];
    }
    return gs_plain_size(l->type) != 0;
}

/* Defines a function that converts n contiguous elements, with a function that converts V of them. */
#define CONVERT_FN(name, from_t, to_t, convert)                       \
    static void name(const from_t *from, to_t *to, int64_t n) {       \
        int64_t i = 0;                                                \
        for (; i + V <= n; i += V)                                    \
            convert(to + i, from + i);                                \
        if (i < n) {                                                  \
            from_t last[V] = {0};                                     \
            to_t out[V];                                              \
            memcpy(last, from + i, (size_t)(n - i) * sizeof(from_t)); \
            convert(out, last);                                       \
            memcpy(to + i, out, (size_t)(n - i) * sizeof(to_t));      \
        }                                                             \
    }

INLINE void f32_from_f16(float *to, const uint16_t *from) { vstore(to, vfrom_f16(from)); }
INLINE void f32_from_bf16(float *to, const uint16_t *from) { vstore(to, vfrom_bf16(from)); }
INLINE void f16_from_f32(uint16_t *to, const float *from) { vto_f16(to, vload(from)); }
INLINE void bf16_from_f32(uint16_t *to, const float *from) { vto_bf16(to, vload(from)); }

CONVERT_FN(floats_from_f16, uint16_t, float, f32_from_f16)
CONVERT_FN(floats_from_bf16, uint16_t, float, f32_from_bf16)
CONVERT_FN(floats_to_f16, float, uint16_t, f16_from_f32)
CONVERT_FN(floats_to_bf16, float, uint16_t, bf16_from_f32)

/* Converts n contiguous elements of f32, f16 or bf16 to f32. */
HELPER void floats_from(int type, const void *from, float *to, int64_t n) {
    if (type == GS_TYPE_F16)
        floats_from_f16(from, to, n);
    else if (type == GS_TYPE_BF16)
        floats_from_bf16(from, to, n);
    else
        memcpy(to, from, (size_t)n * 4);
}

HELPER void floats_to(int type, const float *from, void *to, int64_t n) {
    if (type == GS_TYPE_F16)
        floats_to_f16(from, to, n);
    else if (type == GS_TYPE_BF16)
        floats_to_bf16(from, to, n);
    else
        memmove(to, from, (size_t)n * 4);
}

/* n <= TILE elements of f32, f16 or bf16, `stride` bytes apart, as contiguous f32.  Returns `from` itself where that is
 * possible, else `tile`, to which the elements were converted. */
INLINE const float *tile_of(const char *from, int type, int64_t stride, int64_t n, float *tile) {
    if (stride == gs_plain_size(type) || n == 1) {
        if (type == GS_TYPE_F32)
            return (const float *)from;
        floats_from(type, from, tile, n);
        return tile;
    }
    if (type == GS_TYPE_F32) {
        for (int64_t i = 0; i < n; i++)
            tile[i] = *(const float *)(from + i * stride);
        return tile;
    }
    uint16_t halves[TILE];
    for (int64_t i = 0; i < n; i++)
        halves[i] = *(const uint16_t *)(from + i * stride);
    floats_from(type, halves, tile, n);
    return tile;
}

/* Where a kernel writes n f32 results: the destination itself if it is contiguous f32, else `tile`.  put_tile, called
 * afterwards, converts a tile to the destination. */
INLINE float *tile_for(char *to, int type, int64_t stride, int64_t n, float *tile) {
    return type == GS_TYPE_F32 && (stride == 4 || n == 1) ? (float *)to : tile;
}

INLINE void put_tile(const float *tile, char *to, int type, int64_t stride, int64_t n) {
    if ((const char *)tile == to)
        return;
    if (stride == gs_plain_size(type) || n == 1) {
        floats_to(type, tile, to, n);
    } else if (type == GS_TYPE_F32) {
        for (int64_t i = 0; i < n; i++)
            *(float *)(to + i * stride) = tile[i];
    } else {
        uint16_t halves[TILE];
        floats_to(type, tile, halves, n);
        for (int64_t i = 0; i < n; i++)
            *(uint16_t *)(to + i * stride) = halves[i];
    }
}

/* -- cutting nodes into parts ------------------------------------------------------------------------ */

/* How many of `n` units of work (rows, heads: the kernel's choice) make a part.  `each` is the cost of one unit, `want`
 * the cost that a part should have, both counted in elements or multiplications. */
HELPER int64_t units_per_part(int64_t n, int64_t each, int64_t want) {
    int64_t units = each > 0 ? want / each : n;
    int64_t most = (n + (1 << 20) - 1) >> 20;       /* least units of a part, so that there are at most 2^20 parts */
    units = units > most ? units : most;
    return units < 1 ? 1 : units;
}

/* A call over `n` units of work: arg[0] is the number of units of a part, arg[1] is n.  first_unit and end_unit give
 * the range of a part.  `each` and `want`: see units_per_part. */
HELPER gs_call call_over(const gs_node *node, int32_t position, gs_run run, int64_t n, int64_t each, int64_t want) {
    gs_call call = {.run = run, .node = node, .position = position};
    int64_t units = units_per_part(n, each, want);
    call.arg[0] = units;
    call.arg[1] = n;
    call.n_parts = (int32_t)((n + units - 1) / units);
    return call;
}

INLINE int64_t first_unit(const gs_call *call, int32_t part) { return (int64_t)part * call->arg[0]; }
INLINE int64_t end_unit(const gs_call *call, int32_t part) {
    int64_t end = ((int64_t)part + 1) * call->arg[0];
    return end < call->arg[1] ? end : call->arg[1];
}

static int64_t row_bytes_padded(int64_t n) { return (n * 4 + 63) / 64 * 64; }

static void need(int64_t *most, int64_t bytes) {
    if (bytes > *most)
        *most = bytes;
}

/* Adds a call that computes the rows of the result, several in each part.  `width`: how many elements a row costs;
 * `want`: how many elements a part should cost; `spare`: floats of scratch that a part needs. */
static int add_rows(const gs_node *node, int32_t position, gs_calls *to, gs_run run, int64_t width, int64_t spare,
                    int64_t want) {
    gs_call call = call_over(node, position, run, n_rows_of(node), width, want);
    need(&to->scratch, row_bytes_padded(spare));
    return gs_add_call(to, &call);
}

/* -- rows by number --------------------------------------------------------------------------------------- */

static int64_t id_at(const gs_node *ids, int64_t i0, int64_t i1, int64_t i2) {
    const char *at = (const char *)ids->data + i0 * ids->layout.nb[0] + i1 * ids->layout.nb[1]
                     + i2 * ids->layout.nb[2];
    return ids->layout.type == GS_TYPE_I64 ? *(const int64_t *)at : *(const int32_t *)at;
}

static int outside(int64_t id, int64_t limit, int source, gs_fault *fault) {
    if (id >= 0 && id < limit)
        return 0;
    *fault = (gs_fault){.kind = GS_FAULT_ID, .source = source, .value = id, .limit = limit};
    return 1;
}

/* Checks that every id of source number arg[0] is in 0 .. arg[1] - 1.  This is a call of its own, so that an invalid id
 * is found before anything is written. */
static void run_check_ids(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_node *ids = call->node->src[call->arg[0]];
    int64_t id;
    if (gs_bad_id(&ids->layout, ids->data, call->arg[1], &id))
        outside(id, call->arg[1], (int)call->arg[0], fault);
}

static int add_check(const gs_node *node, int32_t position, gs_calls *to, int source, int64_t limit) {
    gs_call call = {.run = run_check_ids, .node = node, .position = position, .n_parts = 1};
    call.arg[0] = source;
    call.arg[1] = limit;
    return gs_add_call(to, &call);
}
