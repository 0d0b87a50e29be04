/* sort.h -- ARGSORT, TOP_K, ARGMAX: indices of the elements of a row, sorted by value, or of the largest.
 *
 * Included once for each instruction set.  Elements of equal value keep the order of their indices; NaNs come last, in
 * ascending and in descending order.
 */

/* Whether x is sorted before y. */
INLINE int before(float x, float y, int descending) {
    return (descending ? x > y : x < y) || (y != y && x == x);
}

/* Sorts the indices 0 .. n - 1 of a row: 16 at a time by insertion, then by merging.  `order` and `spare` have room for
 * n indices each; returns the one of the two that holds the result. */
static int32_t *sort_row(const char *x, int64_t stride, int64_t n, int descending, int32_t *order, int32_t *spare) {
#define AT(i) (*(const float *)(x + (i) * stride))
    for (int64_t first = 0; first < n; first += 16) {
        int64_t end = first + 16 < n ? first + 16 : n;
        for (int64_t i = first; i < end; i++) {
            float value = AT(i);
            int64_t k = i;
            for (; k > first && before(value, AT(order[k - 1]), descending); k--)
                order[k] = order[k - 1];
            order[k] = (int32_t)i;
        }
    }
    for (int64_t run = 16; run < n; run *= 2) {
        for (int64_t first = 0; first < n; first += 2 * run) {
            int64_t a = first, middle = first + run < n ? first + run : n;
            int64_t b = middle, end = first + 2 * run < n ? first + 2 * run : n;
            for (int64_t k = first; k < end; k++)
                spare[k] = b < end && (a == middle || before(AT(order[b]), AT(order[a]), descending))
                           ? order[b++] : order[a++];
        }
        int32_t *t = order;
        order = spare;
        spare = t;
    }
    return order;
#undef AT
}

static void run_sort(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_node *node = call->node, *a = node->src[0];
    int64_t n = a->layout.ne[0], kept = node->layout.ne[0];
    int descending = node->op == GS_OP_TOP_K || node->params[0] != 0;
    int32_t *order = (int32_t *)scratch;
    for (int64_t r = first_unit(call, part); r < end_unit(call, part); r++) {
        where w = row_at(node->layout.ne, r);
        int32_t *sorted = sort_row(row_of(a, w), a->layout.nb[0], n, descending, order, order + n);
        move_units((const char *)sorted, 4, row_of(node, w), node->layout.nb[0], kept, 4);
    }
}

static int build_sort(const gs_node *node, int32_t position, gs_calls *to) {
    int64_t n = node->src[0]->layout.ne[0];
    if (n > INT32_MAX / 16)
        return GS_UNSUPPORTED_OP;
    return add_rows(node, position, to, run_sort, n, 2 * n, ROW_WORK / 16);
}

static void run_argmax(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    const gs_node *node = call->node, *a = node->src[0];
    for (int64_t r = first_unit(call, part); r < end_unit(call, part); r++) {
        const char *x = (const char *)a->data + r * a->layout.nb[1];
        float top = *(const float *)x;
        int64_t at = 0;
        for (int64_t i = 1; i < a->layout.ne[0] && top == top; i++) {
            float value = *(const float *)(x + i * a->layout.nb[0]);
            if (value > top || value != value) {
                top = value;
                at = i;
            }
        }
        *(int32_t *)((char *)node->data + r * node->layout.nb[0]) = (int32_t)at;
    }
}

static int build_argmax(const gs_node *node, int32_t position, gs_calls *to) {
    const int64_t *ne = node->src[0]->layout.ne;
    if (ne[0] > INT32_MAX)
        return GS_UNSUPPORTED_OP;
    gs_call call = call_over(node, position, run_argmax, ne[1], ne[0], ROW_WORK);
    return gs_add_call(to, &call);
}
