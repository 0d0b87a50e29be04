/* ggml_sched/llama_cpp/hook/compute.c -- computes the allocated graph: for each split, copies its inputs and has its
 * backend run the nodes, with the client's callback if there is one.  See scheduler.h.
 *
 * Order.  A backend computes its splits in the order in which they were passed to it, perhaps after the call returned.
 * Before data is copied into a backend's memory, we wait until that backend no longer reads what was there; a copy
 * waits for its source, as ggml's copies do.  Where a plan lets a backend read another's memory without a copy
 * (gh_plan.waits), each split waits for all splits before it.
 */
#include "scheduler.h"


/* -- waiting ------------------------------------------------------------------------------------------------------- */

void gh_synchronize(gh_sched *s)
{
    for (int b = 0; b < s->n_backends; b++) {
        s->lib->backend_synchronize(s->backend[b]);
        s->busy[b] = false;
    }
}

/* Wait until a backend has finished all splits that use the present copy slot: for its event of this slot, or, if it
 * has no events, for all its work. */
static void wait_for(gh_sched *s, int b)
{
    if (s->event[b][s->cur_copy] != NULL) {
        s->lib->backend_event_synchronize(s->event[b][s->cur_copy]);
    } else {
        s->lib->backend_synchronize(s->backend[b]);
    }
}

/* Wait until no backend but b computes. */
static void wait_for_others(gh_sched *s, int b)
{
    for (int other = 0; other < s->n_backends; other++) {
        if (other != b && s->busy[other]) {
            wait_for(s, other);
            s->busy[other] = false;
        }
    }
}

/* -- splits -------------------------------------------------------------------------------------------------------- */

/* Whether copy c has memory of its own in each copy slot.  The copy of a weight has one memory for all slots: waiting
 * for the event of this slot is not enough then, because a compute with another slot may still read the copy. */
static bool has_several_copies(const gs_plan *v, int32_t c)
{
    for (int32_t k = 0; k < v->n_slots; k++) {
        if (v->slot_copy[k] == c) {
            return true;
        }
    }
    return false;
}

/* Copy input number `input` of the plan into the memory of the split's backend, once that backend is done with the
 * copy. */
static void copy_input(gh_sched *s, const gh_plan_entry *e, int32_t split, int32_t input)
{
    const gs_plan *v = &e->plan->view;
    const int32_t c = v->inputs[input], like = v->copy_like[c];
    const int b = v->split_backend[split], owner = v->assign[like] >= 0 ? v->assign[like] : s->n_backends - 1;
    gx_tensor *from = e->copies->copy[c].original, *to = &e->copies->copy[c].tensor;
    if (s->event[b][s->cur_copy] == NULL || !has_several_copies(v, c)) {
        s->lib->backend_synchronize(s->backend[b]);
    } else if (from->flags & GH_FLAG_INPUT) {
        s->lib->backend_event_synchronize(s->event[b][s->cur_copy]);
    } else {
        s->lib->backend_event_wait(s->backend[b], s->event[b][s->cur_copy]);
    }
    if (from->flags & GH_FLAG_INPUT) {
        /* Copy now: the client may write to the input as soon as the call returns. */
        s->lib->backend_tensor_copy(from, to);
        return;
    }
    if (!gh_copy_experts(s, e, split, input)) {
        s->lib->backend_tensor_copy_async(s->backend[owner], s->backend[b], from, to);
    }
}

/* Whether the client's callback, if there is one, wants the result of a node. */
static bool is_wanted(const gh_sched *s, gx_tensor *node)
{
    return s->callback != NULL && s->callback(node, true, s->callback_user);
}

/* Compute nodes first .. stop - 1 of a split; nothing if *stopped is true.  As in ggml, the client's callback is called
 * for each node and returns whether it wants the node's result.  Nodes up to the first wanted one are computed
 * together; then the callback is called with that result, and returns whether to go on: if not, *stopped becomes
 * true. */
static int run_range(gh_sched *s, int b, gh_part *part, int first, int stop, bool *stopped)
{
    gx_tensor **nodes = s->lib->graph_nodes(part);
    while (first < stop && !*stopped) {
        int end = s->callback != NULL ? first + 1 : stop, status;
        bool is_read = is_wanted(s, nodes[first]);
        gh_part some, *run = part;
        while (!is_read && end < stop) {
            is_read = is_wanted(s, nodes[end++]);
        }
        if (first > 0 || end < s->lib->graph_n_nodes(part)) {
            some = s->lib->graph_view(part, first, end);
            run = &some;
        }
        status = s->lib->backend_graph_compute_async(s->backend[b], run);
        if (status != GH_STATUS_SUCCESS) {
            return status;
        }
        if (s->callback != NULL) {
            s->lib->backend_synchronize(s->backend[b]);
            *stopped = is_read && !s->callback(nodes[end - 1], false, s->callback_user);
        }
        first = end;
    }
    return GH_STATUS_SUCCESS;
}

/* Compute node number `at` of a split, whose result belongs in another backend's memory (a write-back): the node is
 * computed in the memory of its copy, and copied to its own memory before any other split runs. */
static int run_through(gh_sched *s, int b, gh_part *part, int at, gx_tensor *copy, bool *stopped)
{
    gx_tensor *node = s->lib->graph_nodes(part)[at];
    void *const buffer = node->buffer, *const data = node->data, *const extra = node->extra;
    gh_part one = s->lib->graph_view(part, at, at + 1);
    const bool is_read = is_wanted(s, node);
    int status;
    node->buffer = copy->buffer;
    node->data = copy->data;
    node->extra = copy->extra;
    status = s->lib->backend_graph_compute_async(s->backend[b], &one);
    s->lib->backend_synchronize(s->backend[b]);
    node->buffer = buffer;
    node->data = data;
    node->extra = extra;
    if (status != GH_STATUS_SUCCESS) {
        return status;
    }
    s->lib->backend_tensor_copy(copy, node);
    *stopped = is_read && !s->callback(node, false, s->callback_user);
    return GH_STATUS_SUCCESS;
}

/* Compute the nodes of a split: those with a write-back one by one, the ranges between them at once. */
static int run_split(gh_sched *s, const gh_plan_entry *e, int32_t split)
{
    const gs_plan *v = &e->plan->view;
    const int b = v->split_backend[split], n = e->plan->split_at[split + 1] - e->plan->split_at[split];
    int first = 0, status = GH_STATUS_SUCCESS;
    bool stopped = false;
    for (int i = 0; v->n_write_backs > 0 && i < n && status == GH_STATUS_SUCCESS && !stopped; i++) {
        const int32_t position = e->plan->split_at[split] + i;
        for (int32_t k = 0; k < v->n_write_backs; k++) {
            if (e->plan->node[v->back_node[k]] == position) {
                status = run_range(s, b, &s->part[split], first, i, &stopped);
                if (status == GH_STATUS_SUCCESS && !stopped) {
                    status = run_through(s, b, &s->part[split], i, &e->copies->copy[v->back_copy[k]].tensor, &stopped);
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
    const gh_plan_entry *e = s->current;
    const gs_plan *v = &e->plan->view;
    int32_t input = 0;
    /* Backends may still be in the compute before, and read from each other what this compute overwrites. */
    if (e->plan->waits && s->cache->key.overlaps) {
        gh_synchronize(s);
    }
    for (int32_t i = 0; i < v->n_splits; i++) {
        const int b = v->split_backend[i];
        const int32_t begin = input;
        int status;
        if (e->plan->split_at[i] == e->plan->split_at[i + 1]) {
            input = v->split_inputs[i];
            continue;
        }
        if (e->plan->waits || v->split_inputs[i] == begin) {
            wait_for_others(s, b);
        }
        for (; input < v->split_inputs[i]; input++) {
            bool made = false;
            for (int32_t k = begin; k < input && !made; k++) {
                made = v->inputs[k] == v->inputs[input];
            }
            if (!made) {
                copy_input(s, e, i, input);
            }
        }
        status = run_split(s, e, i);
        s->busy[b] = true;
        if (status != GH_STATUS_SUCCESS) {
            return status;
        }
        if (s->event[b][s->cur_copy] != NULL) {
            s->lib->backend_event_record(s->event[b][s->cur_copy], s->backend[b]);
        }
    }
    return GH_STATUS_SUCCESS;
}
