/* build.c -- see build.h: shared tables, copies of sources that overlap the result, and the builders of each ISA. */
#include "build.h"
#include "matmul.h"
#include "convert.h"
#include "op_rules.h"
#include "product.h"

#include <string.h>

/* -- tables ------------------------------------------------------------------------------------------------ */

void *gs_find_table(const gs_tables *in, const gs_node *positions, const gs_node *factors, const int32_t *params) {
    for (int32_t i = 0; i < in->n; i++) {
        const gs_table *t = &in->table[i];
        if (t->positions == positions && t->factors == factors && memcmp(t->params, params, sizeof(t->params)) == 0)
            return t->of;
    }
    return NULL;
}

int64_t gs_end_of_tables(const gs_tables *in) {
    return in->n ? in->table[in->n - 1].end : 0;
}

void gs_add_table(gs_tables *to, const gs_node *positions, const gs_node *factors, const int32_t *params, void *of,
                  int64_t end) {
    if (to->n == GS_MAX_TABLES) {
        memmove(to->table, to->table + 1, (GS_MAX_TABLES - 1) * sizeof(gs_table));
        to->n--;
    }
    gs_table *t = &to->table[to->n++];
    t->positions = positions;
    t->factors = factors;
    memcpy(t->params, params, sizeof(t->params));
    t->of = of;
    t->end = end;
}

void gs_forget_tables(gs_tables *in, const gs_node *node) {
    for (int32_t i = in->n - 1; i >= 0; i--) {
        const gs_table *t = &in->table[i];
        if (gs_overlap(node, t->positions) || (t->factors != NULL && gs_overlap(node, t->factors))) {
            memmove(&in->table[i], &in->table[i + 1], (size_t)(in->n - i - 1) * sizeof(gs_table));
            in->n--;
        }
    }
    if (in->product != NULL && gs_columns_depend_on(in->product, node))
        in->product = NULL;
}

void gs_use_shared(gs_calls *to, gs_tables *tables, int64_t size) {
    to->shared = size > to->shared ? size : to->shared;
    tables->product = NULL;
}

/* -- overlap ----------------------------------------------------------------------------------------------- */

/* Whether a tensor is unaligned: its address is not a multiple of its element's size, as compiled code requires. */
static int is_astray(const gs_node *t) {
    int size = gs_plain_size(t->layout.type);
    return size > 1 && t->layout.nbytes > 0 && ((uintptr_t)t->data & (uintptr_t)(size - 1)) != 0;
}

#define COPY_PART (1 << 18)

/* Copies arg[2] bytes from the address arg[0] to the address arg[1]; a part copies COPY_PART bytes. */
static void run_bytes(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    int64_t first = (int64_t)part * COPY_PART, rest = call->arg[2] - first;
    memcpy((char *)call->arg[1] + first, (const char *)call->arg[0] + first,
           (size_t)(rest < COPY_PART ? rest : COPY_PART));
}

static int add_bytes(const gs_node *node, int32_t position, gs_calls *to, const void *from, void *into, int64_t size) {
    gs_call call = {.run = run_bytes, .node = node, .position = position};
    call.n_parts = (int32_t)((size + COPY_PART - 1) / COPY_PART);
    call.arg[0] = (int64_t)from;
    call.arg[1] = (int64_t)into;
    call.arg[2] = size;
    return gs_add_call(to, &call);
}

/* Makes a tensor like t in memory of the list of calls, and appends the call of `node` that copies t's bytes there.
 * Returns that tensor, or NULL if memory ran out. */
static gs_node *elsewhere(const gs_node *t, const gs_node *node, int32_t position, gs_calls *to) {
    gs_node *copy = gs_keep(to, sizeof(gs_node));
    void *memory = gs_keep(to, t->layout.nbytes);
    if (copy == NULL || memory == NULL || add_bytes(node, position, to, t->data, memory, t->layout.nbytes) != GS_OK)
        return NULL;
    to->copied += t->layout.nbytes;
    *copy = *t;
    copy->data = memory;
    return copy;
}

/* If a source overlaps the result in a way that the kernel does not tolerate (gs_clashes), or a tensor is unaligned,
 * sets `*made` to a node that uses aligned copies instead, and appends the calls that make the copies.  Otherwise
 * `*made` is NULL: the node can be computed as it is. */
static int with_copies(const gs_node *node, int32_t position, gs_calls *to, gs_node **made) {
    *made = NULL;
    if (is_astray(node)) {
        /* The copy begins with the result's present bytes: the whole copy is written back later, including the gaps
         * between the rows of a view, which belong to other tensors. */
        *made = elsewhere(node, node, position, to);
        if (*made == NULL)
            return GS_NO_HOST_MEMORY;
    }
    for (int i = 0; i < node->n_src; i++) {
        const gs_node *s = node->src[i];
        if (s == NULL || gs_is_destination(node, i)
            || !(gs_clashes(node, i, gs_rule_of(node->op)->inplace) || is_astray(s)))
            continue;
        if (*made == NULL) {
            *made = gs_keep(to, sizeof(gs_node));
            if (*made == NULL)
                return GS_NO_HOST_MEMORY;
            **made = *node;
        }
        (*made)->src[i] = elsewhere(s, node, position, to);
        if ((*made)->src[i] == NULL)
            return GS_NO_HOST_MEMORY;
    }
    return GS_OK;
}

/* -- which kernels ------------------------------------------------------------------------------------------ */

/* Whether all strides are multiples of the element's size: then all elements are aligned if the first one is. */
static int strides_are_whole(const gs_node *t) {
    int size = gs_plain_size(t->layout.type);
    for (int d = 0; d < GS_MAX_DIMS && size > 1; d++)
        if (t->layout.nb[d] & (size - 1))
            return 0;
    return 1;
}

static int build_by_isa(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables) {
    if (node->op == GS_OP_MUL_MAT)
        return gs_build_mul_mat(node, position, to, tables);
    if (node->op == GS_OP_MUL_MAT_ID)
        return gs_build_mul_mat_id(node, position, to, tables);
    switch (gs_isa()) {
#if defined(__x86_64__)
    case GS_ISA_AVX512: return gs_build_avx512(node, position, to, tables);
    case GS_ISA_AVXVNNI:        /* only products have kernels of their own */
    case GS_ISA_AVX2: return gs_build_avx2(node, position, to, tables);
#endif
    default: return gs_build_portable(node, position, to, tables);
    }
}

int gs_build_node(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables) {
    int32_t before = to->n;
    gs_node *made;
    if (!gs_extents_fit(node) || !gs_types_fit(node, 0) || !strides_are_whole(node))
        return GS_UNSUPPORTED_OP;
    for (int i = 0; i < node->n_src; i++)
        if (node->src[i] != NULL && !strides_are_whole(node->src[i]))
            return GS_UNSUPPORTED_OP;
    if (gs_count(node->layout.ne) == 0 && node->op != GS_OP_SET_ROWS) /* to a table without rows every id is a fault */
        return GS_OK;
    int status = with_copies(node, position, to, &made);
    if (made != NULL)           /* a product of copies must not be computed before they are made */
        tables->product = NULL;
    if (status == GS_OK)
        status = build_by_isa(made != NULL ? made : node, position, to, tables);
    if (status == GS_OK && made != NULL && made->data != node->data)
        status = add_bytes(node, position, to, made->data, node->data, node->layout.nbytes);
    if (status != GS_OK)
        to->n = before;
    return status;
}
