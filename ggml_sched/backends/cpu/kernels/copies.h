/* copies.h -- moving data: CPY DUP CONT, CONCAT, REPEAT, GET_ROWS, SET_ROWS.
 *
 * Included once for each instruction set.  Between equal types bytes are copied unchanged; other types are converted
 * through f32.
 */
#define COPY_WORK 65536         /* about how many elements one part copies */

/* Converts n contiguous elements of a float or quantised type to f32; store_row does the reverse. */
INLINE void load_row(int type, const void *from, float *to, int64_t n) {
    if (gs_is_float(type))
        floats_from(type, from, to, n);
    else
        (void)gs_dequantize_row(type, from, to, n);
}

INLINE void store_row(int type, const float *from, void *to, int64_t n) {
    if (gs_is_float(type))
        floats_to(type, from, to, n);
    else
        (void)gs_quantize_row(type, from, to, n);
}

/* Copies n elements or blocks of `size` bytes, which are `sa` bytes apart in the source and `so` in the destination. */
static void move_units(const char *from, int64_t sa, char *to, int64_t so, int64_t n, int64_t size) {
    if (sa == size && so == size) {
        memmove(to, from, (size_t)(n * size));
        return;
    }
    switch (size) {
    case 4:
        for (int64_t i = 0; i < n; i++)
            memcpy(to + i * so, from + i * sa, 4);
        return;
    case 2:
        for (int64_t i = 0; i < n; i++)
            memcpy(to + i * so, from + i * sa, 2);
        return;
    default:
        for (int64_t i = 0; i < n; i++)
            memcpy(to + i * so, from + i * sa, (size_t)size);
    }
}

/* Sets nb to the strides of a dense (gapless, unpermuted) tensor of the type with the extents ne. */
static void dense_strides(int type, const int64_t *ne, int64_t *nb) {
    nb[0] = gs_block_bytes(type);
    nb[1] = nb[0] * (ne[0] / gs_block_elements(type));
    nb[2] = nb[1] * ne[1];
    nb[3] = nb[2] * ne[2];
}

static int dense_blocks(const gs_node *t) {
    int64_t nb[4];
    if (!gs_block_elements(t->layout.type) || t->layout.ne[0] % gs_block_elements(t->layout.type))
        return 0;
    dense_strides(t->layout.type, t->layout.ne, nb);
    for (int d = 0; d < 4; d++)
        if (nb[d] != t->layout.nb[d] && t->layout.ne[d] != 1)
            return 0;
    return 1;
}

/* Copies rows; a unit of work is one row.  arg[2], arg[3]: layouts (gs_keep) of the source and of the destination,
 * which have the same extents; arg[4], arg[5]: addresses of their data. */
static void run_copy(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_layout *a = (const gs_layout *)call->arg[2], *o = (const gs_layout *)call->arg[3];
    const char *from = (const char *)call->arg[4];
    char *to = (char *)call->arg[5];
    int64_t n = o->ne[0], sa = a->nb[0], so = o->nb[0];
    float *row = (float *)scratch, tile[TILE];
    for (int64_t r = first_unit(call, part); r < end_unit(call, part); r++) {
        where w = row_at(o->ne, r);
        const char *x = from + w.i1 * a->nb[1] + w.i2 * a->nb[2] + w.i3 * a->nb[3];
        char *y = to + w.i1 * o->nb[1] + w.i2 * o->nb[2] + w.i3 * o->nb[3];
        if (a->type == o->type) {
            move_units(x, sa, y, so, n / gs_block_elements(a->type), gs_block_bytes(a->type));
        } else if (a->type == GS_TYPE_I32) {
            for (int64_t i = 0; i < n; i++)
                *(float *)(y + i * so) = (float)*(const int32_t *)(x + i * sa);
        } else if (gs_is_float(a->type) && gs_is_float(o->type)) {
            for (int64_t i = 0; i < n; i += TILE) {
                int64_t count = n - i < TILE ? n - i : TILE;
                put_tile(tile_of(x + i * sa, a->type, sa, count, tile), y + i * so, o->type, so, count);
            }
        } else {
            const float *values = (const float *)x;
            if (a->type != GS_TYPE_F32) {
                load_row(a->type, x, row, n);
                values = row;
            }
            store_row(o->type, values, y, n);
        }
    }
}

/* Copies a transposed matrix, whose elements are neighbours along dimension 1 in the source and along dimension 0 in
 * the destination.  Squares of 16 x 16 elements are copied one after another, so that the cache lines of both sides are
 * used fully; a unit of work is 16 rows of the destination.  Arguments as for run_copy. */
static void run_transpose(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_layout *a = (const gs_layout *)call->arg[2], *o = (const gs_layout *)call->arg[3];
    int64_t n0 = o->ne[0], n1 = o->ne[1], bands = (n1 + 15) / 16;
    int size = gs_plain_size(o->type);
    for (int64_t unit = first_unit(call, part); unit < end_unit(call, part); unit++) {
        int64_t band = unit % bands, i2 = unit / bands % o->ne[2], i3 = unit / bands / o->ne[2];
        const char *from = (const char *)call->arg[4] + i2 * a->nb[2] + i3 * a->nb[3];
        char *to = (char *)call->arg[5] + i2 * o->nb[2] + i3 * o->nb[3];
        int64_t end = band * 16 + 16 < n1 ? band * 16 + 16 : n1;
        for (int64_t first = 0; first < n0; first += 16)
            for (int64_t i1 = band * 16; i1 < end; i1++)
                move_units(from + i1 * a->nb[1] + first * a->nb[0], a->nb[0], to + i1 * o->nb[1] + first * o->nb[0],
                           o->nb[0], n0 - first < 16 ? n0 - first : 16, size);
    }
}

/* Adds a call that copies from `from`, of layout a, to `into`, of layout o; both have the same extents. */
static int add_copy(const gs_node *node, int32_t position, gs_calls *to, const gs_layout *a, const char *from,
                    const gs_layout *o, char *into) {
    gs_layout *kept = gs_keep(to, 2 * sizeof(gs_layout));
    if (kept == NULL)
        return GS_NO_HOST_MEMORY;
    kept[0] = *a;
    kept[1] = *o;
    int64_t width = o->ne[0];
    int across = a->type == o->type && gs_plain_size(a->type) && a->nb[0] != gs_plain_size(a->type)
                 && a->nb[1] == gs_plain_size(a->type) && o->ne[1] > 1;
    gs_call call;
    if (across) {
        int64_t bands = (o->ne[1] + 15) / 16 * o->ne[2] * o->ne[3];
        call = call_over(node, position, run_transpose, bands, 16 * width, COPY_WORK);
    } else {
        /* Join rows that follow each other without gaps in source and destination: fewer and longer rows are faster. */
        for (int d = 1; d < 4; d++) {
            int64_t row_a = kept[0].ne[0] / gs_block_elements(a->type) * gs_block_bytes(a->type);
            int64_t row_o = kept[1].ne[0] / gs_block_elements(o->type) * gs_block_bytes(o->type);
            if (kept[0].nb[0] != gs_block_bytes(a->type) || kept[1].nb[0] != gs_block_bytes(o->type)
                || kept[1].ne[0] * kept[1].ne[1] > COPY_WORK || kept[0].nb[1] != row_a || kept[1].nb[1] != row_o)
                break;
            for (int k = 0; k < 2; k++) {
                gs_layout *l = &kept[k];
                l->ne[0] *= l->ne[1];
                l->ne[1] = l->ne[2]; l->ne[2] = l->ne[3]; l->ne[3] = 1;
                l->nb[1] = l->nb[2]; l->nb[2] = l->nb[3];
            }
        }
        int64_t rows = kept[1].ne[1] * kept[1].ne[2] * kept[1].ne[3];
        width = kept[1].ne[0];
        if (!(gs_is_float(a->type) && gs_is_float(o->type)) && a->type != o->type)
            need(&to->scratch, row_bytes_padded(width));
        call = call_over(node, position, run_copy, rows, width, COPY_WORK);
    }
    call.arg[2] = (int64_t)&kept[0];
    call.arg[3] = (int64_t)&kept[1];
    call.arg[4] = (int64_t)from;
    call.arg[5] = (int64_t)into;
    return gs_add_call(to, &call);
}

static int build_copy(const gs_node *node, int32_t position, gs_calls *to) {
    const gs_node *x = node->src[0];
    gs_layout a = x->layout, o = node->layout;
    int ok = a.type == o.type || gs_encodes(o.type);
    if (!ok || a.ne[0] % gs_block_elements(a.type) || o.ne[0] % gs_block_elements(o.type))
        return GS_UNSUPPORTED_OP;
    if (!same_extents(x, node)) {
        /* Where the extents differ, elements keep their order: so the layout of the dense tensor of the two (the
         * result, if both are dense) is replaced by a dense layout with the other tensor's extents. */
        gs_layout *dense = dense_blocks(node) ? &o : &a;
        const gs_layout *other = dense == &o ? &a : &o;
        if ((dense == &a && !dense_blocks(x)) || other->ne[0] % gs_block_elements(dense->type))
            return GS_UNSUPPORTED_OP;
        memcpy(dense->ne, other->ne, sizeof(dense->ne));
        dense_strides(dense->type, dense->ne, dense->nb);
    }
    /* The blocks of a row of a quantised type must lie one after another. */
    if ((gs_block_elements(a.type) > 1 && a.nb[0] != gs_block_bytes(a.type))
        || (gs_block_elements(o.type) > 1 && o.nb[0] != gs_block_bytes(o.type)))
        return GS_UNSUPPORTED_OP;
    int through_blocks = a.type != o.type && !(gs_is_float(a.type) && gs_is_float(o.type)) && a.type != GS_TYPE_I32;
    if (through_blocks && (a.nb[0] != gs_block_bytes(a.type) || o.nb[0] != gs_block_bytes(o.type)))
        return GS_UNSUPPORTED_OP;
    return add_copy(node, position, to, &a, x->data, &o, node->data);
}

static int build_concat(const gs_node *node, int32_t position, gs_calls *to) {
    int dim = node->params[0];
    int64_t skip = 0;
    if (!gs_plain_size(node->layout.type))
        return GS_UNSUPPORTED_OP;
    for (int k = 0; k < 2; k++) {
        gs_layout o = node->layout;
        o.ne[dim] = node->src[k]->layout.ne[dim];
        if (n_elements_of(node->src[k]) > 0) {
            int status = add_copy(node, position, to, &node->src[k]->layout, node->src[k]->data, &o,
                                  (char *)node->data + skip);
            if (status != GS_OK)
                return status;
        }
        skip = o.ne[dim] * node->layout.nb[dim];
    }
    return GS_OK;
}

/* -- REPEAT ----------------------------------------------------------------------------------------------- */

static void run_repeat(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_node *node = call->node, *a = node->src[0];
    int64_t n = node->layout.ne[0], period = a->layout.ne[0], so = node->layout.nb[0];
    int size = gs_plain_size(node->layout.type);
    for (int64_t r = first_unit(call, part); r < end_unit(call, part); r++) {
        where w = row_at(node->layout.ne, r);
        for (int64_t i = 0; i < n; i += period)
            move_units(row_repeated(a, w), a->layout.nb[0], row_of(node, w) + i * so, so, period, size);
    }
}

/* -- rows by number --------------------------------------------------------------------------------------- */

static void run_get_rows(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_node *node = call->node, *table = node->src[0], *ids = node->src[1];
    int64_t n = node->layout.ne[0], so = node->layout.nb[0], sa = table->layout.nb[0];
    int type = table->layout.type;
    for (int64_t r = first_unit(call, part); r < end_unit(call, part); r++) {
        where w = row_at(node->layout.ne, r);
        int64_t id = id_at(ids, w.i1, w.i2, w.i3);
        if (outside(id, table->layout.ne[1], 1, fault))
            return;                     /* another thread has changed the id since it was checked */
        const char *from = row_of(table, (where){id, w.i2, w.i3});
        char *to = row_of(node, w);
        if (type == node->layout.type) {
            move_units(from, sa, to, so, n, 4);
        } else {
            float *row = so == 4 || n == 1 ? (float *)to : (float *)scratch;
            load_row(type, from, row, n);
            spread_row(row, to, so, n);
        }
    }
}

static int build_get_rows(const gs_node *node, int32_t position, gs_calls *to) {
    const gs_layout *a = &node->src[0]->layout, *o = &node->layout;
    if (a->type != o->type && a->nb[0] != gs_block_bytes(a->type))
        return GS_UNSUPPORTED_OP;
    int status = add_check(node, position, to, 1, a->ne[1]);
    return status != GS_OK ? status
         : add_rows(node, position, to, run_get_rows, o->ne[0], o->nb[0] != 4 ? o->ne[0] : 0, ROW_WORK);
}

/* A unit of work is a range of arg[2] elements of all rows of one matrix; a row has arg[3] such ranges.  A unit goes
 * through all rows in order: of several rows with the same id, the last one must be written last. */
static void run_set_rows(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_node *node = call->node, *b = node->src[0], *ids = node->src[1];
    int type = node->layout.type;
    int64_t n = node->layout.ne[0], width = call->arg[2], columns = call->arg[3], sb = b->layout.nb[0];
    for (int64_t unit = first_unit(call, part); unit < end_unit(call, part); unit++) {
        int64_t first = unit % columns * width, i2 = unit / columns % b->layout.ne[2];
        int64_t i3 = unit / columns / b->layout.ne[2], count = n - first < width ? n - first : width;
        for (int64_t i1 = 0; i1 < b->layout.ne[1]; i1++) {
            int64_t id = id_at(ids, i1, i2 % ids->layout.ne[1], i3 % ids->layout.ne[2]);
            if (outside(id, node->layout.ne[1], 1, fault))
                return;
            const float *x = dense_row(row_of(b, (where){i1, i2, i3}) + first * sb, sb, count, (float *)scratch);
            char *to = row_of(node, (where){id, i2, i3});
            store_row(type, x, to + first / gs_block_elements(type) * gs_block_bytes(type), count);
        }
    }
}

static int build_set_rows(const gs_node *node, int32_t position, gs_calls *to) {
    const gs_layout *b = &node->src[0]->layout, *o = &node->layout;
    if (!gs_encodes(o->type) || o->nb[0] != gs_block_bytes(o->type) || o->ne[0] % gs_block_elements(o->type))
        return GS_UNSUPPORTED_OP;
    if (n_elements_of(node->src[0]) == 0)
        return GS_OK;
    int status = add_check(node, position, to, 1, o->ne[1]);
    if (status != GS_OK)
        return status;
    int64_t width = units_per_part(o->ne[0], b->ne[1], ROW_WORK);
    width = (width + 63) / 64 * 64;
    width = width < o->ne[0] ? width : o->ne[0];
    int64_t columns = (o->ne[0] + width - 1) / width;
    if (b->nb[0] != 4)
        need(&to->scratch, row_bytes_padded(width));
    gs_call call = call_over(node, position, run_set_rows, columns * b->ne[2] * b->ne[3], width * b->ne[1], ROW_WORK);
    call.arg[2] = width;
    call.arg[3] = columns;
    return gs_add_call(to, &call);
}
