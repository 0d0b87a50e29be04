/* matmul.c -- turns a MUL_MAT or MUL_MAT_ID node into calls: checks its shapes, divides the work, and converts columns.
 *
 * A column is a row of source 1 (b), the activations; k is its length.  Columns are first converted to activation cells
 * (product.h).  How the work is divided depends on shapes alone, so that results do not depend on the number of
 * threads.  The kernels that multiply are in tables, one for each ISA.
 */
#include "matmul.h"

#include <math.h>
#include <string.h>

#include "floats.h"
#include "ggml_sched/checked.h"
#include "op_rules.h"
#include "product.h"

/* An item of work is a range of rows of weights times a range of columns; a part computes one item or several. */
#define FEW_BYTES (48 << 10)    /* bytes of weights of an item, where a group has few columns                */
#define LEAST_BYTES (16 << 10)  /* the least such bytes of an item that is smaller than that so that items are equal */
#define MANY_WORK (1 << 20)     /* multiplications of an item, where a group has many columns                */
#define REPACK 16               /* to repack a row of weights takes as long as to multiply it with so many columns */
#define COLUMN_WORK (8 << 20)   /* multiplications of an item of one panel of rows and some columns of a group  */
#define LEAST_COLUMNS 240       /* least columns of such an item, as each item repacks its panel of rows      */
#define PREPARED (1 << 16)      /* elements that one part of the call `prepare` converts                     */
#define JOINED (26 << 10)       /* the most bytes of joined rows and their strips, which stay in L1          */
#define EARLIER 24              /* a product is computed with an earlier one at most so many calls earlier   */

static const gs_product_kernels *kernels_here(void) {
    switch (gs_isa()) {
#if defined(__x86_64__) && defined(__GNUC__)
    case GS_ISA_AVX512: return &gs_product_avx512;
#if GS_HAS_AVXVNNI
    case GS_ISA_AVXVNNI: return &gs_product_avxvnni;
#endif
    case GS_ISA_AVX2: return &gs_product_avx2;
#elif defined(__aarch64__) && defined(__GNUC__)
    case GS_ISA_DOTPROD: return &gs_product_dotprod;
    case GS_ISA_NEON: return &gs_product_neon;
#endif
    default: return &gs_product_portable;
    }
}

int gs_interleaves(int type) {
    const gs_product_kernels *kernels = kernels_here();
    const gs_block_kind *kind = gs_block_kind_of(type);
    return kind != NULL && kernels->few_bands != NULL && kernels->few_bands(kind) > 0;
}

static int64_t clamped(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
}

static int64_t pieces(int64_t n, int64_t step) {
    return (n + step - 1) / step;
}

/* -- the call `prepare`: converts columns of b to activation cells or strips -------------------------------------- */

static float value_at(const char *at, int32_t type) {
    return type == GS_TYPE_F32 ? gs_load_f32(at)
         : type == GS_TYPE_F16 ? gs_f32_of_f16(gs_load_u16(at)) : gs_f32_of_bf16(gs_load_u16(at));
}

/* n values of a row of b, from address `at` on, as contiguous and aligned f32: `at` itself if they are stored like
 * that, else a converted copy in `room`. */
static const float *values_at(const char *at, const gs_layout *b, int n, float *room) {
    int64_t step = b->nb[0];
    if (b->type == GS_TYPE_F32 && step == 4) {
        if ((uintptr_t)at % sizeof(float) == 0)
            return (const float *)at;
        memcpy(room, at, (size_t)n * sizeof(float));
    } else {
        for (int i = 0; i < n; i++)
            room[i] = value_at(at + i * step, b->type);
    }
    return room;
}

/* Writes step j of a strip; `scales`: how many scales of the weights a step has.  Their order is that of PLACE_OF
 * (x86_few_q.h) where evens come first. */
static void put_step(const gs_product *of, const gs_cell_q *cell, int j, int scales, float times, gs_strip *strip) {
    const int order = of->strip_order;
    int8_t *q = strip->q + GS_STEP_Q * (j - j % order) + 16 * (j % order);
    memcpy(q, cell->q, 16);
    memcpy(q + 16 * order, cell->q + 16, 16);
    for (int i = 0; i < scales; i++) {
        int number = scales * j + i, place = number;
        if (of->kernels->evens_first)
            place = number - number % 8 + number % 8 / 2 + number % 2 * 4;
        strip->d[place] = cell->d;
        strip->sum[place] = times * (scales == 1 ? cell->sum_both : i ? cell->sum_high : cell->sum_low);
    }
}

/* How many strips a column has. */
static int64_t strips_of(const gs_product *of) {
    return pieces(of->steps * of->strip_rows, GS_STRIP_STEPS);
}

static void prepare_strips(const gs_product *of, const char *from, gs_strip *strips) {
    const gs_layout *b = &of->node->src[1]->layout;
    int per_step = 32 / of->kind->group;
    float times = of->kind->has_min ? 1.0f : (float)-of->kernels->offset(of->kind), room[GS_STEP_Q];
    int64_t zeros = strips_of(of) * GS_STRIP_STEPS - of->steps * of->strip_rows;    /* steps of the last strip */
    gs_cell_q cell;
    if (zeros > 0)
        memset(&strips[strips_of(of) - 1], 0, sizeof(gs_strip));
    for (int64_t step = 0; step < of->steps; step++) {
        int64_t in_last = of->steps - step <= of->steps % GS_STRIP_STEPS;
        int64_t at = of->kernels->joins_rows && in_last ? step + zeros : step;
        of->kernels->quantize(values_at(from + step * GS_STEP_Q * b->nb[0], b, GS_STEP_Q, room), 0, &cell);
        for (int64_t row = 0; row < of->strip_rows; row++, at += of->steps)
            put_step(of, &cell, (int)(at % GS_STRIP_STEPS), per_step, times, &strips[at / GS_STRIP_STEPS]);
    }
}

static void prepare_column(const gs_product *of, const char *shared, int64_t group, int64_t column) {
    const gs_layout *b = &of->node->src[1]->layout;
    const char *from = gs_column_at(of, shared, group, column, 1);
    int64_t tile = column / of->tile, columns = gs_columns_of(of, shared, group);
    if (of->strip_order > 0 && columns <= of->kernels->strip_columns) {
        prepare_strips(of, from, gs_strips_of(of, shared, group, column));
        return;
    }
    int64_t width = gs_width_of(of, columns, tile);
    char *cell = gs_tile_of(of, shared, group, tile) + column % of->tile * GS_CELL;
    int n = of->kind != NULL ? GS_STEP_Q : GS_STEP_F;
    int32_t offset = of->kind != NULL ? of->kernels->offset(of->kind) : 0;
    float room[GS_STEP_Q];
    for (int64_t done = 0; done < of->k; done += n, cell += width * GS_CELL) {
        int here = of->k - done < n ? (int)(of->k - done) : n;
        const float *x = values_at(from + done * b->nb[0], b, here, room);
        if (of->kind != NULL) {
            of->kernels->quantize(x, offset, (gs_cell_q *)cell);
        } else {
            memcpy(cell, x, (size_t)here * sizeof(float));
            memset(cell + here * sizeof(float), 0, (size_t)(n - here) * sizeof(float));
        }
    }
}

static void prepare(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_product *of = (const gs_product *)(uintptr_t)call->arg[0];
    int64_t all = gs_is_id(of) ? of->columns : of->groups * of->columns, first = part * of->prepared;
    for (int64_t at = first; at < first + of->prepared && at < all; at++) {
        int64_t group, column;
        if (gs_is_id(of)) {
            const int32_t *start = gs_starts(of, shared);
            int64_t low = 0, high = ((const gs_chosen *)shared)->n_experts;
            if (at >= start[high])
                return;
            while (high - low > 1) {
                int64_t middle = (low + high) / 2;
                *(start[middle] <= at ? &low : &high) = middle;
            }
            group = low;
            column = at - start[low];
        } else {
            group = at / of->columns;
            column = at % of->columns;
        }
        prepare_column(of, shared, group, column);
    }
}

/* -- the call `choose` of MUL_MAT_ID: sorts tokens by the experts that they chose --------------------------------- */

/* Reads the expert id of pair p (a token and one of its chosen experts) to *id.  Returns 1; or 0 if the id is out of
 * range, and then fills `fault`. */
static int read_expert(const gs_product *of, int64_t p, int32_t *id, gs_fault *fault) {
    const gs_node *ids = of->node->src[2];
    int64_t used = ids->layout.ne[0], n_experts = of->node->src[0]->layout.ne[2];
    memcpy(id, (char *)ids->data + p % used * ids->layout.nb[0] + p / used * ids->layout.nb[1], sizeof(*id));
    if (*id >= 0 && *id < n_experts)
        return 1;
    *fault = (gs_fault){GS_FAULT_ID, 2, *id, n_experts};
    return 0;
}

/* Checks all expert ids, then sorts the pairs (token, which of its chosen experts) by expert, so that each expert's
 * weights are read once for all its tokens.  The pairs of one expert stay in the order of the ids tensor. */
static void choose(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_product *of = (const gs_product *)(uintptr_t)call->arg[0];
    int64_t n_experts = of->node->src[0]->layout.ne[2], n = 0;
    gs_chosen *chosen = (gs_chosen *)shared;
    int32_t *expert = (int32_t *)(uintptr_t)gs_experts(shared), *start = (int32_t *)(uintptr_t)gs_starts(of, shared);
    int32_t *pair = (int32_t *)(uintptr_t)gs_pairs(of, shared), *count = (int32_t *)scratch;
    memset(count, 0, (size_t)n_experts * sizeof(int32_t));
    chosen->n_experts = 0;
    start[0] = 0;
    for (int64_t p = 0; p < of->columns; p++) {
        int32_t id;
        if (!read_expert(of, p, &id, fault))
            return;
        count[id]++;
    }
    for (int64_t e = 0, places = 0; e < n_experts; e++) {
        int32_t here = count[e];
        if (here == 0)
            continue;
        expert[n] = (int32_t)e;
        count[e] = (int32_t)places;
        places += here;
        start[++n] = (int32_t)places;
    }
    /* Ids are checked again where they are used: another thread may have changed them since, and a wrong id would
     * write outside `count` and `pair`. */
    memset(pair, 0, (size_t)of->columns * sizeof(int32_t));
    for (int64_t p = 0; p < of->columns; p++) {
        int32_t id;
        if (!read_expert(of, p, &id, fault))
            return;
        if (count[id] < of->columns)
            pair[count[id]++] = (int32_t)p;
    }
    chosen->n_experts = n;
}

/* -- the call `multiply` ------------------------------------------------------------------------------------------ */

static const gs_product *first_of(const gs_call *call) {
    return (const gs_product *)(uintptr_t)call->arg[0];
}

/* Computes a part of one of the products that begin at first_of(call). */
static void multiply(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_product *of = first_of(call);
    for (; part >= of->n_parts; of = of->next)
        part -= of->n_parts;
    int64_t in_group = of->row_items * of->column_items, all = of->groups * in_group;
    for (int64_t item = part * of->together; item < (part + INT64_C(1)) * of->together && item < all; item++) {
        int64_t group = item / in_group, rest = item % in_group;
        int64_t columns = gs_columns_of(of, shared, group);
        int64_t row0 = rest / of->column_items * of->row_step, row1 = clamped(row0 + of->row_step, 0, of->m);
        int64_t column0 = rest % of->column_items * of->column_step;
        int64_t column1 = clamped(column0 + of->column_step, 0, columns);
        if (column0 >= columns)
            continue;
        const gs_product_kernels *kernels = of->kernels;
        if (columns <= of->few)
            (of->is_interleaved ? kernels->few_interleaved : kernels->few)(of, shared, group, row0, row1, scratch);
        else
            (of->is_interleaved ? kernels->many_interleaved : kernels->many)(of, shared, group, row0, row1, column0,
                                                                             column1, scratch);
    }
}

/* -- building ----------------------------------------------------------------------------------------------------- */

/* Cuts the product into items and parts.  `columns`: how many columns a group probably has.  If these are few, reading
 * weights takes most of the time, so the size of an item is counted in bytes of weights; otherwise in
 * multiplications. */
static void share_out(gs_product *of, int64_t row_bytes, int64_t columns) {
    int64_t panel = of->kernels->panel, cost, whole;
    of->column_step = of->columns;
    if (columns <= of->few) {
        /* Items of equal size, four or a multiple of four where they are large enough for that: then no thread waits
         * for the last item. */
        int64_t bytes = of->m * row_bytes, most = clamped(bytes / LEAST_BYTES, 1, of->m);
        of->row_step = pieces(of->m, clamped(pieces(pieces(bytes, FEW_BYTES), 4) * 4, 1, most));
        int row_by_row = of->kind == NULL || of->strip_order > 0 || of->kernels->strip_columns == 0;
        if (of->columns > 1 || !row_by_row || of->is_interleaved)   /* side by side (side_q.h), or bands */
            of->row_step = pieces(of->row_step, GS_SIDE_ROWS) * GS_SIDE_ROWS;
        int64_t together = of->strip_order > 0 && of->strip_rows == 1 ? of->kernels->few_rows : of->strip_rows;
        of->row_step = pieces(of->row_step, together) * together;
        if (of->columns > of->few)  /* those of one expert may be many, for which rows are repacked */
            of->row_step = pieces(of->row_step, panel) * panel;
        cost = panel * row_bytes;
        whole = FEW_BYTES;
    } else {
        cost = panel * of->k * (columns + REPACK);
        whole = MANY_WORK;
        if (panel * of->k * columns > 2 * COLUMN_WORK) {
            int64_t step = clamped(COLUMN_WORK / (panel * of->k), LEAST_COLUMNS, INT32_MAX);
            of->column_step = clamped(pieces(step, of->tile) * of->tile, 1, of->columns);
            cost = panel * of->k * clamped(of->column_step, 1, columns);
        }
    }
    if (columns > of->few)
        of->row_step = clamped(whole / clamped(cost, 1, whole), 1, pieces(of->m, panel)) * panel;
    of->row_items = pieces(of->m, of->row_step);
    of->column_items = pieces(of->columns, of->column_step);
    int64_t least = (cost * clamped(of->row_step, 1, of->m)) / panel;
    of->together = of->row_items > 1 ? 1 : clamped(whole / clamped(least, 1, whole), 1, INT32_MAX);
    of->prepared = clamped(PREPARED / of->k, 1, INT32_MAX);
}

/* How many rows of weights, of row_bytes each, that follow one another are joined: the least number that has whole
 * strips. */
static int32_t joined_rows(const gs_product *of, int64_t row_bytes) {
    int32_t rows = 1;
    if (of->kind == NULL || !of->kernels->joins_rows || of->steps < GS_STRIP_STEPS)
        return 1;
    while (of->steps * rows % GS_STRIP_STEPS != 0)
        rows *= 2;
    int64_t bytes = rows * row_bytes + of->steps * rows / GS_STRIP_STEPS * (int64_t)sizeof(gs_strip);
    return of->m % rows == 0 && bytes <= JOINED ? rows : 1;
}

/* Whether the calls `choose` and `prepare` leave the same bytes for both products.  For strips these depend on the
 * offset, the minima and the scales of the weights' type, and on the order of elements. */
static int same_columns(const gs_product *x, const gs_product *y) {
    const gs_node *const *a = x->node->src, *const *b = y->node->src;
    if (x->node->op != y->node->op || x->strip_order != y->strip_order || x->strip_rows != y->strip_rows
        || a[0]->layout.ne[2] != b[0]->layout.ne[2] || a[0]->layout.ne[3] != b[0]->layout.ne[3]
        || !gs_same_elements(a[1], b[1]))
        return 0;
    if (gs_is_id(x) && !gs_same_elements(a[2], b[2]))
        return 0;
    if (x->kind == NULL || y->kind == NULL)
        return x->kind == y->kind;
    return x->kind->has_min == y->kind->has_min && x->kind->group == y->kind->group
           && x->kernels->offset(x->kind) == y->kernels->offset(y->kind);
}

int gs_columns_depend_on(const gs_product *of, const gs_node *node) {
    return gs_overlap(node, of->node->src[1]) || (gs_is_id(of) && gs_overlap(node, of->node->src[2]));
}

/* Whether a node has a source that overlaps the result of another one. */
static int reads(const gs_node *node, const gs_node *other) {
    for (int i = 0; i < node->n_src; i++)
        if (node->src[i] != NULL && gs_overlap(other, node->src[i]))
            return 1;
    return 0;
}

/* Whether two nodes can be computed in any order, or at the same time. */
static int independent(const gs_node *a, const gs_node *b) {
    return !gs_overlap(a, b) && !reads(a, b) && !reads(b, a);
}

/* Whether a node can be computed by call number `first` of the list, before all calls that follow it. */
static int can_be_earlier(const gs_node *node, const gs_calls *list, int32_t first) {
    if (list->n - first > EARLIER)
        return 0;
    for (int32_t i = first; i < list->n; i++) {
        const gs_call *call = &list->call[i];
        if (!independent(node, call->node))
            return 0;
        const gs_product *of = call->run == multiply ? first_of(call)->next : NULL;
        for (; of != NULL; of = of->next)
            if (!independent(node, of->node))
                return 0;
    }
    return 1;
}

/* Appends a product to those that call number tables->multiply computes; 0 if its result must not be computed there.
 * It is then also written if a call in between fails: after a fault the memory of nodes is undefined. */
static int appended(gs_product *of, gs_calls *to, gs_tables *tables) {
    gs_call *call = &to->call[tables->multiply];
    if (call->n_parts > INT32_MAX - of->n_parts || !can_be_earlier(of->node, to, tables->multiply))
        return 0;
    call->n_parts += of->n_parts;
    tables->product->next = of;
    tables->product = of;
    return 1;
}

/* Appends the calls of a MUL_MAT or MUL_MAT_ID.  `total`: columns of all groups together; `expected`: columns that a
 * group probably has, by which the work is divided; `head`: bytes of shared memory before the converted columns, where
 * MUL_MAT_ID has its table of chosen experts. */
static int build(gs_product *of, int32_t position, int64_t total, int64_t expected, int64_t head, gs_calls *to,
                 gs_tables *tables) {
    const gs_layout *a = &of->node->src[0]->layout;
    int64_t bytes, scratch, items, row_bytes;
    of->tile = of->kind != NULL ? GS_TILE_Q : GS_TILE_F;
    of->kernels = kernels_here();
    of->reads_ahead = gs_reads_ahead();
    of->is_interleaved = tables->interleaved != NULL && gs_interleaves(of->type);
    of->weights = of->is_interleaved ? tables->interleaved : of->node->src[0]->data;
    of->few = of->kind == NULL ? GS_FEW_F : of->is_interleaved ? of->kernels->few_bands(of->kind)
                                                               : of->kernels->few_columns(of->kind);
    of->steps = pieces(of->k, of->kind != NULL ? GS_STEP_Q : GS_STEP_F);
    row_bytes = of->kind != NULL ? of->k / of->kind->elements * of->kind->bytes
                                 : of->k * (a->type == GS_TYPE_F32 ? 4 : 2);
    int is_joined = !of->is_interleaved && a->nb[1] == row_bytes && expected <= of->kernels->strip_columns;
    of->strip_rows = is_joined ? joined_rows(of, row_bytes) : 1;
    of->strip_order = of->kind == NULL || of->is_interleaved
        ? 0 : of->kernels->strip_order(of->kind, of->steps * of->strip_rows);
    share_out(of, row_bytes, expected);
    of->column_bytes = of->steps * GS_CELL;
    if (of->strip_order > 0) {
        of->column_bytes = clamped(of->column_bytes, strips_of(of) * (int64_t)sizeof(gs_strip), INT64_MAX);
    }
    if (gs_checked_align(head, GS_CELL, &of->cells) || gs_checked_mul(total, of->column_bytes, &bytes)
        || gs_checked_add(bytes, of->cells, &bytes) || gs_checked_mul(of->row_items, of->column_items, &items)
        || gs_checked_mul(items, of->groups, &items))
        return GS_UNSUPPORTED_OP;
    int64_t n_parts = pieces(items, of->together), n_prepare = pieces(total, of->prepared);
    if (n_parts > INT32_MAX || n_prepare > INT32_MAX)
        return GS_UNSUPPORTED_OP;
    scratch = of->kernels->scratch(of);
    int is_id = gs_is_id(of);
    if (is_id && scratch < (int64_t)sizeof(int32_t) * a->ne[2])
        scratch = (int64_t)sizeof(int32_t) * a->ne[2];
    gs_product *kept = gs_keep(to, sizeof(gs_product));
    if (kept == NULL)
        return GS_NO_HOST_MEMORY;
    of->n_parts = (int32_t)n_parts;
    *kept = *of;
    to->scratch = scratch > to->scratch ? scratch : to->scratch;
    gs_call call = {choose, of->node, 1, position, {(int64_t)(uintptr_t)kept}};
    if (tables->product == NULL || !same_columns(tables->product, kept)) {
        gs_use_shared(to, tables, bytes);
        if (is_id && gs_add_call(to, &call))
            return GS_NO_HOST_MEMORY;
        call.run = prepare;
        call.n_parts = (int32_t)n_prepare;
        if (gs_add_call(to, &call))
            return GS_NO_HOST_MEMORY;
    } else if (appended(kept, to, tables)) {
        return GS_OK;
    }
    call.run = multiply;
    call.n_parts = kept->n_parts;
    tables->product = kept;
    tables->multiply = to->n;
    return gs_add_call(to, &call);
}

/* Whether the kernels can compute a node with these strides and extents. */
static int fits(const gs_node *node) {
    const gs_layout *a = &node->src[0]->layout, *b = &node->src[1]->layout;
    const gs_block_kind *kind = gs_block_kind_of(a->type);
    int64_t element = kind != NULL ? kind->bytes : a->type == GS_TYPE_F32 ? 4 : 2;
    if (a->nb[0] != element || (kind != NULL && a->ne[0] % kind->elements) || node->layout.nb[0] != 4)
        return 0;
    for (int i = 0; i < GS_MAX_DIMS; i++)
        if (a->ne[i] <= 0 || b->ne[i] <= 0 || a->ne[i] > INT32_MAX || b->ne[i] > INT32_MAX)
            return 0;
    return 1;
}

int gs_build_mul_mat(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables) {
    gs_product of = {0};
    if (!fits(node))
        return GS_UNSUPPORTED_OP;
    const gs_layout *a = &node->src[0]->layout, *b = &node->src[1]->layout;
    of.node = node;
    of.type = a->type;
    of.kind = gs_block_kind_of(a->type);
    of.k = a->ne[0];
    of.m = a->ne[1];
    of.r2 = b->ne[2] / a->ne[2];
    of.r3 = b->ne[3] / a->ne[3];
    if (gs_checked_mul(a->ne[2], a->ne[3], &of.groups) || gs_checked_mul(of.r2, of.r3, &of.columns)
        || gs_checked_mul(of.columns, b->ne[1], &of.columns) || of.columns > INT32_MAX || of.groups > INT32_MAX)
        return GS_UNSUPPORTED_OP;
    return build(&of, position, of.groups * of.columns, of.columns, 0, to, tables);
}

int gs_build_mul_mat_id(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables) {
    gs_product of = {0};
    int64_t head;
    if (!fits(node))
        return GS_UNSUPPORTED_OP;
    const gs_layout *a = &node->src[0]->layout, *ids = &node->src[2]->layout;
    of.node = node;
    of.type = a->type;
    of.kind = gs_block_kind_of(a->type);
    of.k = a->ne[0];
    of.m = a->ne[1];
    if (gs_checked_mul(ids->ne[0], ids->ne[1], &of.columns) || of.columns > INT32_MAX)
        return GS_UNSUPPORTED_OP;
    of.groups = of.columns < a->ne[2] ? of.columns : a->ne[2];
    head = (int64_t)sizeof(gs_chosen) + 4 * (2 * of.groups + 1 + of.columns);
    return build(&of, position, of.columns, pieces(of.columns, of.groups), head, to, tables);
}
