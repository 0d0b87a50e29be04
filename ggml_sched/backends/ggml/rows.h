/* ggml_sched/backends/ggml/rows.h -- row ids that are checked, and kernels that sort rows.
 *
 * An id that names no row would make ggml abort.  gx_order and gx_argmax compute ARGSORT, TOP_K and ARGMAX as CUSTOM
 * nodes of a ggml graph, in place of ggml's kernels: ggml's sort reads outside its row if there are NaNs, and neither
 * its sort nor its ARGMAX defines which of several elements of equal value comes first.
 */
#ifndef GGML_SCHED_BACKENDS_GGML_ROWS_H
#define GGML_SCHED_BACKENDS_GGML_ROWS_H

#include "abi.h"
#include "ggml_sched/graph.h"

/* A tensor of row ids that a node of a split reads. */
typedef struct gx_ids {
    const gs_layout *layout;
    const char *data;
    int64_t n_rows;         /* valid ids are 0 .. n_rows - 1                        */
    int64_t node;           /* index in GraphPlan.table of the node that reads them */
    int64_t tensor;         /* index in GraphPlan.table of this tensor              */
} gx_ids;

/* Whether element a of a row is sorted before element b: NaNs last, equal values by index. */
static inline int gx_before(const float *row, int32_t a, int32_t b, int descending)
{
    const float x = row[a], y = row[b];
    if (x != x || y != y) {
        return (x == x) != (y == y) ? x == x : a < b;
    }
    if (x != y) {
        return descending ? x > y : x < y;
    }
    return a < b;
}

/* Heapsort's sift: moves order[at] down until the heap below it is in order again.  In this heap of n indices each
 * index is sorted after its children, so the top is the one sorted last. */
static void gx_sift(int32_t *order, int64_t at, int64_t n, const float *row, int descending)
{
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= n) {
            return;
        }
        if (child + 1 < n && gx_before(row, order[child], order[child + 1], descending)) {
            child++;
        }
        if (!gx_before(row, order[at], order[child], descending)) {
            return;
        }
        const int32_t swapped = order[at];
        order[at] = order[child];
        order[child] = swapped;
        at = child;
    }
}

/* Writes to order[0 .. k) the first k of the indices that sort row[0 .. n).  A heap keeps the first k so far. */
static void gx_order_row(const float *row, int64_t n, int32_t *order, int64_t k, int descending)
{
    for (int64_t i = 0; i < k; i++) {
        order[i] = (int32_t)i;
    }
    for (int64_t i = k / 2 - 1; i >= 0; i--) {
        gx_sift(order, i, k, row, descending);
    }
    for (int64_t i = k; i < n; i++) {
        if (gx_before(row, (int32_t)i, order[0], descending)) {
            order[0] = (int32_t)i;
            gx_sift(order, 0, k, row, descending);
        }
    }
    for (int64_t end = k - 1; end > 0; end--) {
        const int32_t last = order[0];
        order[0] = order[end];
        order[end] = last;
        gx_sift(order, 0, end, row, descending);
    }
}

/* ARGSORT and TOP_K on thread ith of nth: sorts rows ith, ith + nth, .. of the source (f32, elements side by side) to
 * indices in dst (i32); `user` not NULL: descending. */
static void gx_order(gx_tensor *dst, int ith, int nth, void *user)
{
    const gx_tensor *src = dst->src[0];
    const int64_t n_rows = dst->ne[1] * dst->ne[2] * dst->ne[3];
    for (int64_t r = ith; r < n_rows; r += nth) {
        const int64_t i1 = r % dst->ne[1], i2 = r / dst->ne[1] % dst->ne[2], i3 = r / dst->ne[1] / dst->ne[2];
        const char *from = (const char *)src->data + i1 * src->nb[1] + i2 * src->nb[2] + i3 * src->nb[3];
        char *to = (char *)dst->data + i1 * dst->nb[1] + i2 * dst->nb[2] + i3 * dst->nb[3];
        gx_order_row((const float *)from, src->ne[0], (int32_t *)to, dst->ne[0], user != NULL);
    }
}

/* ARGMAX on thread ith of nth: the index of the largest element of each row, the first of equal values. */
static void gx_argmax(gx_tensor *dst, int ith, int nth, void *user)
{
    const gx_tensor *src = dst->src[0];
    (void)user;
    for (int64_t r = ith; r < dst->ne[0]; r += nth) {
        const float *row = (const float *)((const char *)src->data + r * src->nb[1]);
        int32_t best = 0;
        for (int64_t i = 1; i < src->ne[0]; i++) {
            /* A NaN counts as larger than all numbers, as in NumPy. */
            if (row[best] == row[best] && (row[i] > row[best] || row[i] != row[i])) {
                best = (int32_t)i;
            }
        }
        ((int32_t *)dst->data)[r] = best;
    }
}

#endif
