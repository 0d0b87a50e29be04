/* build.c -- see build.h: overlap, tables, and which kernels are asked. */
#include "build.h"
#include "types.h"
#if __has_include("matmul.h")
#include "matmul.h"
#define HAVE_MATMUL 1
#endif

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

void gs_add_table(gs_tables *to, const gs_node *positions, const gs_node *factors, const int32_t *params, void *of) {
    if (to->n == GS_MAX_TABLES) {
        memmove(to->table, to->table + 1, (GS_MAX_TABLES - 1) * sizeof(gs_table));
        to->n--;
    }
    gs_table *t = &to->table[to->n++];
    t->positions = positions;
    t->factors = factors;
    memcpy(t->params, params, sizeof(t->params));
    t->of = of;
}

static int overlap(const gs_node *a, const gs_node *b) {
    const char *x = a->data, *y = b->data;
    return x < y + b->layout.nbytes && y < x + a->layout.nbytes;
}

void gs_forget_tables(gs_tables *in, const gs_node *node) {
    for (int32_t i = in->n - 1; i >= 0; i--) {
        const gs_table *t = &in->table[i];
        if (overlap(node, t->positions) || (t->factors != NULL && overlap(node, t->factors))) {
            memmove(&in->table[i], &in->table[i + 1], (size_t)(in->n - i - 1) * sizeof(gs_table));
            in->n--;
        }
    }
}

/* -- overlap ----------------------------------------------------------------------------------------------- */

/* Bit i: source i, of the result's layout, may be the result. */
static uint32_t tolerated(int op) {
    switch (op) {
    case GS_OP_ADD: case GS_OP_SUB: case GS_OP_MUL: case GS_OP_DIV: case GS_OP_ADD1: case GS_OP_GLU:
        return 3;
    case GS_OP_SCALE: case GS_OP_SQR: case GS_OP_SQRT: case GS_OP_LOG: case GS_OP_CLAMP: case GS_OP_UNARY:
    case GS_OP_RMS_NORM: case GS_OP_NORM: case GS_OP_L2_NORM: case GS_OP_SOFT_MAX: case GS_OP_ROPE:
    case GS_OP_DIAG_MASK_INF: case GS_OP_DIAG_MASK_ZERO: case GS_OP_ADD_ID: case GS_OP_CPY: case GS_OP_DUP:
    case GS_OP_CONT: case GS_OP_REPEAT:
        return 1;
    default:
        return 0;
    }
}

/* Bit i: source i is the tensor that is written into, and is not read. */
static uint32_t written(int op) {
    return op == GS_OP_CPY ? 2 : op == GS_OP_SET_ROWS ? 4 : 0;
}

static int clashes(const gs_node *node, int i) {
    const gs_node *s = node->src[i];
    if (s == NULL || written(node->op) >> i & 1 || !overlap(node, s))
        return 0;
    int exact = s->data == node->data && s->layout.type == node->layout.type
                && memcmp(s->layout.ne, node->layout.ne, sizeof(s->layout.ne)) == 0
                && memcmp(s->layout.nb, node->layout.nb, sizeof(s->layout.nb)) == 0;
    return !(exact && tolerated(node->op) >> i & 1);
}

#define COPY_PART (1 << 18)

/* Brings arg[2] bytes from arg[0] to arg[1]. */
static void run_bytes(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    (void)shared; (void)scratch; (void)fault;
    int64_t first = (int64_t)part * COPY_PART, rest = call->arg[2] - first;
    memcpy((char *)call->arg[1] + first, (const char *)call->arg[0] + first,
           (size_t)(rest < COPY_PART ? rest : COPY_PART));
}

/* The node with copies for sources that clash; their calls are appended. */
static int with_copies(const gs_node **node, int32_t position, gs_calls *to) {
    const gs_node *given = *node;
    gs_node *made = NULL;
    for (int i = 0; i < given->n_src && i < GS_MAX_SRC; i++) {
        if (!clashes(given, i))
            continue;
        if (made == NULL) {
            made = gs_keep(to, sizeof(gs_node));
            if (made == NULL)
                return GS_NO_HOST_MEMORY;
            *made = *given;
        }
        int64_t size = given->src[i]->layout.nbytes;
        gs_node *copy = gs_keep(to, sizeof(gs_node));
        void *memory = gs_keep(to, size);
        if (copy == NULL || memory == NULL)
            return GS_NO_HOST_MEMORY;
        *copy = *given->src[i];
        copy->data = memory;
        made->src[i] = copy;
        gs_call call = {.run = run_bytes, .node = made, .position = position};
        call.n_parts = (int32_t)((size + COPY_PART - 1) / COPY_PART);
        call.arg[0] = (int64_t)given->src[i]->data;
        call.arg[1] = (int64_t)memory;
        call.arg[2] = size;
        if (gs_add_call(to, &call) != GS_OK)
            return GS_NO_HOST_MEMORY;
    }
    if (made != NULL)
        *node = made;
    return GS_OK;
}

/* -- which kernels ------------------------------------------------------------------------------------------ */

/* Whether elements lie at multiples of their size, as compiled code may assume. */
static int is_aligned(const gs_node *t) {
    int size = gs_plain_size(t->layout.type);
    size = size ? size : 1;
    if (t->layout.nbytes == 0)
        return 1;
    for (int d = 0; d < GS_MAX_DIMS; d++)
        if (t->layout.nb[d] % size)
            return 0;
    return (uintptr_t)t->data % (uintptr_t)size == 0;
}

static int build_by_isa(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables) {
#if HAVE_MATMUL
    if (node->op == GS_OP_MUL_MAT)
        return gs_build_mul_mat(node, position, to);
    if (node->op == GS_OP_MUL_MAT_ID)
        return gs_build_mul_mat_id(node, position, to);
#endif
    switch (gs_isa()) {
#if defined(__x86_64__)
    case GS_ISA_AVX512: return gs_build_avx512(node, position, to, tables);
    case GS_ISA_AVX2: return gs_build_avx2(node, position, to, tables);
#endif
    default: return gs_build_portable(node, position, to, tables);
    }
}

int gs_build_node(const gs_node *node, int32_t position, gs_calls *to, gs_tables *tables) {
    int32_t before = to->n;
    if (!is_aligned(node))
        return GS_UNSUPPORTED_OP;
    for (int i = 0; i < node->n_src; i++)
        if (node->src[i] != NULL && !is_aligned(node->src[i]))
            return GS_UNSUPPORTED_OP;
    int status = with_copies(&node, position, to);
    if (status == GS_OK)
        status = build_by_isa(node, position, to, tables);
    if (status != GS_OK)
        to->n = before;
    return status;
}
