/* ggml_sched/llama_cpp/compute.c -- computing the graph that is allocated: copies, splits, what goes back, callbacks.
 *
 * Order.  A backend works through what it was given in order.  Before something is copied into a backend's memory,
 * that backend is done with what it was given; a copy waits for its source as ggml's copies do.  Where a plan lets one
 * backend read another's memory, each split waits for all that came before it.  See scheduler.h.
 */
#include "scheduler.h"

#include <stdlib.h>
#include <string.h>

#define GH_MAX_PADDING 512 /* bytes behind the last expert that kernels may look at */

/* -- waiting -------------------------------------------------------------------------------------------------------- */

void gh_synchronize(gh_sched *s)
{
    for (int b = 0; b < s->n_backends; b++) {
        s->rt->backend_synchronize(s->backend[b]);
        s->dirty[b] = false;
    }
}

/* The host waits until a backend is done with what it was given in this place. */
static void wait_for(gh_sched *s, int b)
{
    if (s->event[b][s->place] != NULL) {
        s->rt->backend_event_synchronize(s->event[b][s->place]);
    } else {
        s->rt->backend_synchronize(s->backend[b]);
    }
}

static void wait_for_others(gh_sched *s, int b)
{
    for (int other = 0; other < s->n_backends; other++) {
        if (other != b && s->dirty[other]) {
            wait_for(s, other);
            s->dirty[other] = false;
        }
    }
}

/* -- experts -------------------------------------------------------------------------------------------------------- */

static int copy_index(const gh_sched *s, const gx_tensor *t)
{
    return t >= s->copy && t < s->copy + s->n_copy ? (int)(t - s->copy) : -1;
}

/* The one mixture of a split that reads copy c, as its experts, and nothing else does; NULL. */
static const gx_tensor *mixture_of(const gh_sched *s, const gh_prepared *p, int32_t split, int32_t c)
{
    const gx_tensor *found = NULL;
    for (int32_t i = p->cut[split]; i < p->cut[split + 1]; i++) {
        const gx_tensor *node = p->ordered[i];
        for (int k = 0; k < GS_MAX_SRC; k++) {
            if (node->src[k] != &s->copy[c]) {
                continue;
            }
            if (found != NULL || k != 0 || gh_op(s->lib, node) != GS_OP_MUL_MAT_ID) {
                return NULL;
            }
            found = node;
        }
    }
    return found;
}

/* Where the ids of experts can be read before a split begins, and of which backend; NULL where they cannot. */
static const gx_tensor *readable_ids(const gh_sched *s, const gh_prepared *p, int32_t split, int32_t input,
                                     const gx_tensor *ids, int *backend)
{
    const gs_plan_arrays *v = &p->view;
    const int c = copy_index(s, ids);
    int32_t id;
    if (c >= 0) {
        *backend = v->split_backend[split];
        if (c >= v->n_copies) {
            return NULL;
        }
        for (int32_t i = input + 1; i < v->split_inputs[split]; i++) {
            if (v->inputs[i] == c) {
                *backend = v->assign[v->copy_like[c]] >= 0 ? v->assign[v->copy_like[c]] : s->n_backends - 1;
                return s->copy_of[c];
            }
        }
        return ids;
    }
    id = gh_reading_id(&p->reading, ids);
    if (id < 0 || v->assign[id] < 0) {
        return NULL;
    }
    *backend = v->assign[id];
    if (p->reading.item[id].root >= 0) {
        id = p->reading.item[id].root;
    }
    return p->reading.item[id].node < p->cut[split] ? ids : NULL;
}

/* Mark the experts that ids name; false for one that there is not, or without memory. */
static bool mark_used(gh_sched *s, const gx_tensor *ids, int backend, int64_t n_experts)
{
    const size_t nbytes = s->lib->nbytes(ids);
    if (nbytes > s->room_ids) {
        if (!gh_grow(&s->ids, 1, (int64_t)nbytes)) {
            return false;
        }
        s->room_ids = nbytes;
    }
    if ((size_t)n_experts > s->room_experts) {
        if (!gh_grow(&s->is_used, 1, n_experts)) {
            return false;
        }
        s->room_experts = (size_t)n_experts;
    }
    s->rt->backend_tensor_get_async(s->backend[backend], ids, s->ids, 0, nbytes);
    s->rt->backend_synchronize(s->backend[backend]);
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

/* Bring only the experts that a mixture will use, runs of them at once.  False: copy everything. */
static bool copy_experts(gh_sched *s, const gh_prepared *p, int32_t split, int32_t input)
{
    const int32_t c = p->view.inputs[input];
    gx_tensor *from = s->copy_of[c], *to = &s->copy[c];
    const int b = p->view.split_backend[split];
    const gx_tensor *mixture, *ids;
    int64_t first = 0, n = from->ne[2];
    int ids_backend;
    if (from->buffer == NULL || n < 2 || s->rt->backend_buffer_get_usage(from->buffer) != GH_USAGE_WEIGHTS
        || !s->rt->backend_buffer_is_host(from->buffer) || (mixture = mixture_of(s, p, split, c)) == NULL
        || mixture->src[2] == NULL) {
        return false;
    }
    ids = readable_ids(s, p, split, input, mixture->src[2], &ids_backend);
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
        s->rt->backend_tensor_set_async(s->backend[b], to, (const char *)from->data + (size_t)first * from->nb[2],
                                        (size_t)first * from->nb[2], (size_t)(stop - first) * from->nb[2] + padding);
        first = stop;
    }
    return true;
}

/* -- splits --------------------------------------------------------------------------------------------------------- */

static void bring(gh_sched *s, const gh_prepared *p, int32_t split, int32_t input)
{
    const gs_plan_arrays *v = &p->view;
    const int32_t c = v->inputs[input], like = v->copy_like[c];
    const int b = v->split_backend[split], owner = v->assign[like] >= 0 ? v->assign[like] : s->n_backends - 1;
    gx_tensor *from = s->copy_of[c], *to = &s->copy[c];
    if (from->flags & GH_FLAG_INPUT) {
        /* At once: the client may write to it as soon as the call has returned. */
        wait_for(s, b);
        s->rt->backend_tensor_copy(from, to);
        return;
    }
    if (s->event[b][s->place] != NULL) {
        s->rt->backend_event_wait(s->backend[b], s->event[b][s->place]);
    } else {
        s->rt->backend_synchronize(s->backend[b]);
    }
    if (!copy_experts(s, p, split, input)) {
        s->rt->backend_tensor_copy_async(s->backend[owner], s->backend[b], from, to);
    }
}

/* Compute the nodes first .. stop - 1 of a part, asking the callback as ggml does: once for each node whether it is
 * wanted, and once more for those that are.  *stopped: it wants no more of this split. */
static int run_nodes(gh_sched *s, int b, gh_part *part, int first, int stop, bool *stopped)
{
    gx_tensor **nodes = s->lib->graph_nodes(part);
    for (int i = first; i < stop && !*stopped; i++) {
        bool wanted = s->callback(nodes[i], true, s->callback_user);
        const int from = i;
        gh_part some;
        int status;
        while (!wanted && i < stop - 1) {
            wanted = s->callback(nodes[++i], true, s->callback_user);
        }
        some = s->rt->graph_view(part, from, i + 1);
        status = s->rt->backend_graph_compute_async(s->backend[b], &some);
        if (status != GH_STATUS_SUCCESS) {
            return status;
        }
        s->rt->backend_synchronize(s->backend[b]);
        *stopped = wanted && !s->callback(nodes[i], false, s->callback_user);
    }
    return GH_STATUS_SUCCESS;
}

static int run_range(gh_sched *s, int b, gh_part *part, int first, int stop, bool *stopped)
{
    gh_part some;
    if (first >= stop || *stopped) {
        return GH_STATUS_SUCCESS;
    }
    if (s->callback != NULL) {
        return run_nodes(s, b, part, first, stop, stopped);
    }
    if (first == 0 && stop == s->lib->graph_n_nodes(part)) {
        return s->rt->backend_graph_compute_async(s->backend[b], part);
    }
    some = s->rt->graph_view(part, first, stop);
    return s->rt->backend_graph_compute_async(s->backend[b], &some);
}

/* A node that writes through a copy into memory of another backend: it is computed with the copy's memory as its own,
 * and the copy goes back before anybody else runs. */
static int run_through(gh_sched *s, int b, gh_part *part, int at, gx_tensor *copy, bool *stopped)
{
    gx_tensor *node = s->lib->graph_nodes(part)[at];
    void *const buffer = node->buffer, *const data = node->data, *const extra = node->extra;
    gh_part one = s->rt->graph_view(part, at, at + 1);
    bool wanted = s->callback != NULL && s->callback(node, true, s->callback_user);
    int status;
    node->buffer = copy->buffer;
    node->data = copy->data;
    node->extra = copy->extra;
    status = s->rt->backend_graph_compute_async(s->backend[b], &one);
    s->rt->backend_synchronize(s->backend[b]);
    node->buffer = buffer;
    node->data = data;
    node->extra = extra;
    if (status != GH_STATUS_SUCCESS) {
        return status;
    }
    s->rt->backend_tensor_copy(copy, node);
    *stopped = wanted && !s->callback(node, false, s->callback_user);
    return GH_STATUS_SUCCESS;
}

static int run_split(gh_sched *s, const gh_prepared *p, int32_t split)
{
    const gs_plan_arrays *v = &p->view;
    const int b = v->split_backend[split], n = p->cut[split + 1] - p->cut[split];
    int first = 0, status = GH_STATUS_SUCCESS;
    bool stopped = false;
    for (int i = 0; v->n_write_backs > 0 && i < n && status == GH_STATUS_SUCCESS && !stopped; i++) {
        const int32_t id = gh_reading_id(&p->reading, p->ordered[p->cut[split] + i]);
        for (int32_t k = 0; k < v->n_write_backs; k++) {
            if (v->back_node[k] == id) {
                status = run_range(s, b, &s->part[split], first, i, &stopped);
                if (status == GH_STATUS_SUCCESS && !stopped) {
                    status = run_through(s, b, &s->part[split], i, &s->copy[v->back_copy[k]], &stopped);
                }
                first = i + 1;
                break;
            }
        }
    }
    return status == GH_STATUS_SUCCESS ? run_range(s, b, &s->part[split], first, n, &stopped) : status;
}

int gh_compute(gh_sched *s)
{
    const gh_prepared *p = s->now;
    const gs_plan_arrays *v = &p->view;
    int32_t input = 0;
    /* What the last compute's backends read of each other must be done before it is written anew. */
    if (p->waits && s->overlaps) {
        gh_synchronize(s);
    }
    for (int32_t i = 0; i < v->n_splits; i++) {
        const int b = v->split_backend[i];
        const int32_t begin = input;
        int status;
        if (p->cut[i] == p->cut[i + 1]) {
            input = v->split_inputs[i];
            continue;
        }
        if (p->waits || v->split_inputs[i] == begin) {
            wait_for_others(s, b);
        }
        for (; input < v->split_inputs[i]; input++) {
            bool made = false;
            for (int32_t k = begin; k < input && !made; k++) {
                made = v->inputs[k] == v->inputs[input];
            }
            if (!made) {
                bring(s, p, i, input);
            }
        }
        status = run_split(s, p, i);
        s->dirty[b] = true;
        if (status != GH_STATUS_SUCCESS) {
            return status;
        }
        if (s->event[b][s->place] != NULL) {
            s->rt->backend_event_record(s->event[b][s->place], s->backend[b]);
        }
    }
    return GH_STATUS_SUCCESS;
}
