/* ggml_sched/llama_cpp/hook/sched_problem.c -- fills the planner's problem of a scheduler's graph: the client's
 * assignments, and what backends and buffers answer to queries.  See scheduler.h.
 *
 * Queries take time, so they are made only when a graph is planned or reuses a plan, or when its entry was made for the
 * owner before (registry.c); other cached graphs need none.
 */
#include "scheduler.h"

#include <stdio.h>

/* -- the client's assignments -------------------------------------------------------------------------------------- */

void gh_assignments_clear(gh_assignments *a)
{
    if (a->n > 0) {
        gs_index_reset(&a->index, a->room);
    }
    a->n = 0;
}

bool gh_assignments_set(gh_assignments *a, const gx_tensor *tensor, int32_t backend)
{
    int32_t *slot;
    if (a->n == a->room) {
        const int32_t room = a->room > 0 ? 2 * a->room : 32;
        if (!gh_grow(&a->tensor, sizeof *a->tensor, room) || !gh_grow(&a->backend, sizeof *a->backend, room)
            || !gs_index_reset(&a->index, room)) {
            return false;
        }
        a->room = room;
        for (int32_t i = 0; i < a->n; i++) {
            *gs_index_find(&a->index, a->tensor, sizeof *a->tensor, a->tensor[i]) = i + 1;
        }
    }
    slot = gs_index_find(&a->index, a->tensor, sizeof *a->tensor, tensor);
    if (*slot == 0) {
        a->tensor[a->n] = tensor;
        *slot = ++a->n;
    }
    a->backend[*slot - 1] = backend;
    return true;
}

int32_t gh_assignments_get(const gh_assignments *a, const gx_tensor *tensor)
{
    const int32_t *slot = a->n > 0 ? gs_index_find(&a->index, a->tensor, sizeof *a->tensor, tensor) : NULL;
    return slot != NULL && *slot != 0 ? a->backend[*slot - 1] : -1;
}

void gh_assignments_free(gh_assignments *a)
{
    free(a->tensor);
    free(a->backend);
    free(a->index.slot);
    memset(a, 0, sizeof *a);
}

/* -- demand -------------------------------------------------------------------------------------------------------- */

/* The id of tensor t; -1: it is not among `tensors`.  The search begins at `from`, where t mostly is: clients assign
 * tensors in the order of nodes. */
static int32_t id_of(const gh_signature *s, gx_tensor *const *tensors, const gx_tensor *t, int32_t from)
{
    for (int32_t k = 0; k < s->n; k++) {
        const int32_t id = from + k < s->n ? from + k : from + k - s->n;
        if (tensors[id] == t) {
            return id;
        }
    }
    return -1;
}

/* Whether the client assigned the same ids of an entry to the same backends.  On one backend assignments change
 * nothing. */
static bool same_demand(const void *owner, const gh_plan_entry *e, gx_tensor *const *tensors)
{
    const gh_sched *s = owner;
    const gh_assignments *a = &s->assignments;
    const int32_t *id = e->demand.value;
    if (s->n_backends == 1) {
        return true;
    }
    if (2 * a->n != e->demand.n || !gh_same(a->backend, id + a->n, a->n, sizeof *a->backend)) {
        return false;
    }
    for (int32_t i = 0; i < a->n; i++) {
        /* A tensor that was assigned and was not in the entry's graph must not be in this graph either. */
        if (id[i] >= 0 ? tensors[id[i]] != a->tensor[i] : id_of(&e->signature, tensors, a->tensor[i], 0) >= 0) {
            return false;
        }
    }
    return true;
}

static bool take_demand(const void *owner, gh_plan_entry *e)
{
    const gh_sched *s = owner;
    const gh_assignments *a = &s->assignments;
    gh_demand *demand = &e->demand;
    int32_t *id;
    if (!gh_make_room(&demand->value, sizeof *id, &demand->room, 2 * (int64_t)a->n)) {
        return false;
    }
    id = demand->value;
    demand->n = 2 * a->n;
    for (int32_t i = 0; i < a->n; i++) {
        id[i] = id_of(&e->signature, e->signature.tensor, a->tensor[i], i > 0 ? id[i - 1] + 1 : 0);
        id[a->n + i] = a->backend[i];
    }
    return true;
}

/* -- buffers ------------------------------------------------------------------------------------------------------- */

/* The different types of the buffers that hold a graph's resident tensors, and the first backend that reads each type:
 * tensors in such a buffer count as resident on that backend. */
typedef struct {
    void *buft[GH_MAX_BUFTS];
    int32_t resident[GH_MAX_BUFTS];
    int32_t n;
} buffer_types;

/* The index of a buffer type, which is added if it is new; -1: too many.  NULL stands for memory without a buffer,
 * which counts as resident on the last backend, the CPU. */
static int32_t intern_type(const gh_sched *s, buffer_types *types, void *buft)
{
    for (int32_t i = 0; i < types->n; i++) {
        if (types->buft[i] == buft) {
            return i;
        }
    }
    if (types->n == GH_MAX_BUFTS) {
        return -1;
    }
    types->buft[types->n] = buft;
    types->resident[types->n] = s->n_backends - 1;
    for (int b = 0; buft != NULL && b < s->n_backends; b++) {
        if (s->lib->backend_supports_buft(s->backend[b], buft)) {
            types->resident[types->n] = b;
            break;
        }
    }
    return types->n++;
}

/* Fill q->reads_buffer: which backends read each type of buffer. */
static void collect_readers(const gh_sched *s, gh_problem *q, const buffer_types *types)
{
    q->n_buffers = types->n;
    for (int32_t k = 0; k < types->n; k++) {
        for (int b = 0; b < s->n_backends; b++) {
            q->reads_buffer[b * types->n + k] = b == types->resident[k]
                                             || (types->buft[k] != NULL
                                                 && s->lib->backend_supports_buft(s->backend[b], types->buft[k]));
        }
    }
}

/* Fill the assignments of a problem, and for each tensor that has memory its backend, type of buffer and usage. */
static int collect_residents(const gh_sched *s, const gh_plan_entry *e, gh_problem *q, gs_error *error)
{
    const gh_plan *p = e->plan;
    buffer_types types = {.n = 0};
    for (int32_t id = 0; id < p->n_all; id++) {
        gx_tensor *t = id < p->n ? gh_entry_tensor(e, id) : NULL;
        q->assigned[id] = t == NULL || s->n_backends == 1 ? -1
                        : s->first != NULL ? s->first->view.assign[p->order[id]]
                                           : gh_assignments_get(&s->assignments, t);
        q->some_assigned |= q->assigned[id] >= 0;
        q->resident[id] = -1;
        q->buffer[id] = 0;
        q->usage[id] = GS_USAGE_ANY;
        if (t != NULL && p->role[id] == GH_ROLE_EXTERNAL) {
            void *buffer = t->buffer;
            void *buffer_type = buffer != NULL ? s->lib->backend_buffer_get_type(buffer) : NULL;
            const int32_t type = intern_type(s, &types, buffer_type);
            if (type < 0) {
                error->tensor = id;
                snprintf(error->message, sizeof error->message,
                         "the tensors of a graph lie in more than %d types of buffers: %.64s is in one more",
                         GH_MAX_BUFTS, t->name);
                return GS_BAD_ARGUMENT;
            }
            q->resident[id] = types.resident[type];
            q->buffer[id] = type;
            if (buffer != NULL && s->lib->backend_buffer_get_usage(buffer) == GH_USAGE_WEIGHTS) {
                q->usage[id] = GS_USAGE_WEIGHTS;
            }
        }
    }
    if (types.n == 0) {
        intern_type(s, &types, NULL);
    }
    collect_readers(s, q, &types);
    return GS_OK;
}

/* -- nodes --------------------------------------------------------------------------------------------------------- */

/* Ask every backend about every node: whether it computes it, and whether it offloads it (computes it although its
 * weights are in the host's memory). */
static void collect_answers(const gh_sched *s, const gh_plan_entry *e, gh_problem *q)
{
    const gh_plan *p = e->plan;
    const int32_t n = p->n_all, host = s->n_backends - 1;
    memset(q->supports, 1, (size_t)n * s->n_backends);
    memset(q->offloads, 0, (size_t)n * s->n_backends);
    for (int32_t id = 0; id < p->n; id++) {
        const int op = p->op[id];
        gx_tensor *t = gh_entry_tensor(e, id);
        if (t->op == 0 || op == GS_OP_NONE || gh_is_view_op(op)) {
            continue;
        }
        for (int b = 0; b < s->n_backends; b++) {
            const bool can = s->lib->backend_supports_op(s->backend[b], t);
            q->supports[(int64_t)b * n + id] = can;
            if (can && s->cache->key.offloads && b < host) {
                q->offloads[(int64_t)b * n + id] = s->lib->backend_offload_op(s->backend[b], t);
            }
        }
    }
}

/* Backends with the same buffer type, such as the CPU and BLAS, work in the same memory.  Assign a node that the client
 * assigned to one of them to the first of them that supports the node, as ggml does, so that the graph is not split
 * between them. */
static void join_assignments(const gh_sched *s, gh_problem *q)
{
    for (int32_t id = 0; id < q->n; id++) {
        const int32_t assigned = q->assigned[id];
        for (int32_t b = 0; b < assigned; b++) {
            if (s->buft[b] == s->buft[assigned] && q->supports[(int64_t)b * q->n + id]) {
                q->assigned[id] = b;
                break;
            }
        }
    }
}

static int collect(void *owner, const gh_plan_entry *e, gh_problem *q, gs_error *error)
{
    const gh_sched *s = owner;
    const gh_plan *p = e->plan;
    int status;
    if (!gh_problem_make_room(q, p->n_all, s->n_backends, true)) {
        return GS_NO_HOST_MEMORY;
    }
    if (p->n_all == 0) {
        return GS_OK;
    }
    status = collect_residents(s, e, q, error);
    if (status == GS_OK) {
        collect_answers(s, e, q);
        join_assignments(s, q);
        gh_collect_sizes(s->cache, e, q);
    }
    return status;
}

const gh_cache_level gh_sched_level = {.same_demand = same_demand, .take_demand = take_demand, .collect = collect,
                                       .reorder = gh_sched_reorder, .plan_reordered = gh_sched_plan_reordered};
