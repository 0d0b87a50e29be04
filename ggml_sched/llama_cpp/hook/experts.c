/* ggml_sched/llama_cpp/hook/experts.c -- copies, of a weight in the host's memory that holds the matrices of many
 * experts (MUL_MAT_ID), only those of the experts that this batch uses, as ggml's scheduler does.  See scheduler.h.
 *
 * The ids of the used experts are read before the split begins; where that is impossible, all experts are copied.
 */
#include "scheduler.h"

#define GH_MAX_PADDING 512 /* bytes after an expert that kernels may read: they are copied, too */

/* The MUL_MAT_ID node of a split that reads copy c as the matrices of its experts, if no other node reads that copy;
 * else NULL.  Another node, perhaps of a later split, could read experts that were not copied. */
static const gx_tensor *mixture_of(const gh_sched *s, const gh_plan_entry *e, int32_t split, int32_t c)
{
    const gh_copied *copy = &e->copies->copy[c];
    gx_tensor *const *nodes = s->lib->graph_nodes((void *)&s->part[split]);
    const int32_t n = e->plan->split_at[split + 1] - e->plan->split_at[split];
    for (int32_t i = 0; copy->n_reads == 1 && i < n; i++) {
        if (nodes[i]->src[0] == &copy->tensor && gh_op(s->lib, nodes[i]) == GS_OP_MUL_MAT_ID) {
            return nodes[i];
        }
    }
    return NULL;
}

/* The tensor to read the expert ids from before a split begins, and in *backend the backend that has it: `ids` itself,
 * or the original if `ids` is a copy that this split has yet to make.  NULL: the ids are computed in the split itself,
 * or cannot be found. */
static const gx_tensor *readable_ids(const gh_sched *s, const gh_plan_entry *e, int32_t split, int32_t input,
                                     gx_tensor *ids, int *backend)
{
    const gs_plan *v = &e->plan->view;
    const gh_copied *copy = gh_copy_of(ids);
    int32_t id;
    if (copy != NULL) {
        const int32_t c = (int32_t)(copy - e->copies->copy);
        *backend = v->split_backend[split];
        if (c >= v->n_copies) {
            return NULL;
        }
        for (int32_t i = input + 1; i < v->split_inputs[split]; i++) {
            if (v->inputs[i] == c) {
                *backend = v->assign[v->copy_like[c]] >= 0 ? v->assign[v->copy_like[c]] : s->n_backends - 1;
                return copy->original;
            }
        }
        return ids;
    }
    id = gh_entry_id(e, ids);
    if (id < 0 || v->assign[id] < 0) {
        return NULL;
    }
    *backend = v->assign[id];
    if (e->plan->arrays.view_src[id] >= 0) {
        id = e->plan->arrays.view_src[id];
    }
    return (id < e->plan->n ? e->plan->node[id] : GH_NOWHERE) < e->plan->split_at[split] ? ids : NULL;
}

/* Set s->is_used[i] for each expert i that is in `ids`.  False for an invalid id, or without memory. */
static bool mark_used(gh_sched *s, const gx_tensor *ids, int backend, int64_t n_experts)
{
    const size_t nbytes = s->lib->nbytes(ids);
    if (!gh_make_room(&s->ids, 1, &s->room_ids, (int64_t)nbytes)
        || !gh_make_room(&s->is_used, 1, &s->room_experts, n_experts)) {
        return false;
    }
    s->lib->backend_tensor_get_async(s->backend[backend], ids, s->ids, 0, nbytes);
    s->lib->backend_synchronize(s->backend[backend]);
    memset(s->is_used, 0, (size_t)n_experts);
    for (int64_t row = 0; row < ids->ne[1]; row++) {
        for (int64_t i = 0; i < ids->ne[0]; i++) {
            int32_t id;
            memcpy(&id, (const char *)s->ids + (size_t)row * ids->nb[1] + (size_t)i * ids->nb[0], sizeof id);
            if (id < 0 || id >= n_experts) {
                return false;
            }
            s->is_used[id] = 1;
        }
    }
    return true;
}

/* Copies each run of consecutive used experts at once. */
bool gh_copy_experts(gh_sched *s, const gh_plan_entry *e, int32_t split, int32_t input)
{
    const int32_t c = e->plan->view.inputs[input];
    gx_tensor *from = e->copies->copy[c].original, *to = &e->copies->copy[c].tensor;
    const int b = e->plan->view.split_backend[split];
    const gx_tensor *mixture, *ids;
    int64_t first = 0, n = from->ne[2];
    int ids_backend;
    if (from->buffer == NULL || n < 2 || s->lib->backend_buffer_get_usage(from->buffer) != GH_USAGE_WEIGHTS
        || !s->lib->backend_buffer_is_host(from->buffer) || (mixture = mixture_of(s, e, split, c)) == NULL
        || mixture->src[2] == NULL) {
        return false;
    }
    ids = readable_ids(s, e, split, input, mixture->src[2], &ids_backend);
    if (ids == NULL || !mark_used(s, ids, ids_backend, n)) {
        return false;
    }
    while (first < n) {
        int64_t stop = first + 1;
        size_t padding = 0;
        if (!s->is_used[first]) {
            first++;
            continue;
        }
        while (stop < n && s->is_used[stop]) {
            stop++;
        }
        if (stop < n) {
            padding = from->nb[2] < GH_MAX_PADDING ? from->nb[2] : GH_MAX_PADDING;
        }
        s->lib->backend_tensor_set_async(s->backend[b], to, (const char *)from->data + (size_t)first * from->nb[2],
                                        (size_t)first * from->nb[2], (size_t)(stop - first) * from->nb[2] + padding);
        first = stop;
    }
    return true;
}
